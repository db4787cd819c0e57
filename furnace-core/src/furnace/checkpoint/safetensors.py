"""Reads safetensors files, single and sharded, mapped into memory.

The format is described in https://huggingface.co/docs/safetensors: eight bytes with the length of a JSON header, the
header, and the tensors without gaps. The header is checked here, against the file's size and before anything is
allocated; the safetensors library would copy every tensor and has no bfloat16 for numpy.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from furnace.checkpoint.errors import CheckpointError
from furnace.checkpoint.mapped_file import map_file, parse_json_object, read_json_object
from furnace.checkpoint.quantization import TensorType, dequantize
from furnace.contracts.errors import quote

__all__ = ["INDEX_NAME", "SINGLE_NAME", "SafetensorsFile", "SafetensorsTensor", "shard_names"]

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

# A header takes about 130 bytes a tensor. The bound keeps what a hostile one can make us allocate under 100 MB.
_MAX_HEADER_BYTES = 10_000_000
_MAX_INDEX_BYTES = 10_000_000
_MAX_DIMENSIONS = 8
_LENGTH_BYTES = 8

_DTYPES: Mapping[str, TensorType] = {
    name: TensorType(name, 1, size)
    for name, size in (
        ("F64", 8),
        ("F32", 4),
        ("F16", 2),
        ("BF16", 2),
        ("I64", 8),
        ("I32", 4),
        ("I16", 2),
        ("I8", 1),
        ("U64", 8),
        ("U32", 4),
        ("U16", 2),
        ("U8", 1),
        ("BOOL", 1),
        ("F8_E4M3", 1),
        ("F8_E5M2", 1),
        ("F8_E8M0", 1),
    )
}


@dataclass(frozen=True)
class SafetensorsTensor:
    """Where a tensor lies in the file.

    Attributes:
        name: The tensor's name.
        type: How its elements are stored; blocks of one element.
        shape: Row-major, outermost dimension first.
        offset: First byte, from the start of the file.
        nbytes: Stored bytes.
    """

    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile:
    """One safetensors file, open and mapped.

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
            self.tensors: Mapping[str, SafetensorsTensor] = MappingProxyType(_read_header(self._mapping, path))
        except BaseException:
            self._mapping.close()
            raise

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Return the stored bytes of a tensor, read-only and mapped, not copied.

        Returns:
            uint8 [..., bytes of one row]: a row is the innermost dimension.

        Raises:
            KeyError: There is no such tensor.
        """
        tensor = self.tensors[name]
        shape = tensor.shape or (1,)
        flat = np.frombuffer(self._mapping, np.uint8, tensor.nbytes, tensor.offset)
        return flat.reshape(*shape[:-1], shape[-1] * tensor.type.block_bytes)

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
        # BufferError: numpy arrays point into the mapping; the last of them unmaps it.
        with suppress(BufferError):
            self._mapping.close()


def shard_names(directory: Path) -> Mapping[str, str]:
    """Return which file of a directory holds each tensor, from its `model.safetensors.index.json`.

    Raises:
        CheckpointError: The index can't be read, or names something that is not a safetensors file in the directory.
    """
    path = directory / INDEX_NAME
    weight_map = read_json_object(path, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map is missing or no object")
    for file in set(map(_as_text, weight_map.values())):
        # A plain name: an index must not point out of its own directory. Links in it are the operator's business
        # (the cache of huggingface_hub consists of them).
        if not file.endswith(".safetensors") or any(character in file for character in "/\\\0:"):
            raise CheckpointError(f"{path}: {quote(file)} is not the name of a safetensors file beside it")
    return weight_map


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else f"a {type(value).__name__}"


def _read_header(mapping: mmap.mmap, path: Path) -> dict[str, SafetensorsTensor]:
    def fail(message: str) -> CheckpointError:
        return CheckpointError(f"{path}: not a valid safetensors file: {message}")

    size = len(mapping)
    if size < _LENGTH_BYTES:
        raise fail(f"it has only {size} bytes")
    length = int.from_bytes(mapping[:_LENGTH_BYTES], "little")
    data_start = _LENGTH_BYTES + length
    if data_start > size:
        raise fail(f"the header is {length} bytes long, but the file has {size}")
    if length > _MAX_HEADER_BYTES:
        raise fail(f"the header is {length} bytes long; at most {_MAX_HEADER_BYTES} are read")
    entries = parse_json_object(mapping[_LENGTH_BYTES:data_start], f"{path}: the header")
    entries.pop("__metadata__", None)
    tensors: dict[str, SafetensorsTensor] = {}
    for name, entry in entries.items():
        try:
            tensors[name] = _read_entry(name, entry, data_start)
        except CheckpointError as error:
            raise fail(f"tensor {quote(name)}: {error}") from None
    end = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset != end:
            raise fail(f"tensor {quote(tensor.name)} begins at byte {tensor.offset}, but the one before ends at {end}")
        end += tensor.nbytes
    if end != size:
        raise fail(f"the tensors end at byte {end}, but the file ends at {size}")
    return tensors


def _read_entry(name: str, entry: object, data_start: int) -> SafetensorsTensor:
    if not isinstance(entry, dict):
        raise CheckpointError("it is no object")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise CheckpointError(f"the dtype {quote(dtype)} is not supported; known are {', '.join(_DTYPES)}")
    shape = _counts(entry, "shape")
    if len(shape) > _MAX_DIMENSIONS:
        raise CheckpointError(f"it has {len(shape)} dimensions; at most {_MAX_DIMENSIONS} are allowed")
    offsets = _counts(entry, "data_offsets")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError("data_offsets is not a start and an end")
    kind = _DTYPES[dtype]
    nbytes = prod(shape) * kind.block_bytes
    if nbytes != offsets[1] - offsets[0]:
        raise CheckpointError(f"its shape needs {nbytes} bytes, but data_offsets give {offsets[1] - offsets[0]}")
    return SafetensorsTensor(name, kind, shape, data_start + offsets[0], nbytes)


def _counts(entry: dict[str, object], key: str) -> tuple[int, ...]:
    """Return a list of non-negative 64-bit integers from a header entry."""
    values = entry.get(key)
    if not isinstance(values, list):
        raise CheckpointError(f"{key} is missing or no list")
    if not all(type(value) is int and 0 <= value < 1 << 64 for value in values):
        raise CheckpointError(f"{key} has something that is no size")
    return tuple(values)
