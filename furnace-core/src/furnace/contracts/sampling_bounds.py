"""What a client may ask of a sampler: the bounds of numbers, token ids and stop strings, in one place."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from furnace.contracts.errors import InvalidRequestError, quote

__all__ = ["BOUNDS", "LARGEST_COUNT", "LONGEST_STOP", "check_number", "check_stop", "check_token_ids"]

LARGEST_COUNT: Final = 2**31 - 1
LONGEST_STOP: Final = 1000
"""Characters of a stop string: the output is searched for them at every token, and as much is held back."""

BOUNDS: Final[dict[str, tuple[float, float]]] = {
    "max_tokens": (1, LARGEST_COUNT),
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (0, LARGEST_COUNT),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0, 10),
    "min_tokens": (0, LARGEST_COUNT),
    "seed": (-(2**63), 2**63 - 1),
    "logit_bias": (-100, 100),
}
"""The smallest and the largest value of each number in ``SamplingParams``."""

_ABOVE = frozenset({"top_p", "repetition_penalty"})
_WHOLE = frozenset({"max_tokens", "top_k", "min_tokens", "seed"})
_OPTIONAL = frozenset({"max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"})


def check_number(field: str, value: object, name: str = "") -> None:
    """Refuse a value that is not within the bounds of a field; NaN never is.

    Args:
        field: a key of ``BOUNDS``.
        value: None is fine where it means the engine's default.
        name: what the client calls it, if not ``field``.

    Raises:
        InvalidRequestError: it is not; ``param`` is the name.
    """
    if value is None and field in _OPTIONAL:
        return
    low, high = BOUNDS[field]
    kind = int if field in _WHOLE else int | float
    if (
        isinstance(value, kind)
        and not isinstance(value, bool)
        and low <= value <= high
        and not (field in _ABOVE and value == low)
    ):
        return
    bounds = f"above {low} and at most {high}" if field in _ABOVE else f"between {low} and {high}"
    name = name or field
    number = "a whole number " if field in _WHOLE else ""
    raise InvalidRequestError(f"{name} must be {number}{bounds}, not {quote(value)}.", param=name)


def check_token_ids(ids: Collection[int], vocab_size: int | None, param: str) -> None:
    """Refuse ids that are no tokens.

    Args:
        ids: any number of them.
        vocab_size: how many tokens there are, or None if not known.
        param: where they come from.

    Raises:
        InvalidRequestError: one is not; ``param`` as given.
    """
    if not isinstance(ids, Collection):
        raise InvalidRequestError(f"{param} must be a list of token ids, not {quote(ids)}.", param=param)
    if not set(map(type, ids)) <= {int}:
        odd = next(token for token in ids if type(token) is not int)
        raise InvalidRequestError(f"{param} has {quote(odd)}, but token ids are whole numbers.", param=param)
    end = LARGEST_COUNT if vocab_size is None else vocab_size
    if ids and not (min(ids) >= 0 and max(ids) < end):
        wrong = next(token for token in ids if not 0 <= token < end)
        raise InvalidRequestError(f"{param} has token id {quote(wrong)}; ids go from 0 to {end - 1}.", param=param)


def check_stop(stop: str | Sequence[str], most: int) -> list[str]:
    """Stop strings as a list.

    Args:
        stop: one, or several.
        most: how many there may be.

    Raises:
        InvalidRequestError: too many, or one is no string, empty or too long; ``param`` is its place.
    """
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list | tuple):
        raise InvalidRequestError(f"stop must be a string or a list of strings, not {quote(stop)}.", param="stop")
    if len(strings) > most:
        raise InvalidRequestError(f"stop has {len(strings)} strings; this model takes at most {most}.", param="stop")
    for index, string in enumerate(strings):
        if not isinstance(string, str) or not 1 <= len(string) <= LONGEST_STOP:
            param = "stop" if isinstance(stop, str) else f"stop[{index}]"
            message = f"{param} must be a string of 1 to {LONGEST_STOP} characters, not {quote(string, 50)}."
            raise InvalidRequestError(message, param=param)
    return list(strings)
