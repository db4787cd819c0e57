"""The ways in which an output can end, and what they have to do with each other."""

from __future__ import annotations

import asyncio
from typing import Any

from furnace.contracts import Finished, FinishReason, GenerateRequest, Text, UnsupportedError
from furnace.contracts.sampling_bounds import LONGEST_STOP
from furnace.testing.conformance import Conformance, engine_check
from furnace.testing.engine.client import Answer, Client
from furnace.testing.engine.text import end_token, long_answer
from furnace.testing.verdict import Inapplicable, require

__all__ = ["EndingChecks"]

_NEVER = "\u2603"
"""A character that no model under test says."""
_LONG = 64
_MIN_TOKENS = 8
_HELD = 256
_TRIES = 5
_CROWD = 8


class EndingChecks(Conformance):
    """Each end of an output: by length, a token, a string, the context, its client."""

    @engine_check
    async def test_held_text_comes_out_however_the_output_ends(self, client: Client) -> None:
        """Text that might have become a stop string is sent when a stop token or an end token ends the output."""
        prompt, whole = await long_answer(client)
        tokens = list(dict.fromkeys(whole.tokens[4:]))
        for token in tokens[:: max(1, len(tokens) // 2)]:
            await _holds_nothing_back(
                client, client.ask(prompt, max_tokens=_LONG, stop_token_ids=[token]), "a stop token"
            )
        try:
            end = await end_token(client)
        except Inapplicable:
            return
        for seed in range(3):
            params: dict[str, Any] = {"temperature": 1.0, "seed": seed, "logit_bias": {end: 3.0}}
            await _holds_nothing_back(client, client.ask(endless=False, max_tokens=_LONG, **params), "an end token")

    @engine_check
    async def test_a_stop_token_in_the_last_place_is_a_stop(self, client: Client) -> None:
        """Where the ``max_tokens``-th token is a stop token, the reason is ``stop``, and it is ``matched``."""
        prompt, whole = await long_answer(client)
        tokens = whole.tokens
        place = next((place for place in range(2, len(tokens)) if tokens[place] not in tokens[:place]), None)
        if place is None:
            raise Inapplicable("the engine reports no token ids, or no token of the answer is new")
        token = tokens[place]
        answer = await client.answer(client.ask(prompt, max_tokens=place + 1, stop_token_ids=[token]))
        _is_a_stop(answer, token, "is a stop token")

    @engine_check
    async def test_a_stop_string_in_the_last_place_is_a_stop(self, client: Client) -> None:
        """The same where the ``max_tokens``-th token completes a stop string."""
        prompt, whole = await long_answer(client)
        before, count = "", 0
        for event in whole.events:
            if not isinstance(event, Text):
                continue
            count += len(event.tokens)
            text = before + event.text
            stop = text[-3:]
            if event.text and count > 3 and "\ufffd" not in stop and text.index(stop) + len(stop) == len(text):
                answer = await client.answer(client.ask(prompt, max_tokens=count, stop=[stop]))
                _is_a_stop(answer, stop, f"completes the stop string {stop!r}")
                return
            before = text
        raise Inapplicable("the engine reports no token ids, or its answer repeats itself")

    @engine_check
    async def test_a_stop_string_whose_characters_are_several_tokens_is_found(self, client: Client) -> None:
        """A character that is two tokens, in output that is made of these two."""
        for stop in "éßøñü¶":
            tokens = await client.service.tokenize(client.ask(4 * stop).input)
            parts = [token for token in dict.fromkeys(tokens) if tokens.count(token) == 4]
            if len(parts) != 2:
                continue
            params: dict[str, Any] = {"temperature": 2.0, "seed": 5, "logit_bias": dict.fromkeys(parts, 100.0)}
            try:
                whole = await client.repeatable(client.ask(max_tokens=_LONG, **params))
            except UnsupportedError:
                raise Inapplicable("logit_bias is not supported, so that these tokens can't be had") from None
            if stop not in whole.text:
                continue
            answer = await client.answer(client.ask(max_tokens=_LONG, stop=[stop], **params))
            require(
                (answer.text, answer.finished.matched) == (whole.text[: whole.text.index(stop)], stop),
                f"with stop=[{stop!r}] the text is {answer.text!r}, matched={answer.finished.matched!r}; without it is "
                f"{whole.text!r}. Search in whole characters, when their last token has come.",
            )
            return
        raise Inapplicable("no character was found that is two tokens and that the model says with a bias")

    @engine_check
    async def test_min_tokens_holds_back_stop_tokens_too(self, client: Client) -> None:
        """A token of ``stop_token_ids`` that would come early is not picked before ``min_tokens``."""
        prompt, whole = await long_answer(client)
        if len(whole.tokens) < _MIN_TOKENS:
            raise Inapplicable("the engine reports no token ids")
        token = whole.tokens[2]
        request = client.ask(prompt, max_tokens=2 * _MIN_TOKENS, stop_token_ids=[token], min_tokens=_MIN_TOKENS)
        try:
            answer = await client.answer(request)
        except UnsupportedError:
            raise Inapplicable("min_tokens is not supported") from None
        require(
            answer.usage.completion_tokens >= _MIN_TOKENS and token not in answer.tokens[:_MIN_TOKENS],
            f"with min_tokens={_MIN_TOKENS} a token of stop_token_ids came after {answer.usage.completion_tokens} "
            "tokens. None may be picked before that: Row.banned_tokens has both kinds of end tokens.",
        )

    @engine_check
    async def test_a_stop_string_is_searched_in_the_output_alone(self, client: Client) -> None:
        """Strings of the prompt, and one over the border between prompt and output, end nothing."""
        prompt, whole = await long_answer(client)
        stops = [prompt[-5:], prompt[-2:] + whole.text[:1], prompt[-1:] + whole.text[:3]]
        stops = [stop for stop in stops if stop not in whole.text][: client.can.max_stop_strings]
        if not stops:
            raise Inapplicable("the model repeats the prompt")
        answer = await client.answer(client.ask(prompt, max_tokens=_LONG, stop=stops))
        require(
            answer.text == whole.text,
            f"with stop={stops}, of which the prompt has parts, the text is {answer.text!r}, without it is "
            f"{whole.text!r}. Search in the output alone.",
        )

    @engine_check
    async def test_a_request_that_was_left_says_what_was_used(self, client: Client) -> None:
        """After ``aclose`` in the middle ``usage`` has the prompt, and each token that was sent."""
        generation = await client.submit(client.ask(max_tokens=None))
        begun = await client.read_texts(generation, 3)
        for when in ("while it runs", "after aclose()"):
            usage = generation.usage
            require(
                usage.prompt_tokens == begun.started.prompt_tokens
                and usage.cached_tokens == begun.started.cached_tokens
                and usage.completion_tokens >= max(1, len(begun.tokens)),
                f"{when} Generation.usage is {usage}, where Started was {begun.started} and {len(begun.tokens)} tokens "
                "were sent. Tokens count, also those of a request that its client left.",
            )
            await generation.aclose()
        await client.settle()

    @engine_check
    async def test_each_of_several_stop_strings_is_held_back(self, client: Client) -> None:
        """A stop string over the border of two pieces, beside a much longer one that begins alike and never comes."""
        if client.can.max_stop_strings < 2:
            raise Inapplicable("max_stop_strings is less than 2")
        prompt, whole = await long_answer(client)
        ends = [len("".join(whole.pieces[: count + 1])) for count in range(len(whole.pieces))]
        for end in ends[1:-1][:8]:
            stop = whole.text[max(0, end - 2) : end + 2]
            stops = [stop, stop[:1] + 40 * _NEVER]
            answer = await client.answer(client.ask(prompt, max_tokens=_LONG, stop=stops))
            due = whole.text[: whole.text.index(stop)]
            require(
                answer.text == due,
                f"with stop={stops!r} the text is {answer.text!r}, but it should be {due!r}. Hold back what may become "
                "any of the stop strings, not only the longest.",
            )

    @engine_check
    async def test_a_request_left_inside_a_character_leaves_none_of_it(self, client: Client) -> None:
        """Output of one token that begins a character is left; then others say what they said before."""
        if not client.can.deterministic:
            raise Inapplicable("deterministic is not declared")
        beginnings = await _beginnings(client)
        request = client.ask("Hello", max_tokens=12)
        due = await client.answer(request)
        for token in beginnings:
            try:
                left = await client.submit(client.ask(max_tokens=_LONG, logit_bias={token: 100.0}))
            except UnsupportedError:
                raise Inapplicable("logit_bias is not supported, so that these tokens can't be had") from None
            await client.read_texts(left, 2)
            await left.aclose()
            await client.settle()
            for answer in await client.answers([request] * _CROWD):
                require(
                    answer.text == due.text,
                    f"a request was left inside a character (token {token}), and now another one's text is "
                    f"{answer.text!r}, where it was {due.text!r}. Each request has a decoder of its own.",
                )

    @engine_check
    async def test_tokens_whose_text_is_held_back_are_used(self, client: Client) -> None:
        """All text is held back for a long stop string; ``usage`` grows all the same, and stays after ``aclose``."""
        prompt, _ = await long_answer(client)
        whole = await client.repeatable(client.ask(prompt, max_tokens=_HELD))
        stop = whole.text[: LONGEST_STOP - 1]
        length = characters = 0
        for event in whole.events:
            if isinstance(event, Text):
                characters += len(event.text)
                length += len(event.tokens) if characters <= len(stop) else 0
        if not length:
            raise Inapplicable("the engine reports no token ids")
        request = client.ask(prompt, max_tokens=length, stop=[stop + _NEVER])
        watched = 0
        for _ in range(_TRIES):
            generation = await client.submit(request)
            reader = asyncio.create_task(client.read(generation))
            looks = used = 0
            while not used and not reader.done():
                await asyncio.sleep(0.001)
                looks, used = looks + 1, generation.usage.completion_tokens
            ended = reader.done() or used >= length
            await generation.aclose()
            await reader
            require(
                generation.usage.completion_tokens >= used,
                f"{used} tokens were used, and after aclose() {generation.usage.completion_tokens}",
            )
            await client.settle()
            if not ended:
                return
            watched += looks >= length // 10
        if watched < _TRIES // 2:
            raise Inapplicable("the engine is too quick to look at it meanwhile: give it a delay for this check")
        require(
            False,
            f"all text of {length} tokens was held back for a stop string, and Generation.usage stayed at 0 until the "
            "end, in every try. Count tokens when they are generated, not when their text is sent.",
        )

    @engine_check
    async def test_outputs_end_beside_others_as_alone(self, client: Client) -> None:
        """Length, stop token, stop string, context and cancellation at the same time: each ends as it does alone."""
        prompt, whole = await long_answer(client)
        if not client.can.deterministic:
            raise Inapplicable("deterministic is not declared")
        middle = len(whole.text) // 2
        requests = [
            client.ask(prompt, max_tokens=9),
            client.ask(prompt, max_tokens=_LONG, stop=[whole.text[middle : middle + 4]]),
            client.ask(prompt, max_tokens=_LONG, stop=[_NEVER]),
            client.ask(prompt, max_tokens=_LONG, endless=False, temperature=1.0, seed=3),
        ]
        if client.engine.max_context <= 2048 and client.can.vocab_size is not None:
            requests.append(client.ask(client.tokens(client.engine.max_context - 20, "to the end"), max_tokens=None))
        if whole.tokens:
            requests.append(client.ask(prompt, max_tokens=_LONG, stop_token_ids=[whole.tokens[len(whole.tokens) // 3]]))
        alone = [await client.answer(request) for request in requests]
        # The longest first, so that it runs beside each of the others.
        left = await client.submit(client.ask(prompt, max_tokens=None))
        generations = await client.fill(requests)
        readers = [asyncio.create_task(client.read(generation)) for generation in generations]
        await client.read_texts(left, 2)
        await left.aclose()
        for reader, due in zip(readers, alone, strict=False):  # a full queue refuses the last ones
            answer = await reader
            require(
                _end(answer) == _end(due),
                f"an output that ended with {due.finished} and the text {due.text!r} ends beside others with "
                f"{answer.finished} and {answer.text!r}. Keep what may end an output with its request.",
            )
        await client.settle()


async def _beginnings(client: Client) -> list[int]:
    """Tokens that begin a character and don't end it.

    Raises:
        Inapplicable: there are none.
    """
    found: list[int] = []
    for character in "🙂世é😀":
        tokens = await client.service.tokenize(client.ask(character).input)
        texts = [await client.service.detokenize(tokens[:place]) for place in range(len(tokens) + 1)]
        if client.can.completions and character in texts[-1]:
            found += [
                token
                for token, before, text in zip(tokens, texts, texts[1:], strict=False)
                if text.endswith("\ufffd") and not before.endswith("\ufffd")
            ]
    if not found:
        raise Inapplicable("no token of this model ends inside a character")
    return list(dict.fromkeys(found))


async def _holds_nothing_back(client: Client, request: GenerateRequest, what: str) -> None:
    """The text does not change when its end is the beginning of a stop string."""
    plain = await client.answer(request)
    if plain.finished.reason is not FinishReason.STOP or len(plain.text) < 3:
        return
    held = [plain.text[-2:] + _NEVER, plain.text[-1:] + _NEVER][: client.can.max_stop_strings]
    answer = await client.answer(
        GenerateRequest(input=request.input, params=request.params, stop=held, cache_salt=request.cache_salt)
    )
    if (answer.text, answer.finished.matched) == (plain.text, plain.finished.matched):
        return
    plain = await client.repeatable(request)
    require(
        (answer.text, answer.finished.matched) == (plain.text, plain.finished.matched),
        f"an output that {what} ended is {answer.text!r} with stop={held!r}, which never came, and {plain.text!r} "
        "without. What is held back for a stop string must be sent when the output ends, however it ends.",
    )


def _is_a_stop(answer: Answer, matched: str | int, what: str) -> None:
    last = answer.finished
    require(
        (last.reason, last.matched) == (FinishReason.STOP, matched),
        f"output of which the last token that max_tokens allows {what} says reason={last.reason.value}, "
        f"matched={last.matched!r}. What ends the output by itself counts before max_tokens.",
    )


def _end(answer: Answer) -> tuple[str, list[int], FinishReason, str | int | None, int]:
    last: Finished = answer.finished
    return answer.text, answer.tokens, last.reason, last.matched, last.usage.completion_tokens
