"""Steps that fail: what a model says of them, and what is left when it is closed."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
import tracemalloc
from itertools import product

import numpy as np

from furnace.contracts import Chunk, ChunkKind, OutOfKvError, Output, State, StepError
from furnace.runtime.logits import read_rows
from furnace.testing.conformance import Conformance, step_check
from furnace.testing.step.driver import Rows, Steps
from furnace.testing.threads import WorkThread
from furnace.testing.verdict import ConformanceError, Inapplicable, fail, require

__all__ = ["FailureChecks"]

_THREAD_SECONDS = 10.0
_SEQUENCES = 30
_NOISE_BYTES = 65_536
"""What Python keeps for itself."""
_PASSES = 12
_MOST_FAILING = 80


class FailureChecks(Conformance):
    """``StepError``, and ``close``."""

    @step_check
    def test_a_step_error_names_the_chunk_at_fault_and_no_other(self, steps: Steps) -> None:
        """Of three prompts one has a token that there is not; the others are as if it had not been there."""
        prompts = [steps.tokens(4 + place, "fault", place) for place in range(3)]
        if steps.width(16, 3) < 3 or sum(map(len, prompts)) > steps.limits.max_step_tokens:
            raise Inapplicable("the limits allow no three prompts in a step")
        due = [steps.alone([*prompt, 1], len(prompt)) for prompt in prompts]
        for guilty in range(3):
            states = [steps.open() for _ in prompts]
            batch = [_prompt(state, prompt) for state, prompt in zip(states, prompts, strict=True)]
            batch[guilty] = _prompt(states[guilty], [steps.model.vocab_size + 100_000])
            others = [place for place in range(3) if place != guilty]
            error = _step_error(steps, batch)
            require(
                error.failed == (guilty,),
                f"chunk {guilty} of 3 has a token outside the vocabulary, but StepError.failed is {error.failed}. "
                "Name the chunks at fault by their place in the batch: their requests end, the others go on.",
            )
            rows = self._others(steps, error, [batch[place] for place in others])
            for row, place in zip(rows, others, strict=True):
                steps.same(
                    row,
                    due[place][:1],
                    f"Beside a failed chunk, chunk {place} gets another row than alone. StepError.logits has the rows "
                    "of all other chunks, in batch order, and none of the failed ones.",
                )
                steps.same(
                    steps.decode(states[place], 1, len(prompts[place])),
                    due[place][1:],
                    f"After a StepError, the sequence of chunk {place} goes on with another row than alone. With "
                    "logits the others have advanced; with logits=None nothing has, and the step is repeated without "
                    "the failed ones.",
                )
            for state in states:
                steps.release(state)

    def _others(self, steps: Steps, error: StepError, batch: list[Chunk]) -> list[Rows]:
        """Their rows: in the error, or of the step without the failed chunk."""
        if error.logits is None:
            try:
                return steps.step(batch)
            except AssertionError as second:
                fail(
                    "StepError(logits=None) says that nothing advanced, but the step without the failed chunk fails: "
                    f"{second}"
                )
        try:
            rows = read_rows(steps.on_cpu(error.logits), len(batch), steps.model.vocab_size)
        except (TypeError, ValueError) as wrong:
            fail(f"StepError.logits should have {len(batch)} rows, of all chunks but the failed one: {wrong}")
        return list(np.array(rows)[:, None])

    @step_check
    def test_a_step_error_while_decoding_names_the_chunk_at_fault(self, steps: Steps) -> None:
        """Of three sequences that decode one gets a token that there is not, alone or behind a right one."""
        if steps.width(16, 3) < 3:
            raise Inapplicable("the limits allow no three sequences")
        sequences = [steps.tokens(7 + place, "decoding", place) for place in range(3)]
        due = [steps.alone(tokens, len(tokens) - 2) for tokens in sequences]
        good = [1] if steps.limits.max_decode_tokens > 1 else []
        for guilty, before in product(range(3), ([], good) if good else ([],)):
            states = [steps.open() for _ in sequences]
            for state, tokens in zip(states, sequences, strict=True):
                steps.prefill(state, tokens[:-2])
            batch = [
                steps.decode_chunk(state, tokens[-2:-1], len(tokens) - 2)
                for state, tokens in zip(states, sequences, strict=True)
            ]
            start = len(sequences[guilty]) - 2
            batch[guilty] = steps.decode_chunk(states[guilty], [*before, steps.model.vocab_size + 100_000], start)
            others = [place for place in range(3) if place != guilty]
            error = _step_error(steps, batch)
            require(
                error.failed == (guilty,),
                f"chunk {guilty} of 3 decodes a token outside the vocabulary, but StepError.failed is {error.failed}.",
            )
            rows = self._others(steps, error, [batch[place] for place in others])
            for row, place in zip(rows, others, strict=True):
                last = steps.decode(states[place], sequences[place][-1], len(sequences[place]) - 1)
                steps.same(
                    np.concatenate([row, last]),
                    due[place][1:],
                    f"Beside a chunk that failed while decoding, the sequence of chunk {place} gets other rows than "
                    "alone. With StepError.logits the others have advanced; with logits=None nothing has.",
                )
            for state in states:
                steps.release(state)

    @step_check
    def test_sequences_of_a_failed_step_can_be_computed_anew(self, steps: Steps) -> None:
        """A token that there is not, at each place of a step: all states are released, each sequence begins anew."""
        sequences = [steps.tokens(6 + place, "anew", place) for place in range(3)]
        if steps.width(16, 3) < 3 or sum(map(len, sequences)) > steps.limits.max_step_tokens:
            raise Inapplicable("the limits allow no three prompts in a step")
        due = [steps.alone(tokens, len(tokens) - 2) for tokens in sequences]
        for decodes, guilty in product((False, True), range(3)):
            states = [steps.open() for _ in sequences]
            batch = []
            for place, (state, tokens) in enumerate(zip(states, sequences, strict=True)):
                start = len(tokens) - 2 if decodes else 0
                if decodes:
                    steps.prefill(state, tokens[:start])
                piece = tokens[start : start + 1] if decodes else list(tokens)
                piece[-1] = steps.model.vocab_size + 100_000 if place == guilty else piece[-1]
                batch.append(
                    Chunk(state, piece, start, ChunkKind.DECODE if decodes else ChunkKind.PREFILL, Output.LAST)
                )
            with contextlib.suppress(Exception):
                steps.model.step(batch)
            for state in states:
                steps.release(state)
            for tokens, expected in zip(sequences, due, strict=True):
                steps.same(
                    steps.alone(tokens, len(tokens) - 2),
                    expected,
                    "A step raised, its states were released, and one of its sequences, computed anew, gets other rows "
                    "than before. A step that ends with an error must leave nothing in the model.",
                )

    @step_check
    def test_failed_sequences_leave_their_places_free(self, steps: Steps) -> None:
        """Twice as many sequences as can be open fail, in a prompt and while they decode; then all can be open."""
        wrong = steps.model.vocab_size + 100_000
        failing = min(2 * steps.limits.max_open + 2, _MOST_FAILING)
        count = steps.width(2, min(steps.limits.max_open, _MOST_FAILING // 2))
        try:
            for turn in range(failing):
                state, chunk = steps.open(), [1, wrong]
                if turn % 2:
                    steps.prefill(state, [1, 2])
                with contextlib.suppress(Exception):
                    steps.model.step([steps.decode_chunk(state, [wrong], 2) if turn % 2 else _prompt(state, chunk)])
                steps.release(state)
            states = [steps.open() for _ in range(count)]
            for state in states:
                steps.prefill(state, [1])
            for state in states:
                steps.decode(state, 2, 1)
        except (ConformanceError, OutOfKvError) as error:
            fail(
                f"After up to {failing} sequences that failed, {count} can't be open any more: {error}. What a prompt "
                "or a step takes before it raises must be given back: by it, if there is no state that is released."
            )

    @step_check
    def test_memory_does_not_grow_with_steps(self, steps: Steps) -> None:
        """After many sequences that were opened, stepped, forked, cut and released, the model holds no more."""
        prompt = steps.tokens(4, "memory")

        def pass_through() -> None:
            for _ in range(_SEQUENCES):
                state = steps.open()
                steps.prefill(state, prompt)
                steps.decode(state, 1, len(prompt))
                if steps.can.prefix_reuse and steps.width(8, 2) > 1:
                    steps.release(steps.fork(state, len(prompt))[0])
                if steps.can.rewind:
                    steps.truncate(state, len(prompt))
                steps.release(state)

        tracemalloc.start()
        try:
            pass_through()
            for _ in range(_PASSES):
                size, count = _held()
                pass_through()
                size, count = _held()[0] - size, _held()[1] - count
                # Less than one for two sequences: what Python itself warms up comes to an end.
                if size < _NOISE_BYTES and count < _SEQUENCES // 2:
                    return
        finally:
            tracemalloc.stop()
        fail(
            f"{_SEQUENCES} sequences left {count} objects and {size} bytes behind, and so each time. Look for a list "
            "or dict that keeps states, chunks or logits."
        )

    def test_a_model_can_be_closed_unused_and_after_an_error(self) -> None:
        """``close`` right after loading, and after a step that raised."""
        thread = WorkThread("furnace-testing-close")

        def use(*, fails: bool) -> None:
            model = self.batch_model()
            steps = Steps(model, self.tolerance)
            if fails:
                state = steps.open()
                with contextlib.suppress(Exception):
                    model.step([_prompt(state, [model.vocab_size + 100_000])])
                steps.release(state)
            try:
                model.close()
            except Exception as error:
                when = "after a step that raised" if fails else "of a model that was never used"
                fail(f"close() {when} raised {type(error).__name__}: {error}. Give back what there is.")

        for fails in (False, True):
            thread.call(
                functools.partial(use, fails=fails), limit=self.patience, what="A model that is loaded and closed"
            )
        thread.end()

    def test_closing_a_model_ends_its_threads(self) -> None:
        """After ``close`` no thread of the model is left."""
        before = set(threading.enumerate())
        thread = WorkThread("furnace-testing-close")

        def use() -> None:
            model = self.batch_model()
            steps = Steps(model, self.tolerance)
            steps.prefill(steps.open(), [1, 2, 3])
            steps.release_all()
            try:
                model.close()
            except Exception as error:
                fail(f"close() raised {type(error).__name__}: {error}. It gives back everything, and is called once.")

        thread.call(use, limit=self.patience, what="A model that is loaded, used and closed")
        thread.end()
        for left in set(threading.enumerate()) - before:
            left.join(_THREAD_SECONDS)
            require(
                not left.is_alive(),
                f"after close() the thread {left.name!r} still runs. End in close() what the model started, and wait "
                "for it.",
            )


def _prompt(state: State, tokens: list[int]) -> Chunk:
    return Chunk(state, tokens, 0, ChunkKind.PREFILL, Output.LAST)


def _held() -> tuple[int, int]:
    """How many bytes Python's objects take, and in how many pieces."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0], sys.getallocatedblocks()


def _step_error(steps: Steps, batch: list[Chunk]) -> StepError:
    """What a step with a wrong token raises.

    Raises:
        Inapplicable: something else; then all states of the batch are unknown, and nothing more is promised.
    """
    try:
        steps.model.step(batch)
    except StepError as error:
        return error
    except OutOfKvError:
        fail("a step with a token outside the vocabulary raised OutOfKvError, though there is room")
    except Exception as error:
        raise Inapplicable(f"a token outside the vocabulary raises {type(error).__name__}, not StepError") from None
    raise Inapplicable("the model takes tokens outside its vocabulary")
