"""Write the golden logits of tiny-lm, made with transformers in float32: what every engine's are compared with."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

CONVERSATIONS = [
    [{"role": "user", "content": "Hello!"}],
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "What colour is the sky?"}],
    [{"role": "user", "content": "Tell me a story about a fox."}],
    [
        {"role": "user", "content": "My name is Anna."},
        {"role": "assistant", "content": "Nice to meet you, Anna! How can I help you?"},
        {"role": "user", "content": "List five fruits."},
    ],
]
NEW_TOKENS, TOP, POSITIONS, RANDOM_LENGTH = 96, 10, 8, 400


def continued(model: PreTrainedModel, prompt: list[int], end: int) -> list[int]:
    """Return a prompt with its greedy continuation, the end of the turn left out."""
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        chosen = int(model(torch.tensor([tokens])).logits[0, -1].argmax())
        if chosen == end:
            break
        tokens.append(chosen)
    return tokens


def case(model: PreTrainedModel, tokens: list[int]) -> dict[str, Any]:
    """Return what the model says about some tokens: its choice at each position, the highest logits at a few."""
    logits = model(torch.tensor([tokens])).logits[0]
    positions = sorted({round(i * (len(tokens) - 1) / (POSITIONS - 1)) for i in range(POSITIONS)})
    top = []
    for position in positions:
        values, ids = logits[position].topk(TOP)
        top.append({"position": position, "tokens": ids.tolist(), "logits": [round(v, 5) for v in values.tolist()]})
    return {"tokens": tokens, "positions": positions, "top": top, "argmax": logits.argmax(-1).tolist()}


@torch.inference_mode()
def golden(folder: Path) -> dict[str, Any]:
    """Return the golden logits of a model folder: greedy answers, and one long text of random tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    for conversation in CONVERSATIONS:
        prompt = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        texts.append(continued(model, tokenizer(prompt)["input_ids"], tokenizer.eos_token_id))
    numbers = torch.Generator().manual_seed(0)
    texts.append(torch.randint(3, model.config.vocab_size, (RANDOM_LENGTH,), generator=numbers).tolist())
    return {
        "model_sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}, float32",
        "cases": [case(model, tokens) for tokens in texts],
    }


def main() -> None:
    """Write the file from the command line."""
    parser = argparse.ArgumentParser(description="Write the golden logits of a tiny-lm folder.")
    parser.add_argument("folder", type=Path, help="the model folder")
    parser.add_argument("output", type=Path, help="the JSON file to write")
    arguments = parser.parse_args()
    arguments.output.write_text(json.dumps(golden(arguments.folder)) + "\n", encoding="utf-8")
    print(f"{arguments.output}: {arguments.output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
