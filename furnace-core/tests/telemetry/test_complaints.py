"""A log that can't be filled."""

from __future__ import annotations

import logging

import pytest

from furnace.telemetry.complaints import Complaints


def test_a_subject_is_logged_at_once_and_then_once_a_minute_with_how_often_it_was_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    times = [0.0, 1.0, 59.9, 60.0, 61.0, 120.0, 400.0]
    complaints = Complaints(logging.getLogger("test"), clock=iter(times).__next__)

    for _ in times:
        complaints.about("it broke", ValueError("x"))

    assert [record.getMessage() for record in caplog.records] == [
        "it broke",
        "it broke (2 times more since it was last said)",
        "it broke (1 times more since it was last said)",
        "it broke",
    ]
    assert all(record.exc_info for record in caplog.records)


def test_subjects_do_not_silence_each_other(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints(logging.getLogger("test"), clock=lambda: 0.0)

    for subject in ("one", "two", "one", "two"):
        complaints.about(subject)

    assert [record.getMessage() for record in caplog.records] == ["one", "two"]
