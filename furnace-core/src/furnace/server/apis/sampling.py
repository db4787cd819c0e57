"""The fields that say how to sample, common to the APIs that generate text."""

from __future__ import annotations

from typing import Any

import msgspec

from furnace.contracts import Capabilities, SamplingParams
from furnace.server.apis.decoding import check_text
from furnace.server.errors import ApiError
from furnace.server.job import StreamOptions

__all__ = ["SamplingFields", "check_tokens", "parse_sampling", "parse_stop", "parse_stream", "refuse"]

LARGEST_COUNT = 2**31 - 1
LARGEST_CHOICES = 128
LARGEST_TOP_LOGPROBS = 20
LARGEST_REPETITION_PENALTY = 10.0
# The output is searched for the stop strings at every token, and held back by as much as may become one.
LONGEST_STOP = 1000


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
        ApiError: 400, a value is outside its bounds, or the model can't do it.
    """
    # Also when another limit wins over it.
    _between(fields.max_tokens, 1, LARGEST_COUNT, "max_tokens")
    _between(max_tokens, 1, LARGEST_COUNT, max_tokens_param)
    _between(fields.temperature, 0, 2, "temperature")
    _above(fields.top_p, 0, 1, "top_p")
    _between(fields.top_k, -1, LARGEST_COUNT, "top_k")
    _between(fields.min_p, 0, 1, "min_p")
    _between(fields.presence_penalty, -2, 2, "presence_penalty")
    _between(fields.frequency_penalty, -2, 2, "frequency_penalty")
    _above(fields.repetition_penalty, 0, LARGEST_REPETITION_PENALTY, "repetition_penalty")
    _between(fields.min_tokens, 0, LARGEST_COUNT, "min_tokens")
    _between(fields.seed, -(2**63), 2**63 - 1, "seed")
    if fields.seed is not None and not capabilities.seed:
        raise ApiError.unsupported("This model does not support 'seed'.", "seed")
    if max_tokens is not None and fields.min_tokens is not None and fields.min_tokens > max_tokens:
        raise ApiError.invalid(f"'min_tokens' is larger than '{max_tokens_param}', {max_tokens}.", "min_tokens")
    _check_choices(fields.n)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=None if fields.top_k is None else max(fields.top_k, 0),
        min_p=fields.min_p,
        presence_penalty=_or(fields.presence_penalty, 0.0),
        frequency_penalty=_or(fields.frequency_penalty, 0.0),
        repetition_penalty=_or(fields.repetition_penalty, 1.0),
        logit_bias=_parse_bias(fields.logit_bias or {}, capabilities.vocab_size),
        min_tokens=fields.min_tokens or 0,
        stop_token_ids=check_tokens(fields.stop_token_ids or [], capabilities.vocab_size, "stop_token_ids"),
        ignore_eos=bool(fields.ignore_eos),
        seed=fields.seed,
    )


def parse_stop(stop: str | list[str] | None, capabilities: Capabilities) -> list[str]:
    """The stop strings, checked.

    Raises:
        ApiError: 400, too many, or one is empty or too long.
    """
    strings = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if len(strings) > capabilities.max_stop_strings:
        raise ApiError.invalid(f"'stop' may hold at most {capabilities.max_stop_strings} strings.", "stop")
    for index, string in enumerate(strings):
        param = "stop" if isinstance(stop, str) else f"stop[{index}]"
        if not string:
            raise ApiError.invalid(f"'{param}' is empty.", param)
        if len(string) > LONGEST_STOP:
            raise ApiError.invalid(f"'{param}' is longer than {LONGEST_STOP} characters.", param)
        check_text(string, param)
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


def check_tokens(tokens: list[int], vocab_size: int | None, param: str) -> list[int]:
    """The token ids themselves, when all are in the vocabulary.

    Raises:
        ApiError: 400, one is not.
    """
    beyond = LARGEST_COUNT if vocab_size is None else vocab_size
    if tokens and not (min(tokens) >= 0 and max(tokens) < beyond):
        raise ApiError.invalid(f"'{param}' holds a token id that is not in the vocabulary.", param)
    return tokens


def refuse(value: Any, param: str, *harmless: Any) -> None:
    """Refuse a parameter that is known and not served, unless it is null or says what holds anyway.

    Raises:
        ApiError: 400, ``unsupported_parameter``.
    """
    if value is not None and value not in harmless:
        raise ApiError.unsupported(f"'{param}' is not supported.", param)


def _check_choices(n: int | None) -> None:
    _between(n, 1, LARGEST_CHOICES, "n")
    refuse(n, "n", 1)


def _parse_bias(bias: dict[str, float], vocab_size: int | None) -> dict[int, float]:
    parsed: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise ApiError.invalid("The keys of 'logit_bias' must be token ids, written as strings.", "logit_bias")
        _between(value, -100, 100, "logit_bias")
        parsed[int(key)] = value
    check_tokens(list(parsed), vocab_size, "logit_bias")
    return parsed


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _between(value: float | None, low: float, high: float, param: str) -> None:
    if value is not None and not low <= value <= high:
        raise ApiError.invalid(f"Invalid value for '{param}': it must be between {low} and {high}.", param)


def _above(value: float | None, low: float, high: float, param: str) -> None:
    if value is not None and not low < value <= high:
        raise ApiError.invalid(f"Invalid value for '{param}': it must be above {low} and at most {high}.", param)
