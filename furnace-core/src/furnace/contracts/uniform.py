"""The one random number of a row."""

from __future__ import annotations

import struct
from hashlib import blake2b

__all__ = ["uniform"]

_WORD = (1 << 64) - 1
_pack = struct.Struct("<3Q").pack


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) that depends on its arguments alone, on every machine.

    A hash and not a generator: there is no state to keep, to replay after a preemption, or to share with the
    neighbours in a batch.

    Args:
        seed: any integer; taken modulo 2**64, as are the others.
        choice: which of n choices.
        position: how many tokens were generated before.
    """
    digest = blake2b(_pack(seed & _WORD, choice & _WORD, position & _WORD), digest_size=8).digest()
    # 53 bits, so that every value is a double and none rounds up to 1.
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
