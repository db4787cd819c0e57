"""How a plugin makes an engine."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Generic, Protocol, TypeVar

import msgspec

from furnace.contracts.engine import LlmEngine

__all__ = [
    "API_VERSION",
    "OLDEST_API_VERSION",
    "EngineContext",
    "EngineFactory",
    "NoOptions",
    "Progress",
    "no_progress",
]

API_VERSION = 1
"""The version of the contracts that this furnace speaks; a factory names the one it was written for."""
OLDEST_API_VERSION = 1
"""The oldest version of the contracts whose factories still work."""


class Progress(Protocol):
    """Reports long work; cheap enough to call for every tensor."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """``stage`` names the work ("loading weights"); ``done`` of ``total`` units are behind it."""


def no_progress(stage: str, done: int, total: int) -> None:
    """Report to nobody."""


@dataclass(frozen=True, kw_only=True)
class EngineContext:
    """What the operator decided; made by furnace in the process where the engine lives.

    Attributes:
        threads: compute threads to use: usable cores divided by the number of models, at least 1.
        memory_bytes: memory that the engine may take for its KV cache, or None if nobody said.
        max_context: the operator's bound on prompt and output together, or None for the model's own.
        kv_tokens: KV cache size in tokens, or None for the engine's default.
        chat_template: template text that replaces the model's own, or None.
        cache_dir: a folder for what is costly to compute again; made on first use.
        progress: call it while loading.
    """

    threads: int = 1
    memory_bytes: int | None = None
    max_context: int | None = None
    kv_tokens: int | None = None
    chat_template: str | None = None
    cache_dir: Path = field(default_factory=lambda: Path.home() / ".cache" / "furnace")
    progress: Progress = no_progress


class NoOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """For an engine without options."""


OptionsT = TypeVar("OptionsT", bound=msgspec.Struct)


class EngineFactory(abc.ABC, Generic[OptionsT]):
    """Makes engines for one scheme. Importing its module imports no framework; ``create`` does.

    Class attributes:
        api_version: the ``API_VERSION`` that it was written for; who does not say was written for the first.
        options: a Struct with ``forbid_unknown_fields=True``; furnace fills it from the spec's query and ``-o``.
    """

    api_version: ClassVar[int] = 1
    options: ClassVar[type[msgspec.Struct]] = NoOptions

    @abc.abstractmethod
    def create(self, model: str, options: OptionsT, context: EngineContext) -> LlmEngine:
        """Load a model; may take long and block. Called in a worker thread of the process where the engine lives.

        Args:
            model: what stands behind the scheme: a name, a path, or ``org/name@revision``.
            options: an instance of ``self.options``.
            context: what the operator decided.

        Returns:
            An engine; ``Scheduled(model, pipeline)`` for a step model. It starts nothing before ``start()``.

        Raises:
            Exception: the message is shown to the operator on one line.
        """
