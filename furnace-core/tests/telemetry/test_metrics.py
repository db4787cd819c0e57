"""Counters of a model."""

from __future__ import annotations

from typing import get_args

from furnace.contracts import FinishReason, Usage
from furnace.telemetry import FinishedCounts, LlmMetrics, Outcome


def test_every_finish_reason_is_an_outcome_with_a_counter():
    outcomes = set(get_args(Outcome))
    assert {reason.value for reason in FinishReason} <= outcomes
    assert set(FinishedCounts.__struct_fields__) == outcomes


def test_a_request_is_running_between_its_admission_and_its_end():
    metrics = LlmMetrics()
    metrics.admit()
    assert (metrics.requests, metrics.running) == (1, 1)
    metrics.first_token(0.5)
    metrics.end("cancelled", Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=4), 1.5)
    assert (metrics.requests, metrics.running, metrics.finished.cancelled) == (1, 0, 1)
    assert (metrics.prompt_tokens, metrics.completion_tokens, metrics.cached_tokens) == (5, 2, 4)
    assert (metrics.ttft_count, metrics.ttft_seconds, metrics.request_seconds) == (1, 0.5, 1.5)


def test_the_parts_add_up():
    metrics = LlmMetrics()
    for outcome in get_args(Outcome):
        metrics.admit()
        metrics.end(outcome, Usage(), 0)
    metrics.reject()
    metrics.admit()
    assert metrics.requests == metrics.rejected + metrics.running + metrics.finished.total == 8


def test_a_snapshot_does_not_change():
    metrics = LlmMetrics()
    before = metrics.snapshot()
    metrics.admit()
    metrics.end("stop", Usage(), 0)
    assert (before.requests, before.finished.stop) == (0, 0)
    assert metrics.snapshot() == metrics
