"""Prompts that begin alike: what a cache may bring, and what it must not change."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from furnace.contracts import ChatInput, Message, Text
from furnace.testing.conformance import EXAMPLE, Conformance, engine_check
from furnace.testing.engine.client import Answer, Client
from furnace.testing.verdict import Inapplicable, fail, require

__all__ = ["PrefixChecks"]

_SENTENCE = "What one client asked is nothing that another one may find in a cache. "
_PLACES = 8
"""Of a prefill, in which it is left."""
_LONGEST = 1024
_SWITCH_SECONDS = 2e-4


class PrefixChecks(Conformance):
    """A cache of prompts, inside an engine."""

    @engine_check
    async def test_a_cache_is_never_shared_between_salts(self, client: Client) -> None:
        """A prompt that was computed for one ``cache_salt`` brings another one nothing, nor does its beginning."""
        once = (await client.answer(client.ask(_SENTENCE, max_tokens=1, salt="none"))).usage.prompt_tokens
        # Where each byte is a token, five such sentences may be more than the context holds.
        sentence = _SENTENCE[: len(_SENTENCE) * client.engine.max_context // (5 * once)]
        for salt, times in (("one", 3), ("one", 3), ("two", 3), ("three", 2), ("four", 4)):
            answer = await client.answer(client.ask(sentence * times, max_tokens=2, salt=salt))
            require(
                salt == "one" or answer.usage.cached_tokens == 0,
                f"a request with another cache_salt found {answer.usage.cached_tokens} tokens in the cache. Keep salts "
                "apart: who measures hits would learn what others asked.",
            )

    @engine_check
    async def test_a_cached_prefix_changes_no_answer(self, client: Client) -> None:
        """Prompts that begin alike, in turn and at once: each gets what it gets with a cache of its own."""
        if not client.can.deterministic:
            raise Inapplicable("deterministic is not declared")
        base = client.tokens(160, "prefix")
        prompts = [base[:length] + client.tokens(tail, "tail", length) for length, tail in _SHAPES]
        requests = [client.ask(prompt, max_tokens=5, salt="shared") for prompt in prompts]
        due = [
            await client.answer(client.ask(prompt, max_tokens=5, salt=f"alone {place}"))
            for place, prompt in enumerate(prompts)
        ]
        in_turn = [await client.answer(request) for request in requests]
        at_once = await client.answers([*requests, *requests[::-1]])
        _same(prompts, in_turn, due, "one after the other")
        _same(prompts, at_once[: len(prompts)], due, "at once")
        _same(prompts[::-1], at_once[len(prompts) :], due[::-1], "at once")

    @engine_check
    async def test_a_prompt_that_was_left_changes_no_answer(self, client: Client) -> None:
        """A request is closed in its prefill and in its output; then its prompt is asked again."""
        if not client.can.deterministic:
            raise Inapplicable("deterministic is not declared")
        prompt = client.tokens(min(300, client.engine.max_context // 2), "left")
        due = await client.answer(client.ask(prompt, max_tokens=8, salt="alone"))
        for turns in (0, 1, 3, None):
            generation = await client.submit(client.ask(prompt, max_tokens=None, salt="left"))
            if turns is None:
                await client.read_texts(generation, 2)
            for _ in range(turns or 0):
                await asyncio.sleep(0)
            await generation.aclose()
            answer = await client.answer(client.ask(prompt, max_tokens=8, salt="left"))
            _same([prompt], [answer], [due], "after its prompt was asked before and left")

    @engine_check
    async def test_a_prompt_that_was_left_while_it_was_read_changes_no_answer(self, client: Client) -> None:
        """Prompts that nobody asked before, closed at several places of their prefill; then each is asked again."""
        if not client.can.deterministic:
            raise Inapplicable("deterministic is not declared")
        interval = sys.getswitchinterval()
        # Else a thread that computes in Python holds the loop up for longer than a place in a prefill.
        sys.setswitchinterval(_SWITCH_SECONDS)
        try:
            await _leave_prefills(client)
        finally:
            sys.setswitchinterval(interval)

    @engine_check
    async def test_output_of_every_length_goes_on_as_a_prompt(self, client: Client) -> None:
        """Chats of growing length, each with half of its answer as a prompt: what comes next is the other half."""
        if not (client.can.chat and client.can.completions and client.can.tokenize):
            raise Inapplicable("chat, completions and tokenize are not all declared")
        words = EXAMPLE.split() * 6
        for count in range(0, len(words), 5):
            chat = ChatInput([Message("user", " ".join(words[:count]))])
            prompt = await client.service.tokenize(chat)
            ends = min(8, len(prompt) // 3)
            misses: list[str] = []
            for variant in range(5):
                # Other prompts of this length: a near tie goes another way in one of them, a fault is in all.
                middle = prompt[ends : len(prompt) - ends]
                turned = [*prompt[:ends], *middle[3 * variant :], *middle[: 3 * variant], *prompt[-ends:]]
                answer = await client.answer(client.ask(turned, max_tokens=8))
                if len(answer.tokens) < 8:
                    raise Inapplicable("the engine reports no token ids")
                onward = await client.answer(client.ask([*turned, *answer.tokens[:4]], max_tokens=4))
                if answer.tokens[4:] == onward.tokens:
                    break
                misses.append(f"{answer.tokens[4:]} and {onward.tokens}")
            else:
                fail(
                    f"answers to prompts of {len(prompt)} tokens were cut after 4 tokens and given as prompts, and "
                    f"none went on as it had: {'; '.join(misses)}. Look at what happens where this length ends a "
                    "block, a chunk or a buffer.",
                )
            if len(prompt) > client.engine.max_context // 2:
                break


_SHAPES: Sequence[tuple[int, int]] = (
    *((length, 0) for length in (160, 160, 128, 129, 64, 63, 65, 33, 32, 31, 17, 16, 15, 1)),
    *((length, 9) for length in (160, 128, 100, 64, 63, 32, 16, 8)),
    *((length, 64) for length in (64, 96)),
)
"""How many tokens a prompt shares with others, and how many of its own follow."""


async def _leave_prefills(client: Client) -> None:
    """Leave prompts in their prefill, and ask each again."""
    length = min(client.engine.max_context - 16, _LONGEST)
    loop = asyncio.get_running_loop()
    whole = float("inf")
    for turn in range(3):  # noise may make one longer than a prefill is
        probe = await client.submit(client.ask(client.tokens(length, "probe", turn), max_tokens=None))
        began = loop.time()
        await client.read_texts(probe, 1)
        whole = min(whole, loop.time() - began)
        await probe.aclose()
    for place in range(_PLACES):
        # A prompt that was answered is cached whole, and has no prefill any more.
        prompt = client.tokens(length, "left in its prefill", place)
        due = await client.answer(client.ask(prompt, max_tokens=8, salt="alone"))
        generation = await client.submit(client.ask(prompt, max_tokens=None, salt="left"))
        if not any(isinstance(event, Text) for event in await generation.batch()):
            await asyncio.sleep(whole * place / _PLACES)
        await generation.aclose()
        answer = await client.answer(client.ask(prompt, max_tokens=8, salt="left"))
        _same([prompt], [answer], [due], "after its prompt was left while it was read, and then asked again")


def _same(prompts: Sequence[Sequence[int]], answers: Sequence[Answer], due: Sequence[Answer], when: str) -> None:
    for prompt, answer, expected in zip(prompts, answers, due, strict=True):
        require(
            answer.tokens == expected.tokens and answer.text == expected.text,
            f"{when}, a prompt of {len(prompt)} tokens, {answer.usage.cached_tokens} of them cached, gives "
            f"{answer.tokens}, with a cache of its own {expected.tokens}. Reuse exactly the tokens that are equal, and "
            "leave what is kept as it is: its owner goes on writing behind it.",
        )
