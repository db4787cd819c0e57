"""What this engine says."""

from __future__ import annotations

from pathlib import Path

import furnace
import pytest
from furnace.plugins import EngineLoadError


def test_it_says_what_it_has_read(tmp_path: Path) -> None:
    story = "One day a small bear went to the river to look for fish."
    (tmp_path / "story.txt").write_text(story)

    with furnace.load(f"wordy:{tmp_path / 'story.txt'}") as llm:
        assert llm.complete("One day a small", max_tokens=6, temperature=0).text.startswith(" bear went to")


def test_looking_back_further_follows_the_text_more_closely() -> None:
    with furnace.load("wordy:demo?order=4") as llm:
        assert llm.complete("The cat ran to", max_tokens=2, temperature=0).text == " the door"


def test_a_file_that_is_not_there_is_one_line() -> None:
    with pytest.raises(EngineLoadError, match="No such file"):
        furnace.load("wordy:nowhere.txt")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")

    with pytest.raises(EngineLoadError, match="nothing to learn"):
        furnace.load(f"wordy:{tmp_path / 'empty.txt'}")
