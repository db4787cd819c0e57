"""Blocks of KV: what happens at their borders, and how many are counted."""

from __future__ import annotations

import contextlib

from furnace.contracts import Chunk, ChunkKind, ForkKind, OutOfKvError, Output, State
from furnace.testing.conformance import Conformance, step_check
from furnace.testing.step.driver import Rows, Steps
from furnace.testing.step.growth import CHAT, long_example
from furnace.testing.step.room import fill_kv, must_run_out, next_chunk
from furnace.testing.verdict import Inapplicable, fail

__all__ = ["BlockChecks"]

_BEHIND = 3
_MOST_FILLED = 8192
_AGAIN = 3


class BlockChecks(Conformance):
    """Borders of KV blocks, and how many blocks are taken."""

    @step_check
    def test_prompts_may_end_anywhere_in_a_block(self, steps: Steps) -> None:
        """Prompts of a block, one token less and one more, decoded over the border: the rows are those of prompts."""
        for border in _borders(steps):
            tokens = long_example(self.example_tokens(steps.model), border + _BEHIND)
            # Else the memory that is taken may still hold what a model forgot to write.
            steps.alone(steps.tokens(len(tokens), "others", border), len(tokens))
            whole = {n: steps.alone(tokens[:n], n) for n in range(border - 1, len(tokens) + 1)}
            for prompt in range(border - 1, border + 2):
                for length, row in zip(range(prompt, len(tokens) + 1), steps.alone(tokens, prompt), strict=True):
                    steps.same(
                        row[None],
                        whole[length],
                        f"The row after {length} tokens, the first {prompt} of them a prompt, is not the row after a "
                        f"prompt of all. A block of KV ends at {border}: a prompt may end before, at and behind it.",
                        exact=False,
                    )

    @step_check
    def test_several_decoded_tokens_cross_the_end_of_a_block(self, steps: Steps) -> None:
        """Decode chunks of several tokens that begin before the end of a block and end behind it."""
        most = min(steps.limits.max_decode_tokens, 8)
        if most < 2:
            raise Inapplicable("max_decode_tokens is 1")
        for border in _borders(steps):
            tokens = steps.tokens(border + most, "cross", border)
            for count in sorted({2, most}):
                # At least one token on each side.
                start = border - max(1, count // 2)
                if start < 1:
                    continue
                due = steps.alone(tokens, start)
                steps.alone(steps.tokens(len(tokens), "others", border), start)
                state = steps.open()
                steps.prefill(state, tokens[:start])
                rows = steps.step([steps.decode_chunk(state, tokens[start : start + count], start)])[0]
                rest = steps.decode(state, tokens[start + count], start + count)
                steps.release(state)
                for row, behind in ((rows, count), (rest, count + 1)):
                    steps.same(
                        row,
                        due[behind : behind + 1],
                        f"A decode chunk of {count} tokens at {start} crosses the end of a block of KV at {border}; "
                        f"the row {'after it' if row is rows else 'of the next token'} is not that of one token a "
                        "step. Look the block up for each token.",
                    )

    @step_check
    def test_decoded_tokens_take_no_more_room_than_prompts(self, steps: Steps) -> None:
        """All blocks are taken, by prompts that end before the last place; then decoded tokens fill the places left."""
        block = steps.limits.kv_block
        if block == 1:
            raise Inapplicable("limits.kv_block is 1")
        left = min(block - 1, steps.limits.max_decode_tokens, steps.limits.max_step_tokens + 1)
        for count in sorted({1, left}):
            filled = [(state, tokens[:-count]) for state, tokens in fill_kv(steps, count, short=count)]
            for state, tokens in filled:
                chunk = steps.decode_chunk(state, steps.tokens(count, "brim"), len(tokens))
                try:
                    steps.step([chunk])
                except OutOfKvError:
                    fail(
                        f"A state of {len(tokens)} tokens, with blocks of {block}, found no room for {count} more, "
                        "which fill its last block. Take the next block when its first token comes, and not before."
                    )
            state, tokens = filled[0]
            must_run_out(steps, [steps.decode_chunk(state, [1], len(tokens) + count)])
            steps.release_all()

    @step_check
    def test_what_truncate_gives_up_is_room(self, steps: Steps) -> None:
        """With the KV cache full a state is cut, inside a block and at its end: what it gave up is free, no more."""
        if not steps.can.rewind:
            raise Inapplicable("rewind is not declared")
        block = steps.limits.kv_block
        for cut in dict.fromkeys((2 * block, block, 2 * block - 1, 1)):
            states = fill_kv(steps, cut)
            state, tokens = max(states, key=lambda each: len(each[1]))
            free = steps.blocks(len(tokens)) - steps.blocks(cut)
            if len(states) == steps.limits.max_open or free < 1:
                raise Inapplicable("a state of three blocks and a further one do not fit")
            steps.truncate(state, len(tokens))
            steps.truncate(state, cut)
            other, more = steps.open(), steps.tokens(free * block, "freed", cut)
            try:
                steps.prefill(other, more)
            except OutOfKvError:
                fail(
                    f"A state of {len(tokens)} tokens was cut to {cut}, but there is no room for the {free} blocks of "
                    f"{block} that it gave up. A state of n tokens holds ceil(n / kv_block) blocks, at the end of a "
                    "block, too."
                )
            must_run_out(steps, [steps.decode_chunk(other, [1], len(more))])
            steps.release(other)
            row = steps.decode(state, 1, cut)
            steps.release_all()
            steps.same(
                row,
                steps.alone([*tokens[:cut], 1], cut)[1:],
                f"A state was cut to {cut} tokens, and what it gave up was used: its next token gets another row than "
                "in a state that was never longer.",
                exact=False,
            )

    @step_check
    def test_a_fork_takes_as_much_room_as_it_needs(self, steps: Steps) -> None:
        """With some blocks free, as many forks that need one each find room, and one more does not."""
        if not steps.can.prefix_reuse:
            raise Inapplicable("prefix_reuse is not declared")
        shares, block = steps.limits.fork is ForkKind.SHARE, steps.limits.kv_block
        if shares and block == 1:
            raise Inapplicable("whole blocks are shared, and blocks are of one token")
        states = fill_kv(steps, 0)
        if len(states) < 2:
            raise Inapplicable("the KV cache holds less than two sequences")
        steps.release(states.pop()[0])
        origin, tokens = states[0]
        length = block - 1 if shares else block
        used = sum(steps.blocks(len(each)) for _, each in states)
        free = (steps.limits.kv_tokens or 0) // block - used
        forks: list[State] = []
        kept = length
        while len(forks) < free and len(states) + len(forks) < steps.limits.max_open and kept == length:
            try:
                copy, kept = steps.fork(origin, length)
            except OutOfKvError:
                fail(
                    f"fork() of {length} tokens found no room with {free - len(forks)} blocks of {block} free; it "
                    f"needs one. limits.fork={steps.limits.fork.value} says what it costs, and the scheduler plans so."
                )
            forks.append(copy)
        if len(forks) == free and kept == length:
            must_run_out(steps, [next_chunk(steps, states[0])])
        for state in forks[::2] + forks[1::2]:
            steps.release(state)
        row = steps.decode(origin, 1, len(tokens))
        steps.release_all()
        steps.same(
            row, steps.alone([*tokens, 1], len(tokens))[1:], "After forks of it were released a state is another."
        )
        for state, _ in fill_kv(steps, 1):
            steps.release(state)

    @step_check
    def test_a_prompt_without_room_comes_again(self, steps: Steps) -> None:
        """A prompt that needs a block more than there is, alone and beside others; once there is room it is as ever."""
        block = steps.limits.kv_block
        states = fill_kv(steps, 0)
        count = block + 1
        if len(states) < 3 or count > steps.limits.max_step_tokens:
            raise Inapplicable("the KV cache holds less than three sequences, or a block is more than a step")
        prompt = steps.tokens(count, "comes again")
        steps.release(states.pop(0)[0])
        state = steps.open()
        chunk = Chunk(state, prompt, 0, ChunkKind.PREFILL, Output.LAST)
        for _ in range(_AGAIN):
            must_run_out(steps, [chunk])
            must_run_out(steps, [next_chunk(steps, states[0]), chunk])
        steps.release(states.pop()[0])
        rows: list[Rows] = []
        try:
            rows = steps.step([next_chunk(steps, states[0]), chunk])
        except OutOfKvError:
            fail("A prompt found no room, a sequence was released, and still there is none. See what was taken for it.")
        old = states[0][1]
        steps.release_all()
        due = [steps.alone([*old, 1], len(old))[1:], steps.alone(prompt, count)]
        for row, expected, who in zip(rows, due, ("A sequence beside it", "It"), strict=True):
            steps.same(
                row,
                expected,
                f"A prompt found no room, and came again when there was some. {who} gets another row than alone. A "
                "step that raises OutOfKvError has written nothing and taken nothing.",
            )

    @step_check
    def test_a_copy_before_a_write_needs_room_as_well(self, steps: Steps) -> None:
        """A state is cut into a block that its fork holds, too, with one block free: it writes beside another state."""
        block = steps.limits.kv_block
        if not steps.can.rewind or steps.limits.fork is not ForkKind.SHARE or block == 1:
            raise Inapplicable("rewind is not declared, or no blocks of several tokens are shared")
        for turn in range(2):
            states = fill_kv(steps, turn)
            if not 3 <= len(states) < steps.limits.max_open:
                raise Inapplicable("the KV cache holds less than three sequences, or no further state may be open")
            steps.release(states.pop(0)[0])
            (state, tokens), (other, more) = states[:2]
            cut = len(tokens) - 1
            copy, _ = steps.fork(state, len(tokens))
            steps.truncate(state, cut)
            batch = [steps.decode_chunk(state, [1], cut), steps.decode_chunk(other, [1], len(more))]
            batch = batch[turn:] + batch[:turn]
            try:
                rows = steps.step(batch)
            except OutOfKvError:
                # Without its fork the state owns what it writes into.
                steps.release(copy)
                rows = steps.step(batch)
            rows = rows[-turn:] + rows[:-turn]
            steps.release_all()
            due = [steps.alone([*each, 1], len(each))[1:] for each in (tokens[:cut], more)]
            for row, expected in zip(rows, due, strict=True):
                steps.same(
                    row,
                    expected,
                    "A state was to write into a block that its fork holds, too, and with another state's new block "
                    "there was no room for a copy; repeated with room, a row is not what it is alone. Count copies "
                    "with the blocks that a step needs, before anything is written.",
                    exact=False,
                )
            for state, _ in fill_kv(steps, turn + 2):
                steps.release(state)

    @step_check
    def test_a_fork_of_a_fork_outlives_both(self, steps: Steps) -> None:
        """Three generations; the two elder are released, and others fill the KV cache: the third goes on."""
        if not steps.can.prefix_reuse:
            raise Inapplicable("prefix_reuse is not declared")
        length = 3 * max(steps.unit, steps.limits.kv_block)
        steps.need_context(length + 2)
        if steps.width(length + 1, 3) < 3:
            raise Inapplicable("the limits allow no three sequences")
        tokens = steps.tokens(length + 1, "grandchild")
        due = steps.alone(tokens, length)[1:]
        states = [steps.open()]
        steps.prefill(states[0], tokens[:length])
        for _ in range(2):
            copy, kept = steps.fork(states[-1], length)
            if kept < length:
                steps.prefill(copy, tokens[kept:length], kept)
            states.append(copy)
        for state in states[:2]:
            steps.release(state)
        others = _others(steps, "takes the room")
        for state in others[-2:]:
            steps.release(state)
        steps.same(
            steps.decode(states[2], tokens[length], length),
            due,
            "A fork of a fork lost both that it came from, others filled the KV cache, and now it gets another row "
            "than alone. Each fork holds all of its blocks, also those that its origin had borrowed.",
            exact=False,
        )


def _others(steps: Steps, name: str) -> list[State]:
    """States that take what is left of the KV cache, as far as ``max_open`` goes."""
    total = min(steps.limits.kv_tokens or 0, _MOST_FILLED)
    places = min(steps.limits.max_open, _MOST_FILLED) - 1
    length = min(steps.model.max_context - 2, max(8 * steps.unit, -(-total // places)))
    others: list[State] = []
    with contextlib.suppress(OutOfKvError):
        while len(others) < places and len(others) * length <= _MOST_FILLED:
            others.append(steps.open())
            steps.prefill(others[-1], steps.tokens(length, name, len(others)))
    return others


def _borders(steps: Steps) -> list[int]:
    """Where two blocks behind the opening of a chat end, as far as the context and the KV cache go.

    Raises:
        Inapplicable: there are none.
    """
    block = steps.limits.kv_block
    first = CHAT // block + 1
    borders = [first * block, (first + 1) * block] if block > 1 else []
    borders = [border for border in borders if border + 8 < steps.model.max_context and steps.width(border + 8, 1)]
    if not borders:
        raise Inapplicable("limits.kv_block is 1, or the context holds none that end behind a chat's opening")
    return borders
