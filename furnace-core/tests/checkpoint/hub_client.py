"""Opens a model from the hub and says what happened; the tests run it in a process of its own.

huggingface_hub reads its environment when it is imported, so every test needs a fresh interpreter.
"""

from __future__ import annotations

import json
import sys

from furnace.checkpoint import CheckpointError, open_checkpoint

try:
    with open_checkpoint(sys.argv[1]) as checkpoint:
        tokenizer = checkpoint.text_file("tokenizer.json")
        answer = {
            "name": checkpoint.name,
            "first": float(checkpoint.tensor("norm")[0]),
            "tokenizer": tokenizer is not None,
            "gguf": checkpoint.gguf_metadata is not None,
        }
except CheckpointError as error:
    answer = {"error": str(error)}
print(json.dumps(answer))  # noqa: T201
