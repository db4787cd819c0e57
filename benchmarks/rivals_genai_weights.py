"""The graph that openvino-genai writes for a GGUF file, with weights as exact as furnace-openvino's.

openvino-genai's reader of GGUF files rounds the zero points of Q4_1 to whole numbers, which loses much of the model.
Here every group of weights gets the right one back in 8 bits, so that both engines do equal work for equal weights.

Q4_1 is ``w = scale * q + minimum`` for each 32 weights, q from 0 to 15. In 8 bits that is
``(16 * q - z) * (scale / 16)``, z being the whole number nearest to ``-16 * minimum / scale``.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from furnace.checkpoint import open_checkpoint

__all__ = ["write_right_weights"]

GROUP = 32
STEPS = 16
# openvino-genai saves its graph beside the file that it reads.
SAVE = """
import sys, openvino_genai as genai
genai.ContinuousBatchingPipeline(sys.argv[1], genai.SchedulerConfig(), "CPU", {"enable_save_ov_model": True})
"""


def write_right_weights(gguf: Path, directory: Path, python: Path) -> None:
    """Write an OpenVINO model.

    Args:
        gguf: with linear layers in Q4_1.
        directory: for ``openvino_model.xml``; it exists afterwards only if all went well.
        python: of the environment of openvino-genai.

    Raises:
        ValueError: a layer of the graph is not in the file, or no layer of it is in 4 bits.
        CalledProcessError: openvino-genai can't write its graph.
        OSError: ``directory`` can't be written, or has something in it.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        whole = Path(folder) / "whole"
        whole.mkdir()
        _write(gguf, whole, python)
        whole.replace(directory)


def _write(gguf: Path, directory: Path, python: Path) -> None:
    beside = directory / "model.gguf"
    beside.symlink_to(gguf.resolve())
    subprocess.run([str(python), "-c", SAVE, str(beside)], check=True)
    saved = directory / "openvino_model.xml"
    model = ov.Core().read_model(saved)
    groups = dict(_groups_of_rows(gguf))
    replaced = 0
    for product in model.get_ordered_ops():
        if product.get_type_name() == "Multiply" and (quantized := _quantized(product)) is not None:
            product.output(0).replace(_in_8_bits(quantized, groups).output(0))
            replaced += 1
    if not replaced:
        raise ValueError(f"{saved.name} has no product with weights in 4 bits, whose zero points could be put right")
    whole = directory / "model.xml"
    ov.save_model(model, whole, compress_to_fp16=False)
    for suffix in (".xml", ".bin"):
        whole.with_suffix(suffix).replace(saved.with_suffix(suffix))


def _groups_of_rows(gguf: Path) -> Iterator[tuple[bytes, tuple[NDArray[np.float32], NDArray[np.float32]]]]:
    """For each row of a Q4_1 tensor its q, as bytes, and of its groups the scales and the minima.

    The graph has the rows of some layers in another order, so that a row is found by what it holds. A block is scale
    and minimum as float16, then 16 bytes whose lower halves are the first 16 weights (block_q4_1 of llama.cpp).
    """
    with open_checkpoint(gguf) as checkpoint:
        for role in checkpoint.roles():
            raw = checkpoint.raw(role)
            if raw.type.name != "Q4_1":
                continue
            blocks = raw.rows.reshape(raw.shape[0], -1, raw.type.block_bytes)
            halves = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], axis=2)
            scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0].astype(np.float32)
            minima = np.ascontiguousarray(blocks[..., 2:4]).view(np.float16)[..., 0].astype(np.float32)
            for row, scale, minimum in zip(halves, scales, minima, strict=True):
                yield row.tobytes(), (scale, minimum)


def _quantized(product: ov.Node) -> ov.Node | None:
    """The 4-bit constant that a Multiply scales, or None where it is something else."""
    node = product
    for expected in ("Subtract", "Convert", "Constant"):
        node = node.input_value(0).get_node()
        if node.get_type_name() != expected:
            return None
    return node if node.get_element_type() == ov.Type.u4 else None


def _in_8_bits(quantized: ov.Node, groups: dict[bytes, tuple[NDArray[np.float32], NDArray[np.float32]]]) -> ov.Node:
    rows, per_row, size = quantized.get_output_shape(0)
    packed = quantized.data.reshape(rows, -1)
    q = np.stack([packed & 15, packed >> 4], axis=2).reshape(rows, per_row * size)
    try:
        found = [groups[row.tobytes()] for row in q]
    except KeyError:
        raise ValueError(f"{quantized.get_friendly_name()} has a row that is not in the file") from None
    scales = np.stack([scale for scale, _ in found])[..., None]
    minima = np.stack([minimum for _, minimum in found])[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):  # a group of zeros has no scale
        zeros = np.nan_to_num(np.rint(-STEPS * minima / scales))
    if zeros.min() < 0 or zeros.max() > 255:
        raise ValueError(f"{quantized.get_friendly_name()}: a zero point does not fit into 8 bits")
    weights = ops.convert(ops.constant((q * STEPS).astype(np.uint8).reshape(rows, per_row, size)), ov.Type.f16)
    shifted = ops.subtract(weights, ops.convert(ops.constant(zeros.astype(np.uint8)), ov.Type.f16))
    return ops.multiply(shifted, ops.constant((scales / STEPS).astype(np.float16)))
