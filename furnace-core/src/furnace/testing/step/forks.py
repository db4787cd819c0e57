"""Forks, and states that are cut back."""

from __future__ import annotations

import contextlib

from furnace.contracts import State
from furnace.testing.conformance import Conformance, step_check
from furnace.testing.step.driver import Steps
from furnace.testing.step.room import fill_kv
from furnace.testing.verdict import Inapplicable

__all__ = ["ForkChecks"]


class ForkChecks(Conformance):
    """``fork`` where ``prefix_reuse`` is declared, ``truncate`` where ``rewind`` is."""

    @step_check
    def test_a_fork_goes_on_as_its_origin_would(self, steps: Steps) -> None:
        """A fork at every kind of length, prefilled to the end: its row is that of the whole prompt."""
        _need(steps, fork=True)
        unit = steps.unit
        tokens = steps.tokens(2 * unit + 5, "fork")
        steps.need_context(len(tokens) + 1)
        whole = steps.alone(tokens, len(tokens))
        for length in (unit, 2 * unit, unit + 3, 1, len(tokens) - 1):
            origin = steps.open()
            steps.prefill(origin, tokens)
            copy, kept = steps.fork(origin, length)
            rows = steps.prefill(copy, tokens[kept:], kept)
            steps.release(origin)
            steps.release(copy)
            steps.same(
                rows,
                whole,
                f"A fork at {length} of {len(tokens)} tokens kept {kept}; prefilled with the rest it gives another "
                "row than the whole prompt. The fork must hold exactly the first `kept` tokens.",
                exact=kept % steps.limits.grid == 0,
            )

    @step_check
    def test_a_fork_of_the_whole_prompt_decodes_as_its_origin(self, steps: Steps) -> None:
        """n choices of one prompt: each decodes its own tokens."""
        _need(steps, fork=True)
        prompt = steps.tokens(steps.unit + 3, "choices")
        count = steps.width(len(prompt) + 6, 3)
        if count < 2:
            raise Inapplicable("the limits allow one sequence at a time")
        branches = [steps.tokens(4, "choice", index) for index in range(count)]
        due = [steps.alone([*prompt, *branch], len(prompt)) for branch in branches]
        states = [steps.open()]
        steps.prefill(states[0], prompt)
        for _ in range(count - 1):
            copy, kept = steps.fork(states[0], len(prompt))
            if kept < len(prompt):
                steps.prefill(copy, prompt[kept:], kept)
            states.append(copy)
        for turn in range(4):
            batch = [
                steps.decode_chunk(state, [branch[turn]], len(prompt) + turn)
                for state, branch in zip(states, branches, strict=True)
            ]
            for index, rows in enumerate(steps.step(batch)):
                steps.same(
                    rows,
                    due[index][turn + 1 : turn + 2],
                    f"Choice {index} of a prompt, {'forked' if index else 'the origin'}, gets another row than alone "
                    f"after {turn + 1} tokens. What is shared may be read by all and written by none: copy the block "
                    "that is cut.",
                    exact=False,
                )

    @step_check
    def test_a_fork_at_the_end_of_a_block_shares_no_more(self, steps: Steps) -> None:
        """Forks at one, two and three blocks of an origin that is longer; both write other tokens, and keep apart."""
        _need(steps, fork=True)
        block = _block(steps)
        steps.need_context(4 * block + 4)
        if steps.width(4 * block + 4, 2) < 2:
            raise Inapplicable("the limits allow no two sequences of four blocks")
        for whole in (1, 2, 3):
            for longer in sorted({1, block}):
                length = whole * block + longer
                mine = steps.tokens(length + 3, "longer", whole)
                theirs = [*mine[: whole * block], *steps.tokens(3, "parts", whole)]
                due = steps.alone(mine, length), steps.alone(theirs, len(theirs) - 3)
                origin = steps.open()
                steps.prefill(origin, mine[:length])
                copy = _forked(steps, origin, mine[: whole * block])
                for turn in range(3):
                    for state, tokens, rows in ((copy, theirs, due[1]), (origin, mine, due[0])):
                        place = len(tokens) - 3 + turn
                        steps.same(
                            steps.decode(state, tokens[place], place),
                            rows[turn + 1 : turn + 2],
                            f"A fork at {whole * block} tokens, the end of a block, of an origin with {length} wrote "
                            f"after it, and then {'the fork' if state is copy else 'its origin'} gets another row than "
                            f"alone. Share the blocks before that length and none more: the next token of the fork "
                            "needs a block of its own.",
                            exact=False,
                        )
                steps.release(copy)
                steps.release(origin)

    @step_check
    def test_a_fork_outlives_its_origin(self, steps: Steps) -> None:
        """The origin is released and its room used by another sequence; the fork goes on."""
        _need(steps, fork=True)
        tokens, other = steps.tokens(steps.unit + 6, "outlive"), steps.tokens(steps.unit + 6, "other")
        if steps.width(len(tokens), 2) < 2:
            raise Inapplicable("the limits allow one sequence at a time")
        prompt = len(tokens) - 4
        due = steps.alone(tokens, prompt)
        origin = steps.open()
        steps.prefill(origin, tokens[:prompt])
        copy, kept = steps.fork(origin, prompt)
        steps.release(origin)
        stranger = steps.open()
        steps.prefill(stranger, other)
        if kept < prompt:
            steps.prefill(copy, tokens[kept:prompt], kept)
        for place in range(prompt, len(tokens)):
            steps.same(
                steps.decode(copy, tokens[place], place),
                due[place - prompt + 1 : place - prompt + 2],
                "After its origin was released and another sequence came, a fork gets other rows. Shared blocks are "
                "free only when nobody holds them any more.",
                exact=False,
            )

    @step_check
    def test_a_released_fork_leaves_its_origin_alone(self, steps: Steps) -> None:
        """A fork writes, and is released; the origin goes on as if there had been none."""
        _need(steps, fork=True)
        tokens = steps.tokens(steps.unit + 8, "origin")
        if steps.width(len(tokens), 2) < 2:
            raise Inapplicable("the limits allow one sequence at a time")
        prompt = len(tokens) - 5
        due = steps.alone(tokens, prompt)
        origin = steps.open()
        steps.prefill(origin, tokens[:prompt])
        for length in (prompt, prompt - 2, 1):
            copy, kept = steps.fork(origin, length)
            steps.prefill(copy, steps.tokens(length - kept + 3, "write", length), kept)
            steps.release(copy)
        for place in range(prompt, len(tokens)):
            steps.same(
                steps.decode(origin, tokens[place], place),
                due[place - prompt + 1 : place - prompt + 2],
                "After a fork wrote and was released, its origin gets other rows. A fork must not write into, nor "
                "free, what its origin holds.",
            )

    @step_check
    def test_a_fork_of_a_fork_holds_what_both_share(self, steps: Steps) -> None:
        """Three generations, the middle one released first."""
        _need(steps, fork=True)
        unit = steps.unit
        tokens = steps.tokens(2 * unit + 3, "generations")
        steps.need_context(len(tokens) + 1)
        if steps.width(len(tokens), 3) < 3:
            raise Inapplicable("the limits allow no three sequences")
        whole = steps.alone(tokens, len(tokens))
        first = steps.open()
        steps.prefill(first, tokens)
        second, kept = steps.fork(first, 2 * unit)
        if kept < 2 * unit:
            steps.prefill(second, tokens[kept : 2 * unit], kept)
        third, kept = steps.fork(second, unit)
        steps.release(second)
        steps.same(
            steps.prefill(third, tokens[kept:], kept),
            whole,
            "A fork of a fork, prefilled to the end, gives another row than the whole prompt.",
            exact=kept % steps.limits.grid == 0,
        )

    @step_check
    def test_a_fork_of_nothing_is_an_empty_state(self, steps: Steps) -> None:
        """``fork(state, 0)`` keeps nothing."""
        _need(steps, fork=True)
        tokens = steps.tokens(steps.unit + 1, "nothing")
        due = steps.alone(tokens, len(tokens))
        origin = steps.open()
        steps.prefill(origin, steps.tokens(steps.unit + 1, "something"))
        copy, _ = steps.fork(origin, 0)
        steps.same(
            steps.prefill(copy, tokens),
            due,
            "A fork of 0 tokens is not empty: a prompt in it gets another row than alone.",
        )

    @step_check
    def test_a_cut_state_goes_on_as_if_it_had_never_been_longer(self, steps: Steps) -> None:
        """``truncate`` inside the decoded tokens, as after a wrong draft, and other tokens behind it."""
        _need(steps, cut=True)
        prompt = steps.unit + 3
        tokens, wrong = steps.tokens(prompt + 5, "cut"), steps.tokens(8, "wrong")
        due = steps.alone(tokens, prompt)
        state = steps.open()
        steps.prefill(state, tokens[:prompt])
        for place in range(prompt, len(tokens)):
            steps.same(
                steps.decode(state, tokens[place], place),
                due[place - prompt + 1 : place - prompt + 2],
                f"After truncate(state, {place}) the row of the next token is not what it is without the tokens that "
                "were cut. Forget their KV and set the length back.",
            )
            for ahead, token in enumerate(wrong[: 1 + place % 3]):
                steps.decode(state, token, place + 1 + ahead)
            steps.truncate(state, place + 1)

    @step_check
    def test_a_state_can_be_cut_inside_its_prompt_and_to_nothing(self, steps: Steps) -> None:
        """``truncate`` to a multiple of the grid, and to 0; then another prompt."""
        _need(steps, cut=True)
        unit = steps.unit
        tokens, other = steps.tokens(2 * unit + 3, "prompt"), steps.tokens(unit + 3, "instead")
        steps.need_context(len(tokens) + 2)
        state = steps.open()
        steps.prefill(state, tokens)
        steps.decode(state, tokens[0], len(tokens))
        for length in (unit, 0):
            steps.truncate(state, length)
            joined = [*tokens[:length], *other]
            steps.same(
                steps.prefill(state, other, length),
                steps.alone(joined, len(joined)),
                f"A state cut to {length} tokens and prefilled again gives another row than a new one.",
            )

    @step_check
    def test_cutting_a_fork_leaves_its_origin_alone(self, steps: Steps) -> None:
        """A fork is cut inside what it shares and writes there; then the origin is cut and writes."""
        _need(steps, fork=True, cut=True)
        tokens = steps.tokens(steps.unit + 6, "shared")
        if steps.width(len(tokens) + 4, 2) < 2:
            raise Inapplicable("the limits allow one sequence at a time")
        prompt = len(tokens) - 4
        due = steps.alone(tokens, prompt)
        origin = steps.open()
        steps.prefill(origin, tokens[:prompt])
        copy, kept = steps.fork(origin, prompt)
        if kept > 2:
            steps.truncate(copy, kept - 2)
            for place in range(kept - 2, kept + 1):
                steps.decode(copy, 1, place)
        for place in range(prompt, len(tokens)):
            steps.same(
                steps.decode(origin, tokens[place], place),
                due[place - prompt + 1 : place - prompt + 2],
                "A fork was cut and wrote into what it shared with its origin, which now gets other rows. Copy the "
                "block that is written.",
            )

    @step_check
    def test_cutting_an_origin_leaves_its_fork_alone(self, steps: Steps) -> None:
        """The origin is cut inside what it shares and writes there; the fork goes on."""
        _need(steps, fork=True, cut=True)
        tokens = steps.tokens(2 * steps.unit + 3, "fork stays")
        steps.need_context(len(tokens) + 1)
        if steps.width(len(tokens), 2) < 2:
            raise Inapplicable("the limits allow one sequence at a time")
        whole = steps.alone(tokens, len(tokens))
        for length, cut in ((2 * steps.unit, 2 * steps.unit - 1), (2 * steps.unit, steps.unit + 1), (steps.unit, 3)):
            origin = steps.open()
            steps.prefill(origin, tokens)
            copy, kept = steps.fork(origin, length)
            steps.truncate(origin, cut)
            for place in range(cut, cut + 4):
                steps.decode(origin, 1, place)
            rows = steps.prefill(copy, tokens[kept:], kept)
            steps.release(origin)
            steps.release(copy)
            steps.same(
                rows,
                whole,
                f"An origin was cut to {cut} tokens, wrote there, and changed its fork of {kept}. Copy a block that "
                "another state shares before you write into it.",
                exact=kept % steps.limits.grid == 0,
            )

    @step_check
    def test_a_fork_and_its_origin_write_in_one_step(self, steps: Steps) -> None:
        """An origin and two forks are cut inside a block that all share, and write other tokens there in one step."""
        _need(steps, fork=True, cut=True)
        block = _block(steps)
        prompt, cut = 2 * block, block + max(1, block // 2)
        steps.need_context(prompt + 4)
        if steps.width(prompt + 4, 4) < 4:
            raise Inapplicable("the limits allow no four sequences of three blocks")
        tokens = steps.tokens(prompt, "one step")
        branches = [[*tokens[:cut], *steps.tokens(3, "branch", index)] for index in range(3)]
        due = [steps.alone(branch, cut) for branch in branches]
        states = [steps.open()]
        steps.prefill(states[0], tokens)
        states += [_forked(steps, states[0], tokens) for _ in branches[1:]]
        for state in states:
            steps.truncate(state, cut)
        for turn in range(3):
            batch = [
                steps.decode_chunk(state, [branch[cut + turn]], cut + turn)
                for state, branch in zip(states, branches, strict=True)
            ]
            for index, rows in enumerate(steps.step(batch)):
                steps.same(
                    rows,
                    due[index][turn + 1 : turn + 2],
                    f"An origin and two forks of it were cut to {cut} tokens and wrote in one step; "
                    f"{'a fork' if index else 'the origin'} gets another row than alone. Each needs a copy of its own "
                    "of a block that others hold, too.",
                    exact=False,
                )
        steps.release_all()
        with contextlib.suppress(Inapplicable):
            fill_kv(steps, 8)

    @step_check
    def test_blocks_that_are_cut_stay_with_those_who_share_them(self, steps: Steps) -> None:
        """An origin is cut by two blocks, then a fork; another sequence comes, and the one that shared them goes on."""
        _need(steps, fork=True, cut=True)
        block = _block(steps)
        prompt = 2 * block + max(1, block // 2)
        tokens, other = steps.tokens(prompt + 3, "whole blocks"), steps.tokens(3 * block, "takes the room")
        steps.need_context(prompt + 4)
        if steps.width(len(tokens), 3) < 3:
            raise Inapplicable("the limits allow no three sequences of three blocks")
        due = steps.alone(tokens, prompt)
        for who, whose in (("An origin", "its fork"), ("A fork", "its origin")):
            origin = steps.open()
            steps.prefill(origin, tokens[:prompt])
            copy = _forked(steps, origin, tokens[:prompt])
            cut, lasting = (origin, copy) if who == "An origin" else (copy, origin)
            steps.truncate(cut, block // 2)
            stranger = steps.open()
            steps.prefill(stranger, other)
            for place in range(prompt, len(tokens)):
                steps.same(
                    steps.decode(lasting, tokens[place], place),
                    due[place - prompt + 1 : place - prompt + 2],
                    f"{who} of {prompt} tokens was cut to {block // 2}, another sequence came, and now {whose} gets "
                    "other rows. A block that truncate() gives up is free only when nobody else holds it.",
                    exact=False,
                )
            steps.release_all()
        with contextlib.suppress(Inapplicable):
            fill_kv(steps, 7)


def _block(steps: Steps) -> int:
    """The length of a block of KV; where blocks are of one token, any length."""
    return steps.limits.kv_block if steps.limits.kv_block > 1 else steps.unit


def _forked(steps: Steps, origin: State, tokens: list[int]) -> State:
    """A fork that holds ``tokens``, with which its origin begins; what it did not keep is computed."""
    copy, kept = steps.fork(origin, len(tokens))
    if kept < len(tokens):
        steps.prefill(copy, tokens[kept:], kept)
    return copy


def _need(steps: Steps, *, fork: bool = False, cut: bool = False) -> None:
    if fork and not steps.can.prefix_reuse:
        raise Inapplicable("prefix_reuse is not declared")
    if cut and not steps.can.rewind:
        raise Inapplicable("rewind is not declared")
