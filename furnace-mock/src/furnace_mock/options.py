"""What can be set of a mock. Imports nothing heavy."""

from __future__ import annotations

import enum

import msgspec

__all__ = ["FailKind", "Form", "Level", "MockOptions"]


class Level(enum.StrEnum):
    """Which of furnace's contracts the mock implements."""

    STEP = "step"
    """A model behind furnace's scheduler."""
    ENGINE = "engine"
    """A whole engine, without furnace's scheduler."""


class Form(enum.StrEnum):
    """Which form a model of level ``step`` has."""

    BATCH = "batch"
    PLAIN = "plain"
    """The small form, ``StepModel``: no limits, no fork, one sequence at a time."""


class FailKind(enum.StrEnum):
    """What happens at ``fail_at``."""

    EXCEPTION = "exception"
    """The step raises; the states of its batch are broken and may only be released."""
    STEP_ERROR = "step_error"
    """The step names the guilty, and the others have advanced."""
    STEP_REFUSED = "step_refused"
    """The step names the guilty, and nothing has advanced."""
    NAN = "nan"
    """The row of logits is NaN."""
    EXIT = "exit"
    """The process is gone at once, with exit code 70."""


class MockOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of every ``mock:`` model.

    Attributes:
        level: which contract.
        form: which form of a step model.
        text: the output of ``mock:script``, one token for each piece between ``|``.
        hex: the same as bytes in hexadecimal, for tokens that are no whole characters.
        seed: other words from ``mock:lorem``.
        fail_at: fail instead of giving this output token; 0 is the first one, at the end of the prefill.
        fail_kind: how.
        hang_at: hang instead of giving this output token, until the mock is closed or resumed.
        fault_on: fail and hang only where the prompt contains this text; empty for everywhere.
        prefill_delay: seconds that each prompt token costs.
        step_delay: seconds that each step costs.
        max_context: most tokens of prompt and output together.
        max_sequences: most sequences at once.
        max_queue: most requests that wait for one; None for furnace's default.
        kv_tokens: tokens that the KV cache holds; None for no bound.
        kv_block: KV is given out in blocks of this many tokens.
        grid: borders between prefill chunks fall on its multiples.
        max_step_tokens: most prefill and draft tokens of a step.
        max_decode_tokens: most tokens of a decode chunk.
    """

    level: Level = Level.STEP
    form: Form = Form.BATCH
    text: str | None = None
    hex: str | None = None
    seed: int = 0
    fail_at: int | None = None
    fail_kind: FailKind = FailKind.EXCEPTION
    hang_at: int | None = None
    fault_on: str = ""
    prefill_delay: float = 0.0
    step_delay: float = 0.0
    max_context: int = 4096
    max_sequences: int = 64
    max_queue: int | None = None
    kv_tokens: int | None = None
    kv_block: int = 1
    grid: int = 1
    max_step_tokens: int = 512
    max_decode_tokens: int = 8

    def __post_init__(self) -> None:
        for name in ("prefill_delay", "step_delay", "fail_at", "hang_at", "max_queue"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must not be negative")
        for name in ("max_context", "max_sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.text is not None and self.hex is not None:
            raise ValueError("give a script as text or as hex, not both")

    @property
    def script(self) -> list[bytes] | None:
        """The bytes of each scripted token, or None without a script.

        Raises:
            ValueError: ``hex`` is not hexadecimal.
        """
        if self.hex is not None:
            return [bytes.fromhex(piece) for piece in self.hex.split("|") if piece]
        if self.text is not None:
            return [piece.encode() for piece in self.text.split("|") if piece]
        return None
