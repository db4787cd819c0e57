"""What a model file says, without a framework.

`open_checkpoint` opens a built-in model, a directory with safetensors, a GGUF file, or a model of the Hugging Face
hub. The `Checkpoint` that it returns has a `DecoderSpec` and the tensors by role, as float32 or as they are stored.
"""

from __future__ import annotations

from furnace.checkpoint.checkpoint import BUILT_IN, Checkpoint, RawTensor, open_checkpoint
from furnace.checkpoint.decoder_spec import DecoderSpec, LinearScaling, Llama3Scaling, RopeScaling, TableScaling
from furnace.checkpoint.errors import CheckpointError
from furnace.checkpoint.gguf import GgufFile, MetadataValue
from furnace.checkpoint.quantization import DEQUANTIZABLE, TensorType, dequantize

__all__ = [
    "BUILT_IN",
    "DEQUANTIZABLE",
    "Checkpoint",
    "CheckpointError",
    "DecoderSpec",
    "GgufFile",
    "LinearScaling",
    "Llama3Scaling",
    "MetadataValue",
    "RawTensor",
    "RopeScaling",
    "TableScaling",
    "TensorType",
    "dequantize",
    "open_checkpoint",
]
