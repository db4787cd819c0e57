"""Part d: a thousand interleavings of clients that leave."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
from leaving_clients import FAULT, leave_at_a_gate, leave_in_a_race, uncached
from report import Report

from furnace import Server
from furnace_mock import Mock, MockOptions, StepGate, build_mock

__all__ = ["disconnects"]

AT_A_GATE = 500
IN_A_RACE = 500
FAULTS = (None, "exception", "step_error", "step_refused", "nan")


def disconnects(report: Report, seed: int) -> None:
    """Run them against servers in this process.

    Raises:
        AssertionError: an interleaving went wrong; the ones after it are not run.
    """
    rng = random.Random(f"disconnects {seed}")
    show = report.bar("interleavings", AT_A_GATE + IN_A_RACE)
    outcomes: Counter[str] = Counter()
    phases: Counter[str] = Counter()
    done = requests = 0

    def count(mock: Mock, server: Server) -> None:
        nonlocal requests
        assert not mock.violations, mock.violations
        requests += server.metrics("lorem").requests
        outcomes.update(msgspec.structs.asdict(server.metrics("lorem").finished))

    gate = StepGate()
    mock = _mock(gate, max_sequences=2)
    with Server(port=0).llm(mock.engine).background() as server:
        for _ in range(AT_A_GATE):
            phases.update(leave_at_a_gate(rng, mock, server))
            show(done := done + 1)
        count(mock, server)
        gate.open()
    for kind in FAULTS:
        faults = {} if kind is None else {"fail_kind": kind, "fail_at": rng.randrange(4), "fault_on": FAULT}
        mock = _mock(None, max_sequences=3, step_delay=0.0005, **faults)
        with Server(port=0).llm(mock.engine).background() as server:
            for _ in range(IN_A_RACE // len(FAULTS)):
                leave_in_a_race(rng, mock, server)
                show(done := done + 1)
            count(mock, server)
    phases.update(end=outcomes["length"], error=outcomes["error"])
    report.check(
        "one outcome a request",
        0 < outcomes.total() == requests,
        f"{outcomes.total()} outcomes of {requests} requests in {done} interleavings, each with KV and gauges at zero",
    )
    wanted = ("queue", "prefill", "decode", "end", "error")
    found = ", ".join(f"{phase} {phases[phase]}" for phase in wanted)
    report.check("every phase was met", all(phases[phase] for phase in wanted), found)


def _mock(gate: StepGate | None, **options: Any) -> Mock:
    return uncached(build_mock("lorem", msgspec.convert({"max_step_tokens": 16, **options}, MockOptions), gate=gate))
