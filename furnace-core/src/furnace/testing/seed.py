"""The seed of a run: drawn, unless somebody asks for one again."""

from __future__ import annotations

import os
import random
import secrets

__all__ = ["VARIABLE", "current_seed", "generator", "set_seed"]

VARIABLE = "FURNACE_TESTING_SEED"
"""Environment variable with the seed of a run."""

_chosen: list[int] = []


def set_seed(seed: int) -> None:
    """Use this seed from now on."""
    _chosen[:] = [seed]


def current_seed() -> int:
    """The seed of this process's checks.

    Raises:
        ValueError: the environment variable holds no whole number.
    """
    if not _chosen:
        text = os.environ.get(VARIABLE)
        try:
            _chosen.append(secrets.randbits(32) if not text else int(text))
        except ValueError:
            raise ValueError(f"{VARIABLE} must be a whole number, not {text!r}") from None
    return _chosen[0]


def generator(*names: object) -> random.Random:
    """Random numbers that depend on the seed and on these names alone."""
    return random.Random(" ".join(map(str, (current_seed(), *names))))  # noqa: S311 - replayable, not secret
