"""All that an operator decides about a server."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from furnace.config.errors import ConfigError
from furnace.contracts import EngineContext, Progress, no_progress
from furnace.contracts.errors import quote
from furnace.plugins.cores import usable_cores
from furnace.plugins.engine_loader import kv_memory
from furnace.plugins.engine_spec import EngineSpec
from furnace.plugins.options import parse_assignment
from furnace.scheduler.config import SchedulerConfig

__all__ = ["LOG_FORMATS", "LOG_LEVELS", "ServeConfig", "assign_options"]

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
# As it comes in a Host header; an underscore is in no name of the DNS, but in some of a local network.
_HOST_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")


_COUNTS = (
    "max_context",
    "kv_tokens",
    "max_queue",
    "max_queue_tokens",
    "max_running",
    "speculation",
    "threads",
    "max_concurrent_requests",
    "max_body",
)


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``furnace serve`` serves, and how. None leaves a value to furnace or to the engine.

    Attributes:
        engines: at least one; no name twice.
        host: address to listen on.
        port: 0 picks a free one.
        allowed_hosts: names that requests may be for on a loopback address.
        chat_template: text that replaces every model's own template.
        max_context: most tokens of prompt and output together.
        kv_tokens: size of each engine's KV cache in tokens.
        max_queue: most requests that wait for each engine; this and the next five, see ``SchedulerConfig``.
        max_queue_tokens: most prompt tokens that wait.
        queue_deadline: seconds that a request may wait.
        max_running: most sequences at once.
        prefix_cache: reuse common beginnings of prompts.
        speculation: most tokens to guess at once.
        threads: compute threads of each engine; default: the usable cores, shared out.
        max_concurrent_requests: most requests that are answered at once.
        drain_timeout: seconds that running requests may go on after a signal.
        max_body: largest request body in bytes.
        in_process: run the models in the HTTP process instead of one process each.
        step_timeout: seconds after which a model step is a hang.
        record: a file for what the scheduler does.
        record_tokens: put token ids in it too.
        plugins: load the plugins of the HTTP process.
        disabled_plugins: names of those that are not loaded.
        log_level: one of ``LOG_LEVELS``.
        log_format: one of ``LOG_FORMATS``.
    """

    engines: list[EngineSpec]
    host: str = "127.0.0.1"
    port: int = 8080
    allowed_hosts: tuple[str, ...] = ()
    chat_template: str | None = None
    max_context: int | None = None
    kv_tokens: int | None = None
    max_queue: int | None = None
    max_queue_tokens: int | None = None
    queue_deadline: float | None = None
    max_running: int | None = None
    prefix_cache: bool | None = None
    speculation: int | None = None
    threads: int | None = None
    max_concurrent_requests: int | None = None
    drain_timeout: float | None = None
    max_body: int | None = None
    in_process: bool = False
    step_timeout: float = 60.0
    record: str | None = None
    record_tokens: bool = False
    plugins: bool = True
    disabled_plugins: tuple[str, ...] = ()
    log_level: str = "info"
    log_format: str = "text"

    def __post_init__(self) -> None:
        if not self.engines:
            raise ConfigError("no engine to serve; name one: furnace serve --engine torch:tiny-lm")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port {self.port} is not between 0 and 65535")
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(f"{quote(self.log_level)} is no log level; there are {', '.join(LOG_LEVELS)}")
        if self.log_format not in LOG_FORMATS:
            raise ConfigError(f"{quote(self.log_format)} is no log format; there are {', '.join(LOG_FORMATS)}")
        for name in self.allowed_hosts:
            if not _HOST_NAME.fullmatch(name):
                raise ConfigError(
                    f"the host {quote(name)} must be a name alone: ASCII letters, digits, - and ., no scheme, no port"
                )
        for field in _COUNTS:
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ConfigError(f"{field} is {value}, but must be at least 1")
        names: set[str] = set()
        for spec in self.engines:
            if spec.name in names:
                raise ConfigError(f"two engines have the name {quote(spec.name)}; clients choose by name: change one")
            if spec.name is not None:
                names.add(spec.name)

    @property
    def scheduler(self) -> SchedulerConfig:
        """The bounds for engines that furnace schedules."""
        return SchedulerConfig(
            max_queue=self.max_queue,
            max_queue_tokens=self.max_queue_tokens,
            queue_deadline=self.queue_deadline,
            max_running=self.max_running,
            max_context=self.max_context,
            kv_tokens=self.kv_tokens,
            prefix_cache=self.prefix_cache,
            speculation=self.speculation,
        )

    def record_of(self, spec: EngineSpec) -> str | None:
        """Where the scheduler of one engine is recorded: with several, each has a file of its own."""
        if self.record is None or len(self.engines) == 1:
            return self.record
        return f"{self.record}.{self.engines.index(spec)}"

    def context(self, progress: Progress = no_progress) -> EngineContext:
        """What each engine is told."""
        threads = max(1, usable_cores() // len(self.engines)) if self.threads is None else self.threads
        return EngineContext(
            threads=threads,
            memory_bytes=kv_memory(len(self.engines)),
            max_context=self.max_context,
            kv_tokens=self.kv_tokens,
            chat_template=self.chat_template,
            progress=progress,
        )


def assign_options(specs: Sequence[EngineSpec], assignments: Sequence[str]) -> list[EngineSpec]:
    """Give ``[NAME.]KEY=VALUE`` assignments to the engines they are for.

    Without a name they are for all. ``NAME`` is an engine's name, or what stands behind its scheme when it has none.
    They win over the options in the spec, and those with a name over those without.

    Raises:
        EngineOptionError: an assignment has not that form.
        ConfigError: it is for no engine, or one is given twice.
    """
    general: dict[str, str] = {}
    special: list[dict[str, str]] = [{} for _ in specs]
    labels = [spec.name or spec.model for spec in specs]
    for text in assignments:
        name, key, value = parse_assignment(text)
        targets = [general] if name is None else [special[i] for i, label in enumerate(labels) if label == name]
        if not targets:
            raise ConfigError(f"-o {quote(text)} is for no engine: the engines are {', '.join(map(quote, labels))}")
        for target in targets:
            if key in target:
                raise ConfigError(f"-o {quote(text)}: this option is given twice; write it once")
            target[key] = value
    return [spec.with_options({**general, **own}) for spec, own in zip(specs, special, strict=True)]
