"""Sequences of all sizes and kinds in one step: what is computed beside a row must not reach it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from furnace.contracts import Chunk, ChunkKind, Output
from furnace.testing.conformance import Conformance, step_check
from furnace.testing.step.driver import Rows, Steps
from furnace.testing.verdict import Inapplicable

__all__ = ["CompanyChecks"]

_WIDEST = 65
_LONG = 200
_ROUNDS = 5
_MOST_ROWS = 1024


class CompanyChecks(Conformance):
    """Steps with sequences of all sizes, kinds and outputs."""

    @step_check
    def test_batches_of_any_width_give_each_its_row(self, steps: Steps) -> None:
        """Decode steps with one sequence, with ``max_open``, and with as many as powers of two and their neighbours."""
        most = steps.width(24, min(_WIDEST, steps.limits.max_open))
        if most < 2:
            raise Inapplicable("the model takes one sequence at a time")
        powers = (2**exponent + near for exponent in range(8) for near in (-1, 0, 1))
        widths = sorted({width for width in (*powers, most - 1, most) if 1 <= width <= most})
        sequences = [steps.tokens(3 + len(widths), "wide", index) for index in range(most)]
        lengths = [1 + index % 3 for index in range(most)]
        states = [steps.open() for _ in sequences]
        for state, tokens, length in zip(states, sequences, lengths, strict=True):
            steps.prefill(state, tokens[:length])
        got: list[tuple[int, int, int, Rows]] = []
        for turn, width in enumerate([*widths, most]):
            places = [(3 * turn + place) % most for place in range(width)]
            batch = [steps.decode_chunk(states[at], [sequences[at][lengths[at]]], lengths[at]) for at in places]
            for at, row in zip(places, steps.step(batch), strict=True):
                lengths[at] += 1
                got.append((width, at, lengths[at], row))
        steps.release_all()
        due = [
            steps.alone(tokens[:length], 1 + at % 3)
            for at, (tokens, length) in enumerate(zip(sequences, lengths, strict=True))
        ]
        for width, at, length, row in got:
            at_first = 1 + at % 3
            steps.same(
                row,
                due[at][length - at_first : length - at_first + 1],
                f"In a decode step of {width} sequences one gets another row than alone after {length} tokens. If "
                "steps are padded to sizes that were prepared: rows of padding must write nowhere, and each row must "
                "be computed.",
            )

    @step_check
    def test_long_and_short_sequences_mix(self, steps: Steps) -> None:
        """One long sequence and short ones decode in one step, beside a short prompt and a piece of a long one."""
        unit, long = steps.unit, min(_LONG, steps.model.max_context // 2)
        prompts = [steps.tokens(length + 3, "long", length) for length in (long, 1, long // 2 + 1)]
        needed = sum(steps.blocks(len(tokens)) for tokens in prompts) + steps.blocks(3 * unit)
        room = steps.limits.kv_tokens is None or needed <= steps.limits.kv_tokens // steps.limits.kv_block
        if steps.limits.max_open < 4 or not room or unit > steps.limits.max_step_tokens:
            raise Inapplicable("the limits allow no such step")
        due = [steps.alone(tokens, len(tokens) - 3) for tokens in prompts]
        pieces = steps.tokens(3 * unit, "pieces")
        steps.need_context(len(pieces) + 1)
        states = [steps.open() for _ in prompts]
        for state, tokens in zip(states, prompts, strict=True):
            steps.prefill(state, tokens[:-3])
        other = steps.open()
        for turn in range(3):
            batch = [
                steps.decode_chunk(state, [tokens[turn - 3]], len(tokens) - 3 + turn)
                for state, tokens in zip(states, prompts, strict=True)
            ]
            wanted = Output.LAST if turn == 2 else Output.NONE
            piece = Chunk(other, pieces[turn * unit : (turn + 1) * unit], turn * unit, ChunkKind.PREFILL, wanted)
            # Its place is the first, the middle and the last one.
            place = (0, 2, 3)[turn]
            batch.insert(place, piece)
            rows = steps.step(batch)
            last = rows.pop(place)
            for tokens, row, expected in zip(prompts, rows, due, strict=True):
                steps.same(
                    row,
                    expected[turn + 1 : turn + 2],
                    f"In one step with sequences of {long}, 1 and {long // 2 + 1} tokens and a piece of a prompt, the "
                    f"row after {len(tokens) - 2 + turn} tokens is not what it is alone. Each row has its own length: "
                    "nothing may depend on the longest of the batch.",
                )
        steps.release_all()
        steps.same(
            last,
            steps.alone(pieces, len(pieces)),
            "A prompt that came in pieces, each beside decode rows, has another row than alone.",
        )

    @step_check
    def test_equal_prompts_in_one_step_part_afterwards(self, steps: Steps) -> None:
        """Two equal prompts, and one that goes on, in one step; then each decodes other tokens."""
        prompt = steps.tokens(steps.unit + 1, "equal at once")
        longer = [*prompt, *steps.tokens(2, "goes on")]
        if steps.width(len(longer) + 3, 3) < 3 or 3 * len(longer) > steps.limits.max_step_tokens:
            raise Inapplicable("the limits allow no three prompts in a step")
        steps.need_context(len(longer) + 4)
        sequences = [[*begin, *steps.tokens(3, "part", at)] for at, begin in enumerate((prompt, longer, prompt))]
        due = [steps.alone(tokens, len(tokens) - 3) for tokens in sequences]
        states = [steps.open() for _ in sequences]
        for turn in range(4):
            batch = []
            for state, tokens in zip(states, sequences, strict=True):
                at = len(tokens) - 3
                if turn:
                    batch.append(steps.decode_chunk(state, [tokens[at + turn - 1]], at + turn - 1))
                else:
                    batch.append(Chunk(state, tokens[:at], 0, ChunkKind.PREFILL, Output.LAST))
            for row, expected in zip(steps.step(batch), due, strict=True):
                steps.same(
                    row,
                    expected[turn : turn + 1],
                    f"Equal prompts were read in one step; {turn} tokens later one has another row than alone. What "
                    "is computed once for several must not be written by any.",
                )

    @step_check
    def test_outputs_mix_in_one_step(self, steps: Steps) -> None:
        """Chunks that ask for no row, one, and one a token, prompts and drafts, in one step and in several orders."""
        if not steps.can.all_logits:
            raise Inapplicable("all_logits is not declared")
        unit, most = steps.unit, min(3, steps.limits.max_decode_tokens)
        small = min(unit, 8)
        parts = [
            (ChunkKind.PREFILL, Output.ALL, 0, small - 1),
            (ChunkKind.DECODE, Output.LAST, small, 1),
            (ChunkKind.PREFILL, Output.NONE, 0, unit),
            (ChunkKind.DECODE, Output.ALL, small, most),
            (ChunkKind.PREFILL, Output.LAST, 0, small - 2),
        ]
        tokens = unit + 2 * small + most
        if (
            steps.width(unit + most, 5) < 5
            or tokens > steps.limits.max_step_tokens
            or small + 5 > (steps.limits.max_logit_rows)
        ):
            raise Inapplicable("the limits allow no such step")
        sequences = [steps.tokens(start + count, "mixed", place) for place, (_, _, start, count) in enumerate(parts)]
        due: list[Rows] = []
        for whole, (_, output, start, count) in zip(sequences, parts, strict=True):
            if output is Output.ALL and not start:
                due.append(np.concatenate([steps.alone(whole[:n], n) for n in range(1, count + 1)]))
            else:
                rows = steps.alone(whole, start or count)[-count if start else -1 :]
                due.append(rows if output is not Output.NONE else rows[:0])
        for order in ((0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 0, 3, 4, 1)):
            chunks = []
            for place in order:
                kind, output, start, count = parts[place]
                state = steps.open()
                if start:
                    steps.prefill(state, sequences[place][:start])
                chunks.append(Chunk(state, sequences[place][start:], start, kind, output))
            for place, rows in zip(order, steps.step(chunks), strict=True):
                kind, output, _, count = parts[place]
                steps.same(
                    rows,
                    due[place],
                    f"In a step with outputs {[str(parts[each][1]) for each in order]}, the {kind} chunk of {count} "
                    f"tokens with output={output} has other rows than alone. Rows come in the order of the batch, then "
                    "of positions, whatever was asked for.",
                    exact=kind is ChunkKind.DECODE,
                )
            steps.release_all()

    @step_check
    def test_a_step_gives_as_many_rows_as_max_logit_rows(self, steps: Steps) -> None:
        """Decode rows of as many sequences as can be open but one, and a prompt with ``output=all`` for the rest."""
        if not steps.can.all_logits:
            raise Inapplicable("all_logits is not declared")
        count = steps.width(4, min(_WIDEST, steps.limits.max_open)) - 1
        rest = steps.limits.max_logit_rows - count
        room = (steps.limits.kv_tokens or 8 * rest) // steps.limits.kv_block - count * steps.blocks(4)
        rest = min(rest, steps.limits.max_step_tokens, steps.model.max_context - 2, room * steps.limits.kv_block)
        if count < 1 or rest < 1 or rest > _MOST_ROWS:
            raise Inapplicable("the limits allow no such step, or one that takes too long for a test")
        prompt, following = steps.tokens(rest, "all rows"), steps.tokens(count, "decode rows")
        states = [steps.open() for _ in following]
        for index, state in enumerate(states):
            steps.prefill(state, [1 + index % 8, 2, 3])
        batch = [steps.decode_chunk(state, [token], 3) for state, token in zip(states, following, strict=True)]
        batch.insert(count // 2, Chunk(steps.open(), prompt, 0, ChunkKind.PREFILL, Output.ALL))
        rows = steps.step(batch)
        steps.release_all()
        what = f"In a step of {count + rest} rows, of {steps.limits.max_logit_rows} in max_logit_rows,"
        every = rows.pop(count // 2)
        for length in {1, rest // 2 + 1, rest}:
            due = steps.alone(prompt[:length], length)
            steps.same(every[length - 1 : length], due, f"{what} row {length} of a prompt is not its own.", exact=False)
        for index, (row, token) in enumerate(zip(rows, following, strict=True)):
            due = steps.alone([1 + index % 8, 2, 3, token], 3)[1:]
            steps.same(row, due, f"{what} a decode row is not what it is alone.")

    @step_check
    def test_hidden_values_of_several_sequences_keep_apart(self, steps: Steps) -> None:
        """``output=hidden`` for several prompts in one step gives what it gives for each alone, in their order."""
        if not steps.can.hidden:
            raise Inapplicable("hidden is not declared")
        lengths = [7, 1, 5]
        room = min(steps.limits.max_step_tokens, steps.limits.max_logit_rows)
        if steps.width(7, 3) < 3 or sum(lengths) > room:
            raise Inapplicable("the limits allow no three prompts in a step")
        prompts = [steps.tokens(length, "hidden", length) for length in lengths]
        due = [self._hidden(steps, [prompt])[0] for prompt in prompts]
        for index, (rows, expected) in enumerate(zip(self._hidden(steps, prompts), due, strict=True)):
            steps.same(
                rows,
                expected,
                f"Hidden values of prompt {index} of {len(prompts)} in a step are not those that it has alone. Return "
                "them in the order of the batch, then of positions.",
                exact=False,
            )

    def _hidden(self, steps: Steps, prompts: Sequence[list[int]]) -> list[Rows]:
        chunks = [Chunk(steps.open(), prompt, 0, ChunkKind.PREFILL, Output.HIDDEN) for prompt in prompts]
        rows = steps.step(chunks)
        for chunk in chunks:
            steps.release(chunk.state)
        return rows

    @step_check
    def test_drafts_of_several_sequences_are_taken_and_refused(self, steps: Steps) -> None:
        """As in speculation: sequences with other numbers of drafts in a step, each cut behind the last right one."""
        most = min(steps.limits.max_decode_tokens, 4)
        if most < 2 or not steps.can.all_logits or not steps.can.rewind:
            raise Inapplicable("max_decode_tokens is 1, or all_logits or rewind is not declared")
        count = min(
            steps.width(steps.unit + 4 + most * _ROUNDS, 3),
            steps.limits.max_step_tokens // most,
            steps.limits.max_logit_rows // most,
        )
        if count < 2:
            raise Inapplicable("the limits allow no two sequences with drafts in a step")
        prompts = [steps.unit + 1 + index for index in range(count)]
        steps.need_context(prompts[-1] + most * _ROUNDS + 1)
        right = [steps.tokens(prompt + most * _ROUNDS, "right", prompt) for prompt in prompts]
        due = [steps.alone(tokens, prompt) for tokens, prompt in zip(right, prompts, strict=True)]
        states, at = [steps.open() for _ in prompts], list(prompts)
        for state, tokens, prompt in zip(states, right, prompts, strict=True):
            steps.prefill(state, tokens[:prompt])
        for turn in range(_ROUNDS):
            # How many tokens, and how many of them are right: the first one always, then as many drafts.
            lengths = [1 + (turn + index) % most for index in range(count)]
            good = [1 + (turn * 2 + index) % length for index, length in enumerate(lengths)]
            batch = []
            for index, (length, kept) in enumerate(zip(lengths, good, strict=True)):
                wrong = steps.tokens(length, "refused", turn, index)[kept:]
                tokens = [*right[index][at[index] : at[index] + kept], *wrong]
                output = Output.ALL if length > 1 else Output.LAST
                batch.append(steps.decode_chunk(states[index], tokens, at[index], output))
            for index, rows in enumerate(steps.step(batch)):
                behind = at[index] - prompts[index] + 1
                steps.same(
                    rows[: good[index]],
                    due[index][behind : behind + good[index]],
                    f"{count} sequences decode {lengths} tokens in one step, of which {good} are right and the others "
                    f"are cut off again; in round {turn + 1} sequence {index} has other rows than one token a step "
                    "gives. A draft that was cut must leave nothing behind.",
                )
                at[index] += good[index]
                if good[index] < lengths[index]:
                    steps.truncate(states[index], at[index])

    @step_check
    def test_several_decoded_tokens_may_end_with_the_context(self, steps: Steps) -> None:
        """A decode chunk of two tokens that are the last two of ``max_context``."""
        most = steps.model.max_context
        if steps.limits.max_decode_tokens < 2:
            raise Inapplicable("max_decode_tokens is 1")
        if most > 4096 or (steps.limits.kv_tokens is not None and most > steps.limits.kv_tokens):
            raise Inapplicable(f"a sequence of {most} tokens is too long for a test, or for the KV cache")
        tokens = steps.tokens(most, "to the end")
        due = steps.alone(tokens, most - 2)
        state = steps.open()
        steps.prefill(state, tokens[: most - 2])
        (row,) = steps.step([steps.decode_chunk(state, tokens[most - 2 :], most - 2)])
        steps.same(
            row,
            due[2:],
            f"A decode chunk of two tokens that ends with the context of {most} gives another row than one token a "
            "step. If chunks are padded, the padding must not reach beyond the context.",
        )

    @step_check
    def test_forks_are_open_states_like_others(self, steps: Steps) -> None:
        """``max_open`` states, all but one of them forks of one prompt, decode other tokens in one step; twice."""
        if not steps.can.prefix_reuse:
            raise Inapplicable("prefix_reuse is not declared")
        prompt = steps.tokens(3, "many forks")
        count = steps.width(4, min(_WIDEST, steps.limits.max_open))
        following = steps.tokens(count, "many forks")
        due = [steps.alone([*prompt, token], 3)[1:] for token in following]
        for _ in range(2):
            states = [steps.open()]
            steps.prefill(states[0], prompt)
            for _ in range(count - 1):
                copy, kept = steps.fork(states[0], 3)
                if kept < 3:
                    steps.prefill(copy, prompt[kept:], kept)
                states.append(copy)
            batch = [steps.decode_chunk(state, [token], 3) for state, token in zip(states, following, strict=True)]
            for row, expected in zip(steps.step(batch), due, strict=True):
                steps.same(
                    row,
                    expected,
                    f"{count} choices of one prompt, all but the first of them forks, decode in one step, and one gets "
                    "another row than alone.",
                    exact=False,
                )
            steps.release_all()
