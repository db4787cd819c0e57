"""Reads safetensors files, single and sharded, mapped into memory.

The format is described in https://huggingface.co/docs/safetensors: eight bytes with the length of a JSON header, the
header, and the tensors without gaps. The header is checked here, against the file's size and before anything is
allocated; the safetensors library would copy every tensor and has no bfloat16 for numpy.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from math import prod
from pathlib import Path

from furnace.checkpoint.errors import CheckpointError
from furnace.checkpoint.mapped_file import parse_json_object, read_json_object
from furnace.checkpoint.quantization import TensorType
from furnace.checkpoint.tensor_file import StoredTensor, TensorFile
from furnace.contracts.errors import quote

__all__ = ["INDEX_NAME", "SINGLE_NAME", "SafetensorsFile", "shard_names"]

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


class SafetensorsFile(TensorFile):
    """One safetensors file, open and mapped."""

    def _read_header(self, mapping: mmap.mmap) -> dict[str, StoredTensor]:
        return _read_header(mapping, self.path)


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


def _read_header(mapping: mmap.mmap, path: Path) -> dict[str, StoredTensor]:
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
    tensors: dict[str, StoredTensor] = {}
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


def _read_entry(name: str, entry: object, data_start: int) -> StoredTensor:
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
    return StoredTensor(name, kind, shape, data_start + offsets[0], nbytes)


def _counts(entry: dict[str, object], key: str) -> tuple[int, ...]:
    """Return a list of non-negative 64-bit integers from a header entry."""
    values = entry.get(key)
    if not isinstance(values, list):
        raise CheckpointError(f"{key} is missing or no list")
    if not all(type(value) is int and 0 <= value < 1 << 64 for value in values):
        raise CheckpointError(f"{key} has something that is no size")
    return tuple(values)
