from __future__ import annotations

from array import array

import pytest

from furnace.bench.comparison import METRICS, Ratio, ratios
from furnace.bench.load import Measured
from furnace.bench.sample import Sample
from furnace.bench.summary import Summary, summarise


def round_of(ttft: float) -> Summary:
    """A round with one request of two tokens, whose second comes two seconds after its first."""
    first, last = ttft, ttft + 2.0
    tokens = {"chunks": 2, "completion_tokens": 2, "prompt_tokens": 8}
    return summarise([Measured([Sample(0.0, last, first, last, array("d", [2.0]), **tokens)])])


def by_metric(a: list[Summary], b: list[Summary]) -> dict[str, Ratio]:
    return {ratio.metric: ratio for ratio in ratios(a, b)}


def test_the_ratio_is_of_medians_and_its_spread_is_over_the_rounds() -> None:
    found = by_metric([round_of(1.0), round_of(2.0), round_of(6.0)], [round_of(4.0), round_of(2.0), round_of(8.0)])

    ttft = found["ttft"]
    assert (ttft.a, ttft.b, ttft.ratio) == (2.0, 4.0, 0.5)
    assert ttft.rounds == [0.25, 1.0, 0.75]
    assert (ttft.median, ttft.low, ttft.high) == (0.75, 0.25, 1.0)


def test_every_metric_is_compared_and_a_is_the_numerator() -> None:
    found = by_metric([round_of(1.0)], [round_of(4.0)])

    assert list(found) == list(METRICS)
    assert found["ttft"].ratio == 0.25
    assert found["e2e"].ratio == 3.0 / 6.0
    assert found["itl"].ratio == found["tpot"].ratio == 1.0
    assert found["output_rate"].ratio == pytest.approx(2.0)


def test_a_round_that_only_one_server_finished_is_left_out() -> None:
    found = by_metric([round_of(1.0), round_of(3.0)], [round_of(2.0)])

    assert found["ttft"].rounds == [0.5]


def test_a_metric_that_a_server_does_not_have_is_left_out() -> None:
    nothing = summarise([Measured([Sample(0.0, 1.0, failure="503")])])

    assert ratios([round_of(1.0)], [nothing]) == []
    assert ratios([], []) == []
