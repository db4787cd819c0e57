"""The radix tree against a list."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from furnace.scheduler import PrefixIndex

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=9)


def common(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("xy"), TOKENS), max_size=14),
    st.lists(st.integers(0, 13), max_size=10),
    TOKENS,
)
def test_it_finds_what_a_search_through_all_owners_finds(
    rows: list[tuple[str, list[int]]], gone: list[int], wanted: list[int]
) -> None:
    index = PrefixIndex()
    held = dict(enumerate(rows))
    for owner, (salt, tokens) in held.items():
        index.insert(owner, salt, tokens)
    for owner in gone:
        index.remove(owner)
        held.pop(owner, None)
    found = list(index.matches("x", wanted))
    expected = {owner: n for owner, (salt, tokens) in held.items() if salt == "x" and (n := common(tokens, wanted))}
    assert dict(found) == expected
    assert len(found) == len(expected)
    assert [length for _, length in found] == sorted((length for _, length in found), reverse=True)
    assert len(index) == len(held)
    for owner in held:
        index.remove(owner)
    assert len(index) == 0
    assert not index._roots


def test_another_salt_is_never_found() -> None:
    index = PrefixIndex()
    index.insert(1, "alice", [1, 2, 3])
    assert list(index.matches("bob", [1, 2, 3])) == []
    assert list(index.matches("", [1, 2, 3])) == []
    assert list(index.matches("alice", [1, 2, 3])) == [(1, 3)]


def test_an_owner_that_is_entered_again_is_found_with_its_new_tokens_only() -> None:
    index = PrefixIndex()
    index.insert(1, "", [1, 2, 3])
    index.insert(1, "", [1, 5])
    assert list(index.matches("", [1, 2, 3])) == [(1, 1)]
    assert list(index.matches("", [1, 5, 6])) == [(1, 2)]
