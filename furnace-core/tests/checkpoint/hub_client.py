"""Opens a model from the hub, or fetches it for a format of our own, and says what happened.

The tests run it in a process of its own: huggingface_hub reads its environment when it is imported.
"""

from __future__ import annotations

import json
import sys

from furnace.checkpoint import CheckpointError, locate, open_checkpoint

model, *own_weights = sys.argv[1:]
try:
    if own_weights:
        place = locate(model, own_weights=own_weights)
        answer = {"name": place.name, "files": sorted(path.name for path in place.path.iterdir())}
    else:
        with open_checkpoint(model) as checkpoint:
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
