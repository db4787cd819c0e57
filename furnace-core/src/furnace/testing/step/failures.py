"""Steps that fail: what a model says of them, and what is left when it is closed."""

from __future__ import annotations

import gc
import threading
import tracemalloc

import numpy as np

from furnace.contracts import Chunk, ChunkKind, OutOfKvError, Output, State, StepError
from furnace.runtime.logits import read_rows
from furnace.testing.conformance import Conformance, step_check
from furnace.testing.step.driver import Rows, Steps
from furnace.testing.threads import WorkThread
from furnace.testing.verdict import Inapplicable, fail, require

__all__ = ["FailureChecks"]

_THREAD_SECONDS = 10.0
_SEQUENCES = 30
_NOISE_BYTES = 65_536
"""What Python keeps for itself."""


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
    def test_memory_does_not_grow_with_steps(self, steps: Steps) -> None:
        """After many sequences that were opened, stepped and released, the model holds no more than before."""
        prompt = steps.tokens(4, "memory")

        def pass_through() -> None:
            for _ in range(_SEQUENCES):
                state = steps.open()
                steps.prefill(state, prompt)
                steps.decode(state, 1, len(prompt))
                steps.release(state)

        grown = []
        tracemalloc.start()
        try:
            pass_through()
            for _ in range(2):
                gc.collect()
                before = tracemalloc.get_traced_memory()[0]
                pass_through()
                gc.collect()
                grown.append(tracemalloc.get_traced_memory()[0] - before)
        finally:
            tracemalloc.stop()
        require(
            min(grown) < _NOISE_BYTES,
            f"{_SEQUENCES} sequences left {min(grown)} bytes behind, each time. Look for a list or dict that keeps "
            "states, chunks or logits.",
        )

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
