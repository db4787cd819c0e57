"""What an engine declares that it can do; the rest is refused with a 400 that names the parameter."""

from __future__ import annotations

import msgspec

__all__ = ["Capabilities", "OutputFormat"]


class OutputFormat(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How the model marks parts of its output, found from its chat template.

    Attributes:
        tool_parser: name of the parser of its tool calls, or None.
        reasoning_start: text that opens a reasoning section, or None.
        reasoning_end: text that closes it, or None.
    """

    tool_parser: str | None = None
    reasoning_start: str | None = None
    reasoning_end: str | None = None


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a client may ask of an engine. The defaults are the least.

    Attributes:
        chat: takes ``ChatInput`` (has a chat template).
        completions: takes ``TextInput`` and ``TokenInput``.
        logprobs: largest number of alternatives per output token, or None when log probabilities can't be had.
        prompt_logprobs: the same for prompt tokens.
        constraints: kinds of ``Constraint`` that it honours.
        tools: takes ``tools``.
        parses_output: sends ``Reasoning`` and ``ToolCallDelta`` itself.
        seed: honours ``SamplingParams.seed``.
        prefix_reuse: can reuse the KV cache of a common prefix.
        deterministic: a token depends on the model, prompt, params, seed, choice and position alone.
        tokenize: also implements ``TextService``.
        embeddings: also implements ``EmbeddingEngine``.
        max_stop_strings: how many stop strings a request may have.
        vocab_size: number of token ids, or None if not known; ids beyond it are refused.
        output: how to read its output.
    """

    chat: bool = True
    completions: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraints: frozenset[str] = frozenset()
    tools: bool = False
    parses_output: bool = False
    seed: bool = True
    prefix_reuse: bool = False
    deterministic: bool = False
    tokenize: bool = False
    embeddings: bool = False
    max_stop_strings: int = 16
    vocab_size: int | None = None
    output: OutputFormat = OutputFormat()
