"""The bound on the queue: who gets in, who has to go for it, and when to come again."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from furnace.contracts import EngineBusyError
from furnace.runtime.admission import Admission, Entry


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def queue_of(*clients: str, bound: int, tokens: int | None = None) -> Admission:
    admission = Admission(bound, Clock(), tokens)
    for id, client in enumerate(clients):
        assert admission.enter([Entry(id, client, 10)]) == []
    return admission


def test_a_full_queue_refuses_who_has_as_many_waiting_as_the_others() -> None:
    admission = queue_of("a", "b", bound=2)
    for client in ("a", "b", "c"):
        with pytest.raises(EngineBusyError) as refused:
            admission.enter([Entry(9, client, 10)])
        assert refused.value.retry_after is not None
    assert admission.waiting == 2


def test_the_newest_of_the_client_with_the_most_waiting_has_to_go_for_one_with_fewer() -> None:
    admission = queue_of("burst", "burst", "other", "burst", bound=4)
    assert admission.enter([Entry(10, "single", 10)]) == [3]
    assert admission.waiting == 4
    # Now everybody would have as many or more than the fullest one.
    with pytest.raises(EngineBusyError):
        admission.enter([Entry(11, "single", 10)])


def test_several_choices_get_in_all_or_none() -> None:
    admission = queue_of(*["burst"] * 6, bound=6)
    assert admission.enter([Entry(10, "n", 5), Entry(11, "n", 5), Entry(12, "n", 5)]) == [5, 4, 3]
    admission = queue_of(*["burst"] * 4, bound=4)
    with pytest.raises(EngineBusyError):
        admission.enter([Entry(10, "n", 5), Entry(11, "n", 5), Entry(12, "n", 5)])
    assert admission.waiting == 4


def test_prompt_tokens_are_bounded_too_but_an_empty_queue_takes_any_prompt() -> None:
    admission = queue_of("a", bound=10, tokens=25)
    admission.enter([Entry(1, "b", 15)])
    with pytest.raises(EngineBusyError):
        admission.enter([Entry(2, "c", 1)])
    admission.leave(0, served=True)
    admission.enter([Entry(2, "c", 1)])
    alone = queue_of(bound=10, tokens=25)
    alone.enter([Entry(0, "a", 1000)])
    with pytest.raises(EngineBusyError):
        alone.enter([Entry(1, "b", 1)])
    with pytest.raises(EngineBusyError):
        queue_of(bound=2).enter([Entry(n, "a", 1) for n in range(3)])


def test_what_has_no_chance_is_known_before_its_prompt_is() -> None:
    admission = queue_of("a", "a", "b", bound=3)
    with pytest.raises(EngineBusyError):
        admission.check("a", 1)
    admission.check("c", 1)
    admission.leave(0, served=True)
    admission.check("a", 1)


def test_leaving_twice_counts_once() -> None:
    admission = queue_of("a", "b", bound=5)
    admission.leave(0, served=False)
    admission.leave(0, served=True)
    admission.leave(77, served=False)
    assert admission.waiting == 1


def test_the_time_to_come_again_follows_from_how_fast_the_queue_moves() -> None:
    clock = Clock()
    admission = Admission(4, clock)
    ids = itertools.count()

    def fill() -> None:
        while admission.waiting < 4:
            admission.enter([Entry(next(ids), "a", 10)])

    def retry_after(count: int) -> float:
        with pytest.raises(EngineBusyError) as refused:
            admission.enter([Entry(900 + n, "a", 10) for n in range(count)])
        assert refused.value.retry_after is not None
        return refused.value.retry_after

    fill()
    assert retry_after(1) == 1.0
    for gone in range(40):
        clock.now += 5.0
        admission.leave(gone, served=True)
        fill()
    assert retry_after(1) == pytest.approx(5.0)
    assert retry_after(3) == pytest.approx(15.0)
    for gone in range(40, 100):
        clock.now += 500.0
        admission.leave(gone, served=True)
        fill()
    assert retry_after(1) == 120.0


@settings(max_examples=80, deadline=None)
@example(
    [*[("a", 1, False)] * 5, *[("a", 3, True)] * 2, ("a", 1, True), ("b", 1, True), ("b", 2, False), ("b", 3, False)], 6
)
@given(st.lists(st.tuples(st.sampled_from("aab"), st.integers(1, 3), st.booleans()), max_size=40), st.integers(3, 6))
def test_the_bounds_hold_and_a_client_never_gains_by_a_burst(steps: list[tuple[str, int, bool]], bound: int) -> None:
    admission = Admission(bound, Clock(), 12)
    waiting: dict[int, Entry] = {}
    for id, (client, tokens, leaves) in enumerate(steps):
        if leaves and waiting:
            gone = next(iter(waiting))
            del waiting[gone]
            admission.leave(gone, served=True)
        counts = {each: sum(entry.client == each for entry in waiting.values()) for each in "ab"}
        entry = Entry(id, client, tokens)
        try:
            displaced = admission.enter([entry])
        except EngineBusyError:
            # Not even if the others gave up all that they have more of.
            mine = counts[client] + 1
            ranks = {each: itertools.count(1) for each in "ab"}
            left = [each for each in waiting.values() if next(ranks[each.client]) <= mine]
            assert len(left) + 1 > bound or sum(each.tokens for each in left) + tokens > 12
        else:
            for each in displaced:
                assert waiting.pop(each).client != client
            waiting[id] = entry
        assert admission.waiting == len(waiting) <= bound
        assert sum(entry.tokens for entry in waiting.values()) <= 12 or len(waiting) == 1
