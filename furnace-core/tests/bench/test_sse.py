from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from furnace.bench.sse import EventSplitter


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    borders = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    splitter = EventSplitter()
    return [event for low, high in itertools.pairwise(borders) for event in splitter.feed(data[low:high])]


@settings(deadline=None)
@given(st.lists(st.integers(0, 1000), max_size=20))
def test_events_are_the_same_however_the_bytes_are_cut(cuts: list[int]) -> None:
    data = (
        b': alive\n\ndata: {"a":1}\n\ndata:{"b":2}\r\n\r\nevent: x\nid: 7\ndata: one\ndata: two\n\n\ndata: [DONE]\n\n'
    )

    assert split(data, cuts) == [b'{"a":1}', b'{"b":2}', b"one\ntwo", b"[DONE]"]


def test_an_event_is_there_with_its_last_byte_and_not_before() -> None:
    splitter = EventSplitter()

    assert splitter.feed(b"data: x\n") == []
    assert splitter.feed(b"\ndata: y") == [b"x"]
    assert splitter.feed(b"\n\n") == [b"y"]


def test_an_event_without_data_is_none() -> None:
    assert EventSplitter().feed(b"retry: 3000\n\n: comment\n\n") == []
