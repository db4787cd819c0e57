"""What is common to the file formats: tensors by name, mapped into memory."""

from __future__ import annotations

import abc
import mmap
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from furnace.checkpoint.errors import CheckpointError
from furnace.checkpoint.mapped_file import map_file
from furnace.checkpoint.quantization import TensorType, dequantize
from furnace.contracts.errors import quote

__all__ = ["StoredTensor", "TensorFile"]


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in its file.

    Attributes:
        name: The tensor's name.
        type: How its elements are stored.
        shape: Row-major, outermost dimension first (GGUF itself writes the innermost first).
        offset: First byte, from the start of the file.
        nbytes: Stored bytes.
    """

    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class TensorFile(abc.ABC):
    """One open file. Arrays from it stay valid after `close`.

    Attributes:
        path: The file.
        tensors: All tensors by name.
    """

    def __init__(self, path: Path) -> None:
        """Open and check a file.

        Args:
            path: The file to open.

        Raises:
            CheckpointError: It can't be read, or its header contradicts the format or the file's size.
        """
        self.path = path
        self._mapping = map_file(path)
        try:
            self.tensors: Mapping[str, StoredTensor] = MappingProxyType(self._read_header(self._mapping))
        except BaseException:
            self._mapping.close()
            raise

    @abc.abstractmethod
    def _read_header(self, mapping: mmap.mmap) -> dict[str, StoredTensor]:
        """Return all tensors, checked to lie within the file.

        Raises:
            CheckpointError: The header contradicts the format or the file's size.
        """

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Return the stored bytes of a tensor, read-only and mapped, not copied.

        Returns:
            uint8 [..., bytes of one row]: a row is the innermost dimension.

        Raises:
            KeyError: There is no such tensor.
        """
        tensor = self.tensors[name]
        *outer, inner = tensor.shape or (1,)
        flat = np.frombuffer(self._mapping, np.uint8, tensor.nbytes, tensor.offset)
        return flat.reshape(*outer, inner // tensor.type.block_size * tensor.type.block_bytes)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Return a tensor as float32. F32 tensors are a read-only view of the file where their alignment allows it.

        Raises:
            CheckpointError: Its type can't be converted.
            KeyError: There is no such tensor.
        """
        tensor = self.tensors[name]
        try:
            return dequantize(self.raw(name), tensor.type).reshape(tensor.shape)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: tensor {quote(name)}: {error}") from None

    def close(self) -> None:
        """Give the mapping back. While arrays from `raw` are alive it stays until they are gone."""
        if self._mapping.closed:
            return
        if hasattr(mmap, "MADV_DONTNEED"):
            # What loading read is not needed in memory any more; what an array that stays reads comes back by itself.
            self._mapping.madvise(mmap.MADV_DONTNEED)
        # BufferError: numpy arrays point into the mapping; the last of them unmaps it.
        with suppress(BufferError):
            self._mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
