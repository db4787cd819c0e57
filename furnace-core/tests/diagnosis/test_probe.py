"""What a plugin told counts, however late it is read."""

from __future__ import annotations

import itertools
import time

import pytest

from furnace.diagnosis.probe import _Child
from furnace.diagnosis.task import Task
from furnace.plugins.hookspecs import ENGINE_GROUP


def test_what_a_plugin_told_while_doctor_did_not_run_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    child = _Child(Task(group=ENGINE_GROUP, name="mock"))
    try:
        assert child._process.wait(240) == 0
        # Whenever doctor looks at the clock, all time is over.
        monkeypatch.setattr(time, "monotonic", itertools.count(0, 1000).__next__)
        checked = child.run(2.0)
    finally:
        monkeypatch.undo()
        child.end()
    assert checked.problem is None
    assert checked.stage == "done"
