"""Edges: the KV cache to the brim, the end of the context, and calls that the model must refuse or survive."""

from __future__ import annotations

import contextlib

from furnace.contracts import Chunk, ChunkKind, ForkKind, OutOfKvError, Output, State
from furnace.testing.conformance import Conformance, step_check
from furnace.testing.step.driver import Steps
from furnace.testing.verdict import Inapplicable, fail, require

__all__ = ["RoomChecks", "fill_kv", "must_run_out", "next_chunk"]

_ATOMIC = "Count the blocks that the whole batch needs before you write any KV, take any block, or advance any length."
_ALL_BACK = "The scheduler plans with the limits: promise what is there, and give all blocks back in release()."
_FORK_KEPT = (
    "Before that a fork() found no room, and forks were released. Count the blocks that a fork needs before you share "
    "any: one that raises OutOfKvError must leave every count of holders as it was."
)


class RoomChecks(Conformance):
    """What fits, what does not, and that what does not fit changes nothing."""

    @step_check
    def test_all_kv_that_the_limits_promise_can_be_used(self, steps: Steps) -> None:
        """Sequences fill ``kv_tokens`` to the last block; twice, so that released room is room again."""
        for turn in range(2):
            for state, _ in fill_kv(steps, turn):
                steps.release(state)

    @step_check
    def test_a_step_without_room_raises_out_of_kv_and_changes_nothing(self, steps: Steps) -> None:
        """With the KV cache full, a step that needs a block more is refused, and every sequence goes on as before."""
        states = fill_kv(steps, 0)
        if len(states) < 3:
            raise Inapplicable("the KV cache holds less than three sequences")
        must_run_out(steps, [next_chunk(steps, states[1])])
        must_run_out(steps, [next_chunk(steps, state) for state in states])
        steps.release(states.pop(0)[0])
        # Now there is room for one more block, and each of these alone would fit.
        must_run_out(steps, [next_chunk(steps, states[0]), next_chunk(steps, states[1])])
        must_run_out(steps, [next_chunk(steps, states[1]), next_chunk(steps, states[0])])
        rows = []
        for state, tokens in states:
            try:
                rows.append(steps.decode(state, 1, len(tokens)))
            except Exception as error:
                fail(
                    f"After a step that raised OutOfKvError the next one raised {type(error).__name__}: {error}. "
                    f"{_ATOMIC}"
                )
            steps.release(state)
        for row, (_, tokens) in zip(rows, states, strict=True):
            due = steps.alone([*tokens, 1], len(tokens))[1:]
            steps.same(row, due, f"After a step that raised OutOfKvError a sequence gets another row. {_ATOMIC}")

    @step_check
    def test_a_step_without_room_takes_none(self, steps: Steps) -> None:
        """States that a step found no room for are released at once; then all KV is there again."""
        states = fill_kv(steps, 3)
        if len(states) < 3:
            raise Inapplicable("the KV cache holds less than three sequences")
        steps.release(states.pop(0)[0])
        must_run_out(steps, [next_chunk(steps, states[0]), next_chunk(steps, states[1])])
        for state, _ in states:
            steps.release(state)
        for state, _ in fill_kv(steps, 4):
            steps.release(state)

    @step_check
    def test_a_step_without_room_leaves_it_to_others(self, steps: Steps) -> None:
        """Two sequences that want the last block are refused together; then each of them alone gets it."""
        for turn, alone in enumerate((1, 0)):
            states = fill_kv(steps, 5 + turn)
            if len(states) < 3:
                raise Inapplicable("the KV cache holds less than three sequences")
            steps.release(states.pop(0)[0])
            must_run_out(steps, [next_chunk(steps, states[0]), next_chunk(steps, states[1])])
            try:
                steps.step([next_chunk(steps, states[alone])])
            except OutOfKvError:
                fail(
                    "A step of two sequences found room for one of them and raised OutOfKvError; then the "
                    f"{'second' if alone else 'first'} alone found none. What the other one was given must be taken "
                    f"back, or better, count first. {_ATOMIC}"
                )
            steps.release_all()

    @step_check
    def test_a_fork_without_room_raises_out_of_kv_and_changes_nothing(self, steps: Steps) -> None:
        """With the KV cache full, a fork that needs a block is refused."""
        if not steps.can.prefix_reuse:
            raise Inapplicable("prefix_reuse is not declared")
        states = fill_kv(steps, 1)
        if len(states) >= steps.limits.max_open:
            raise Inapplicable("no further state may be open")
        state, tokens = states[-1]
        shares = steps.limits.fork is ForkKind.SHARE
        cut = len(tokens) - 1 if shares and steps.limits.kv_block > 1 else len(tokens)
        if not shares or steps.limits.kv_block > 1:
            try:
                copy, kept = steps.fork(state, cut)
            except OutOfKvError:
                pass
            else:
                require(
                    kept == 0 or (shares and kept % steps.limits.kv_block == 0),
                    f"fork() took room for {kept} tokens though kv_tokens are used up. Raise OutOfKvError, so that the "
                    "scheduler makes room.",
                )
                steps.release(copy)
        if shares:
            try:
                copy, _ = steps.fork(state, len(tokens))
            except OutOfKvError:
                fail(
                    f"fork() of {len(tokens)} tokens, whole blocks of {steps.limits.kv_block}, found no room. With "
                    "limits.fork=share they are counted once: the scheduler plans with that. Share them, or say copy."
                )
            steps.release(copy)
        steps.release_all()
        for state, _ in fill_kv(steps, 2, _FORK_KEPT):
            steps.release(state)

    @step_check
    def test_released_states_leave_no_kv_behind(self, steps: Steps) -> None:
        """More tokens than ``kv_tokens`` pass through states that are opened, forked, cut and released."""
        size = min(2 * steps.unit, steps.model.max_context - 2)
        tokens = steps.tokens(size, "pass")
        total = steps.limits.kv_tokens or 20 * size
        for turn in range(min(60, 3 * (total // size + 1))):
            state = steps.open()
            try:
                steps.prefill(state, tokens)
                steps.decode(state, 1, size)
                if steps.can.prefix_reuse and steps.width(size + 2, 2) > 1:
                    copy, kept = steps.fork(state, size // 2)
                    steps.prefill(copy, tokens[kept : size // 2 + 1], kept)
                    if turn % 2:
                        steps.release(copy)
                        copy = None
                else:
                    copy = None
                if steps.can.rewind:
                    steps.truncate(state, size // 2)
            except OutOfKvError:
                fail(
                    f"After {turn} sequences were released there is no room for another one of {size} tokens. "
                    "release(), truncate() and fork() must give back every block that nobody holds."
                )
            steps.release(state)
            if copy is not None:
                steps.release(copy)
        for state, _ in fill_kv(steps, 3):
            steps.release(state)
        if steps.limits.kv_tokens is not None:
            for state, _ in fill_kv(steps, 5):
                steps.release(state)

    @step_check
    def test_failed_steps_leave_no_kv_behind(self, steps: Steps) -> None:
        """Steps that raise, again and again; then the KV cache is filled to the brim."""
        if steps.limits.kv_tokens is None:
            raise Inapplicable("limits.kv_tokens is None: the KV cache has no bound")
        size = min(2 * steps.unit, steps.limits.max_step_tokens, steps.model.max_context - 2)
        tokens = [*steps.tokens(size - 1, "failing"), steps.model.vocab_size + 100_000]
        for _ in range(min(60, 2 * steps.limits.kv_tokens // size + 2)):
            state = steps.open()
            with contextlib.suppress(Exception):
                steps.model.step([Chunk(state, tokens, 0, ChunkKind.PREFILL, Output.LAST)])
            steps.release(state)
        for state, _ in fill_kv(steps, 2):
            steps.release(state)

    @step_check
    def test_exactly_max_context_tokens_fit(self, steps: Steps) -> None:
        """A sequence is prefilled to one short of ``max_context`` and decodes its last token."""
        most = steps.model.max_context
        if most > 4096 or (steps.limits.kv_tokens is not None and most > steps.limits.kv_tokens):
            raise Inapplicable(f"a sequence of {most} tokens is too long for a test, or for the KV cache")
        state, tokens = steps.open(), self.example_tokens(steps.model)
        tokens = [*tokens, *tokens[-50:] * (most // 50)][:most]
        try:
            steps.prefill(state, tokens[: most - 2])
            row = steps.decode(state, tokens[most - 2], most - 2)
            steps.decode(state, tokens[most - 1], most - 1)
            steps.release(state)
            due = steps.alone(tokens[: most - 1], most - 1)
        except Exception as error:
            fail(
                f"A sequence of max_context, {most} tokens, failed with {type(error).__name__}: {error}. Make room "
                "for all of them, or declare less."
            )
        steps.same(
            row,
            due,
            f"After {most - 1} tokens, near the end of the context, the row of a decoded token is not the row of a "
            "prompt that ends with it. What a prompt sees, a decoded token must see, too.",
            exact=False,
        )

    @step_check
    def test_one_token_more_than_max_context_hurts_nobody(self, steps: Steps) -> None:
        """A chunk beyond the context is refused, or at least changes no other sequence."""
        most = steps.model.max_context
        if most > 4096 or (steps.limits.kv_tokens is not None and most + steps.unit > steps.limits.kv_tokens):
            raise Inapplicable(f"a sequence of {most} tokens is too long for a test, or for the KV cache")
        full = steps.open()
        steps.prefill(full, steps.tokens(most - 1, "full"))
        steps.decode(full, 1, most - 1)
        self._unharmed(steps, [steps.decode_chunk(full, [1], most)], f"a token beyond max_context, {most}")

    @step_check
    def test_a_wrong_position_hurts_nobody(self, steps: Steps) -> None:
        """A chunk at a position that its state is not at is refused, or at least changes no other sequence."""
        for position in (steps.unit - 1, steps.unit + 1):
            state = steps.open()
            steps.prefill(state, steps.tokens(steps.unit, "position"))
            self._unharmed(steps, [steps.decode_chunk(state, [1], position)], f"position {position} of {steps.unit}")

    @step_check
    def test_a_token_outside_the_vocabulary_hurts_nobody(self, steps: Steps) -> None:
        """Ids that there are not are refused, or at least change no other sequence."""
        for token in (steps.model.vocab_size, steps.model.vocab_size + 100_000, -1):
            chunk = Chunk(steps.open(), [1, token, 1], 0, ChunkKind.PREFILL, Output.LAST)
            self._unharmed(steps, [chunk], f"token id {token}")

    def _unharmed(self, steps: Steps, batch: list[Chunk], what: str) -> None:
        """Step with a bad batch beside a sequence that is not in it; the other one must not notice."""
        tokens = steps.tokens(8, "bystander")
        due = steps.alone(tokens, 4)
        bystander = steps.open()
        steps.prefill(bystander, tokens[:4])
        try:
            steps.model.step(batch)
        except Exception as error:
            require(
                not isinstance(error, MemoryError),
                f"A step with {what} asked for too much memory. Check it before you compute.",
            )
        for place in range(4, 8):
            steps.same(
                steps.decode(bystander, tokens[place], place),
                due[place - 3 : place - 2],
                f"After a step with {what} another sequence gets another row. Raise an error before you write "
                "anything.",
            )
        for chunk in batch:
            steps.release(chunk.state)
        steps.release(bystander)
        steps.same(steps.alone(tokens, 4), due, f"After a step with {what} a new sequence gets other rows than before.")


def fill_kv(steps: Steps, turn: int, blame: str = _ALL_BACK, *, short: int = 0) -> list[tuple[State, list[int]]]:
    """Open states until the KV cache is full, each at the end of a block, the first one of one block.

    Args:
        steps: the model, with no state open.
        turn: other tokens for another number.
        blame: what to do if there is less room.
        short: leave so many places free at the end of each state; the tokens for them are returned, too.

    Raises:
        ConformanceError: there is less room than the limits promise.
        Inapplicable: it can't be filled, or that takes too long for a test.
    """
    total, block = steps.limits.kv_tokens, steps.limits.kv_block
    if total is None:
        raise Inapplicable("limits.kv_tokens is None: the KV cache has no bound")
    if total > 8192:
        raise Inapplicable(f"the KV cache of {total} tokens is too large to fill; load with a smaller one")
    free = total // block
    longest = (steps.model.max_context - 2) // 2 // block * block
    if longest < block:
        raise Inapplicable("the context holds less than two blocks of KV")
    # Longer ones where there can be few, so that one more state can be open.
    share = -(-(free - 1) // max(1, steps.limits.max_open - 2)) * block
    longest = min(max(longest, share), (steps.model.max_context - 2) // block * block)
    states: list[tuple[State, list[int]]] = []
    while free and len(states) < steps.limits.max_open:
        length = min(longest, free * block) if states else block
        tokens = steps.tokens(length, "fill", turn, len(states))
        try:
            state = steps.open()
            steps.prefill(state, tokens[: length - short])
        except OutOfKvError:
            fail(
                f"OutOfKvError with {free} of {total // block} blocks free (kv_block={block}, kv_tokens={total}). "
                f"{blame}"
            )
        states.append((state, tokens))
        free -= steps.blocks(length)
    if free:
        raise Inapplicable("max_open states can't fill the KV cache")
    return states


def next_chunk(steps: Steps, filled: tuple[State, list[int]]) -> Chunk:
    """A decode chunk for a state of ``fill_kv``, which needs a new block."""
    state, tokens = filled
    return steps.decode_chunk(state, [1], len(tokens))


def must_run_out(steps: Steps, batch: list[Chunk]) -> None:
    """Step with a batch for which there is no room.

    Raises:
        ConformanceError: it is taken, or refused with another error than OutOfKvError.
    """
    try:
        steps.model.step(batch)
    except OutOfKvError:
        return
    except Exception as error:
        fail(
            f"A step without room raised {type(error).__name__}: {error}. Raise OutOfKvError, before anything changes: "
            "the scheduler then makes room and asks again."
        )
    fail(
        f"A step took more KV than kv_tokens={steps.limits.kv_tokens}. Raise OutOfKvError, or promise in limits what "
        "there is: the scheduler plans with it."
    )
