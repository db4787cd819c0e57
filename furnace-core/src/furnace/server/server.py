"""The server: engines behind the OpenAI API."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, Self

from litestar.types import ASGIApp

from furnace.contracts import LlmEngine
from furnace.server.answer import Services
from furnace.server.app import build_app
from furnace.server.bounds import Bounds
from furnace.server.engines import Engines, EngineSource
from furnace.server.errors import ServerError
from furnace.server.extensions import Extensions
from furnace.server.gate import Gate
from furnace.server.hosts import loopback_hosts
from furnace.server.listener import Listener, bind
from furnace.server.traffic import Traffic
from furnace.telemetry import LlmMetrics
from furnace.telemetry.setup import Telemetry

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

__all__ = ["Server"]

LoopName = Literal["asyncio", "uvloop"]


class Server:
    """Serves engines over HTTP with OpenAI's API.

    Three ways to use it, each once for a server, since an engine lives once::

        Server(port=8080).llm(engine).serve()  # blocks until Ctrl-C

        with Server(port=0).llm(engine).background() as server:  # in a thread: tests, notebooks
            print(server.url)

        server = Server().llm(engine)  # inside another application
        async with server.running():  # in its lifespan
            ...  # mount server.app

    Args:
        host: the address to listen on.
        port: the port; 0 picks a free one.
        bounds: limits of requests and connections.
        loop: the event loop of ``serve`` and ``background``. uvloop holds the interpreter lock while it writes to
            sockets, which slows a model in this process by a third to three times; it is for engines that compute
            elsewhere.
        allowed_hosts: on a loopback address, names that requests may be for (``Host``) besides localhost and
            addresses: those under which a proxy passes them on. A web page that has its name resolve to this machine
            is refused by it. On other addresses every name is answered.
        tracer_provider: gets one OpenTelemetry span a request; without it none is made. Whoever made it shuts it down.
        plugins: observers, routes and metrics: modules or objects with hooks, or what ``furnace.plugins.load_plugins``
            gives for those that are installed.

    Raises:
        BrokenPluginError: a plugin does not fit; the message names it.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 8080,
        *,
        bounds: Bounds | None = None,
        loop: LoopName = "asyncio",
        allowed_hosts: Iterable[str] = (),
        tracer_provider: TracerProvider | None = None,
        plugins: Iterable[object] = (),
    ) -> None:
        self.host = host
        self.port = port
        self._bounds = bounds or Bounds()
        self._loop_name = loop
        self._allowed_hosts = (host, *allowed_hosts)
        self._engines = Engines()
        self._traffic = Traffic(self._engines.drain, self._bounds.max_requests)
        self._url: str | None = None
        extensions = Extensions(plugins, self, self._bounds)
        telemetry = Telemetry(tracer_provider, extensions.families)
        services = Services(self._engines, self._traffic, self._bounds, telemetry, extensions.observers)
        self._app = Gate(build_app(services, extensions.routers), self._bounds, self._lifespan)

    def llm(self, engine: EngineSource, *, name: str | None = None) -> Self:
        """Serve an engine.

        Args:
            engine: an engine; the spec of one (``torch:tiny-lm``), which runs in a process of its own; or a function
                that makes one in this process, called in a worker thread when the server starts.
            name: what clients put in ``model``; by default what the spec says (``fast=torch:tiny-lm``), or else the
                engine's own name.

        Raises:
            ValueError: two engines have this name.
            EngineSpecError: the spec can't be read.
            TypeError: it is no engine.
            RuntimeError: the server has started.
        """
        self._engines.add(engine, name)
        return self

    @property
    def app(self) -> ASGIApp:
        """The ASGI application.

        Another ASGI server can run it, lifespan included. Mounted in another application, whose server does not send
        lifespan events to it, it needs ``running()`` around it.
        """
        return self._app

    @property
    def url(self) -> str:
        """Where the server listens.

        Raises:
            ServerError: it does not listen.
        """
        if self._url is None:
            raise ServerError("the server is not listening")
        return self._url

    @property
    def models(self) -> list[str]:
        """Names of the models that are loaded."""
        return [model.name for model in self._engines]

    def engine(self, model: str) -> LlmEngine:
        """The engine of a model.

        Raises:
            KeyError: there is no such model.
        """
        return self._engines[model].engine

    def metrics(self, model: str) -> LlmMetrics:
        """A snapshot of what a model did so far.

        Raises:
            KeyError: there is no such model.
        """
        return self._engines[model].metrics.snapshot()

    def serve(self, on_ready: Callable[[str], None] | None = None) -> None:
        """Listen and block until SIGINT or SIGTERM; running streams get a few seconds, then an error event.

        Args:
            on_ready: called with the URL when requests are taken.

        Raises:
            AddressError: the port is in use or can't be had; raised before any model is loaded.
            EngineStartError: a model could not be loaded or started.
            ServerError: called under a running event loop.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise ServerError(
                "serve() blocks, and an event loop is running in this thread. Use `with server.background()` to serve "
                "from a thread of its own, or `async with server.running()` and mount `server.app`."
            )
        listener = Listener(self._app, self._traffic, self._bounds)
        self._run(listener, on_ready)

    @contextlib.contextmanager
    def background(self) -> Iterator[Self]:
        """Serve from a thread of its own; the block runs when requests are taken.

        Raises:
            AddressError: the port is in use or can't be had.
            EngineStartError: a model could not be loaded or started.
        """
        listener = Listener(self._app, self._traffic, self._bounds)
        settled = threading.Event()
        failure: list[BaseException] = []

        def run() -> None:
            try:
                self._run(listener, lambda url: settled.set())
            except BaseException as error:
                failure.append(error)
            finally:
                settled.set()

        thread = threading.Thread(target=run, name="furnace-server")
        thread.start()
        try:
            settled.wait()
            if failure:
                raise failure.pop()
            yield self
        finally:
            listener.stop()
            thread.join()
        if failure:
            raise failure.pop()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Start the engines for a host application that mounts ``app``; close them at the end.

        Raises:
            EngineStartError: a model could not be loaded or started.
        """
        await self._engines.start()
        try:
            yield self
        finally:
            await self._traffic.drain(self._bounds.drain_seconds)
            await self._engines.aclose()

    @contextlib.asynccontextmanager
    async def _lifespan(self) -> AsyncIterator[None]:
        if self._engines.ready:  # the host application started them
            yield
            return
        async with self.running():
            yield

    def _run(self, listener: Listener, on_ready: Callable[[str], None] | None) -> None:
        # Bound before anything is loaded.
        listening = bind(self.host, self.port, self._bounds.send_buffer)
        host, port = listening.getsockname()[:2]
        listener.answer_to(loopback_hosts(host, self._allowed_hosts))
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        with listening, asyncio.Runner(loop_factory=self._loop_factory()) as runner:
            runner.run(self._listen(listener, listening, url, on_ready))

    def _loop_factory(self) -> Callable[[], asyncio.AbstractEventLoop] | None:
        if self._loop_name == "asyncio":
            return None
        import uvloop

        return uvloop.new_event_loop

    async def _listen(
        self, listener: Listener, listening: socket.socket, url: str, on_ready: Callable[[str], None] | None
    ) -> None:
        """Answer probes while the engines load, then requests."""
        accepting = asyncio.Event()
        tasks: list[asyncio.Task[Any]] = []

        async def until(work: Coroutine[Any, Any, Any]) -> bool:
            """Whether the work was done before the listening ended."""
            tasks.append(task := asyncio.create_task(work))
            await asyncio.wait({serving, task}, return_when=asyncio.FIRST_COMPLETED)
            return task.done() and not serving.done()

        serving = asyncio.create_task(listener.listen(listening, accepting.set))
        try:
            if await until(accepting.wait()) and await until(self._engines.start()):
                await tasks[-1]
                self._url = url
                if on_ready is not None:
                    on_ready(url)
                await serving
        finally:
            self._url = None
            listener.stop()
            for task in tasks:
                task.cancel()
            await asyncio.wait({serving, *tasks})
            await self._engines.aclose()
        await serving
