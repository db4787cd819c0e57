"""``furnace serve``: models on the OpenAI API, until Ctrl-C."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from furnace.cli.progress import LoadProgress
from furnace.cli.spec_completion import complete_scheme
from furnace.cli.state import CliState, debug_option
from furnace.config import LOG_FORMATS, LOG_LEVELS, ConfigError, ServeConfig, assign_options
from furnace.contracts import LlmEngine, Progress
from furnace.contracts.errors import quote
from furnace.plugins import EngineSpec, load_engine, load_plugins
from furnace.plugins.registry import find_engine
from furnace.telemetry.logs import LogStream, set_up_logging
from furnace.telemetry.otlp import tracer_provider_from_environment

__all__ = ["command", "serve"]

logger = logging.getLogger(__name__)

_POSITIVE = click.IntRange(min=1)
_MANY_DESCRIPTORS = 65_536


@click.command("serve")
@click.option(
    "-e",
    "--engine",
    "engines",
    multiple=True,
    envvar="FURNACE_SERVE_ENGINE",
    metavar="[NAME=]SPEC",
    shell_complete=complete_scheme,
    help="A model, such as torch:tiny-lm. Repeatable.",
)
@click.option(
    "-o",
    "--option",
    "assignments",
    multiple=True,
    envvar="FURNACE_SERVE_OPTION",
    metavar="[NAME.]KEY=VALUE",
    help="An option of the engines, or of the one named. Repeatable.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="Port to listen on; 0 picks one."
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    envvar="FURNACE_SERVE_ALLOWED_HOST",
    metavar="NAME",
    help="A name besides localhost that requests may be for, if --host is a loopback address. Repeatable.",
)
@click.option(
    "--chat-template",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Jinja template in place of the models' own.",
)
@click.option("--max-context", type=_POSITIVE, metavar="TOKENS", help="Most tokens of prompt and output together.")
@click.option("--kv-tokens", type=_POSITIVE, metavar="TOKENS", help="Size of each model's KV cache.")
@click.option("--max-queue", type=_POSITIVE, metavar="REQUESTS", help="Most requests that wait for each model.")
@click.option(
    "--max-queue-tokens", type=_POSITIVE, metavar="TOKENS", help="Most prompt tokens that wait for each model."
)
@click.option(
    "--queue-deadline",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="How long a request may wait for its first step.",
)
@click.option("--max-running", type=_POSITIVE, metavar="SEQUENCES", help="Most sequences in each model at once.")
@click.option(
    "--prefix-cache/--no-prefix-cache", default=None, help="Compute common beginnings of prompts once.  [default: on]"
)
@click.option(
    "--speculation",
    type=_POSITIVE,
    metavar="TOKENS",
    help="Guess up to so many tokens from what was said before.  [default: off]",
)
@click.option(
    "--max-concurrent-requests",
    type=_POSITIVE,
    metavar="REQUESTS",
    help="Most requests that are answered at once, over all models.",
)
@click.option(
    "--drain-timeout",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="How long running requests may go on after SIGTERM or Ctrl-C.",
)
@click.option("--threads", type=_POSITIVE, help="Compute threads of each model.  [default: cores / models]")
@click.option("--max-body", type=_POSITIVE, metavar="BYTES", help="Largest request body.")
@click.option(
    "--in-process", is_flag=True, help="Run the models in the HTTP process instead of one process each; for debugging."
)
@click.option(
    "--step-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="A model step that takes longer is a hang: its process is started again.",
)
@click.option(
    "--record",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Write what the scheduler does, without any text; `furnace replay` runs it again.",
)
@click.option("--record-tokens", is_flag=True, help="Put the token ids of prompts and outputs in the record too.")
@click.option(
    "--plugins/--no-plugins",
    default=True,
    show_default=True,
    help="Load what is installed besides engines: observers, routes, metrics.",
)
@click.option(
    "--disable-plugin",
    "disabled_plugins",
    multiple=True,
    envvar="FURNACE_SERVE_DISABLE_PLUGIN",
    metavar="NAME",
    help="An installed plugin that is not loaded. Repeatable.",
)
@click.option(
    "--log-level",
    type=click.Choice(LOG_LEVELS),
    default=lambda: "debug" if click.get_current_context().ensure_object(CliState).debug else "info",
    show_default="info; debug with --debug",
    help="What to log.",
)
@click.option(
    "--log-format", type=click.Choice(LOG_FORMATS), default="text", show_default=True, help="json: one object a line."
)
@click.argument("without_option", nargs=-1, metavar="", type=click.UNPROCESSED)
@debug_option
def command(
    engines: tuple[str, ...],
    assignments: tuple[str, ...],
    chat_template: Path | None,
    without_option: tuple[str, ...],
    **settings: Any,
) -> None:
    """Serve models on the OpenAI API.

    A SPEC is SCHEME:MODEL[?KEY=VALUE&KEY=VALUE]; `furnace engines` lists the schemes. NAME is what clients call the
    model. Quote a spec that has options:

    \b
        furnace serve --engine "torch:tiny-lm?dtype=float32"
    """
    if without_option:
        raise click.UsageError(f"a model is given with --engine: furnace serve --engine {quote(without_option[0])}")
    specs = assign_options([EngineSpec.parse(text) for text in engines], assignments)
    template = None if chat_template is None else _read_template(chat_template)
    record: Path | None = settings.pop("record")
    path = None if record is None else str(record)
    serve(ServeConfig(engines=specs, chat_template=template, record=path, **settings))


def serve(config: ServeConfig) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        PluginError: nobody brings a scheme, or several do; or a plugin of the HTTP process does not fit.
        ServerError: the address can't be had, or an engine can't be loaded or started; the cause says why.
    """
    for spec in config.engines:
        find_engine(spec.scheme)  # a mistake is told at once, and not after the web framework is imported
    from furnace.server import Bounds, Server
    from furnace.server.hosts import is_loopback

    set_up_logging(config.log_level, config.log_format)
    _allow_connections()
    set_bounds = {
        "max_body": config.max_body,
        "max_requests": config.max_concurrent_requests,
        "drain_seconds": config.drain_timeout,
    }
    bounds = msgspec.convert({name: value for name, value in set_bounds.items() if value is not None}, Bounds)
    ready = False

    def on_ready(url: str) -> None:
        nonlocal ready
        ready = True
        progress.close()
        # What is there now stays: a full collection, for which every stream waits, takes half the time without it.
        gc.collect()
        gc.freeze()
        if not is_loopback(config.host):
            logger.warning("anybody who can reach %s can use the models: there are no keys", url)
        click.echo(f"furnace: serving {', '.join(server.models)} on {url}")

    stream = LogStream(logger) if config.log_format == "json" else None
    with tracer_provider_from_environment() as traces, LoadProgress(stream) as progress:
        # With the models elsewhere, uvloop's writes hold up nobody.
        server = Server(
            config.host,
            config.port,
            bounds=bounds,
            loop="asyncio" if config.in_process else "uvloop",
            allowed_hosts=config.allowed_hosts,
            tracer_provider=traces,
            plugins=load_plugins(config.disabled_plugins) if config.plugins else (),
        )
        for spec in config.engines:
            report = partial(_report, progress, spec.name or spec.model)
            make = _load if config.in_process else _process
            server.llm(partial(make, spec, config, report), name=spec.name)
        server.serve(on_ready)
    if not ready:
        # Interrupted while a model loads, in a thread that nobody can stop. Leaving the interpreter to its end would
        # tear that thread out of the middle of native code, which may abort the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _allow_connections() -> None:
    """Use all the descriptors that the system grants: 1,024, the usual start, are taken by as many idle clients."""
    if sys.platform == "win32":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems say no to what they call the limit, above all when they call it unlimited.
    for most in (hard, _MANY_DESCRIPTORS):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            return


def _report(progress: LoadProgress, label: str, stage: str, done: int, total: int) -> None:
    progress(f"{label}: {stage}", done, total)


def _load(spec: EngineSpec, config: ServeConfig, report: Progress) -> LlmEngine:
    from furnace.runtime import Scheduled

    engine = load_engine(spec, context=config.context(report), scheduler=config.scheduler)
    if isinstance(engine, Scheduled):
        engine.step_seconds = config.step_timeout
    path = config.record_of(spec)
    if path is not None:
        from furnace.runtime.recorder import record_engine

        record_engine(engine, path, tokens=config.record_tokens)
    return engine


def _process(spec: EngineSpec, config: ServeConfig, report: Progress) -> LlmEngine:
    from furnace.runtime.process import Launch, ProcessEngine

    launch = Launch.of(
        spec,
        config.context(),
        scheduler=config.scheduler,
        log_level=config.log_level,
        log_format=config.log_format,
        record=config.record_of(spec),
        record_tokens=config.record_tokens,
    )
    return ProcessEngine(launch, progress=report, step_seconds=config.step_timeout)


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"the chat template {path} is not UTF-8 text") from None
