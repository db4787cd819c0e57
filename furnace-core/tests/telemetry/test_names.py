"""Names are documented, and the dashboard uses those that are there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import pytest

from furnace.contracts import Health, SchedulerStats, Usage
from furnace.telemetry import LlmMetrics, Outcome
from furnace.telemetry.names import DISTRIBUTIONS, FINISHED_REASONS, INSTRUMENTS, exposed_names
from furnace.telemetry.timeline import Latencies

ROOT = Path(__file__).parents[3]
NAME = re.compile(r"\b(?:vllm:|furnace_|gen_ai_(?:server|client)_)\w+")


def test_every_metric_is_documented_and_no_other():
    page = (ROOT / "docs/reference/metrics.md").read_text().partition("## Spans")[0]
    first_cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)

    assert sorted(NAME.findall(" ".join(first_cells))) == sorted(exposed_names())


@pytest.mark.parametrize("page", ["docs/how-to/monitor.md", "deploy/grafana/furnace.json"])
def test_only_metrics_that_are_there_are_used(page):
    found = {re.sub(r"_(bucket|count|sum)$", "", name) for name in NAME.findall((ROOT / page).read_text())}

    assert found
    assert found <= exposed_names()


def test_the_dashboard_has_no_two_panels_in_one_place():
    panels = json.loads((ROOT / "deploy/grafana/furnace.json").read_text())["panels"]
    taken = [
        (x, y)
        for position in (panel["gridPos"] for panel in panels)
        for x in range(position["x"], position["x"] + position["w"])
        for y in range(position["y"], position["y"] + position["h"])
    ]

    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len(set(taken)) == len(taken)
    assert max(x for x, _ in taken) < 24


def test_every_outcome_has_a_word_of_vllm():
    assert set(FINISHED_REASONS) == set(get_args(Outcome))


def test_the_sources_have_the_fields_that_are_read():
    for names in DISTRIBUTIONS:
        assert names.field in Latencies.__slots__
        assert sorted(names.buckets) == list(names.buckets)
    assert {names.field for names in DISTRIBUTIONS} == set(Latencies.__slots__) - {"open"}
    for instrument in INSTRUMENTS:
        if instrument.source in {"metrics", "tokens"}:
            assert instrument.field in LlmMetrics.__struct_fields__
        if instrument.source == "tokens":
            assert instrument.field in Usage.__struct_fields__
        if instrument.source == "stats":
            assert instrument.field in SchedulerStats.__struct_fields__
        if instrument.source == "health":
            assert instrument.field in Health.__struct_fields__
