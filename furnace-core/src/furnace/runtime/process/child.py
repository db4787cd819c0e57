"""The engine process: ``python -m furnace.runtime.process.child SOCKET HEARTBEAT PARENT``.

Started by ``EngineProcess``, never by hand. It loads one engine and serves it over a socket. It ends when that is
closed, and so with its parent, whatever happened to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import msgspec

from furnace.contracts import (
    EngineContext,
    EngineError,
    EngineFailedError,
    Event,
    Failed,
    Finished,
    Generation,
    Health,
    HealthState,
    LlmEngine,
    TextService,
    UnsupportedError,
)
from furnace.plugins import load_engine
from furnace.plugins.errors import describe
from furnace.plugins.parent_process import die_with
from furnace.runtime.heartbeat import SharedHeartbeat
from furnace.runtime.process import frames
from furnace.runtime.process.heap import trim_heap
from furnace.runtime.recorder import record_engine
from furnace.runtime.scheduled import Scheduled
from furnace.telemetry.logs import set_up_logging

__all__ = ["main"]

logger = logging.getLogger("furnace.process")

STATUS_SECONDS = 0.25


class EngineServer(asyncio.Protocol):
    """Serves one engine over one connection."""

    def __init__(self, heartbeat: SharedHeartbeat) -> None:
        self._heartbeat = heartbeat
        self._decoder = msgspec.msgpack.Decoder(frames.ToEngine)
        self._reader = frames.FrameReader()
        self._transport: asyncio.WriteTransport
        self._loop = asyncio.get_running_loop()
        self._launch: asyncio.Future[frames.Launch] = self._loop.create_future()
        self._stop = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._engine: LlmEngine
        self._generations: dict[int, Generation] = {}
        # Being admitted, and whether they were aborted meanwhile.
        self._admitting: dict[int, bool] = {}
        self._out: list[tuple[int, list[Event]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        # Nobody is left to serve. Threads may be inside the model: no orderly end is possible or needed.
        os._exit(1)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        for body in self._reader.feed(data):
            self._handle(self._decoder.decode(body))

    async def run(self) -> None:
        """Load, serve, and end."""
        launch = await self._launch
        set_up_logging(launch.log_level, launch.log_format)
        try:
            await self._load(launch)
        except Exception as error:
            logger.debug("loading failed", exc_info=True)
            self._send(frames.LoadFailed(str(error) or describe(error)))
            await self._drained()
            return
        status = asyncio.create_task(self._report())
        await self._stop.wait()
        await self._engine.aclose()
        status.cancel()
        # Last events of generations that the engine just ended.
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._flush()
        await self._drained()

    async def _load(self, launch: frames.Launch) -> None:
        context = EngineContext(
            threads=launch.threads,
            memory_bytes=launch.memory_bytes,
            max_context=launch.max_context,
            kv_tokens=launch.kv_tokens,
            chat_template=launch.chat_template,
            progress=self._progress,
            **({} if launch.cache_dir is None else {"cache_dir": Path(launch.cache_dir)}),
        )
        engine = await asyncio.to_thread(load_engine, launch.spec, context=context, scheduler=launch.scheduler)
        trim_heap()
        if launch.record is not None:
            record_engine(engine, launch.record, tokens=launch.record_tokens)
        watched = getattr(engine, "show_heartbeat", None)
        if watched is not None:
            watched(self._heartbeat)
        await engine.start()
        self._engine = engine
        bound = engine.max_queue if isinstance(engine, Scheduled) else None
        self._send(frames.Ready(engine.name, engine.max_context, engine.capabilities, bound))

    def _progress(self, stage: str, done: int, total: int) -> None:
        self._loop.call_soon_threadsafe(self._send, frames.Loading(stage, done, total))

    def _handle(self, message: frames.ToEngine) -> None:
        match message:
            case frames.Launch():
                self._launch.set_result(message)
            case frames.Generate():
                self._admitting.update(dict.fromkeys(message.ids, False))
                self._spawn(self._generate(message))
            case frames.Abort(id):
                if id in self._admitting:
                    self._admitting[id] = True
                elif (generation := self._generations.pop(id, None)) is not None:
                    self._spawn(generation.aclose())
            case frames.Tokenize(call, input):
                self._spawn(self._text(call, lambda engine: self._tokenize(engine, call, input)))
            case frames.Detokenize(call, tokens):
                self._spawn(self._text(call, lambda engine: self._detokenize(engine, call, tokens)))
            case frames.Shutdown():
                self._stop.set()

    async def _generate(self, message: frames.Generate) -> None:
        generations: list[Generation] = []
        try:
            if isinstance(self._engine, Scheduled):
                generations = await self._engine.generate_many(message.requests, keys=message.ids)
            elif len(message.requests) == 1:
                generations = [await self._engine.generate(message.requests[0])]
            else:
                generations = await self._engine.generate_many(message.requests)
        except EngineError as error:
            self._send(frames.Refused(message.call, error.info))
        except Exception:
            logger.exception("an engine failed to admit a request")
            self._send(frames.Refused(message.call, EngineFailedError("The engine failed on this request.").info))
        else:
            usages = [generation.usage for generation in generations]
            self._send(frames.Admitted(message.call, [usage.prompt_tokens for usage in usages]))
        aborted = [self._admitting.pop(id) for id in message.ids]
        # All at once: an abort must find each of them either here or there.
        for id, generation, unwanted in zip(message.ids, generations, aborted, strict=False):
            if unwanted:
                self._spawn(generation.aclose())
            else:
                self._generations[id] = generation
                self._spawn(self._pump(id, generation))

    async def _pump(self, id: int, generation: Generation) -> None:
        """Pass a generation's events on; those of one step meet in one frame."""
        last = False
        while not last:
            try:
                events = await generation.batch()
            except Exception:
                logger.exception("an engine's generation broke")
                events = [Failed(EngineFailedError("The engine failed on this request.").info, generation.usage)]
            if not events:
                if id not in self._generations:
                    break
                logger.error("an engine's generation ended without its last event")
                events = [Failed(EngineFailedError("The engine failed on this request.").info, generation.usage)]
            last = isinstance(events[-1], Finished | Failed)
            if not self._out:
                # Every pump that the same step woke runs before this.
                self._loop.call_soon(self._flush)
            self._out.append((id, events))
            await self._writable.wait()
        self._generations.pop(id, None)

    def _flush(self) -> None:
        if self._out:
            out, self._out = self._out, []
            self._send(frames.Events(out))

    async def _text(self, call: int, work: Callable[[TextService], Coroutine[Any, Any, frames.Tokenized]]) -> None:
        try:
            if not isinstance(self._engine, TextService):
                raise UnsupportedError(f"The model {self._engine.name} does not tokenize.")
            self._send(await work(self._engine))
        except EngineError as error:
            self._send(frames.Refused(call, error.info))
        except Exception:
            logger.exception("an engine failed to tokenize")
            self._send(frames.Refused(call, EngineFailedError("The engine failed on this request.").info))

    async def _tokenize(self, engine: TextService, call: int, input: Any) -> frames.Tokenized:
        return frames.Tokenized(call, tokens=await engine.tokenize(input))

    async def _detokenize(self, engine: TextService, call: int, tokens: list[int]) -> frames.Tokenized:
        return frames.Tokenized(call, text=await engine.detokenize(tokens))

    async def _report(self) -> None:
        """Send health and stats when they changed."""
        said: frames.Status | None = None
        while True:
            try:
                status = frames.Status(self._engine.health(), self._engine.stats())
            except Exception:
                logger.exception("an engine could not say how it is")
                status = frames.Status(Health(HealthState.DEAD, "the engine can't say how it is"))
            if status != said:
                self._send(status)
                said = status
            await asyncio.sleep(STATUS_SECONDS)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _send(self, message: frames.FromEngine) -> None:
        self._transport.write(frames.encode_frame(message))

    async def _drained(self) -> None:
        """Wait until all that was written is with the kernel."""
        self._transport.set_write_buffer_limits(high=0)
        await asyncio.sleep(0)
        await self._writable.wait()


def main(arguments: list[str]) -> None:
    """The body of the process."""
    fd, beat, parent = map(int, arguments)
    die_with(parent)  # where that can't be had, the end of file does it
    # A terminal and systemd signal the whole group; the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(socket.socket(fileno=fd), SharedHeartbeat(beat)))
    sys.stderr.flush()
    # A thread may hang inside the model; the interpreter's own end would wait for it.
    os._exit(0)


async def _serve(connection: socket.socket, heartbeat: SharedHeartbeat) -> None:
    loop = asyncio.get_running_loop()
    _, server = await loop.connect_accepted_socket(lambda: EngineServer(heartbeat), connection)
    await server.run()


if __name__ == "__main__":
    main(sys.argv[1:])
