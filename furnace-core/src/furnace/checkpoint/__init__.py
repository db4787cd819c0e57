"""What a model file says, without a framework.

`open_checkpoint` opens a built-in model, a directory with safetensors, a GGUF file, or a model of the Hugging Face
hub. The `Checkpoint` that it returns has a `DecoderSpec` and the tensors by role, as float32 or as they are stored.
"""

from __future__ import annotations

from furnace.checkpoint.checkpoint import BUILT_IN, Checkpoint, Location, RawTensor, locate, open_checkpoint
from furnace.checkpoint.decoder_spec import DecoderSpec, Experts
from furnace.checkpoint.errors import CheckpointError
from furnace.checkpoint.gguf import GgufFile, MetadataValue
from furnace.checkpoint.mapped_file import read_json_object
from furnace.checkpoint.quantization import DEQUANTIZABLE, TensorType, dequantize
from furnace.checkpoint.rope import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    TableScaling,
    YarnScaling,
)
from furnace.checkpoint.tensor_file import TensorFile

__all__ = [
    "BUILT_IN",
    "DEQUANTIZABLE",
    "Checkpoint",
    "CheckpointError",
    "DecoderSpec",
    "Experts",
    "GgufFile",
    "LinearScaling",
    "Llama3Scaling",
    "Location",
    "LongRopeScaling",
    "MetadataValue",
    "RawTensor",
    "RopeScaling",
    "TableScaling",
    "TensorFile",
    "TensorType",
    "YarnScaling",
    "dequantize",
    "locate",
    "open_checkpoint",
    "read_json_object",
]
