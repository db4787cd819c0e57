"""Steps a model as the scheduler would, and looks at what comes back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from furnace.contracts import BatchStepModel, Chunk, ChunkKind, OutOfKvError, Output, State
from furnace.contracts.errors import quote
from furnace.runtime.logits import read_logits
from furnace.testing.seed import generator
from furnace.testing.verdict import ConformanceError, Inapplicable, fail, require

__all__ = ["Rows", "Steps"]

Rows: TypeAlias = npt.NDArray[np.float32]

_LAST = Output.LAST


class Steps:
    """A model with its open states. On the model thread.

    Args:
        model: under test.
        tolerance: how far logits of a model that is not deterministic may be from what is due, relative to the largest.

    Attributes:
        unit: a length that is a multiple of the grid, and not trivial.
    """

    def __init__(self, model: BatchStepModel, tolerance: float) -> None:
        self.model = model
        self.limits = model.limits
        self.tolerance = tolerance
        self.can = model.capabilities
        self.unit = max(self.limits.grid, 8 // self.limits.grid * self.limits.grid)
        self._open: list[State] = []

    def tokens(self, count: int, *names: object) -> list[int]:
        """Random token ids, others for other names."""
        draw = generator("tokens", *names)
        return [draw.randrange(self.model.vocab_size) for _ in range(count)]

    def need_context(self, length: int) -> None:
        """Go on if the model's context holds so many tokens.

        Raises:
            Inapplicable: it does not.
        """
        if self.model.max_context < length:
            raise Inapplicable(f"the check needs {length} tokens of context; the model has {self.model.max_context}")

    def blocks(self, length: int) -> int:
        """KV blocks that so many tokens take."""
        return -(-length // self.limits.kv_block)

    def width(self, length: int, most: int) -> int:
        """How many states of so many tokens fit, up to ``most``."""
        room = self.limits.max_open
        if self.limits.kv_tokens is not None:
            room = min(room, self.limits.kv_tokens // self.limits.kv_block // self.blocks(length))
        return min(room, most, self.limits.max_logit_rows)

    def open(self) -> State:
        """A new, empty state."""
        with _allowed("open()"):
            state = self.model.open(None)
        self._open.append(state)
        return state

    def fork(self, state: State, length: int) -> tuple[State, int]:
        """Fork, and see that what is kept makes sense."""
        with _allowed(f"fork(state, {length})"):
            result = self.model.fork(state, length)
        require(
            isinstance(result, tuple) and len(result) == 2,
            f"fork() returned {type(result).__name__}. Return the new state and how many tokens it holds.",
        )
        copy, kept = result
        self._open.append(copy)
        require(
            isinstance(kept, int) and 0 <= kept <= length,
            f"fork(state, {length}) says that it kept {kept!r} tokens. Return a number from 0 to {length}.",
        )
        return copy, kept

    def release(self, state: State) -> None:
        """Give a state back."""
        self._open = [each for each in self._open if each is not state]
        with _allowed("release()"):
            self.model.release(state)

    def truncate(self, state: State, length: int) -> None:
        """Cut a state back."""
        with _allowed(f"truncate(state, {length})"):
            self.model.truncate(state, length)

    def release_all(self) -> None:
        """Give everything back."""
        for state in reversed(list(self._open)):
            self.release(state)

    def step(self, batch: Sequence[Chunk]) -> list[Rows]:
        """One step; the rows of each chunk, as copies.

        Raises:
            ConformanceError: the logits have not the form that the contract asks for.
        """
        given, tokens = list(batch), [list(chunk.tokens) for chunk in batch]
        with _allowed(f"step() with {_describe(batch)}"):
            logits = self.model.step(given)
        require(
            [id(chunk) for chunk in given] == [id(chunk) for chunk in batch]
            and tokens == [list(chunk.tokens) for chunk in batch],
            "step() changed the list of chunks, or the tokens of one. They are the caller's: copy what you change.",
        )
        counts = [_row_count(chunk) for chunk in batch]
        rows = self._read(logits, sum(counts), hidden=any(chunk.output is Output.HIDDEN for chunk in batch))
        ends = np.cumsum(counts)
        return [rows[end - count : end] for count, end in zip(counts, ends, strict=True)]

    def _read(self, logits: object, count: int, *, hidden: bool) -> Rows:
        logits = self.on_cpu(logits)
        try:
            rows = read_logits(logits)
        except (TypeError, ValueError) as error:
            fail(f"step() returned what numpy can't read: {error}. Return a float32 array [rows, vocab].")
        dtype = getattr(np.asarray(logits) if hasattr(logits, "__array__") else rows, "dtype", None)
        require(dtype == np.float32, f"step() returned {dtype}. Return float32: a conversion costs time at every step.")
        width = rows.shape[-1] if hidden and rows.ndim else self.model.vocab_size
        require(
            rows.shape == (count, width) or (count == 0 and rows.size == 0) or (count == 1 and rows.shape == (width,)),
            f"step() returned logits of shape {rows.shape}; the batch asks for {(count, width)}. Return one row for "
            "each chunk with output=last, one a token for output=all, none for output=none.",
        )
        rows = rows.reshape(count, width)
        require(
            np.isfinite(rows).all(),
            "step() returned NaN or infinite logits for valid tokens. Look for memory that is read before it is "
            "written: rows of padding, or KV beyond the end of a sequence.",
        )
        return np.array(rows)

    def on_cpu(self, logits: object) -> object:
        """Logits where numpy can read them; those of a model with a sampler of its own may be on a device."""
        to_cpu = getattr(logits, "cpu", None)
        return logits if to_cpu is None or self.model.sampler is None else to_cpu()

    def prefill(self, state: State, tokens: Sequence[int], start: int = 0, output: Output = _LAST) -> Rows:
        """Append prompt tokens in as few steps as the limits allow; the rows of the last one."""
        piece = self.limits.max_step_tokens // self.limits.grid * self.limits.grid
        if output is not Output.LAST:
            piece = min(piece, self.limits.max_logit_rows // self.limits.grid * self.limits.grid)
        rows: list[Rows] = []
        at = 0
        while True:
            end = min(len(tokens), (start + at + piece) // self.limits.grid * self.limits.grid - start)
            last = end >= len(tokens)
            wanted = output if last or output is not Output.LAST else Output.NONE
            chunk = Chunk(state, list(tokens[at:end]), start + at, ChunkKind.PREFILL, wanted)
            rows += self.step([chunk])
            if last:
                return np.concatenate(rows) if output is not Output.NONE else rows[-1]
            at = end

    def decode(self, state: State, token: int, position: int) -> Rows:
        """Append one generated token; its row."""
        return self.step([self.decode_chunk(state, [token], position)])[0]

    def decode_chunk(self, state: State, tokens: list[int], position: int, output: Output = _LAST) -> Chunk:
        """A chunk of generated tokens."""
        return Chunk(state, tokens, position, ChunkKind.DECODE, output)

    def alone(self, tokens: Sequence[int], prompt: int) -> Rows:
        """The reference: the row after a prompt, and after each token behind it, one a step, in a state of its own."""
        state = self.open()
        rows = [self.prefill(state, tokens[:prompt])]
        rows += [self.decode(state, tokens[place], place) for place in range(prompt, len(tokens))]
        self.release(state)
        return np.concatenate(rows)

    def same(self, actual: Rows, expected: Rows, what: str, *, exact: bool = True) -> None:
        """Rows are what they should be: bitwise where the model declares ``deterministic``, else within the tolerance.

        Args:
            actual: what came.
            expected: what is due.
            what: what is wrong if they differ, and what to do; a whole message.
            exact: False where a deterministic model does not promise the same bits either.

        Raises:
            ConformanceError: they differ.
        """
        difference = self.difference(actual, expected, exact=exact)
        if difference:
            fail(f"{what} {difference}")

    def difference(self, actual: Rows, expected: Rows, *, exact: bool = True) -> str:
        """How two arrays of rows differ, in words, or an empty string when they are the same."""
        if actual.shape != expected.shape:
            return f"(shape {actual.shape} where {expected.shape} is due)"
        if actual.size == 0 or np.array_equal(actual, expected):
            return ""
        gap = np.abs(actual.astype(np.float64) - expected)
        row, token = np.unravel_index(int(gap.argmax()), gap.shape)
        allowed = self.tolerance * max(1.0, float(np.abs(expected).max()))
        where = f"logit {token} of row {row} is {actual[row, token]:.6g} where {expected[row, token]:.6g} is due"
        if gap.max() > allowed:
            return f"(the {where})"
        if exact and self.can.deterministic:
            return (
                f"(the {where}: close, but not the same bits, which capabilities.deterministic promises. Declare it "
                "only after a probe at load)"
            )
        return ""


def _row_count(chunk: Chunk) -> int:
    if chunk.output is Output.NONE:
        return 0
    return 1 if chunk.output is Output.LAST else len(chunk.tokens)


@contextmanager
def _allowed(call: str) -> Iterator[None]:
    """What the contract allows must not raise anything but ``OutOfKvError``."""
    try:
        yield
    except OutOfKvError:
        raise
    except Exception as error:
        cause = f" ({type(error.__cause__).__name__}: {error.__cause__})" if error.__cause__ is not None else ""
        raise ConformanceError(
            f"{call}, which the contract allows, raised {type(error).__name__}: {quote(str(error))}{cause}"
        ) from error


def _describe(batch: Sequence[Chunk]) -> str:
    """A batch in a message."""
    parts = [f"{chunk.kind} of {len(chunk.tokens)} at {chunk.position}, output={chunk.output}" for chunk in batch[:6]]
    return "[" + "; ".join(parts) + ("; …" if len(batch) > 6 else "") + "]"
