from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from furnace.bench.errors import BenchError
from furnace.bench.lengths import Lengths
from furnace.bench.prompts import WORDS, Prompts, PromptScale


def prompts(**changes: object) -> Prompts:
    settings: dict[str, object] = {
        "prompt": Lengths(60, 60),
        "output": Lengths(5, 9),
        "shared_prefix": 0,
        "seed": 1,
    }
    return Prompts(PromptScale(overhead=10, tokens_per_word=1), **{**settings, **changes})  # type: ignore[arg-type]


def test_a_length_is_a_number_or_two() -> None:
    assert Lengths.parse("130") == Lengths(130, 130)
    assert Lengths.parse("100:200") == Lengths(100, 200)
    assert [str(Lengths.parse(text)) for text in ("130", "100:200")] == ["130", "100:200"]


@pytest.mark.parametrize("text", ["", "x", "0", "-3", "9:3", "1:2:3", "1:", "1.5"])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(BenchError):
        Lengths.parse(text)


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(0, 50), st.integers())
def test_a_drawn_length_lies_between_its_bounds(low: int, more: int, seed: int) -> None:
    lengths = Lengths(low, low + more)

    assert low <= lengths.draw(random.Random(seed)) <= low + more


def test_there_are_256_words_of_four_letters_and_none_is_there_twice() -> None:
    assert len(WORDS) == len(set(WORDS)) == 256
    assert all(len(word) == 4 and word.isalpha() and word.islower() for word in WORDS)


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(1, 12), st.integers(1, 400))
def test_a_scale_measured_at_two_prompts_finds_the_words_for_a_third(overhead: int, each: int, words: int) -> None:
    scale = PromptScale.measured((4, overhead + 4 * each), (36, overhead + 36 * each))

    assert scale.words(overhead + words * each) == words


def test_counts_that_make_no_sense_give_a_token_a_word() -> None:
    assert PromptScale.measured((4, 20), (36, 20)) == PromptScale(0, 1)


def test_a_request_depends_on_seed_and_place_alone() -> None:
    maker = prompts()
    first = maker.request("8 clients/0", 3)
    maker.request("8 clients/0", 4)

    assert maker.request("8 clients/0", 3) == prompts().request("8 clients/0", 3) == first
    others = [
        maker.request("8 clients/0", 4),
        maker.request("8 clients/1", 3),
        prompts(seed=2).request("8 clients/0", 3),
    ]
    assert first.prompt not in [other.prompt for other in others]


def test_a_prompt_has_the_words_that_its_tokens_are() -> None:
    request = prompts().request("here", 0)

    assert len(request.prompt.split()) == 50  # ten of the sixty tokens are the template
    assert 5 <= request.output_tokens <= 9


def test_a_shared_prefix_begins_every_prompt_and_their_rest_is_their_own() -> None:
    maker = prompts(shared_prefix=30)

    first, second = (maker.request("here", index).prompt.split() for index in range(2))

    assert len(first) == len(second) == 50
    assert first[:30] == second[:30]
    assert first[30:] != second[30:]


def test_a_prefix_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(BenchError, match="a shared prefix of 50 tokens leaves no room in a prompt of 60 tokens"):
        prompts(shared_prefix=50)
