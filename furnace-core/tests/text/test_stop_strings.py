"""Stop strings, however the text is cut."""

from __future__ import annotations

import itertools
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from furnace.text import StopStrings


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """What is shown piece by piece (the flush last), and the match."""
    matcher = StopStrings(stops)
    shown = []
    for piece in pieces:
        text, match = matcher.push(piece)
        shown.append(text)
        if match is not None:
            return [*shown, matcher.flush()], match
    return [*shown, matcher.flush()], None


def whole(stops: list[str], text: str) -> tuple[str, str | None]:
    """The rule, naively: the first end of a match, and of matches that end there the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_a_stop_string_over_several_tokens_shows_nothing_of_itself() -> None:  # T01
    assert run(["DEFGHIJ"], ["DEF", "G", "HI", "J"]) == (["", "", "", "", ""], "DEFGHIJ")


def test_a_match_is_found_in_the_accumulated_text_and_at_the_token_that_completes_it() -> None:  # T02
    matcher = StopStrings(["beta gamma"])

    results = [matcher.push(piece) for piece in ("alpha", " be", "ta gam", "ma")]

    assert "".join(text for text, _ in results) == "alpha "
    assert [match for _, match in results] == [None, None, None, "beta gamma"]


def test_text_is_held_back_only_while_it_may_become_a_stop_string() -> None:  # T03
    shown, match = run(["<|never|>"], ["a <", "|ne", "xt", " <|never|"])

    assert match is None
    assert shown == ["a ", "", "<|next", " ", "<|never|"]


def test_text_behind_a_match_in_the_same_piece_is_dropped() -> None:
    assert run(["\n\n"], ["one\n\ntwo"]) == (["one", ""], "\n\n")


def test_pushing_after_a_match_gives_nothing_and_the_same_match() -> None:
    matcher = StopStrings(["x"])
    matcher.push("ax")

    assert matcher.push("more") == ("", "x")
    assert matcher.flush() == ""


def test_the_match_that_is_complete_first_wins_even_if_another_began_earlier() -> None:
    assert run(["abcd", "bc"], ["abcd"]) == (["a", ""], "bc")


def test_of_two_matches_that_end_together_the_longer_wins() -> None:
    assert run(["bc", "abc"], ["xabc"]) == (["x", ""], "abc")


def test_a_failed_long_prefix_goes_on_as_a_shorter_one() -> None:
    assert run(["aab"], ["aaab"]) == (["a", ""], "aab")


def test_no_stop_strings_pass_everything_through() -> None:
    assert run([], ["any", "thing"]) == (["any", "thing", ""], None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one character"):
        StopStrings(["a", ""])


def test_held_says_what_is_held() -> None:
    matcher = StopStrings(["stop"])
    matcher.push("a st")

    assert matcher.held == "st"


def test_a_long_stop_string_of_one_character_costs_linear_time() -> None:
    matcher = StopStrings(["a" * 4_000 + "b"])

    shown = "".join(matcher.push("a")[0] for _ in range(50_000))

    assert len(shown) + len(matcher.flush()) == 50_000


texts = st.text(alphabet="ab\n<", max_size=40)


@given(
    stops=st.lists(st.text(alphabet="ab\n<", min_size=1, max_size=6), max_size=5),
    text=texts,
    cuts=st.lists(st.integers(0, 40), max_size=12),
)
def test_matching_does_not_depend_on_how_the_text_is_cut(stops: list[str], text: str, cuts: list[int]) -> None:
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]

    shown, match = run(stops, pieces)

    assert ("".join(shown), match) == whole(stops, text)


@given(
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=4),
    text=st.text(alphabet="ab", max_size=30),
)
def test_exactly_the_longest_live_prefix_is_held_back(stops: list[str], text: str) -> None:
    matcher = StopStrings(stops)
    for index, char in enumerate(text):
        _, match = matcher.push(char)
        if match is not None:
            return
        seen = text[: index + 1]
        live = [stop[:size] for stop in stops for size in range(len(stop)) if seen.endswith(stop[:size])]
        assert matcher.held == max(live, key=len)


def test_long_stop_strings_cost_memory_in_proportion_to_their_length() -> None:
    tracemalloc.start()
    try:
        stops = StopStrings(["ab" * 20_000, "ba" * 20_000])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 80_000 * 1000
    assert stops.push("ab" * 10_000) == ("", None)
    assert stops.flush() == "ab" * 10_000
