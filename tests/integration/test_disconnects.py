"""Clients that leave, over HTTP: the mock holds nothing one step later, whatever phase the request was in."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from leaving_clients import FAULT, leave_at_a_gate, leave_in_a_race, uncached

from furnace import Server
from furnace_mock import StepGate

if TYPE_CHECKING:
    from furnace_mock.pytest_plugin import MakeMock


def test_leaving_in_any_phase_frees_the_model_one_step_later_in_200_interleavings(mock_engine: MakeMock) -> None:
    gate = StepGate()
    mock = uncached(mock_engine("lorem", gate=gate, max_sequences=2, max_step_tokens=16))
    phases = set()
    with Server(port=0).llm(mock.engine).background() as server:
        for seed in range(200):
            phases |= leave_at_a_gate(random.Random(seed), mock, server)
        assert phases == {"queue", "prefill", "decode"}
        finished = server.metrics("lorem").finished
        assert finished.total == finished.cancelled
        gate.open()


@pytest.mark.parametrize(
    ("seed", "fail_kind"), [(0, None), (1, "exception"), (2, "step_error"), (3, "step_refused"), (4, "nan")]
)
def test_leaving_in_a_race_with_the_end_and_with_errors_gives_each_request_one_outcome(
    mock_engine: MakeMock, seed: int, fail_kind: str | None
) -> None:
    faults = {} if fail_kind is None else {"fail_kind": fail_kind, "fail_at": seed, "fault_on": FAULT}
    mock = uncached(mock_engine("lorem", max_sequences=3, max_step_tokens=16, step_delay=0.0005, **faults))
    rng = random.Random(seed)
    with Server(port=0).llm(mock.engine).background() as server:
        for _ in range(8):
            leave_in_a_race(rng, mock, server)
        assert fail_kind is not None or server.metrics("lorem").finished.error == 0
