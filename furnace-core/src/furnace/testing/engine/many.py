"""Several requests in one call: n choices, lists of prompts."""

from __future__ import annotations

import asyncio
import gc

from furnace.contracts import EngineBusyError, FinishReason, InvalidRequestError
from furnace.testing.conformance import Conformance, engine_check
from furnace.testing.engine.cancellation import cancelled_while_it_admits
from furnace.testing.engine.client import Answer, Client
from furnace.testing.engine.crowds import TRIES, enough_tries, full_queue, leave
from furnace.testing.engine.sampling import undecided
from furnace.testing.verdict import Inapplicable, fail, refused, require

__all__ = ["ManyChecks"]

_ENOUGH = 3
"""So many tries must tell something."""
_EVENT_SECONDS = 20.0


class ManyChecks(Conformance):
    """``generate_many``, and its requests beside each other."""

    @engine_check
    async def test_generate_many_answers_each_request(self, client: Client) -> None:
        """``generate_many`` gives a Generation for each request, in order."""
        require(await client.engine.generate_many([]) == [], "generate_many([]) must return an empty list")
        lengths = [3, 5, 4]
        requests = [client.ask(max_tokens=length, choice=choice, seed=7) for choice, length in enumerate(lengths)]
        generations = await client.engine.generate_many(requests)
        require(len(generations) == 3, f"generate_many of 3 requests returned {len(generations)} generations")
        answers = await asyncio.gather(*map(client.read, generations))
        counts = [answer.usage.completion_tokens for answer in answers if answer.finished.reason is FinishReason.LENGTH]
        if len(counts) == len(lengths):
            require(counts == lengths, f"choices that asked for {lengths} tokens got {counts}: keep their order")

    @engine_check
    async def test_generate_many_admits_all_or_none(self, client: Client) -> None:
        """When one of several requests is refused, those that were admitted before it are cancelled."""
        requests = [client.ask(max_tokens=None), client.ask(temperature=-1.0)]
        least = 1
        for _ in range(TRIES):  # a quick engine may have come to the end of what is closed at once
            before = await client.settle()
            with refused(InvalidRequestError, "generate_many() with a temperature of -1", param="temperature"):
                await client.engine.generate_many(requests)
            after = await client.settle()
            least = 0 if before is None or after is None else after.finished - before.finished
            if not least:
                break
        require(
            not least,
            "generate_many() refused one of two requests, and the other ran to its end, in every try. Close what was "
            "admitted before you raise.",
        )
        await client.works("generate_many() was refused")

    @engine_check
    async def test_generate_many_is_as_generate(self, client: Client) -> None:
        """Choices and prompts in one call: each gets, in its place, what ``generate`` gives it alone."""
        requests = [undecided(client, seed=5, choice=choice) for choice in range(3)]
        requests += [client.ask(prompt, max_tokens=9) for prompt in ("Something else", "And a third thing, longer")]
        alone = [await client.answer(request) for request in requests]
        together = await asyncio.gather(*map(client.read, await client.engine.generate_many(requests)))
        for place, (answer, due) in enumerate(zip(together, alone, strict=True)):
            require(
                answer.usage.prompt_tokens == due.usage.prompt_tokens
                and (answer.tokens == due.tokens or not client.can.deterministic),
                f"request {place} of {len(requests)} in generate_many() has {answer.usage} and gives {answer.text!r}; "
                f"alone {due.usage} and {due.text!r}. Each has its own prompt, params, seed and choice.",
            )

    @engine_check
    async def test_choices_without_a_seed_differ(self, client: Client) -> None:
        """A missing seed may be drawn once for all choices, but they differ, and equal prompts do, too."""
        for what, choices in (("choices", range(5)), ("equal prompts", [0] * 5)):
            requests = [undecided(client, choice=choice) for choice in choices]
            answers = await asyncio.gather(*map(client.read, await client.engine.generate_many(requests)))
            require(
                len({answer.text for answer in answers}) > 1,
                f"five {what} without a seed in one generate_many() gave the one text {answers[0].text!r}. Draw from "
                "seed and choice, with a seed for each prompt.",
            )

    @engine_check
    async def test_leaving_one_of_many_leaves_the_others(self, client: Client) -> None:
        """Of five choices in one call two are closed, one is dropped; the others come to their end."""
        requests = [client.ask(max_tokens=12 + choice, choice=choice) for choice in range(5)]
        generations = await client.engine.generate_many(requests)
        await client.read_texts(generations[1], 1)
        for place in (3, 1):
            await generations[place].aclose()
        del generations[3]
        del generations[1:3]
        gc.collect()
        for length, generation in zip((12, 16), generations, strict=True):
            answer = await client.read(generation)
            require(
                answer.usage.completion_tokens == length or answer.finished.matched is not None,
                f"after others of its generate_many() were left a request for {length} tokens got "
                f"{answer.usage.completion_tokens}",
            )
        await client.settle()

    @engine_check
    async def test_a_task_that_is_cancelled_in_generate_many_leaves_nothing(self, client: Client) -> None:
        """The client goes away while ``generate_many`` runs."""
        requests = [client.ask("A prompt to be read. " * 8, max_tokens=None, choice=choice) for choice in range(3)]
        await cancelled_while_it_admits(client, lambda: client.engine.generate_many(requests), "generate_many()")

    @engine_check
    async def test_many_that_find_one_place_take_none(self, client: Client) -> None:
        """With one place left in the queue, two requests are refused together, and the place is still there."""

        async def place_is_there() -> bool | None:
            crowd = await full_queue(client)
            if len(crowd.generations) < 2:
                raise Inapplicable("the engine holds no two requests at once")
            moved = crowd.moved()
            await crowd.generations.pop().aclose()
            pair = [client.ask(max_tokens=2, choice=choice) for choice in range(2)]
            try:
                admitted = await client.engine.generate_many(pair)
            except EngineBusyError:
                room = await crowd.has_room(client, 2, moved)
            else:
                await crowd.a_few_steps(client)
                # Where another one has left the queue there are two places.
                room = True if crowd.moved() == moved else None
                crowd.generations += admitted
            await leave(client, crowd.generations)
            return room

        await enough_tries(
            place_is_there,
            "there was one place in the queue, generate_many() refused two requests with EngineBusyError, and then the "
            "place was taken, in every try. Admit all or none.",
        )

    @engine_check
    async def test_requests_with_one_id_are_several(self, client: Client) -> None:
        """Two requests with one ``id``: one is closed, and the other ends; one ends, and the other can be closed."""
        # The first is the one that takes longer: on a busy machine, too, they then run beside each other.
        lengths = (None, 40)
        first, second = await client.engine.generate_many([client.ask(max_tokens=most) for most in lengths])
        await first.aclose()
        answer = Answer()
        try:
            while batch := await asyncio.wait_for(second.batch(), _EVENT_SECONDS):
                answer.events += batch
        except TimeoutError:
            fail(
                "of two requests with one id the first was closed, and the second got no last event. The id is for "
                "logs, and several requests may have it: keep them under a key of your own."
            )
        _ = answer.finished
        ran_on = 0
        for _ in range(2 * TRIES):
            before = await client.settle()
            long, short = await client.engine.generate_many([client.ask(max_tokens=most) for most in (None, 2)])
            await client.read(short)
            quick = long.usage.completion_tokens > client.engine.max_context // 4
            await long.aclose()
            after = await client.settle()
            if quick:
                continue
            if before is None or after is None or after.finished < before.finished + 2:
                return
            ran_on += 1
            if ran_on == TRIES:
                break
        if ran_on < _ENOUGH:
            raise Inapplicable("the engine is too quick for one to be closed after the other: give it a delay")
        fail(
            "of two requests with one id one ended, and the other, closed then, ran to its end, in every try. The id "
            "is for logs, and several requests may have it: keep them under a key of your own."
        )
