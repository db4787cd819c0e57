"""Cosines and sines of the rotary embedding, for all positions that a sequence may have."""

from __future__ import annotations

import torch
from torch import Tensor

from furnace_torch.layer import Rotation
from furnace_torch.weights import DecoderWeights

__all__ = ["RotaryTables"]


class RotaryTables:
    """The tables of each kind of layer: those with the model's rotary frequencies, and those with local ones."""

    def __init__(self, weights: DecoderWeights, max_context: int) -> None:
        """Make the tables.

        Args:
            weights: The model's weights.
            max_context: Tokens of the longest sequence that is served; it decides between the frequencies of a model
                that has some for short contexts and some for long ones.
        """
        spec = weights.spec
        positions = torch.arange(max_context, dtype=torch.float32)
        self._tables: dict[bool, Rotation] = {}
        for local in {layer.is_local for layer in weights.layers}:
            frequencies = spec.rotary_frequencies(weights.rope_factors, local=local, context=max_context)
            angles = torch.outer(positions, torch.from_numpy(frequencies))
            scales = torch.from_numpy(spec.rotary_scales(local=local))
            device = weights.norm.device
            self._tables[local] = ((angles.cos() * scales).to(device), (angles.sin() * scales).to(device))

    def rotations(self, positions: Tensor) -> dict[bool, Rotation]:
        """Return how to rotate rows at some positions, int64 [rows], for layers that are not local and that are."""
        return {
            local: (_doubled(cosines[positions]), _doubled(sines[positions]))
            for local, (cosines, sines) in self._tables.items()
        }


def _doubled(half: Tensor) -> Tensor:
    return torch.cat((half, half), -1)[:, None]
