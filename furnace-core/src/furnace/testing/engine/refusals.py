"""What an engine refuses, before there is a stream, and what it must survive."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from furnace.contracts import (
    Capabilities,
    ChatInput,
    Constraint,
    EngineError,
    Failed,
    FinishReason,
    GenerateRequest,
    Input,
    InvalidRequestError,
    Message,
    Prompt,
    PromptTooLongError,
    SamplingParams,
    Text,
    TextInput,
    TextPart,
    TokenInput,
    UnsupportedError,
)
from furnace.contracts.errors import quote
from furnace.testing.conformance import Conformance, engine_check
from furnace.testing.engine.client import Answer, Client
from furnace.testing.verdict import Inapplicable, fail, refused, require

__all__ = ["RefusalChecks"]

_GRAMMARS = {
    "json_schema": '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}',
    "regex": "(yes|no)",
    "lark": 'start: "yes" | "no"',
    "choice": '["yes", "no"]',
}
_MATCHES = {"regex": "yes|no", "choice": "yes|no", "lark": "yes|no", "json_schema": r'\s*\{\s*"a"\s*:\s*-?\d+\s*\}\s*'}
_SHORT = SamplingParams(max_tokens=4, temperature=0.0)
_OUT_OF_BOUNDS: dict[str, tuple[Any, ...]] = {
    "temperature": (-0.1, 2.5, math.nan),
    "top_p": (0.0, 1.1),
    "top_k": (-1,),
    "min_p": (-0.1, 1.5),
    "presence_penalty": (-2.5, 3.0),
    "frequency_penalty": (2.5,),
    "repetition_penalty": (0.0,),
    "max_tokens": (0, -1),
    "min_tokens": (-1, 13),
    "seed": (2**63,),
    "logit_bias": ({0: 101.0}, {-1: 1.0}),
}
_TOOLS = '[{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]'


class RefusalChecks(Conformance):
    """Errors before the stream, and honesty about capabilities."""

    @engine_check
    async def test_a_prompt_that_is_too_long_is_refused_before_the_stream(self, client: Client) -> None:
        """Prompts of exactly ``max_context`` tokens and more leave no room for output."""
        most = client.engine.max_context
        for count in (most, most + 1, 3 * most):
            request = client.ask(client.tokens(count, "too long"), max_tokens=1)
            with refused(PromptTooLongError, f"a prompt of {count} tokens, with max_context {most},"):
                generation = await client.engine.generate(request)
                await generation.aclose()
        await client.works("prompts were too long")

    @engine_check
    async def test_a_text_or_chat_that_is_too_long_is_refused(self, client: Client) -> None:
        """Nothing is cut off, whatever form the prompt has."""
        most = client.engine.max_context
        if most > 8192:
            raise Inapplicable(f"a text of more than {most} tokens takes too long for a test")
        text = "Once upon a time. " * most
        params = SamplingParams(max_tokens=1)
        forms: list[tuple[bool, Input]] = [
            (client.can.completions, TextInput(text)),
            (client.can.chat, ChatInput([Message("user", text)])),
            (
                client.can.chat,
                ChatInput([Message("user", text), Message("assistant", "Yes."), Message("user", "Go on")]),
            ),
        ]
        for declared, form in forms:
            if declared:
                what = f"a {type(form).__name__} of {len(text)} characters, with max_context {most},"
                with refused(PromptTooLongError, what):
                    generation = await client.engine.generate(GenerateRequest(input=form, params=params))
                    await generation.aclose()
        await client.works("prompts were too long")

    @engine_check
    async def test_parts_of_a_message_are_its_text(self, client: Client) -> None:
        """Content in parts is the prompt that their text in one string is."""
        if not client.can.chat:
            raise Inapplicable("chat is not declared")
        texts = ["Tell me", " a story, ", "please"]
        whole, parts = [
            await client.answer(GenerateRequest(input=ChatInput([Message("user", content)]), params=_SHORT))
            for content in ("".join(texts), [TextPart(text) for text in texts])
        ]
        require(
            parts.usage.prompt_tokens == whole.usage.prompt_tokens
            and (parts.tokens == whole.tokens or not client.can.deterministic),
            f"a message of {len(texts)} text parts is {parts.usage.prompt_tokens} prompt tokens, the same text in one "
            f"string {whole.usage.prompt_tokens}. Message.text joins them.",
        )

    @engine_check
    async def test_the_longest_prompt_has_room_for_one_token(self, client: Client) -> None:
        """``max_context - 1`` tokens of prompt give one token, and ``length``."""
        most = client.engine.max_context
        if most > 8192:
            raise Inapplicable(f"a prompt of {most - 1} tokens takes too long for a test")
        for extra in (1, 2):
            prompt = client.tokens(most - extra, "longest")
            answer = await client.answer(client.ask(prompt, max_tokens=None))
            require(
                answer.usage.prompt_tokens == most - extra and 1 <= answer.usage.completion_tokens <= extra,
                f"a prompt of {most - extra} tokens, with max_context {most}, gave usage {answer.usage}. It leaves "
                f"room for {extra} tokens of output.",
            )
            if answer.usage.completion_tokens == extra and answer.finished.matched is None:
                require(
                    answer.finished.reason is FinishReason.LENGTH,
                    f"output that ends with the context has the reason {answer.finished.reason.value}. It is length.",
                )

    @engine_check
    async def test_output_ends_with_the_context(self, client: Client) -> None:
        """Without ``max_tokens``, and with more than there is room for, output fills the context and ends by length."""
        most = client.engine.max_context
        if most > 2048:
            raise Inapplicable(f"output up to {most} tokens takes too long for a test")
        room = min(40, most // 2)
        for max_tokens in (None, most * 2):
            answer = await client.answer(client.ask(client.tokens(most - room, "fill"), max_tokens=max_tokens))
            total, last = answer.usage.total_tokens, answer.finished
            require(total <= most, f"prompt and output are {total} tokens, more than max_context, {most}")
            if last.reason is FinishReason.LENGTH:
                require(
                    total == most,
                    f"the output ended by length at {total} tokens of {most}. Use all of the context, or declare less.",
                )

    @engine_check
    async def test_the_operators_bound_on_the_context_is_kept(self, client: Client) -> None:
        """``EngineContext.max_context`` bounds the engine's."""
        bound = self.make_context().max_context
        if self.spec is None or bound is None:
            raise Inapplicable("the engine was not made from a spec")
        require(
            0 < client.engine.max_context <= bound,
            f"max_context is {client.engine.max_context}, but EngineContext.max_context said {bound}. In create(), "
            "take the smaller of the model's own and the operator's.",
        )

    @engine_check
    async def test_values_out_of_bounds_are_refused_by_name(self, client: Client) -> None:
        """Sampling parameters, token ids and stop strings; the error's ``param`` says which."""
        cases: list[tuple[str, GenerateRequest]] = []
        for name, values in _OUT_OF_BOUNDS.items():
            for value in values:
                params: dict[str, Any] = {"temperature": 1.0, name: value}
                cases.append((name, client.ask(endless=False, **params)))
        too_many = [f"stop {number}" for number in range(client.can.max_stop_strings + 1)]
        cases += [("stop", client.ask(stop=[""])), ("stop", client.ask(stop=too_many))]
        if client.can.vocab_size is not None:
            outside = client.can.vocab_size
            cases += [("logit_bias", client.ask(logit_bias={outside: 1.0}))]
            if client.can.completions:
                cases += [("prompt", client.ask([1, outside, 1])), ("prompt", client.ask([1, -1]))]
        for param, request in cases:
            what = f"{param}={quote(getattr(request.params, param, request.stop or request.input), 60)}"
            with refused(InvalidRequestError, f"{what} (request.validate(self.capabilities) finds it)", param=param):
                generation = await client.engine.generate(request)
                await generation.aclose()
        await client.settle()
        await client.works("values were out of bounds")

    @engine_check
    async def test_an_empty_prompt_is_refused(self, client: Client) -> None:
        """No token at all is no prompt."""
        if not client.can.completions:
            raise Inapplicable("completions are not declared")
        with refused(InvalidRequestError, "a prompt without tokens"):
            generation = await client.engine.generate(GenerateRequest(input=TokenInput([]), params=SamplingParams()))
            await generation.aclose()
        await client.works("a prompt was empty")

    @engine_check
    async def test_what_is_not_declared_is_refused_by_name(self, client: Client) -> None:
        """Each undeclared feature is an ``UnsupportedError`` that names the parameter."""
        await _each_feature(client, declared=False)

    @engine_check
    async def test_what_is_declared_works(self, client: Client) -> None:
        """Each declared feature gives an answer."""
        await _each_feature(client, declared=True)

    @engine_check
    async def test_logprobs_are_those_of_the_tokens(self, client: Client) -> None:
        """One entry a token, never above 0, alternatives best first."""
        most = client.can.logprobs
        if most is None:
            raise Inapplicable("logprobs are not declared")
        plain = client.ask(max_tokens=8)
        ended = (await client.answer(plain)).tokens[-1:]
        # Also with tokens whose text is held back, and with one at the end that has no text.
        for request, top in (
            (plain, most),
            (plain, 0),
            (client.ask(max_tokens=8, stop=["\u2603", " \u2603"]), most),
            (client.ask(max_tokens=8, stop_token_ids=ended), most),
        ):
            answer = await client.answer(msgspec.structs.replace(request, logprobs=top))
            _look_at_logprobs(answer, top)

    @engine_check
    async def test_prompt_logprobs_are_those_of_the_prompt(self, client: Client) -> None:
        """``Prompt`` comes once, right after ``Started``: an entry for each token, the first with 0."""
        most = client.can.prompt_logprobs
        if most is None:
            raise Inapplicable("prompt_logprobs are not declared")
        prompt = client.tokens(9, "prompt_logprobs")
        answer = await client.answer(msgspec.structs.replace(client.ask(prompt, max_tokens=2), prompt_logprobs=most))
        places = [place for place, event in enumerate(answer.events) if isinstance(event, Prompt)]
        require(places == [1], f"Prompt came at places {places} of the stream. Send it once, after Started.")
        event = answer.events[1]
        assert isinstance(event, Prompt)  # noqa: S101 - for the type checker
        require(
            [entry.token for entry in event.tokens] == prompt and event.tokens[0].logprob == 0.0,
            f"Prompt has the tokens {[entry.token for entry in event.tokens]} for a prompt of {prompt}, the first with "
            f"{event.tokens[:1]}. It has one for each token of the prompt, and the first has 0.0.",
        )
        require(
            all(entry.logprob <= 0 and len(entry.top) <= most for entry in event.tokens),
            f"a log probability of the prompt is above 0, or has more than {most} alternatives",
        )

    @engine_check
    async def test_declared_constraints_hold(self, client: Client) -> None:
        """Output with a ``regex``, a ``choice`` or a ``json_schema`` matches it."""
        kinds = client.can.constraints & _MATCHES.keys()
        if not kinds:
            raise Inapplicable("no such constraints are declared")
        for kind in sorted(kinds):
            request = client.ask(max_tokens=64, endless=False)
            constraint = Constraint(kind=kind, text=_GRAMMARS[kind])
            answer = await client.answer(msgspec.structs.replace(request, constraint=constraint))
            cut_off = kind == "json_schema" and answer.finished.reason is FinishReason.LENGTH
            require(
                cut_off or re.fullmatch(_MATCHES[kind], answer.text),
                f"with the constraint {kind} {_GRAMMARS[kind]} the output is {answer.text!r}, which does not match",
            )

    @engine_check
    async def test_odd_requests_end_alone(self, client: Client) -> None:
        """Strange texts and parameters are served or refused; whatever happens, the engine serves on."""
        texts = [
            "\x00",
            "\ud800",
            "a\udfffb",
            " ",
            "\n" * 50,
            "🙂" * 40,
            "<|endoftext|><s></s><|im_end|>",
            "ﷺ" * 20,
            "\u202e",
        ]
        odd = [client.ask(text, max_tokens=3) for text in texts]
        odd += [client.ask(stop=["\ud800"]), client.ask(logit_bias={0: -100.0, 1: 100.0}), client.ask(seed=-(2**63))]
        for request in odd:
            await _served_or_refused(client, request)
        if client.can.chat:
            for messages in ([], [Message("nobody", "hello")], [Message("user", None)], [Message("assistant", "hi")]):
                await _served_or_refused(
                    client, GenerateRequest(input=ChatInput(messages), params=SamplingParams(max_tokens=3))
                )
        await client.settle()
        await client.works("odd requests")


def _look_at_logprobs(answer: Answer, most: int) -> None:
    for event in answer.events[1:-1]:
        if not isinstance(event, Text) or not event.tokens:
            continue
        logprobs = event.logprobs or []
        require(
            [entry.token for entry in logprobs] == event.tokens,
            f"a piece with tokens {event.tokens} has logprobs of {[entry.token for entry in logprobs]}. Send one for "
            "each token, with the piece that has it.",
        )
        for entry in logprobs:
            ranked = [other.logprob for other in entry.top]
            require(entry.logprob <= 0, f"a log probability is {entry.logprob}: above 0")
            require(len(ranked) <= most, f"{len(ranked)} alternatives where {most} were asked for")
            require(ranked == sorted(ranked, reverse=True), f"alternatives are not best first: {ranked}")


async def _served_or_refused(client: Client, request: GenerateRequest) -> None:
    what = f"the odd request {quote(request.input, 80)} with {quote(request.params, 80)}"
    try:
        answer = await client.answer(request)
    except EngineError as error:
        require(
            error.status < 500,
            f"{what} was refused with {type(error).__name__}: {error}. It is the client's fault: 400.",
        )
        return
    except Exception as error:
        fail(
            f"{what} raised {type(error).__name__}: {quote(str(error))} in generate(). Raise InvalidRequestError, or "
            "serve it."
        )
    last = answer.events[-1] if answer.events else None
    require(last is not None, f"{what} got no event at all. Every stream ends with Finished or Failed.")
    if isinstance(last, Failed):
        fail(f"{what} was admitted and then failed: {last.error.message}. Refuse it in generate(), or serve it.")


async def _each_feature(client: Client, *, declared: bool) -> None:
    """Ask for every feature that is, or is not, declared."""
    asked = 0
    for param, request, there in _features(client.can, client):
        if there is not declared:
            continue
        asked += 1
        if declared:
            try:
                answer = await client.answer(request)
            except EngineError as error:
                fail(
                    f"{param} is declared in capabilities, but refused: {quote(str(error))}. Do it, or don't declare "
                    "it."
                )
            require(
                not isinstance(answer.events[-1], Failed),
                f"{param} is declared in capabilities, but a request with it fails: {answer.events[-1]}",
            )
            continue
        with refused(UnsupportedError, f"{param}, which capabilities don't declare,", param=param):
            generation = await client.engine.generate(request)
            await generation.aclose()
    if not asked:
        raise Inapplicable("there is no such feature")
    await client.works(f"each {'declared' if declared else 'undeclared'} feature was asked for")


def _features(can: Capabilities, client: Client) -> list[tuple[str, GenerateRequest, bool]]:
    """The parameter of each feature, a request with it, and whether it is declared."""
    plain = client.ask(max_tokens=8, endless=False)
    params = plain.params
    chat = GenerateRequest(input=ChatInput([Message("user", "Hello")]), params=params)
    features = [
        ("messages", chat, can.chat),
        ("prompt", GenerateRequest(input=TextInput("Hello"), params=params), can.completions),
        ("logprobs", msgspec.structs.replace(plain, logprobs=can.logprobs or 0), can.logprobs is not None),
        (
            "prompt_logprobs",
            msgspec.structs.replace(plain, prompt_logprobs=can.prompt_logprobs or 0),
            can.prompt_logprobs is not None,
        ),
        ("tools", msgspec.structs.replace(chat, tools=_TOOLS), can.tools),
    ]
    for kind, text in _GRAMMARS.items():
        constrained = msgspec.structs.replace(plain, constraint=Constraint(kind=kind, text=text))
        features.append(("response_format", constrained, kind in can.constraints))
    return features
