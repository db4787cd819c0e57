"""Reads GGUF files: metadata and tensors, mapped into memory.

The format is described in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Versions 2 and 3, little endian.

Every count and length of the header is compared with the bytes that are left in the file before anything is allocated
for it, so that a hostile or cut file costs an error and not memory or time.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from itertools import pairwise
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from furnace.checkpoint.errors import CheckpointError
from furnace.checkpoint.quantization import TENSOR_TYPES
from furnace.checkpoint.tensor_file import StoredTensor, TensorFile
from furnace.contracts.errors import quote

__all__ = ["GgufFile", "MetadataValue"]

MetadataValue: TypeAlias = "str | int | float | bool | tuple[MetadataValue, ...]"

_MAGIC = b"GGUF"
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MAX_NAME_BYTES = 65_535
_MAX_ARRAY_DEPTH = 2
# All arrays of a header together. The largest vocabularies (262 thousand tokens with scores, types and merges) need
# 1.3 million; the bound keeps what a hostile header can make us allocate near 100 MB.
_MAX_ARRAY_ELEMENTS = 1 << 21
# Far above any real file, for the same reason.
_MAX_TENSORS = 1 << 17
_MAX_METADATA = 1 << 16

_STRING = 8
_ARRAY = 9
_BOOL = 7
_SCALARS: Mapping[int, str] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    _BOOL: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
# The smallest entry has an empty name: length and type, then one byte of value, or one dimension, type and offset.
_MIN_METADATA_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


class _Header:
    """A cursor over the header that never reads past the end of the file."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self._buffer = buffer
        self._path = path
        self._end = len(buffer)
        self._elements_left = _MAX_ARRAY_ELEMENTS
        self.position = 0

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: not a valid GGUF file: {message}")

    def take(self, size: int, what: str) -> int:
        """Return the position of the next `size` bytes and step over them."""
        start = self.position
        if size > self._end - start:
            raise self.fail(f"{what} needs {size} bytes at byte {start}, but the file ends at {self._end}")
        self.position = start + size
        return start

    def u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self._buffer, self.take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self._buffer, self.take(8, what))[0]
        return value

    def count(self, what: str, min_bytes: int, limit: int) -> int:
        """Read a count of entries that take at least `min_bytes` each; no more than `limit` are accepted."""
        count = self.u64(what)
        if count > (self._end - self.position) // min_bytes:
            raise self.fail(f"{what} is {count}, more than the {self._end}-byte file can hold")
        if count > limit:
            raise self.fail(f"{what} is {count}, more than the {limit} that are left of what a header may have")
        return count

    def name(self, what: str) -> str:
        length = self.u64(f"the length of {what}")
        if length > _MAX_NAME_BYTES:
            raise self.fail(f"{what} is {length} bytes long; at most {_MAX_NAME_BYTES} are allowed")
        start = self.take(length, what)
        return self._decode(start, length, what)

    def metadata_value(self, key: str) -> MetadataValue:
        return self._value(self.u32(f"the type of {quote(key)}"), quote(key), depth=0)

    def _value(self, kind: int, what: str, depth: int) -> MetadataValue:
        if kind == _STRING:
            return self._strings(1, what)[0]
        if kind == _ARRAY:
            return self._array(what, depth + 1)
        return self._scalars(kind, 1, what)[0]

    def _array(self, what: str, depth: int) -> tuple[MetadataValue, ...]:
        if depth > _MAX_ARRAY_DEPTH:
            raise self.fail(f"{what} has arrays nested deeper than {_MAX_ARRAY_DEPTH}")
        kind = self.u32(f"the element type of {what}")
        count = self.count(f"the length of {what}", min_bytes=1, limit=self._elements_left)
        self._elements_left -= count
        if kind == _STRING:
            return self._strings(count, what)
        if kind == _ARRAY:
            return tuple(self._array(what, depth + 1) for _ in range(count))
        return self._scalars(kind, count, what)

    def _scalars(self, kind: int, count: int, what: str) -> tuple[int | float | bool, ...]:
        if kind not in _SCALARS:
            raise self.fail(f"{what} has the unknown value type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        start = self.take(count * dtype.itemsize, what)
        values = np.frombuffer(self._buffer[start : self.position], dtype)
        if kind == _BOOL:
            if count and values.max() > 1:
                raise self.fail(f"{what} has a boolean that is neither 0 nor 1")
            values = values.astype(np.bool_)
        return tuple(values.tolist())

    def _strings(self, count: int, what: str) -> tuple[str, ...]:
        # The hot loop of opening a file (some hundred thousand tokens and merges), hence without `take`.
        buffer, end, position = self._buffer, self._end, self.position
        strings: list[str] = []
        try:
            for _ in range(count):
                (length,) = _U64.unpack_from(buffer, position)
                position += 8
                if length > end - position:
                    raise self.fail(f"a string of {what} is {length} bytes long, but the file ends at byte {end}")
                strings.append(buffer[position : position + length].decode())
                position += length
        except struct.error:
            raise self.fail(f"{what} is cut off by the end of the file") from None
        except UnicodeDecodeError:
            raise self.fail(f"{what} has a string that is not UTF-8") from None
        self.position = position
        return tuple(strings)

    def _decode(self, start: int, length: int, what: str) -> str:
        try:
            return self._buffer[start : start + length].decode()
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8") from None


class GgufFile(TensorFile):
    """A GGUF file, open and mapped.

    Attributes:
        path: The file.
        tensors: All tensors by name, in the order of the file.
        metadata: All key-value pairs. Arrays are tuples.
    """

    def _read_header(self, mapping: mmap.mmap) -> dict[str, StoredTensor]:
        header = _Header(mapping, self.path)
        if mapping[: len(_MAGIC)] != _MAGIC:
            raise header.fail("it does not begin with the letters GGUF")
        header.take(len(_MAGIC), "the magic")
        version = header.u32("the version")
        if version and not version & 0xFFFF:
            raise header.fail("it is big endian, which is not supported")
        if version not in (2, 3):
            raise header.fail(f"version {version} is not supported, only 2 and 3 are")
        tensor_count = header.count("the number of tensors", _MIN_TENSOR_BYTES, _MAX_TENSORS)
        metadata_count = header.count("the number of metadata entries", _MIN_METADATA_BYTES, _MAX_METADATA)
        self.metadata: Mapping[str, MetadataValue] = MappingProxyType(_read_metadata(header, metadata_count))
        alignment = self._alignment(header)
        tensors = [_read_tensor(header) for _ in range(tensor_count)]
        data_start = -(-header.position // alignment) * alignment
        return _place_tensors(header, tensors, data_start, len(mapping), alignment)

    def _alignment(self, header: _Header) -> int:
        value = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        # bool is an int in Python, but True is no alignment.
        if not isinstance(value, int) or isinstance(value, bool):
            raise header.fail("general.alignment is not an integer")
        if value < 1 or value & (value - 1):
            raise header.fail(f"general.alignment is {value}; it must be a power of two")
        return value


def _read_metadata(header: _Header, count: int) -> dict[str, MetadataValue]:
    metadata: dict[str, MetadataValue] = {}
    for index in range(count):
        key = header.name(f"metadata key {index}")
        if key in metadata:
            raise header.fail(f"the metadata key {quote(key)} appears twice")
        metadata[key] = header.metadata_value(key)
    return metadata


def _read_tensor(header: _Header) -> StoredTensor:
    name = header.name("a tensor name")
    what = f"tensor {quote(name)}"
    dimensions = header.u32(f"the dimensions of {what}")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise header.fail(f"{what} has {dimensions} dimensions; 1 to {_MAX_DIMENSIONS} are allowed")
    # Python integers don't overflow, so a product of 64-bit dimensions can be compared with the file's size as it is.
    shape = tuple(header.u64(f"the shape of {what}") for _ in range(dimensions))[::-1]
    code = header.u32(f"the type of {what}")
    offset = header.u64(f"the offset of {what}")
    if code not in TENSOR_TYPES:
        raise header.fail(f"{what} has the unknown type number {code}")
    kind = TENSOR_TYPES[code]
    if min(shape) < 1:
        raise header.fail(f"{what} has no elements")
    if shape[-1] % kind.block_size:
        raise header.fail(f"{what} has rows of {shape[-1]} elements; {kind.name} needs a multiple of {kind.block_size}")
    return StoredTensor(name, kind, shape, offset, prod(shape) // kind.block_size * kind.block_bytes)


def _place_tensors(
    header: _Header, tensors: list[StoredTensor], data_start: int, file_size: int, alignment: int
) -> dict[str, StoredTensor]:
    """Turn offsets from the data section into offsets from the start of the file, and check them."""
    placed: dict[str, StoredTensor] = {}
    for tensor in tensors:
        what = f"tensor {quote(tensor.name)}"
        if tensor.name in placed:
            raise header.fail(f"{what} appears twice")
        if tensor.offset % alignment:
            raise header.fail(f"{what} begins at offset {tensor.offset}, not on a multiple of {alignment}")
        start = data_start + tensor.offset
        if start + tensor.nbytes > file_size:
            raise header.fail(f"{what} ends at byte {start + tensor.nbytes}, but the file ends at {file_size}")
        placed[tensor.name] = StoredTensor(tensor.name, tensor.type, tensor.shape, start, tensor.nbytes)
    for first, second in pairwise(sorted(placed.values(), key=lambda tensor: tensor.offset)):
        if first.offset + first.nbytes > second.offset:
            raise header.fail(f"tensors {quote(first.name)} and {quote(second.name)} overlap")
    return placed
