from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from furnace.bench.load import Measured
from furnace.bench.sample import Sample
from furnace.bench.summary import Distribution, Failures, summarise

seconds = st.floats(0, 1e4, allow_nan=False)


def sample(started: float, first: float, *gaps: float, tokens: int | None = None, ended: float | None = None) -> Sample:
    last = first + sum(gaps)
    chunks = 1 + len(gaps)
    return Sample(
        started=started,
        ended=last if ended is None else ended,
        first=first,
        last=last,
        gaps=array("d", gaps),
        chunks=chunks,
        prompt_tokens=10,
        cached_tokens=4,
        completion_tokens=chunks if tokens is None else tokens,
        counted=True,
    )


@settings(deadline=None)
@given(st.lists(seconds, min_size=1, max_size=200))
def test_percentiles_are_numpys(values: list[float]) -> None:
    found = Distribution.of(values)

    assert found is not None
    expected = np.percentile(values, [50, 90, 95, 99])
    assert [found.p50, found.p90, found.p95, found.p99] == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert found.mean == pytest.approx(np.mean(values), rel=1e-12, abs=1e-12)
    assert (found.count, found.min, found.max) == (len(values), min(values), max(values))


def test_no_values_have_no_distribution() -> None:
    assert Distribution.of([]) is None


def test_latencies_of_a_request_are_taken_from_its_chunks() -> None:
    summary = summarise([Measured([sample(10.0, 10.5, 0.25, 0.75, tokens=5, ended=12.0)])])

    assert summary.ttft is not None
    assert summary.ttft.p50 == 0.5
    assert summary.itl is not None
    assert (summary.itl.count, summary.itl.min, summary.itl.max) == (2, 0.25, 0.75)
    assert summary.tpot is not None
    assert summary.tpot.p50 == 0.25  # one second for the four tokens after the first
    assert summary.e2e is not None
    assert summary.e2e.p50 == 2.0


def test_rates_are_over_the_time_from_the_first_request_to_the_last_end() -> None:
    summary = summarise([Measured([sample(1.0, 2.0, 1.0), sample(0.0, 2.0, 2.0), sample(2.0, 3.0)])])

    assert summary.elapsed == 4.0
    assert summary.request_rate == 3 / 4
    assert summary.output_rate == 5 / 4
    assert summary.total_rate == 35 / 4
    assert summary.cached_tokens == 12


def test_rounds_are_added_up_without_the_time_between_them() -> None:
    summary = summarise([Measured([sample(0.0, 1.0)]), Measured([sample(100.0, 103.0)])])

    assert summary.elapsed == 4.0
    assert summary.succeeded == 2


def test_one_chunk_has_no_pace() -> None:
    summary = summarise([Measured([sample(0.0, 1.0, tokens=9)])])

    assert summary.tpot is None
    assert summary.itl is None


def test_failed_requests_count_by_kind_and_nowhere_else() -> None:
    busy = [Sample(started=0.0, ended=0.1, failure="503", message=text) for text in ("full", "still full")]
    lost = Sample(started=0.0, ended=9.0, failure="truncated", message="gone", first=0.5, chunks=7, completion_tokens=7)

    summary = summarise([Measured([*busy, sample(0.0, 1.0), lost])])

    assert summary.failed == {"503": Failures(2, "full"), "truncated": Failures(1, "gone")}
    assert (summary.succeeded, summary.failures) == (1, 3)
    assert summary.completion_tokens == summary.chunks == 1
    assert summary.e2e is not None
    assert summary.e2e.count == 1


def test_nothing_measured_is_a_summary_of_zeros() -> None:
    summary = summarise([Measured()])

    assert (summary.succeeded, summary.elapsed, summary.output_rate, summary.generator_cpu) == (0, 0.0, 0.0, 0.0)
    assert summary.ttft is None


def test_the_generators_share_of_a_core_is_over_all_rounds() -> None:
    assert summarise([Measured(cpu=1.0, wall=2.0), Measured(cpu=0.0, wall=2.0)]).generator_cpu == 0.25
