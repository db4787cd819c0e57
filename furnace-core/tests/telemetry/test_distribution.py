"""Our own histogram."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from furnace.telemetry.distribution import Distribution

BOUNDS = (0.1, 1.0, 10.0)


def test_a_value_on_a_bound_is_in_the_bucket_below_it():
    distribution = Distribution(BOUNDS)
    for value in (0.1, 0.5, 1.0, 11.0):
        distribution.record(value)
    assert distribution.counts == [1, 2, 0, 1]
    assert distribution.count == 4
    assert distribution.sum == 12.6


@given(st.lists(st.lists(st.floats(0, 100), max_size=20), max_size=5))
def test_merging_is_recording_all_in_one(groups):
    parts = []
    whole = Distribution(BOUNDS)
    for group in groups:
        part = Distribution(BOUNDS)
        parts.append(part)
        for value in group:
            part.record(value)
            whole.record(value)
    merged = Distribution.merged(BOUNDS, parts)
    assert merged.counts == whole.counts
    assert abs(merged.sum - whole.sum) < 1e-6
