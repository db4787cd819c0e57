"""What the HTTP process and an engine process say to each other: msgpack over a socketpair.

A frame is four bytes of length, little-endian, and one message of the unions below. Both sides come from the same
installation, so there is no version to agree on.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from furnace.contracts import (
    Capabilities,
    EngineContext,
    ErrorInfo,
    Event,
    GenerateRequest,
    Health,
    Input,
    SchedulerStats,
)
from furnace.plugins.engine_spec import EngineSpec
from furnace.scheduler.config import SchedulerConfig

__all__ = [
    "Abort",
    "Admitted",
    "Detokenize",
    "Events",
    "FrameReader",
    "FromEngine",
    "Generate",
    "Launch",
    "LoadFailed",
    "Loading",
    "Ready",
    "Refused",
    "Shutdown",
    "Status",
    "ToEngine",
    "Tokenize",
    "Tokenized",
    "encode_frame",
]

LARGEST_FRAME = 256 << 20
"""A length above this is not a frame: something else wrote to the socket."""


class Launch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message: load this.

    Attributes:
        spec: the engine.
        threads: see ``EngineContext``; likewise down to ``cache_dir``.
        scheduler: bounds for an engine that furnace schedules.
        log_level: what the engine process logs to stderr.
        log_format: how: ``text`` or ``json``.
        record: a file for what the scheduler does, or None.
        record_tokens: put token ids in it too.
    """

    spec: EngineSpec
    threads: int = 1
    memory_bytes: int | None = None
    max_context: int | None = None
    kv_tokens: int | None = None
    chat_template: str | None = None
    cache_dir: str | None = None
    scheduler: SchedulerConfig = SchedulerConfig()
    log_level: str = "info"
    log_format: str = "text"
    record: str | None = None
    record_tokens: bool = False

    @classmethod
    def of(
        cls,
        spec: EngineSpec | str,
        context: EngineContext,
        *,
        scheduler: SchedulerConfig | None = None,
        log_level: str = "info",
        log_format: str = "text",
        record: str | None = None,
        record_tokens: bool = False,
    ) -> Launch:
        """A launch with everything of a context that can cross to another process.

        Raises:
            EngineSpecError: the spec can't be read.
        """
        return cls(
            spec=EngineSpec.parse(spec) if isinstance(spec, str) else spec,
            threads=context.threads,
            memory_bytes=context.memory_bytes,
            max_context=context.max_context,
            kv_tokens=context.kv_tokens,
            chat_template=context.chat_template,
            cache_dir=str(context.cache_dir),
            scheduler=scheduler or SchedulerConfig(),
            log_level=log_level,
            log_format=log_format,
            record=record,
            record_tokens=record_tokens,
        )


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Admit all of these or none; ``ids`` are the caller's, never used twice."""

    call: int
    ids: list[int]
    requests: list[GenerateRequest]


class Abort(msgspec.Struct, frozen=True, tag=True):
    """The client of this generation left."""

    id: int


class Tokenize(msgspec.Struct, frozen=True, tag=True):
    """Asks for ``Tokenized`` with token ids."""

    call: int
    input: Input


class Detokenize(msgspec.Struct, frozen=True, tag=True):
    """Asks for ``Tokenized`` with text."""

    call: int
    tokens: list[int]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End all generations, close the engine, exit."""


ToEngine = Launch | Generate | Abort | Tokenize | Detokenize | Shutdown


class Loading(msgspec.Struct, frozen=True, tag=True):
    """See ``furnace.contracts.Progress``."""

    stage: str
    done: int
    total: int


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine can't be had; one line. The process ends."""

    message: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The handshake: the engine has started.

    Attributes:
        name: see ``LlmEngine``; likewise ``max_context`` and ``capabilities``.
        max_queue: most requests that may wait, if furnace schedules the engine.
    """

    name: str
    max_context: int
    capabilities: Capabilities
    max_queue: int | None = None


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """All requests of a call are in the queue; their events follow.

    Attributes:
        prompt_tokens: of each request: what it is charged if it is aborted in the queue.
    """

    call: int
    prompt_tokens: list[int]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A call failed; nothing of it is left."""

    call: int
    error: ErrorInfo


class Tokenized(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``Tokenize`` (tokens) or ``Detokenize`` (text)."""

    call: int
    tokens: list[int] = []
    text: str = ""


class Events(msgspec.Struct, frozen=True, tag=True):
    """All events since the last such frame, by generation: one frame a step."""

    batches: list[tuple[int, list[Event]]]


class Status(msgspec.Struct, frozen=True, tag=True):
    """How the engine is; sent when it changed, at most a few times a second."""

    health: Health
    stats: SchedulerStats | None = None


FromEngine = Loading | LoadFailed | Ready | Admitted | Refused | Tokenized | Status | Events

_encoder = msgspec.msgpack.Encoder()
_LENGTH = struct.Struct("<I")


def encode_frame(message: ToEngine | FromEngine) -> bytes:
    """A message as a frame."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into the bodies of frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies that are complete with ``data``.

        Raises:
            ValueError: this is no frame.
        """
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(buffer, start)
                if length > LARGEST_FRAME:
                    raise ValueError(f"a frame of {length} bytes")
                end = start + _LENGTH.size + length
                if len(buffer) < end:
                    break
                yield bytes(buffer[start + _LENGTH.size : end])
                start = end
        finally:
            del buffer[:start]
