"""Parameters: what each does by itself, and that it does nothing to other requests."""

from __future__ import annotations

from typing import Any

import msgspec

from furnace.contracts import GenerateRequest, UnsupportedError
from furnace.testing.conformance import Conformance, engine_check
from furnace.testing.engine.client import Answer, Client
from furnace.testing.engine.sampling import undecided
from furnace.testing.verdict import Inapplicable, require

__all__ = ["ParameterChecks"]

_NEUTRAL: tuple[dict[str, Any], ...] = (
    {"top_k": 0},
    {"top_p": 1.0},
    {"min_p": 0.0},
    {"presence_penalty": 0.0, "frequency_penalty": 0.0},
    {"repetition_penalty": 1.0},
    {"min_tokens": 0},
    {"stop_token_ids": []},
)
_OF_THE_REQUEST: tuple[dict[str, Any], ...] = (
    {"client": "somebody"},
    {"id": "request-1"},
    {"cache_salt": "another"},
    {"deadline": 3600.0},
    {"trace": {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}},
)
_LONG = 64
_SHORT = 5


class ParameterChecks(Conformance):
    """What a parameter changes, and what it must not."""

    @engine_check
    async def test_parameters_of_one_request_do_not_reach_another(self, client: Client) -> None:
        """Penalties, bias, min_tokens: each request again, and beside the others, gives the same."""
        _need_determinism(client)
        biased = dict.fromkeys(client.tokens(40, "biased"), -100.0)
        kinds: list[dict[str, Any]] = [
            {"frequency_penalty": 1.5},
            {"presence_penalty": 2.0},
            {"repetition_penalty": 3.0},
            {"logit_bias": biased},
            {"min_tokens": 6},
            {},
        ]
        served: list[tuple[dict[str, Any], GenerateRequest, Answer]] = []
        for params in kinds:
            request = client.ask("Again and again", max_tokens=24, **params)
            alone = await _if_served(client, request)
            if alone is not None:
                served.append((params, request, alone))
        together = await client.together([request for _, request, _ in served * 2])
        for (params, _, alone), answer in zip(served * 2, together, strict=True):
            require(
                answer.tokens == alone.tokens and answer.text == alone.text,
                f"a request with {', '.join(params) or 'plain params'} gives {answer.text!r} the second time, beside "
                f"others with other params, and {alone.text!r} the first time. Keep what you count for a request with "
                "the request.",
            )

    @engine_check
    async def test_parameters_that_ask_for_nothing_change_nothing(self, client: Client) -> None:
        """``top_k=0``, ``top_p=1`` and the like, a shorter ``max_tokens``, and fields that the model never sees."""
        _need_determinism(client)
        plain = undecided(client, seed=11)
        due = await client.answer(plain)
        params = [(each, msgspec.structs.replace(plain.params, **each)) for each in _NEUTRAL]
        cases = [(each, msgspec.structs.replace(plain, params=with_it)) for each, with_it in params]
        cases += [(each, msgspec.structs.replace(plain, **each)) for each in _OF_THE_REQUEST]
        shorter = await client.answer(
            msgspec.structs.replace(plain, params=msgspec.structs.replace(plain.params, max_tokens=_SHORT))
        )
        require(
            shorter.tokens == due.tokens[:_SHORT],
            f"with max_tokens={_SHORT} the tokens are {shorter.tokens}, with more they begin with "
            f"{due.tokens[:_SHORT]}. What is drawn does not depend on what is still to come.",
        )
        for which, request in cases:
            answer = await _if_served(client, request)
            require(
                answer is None or answer.tokens == due.tokens,
                f"with {which} the tokens are {answer and answer.tokens}, without they are {due.tokens}. It asks for "
                "nothing.",
            )

    @engine_check
    async def test_a_seed_of_zero_is_a_seed(self, client: Client) -> None:
        """``seed=0`` is repeatable as any other is; only None is none."""
        _need_determinism(client)
        if not client.can.seed:
            raise Inapplicable("seed is not declared")
        texts = {(await client.answer(undecided(client, seed=0))).text for _ in range(3)}
        require(len(texts) == 1, f"seed=0 gave {len(texts)} texts in 3 requests. 0 is a seed; draw one only for None.")

    @engine_check
    async def test_what_leaves_one_token_leaves_nothing_to_draw(self, client: Client) -> None:
        """With ``top_k=1``, a tiny ``top_p`` or ``min_p=1`` all choices are alike, though a dozen tokens are likely."""
        _need_determinism(client)
        # Not all the same, so that there is no tie.
        bias = {token: 90.0 - place / 10 for place, token in enumerate(client.tokens(12, "likely"))}
        for cut in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
            plain = undecided(client, seed=11)
            params = msgspec.structs.replace(plain.params, logit_bias=bias, **cut)
            requests = [msgspec.structs.replace(plain, params=params, choice=choice) for choice in range(4)]
            try:
                texts = {answer.text for answer in await client.answers(requests)}
            except UnsupportedError:
                continue
            require(
                len(texts) == 1,
                f"with {cut} four choices gave {len(texts)} texts. It leaves the most likely token alone.",
            )

    @engine_check
    async def test_penalties_count_what_was_generated(self, client: Client) -> None:
        """``frequency_penalty`` grows with each time, ``presence_penalty`` does not, and neither counts the prompt."""
        first, second = list(dict.fromkeys(client.tokens(9, "penalties")))[:2]
        always = await client.answer(client.ask(max_tokens=_LONG, logit_bias={first: 97.0, second: 70.0}))
        if set(always.tokens) != {first}:
            raise Inapplicable("a bias of 97 does not decide, or the engine reports no token ids")
        strong = {first: 100.0, second: 70.0}
        for params, once in (({"frequency_penalty": 2.0}, False), ({"presence_penalty": 2.0}, True)):
            named: dict[str, Any] = params
            answer = await _if_served(client, client.ask(max_tokens=_LONG, logit_bias=strong, **named))
            if answer is None:
                continue
            require(
                (set(answer.tokens) == {first}) is once,
                f"with {params} a token with a bias of 100 was picked {answer.tokens.count(first)} times of {_LONG}, "
                "before one with 70. frequency_penalty is subtracted for each time that a token was generated, "
                "presence_penalty once.",
            )
            if not client.can.completions:
                continue
            prompt = [first] * _LONG
            plain = await client.answer(client.ask(prompt, max_tokens=1, logit_bias={first: 97.0, second: 70.0}))
            begins = await client.answer(client.ask(prompt, max_tokens=1, logit_bias=strong, **named))
            require(
                plain.tokens != [first] or begins.tokens == [first],
                f"with {params} a token that the prompt has {_LONG} times was not picked as the first one. Count what "
                "was generated, not the prompt.",
            )

    @engine_check
    async def test_a_request_is_left_as_it_was(self, client: Client) -> None:
        """Lists and dicts of a request belong to who asks, and may be in several requests."""
        prompt = client.tokens(20, "left as it was")
        request = client.ask(
            prompt, max_tokens=12, stop=["\u2603", "\u2603\u2603"], stop_token_ids=[], logit_bias={prompt[0]: 1.0}
        )
        before = msgspec.json.encode(request)
        try:
            await client.answers([request, request])
        except UnsupportedError:
            raise Inapplicable("logit_bias is not supported") from None
        require(
            msgspec.json.encode(request) == before,
            f"a request was changed by generate() or later: it was {before.decode()[:200]}, it is "
            f"{msgspec.json.encode(request).decode()[:200]}. Copy lists before you append to them: other choices have "
            "the same ones.",
        )


def _need_determinism(client: Client) -> None:
    if not client.can.deterministic:
        raise Inapplicable("deterministic is not declared")


async def _if_served(client: Client, request: GenerateRequest) -> Answer | None:
    try:
        return await client.answer(request)
    except UnsupportedError:
        return None
