"""From a spec to an engine."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

from furnace.contracts.engine import LlmEngine
from furnace.contracts.factory import EngineContext
from furnace.contracts.step import BatchStepModel, StepModel
from furnace.plugins.cores import usable_cores
from furnace.plugins.engine_spec import EngineSpec
from furnace.plugins.errors import EngineLoadError, PluginError, describe
from furnace.plugins.memory import usable_memory
from furnace.plugins.options import build_options
from furnace.plugins.registry import load_factory
from furnace.scheduler.config import SchedulerConfig

__all__ = ["SchedulerBounds", "default_context", "kv_memory", "load_engine", "why_no_engine"]

logger = logging.getLogger(__name__)


@runtime_checkable
class SchedulerBounds(Protocol):
    """An engine that takes the operator's bounds of the scheduler: ``furnace.Scheduled`` does."""

    def configure(self, defaults: SchedulerConfig) -> None:
        """Fill the fields that the engine's author left open; called before ``start``."""


# A quarter of the memory for KV leaves room for weights, and for the rest of the machine.
_KV_SHARE = 4


def default_context(models: int = 1) -> EngineContext:
    """What furnace decides when the operator says nothing: cores and a share of the memory, divided by ``models``."""
    return EngineContext(threads=max(1, usable_cores() // models), memory_bytes=kv_memory(models))


def kv_memory(models: int) -> int | None:
    """Bytes that each of ``models`` models may take for its KV cache by default; None if nobody knows."""
    memory = usable_memory()
    return None if memory is None else memory // _KV_SHARE // models


def load_engine(
    spec: EngineSpec | str,
    *,
    context: EngineContext | None = None,
    options: Mapping[str, object] | Iterable[tuple[str, object]] = (),
    scheduler: SchedulerConfig | None = None,
) -> LlmEngine:
    """Import the plugin of a spec and let it load the model. Takes long and blocks: call it in a worker thread.

    Args:
        spec: such as ``torch:tiny-lm?dtype=float32``.
        context: what the operator decided; ``default_context()`` if None.
        options: by key, texts or values; they win over those in the spec.
        scheduler: bounds for an engine that furnace schedules.

    Returns:
        The engine, not started.

    Raises:
        EngineSpecError: the spec can't be read.
        PluginError: the engine can't be had; the message is one line.
    """
    if isinstance(spec, str):
        spec = EngineSpec.parse(spec)
    factory = load_factory(spec.scheme)
    where = f"{spec.scheme}:{spec.model}"
    built = build_options(factory.options, {**spec.options, **dict(options)}, where=where)
    try:
        engine: object = factory.create(spec.model, built, default_context() if context is None else context)
    except (KeyboardInterrupt, PluginError):
        raise
    except BaseException as error:  # as at import: whatever the plugin raises is one line
        raise EngineLoadError(f"{where}: {describe(error)}") from error
    if not isinstance(engine, LlmEngine):
        raise EngineLoadError(f"{where}: {why_no_engine(engine)}")
    _bound(engine, where, scheduler or SchedulerConfig())
    return engine


def _bound(engine: LlmEngine, where: str, scheduler: SchedulerConfig) -> None:
    if isinstance(engine, SchedulerBounds):
        engine.configure(scheduler)
        return
    # The context has told every engine max_context and kv_tokens; the rest means nothing to one with its own scheduler.
    unused = [
        field
        for field in scheduler.__struct_fields__
        if field not in ("max_context", "kv_tokens") and getattr(scheduler, field) is not None
    ]
    if unused:
        logger.warning("%s has a scheduler of its own: %s is not used", where, ", ".join(unused))


def why_no_engine(value: object) -> str:
    """What to tell the author of something that should have been an engine."""
    kind = type(value).__name__
    if isinstance(value, StepModel | BatchStepModel):
        return (
            f"{kind} is a step model, which needs a text pipeline to be served: "
            f"furnace.Scheduled({kind}(...), furnace.TextPipeline.from_files('tokenizer.json', ...))"
        )
    if isinstance(value, type):
        return f"the class {value.__name__} is no engine; an instance of it may be one"
    return f"a {kind} is no engine; furnace.LlmEngine or furnace.Scheduled is needed"
