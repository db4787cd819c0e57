"""What the engines are asked."""

from __future__ import annotations

from pathlib import Path

from furnace.divergence.errors import DiffError

__all__ = ["PROMPTS", "read_prompts"]

PROMPTS = (
    "Why does bread rise in the oven?",
    "Name three rivers and the seas that they end in.",
    "Write a short letter to a neighbour whose cat you found.",
    "What is 17 times 6, and how do you work it out?",
    "Tell a story about a lighthouse keeper who is afraid of the dark.",
    "Explain to a child what a battery does.",
    "Liste drei Dinge auf, die man im Winter draußen tun kann.",
    "Write a Python function that reverses the words of a sentence.",
    "What should one think of before buying a used bicycle?",
    "Continue: 2, 4, 8, 16,",
)
"""Ten short ones of several kinds."""


def read_prompts(path: Path) -> list[str]:
    """The prompts in a file: one a line, empty lines left out.

    Raises:
        DiffError: it has none, or is not UTF-8.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise DiffError(f"{path} is not UTF-8 text") from None
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise DiffError(f"{path} holds no prompt: write one a line")
    return prompts
