"""The engines of a server, by the model id that clients ask for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from litestar.types import Scope

from furnace.contracts import Capabilities, EngineUnavailableError, Health, HealthState, LlmEngine, SchedulerStats
from furnace.contracts.errors import quote
from furnace.server.errors import ApiError, EngineStartError
from furnace.telemetry import LlmMetrics

__all__ = ["EngineSource", "Engines", "Model", "requested_model"]

logger = logging.getLogger("furnace.server")

EngineSource = LlmEngine | str | Callable[[], LlmEngine]
"""An engine; the spec of one (``torch:tiny-lm``), which gets a process of its own; or a function that makes one in this
process (it may block)."""

T = TypeVar("T")


class Model:
    """An engine under the name that clients know it by."""

    def __init__(self, name: str, engine: LlmEngine) -> None:
        self.name = name
        self.engine = engine
        self.created = int(time.time())
        self.metrics = LlmMetrics()
        self.closed = False

    @property
    def capabilities(self) -> Capabilities:
        """What clients may ask of it."""
        return self.engine.capabilities

    @property
    def health(self) -> Health:
        """Whether it takes work now; an engine that can't say is dead."""
        try:
            return self.engine.health()
        except Exception:
            logger.exception("engine %s could not say how it is", quote(self.name))
            return Health(HealthState.DEAD)

    @property
    def stats(self) -> SchedulerStats | None:
        """What its scheduler does, if furnace schedules it and it can say."""
        try:
            return self.engine.stats()
        except Exception:
            logger.exception("engine %s could not say what it does", quote(self.name))
            return None


class Engines:
    """Loads, starts, finds and closes engines."""

    def __init__(self) -> None:
        self._sources: list[tuple[EngineSource, str | None]] = []
        self._models: dict[str, Model] = {}
        self._started = False
        self.ready = False

    def add(self, source: EngineSource, name: str | None) -> None:
        """Serve a further engine.

        Raises:
            ValueError: the name is taken.
            EngineSpecError: the spec can't be read.
            TypeError: it is no engine.
            RuntimeError: the engines were started already.
        """
        if self._started:
            raise RuntimeError("engines can't be added to a server that has started")
        if not isinstance(source, LlmEngine | str) and not callable(source):
            raise TypeError(
                f"{type(source).__name__} is not an engine: pass an LlmEngine, a spec like 'torch:tiny-lm', "
                "or Scheduled(model, pipeline) for a step model"
            )
        name = name or _name_of(source)
        if name is not None and name in {known for _, known in self._sources}:
            raise _taken(name)
        self._sources.append((source, name))

    async def start(self) -> None:
        """Load and start all engines, one after the other. On failure those that started are closed.

        Raises:
            EngineStartError: one could not be loaded or started.
            ValueError: two have the same name.
            RuntimeError: they were started before; an engine lives once.
        """
        if self._started:
            raise RuntimeError("the engines of this server were started before; make a new Server")
        self._started = True
        try:
            for source, name in self._sources:
                await self._start(source, name)
        except BaseException:
            await self.aclose()
            raise
        self.ready = True

    async def _start(self, source: EngineSource, name: str | None) -> None:
        label = name or (source if isinstance(source, str) else "an engine")
        try:
            engine = await self._load(source)
        except Exception as error:
            raise EngineStartError(f"{label}: {error or type(error).__name__}") from error
        try:
            await engine.start()
            # An engine in a process of its own knows its name only now.
            name = name or engine.name
            if name in self._models:
                raise EngineStartError(f"two engines have the name {name!r}; give one another: NAME=SPEC")
        except BaseException as error:
            # What started half must be closed too.
            await _close(engine, label)
            if isinstance(error, EngineStartError) or not isinstance(error, Exception):
                raise
            raise EngineStartError(f"{label}: {error or type(error).__name__}") from error
        self._models[name] = Model(name, engine)

    async def _load(self, source: EngineSource) -> LlmEngine:
        if isinstance(source, LlmEngine):
            return source
        if isinstance(source, str):
            # Here, so that a server of engine objects needs none of it.
            from furnace.plugins import default_context
            from furnace.runtime.process import Launch, ProcessEngine

            return ProcessEngine(Launch.of(source, default_context(len(self._sources))))
        return await _in_thread(source)

    def drain(self) -> None:
        """Tell every engine that nothing new comes any more."""
        for model in self:
            try:
                model.engine.drain()
            except Exception:
                logger.exception("engine %s could not be told to drain", quote(model.name))

    async def aclose(self) -> None:
        """Close every engine, whatever the others do. Idempotent."""
        self.ready = False
        for model in self:
            if model.closed:
                continue
            model.closed = True
            await _close(model.engine, model.name)

    def __iter__(self) -> Iterator[Model]:
        return iter(list(self._models.values()))

    def __getitem__(self, name: str) -> Model:
        return self._models[name]

    def check_ready(self) -> None:
        """Refuse what asks for models before all of them are there.

        Raises:
            EngineUnavailableError: the engines are not up.
        """
        if not self.ready:
            raise EngineUnavailableError("The models are being loaded.", retry_after=5)

    def find(self, name: str) -> Model:
        """The model that a client asks for.

        Raises:
            ApiError: 404, there is no such model.
            EngineUnavailableError: the engines are not up.
        """
        self.check_ready()
        model = self._models.get(name)
        if model is None:
            raise ApiError(404, f"The model {quote(name, 200)} does not exist.", param="model", code="model_not_found")
        return model


def requested_model(scope: Scope) -> str:
    """The model id in the path of a route that ends in ``{model_id:path}``; it may hold slashes."""
    path: str = scope["path_params"]["model_id"]
    return path.removeprefix("/")


def _name_of(source: EngineSource) -> str | None:
    """The name of an engine as far as it is known before it is loaded and started."""
    if isinstance(source, str):
        # Here, so that a server of engine objects needs none of it.
        from furnace.plugins import EngineSpec

        return EngineSpec.parse(source).name
    if isinstance(source, LlmEngine):
        # An engine in a process of its own knows its name only once it has started.
        with contextlib.suppress(RuntimeError):
            return source.name
    return None


def _taken(name: str) -> ValueError:
    return ValueError(f"two engines are named {name!r}; give one another name")


async def _close(engine: LlmEngine, label: str) -> None:
    try:
        await engine.aclose()
    except Exception:
        logger.exception("closing engine %s failed", quote(label))


async def _in_thread(work: Callable[[], T]) -> T:
    """Run blocking work in a thread that does not keep the process alive, since nobody waits for a load given up."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type] # without an error there is a result
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            future.set_exception(error)
        else:  # an exit, an interrupt, or what a future can't carry
            future.set_exception(RuntimeError(f"{type(error).__name__} while loading: {error}"))

    def run() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            failure = error
        # The server may have been stopped while this was loading: then nobody waits for it.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="furnace-load", daemon=True).start()
    return await future
