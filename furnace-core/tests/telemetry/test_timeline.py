"""What is measured of one request, with a clock that the test sets."""

from __future__ import annotations

import pytest

from furnace.contracts import Finished, FinishReason, Reasoning, Started, Text, Usage
from furnace.telemetry import LlmMetrics, timeline
from furnace.telemetry.timeline import Latencies, Timeline


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timeline, "perf_counter", clock)
    return clock


def begin(clock, *, choices=1, waited=0.5):
    """A request that was admitted ``waited`` seconds after it came in."""
    latencies, metrics = Latencies(), LlmMetrics()
    metrics.admit()
    arrived = clock.now
    clock.now += waited
    line = Timeline(latencies, metrics, arrived=arrived, choices=choices, usage=Usage, span=None)
    return line, latencies, metrics


def test_each_phase_is_measured_from_the_end_of_the_one_before(clock):
    line, latencies, metrics = begin(clock)
    clock.now += 2
    line.take(0, [Started(3)])
    clock.now += 4
    line.take(0, [Text("a", [1])])
    for _ in range(2):
        clock.now += 0.25
        line.take(0, [Text("b", [1])])
    clock.now += 0.5
    line.take(0, [Finished(FinishReason.STOP, Usage(3, 3))])
    line.end("stop", Usage(3, 3))

    assert latencies.queue.sum == 2
    assert latencies.prefill.sum == 4
    assert latencies.first_token.sum == 6.5 == metrics.ttft_seconds
    assert (latencies.inter_token.count, latencies.inter_token.sum) == (2, 0.5)
    assert latencies.decode.sum == 1
    assert latencies.per_token.sum == 0.5
    assert latencies.duration[""].sum == 7.5 == metrics.request_seconds
    assert (latencies.prompt_tokens.sum, latencies.output_tokens.sum) == (3, 3)


def test_tokens_that_come_together_share_the_time_before_them(clock):
    line, latencies, _ = begin(clock)
    line.take(0, [Started(1), Text("a", [1])])
    clock.now += 0.4
    line.take(0, [Text("b", [1, 2]), Reasoning("c", [3]), Text("", [4])])
    bucket = latencies.inter_token.bounds.index(0.1)

    assert latencies.inter_token.sum == pytest.approx(0.4)
    assert latencies.inter_token.counts[bucket] == 4 or latencies.inter_token.counts[bucket + 1] == 4


def test_text_without_a_token_is_no_token(clock):
    line, latencies, _ = begin(clock)
    line.take(0, [Text("a", [1])])
    clock.now += 1
    line.take(0, [Text("rest of a character")])
    clock.now += 1
    line.take(0, [Text("b", [2])])

    assert (latencies.inter_token.count, latencies.inter_token.sum) == (1, 2)


def test_choices_have_gaps_of_their_own_and_one_first_token(clock):
    line, latencies, metrics = begin(clock, choices=2)
    line.take(0, [Started(1), Text("a", [1])])
    clock.now += 1
    line.take(1, [Started(1), Text("a", [1])])
    clock.now += 1
    line.take(0, [Text("b", [1])])
    line.take(1, [Text("b", [1])])
    line.end("length", Usage(1, 4))

    assert (latencies.inter_token.count, latencies.inter_token.sum) == (2, 3)
    assert latencies.queue.count == latencies.first_token.count == metrics.ttft_count == 1
    assert latencies.per_token.sum == 2


@pytest.mark.parametrize("outcome", ["cancelled", "error"])
def test_a_request_that_fails_counts_with_what_it_used(clock, outcome):
    line, latencies, metrics = begin(clock)
    line.take(0, [Started(7), Text("a", [1])])
    clock.now += 1
    line.take(0, [Text("a", [1])])
    line.end(outcome, Usage(7, 2, 4))

    assert latencies.duration.keys() == {outcome}
    assert latencies.prompt_tokens.sum == metrics.prompt_tokens == 7
    assert latencies.output_tokens.sum == metrics.completion_tokens == 2
    assert metrics.cached_tokens == 4
    assert latencies.per_token.count == 0


def test_a_request_that_dies_in_the_queue_has_no_phases(clock):
    line, latencies, metrics = begin(clock)
    assert latencies.open == {line}
    line.end("error", Usage())

    assert not latencies.open
    assert latencies.duration["error"].count == 1 == metrics.finished.error
    assert latencies.queue.count == latencies.first_token.count == latencies.decode.count == 0
