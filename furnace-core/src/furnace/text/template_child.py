"""The worker process that renders a model's chat templates; ``WorkerRenderer`` starts it.

It answers one rendering after the other and ends at end of file: when the engine closes it or is gone, however it
went. While a template runs an alarm is set that ends the process, so a template that never returns outlives neither its
time nor, by more than that, the engine.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

import msgspec

from furnace.text.template_frames import (
    HEADER_BYTES,
    Load,
    Loaded,
    Refused,
    Render,
    Rendered,
    Reply,
    Request,
    Started,
    body_size,
    frame,
    packed_text,
    unpacked_json,
)
from furnace.text.template_sandbox import (
    OUT_OF_MEMORY,
    SandboxedTemplates,
    TemplateRefusedError,
    TemplateSourceError,
)

__all__ = ["main"]


def main() -> None:
    """Serve standard input and output until end of file."""
    _ignore_signals()
    requests, replies = _take_pipes()
    _send(replies, Started())
    decoder = msgspec.msgpack.Decoder(Request)
    load = _receive(requests, decoder)
    if not isinstance(load, Load):
        return
    _limit_memory(load.memory_bytes)
    with _alarm(load.seconds):
        templates = _compiled(load)
    _send(replies, Loaded())
    while isinstance(request := _receive(requests, decoder), Render):
        with _alarm(load.seconds):
            reply = _answer(templates, request)
        _send(replies, reply)


def _compiled(load: Load) -> SandboxedTemplates | Refused:
    """The templates, or what to say to every request."""
    sources = {name: str(source) for name, source in unpacked_json(load.sources).items()}
    try:
        return SandboxedTemplates(sources, max_chars=load.max_chars)
    except TemplateSourceError as error:
        return Refused(packed_text(str(error)))


def _answer(templates: SandboxedTemplates | Refused, request: Render) -> bytes:
    """The frame that answers a request."""
    if isinstance(templates, Refused):
        return frame(templates)
    try:
        return frame(Rendered(packed_text(templates.render(unpacked_json(request.variables)))))
    except TemplateRefusedError as error:
        return frame(Refused(packed_text(error.message), spent=error.out_of_memory))
    except MemoryError:
        return frame(Refused(packed_text(OUT_OF_MEMORY), spent=True))


def _ignore_signals() -> None:
    """Leave to the engine when to end: terminals and service managers signal the whole group."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if sys.platform != "win32":
        # What the engine ignores or blocks is inherited, and the alarm must work.
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes to the engine. The standard streams lead nowhere from now on: nothing can write in between frames."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    os.close(nowhere)
    return requests, replies


def _limit_memory(size: int) -> None:
    """Where the system can: on Linux. macOS and Windows have no such limit; there the time limit alone bounds it."""
    if sys.platform != "win32":
        import resource

        for kind, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, size)):
            _, hard = resource.getrlimit(kind)
            with suppress(OSError, ValueError):
                resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """End the process if the block takes longer, also inside of a call into C that holds the GIL."""
    if sys.platform != "win32":
        # Of processor time: that a busy machine lets it wait is not the template's fault. No handler: the signal's
        # default ends the process.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    else:
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def _receive(requests: BinaryIO, decoder: msgspec.msgpack.Decoder[Request]) -> Request | None:
    """The next request, or None when there will be none."""
    header = requests.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    size = body_size(header)
    body = requests.read(size)
    return decoder.decode(body) if len(body) == size else None


def _send(replies: BinaryIO, reply: Reply | bytes) -> None:
    view = memoryview(reply if isinstance(reply, bytes) else frame(reply))
    while view:
        view = view[replies.write(view) :]
