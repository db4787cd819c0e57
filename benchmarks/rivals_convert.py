"""The weights of a GGUF file as a directory that transformers and vLLM read: float32 safetensors and a tokenizer.

``python -m benchmarks.rivals_convert GGUF DIRECTORY``, in the environment of transformers.
"""

from __future__ import annotations

import sys
from pathlib import Path

__all__: list[str] = []


def main(gguf: str, directory: str) -> None:
    """Convert."""
    import torch
    import transformers

    source = {"pretrained_model_name_or_path": str(Path(gguf).parent), "gguf_file": Path(gguf).name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # What was read from a GGUF file refuses to be saved, although its weights are plain float32 by now.
    config = transformers.AutoConfig.from_pretrained(**source)
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(directory)


if __name__ == "__main__":
    main(*sys.argv[1:])
