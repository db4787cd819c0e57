"""Which rows a step gives, and in which order."""

from __future__ import annotations

from typing import cast

import numpy as np

from furnace.contracts import BatchStepModel, Chunk, ChunkKind, ForkKind, InvalidRequestError, Logits, Output
from furnace.sampling.scores import read_scores
from furnace.testing.conformance import Conformance, step_check
from furnace.testing.step.driver import Steps
from furnace.testing.step.growth import CHAT, long_example
from furnace.testing.verdict import ConformanceError, Inapplicable, fail, require

__all__ = ["RowChecks"]


class RowChecks(Conformance):
    """Limits, and the form of logits."""

    @step_check
    def test_limits_and_capabilities_agree(self, steps: Steps) -> None:
        """The limits are valid, do not change, and fit what is declared."""
        model, limits, can = steps.model, steps.limits, steps.can
        try:
            limits.validate()
        except InvalidRequestError as error:
            fail(f"{error}. furnace refuses to serve such a model.")
        for name, value in (("max_context", model.max_context), ("vocab_size", model.vocab_size)):
            require(
                isinstance(value, int) and value >= 1, f"{name} is {value!r}. It must be a whole number, at least 1."
            )
        require(
            isinstance(model.name, str) and model.name, f"name is {model.name!r}. Give the id that clients ask for."
        )
        steps.prefill(steps.open(), [1, 2])
        steps.prefill(steps.open(), [1])
        require(model.limits == limits, "limits changed from one call to the next. Compute them once, when built.")
        require(model.capabilities == can, "capabilities changed from one call to the next. Compute them once.")
        require(
            (limits.fork is not ForkKind.NONE) or not can.prefix_reuse,
            "capabilities.prefix_reuse is declared, but limits.fork is none. Say what a fork costs: share or copy.",
        )
        for method, declared in (("fork", can.prefix_reuse), ("truncate", can.rewind)):
            require(
                not declared or not _is_inherited(model, method),
                f"{'prefix_reuse' if method == 'fork' else 'rewind'} is declared, but there is no {method}(). "
                "Write it, or don't declare it.",
            )

    @step_check
    def test_logits_are_finite_float32_rows_of_the_vocabulary(self, steps: Steps) -> None:
        """A prefill and a decode step each give one finite float32 row of ``vocab_size``."""
        state = steps.open()
        tokens = steps.tokens(steps.unit + 3, "shape")
        require(steps.prefill(state, tokens).shape == (1, steps.model.vocab_size), "a prefill must give one row")
        steps.decode(state, tokens[0], len(tokens))

    @step_check
    def test_a_prompt_of_one_token_works(self, steps: Steps) -> None:
        """The shortest prompt there is, and one token behind it."""
        state = steps.open()
        steps.prefill(state, [1])
        steps.decode(state, 1, 1)

    @step_check
    def test_a_chunk_that_wants_no_row_gives_none(self, steps: Steps) -> None:
        """``output=none`` gives no row, alone and beside others."""
        first, second = steps.open(), steps.open()
        tokens = steps.tokens(2 * steps.unit, "none")
        steps.need_context(len(tokens) + 2)
        nothing = Chunk(first, tokens[: steps.unit], 0, ChunkKind.PREFILL, Output.NONE)
        require(len(steps.step([nothing])[0]) == 0, "a step without wanted rows must return an array with 0 rows")
        rest = Chunk(first, tokens[steps.unit :], steps.unit, ChunkKind.PREFILL, Output.LAST)
        other = Chunk(second, tokens[: steps.unit], 0, ChunkKind.PREFILL, Output.NONE)
        if 2 * steps.unit > steps.limits.max_step_tokens:
            raise Inapplicable("max_step_tokens allows no two chunks beside each other")
        rows = steps.step([other, rest])[1]
        steps.same(
            rows,
            steps.alone(tokens, len(tokens)),
            "The row of a chunk beside one with output=none is not its own. Skip what wants no row when you collect "
            "rows.",
        )

    @step_check
    def test_rows_come_in_the_order_of_the_batch(self, steps: Steps) -> None:
        """Three sequences in every order: each gets its own row."""
        count = steps.width(steps.unit + 2, 3)
        if count < 2:
            raise Inapplicable("the model takes one sequence at a time")
        prompts = [steps.tokens(steps.unit - 2 + index, "order", index) for index in range(count)]
        following = steps.tokens(2 * count, "order")
        alone = [
            steps.alone([*prompt, *following[:count]], len(prompt))
            for prompt, _ in zip(prompts, range(count), strict=True)
        ]
        states = [steps.open() for _ in prompts]
        for state, prompt in zip(states, prompts, strict=True):
            steps.prefill(state, prompt)
        for turn in range(count):
            order = [(turn + place) % count for place in range(count)]
            if turn == 1:
                order.reverse()
            batch = [
                steps.decode_chunk(states[index], [following[turn]], len(prompts[index]) + turn) for index in order
            ]
            for index, rows in zip(order, steps.step(batch), strict=True):
                due = [rows_alone[turn + 1 : turn + 2] for rows_alone in alone]
                moved = any(not steps.difference(rows, due[other]) for other in range(count) if other != index)
                steps.same(
                    rows,
                    due[index],
                    f"In a decode step with sequences {order}, the row of sequence {index} is not its own. "
                    + (
                        "It is another one's: return the rows in the order of the batch, whatever order you compute in."
                        if moved
                        else "It is no other one's either: see what a neighbour, or rows of padding, write into its KV "
                        "or its row."
                    ),
                )

    @step_check
    def test_prefills_and_decodes_mix_in_one_step(self, steps: Steps) -> None:
        """One step with a decode row, a whole prompt, and the second half of a prompt."""
        unit = steps.unit
        if steps.width(2 * unit + 2, 3) < 3 or 2 * unit > steps.limits.max_step_tokens:
            raise Inapplicable("the limits allow no such step")
        steps.need_context(2 * unit + 2)
        first, second, third = (steps.tokens(2 * unit, "mix", index) for index in range(3))
        states = [steps.open() for _ in range(3)]
        steps.prefill(states[0], first[: unit + 1])
        steps.prefill(states[1], second[:unit], output=Output.NONE)
        rows = steps.step(
            [
                Chunk(states[2], third[: unit - 1], 0, ChunkKind.PREFILL, Output.LAST),
                steps.decode_chunk(states[0], [first[unit + 1]], unit + 1),
                Chunk(states[1], second[unit : unit + 1], unit, ChunkKind.PREFILL, Output.LAST),
            ]
        )
        due = [
            steps.alone(third[: unit - 1], unit - 1),
            steps.alone(first[: unit + 2], unit + 1)[1:],
            steps.alone(second[: unit + 1], unit + 1),
        ]
        for name, row, expected in zip(("a prompt", "a decode row", "a prompt's second half"), rows, due, strict=True):
            steps.same(
                row,
                expected,
                f"In a step that mixes prefill and decode, the row of {name} is not what it is alone. Each chunk must "
                "see its own state and its own positions.",
            )

    @step_check
    def test_decode_rows_come_on_top_of_max_step_tokens(self, steps: Steps) -> None:
        """A step with as many prompt tokens as ``max_step_tokens`` allows, and decode rows beside them."""
        size, unit = steps.limits.max_step_tokens, steps.unit
        longest = min(steps.model.max_context - 1, size)
        lengths = [longest] * (size // longest) + [size % longest] * (size % longest > 0)
        room = (steps.limits.kv_tokens or 2 * size) // steps.limits.kv_block - sum(map(steps.blocks, lengths))
        decoding = min(8, steps.limits.max_open - len(lengths), room // steps.blocks(unit + 1))
        if decoding < 1 or size > 4096:
            raise Inapplicable("the limits allow no such step, or one that takes too long for a test")
        sequences = [steps.tokens(unit + 1, "on top", index) for index in range(decoding)]
        prompts = [steps.tokens(length, "step", index) for index, length in enumerate(lengths)]
        states = [steps.open() for _ in sequences]
        for state, tokens in zip(states, sequences, strict=True):
            steps.prefill(state, tokens[:unit])
        batch = [
            steps.decode_chunk(state, tokens[unit:], unit) for state, tokens in zip(states, sequences, strict=True)
        ]
        batch += [Chunk(steps.open(), prompt, 0, ChunkKind.PREFILL, Output.LAST) for prompt in prompts]
        what = (
            f"a step of {size} prompt tokens and {decoding} decode rows. max_step_tokens={size} bounds the prompt "
            "tokens alone; up to max_open decode rows come on top: make buffers for both."
        )
        try:
            rows = steps.step(batch)
        except ConformanceError as error:
            raise ConformanceError(f"The model failed in {what} {error}") from error.__cause__
        steps.release_all()
        due = [steps.alone(tokens, unit)[1:] for tokens in sequences]
        due += [steps.alone(prompt, len(prompt)) for prompt in prompts]
        for row, expected in zip(rows, due, strict=True):
            steps.same(row, expected, f"A row is not what it is alone in {what}")

    @step_check
    def test_logits_may_be_overwritten(self, steps: Steps) -> None:
        """A sampler writes into the logits that it gets: the next rows, and those of the same prompt, are as ever."""
        tokens = steps.tokens(steps.unit + 3, "overwritten")
        prompt = len(tokens) - 3
        due = steps.alone(tokens, prompt)
        for turn in range(2):
            state = steps.open()
            chunks = [Chunk(state, tokens[:prompt], 0, ChunkKind.PREFILL, Output.LAST)]
            chunks += [
                steps.decode_chunk(state, tokens[place : place + 1], place) for place in range(prompt, len(tokens))
            ]
            for place, chunk in enumerate(chunks):
                logits = steps.model.step([chunk])
                scores = read_scores(cast(Logits, steps.on_cpu(logits)), 1)
                steps.same(
                    scores,
                    due[place : place + 1],
                    f"The logits that earlier steps returned were overwritten, as a sampler does, and {place} tokens "
                    f"behind {'the same prompt' if turn else 'a prompt'} the row is another. Return a copy of what you "
                    "keep.",
                )
                scores[:] = np.nan
            steps.release(state)

    @step_check
    def test_the_first_and_the_last_token_id_are_as_others(self, steps: Steps) -> None:
        """0 and ``vocab_size - 1``, anywhere in a prompt and decoded, alone and beside others."""
        plain = steps.tokens(6, "ids")
        chat = long_example(self.example_tokens(steps.model), CHAT + 9)
        steps.need_context(len(chat) + 2)
        for token in (0, steps.model.vocab_size - 1):
            for tokens in ([*chat[:-4], token, *chat[-4:]], [*chat, token]):
                for prompt in (len(chat) - 3, len(chat) - 2):
                    steps.same(
                        steps.alone(tokens, prompt)[-1:],
                        steps.alone(tokens, len(tokens)),
                        f"A sequence with token {token} in it has another row when all behind {prompt} of its tokens "
                        "are decoded. No id is padding: take lengths for what is padded, not tokens.",
                        exact=False,
                    )
            prompts = [[token], [token] * 3, [token, *plain], [*plain[:3], token, *plain[3:]], [*plain, token]]
            count = min(steps.width(8, len(prompts)), steps.limits.max_step_tokens // 7)
            chunks = [Chunk(steps.open(), list(each), 0, ChunkKind.PREFILL, Output.LAST) for each in prompts[:count]]
            for tokens, rows in zip(prompts, steps.step(chunks), strict=False):
                steps.same(
                    rows,
                    steps.alone(tokens, len(tokens)),
                    f"In a step with several prompts, one of {len(tokens)} tokens, some of them {token}, has another "
                    "row than alone.",
                )
            steps.release_all()

    @step_check
    def test_output_all_gives_a_row_for_each_token(self, steps: Steps) -> None:
        """``output=all`` gives the rows that shorter prompts give, in the order of positions."""
        if not steps.can.all_logits:
            raise Inapplicable("all_logits is not declared")
        # One step with as many rows as there may be, where that is no long work, and a few more.
        grid = steps.limits.grid
        most = min(steps.limits.max_logit_rows, steps.limits.max_step_tokens, max(128, grid)) // grid * grid
        state, tokens = steps.open(), steps.tokens(max(most, steps.unit) + 3, "all")
        steps.need_context(len(tokens))
        rows = steps.prefill(state, tokens, output=Output.ALL)
        require(len(rows) == len(tokens), f"output=all gave {len(rows)} rows for {len(tokens)} tokens")
        for length in (1, steps.unit, most, len(tokens)):
            steps.same(
                rows[length - 1 : length],
                steps.alone(tokens[:length], length),
                f"Row {length - 1} of output=all is not the row after {length} tokens. Rows come in the order of "
                "positions.",
                exact=False,
            )

    @step_check
    def test_hidden_values_are_a_row_a_token(self, steps: Steps) -> None:
        """``output=hidden`` gives a row for each token, the same in one chunk and in two."""
        if not steps.can.hidden:
            raise Inapplicable("hidden is not declared")
        tokens = steps.tokens(steps.unit + 3, "hidden")
        state = steps.open()
        whole = steps.prefill(state, tokens, output=Output.HIDDEN)
        steps.release(state)
        require(
            np.abs(whole - whole[0]).max() > 0,
            "output=hidden gave the same values for every token. Return what the last layer made of each.",
        )
        require(len(whole) == len(tokens), f"output=hidden gave {len(whole)} rows for {len(tokens)} tokens")
        state = steps.open()
        parts = [steps.prefill(state, tokens[: steps.unit], output=Output.HIDDEN)]
        parts.append(steps.prefill(state, tokens[steps.unit :], steps.unit, Output.HIDDEN))
        steps.same(
            np.concatenate(parts), whole, "Hidden values depend on where a prompt is cut on the grid.", exact=False
        )


def _is_inherited(model: object, method: str) -> bool:
    return getattr(type(model), method) is getattr(BatchStepModel, method)
