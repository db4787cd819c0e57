"""Where the tensor of each role is: in which file, under which name, and which of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from furnace.checkpoint.decoder_spec import DecoderSpec
from furnace.checkpoint.errors import CheckpointError
from furnace.checkpoint.families import Family
from furnace.checkpoint.quantization import TENSOR_TYPES, TensorType, dequantize
from furnace.checkpoint.tensor_file import StoredTensor, TensorFile
from furnace.contracts.errors import quote

__all__ = ["Place", "find_places"]

_Shape = tuple[int, ...]
_FLOAT32 = next(kind for kind in TENSOR_TYPES.values() if kind.name == "F32")


@dataclass(frozen=True)
class Place:
    """Where the tensor of a role is.

    Attributes:
        file: The file.
        name: The tensor that its rows are in.
        shape: The shape of the role's own tensor.
        first_row: The first of its rows, counted through all but the last dimension of the stored tensor.
        order: Which row, counted from `first_row`, comes at which place; None for as they are stored.
        offset: What is added to its elements.
    """

    file: TensorFile
    name: str
    shape: _Shape
    first_row: int = 0
    order: NDArray[np.intp] | None = None
    offset: float = 0.0

    @property
    def type(self) -> TensorType:
        """How the elements that `rows` returns are stored: with an offset, not as they are in the file."""
        return _FLOAT32 if self.offset else self.file.tensors[self.name].type

    def rows(self) -> NDArray[np.uint8]:
        """Return the stored bytes, read-only: uint8 [..., bytes of a row]; mapped, not copied, if nothing changes.

        Raises:
            CheckpointError: There is an offset, and the stored type can't be converted.
        """
        rows = self.tensor().view(np.uint8) if self.offset else self._stored()
        # A vector is one row.
        rows = rows.reshape(-1) if len(self.shape) == 1 else rows
        rows.flags.writeable = False
        return rows

    def tensor(self) -> NDArray[np.float32]:
        """Return the tensor as float32; a read-only view of the file where nothing changes.

        Raises:
            CheckpointError: The stored type can't be converted.
        """
        try:
            tensor = dequantize(self._stored(), self.file.tensors[self.name].type).reshape(self.shape)
        except CheckpointError as error:
            raise CheckpointError(f"{self.file.path}: tensor {quote(self.name)}: {error}") from None
        return tensor + np.float32(self.offset) if self.offset else tensor

    def _stored(self) -> NDArray[np.uint8]:
        """Return the rows in order: uint8 [rows, bytes of a row]. Of a vector, each element counts as a row."""
        kind = self.file.tensors[self.name].type
        elements = 1 if len(self.shape) == 1 else self.shape[1]
        rows = self.file.raw(self.name).reshape(-1, elements // kind.block_size * kind.block_bytes)
        rows = rows[self.first_row : self.first_row + self.shape[0]]
        return rows if self.order is None else rows[self.order]


def find_places(
    spec: DecoderSpec,
    family: Family,
    files: Mapping[str, TensorFile],
    where: Path,
    *,
    gguf: bool = False,
) -> dict[str, Place]:
    """Find the tensors of all roles of a spec, and check their shapes.

    Args:
        spec: What the model is.
        family: Has the names.
        files: The file of each stored tensor.
        where: What a tensor that is in no file is missing from.
        gguf: Whether names and order of rows are those of GGUF files, else those of safetensors.

    Raises:
        CheckpointError: A tensor is missing, or has another shape than the spec says.
    """
    name_of = family.gguf_tensor_name if gguf else family.tensor_name
    shapes = spec.tensor_shapes()
    sharing: dict[str, list[str]] = {}
    for role in shapes:
        if role != "head" or not spec.tie_word_embeddings:
            sharing.setdefault(name_of(role), []).append(role)
    places: dict[str, Place] = {}
    for name, roles in sharing.items():
        file = files.get(name)
        if file is None or name not in file.tensors:
            raise CheckpointError(f"{where if file is None else file.path}: the tensor {name} is missing")
        _check_shape(file, file.tensors[name], [shapes[role] for role in roles])
        first_row = 0
        for role in roles:
            order = _row_order(spec, role, shapes[role][0], gguf and family.is_interleaved(role))
            offset = family.norm_offset if not gguf and role.endswith("norm") else 0.0
            places[role] = Place(file, name, shapes[role], first_row, order, offset)
            first_row += shapes[role][0]
    if spec.tie_word_embeddings:
        places["head"] = places["embed"]
    if "rope.factors" in places:
        _check_factors(places["rope.factors"])
    return {role: places[role] for role in shapes}


def _check_shape(file: TensorFile, stored: StoredTensor, shapes: list[_Shape]) -> None:
    """Check a tensor that holds the rows of others: one behind the other, or each at its place of a first dimension."""
    joined = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    stacked = (len(shapes), *shapes[0])
    is_stack = len(shapes) > 1 and stored.shape == stacked and set(shapes) == {shapes[0]}
    if stored.shape != joined and not is_stack:
        raise CheckpointError(
            f"{file.path}: the tensor {stored.name} has the shape {list(stored.shape)}, not {list(joined)}"
        )
    if len(joined) == 1 and stored.type.block_size > 1:
        raise CheckpointError(
            f"{file.path}: the tensor {stored.name} is a vector of type {stored.type.name}; "
            "vectors must not be quantized"
        )


def _check_factors(place: Place) -> None:
    factors = place.tensor()
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise CheckpointError(
            f"{place.file.path}: the tensor {place.name} has factors that are not finite and above 0, "
            "by which rotary frequencies can't be divided"
        )


def _row_order(spec: DecoderSpec, role: str, rows: int, interleaved: bool) -> NDArray[np.intp] | None:
    """Return where the rows of queries and keys are, so that the pairs that are rotated are half a head apart."""
    part = role.removesuffix(".bias").rpartition(".attention.")[2]
    partial = spec.rotary_dim is not None and part in ("q", "k", "q_norm", "k_norm")
    if not interleaved and not partial:
        return None
    width = spec.head_dim
    order = np.arange(width)
    if interleaved:
        order = order.reshape(-1, 2).T.reshape(-1)
    if spec.rotary_dim is not None:
        # The first half gets the first of each pair, and half of what is not rotated.
        ends = np.cumsum([spec.rotary_dim // 2, spec.rotary_dim // 2, (width - spec.rotary_dim) // 2])
        first, second, third, fourth = np.split(order, ends)
        order = np.concatenate([first, third, second, fourth])
    return (np.arange(0, rows, width)[:, None] + order).reshape(-1)
