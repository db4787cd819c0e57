"""The events of a request: which, in which order, and what they count."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from copy import deepcopy

import msgspec

from furnace.contracts import (
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    Prompt,
    Reasoning,
    Started,
    Text,
    ToolCallDelta,
)
from furnace.contracts.errors import quote
from furnace.testing.conformance import Conformance, engine_check
from furnace.testing.engine.client import Answer, Client
from furnace.testing.verdict import Inapplicable, fail, require

__all__ = ["EventChecks"]

_LAST = (Finished, Failed)
_TRIES = 5
_GIVES_UP = 200


class EventChecks(Conformance):
    """What a stream is made of."""

    @engine_check
    async def test_events_come_in_order(self, client: Client) -> None:
        """``Started`` once, then output, then one last event."""
        for endless, temperature in ((True, 0.0), (False, 1.0)):
            answer = await client.answer(client.ask(max_tokens=20, endless=endless, temperature=temperature))
            _ = answer.started, answer.finished
            starts = [place for place, event in enumerate(answer.events) if isinstance(event, Started)]
            require(starts == [0], f"Started came at places {starts} of the stream. Send it first, and once.")
            allowed = (Text, Reasoning, ToolCallDelta) if client.can.parses_output else (Text,)
            for event in answer.events[1:-1]:
                if isinstance(event, Prompt):
                    fail("Prompt was sent, though prompt_logprobs was not asked for. Send it only then.")
                require(
                    isinstance(event, allowed),
                    f"{type(event).__name__} came between Started and the last event. "
                    + ("" if client.can.parses_output else "Reasoning and ToolCallDelta need parses_output."),
                )

    @engine_check
    async def test_there_is_exactly_one_last_event(self, client: Client) -> None:
        """After ``Finished`` nothing comes, however often one asks."""
        for max_tokens in (1, 2, 9):
            generation = await client.submit(client.ask(max_tokens=max_tokens))
            answer = await client.read(generation)
            lasts = [event for event in answer.events if isinstance(event, _LAST)]
            require(
                len(lasts) == 1 and isinstance(answer.events[-1], _LAST),
                f"a stream of {max_tokens} tokens has {len(lasts)} last events: {[type(e).__name__ for e in lasts]}. "
                "Send exactly one Finished or Failed, as the very last event.",
            )
            # Another request's time, for whatever comes late.
            await client.works("a stream's last event")
            for _ in range(3):
                late = await generation.batch()
                require(
                    not late, f"after the last event batch() gave {late}. It must return an empty list from then on."
                )

    @engine_check
    async def test_all_pieces_together_hold_each_token_once(self, client: Client) -> None:
        """``Text.tokens`` of all events are the completion's tokens, and usage counts them."""
        for max_tokens in (1, 2, 3, 17):
            answer = await client.answer(client.ask(max_tokens=max_tokens))
            count = answer.usage.completion_tokens
            if answer.text and not answer.tokens:
                raise Inapplicable("the engine knows no token ids: Text.tokens is always empty")
            require(
                len(answer.tokens) == count,
                f"the pieces hold {len(answer.tokens)} tokens, but usage counts {count}. Send each generated token "
                "once, the end token included, also when it makes no text.",
            )
            if client.can.vocab_size is not None:
                require(
                    all(0 <= token < client.can.vocab_size for token in answer.tokens),
                    f"a token is not below capabilities.vocab_size, {client.can.vocab_size}",
                )

    @engine_check
    async def test_max_tokens_is_kept(self, client: Client) -> None:
        """A request for n tokens that ignores end tokens gets n, and ``length``."""
        for max_tokens in (1, 2, 7, 30):
            answer = await client.answer(client.ask(max_tokens=max_tokens))
            count, reason = answer.usage.completion_tokens, answer.finished.reason
            require(count <= max_tokens, f"max_tokens={max_tokens} gave {count} tokens. Stop after {max_tokens}.")
            if reason is FinishReason.LENGTH:
                require(
                    answer.finished.matched is None,
                    f"output that ended by length says matched={answer.finished.matched!r}. Nothing was matched.",
                )
                require(
                    count == max_tokens,
                    f"max_tokens={max_tokens} ended with reason length after {count} tokens. The last token counts, "
                    "too.",
                )
            else:
                require(
                    count < max_tokens or answer.finished.matched is not None,
                    f"{max_tokens} tokens were generated, but the reason is {reason.value}. At max_tokens it is "
                    "length.",
                )

    @engine_check
    async def test_no_event_is_empty(self, client: Client) -> None:
        """``Text`` has text, or else tokens."""
        answer = await client.answer(client.ask(max_tokens=20))
        for event in answer.events:
            if isinstance(event, Text | Reasoning) and not event.text:
                require(event.tokens, f"{event} says nothing. Don't send an event without text and tokens.")

    @engine_check
    async def test_text_comes_as_it_is_generated(self, client: Client) -> None:
        """A long answer comes in many pieces, not in one at the end."""
        await _comes_in_pieces(client, ())

    @engine_check
    async def test_stop_strings_hold_back_only_what_may_become_one(self, client: Client) -> None:
        """The same with stop strings that never come."""
        await _comes_in_pieces(client, ("\u2603", "\u2603\u2603\u2603\u2603"))

    @engine_check
    async def test_the_prompt_is_counted(self, client: Client) -> None:
        """``Started`` and usage count the same prompt tokens, and as many as were given."""
        for count in (1, 5, 40):
            answer = await client.answer(client.ask(client.tokens(count, "count"), max_tokens=2))
            told = answer.started.prompt_tokens, answer.usage.prompt_tokens
            require(
                told == (count, count),
                f"a prompt of {count} token ids is {told[0]} prompt tokens in Started and {told[1]} in usage. Both "
                "count the prompt as the model reads it, and ids are taken as they are.",
            )

    @engine_check
    async def test_cached_tokens_are_part_of_the_prompt(self, client: Client) -> None:
        """``cached_tokens`` never exceeds the prompt, agrees in ``Started`` and usage, and is 0 without reuse."""
        prompt = "The quick brown fox jumps over the lazy dog, again and again. " * 3
        for _ in range(3):
            answer = await client.answer(client.ask(prompt, max_tokens=2))
            cached, prompted = answer.usage.cached_tokens, answer.usage.prompt_tokens
            require(0 <= cached <= prompted, f"cached_tokens is {cached} of {prompted} prompt tokens")
            require(
                client.can.prefix_reuse or cached == 0,
                f"{cached} tokens came from a cache, but prefix_reuse is not declared",
            )
            require(
                answer.started.cached_tokens == cached,
                f"Started says {answer.started.cached_tokens} cached tokens, usage says {cached}. Give both the same.",
            )

    @engine_check
    async def test_a_slow_reader_misses_nothing(self, client: Client) -> None:
        """Events that are read after the end are those that are read at once."""
        request = client.ask(max_tokens=24)
        prompt_reader = await client.repeatable(request)
        generation = await client.submit(request)
        other = await client.answer(client.ask("Something else", max_tokens=40))
        _ = other.finished
        slow = await client.read(generation)
        require(
            (slow.text, slow.tokens) == (prompt_reader.text, prompt_reader.tokens),
            f"a reader that came late got {slow.text!r}, one that came at once {prompt_reader.text!r}. Keep all events "
            "until they are taken.",
        )

    @engine_check
    async def test_usage_grows_while_it_runs_and_stays_after_aclose(self, client: Client) -> None:
        """``Generation.usage`` counts what was sent so far, also after the end."""
        for turn in range(_TRIES):  # where all events are there at once nothing is seen of what usage said before
            generation = await client.submit(client.ask(max_tokens=16 << turn))
            seen = Answer()
            looks = 0
            while batch := await generation.batch():
                looks += 1
                seen.events += batch
                tokens = len(seen.tokens)
                require(
                    generation.usage.completion_tokens >= tokens,
                    f"{tokens} tokens were sent, but Generation.usage says {generation.usage.completion_tokens}. Count "
                    "a token before you send it: a request that is aborted is counted by what usage says then.",
                )
            await generation.aclose()
            require(
                generation.usage == seen.usage,
                f"after aclose Generation.usage is {generation.usage}; the last event said {seen.usage}. Keep it "
                "readable.",
            )
            if looks > 2:
                break

    @engine_check
    async def test_what_is_sent_survives_msgpack(self, client: Client) -> None:
        """Every event round-trips, as it must to cross to another process."""
        request = client.ask("naïve 🙂", max_tokens=12, stop=["never found"])
        copy = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=GenerateRequest)
        events = (await client.answer(copy)).events
        for event in events:
            try:
                again = msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=Event)
            except Exception as error:
                fail(
                    f"{type(event).__name__} can't cross to another process: {error}. Fill its fields with what they "
                    "say."
                )
            require(
                again == event, f"{event} came out of msgpack as {again}. Fill its fields with the types they declare."
            )

    @engine_check
    async def test_streams_of_many_clients_do_not_mix(self, client: Client) -> None:
        """Different prompts at once: each gets the answer that it gets alone."""
        prompts = [
            f"{word} is number {place}" for place, word in enumerate(("One", "Two", "Three", "Four", "Five", "Six"))
        ]
        requests = [client.ask(prompt, max_tokens=10 + place) for place, prompt in enumerate(prompts)]
        alone = [await client.answer(request) for request in requests]
        together = await client.together(requests)
        for place, (one, other) in enumerate(zip(alone, together, strict=True)):
            require(
                other.usage.prompt_tokens == one.usage.prompt_tokens
                and other.usage.completion_tokens == one.usage.completion_tokens,
                f"request {place} of {len(requests)} has usage {other.usage}; alone it was {one.usage}",
            )
            if client.can.deterministic:
                require(
                    other.tokens == one.tokens and other.text == one.text,
                    f"beside {len(requests) - 1} others request {place} gets {other.text!r}, alone {one.text!r}. "
                    "deterministic promises the same; look for events or state of one request that reach another.",
                )

    @engine_check
    async def test_a_batch_belongs_to_its_reader(self, client: Client) -> None:
        """A list that ``batch`` returned does not change any more, nor do its events."""
        generation = await client.submit(client.ask(max_tokens=24))
        batches: list[tuple[list[Event], list[Event]]] = []
        while batch := await generation.batch():
            batches.append((batch, deepcopy(batch)))
        for batch, copy in batches:
            require(
                batch == copy,
                f"batch() returned {quote(copy)}, and later that list was {quote(batch)}. Return a new list each time, "
                "and leave the lists alone that events have.",
            )

    @engine_check
    async def test_a_reader_that_gives_up_and_comes_back_misses_nothing(self, client: Client) -> None:
        """A task that waits in ``batch`` is cancelled, again and again: the next one gets what came."""
        request = client.ask(max_tokens=24)
        due = await client.repeatable(request)
        generation = await client.submit(request)
        answer = Answer()
        turns = 0
        while not any(isinstance(event, _LAST) for event in answer.events):
            reader = asyncio.create_task(generation.batch())
            for _ in range(turns % 4):
                await asyncio.sleep(0)
            turns += 1
            if turns < _GIVES_UP:
                reader.cancel()
            try:
                batch = await reader
            except asyncio.CancelledError:
                continue
            if not batch:
                break
            answer.events += batch
        require(
            (answer.text, answer.tokens) == (due.text, due.tokens),
            f"a reader whose wait in batch() was cancelled at times got {answer.text!r} and not {due.text!r}. Take "
            "events out only when you return them, and let only aclose() end the request.",
        )


async def _comes_in_pieces(client: Client, stop: Sequence[str]) -> None:
    pieces = count = 0
    for turn in range(_TRIES):  # what comes faster than it is read is put together, so that one try tells nothing
        length = min(48 << turn, client.engine.max_context // 2)
        answer = await client.answer(client.ask(max_tokens=length, stop=stop))
        count = answer.usage.completion_tokens
        if count < 24 or not answer.text:
            raise Inapplicable("the model says too little")
        pieces = len([event for event in answer.events if isinstance(event, Text)])
        if pieces > 2:
            return
    require(
        False,
        f"{count} tokens came in {pieces} pieces, with stop={list(stop)}. Send text as soon as it is there, and hold "
        "back only what may become a stop string or an unfinished character.",
    )
