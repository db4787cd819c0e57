"""What llama.cpp computes for every token of a vocabulary, out of the file that llama-perplexity writes.

The file of ``--kl-divergence-base``, little-endian, as llama.cpp's tools/perplexity/perplexity.cpp writes it: the
characters ``_logits_``; as int32 the length of a window, the size of the vocabulary, the number of windows, and the
tokens of all windows; then, for each scored row, float32 scale and float32 minimum, and a uint16 for each token of the
vocabulary, padded to an even number: the log-probability is ``scale * number + minimum``. What is less likely than the
likeliest token by more than 16 nats is stored as if it were just that, which flatters llama.cpp a little.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["LlamaLogProbs", "write_log_probs"]

MAGIC = b"_logits_"


def write_log_probs(program: Path, model: Path, text: str, folder: Path, *, windows: int, threads: int) -> Path:
    """Run llama-perplexity.

    Returns:
        The file, in ``folder``.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    document, target = folder / "text.txt", folder / "log-probs"
    document.write_text(text, encoding="utf-8")
    command = [str(program), "-m", str(model), "-f", str(document), "--kl-divergence-base", str(target)]
    command += ["-c", "512", "-b", "512", "--chunks", str(windows), "--threads", str(threads)]
    ran = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if ran.returncode != 0 or not target.exists():
        raise RuntimeError(f"llama-perplexity ended with {ran.returncode}: {ran.stderr[-2000:]}")
    return target


class LlamaLogProbs:
    """The scored rows of each window; use it in ``with``.

    Args:
        path: the file; it is mapped, so it may be removed as soon as this is made.
        tokens: of the text, by furnace.

    Raises:
        ValueError: it is another file, or llama.cpp sees other tokens.
    """

    def __init__(self, path: Path, tokens: list[int]) -> None:
        content = np.memmap(path, dtype=np.uint8, mode="r")
        if bytes(content[:8]) != MAGIC:
            raise ValueError(f"{path.name} does not begin with {MAGIC.decode()}")
        length, self._vocabulary, windows = (int(number) for number in content[8:20].view("<i4"))
        begin = 20 + 4 * length * windows
        theirs = content[20:begin].view("<i4").tolist()
        if theirs != tokens[: len(theirs)]:
            place = next(index for index, pair in enumerate(zip(theirs, tokens, strict=False)) if pair[0] != pair[1])
            raise ValueError(f"llama.cpp makes other tokens of the text, from number {place} on")
        width = 2 * ((self._vocabulary + 1) // 2) + 4
        self._rows: NDArray[np.uint16] = content[begin:].view("<u2").reshape(windows, length - 1 - length // 2, width)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._rows

    def __call__(self, window: int, tokens: list[int]) -> NDArray[np.float32]:
        """Log-probabilities ``[rows, vocab]`` of a window."""
        rows = self._rows[window]
        numbers = np.ascontiguousarray(rows[:, :4]).view("<f4")
        found: NDArray[np.float32] = rows[:, 4 : 4 + self._vocabulary] * numbers[:, :1] + numbers[:, 1:]
        return found
