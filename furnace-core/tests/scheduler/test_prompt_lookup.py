"""Drafts from a sequence's own tokens."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from furnace.scheduler import PromptLookup


def test_what_followed_the_last_tokens_before_is_proposed() -> None:
    lookup = PromptLookup([1, 2, 3, 70000, 5, 9, 1, 2, 3], most=8, end=100)
    assert lookup.propose(2) == [70000, 5]
    assert lookup.propose(8) == [70000, 5, 9, 1, 2, 3]
    lookup.append(70000)
    assert lookup.propose(1) == [5]


def test_the_latest_occurrence_counts_and_three_tokens_are_a_better_sign_than_two() -> None:
    assert PromptLookup([8, 1, 2, 3, 9, 1, 2, 4, 8, 1, 2], most=1, end=100).propose(1) == [3]
    assert PromptLookup([1, 2, 3, 9, 1, 2, 4, 8, 1, 2], most=1, end=100).propose(1) == [4]


def test_nothing_is_drafted_without_a_repetition_or_beyond_the_end() -> None:
    assert PromptLookup([1, 2, 3, 4], most=8, end=100).propose(8) == []
    assert PromptLookup([1], most=8, end=100).propose(8) == []
    repeating = [1, 2, 3, 4, 5, 1, 2, 3]
    assert PromptLookup(repeating, most=8, end=9).propose(8) == []
    assert PromptLookup(repeating, most=8, end=11).propose(8) == [4, 5]
    assert PromptLookup(repeating, most=8, end=100).propose(0) == []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 256, 65536]), min_size=1, max_size=20))
def test_it_finds_what_a_search_token_by_token_finds(tokens: list[int]) -> None:
    expected: list[int] = []
    for key in (3, 2):
        starts = [at for at in range(len(tokens) - key) if tokens[at : at + key] == tokens[-key:]]
        if starts and not expected:
            expected = tokens[starts[-1] + key :][:4]
    assert PromptLookup(tokens, most=4, end=100).propose(4) == expected
