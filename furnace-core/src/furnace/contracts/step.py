"""Contract 2: a model that computes logits step by step; furnace does the rest.

``StepModel`` is the small form, ``BatchStepModel`` the fast one and the only one that the scheduler knows. All
methods are called from one thread, the model thread.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import msgspec

from furnace.contracts.errors import InvalidRequestError
from furnace.contracts.request import SamplingParams
from furnace.contracts.uniform import uniform

__all__ = [
    "BatchStepModel",
    "Chunk",
    "ChunkKind",
    "ForkKind",
    "Limits",
    "Logits",
    "Output",
    "Row",
    "State",
    "StepCapabilities",
    "StepModel",
    "SupportsArray",
    "SupportsDLPack",
    "TokenSampler",
]


@runtime_checkable
class SupportsArray(Protocol):
    """Something that numpy reads (``numpy.ndarray``, a CPU ``torch.Tensor``)."""

    def __array__(self) -> Any: ...


@runtime_checkable
class SupportsDLPack(Protocol):
    """Something that can be handed over without a copy by DLPack (https://dmlc.github.io/dlpack)."""

    def __dlpack__(self) -> Any: ...

    def __dlpack_device__(self) -> Any: ...


Logits: TypeAlias = SupportsArray | SupportsDLPack | Sequence[float]
"""Scores of the next token, before softmax: float32, ``[vocab]`` for one row or ``[rows, vocab]``."""

State: TypeAlias = Any
"""What a model keeps of one sequence; opaque to furnace. The KV cache lives there."""


class StepModel(abc.ABC):
    """A model that prefills a prompt and then decodes one token at a time. The way in for your own model.

    Called from the model thread only.
    """

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The id that clients ask for in ``model``."""

    @property
    @abc.abstractmethod
    def max_context(self) -> int:
        """Most tokens of prompt and output together."""

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Length of a row of logits."""

    @abc.abstractmethod
    def prefill(self, prompt: Sequence[int]) -> tuple[State, Logits]:
        """Read a prompt of at least one token.

        Returns:
            A new state, and the logits ``[vocab]`` of the token after the prompt. The array is read before the next
            call and may be reused by it.

        Raises:
            Exception: fails this request alone.
        """

    @abc.abstractmethod
    def decode(self, state: State, token: int) -> Logits:
        """Append one token to ``state``, in place.

        Returns:
            The logits ``[vocab]`` of the next token.

        Raises:
            Exception: fails this request alone; the state is then released.
        """

    def release(self, state: State) -> None:
        """The sequence is over, on whatever path; called exactly once for each state that ``prefill`` returned."""


class ChunkKind(enum.StrEnum):
    """How the KV of a chunk is made."""

    PREFILL = "prefill"
    """Prompt tokens, many at a time, borders on the grid."""
    DECODE = "decode"
    """Generated tokens: one, or several as drafts or in a replay, at most ``max_decode_tokens``."""


class Output(enum.StrEnum):
    """Which rows a chunk gives."""

    NONE = "none"
    LAST = "last"
    """One row of logits: of the token after the chunk."""
    ALL = "all"
    """A row of logits for each token of the chunk."""
    HIDDEN = "hidden"
    """A row of hidden values for each token; never in a batch with other outputs."""


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """Consecutive tokens of one sequence, to be appended in one step.

    Attributes:
        state: from ``open`` or ``fork``; at most one chunk of a state in a batch.
        tokens: at least one.
        position: of the first token; equals the number of tokens that the state holds.
        kind: prefill or decode.
        output: which rows to return.
    """

    state: Any
    tokens: list[int]
    position: int
    kind: ChunkKind
    output: Output


class ForkKind(enum.StrEnum):
    """What ``fork`` costs."""

    NONE = "none"
    """There is no ``fork``."""
    SHARE = "share"
    """Whole blocks are shared and counted once; a cut block is copied."""
    COPY = "copy"
    """Everything is copied and counted in full."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the model can take; fixed after it is built.

    Attributes:
        max_open: most states open at once, cached ones included.
        max_step_tokens: most prefill and draft tokens of a step; plain decode rows don't count. At least ``grid``.
        max_logit_rows: most rows that a step returns; at least ``grid + max_open``.
        kv_tokens: tokens that the KV cache holds in all, or None when it is not bounded.
        kv_block: KV is given out in blocks of this many tokens.
        grid: borders between prefill chunks fall on multiples of this many positions.
        max_decode_tokens: most tokens of a decode chunk.
        fork: what ``fork`` costs.
    """

    max_open: int = 32
    max_step_tokens: int = 512
    max_logit_rows: int = 64
    kv_tokens: int | None = None
    kv_block: int = 1
    grid: int = 1
    max_decode_tokens: int = 1
    fork: ForkKind = ForkKind.NONE

    def validate(self) -> None:
        """Check the limits against each other; called when the model is loaded.

        Raises:
            InvalidRequestError: naming the limit at fault.
        """
        for field in ("max_open", "max_step_tokens", "max_logit_rows", "kv_block", "grid", "max_decode_tokens"):
            if getattr(self, field) < 1:
                raise InvalidRequestError(f"limits.{field} must be at least 1", param=f"limits.{field}")
        if self.max_step_tokens < self.grid:
            raise InvalidRequestError(
                f"limits.max_step_tokens is {self.max_step_tokens}, but must be at least the grid, {self.grid}",
                param="limits.max_step_tokens",
            )
        if self.max_logit_rows < self.grid + self.max_open:
            raise InvalidRequestError(
                f"limits.max_logit_rows is {self.max_logit_rows}, but must be at least grid + max_open, "
                f"{self.grid + self.max_open}",
                param="limits.max_logit_rows",
            )
        if self.kv_tokens is not None and self.kv_tokens < self.kv_block:
            raise InvalidRequestError(
                f"limits.kv_tokens is {self.kv_tokens}, less than one block of {self.kv_block}",
                param="limits.kv_tokens",
            )


class StepCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch model declares beyond ``step``. The defaults are the least.

    Attributes:
        prefix_reuse: ``fork`` works.
        rewind: ``truncate`` works.
        deterministic: a row is bitwise what it is alone, under any chunking on the grid.
        all_logits: ``Output.ALL`` works.
        hidden: ``Output.HIDDEN`` works.
    """

    prefix_reuse: bool = False
    rewind: bool = False
    deterministic: bool = False
    all_logits: bool = False
    hidden: bool = False


class Row(msgspec.Struct, kw_only=True):
    """What a sampler must know about one row of logits.

    Attributes:
        params: how to pick; ``seed`` is not read from here.
        seed: drawn if the client gave none.
        choice: which of n choices.
        position: how many tokens were generated before this one.
        prompt_counts: token ids of the prompt with their counts; filled only when a repetition penalty needs it.
        counts: token ids generated so far with their counts; filled only when a penalty needs it.
        end_tokens: the model's end tokens (not the request's stop tokens).
        mask: one bit per token id, least significant first in little-endian 32-bit words, set when allowed; or None.
    """

    params: SamplingParams
    seed: int
    choice: int
    position: int
    prompt_counts: Mapping[int, int] = {}
    counts: Mapping[int, int] = {}
    end_tokens: frozenset[int] = frozenset()
    mask: Any = None

    @property
    def uniform(self) -> float:
        """The row's one random number, in [0, 1): of ``(seed, choice, position)`` alone, the same on every machine."""
        return uniform(self.seed, self.choice, self.position)

    @property
    def banned_tokens(self) -> set[int]:
        """Token ids that ``min_tokens`` and ``ignore_eos`` forbid, unless nothing else is allowed."""
        if self.position < self.params.min_tokens:
            return {*self.end_tokens, *self.params.stop_token_ids}
        return set(self.end_tokens) if self.params.ignore_eos else set()


class TokenSampler(abc.ABC):
    """Picks a token for each row; a model may bring one that stays on its device.

    It goes through the same tests as ``furnace.Sampler``, whose docstring says in which order a row's parameters count.
    """

    @abc.abstractmethod
    def sample(self, logits: Logits, rows: Sequence[Row]) -> list[int]:
        """The token id of each row; -1 for a row in which nothing is allowed (or that has no finite score).

        Randomness comes from ``Row.uniform`` alone. Called from the model thread.

        Args:
            logits: float32 ``[len(rows), vocab]``; may be overwritten. A model's own sampler gets rows of what its
                model's ``step`` returned, in that form; ids that the tokenizer lacks are cut off at the end.
            rows: one for each row of logits.
        """


class BatchStepModel(abc.ABC):
    """A model that computes many sequences in one forward pass.

    Called from the model thread only.
    """

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The id that clients ask for in ``model``."""

    @property
    @abc.abstractmethod
    def max_context(self) -> int:
        """Most tokens of prompt and output together."""

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Length of a row of logits."""

    @property
    @abc.abstractmethod
    def limits(self) -> Limits:
        """What it can take; does not change."""

    @property
    def capabilities(self) -> StepCapabilities:
        """What it can do beyond ``step``; does not change."""
        return StepCapabilities()

    @property
    def sampler(self) -> TokenSampler | None:
        """A sampler of its own, or None to use furnace's; does not change."""
        return None

    @abc.abstractmethod
    def open(self, context: object = None) -> State:
        """A new, empty sequence.

        Args:
            context: reserved for adapters and media; always None today.

        Raises:
            OutOfKvError: no room; nothing changed.
        """

    @abc.abstractmethod
    def release(self, state: State) -> None:
        """Give back all that a sequence holds; called exactly once for each state."""

    @abc.abstractmethod
    def step(self, batch: Sequence[Chunk]) -> Logits:
        """Append every chunk's tokens to its state, in one forward pass.

        Returns:
            float32 ``[rows, vocab]`` in batch order, then position order. Read before the next call, which may reuse
            it. ``[rows, hidden]`` when the chunks ask for hidden values. No rows: an array with 0 rows. For a model
            with a ``sampler`` of its own, logits may be any array that has a ``shape`` and is indexed as numpy's and
            torch's are: only that sampler reads its values.

        Raises:
            OutOfKvError: no room; nothing changed.
            StepError: names the chunks at fault.
            Exception: the states of the batch are unknown; all are released and each sequence is replayed alone.
        """

    def fork(self, state: State, length: int) -> tuple[State, int]:
        """A new state that holds a prefix of another (capability ``prefix_reuse``).

        Returns:
            The new state and ``kept <= length``: how many tokens it holds. The scheduler prefills the rest.

        Raises:
            OutOfKvError: no room; nothing changed.
        """
        raise TypeError(f"{type(self).__name__} declares no prefix_reuse, so it can't fork")

    def truncate(self, state: State, length: int) -> None:
        """Forget all tokens of ``state`` from position ``length`` on (capability ``rewind``)."""
        raise TypeError(f"{type(self).__name__} declares no rewind, so it can't truncate")

    def close(self) -> None:
        """Give back everything; called once, after the last state was released."""
