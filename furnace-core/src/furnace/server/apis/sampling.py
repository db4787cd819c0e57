"""The fields that say how to sample, common to the APIs that generate text."""

from __future__ import annotations

from typing import Any

import msgspec

from furnace.contracts import Capabilities, SamplingParams
from furnace.contracts.sampling_bounds import check_number, check_stop
from furnace.server.apis.decoding import check_text
from furnace.server.errors import ApiError
from furnace.server.job import StreamOptions

__all__ = ["SamplingFields", "parse_sampling", "parse_stop", "parse_stream", "refuse"]

LARGEST_CHOICES = 128
LARGEST_TOP_LOGPROBS = 20


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """How to pick tokens and how to answer. Null means the default.

    Attributes:
        max_tokens: most tokens to generate.
        temperature: 0 picks the most likely token every time; 0 to 2.
        top_p: the smallest set of tokens whose probabilities add up to this, above 0 and up to 1.
        top_k: only this many most likely tokens; 0 or -1 for all (an extension).
        min_p: only tokens at least this share as likely as the most likely one, 0 to 1 (an extension).
        presence_penalty: -2 to 2.
        frequency_penalty: -2 to 2.
        repetition_penalty: above 0 and up to 10; 1 is none (an extension).
        logit_bias: token ids, as strings, with what is added to their logits, -100 to 100.
        min_tokens: no end token before this many (an extension).
        stop_token_ids: further tokens that end the output (an extension).
        ignore_eos: never pick the model's end tokens (an extension).
        seed: makes sampling repeatable; a 64-bit integer.
        stop: up to 16 strings before which the output ends, each up to 1,000 characters.
        n: choices; 1 for now.
        stream: send the output as server-sent events while it is made.
        stream_options: only with ``stream``.
        user: accepted and not used.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None


def parse_sampling(
    fields: SamplingFields, capabilities: Capabilities, max_tokens: int | None, max_tokens_param: str
) -> SamplingParams:
    """The sampling parameters, checked.

    Args:
        max_tokens: the limit to use, from ``max_tokens_param`` or a default.

    Raises:
        InvalidRequestError: a value is outside its bounds.
        ApiError: 400, a value has not the form of one, or the model can't do it.
    """
    # Also when another limit wins over it.
    check_number("max_tokens", fields.max_tokens)
    check_number("max_tokens", max_tokens, max_tokens_param)
    if fields.seed is not None and not capabilities.seed:
        raise ApiError.unsupported("This model does not support 'seed'.", "seed")
    _check_choices(fields.n)
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=0 if fields.top_k == -1 else fields.top_k,
        min_p=fields.min_p,
        presence_penalty=_or(fields.presence_penalty, 0.0),
        frequency_penalty=_or(fields.frequency_penalty, 0.0),
        repetition_penalty=_or(fields.repetition_penalty, 1.0),
        logit_bias=_parse_bias(fields.logit_bias or {}),
        min_tokens=fields.min_tokens or 0,
        stop_token_ids=fields.stop_token_ids or [],
        ignore_eos=bool(fields.ignore_eos),
        seed=fields.seed,
    )
    params.validate(capabilities.vocab_size)
    return params


def parse_stop(stop: str | list[str] | None, capabilities: Capabilities) -> list[str]:
    """The stop strings, checked.

    Raises:
        InvalidRequestError: too many, or one is empty or too long.
        ApiError: 400, one holds a NUL character.
    """
    strings = check_stop([] if stop is None else stop, capabilities.max_stop_strings)
    for index, string in enumerate(strings):
        check_text(string, "stop" if isinstance(stop, str) else f"stop[{index}]")
    return strings


def parse_stream(fields: SamplingFields) -> StreamOptions | None:
    """How to stream, or None.

    Raises:
        ApiError: 400, options for a stream that was not asked for.
    """
    if fields.stream:
        return fields.stream_options or StreamOptions()
    if fields.stream_options is not None:
        raise ApiError.invalid("'stream_options' is only allowed when 'stream' is true.", "stream_options")
    return None


def refuse(value: Any, param: str, *harmless: Any) -> None:
    """Refuse a parameter that is known and not served, unless it is null or says what holds anyway.

    Raises:
        ApiError: 400, ``unsupported_parameter``.
    """
    if value is not None and value not in harmless:
        raise ApiError.unsupported(f"'{param}' is not supported.", param)


def _check_choices(n: int | None) -> None:
    if n is not None and not 1 <= n <= LARGEST_CHOICES:
        raise ApiError.invalid(f"Invalid value for 'n': it must be between 1 and {LARGEST_CHOICES}.", "n")
    refuse(n, "n", 1)


def _parse_bias(bias: dict[str, float]) -> dict[int, float]:
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise ApiError.invalid("The keys of 'logit_bias' must be token ids, written as strings.", "logit_bias")
    return {int(key): value for key, value in bias.items()}


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
