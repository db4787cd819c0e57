"""The order in which waiting sequences start."""

from hypothesis import given
from hypothesis import strategies as st

from furnace.scheduler import Sequence, WaitingQueue


def queued(*specs: tuple[str, int]) -> tuple[WaitingQueue, list[Sequence]]:
    queue = WaitingQueue()
    sequences = [Sequence(i, [1], client=client, priority=priority) for i, (client, priority) in enumerate(specs)]
    for sequence in sequences:
        queue.add(sequence)
    return queue, sequences


def drained(queue: WaitingQueue) -> list[int]:
    ids = []
    while (sequence := queue.peek()) is not None:
        queue.take(sequence)
        ids.append(sequence.id)
    assert len(queue) == 0
    return ids


def test_one_client_is_served_first_come_first_served() -> None:
    queue, _ = queued(("a", 0), ("a", 0), ("a", 0))
    assert drained(queue) == [0, 1, 2]


def test_clients_take_turns_so_that_a_burst_does_not_starve_a_single_request() -> None:
    queue, _ = queued(*[("burst", 0)] * 5, ("single", 0))
    assert drained(queue) == [0, 5, 1, 2, 3, 4]


def test_a_higher_priority_goes_first() -> None:
    queue, _ = queued(("a", 0), ("b", 5), ("a", 5))
    assert drained(queue) == [1, 2, 0]


def test_sequences_that_ran_before_go_first_the_oldest_of_them_ahead() -> None:
    queue, _ = queued(("a", 9))
    old, older = Sequence(10, [1]), Sequence(11, [1])
    old.order, older.order = 7, 3
    queue.resume(old)
    queue.resume(older)
    assert drained(queue) == [11, 10, 0]


def test_a_client_whose_next_one_is_passed_over_keeps_its_turn_and_its_order() -> None:
    queue, sequences = queued(("a", 0), ("a", 0), ("b", 0))
    second = queue.peek(passed=[sequences[0]])
    assert second is sequences[2]
    queue.take(second)
    assert queue.peek(passed=[sequences[0]]) is None
    assert drained(queue) == [0, 1]


def test_only_new_sequences_expire() -> None:
    queue = WaitingQueue()
    late, later, resumed = (Sequence(i, [1], deadline=deadline) for i, deadline in enumerate([1.0, 2.0, 0.5]))
    queue.add(late)
    queue.add(later)
    queue.resume(resumed)
    assert queue.expire(1.0) == [late]
    assert drained(queue) == [2, 1]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2)), max_size=20), st.randoms())
def test_removing_leaves_the_others_in_their_order(specs: list[tuple[str, int]], random) -> None:  # type: ignore[no-untyped-def]
    queue, sequences = queued(*specs)
    gone = [sequence for sequence in sequences if random.random() < 0.5]
    for sequence in gone:
        assert queue.remove(sequence)
        assert not queue.remove(sequence)
    assert len(queue) == len(sequences) - len(gone)
    left = drained(queue)
    for client in "abc":
        for priority in range(3):
            mine = [s.id for s in sequences if s not in gone and (s.client, s.priority) == (client, priority)]
            assert [i for i in left if i in mine] == mine
