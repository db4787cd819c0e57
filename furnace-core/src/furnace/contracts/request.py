"""What a client asks of an engine."""

from __future__ import annotations

import msgspec

from furnace.contracts.capabilities import Capabilities
from furnace.contracts.errors import InvalidRequestError, quote
from furnace.contracts.sampling_bounds import BOUNDS, check_number, check_stop, check_token_ids

__all__ = [
    "ChatInput",
    "Constraint",
    "ContentPart",
    "GenerateRequest",
    "Input",
    "Message",
    "SamplingParams",
    "TextInput",
    "TextPart",
    "TokenInput",
    "ToolCall",
]


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    """A piece of text in a message's content."""

    text: str


ContentPart = TextPart
"""A part of a message's content; kinds for media join this union when an engine can take them."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the assistant made in an earlier turn.

    Attributes:
        arguments: JSON text, as the model wrote it.
    """

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a chat.

    Attributes:
        role: ``system``, ``developer`` (the same), ``user``, ``assistant`` or ``tool``.
        content: text, parts, or None (an assistant message with tool calls only).
        name: the participant's name.
        tool_calls: calls of an assistant message.
        tool_call_id: which call a ``tool`` message answers.
        reasoning: reasoning text of an earlier assistant turn, for templates that show it.
    """

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    reasoning: str | None = None

    @property
    def text(self) -> str:
        """The content as one string; parts are joined, None is empty."""
        if self.content is None:
            return ""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatInput(msgspec.Struct, frozen=True, tag="chat"):
    """A chat, to go through the model's chat template.

    Attributes:
        messages: at least one.
        template_kwargs: JSON text of an object with further variables for the template, or None.
        documents: JSON text of a list of documents for the template, or None.
        add_generation_prompt: end the prompt with the opening of an assistant turn.
        continue_final_message: leave the last message open, so that the output continues it.
    """

    messages: list[Message]
    template_kwargs: str | None = None
    documents: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class TextInput(msgspec.Struct, frozen=True, tag="raw_text"):
    """Raw text (``/v1/completions``). Control tokens in it are parsed; BOS is added once."""

    text: str


class TokenInput(msgspec.Struct, frozen=True, tag="tokens"):
    """Token ids, taken as they are."""

    tokens: list[int]


Input = ChatInput | TextInput | TokenInput


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How to pick tokens. None means the engine's default. Building it checks nothing; ``validate`` does.

    Attributes:
        max_tokens: most tokens to generate; by default, and at most, up to the end of the context.
        temperature: 0 picks the most likely token every time; default 1.
        top_p: the smallest set of tokens whose probabilities add up to this, in (0, 1].
        top_k: only this many most likely tokens; 0 or None for all.
        min_p: only tokens at least this share as likely as the most likely one, in [0, 1].
        presence_penalty: subtracted once from the logit of every token generated already, -2 to 2.
        frequency_penalty: subtracted from a token's logit each time it was generated, -2 to 2.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt or output; above 0,
            at most 10.
        logit_bias: added to the logits of these token ids, -100 to 100.
        min_tokens: no end token before this many.
        stop_token_ids: further tokens that end the output; they give no text.
        ignore_eos: never pick the model's end tokens.
        seed: makes sampling repeatable; drawn before admission when missing.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    seed: int | None = None

    @classmethod
    def greedy(cls, *, max_tokens: int | None = None) -> SamplingParams:
        """Always the most likely token."""
        return cls(temperature=0.0, max_tokens=max_tokens)

    def validate(self, vocab_size: int | None = None) -> None:
        """Refuse what no sampler has to understand.

        Args:
            vocab_size: number of token ids, or None if not known.

        Raises:
            InvalidRequestError: a value is outside its bounds; ``param`` names it.
        """
        for name in self.__struct_fields__:
            if name in BOUNDS and name != "logit_bias":
                check_number(name, getattr(self, name))
        if not isinstance(self.logit_bias, dict):
            message = f"logit_bias must map token ids to numbers, not {quote(self.logit_bias)}."
            raise InvalidRequestError(message, param="logit_bias")
        for bias in self.logit_bias.values():
            check_number("logit_bias", bias)
        check_token_ids(self.logit_bias, vocab_size, "logit_bias")
        check_token_ids(self.stop_token_ids, vocab_size, "stop_token_ids")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            message = f"min_tokens is {self.min_tokens}, but no more than {self.max_tokens} tokens are asked for."
            raise InvalidRequestError(message, param="min_tokens")


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """What the output must match.

    Attributes:
        kind: ``json_schema``, ``regex``, ``lark``, ``structural_tag`` or ``choice``.
        text: the grammar's source; JSON text for the JSON kinds.
        after: text after which the constraint begins to hold (the end of a reasoning section), or None.
    """

    kind: str
    text: str
    after: str | None = None


class GenerateRequest(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One completion to make. New fields always have defaults.

    Attributes:
        input: what to continue.
        params: how to pick tokens.
        stop: strings before which the output ends; they are not part of it.
        choice: which of ``n`` choices of the same request this is, from 0.
        logprobs: how many alternatives to report for each output token (0: only its own), or None for none.
        prompt_logprobs: the same for the prompt's tokens.
        constraint: what the output must match.
        tools: JSON text of the list of tools, for the chat template.
        keep_tokens: control tokens that must appear in the text (a tool-call parser needs them).
        client: who asks, for fairness; never shown to the model.
        priority: higher goes first.
        deadline: seconds that the request may wait for its first step, or None.
        cache_salt: sequences with different salts never share a prefix.
        trace: W3C trace context headers (traceparent, tracestate).
        id: the request's id in logs.
    """

    input: Input
    params: SamplingParams = SamplingParams()
    stop: list[str] = []
    choice: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None
    tools: str | None = None
    keep_tokens: list[str] = []
    client: str = ""
    priority: int = 0
    deadline: float | None = None
    cache_salt: str = ""
    trace: dict[str, str] = {}
    id: str = ""

    @classmethod
    def chat(cls, messages: list[Message], params: SamplingParams | None = None) -> GenerateRequest:
        """A chat with default sampling unless ``params`` says otherwise."""
        return cls(input=ChatInput(messages), params=params or SamplingParams())

    @classmethod
    def completion(cls, prompt: str, params: SamplingParams | None = None) -> GenerateRequest:
        """A continuation of raw text with default sampling unless ``params`` says otherwise."""
        return cls(input=TextInput(prompt), params=params or SamplingParams())

    def validate(self, capabilities: Capabilities) -> None:
        """Refuse numbers, token ids and stop strings that are out of bounds. Engines call it in ``generate``.

        Args:
            capabilities: of the engine that is asked.

        Raises:
            InvalidRequestError: ``param`` names the value.
        """
        self.params.validate(capabilities.vocab_size)
        check_stop(self.stop, capabilities.max_stop_strings)
        if isinstance(self.input, TokenInput):
            check_token_ids(self.input.tokens, capabilities.vocab_size, "prompt")
