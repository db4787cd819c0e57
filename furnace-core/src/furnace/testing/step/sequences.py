"""What a sequence's logits may depend on: its own tokens, and nothing else."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from furnace.contracts import Chunk, ChunkKind, Output, State
from furnace.runtime.plain_model import PlainModel
from furnace.testing.conformance import Conformance, step_check
from furnace.testing.step.driver import Steps
from furnace.testing.verdict import Inapplicable

__all__ = ["SequenceChecks"]

_DECODED = 4
_MOST_DECODED = 128
_LONGEST = 256
_SHARED = 100
"""A beginning that prompts have in common, long enough that a cache of prompts takes it over."""


class SequenceChecks(Conformance):
    """Batches, chunks, and states that are used again."""

    @step_check
    def test_decoding_goes_on_where_the_prefill_ended(self, steps: Steps) -> None:
        """The row after a decoded token is the row after a prompt that ends with it."""
        tokens = self.example_tokens(steps.model)[: steps.model.max_context - 1]
        prompt = max(1, len(tokens) - 6)
        rows = steps.alone(tokens, prompt)
        for length in range(prompt + 1, len(tokens) + 1):
            steps.same(
                rows[length - prompt : length - prompt + 1],
                steps.alone(tokens[:length], length),
                f"The row after {length} tokens, the last {length - prompt} of them decoded, is not the row after a "
                "prompt of these tokens. Check the position of decoded tokens: the first one after a prompt of n "
                "tokens is at position n.",
                exact=False,
            )

    @step_check
    def test_prompts_of_all_lengths_go_on_as_they_would_in_one_piece(self, steps: Steps) -> None:
        """At lengths up to 256, the row after a few decoded tokens is the row after the whole as a prompt."""
        if not isinstance(steps.model, PlainModel):
            raise Inapplicable("the scheduler cuts the prompts of a batch model, and the chunks have their own checks")
        example = self.example_tokens(steps.model)
        # What follows is the end of the example: a model may read a second chat as more than tokens.
        onward = example[len(example) // 2 :]
        tokens = (example + onward * -(-_LONGEST // len(onward)))[: min(_LONGEST, steps.model.max_context - 1)]
        # Below, a chat's opening would be cut.
        for length in range(_LONGEST // 6, len(tokens) + 1, _LONGEST // 12):
            steps.same(
                steps.alone(tokens[:length], length - _DECODED)[-1:],
                steps.alone(tokens[:length], length),
                f"The row after {length} tokens, the last {_DECODED} of them decoded, is not the row after a prompt of "
                "these tokens. If other lengths are right, look at where prefill cuts a prompt into pieces, and at a "
                "window or ring buffer: a piece must not overwrite what its own tokens still see.",
                exact=False,
            )

    @step_check
    def test_a_prompt_that_begins_an_earlier_one_has_its_own_row(self, steps: Steps) -> None:
        """A prompt, then its beginning, the same again, and one that goes on: as a cache of prompts meets them."""
        unit, tokens = steps.unit, steps.tokens(2 * steps.unit + 5, "begins")
        steps.need_context(len(tokens) + 1)
        lengths = (len(tokens) - 1, unit, unit, unit + 1, len(tokens), len(tokens) - 2, 1)
        due = {}
        for length in sorted(set(lengths)):
            steps.alone(steps.tokens(3, "between", length), 3)
            due[length] = steps.alone(tokens[:length], length)
        for before, length in pairwise((len(tokens), *lengths)):
            steps.same(
                steps.alone(tokens[:length], length),
                due[length],
                f"After a prompt of {before} tokens, one of {length} of the same tokens gets another row than before. "
                "If the model keeps an earlier prompt's KV: take the common tokens from it, but always compute the "
                "last token again, for its row.",
                exact=False,
            )

    @step_check
    def test_the_same_steps_give_the_same_rows_again(self, steps: Steps) -> None:
        """One sequence twice, one after the other."""
        tokens = steps.tokens(steps.unit + 6, "again")
        first = steps.alone(tokens, steps.unit + 2)
        steps.same(
            steps.alone(tokens, steps.unit + 2),
            first,
            "The same steps gave other rows the second time. Look for what the first sequence left behind.",
        )

    @step_check
    def test_a_row_does_not_depend_on_its_neighbours(self, steps: Steps) -> None:
        """Sequences decode together, then one fewer at each step: every row is what it is alone."""
        longest = 2 * steps.unit + 22
        steps.need_context(longest)
        count = steps.width(longest, 12)
        if count < 2:
            raise Inapplicable("the model takes one sequence at a time")
        prompts = [steps.tokens(1 + index * (2 * steps.unit) // count, "width", index) for index in range(count)]
        following = steps.tokens(count, "width")
        alone = [steps.alone([*prompt, *following], len(prompt)) for prompt in prompts]
        states = [steps.open() for _ in prompts]
        for state, prompt in zip(states, prompts, strict=True):
            steps.prefill(state, prompt)
        for turn, width in enumerate(range(count, 0, -1)):
            batch = [
                steps.decode_chunk(states[index], [following[turn]], len(prompts[index]) + turn)
                for index in range(width)
            ]
            for index, rows in enumerate(steps.step(batch)):
                steps.same(
                    rows,
                    alone[index][turn + 1 : turn + 2],
                    f"In a batch of {width}, sequence {index} (prompt of {len(prompts[index])} tokens) gets another "
                    "row than alone. Nothing of a sequence may reach another one: check masks, lengths and padding.",
                )
            steps.release(states[width - 1])

    @step_check
    def test_prompts_in_one_step_do_not_touch_each_other(self, steps: Steps) -> None:
        """Several prompts of different lengths in one step."""
        longest = steps.unit
        count = min(steps.width(longest, 4), steps.limits.max_step_tokens // longest)
        if count < 2:
            raise Inapplicable("max_step_tokens allows no two prompts beside each other")
        prompts = [steps.tokens(max(1, longest - 3 * index), "prompts", index) for index in range(count)]
        states = [steps.open() for _ in prompts]
        batch = [_whole_prompt(state, prompt) for state, prompt in zip(states, prompts, strict=True)]
        for index, rows in enumerate(steps.step(batch)):
            steps.same(
                rows,
                steps.alone(prompts[index], len(prompts[index])),
                f"Of {count} prompts in one step, number {index} ({len(prompts[index])} tokens) gets another row than "
                "alone. A token may see its own sequence only.",
            )

    @step_check
    def test_equal_prompts_part_where_their_tokens_do(self, steps: Steps) -> None:
        """Two sequences with one prompt, short or long, that go on with different tokens; also two in the prompt."""
        if steps.width(steps.unit + 6, 2) < 2:
            raise Inapplicable("the model takes one sequence at a time")
        long = min(steps.model.max_context // 2, _LONGEST) - 2 * _DECODED
        for common, inside in ((steps.unit + 1, 0), (_SHARED, 0), (long, 2)):
            if common < 1 or common + _DECODED >= steps.model.max_context or steps.width(common + _DECODED, 2) < 2:
                continue
            prompt = steps.tokens(common, "equal")
            both = [[*prompt, *steps.tokens(inside + 3, "branch", index)] for index in range(2)]
            due = [steps.alone(tokens, common + inside) for tokens in both]
            states = [steps.open() for _ in both]
            for state, tokens in zip(states, both, strict=True):
                steps.prefill(state, tokens[: common + inside])
            for turn in range(3):
                place = common + inside + turn
                batch = [steps.decode_chunk(states[index], [both[index][place]], place) for index in range(2)]
                for index, rows in enumerate(steps.step(batch)):
                    steps.same(
                        rows,
                        due[index][turn + 1 : turn + 2],
                        f"Two sequences began with the same {common} tokens, and one changed the other. Each state "
                        "needs KV of its own: what is taken over from an earlier prompt must be copied, or never "
                        "written.",
                        exact=common == steps.unit + 1,
                    )
            steps.release_all()

    @step_check
    def test_sequences_that_take_turns_keep_apart(self, steps: Steps) -> None:
        """Two sequences in alternating steps, never in one batch."""
        if steps.width(steps.unit + 8, 2) < 2:
            raise Inapplicable("the model takes one sequence at a time")
        sequences = [steps.tokens(steps.unit + 4 + index, "turns", index) for index in range(2)]
        due = [steps.alone(tokens, len(tokens) - 4) for tokens in sequences]
        states = [steps.open() for _ in sequences]
        for index, tokens in enumerate(sequences):
            rows = steps.prefill(states[index], tokens[: len(tokens) - 4])
            steps.same(
                rows, due[index][:1], f"The prompt of sequence {index} gets another row while the other is open."
            )
        for turn in range(4):
            for index, tokens in enumerate(sequences):
                position = len(tokens) - 4 + turn
                steps.same(
                    steps.decode(states[index], tokens[position], position),
                    due[index][turn + 1 : turn + 2],
                    f"Sequence {index} changed while the other one stepped. Keep all that belongs to a sequence in its "
                    "state, and nothing of it in the model.",
                )

    @step_check
    def test_two_models_in_one_process_keep_apart(self, steps: Steps) -> None:
        """A second model, loaded beside the first: both decode in turns, and the second one is closed."""
        tokens = [steps.tokens(steps.unit + 6, "models", index) for index in range(2)]
        prompt = steps.unit + 2
        due = [steps.alone(each, prompt) for each in tokens]
        both = [steps, Steps(self.batch_model(), self.tolerance)]
        states = [each.open() for each in both]
        for index, each in enumerate(both):
            each.prefill(states[index], tokens[index][:prompt])
        for place in range(prompt, prompt + 4):
            for index, each in enumerate(both):
                each.same(
                    each.decode(states[index], tokens[index][place], place),
                    due[index][place - prompt + 1 : place - prompt + 2],
                    "With two models in the process one gets another row than alone. Keep KV and all that belongs to "
                    "a model in the object, and nothing of it in its class or module.",
                )
        both[1].release_all()
        both[1].model.close()
        steps.same(
            steps.alone(tokens[0], prompt), due[0], "After a second model was closed the first one gives other rows."
        )

    @step_check
    def test_chunks_on_the_grid_change_nothing(self, steps: Steps) -> None:
        """A prompt in one piece, and cut at every multiple of the grid."""
        unit, tokens = steps.unit, steps.tokens(3 * steps.unit + 3, "chunks")
        steps.need_context(len(tokens) + 1)
        whole = steps.alone(tokens, len(tokens))
        for cuts in ((unit,), (2 * unit,), (unit, 2 * unit, 3 * unit)):
            state = steps.open()
            start = 0
            for end in (*cuts, len(tokens)):
                rows = steps.prefill(
                    state, tokens[start:end], start, Output.LAST if end == len(tokens) else Output.NONE
                )
                start = end
            steps.release(state)
            steps.same(
                rows,
                whole,
                f"A prompt of {len(tokens)} tokens cut at {cuts} gives another row than in one piece. Later chunks "
                "must see the earlier ones' KV, at the right positions.",
            )

    @step_check
    def test_rows_of_early_chunks_may_be_asked_for(self, steps: Steps) -> None:
        """``output=last`` on a chunk that is not the prompt's last gives the row after that chunk."""
        unit, tokens = steps.unit, steps.tokens(2 * steps.unit + 3, "early")
        steps.need_context(len(tokens) + 1)
        state = steps.open()
        if isinstance(steps.model, PlainModel):
            raise Inapplicable("a StepModel gets its prompt in one piece")
        rows = [steps.prefill(state, tokens[:unit]), steps.prefill(state, tokens[unit:], unit)]
        for length, row in zip((unit, len(tokens)), rows, strict=True):
            steps.same(
                row,
                steps.alone(tokens[:length], length),
                f"The row after the first {length} tokens of a prompt in chunks is not the row after that prompt.",
            )

    @step_check
    def test_several_decoded_tokens_in_one_chunk_are_as_one_a_step(self, steps: Steps) -> None:
        """A decode chunk with as many tokens as ``max_decode_tokens`` allows, as in a replay."""
        most = min(steps.limits.max_decode_tokens, steps.limits.max_step_tokens, _MOST_DECODED)
        if most < 2:
            raise Inapplicable("max_decode_tokens is 1")
        prompt = steps.unit + 3
        tokens = steps.tokens(prompt + 2 * most + 1, "several")
        steps.need_context(len(tokens) + 1)
        alone = steps.alone(tokens, prompt)
        # Else the memory that the first sequence gave back may still hold what a model forgot to write.
        steps.alone(steps.tokens(len(tokens), "others"), prompt)
        state = steps.open()
        steps.prefill(state, tokens[:prompt])
        for start in range(prompt, len(tokens), most):
            chunk = steps.decode_chunk(state, tokens[start : start + most], start)
            (row,) = steps.step([chunk])
            end = start + len(chunk.tokens)
            steps.same(
                row,
                alone[end - prompt : end - prompt + 1],
                f"A decode chunk of {len(chunk.tokens)} tokens at position {start} gives another row than one token a "
                "step. Compute its rows as if fed one a step, or set max_decode_tokens = 1 and don't declare rewind.",
            )

    @step_check
    def test_drafts_get_a_row_each(self, steps: Steps) -> None:
        """A decode chunk with ``output=all``, as in speculation."""
        most = min(steps.limits.max_decode_tokens, 8)
        if most < 2 or not steps.can.all_logits:
            raise Inapplicable("max_decode_tokens is 1, or all_logits is not declared")
        prompt = steps.unit + 3
        tokens = steps.tokens(prompt + most, "drafts")
        alone = steps.alone(tokens, prompt)
        state = steps.open()
        steps.prefill(state, tokens[:prompt])
        (rows,) = steps.step([steps.decode_chunk(state, tokens[prompt:], prompt, Output.ALL)])
        steps.same(
            rows,
            alone[1:],
            f"The {most} rows of a decode chunk with output=all are not those of one token a step.",
        )

    @step_check
    def test_a_step_of_the_largest_size_works(self, steps: Steps) -> None:
        """One chunk of ``max_step_tokens``, where the context allows it."""
        size = min(steps.limits.max_step_tokens, steps.model.max_context - 1)
        if steps.limits.kv_tokens is not None:
            size = min(size, steps.limits.kv_tokens)
        if size > 4096:
            raise Inapplicable(f"a step of {size} tokens takes too long for a test")
        tokens = steps.tokens(size, "largest")
        rows = steps.prefill(steps.open(), tokens)
        steps.release_all()
        cut = steps.limits.grid * max(1, size // steps.limits.grid // 2)
        state = steps.open()
        if cut < size:
            steps.prefill(state, tokens[:cut], output=Output.NONE)
            steps.same(
                steps.prefill(state, tokens[cut:], cut),
                rows,
                f"A step of {size} tokens, which max_step_tokens allows, gives another row than two of half the size.",
            )

    @step_check
    def test_a_state_starts_empty_whatever_was_there_before(self, steps: Steps) -> None:
        """States are opened, used, released and opened again, in several orders."""
        long, short = steps.tokens(2 * steps.unit + 5, "long"), steps.tokens(steps.unit - 2, "short")
        steps.need_context(len(long) + 4)
        due = steps.alone(short, len(short) - 2)
        for _ in range(3):
            states = [steps.open() for _ in range(steps.width(len(long), 3))]
            for index, state in enumerate(states):
                steps.prefill(state, long[index:])
                steps.decode(state, long[0], len(long) - index)
            for state in states[1:] + states[:1]:
                steps.release(state)
            state = steps.open()
            rows = [steps.prefill(state, short[:-2])]
            rows += [steps.decode(state, short[place], place) for place in range(len(short) - 2, len(short))]
            steps.same(
                np.concatenate(rows),
                due,
                "A sequence in a place that was used before gets other rows. release() must forget all of the old "
                "sequence: its length, its KV, its last token.",
            )
            steps.release(state)

    @step_check
    def test_a_new_state_takes_a_prompt_beside_one_that_was_released(self, steps: Steps) -> None:
        """One sequence ends, another begins in its place, and a third one goes on undisturbed."""
        if steps.width(steps.unit + 8, 2) < 2:
            raise Inapplicable("the model takes one sequence at a time")
        lasting, leaving, coming = (steps.tokens(steps.unit + 6, "place", index) for index in range(3))
        prompt = steps.unit
        due, fresh = steps.alone(lasting, prompt), steps.alone(coming, prompt)
        state, gone = steps.open(), steps.open()
        steps.prefill(state, lasting[:prompt])
        steps.prefill(gone, leaving[:prompt])
        steps.release(gone)
        new = steps.open()
        rows = steps.prefill(new, coming[:prompt])
        steps.same(rows, fresh[:1], "A prompt in a place that another sequence left gets another row than alone.")
        for place in range(prompt, len(lasting)):
            batch = [
                steps.decode_chunk(new, [coming[place]], place),
                steps.decode_chunk(state, [lasting[place]], place),
            ]
            for row, expected in zip(steps.step(batch), (fresh, due), strict=True):
                steps.same(
                    row,
                    expected[place - prompt + 1 : place - prompt + 2],
                    "After one sequence was released and another opened, a row is not what it is alone.",
                )

    @step_check
    def test_as_many_states_as_the_limits_say_can_be_open(self, steps: Steps) -> None:
        """``max_open`` states, each with a token, stepped together."""
        count = min(steps.limits.max_open, steps.width(2, steps.limits.max_open))
        states = [steps.open() for _ in range(count)]
        at_once = max(1, min(count, steps.limits.max_step_tokens))
        for start in range(0, count, at_once):
            steps.step([_whole_prompt(state, [1 + start]) for state in states[start : start + at_once]])
        rows = steps.step([steps.decode_chunk(state, [2], 1) for state in states])
        steps.release_all()
        steps.same(
            rows[-1],
            steps.alone([1 + (count - 1) // at_once * at_once, 2], 1)[1:],
            f"The last of {count} open states gets another row than alone.",
        )


def _whole_prompt(state: State, prompt: list[int]) -> Chunk:
    return Chunk(state, prompt, 0, ChunkKind.PREFILL, Output.LAST)
