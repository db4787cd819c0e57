"""The native module, built from `rust/`."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from furnace.checkpoint import DecoderSpec

class Loader:
    """Takes weights in, one after the other, and then makes the model. The roles are those of `DecoderSpec`."""

    def __init__(self, threads: int) -> None: ...
    def matrix(self, role: str, stored_type: str, shape: tuple[int, int], rows: NDArray[np.uint8]) -> None: ...
    def vector(self, role: str, values: NDArray[np.float32]) -> None: ...
    def build(
        self,
        spec: DecoderSpec,
        ropes: Sequence[tuple[Sequence[float], Sequence[float]]],
        layers: Sequence[tuple[int | None, int | None]],
    ) -> Model:
        """Make the model; the loader is empty afterwards.

        Args:
            spec: Sizes and variants.
            ropes: Tables of rotary frequencies and scales, one number for each pair.
            layers: For each layer its window and which of `ropes` it has.
        """

class Model:
    """Weights and threads."""

    @property
    def kernels(self) -> str: ...
    def decoder(self, *, max_context: int, max_open: int, kv_blocks: int) -> Decoder:
        """Give the model a KV cache; it may have several, which are used one at a time.

        Args:
            max_context: Most tokens of a sequence.
            max_open: Most sequences at once.
            kv_blocks: Most blocks of the KV cache.
        """

class Decoder:
    """A model with its KV cache. States are numbers, which are never given out again."""

    @property
    def kv_blocks_used(self) -> int: ...
    def open(self) -> int: ...
    def release(self, state: int) -> None: ...
    def fork(self, state: int, length: int) -> int: ...
    def truncate(self, state: int, length: int) -> None: ...
    def step(
        self,
        states: Sequence[int],
        positions: Sequence[int],
        counts: Sequence[int],
        outputs: Sequence[int],
        tokens: Sequence[int],
    ) -> Rows:
        """Append chunks to their states in one forward pass, without the GIL.

        Args:
            states: Of each chunk.
            positions: Position of each chunk's first token.
            counts: Tokens of each chunk.
            outputs: For each chunk, 0 for no rows, 1 for the last, 2 for all, 3 for all hidden ones.
            tokens: Of all chunks, one after the other.
        """

    def close(self) -> None: ...
    def _panic_on(self, token: int | None) -> None:
        """Let every step panic that has this token: for tests of what happens then."""

class Rows(Buffer):
    """float32 [rows, width]."""

def stored_types() -> list[str]:
    """Return the names of the types of weights that are computed with as they are stored."""

def available_kernels() -> list[str]:
    """Return the names of the kernels that this processor can run, the best first."""
