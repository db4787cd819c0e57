"""Picks the next token of each row of logits: numpy, vectorised over rows, each row as if it were alone."""

from __future__ import annotations

from furnace.sampling.sampler import Sampler

__all__ = ["Sampler"]
