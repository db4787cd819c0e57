"""The model behind furnace's scheduler: every way in which a request ends, and steps that fail."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence

from furnace.contracts import Chunk, ChunkKind, Failed, GenerateRequest, OutOfKvError, StepError
from furnace.runtime import Scheduled
from furnace.testing.conformance import Conformance, served_check
from furnace.testing.engine.client import Answer, Client
from furnace.testing.step.spy import Spy
from furnace.testing.verdict import Inapplicable, require

__all__ = ["ServedChecks"]


class ServedChecks(Conformance):
    """What the scheduler does with a model, and that the model survives it."""

    @served_check
    async def test_every_state_is_released_once_on_every_path(self, client: Client) -> None:
        """Requests that finish, stop, are cancelled in each phase, and are dropped leave no state open."""
        spy = _spy(client)
        prompts = [client.tokens(5 + 3 * place, "path", place) for place in range(6)]
        plain = await client.answer(client.ask(prompts[0], max_tokens=6))
        stop = client.ask(prompts[0], max_tokens=30, stop_token_ids=plain.tokens[-1:])
        generations = [await client.submit(client.ask(prompt, max_tokens=None)) for prompt in prompts[1:]]
        await generations[0].aclose()
        await client.read_texts(generations[1], 2)
        await generations[1].aclose()
        finished = await client.answers(
            [stop, client.ask(prompts[2], max_tokens=3), client.ask(prompts[3], max_tokens=1)]
        )
        del generations[2]
        gc.collect()
        for generation in generations[2:]:
            await generation.aclose()
        await client.settle()
        await _released(client, spy)
        require(all(answer.finished for answer in finished), "a request did not finish")

    @served_check
    async def test_a_request_goes_on_after_it_was_preempted(self, client: Client) -> None:
        """No room in the middle of a batch: the youngest is released, and computed again later."""
        requests = _requests(client)
        due = [await client.answer(request) for request in requests]
        spy = _spy(client)
        with _Interruption(spy, OutOfKvError("none left"), after=False) as interruption:
            answers = await _together(client, requests)
        interruption.must_have_come()
        _same(client, answers, due, "a request that was preempted and replayed")
        await client.settle()
        await _released(client, spy)

    @served_check
    async def test_requests_go_on_after_a_step_of_several_failed(self, client: Client) -> None:
        """A step raises after it was computed: its states are unknown, all are released, and each is replayed alone."""
        requests = _requests(client)
        due = [await client.answer(request) for request in requests]
        spy = _spy(client)
        with _Interruption(spy, RuntimeError("a planted failure"), after=True) as interruption:
            answers = await _together(client, requests)
        interruption.must_have_come()
        _same(client, answers, due, "a request whose step failed and that was replayed")
        await client.settle()
        await _released(client, spy)

    @served_check
    async def test_one_failing_sequence_ends_one_request(self, client: Client) -> None:
        """``StepError`` names one chunk: that request fails, the others go on."""
        requests = _requests(client)
        due = [await client.answer(request) for request in requests]
        spy = _spy(client)
        with _Interruption(spy, StepError([0]), after=False) as interruption:
            answers = await _together(client, requests)
        interruption.must_have_come()
        failed = [place for place, answer in enumerate(answers) if isinstance(answer.events[-1], Failed)]
        require(len(failed) == 1, f"a StepError for one chunk ended {len(failed)} of {len(answers)} requests")
        others = [place for place in range(len(answers)) if place not in failed]
        _same(
            client,
            [answers[place] for place in others],
            [due[place] for place in others],
            "a request beside a failing one",
        )
        await client.settle()
        await _released(client, spy)
        await client.works("one sequence failed")


class _Interruption:
    """Has one decode step with several sequences fail.

    Args:
        spy: before the model.
        error: to raise.
        after: whether the model has computed the step already.
    """

    def __init__(self, spy: Spy, error: Exception, *, after: bool) -> None:
        self._spy = spy
        self._error = error
        self._after = after
        self._came = 0
        self._raised = False

    def __enter__(self) -> _Interruption:
        if self._after:
            self._spy.after = self._interrupt
        else:
            self._spy.before = self._interrupt
        return self

    def __exit__(self, *exc_info: object) -> None:
        nothing: Callable[[Sequence[Chunk]], None] = lambda batch: None  # noqa: E731 - as in the spy
        self._spy.before = self._spy.after = nothing

    def _interrupt(self, batch: Sequence[Chunk]) -> None:
        if self._raised or len(batch) < 2 or any(chunk.kind is ChunkKind.PREFILL for chunk in batch):
            return
        self._came += 1
        if self._came == 3:
            self._raised = True
            raise self._error

    def must_have_come(self) -> None:
        """It was raised.

        Raises:
            Inapplicable: the requests never ran beside each other.
        """
        if not self._raised:
            raise Inapplicable("the scheduler never decoded two sequences in one step")


def _requests(client: Client) -> list[GenerateRequest]:
    return [
        client.ask(client.tokens(9 + 4 * place, "served", place), max_tokens=24, salt=str(place)) for place in range(3)
    ]


async def _together(client: Client, requests: Sequence[GenerateRequest]) -> list[Answer]:
    """Answers of requests that are admitted in one call, so that none has ended before another begins."""
    generations = await client.engine.generate_many(requests)
    return list(await asyncio.gather(*map(client.read, generations)))


def _same(client: Client, answers: Sequence[Answer], due: Sequence[Answer], what: str) -> None:
    for answer, expected in zip(answers, due, strict=True):
        count = expected.usage.completion_tokens
        require(
            answer.usage.completion_tokens == count,
            f"{what} has {answer.usage.completion_tokens} tokens, undisturbed it has {count}",
        )
        if client.can.deterministic:
            require(
                answer.tokens == expected.tokens,
                f"{what} gives {answer.tokens}, undisturbed {expected.tokens}. Tokens that are decoded several at "
                "once, or after a new prefill of the prompt, must give the same bits.",
            )


async def _released(client: Client, spy: Spy) -> None:
    """All states are given back but those that are kept for prompts to come, and none twice."""
    left = 0
    for _ in range(5000):
        # Once: a moment later the model thread may have given back what was kept, or the other way round.
        stats, left = client.engine.stats(), spy.open_states
        if not left or (stats is not None and stats.kv_cached > 0):
            left = 0
            break
        await asyncio.sleep(0.002)
    require(not spy.wrong, f"a state was given back wrongly: {spy.wrong}")
    require(not left, f"{left} states are still open after all requests have ended")


def _spy(client: Client) -> Spy:
    engine = client.engine
    if not isinstance(engine, Scheduled) or not isinstance(engine.model, Spy):
        raise Inapplicable("the engine has a scheduler of its own: there is no step model to look at")
    return engine.model
