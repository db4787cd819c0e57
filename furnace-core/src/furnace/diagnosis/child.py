"""The process that imports a plugin: ``python -m furnace.diagnosis.child PARENT FD TASK``.

Started by ``probe``, never by hand. Whatever the plugin does to this process, the one that asked goes on. It writes
what it knows to FD, a JSON object a line, at the beginning of each stage and at the end.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import time
from collections.abc import Sequence

import msgspec

from furnace.diagnosis.report import Checked, Loaded
from furnace.diagnosis.task import Task
from furnace.plugins.errors import PluginError, describe
from furnace.plugins.hookspecs import ENGINE_GROUP
from furnace.plugins.parent_process import die_with

__all__ = ["main"]


class _Teller:
    """Tells the parent how far it came."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.checked = Checked()

    def begin(self, stage: str) -> None:
        self.checked.stage = stage
        line = msgspec.json.encode(self.checked) + b"\n"
        while line:
            line = line[os.write(self._fd, line) :]


def main(arguments: Sequence[str]) -> None:
    """Check, and tell; a crash or a hang is told by the parent."""
    die_with(int(arguments[0]))
    fd = int(arguments[1])
    # What the plugin starts must not keep the parent waiting.
    os.set_inheritable(fd, False)
    _no_core_dump()
    faulthandler.enable()
    task = msgspec.json.decode(arguments[2].encode("utf-8", "surrogateescape"), type=Task)
    teller = _Teller(fd)
    try:
        if task.group == ENGINE_GROUP:
            _check_engine(task, teller)
        else:
            _check_plugin(task, teller)
    except PluginError as error:
        teller.checked.problem = str(error)
    except BaseException as error:  # of a plugin: also SystemExit, and a panic of a Rust extension
        teller.checked.problem = describe(error)
    # With a problem it stays at the stage of it.
    teller.begin("done" if teller.checked.problem is None else teller.checked.stage)
    # Its threads and its exit handlers are nobody's concern any more.
    sys.stdout.flush()
    os._exit(0)


def _no_core_dump() -> None:
    import resource

    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _check_engine(task: Task, teller: _Teller) -> None:
    from furnace.plugins.engine_spec import EngineSpec
    from furnace.plugins.options import build_options, describe_options
    from furnace.plugins.registry import find_engine, import_factory

    checked = teller.checked
    # What it takes to look through all that is installed is not the plugin's.
    engine = find_engine(task.name)
    teller.begin("import")
    _note_import(checked)
    begun = time.monotonic()
    factory = import_factory(engine)
    checked.seconds = time.monotonic() - begun
    _note_import(checked)
    checked.api_version = factory.api_version
    checked.options = describe_options(factory.options)
    if task.spec is not None:
        teller.begin("options")
        spec = EngineSpec.parse(task.spec)
        build_options(factory.options, spec.options, where=f"{spec.scheme}:{spec.model}")
    if task.frameworks:
        teller.begin("devices")
        _find_devices(task.frameworks, checked)
    if task.load and task.spec is not None:
        teller.begin("load")
        checked.loaded = _load(task.spec)


def _note_import(checked: Checked) -> None:
    from furnace.diagnosis.frameworks import FRAMEWORKS

    checked.frameworks = [name for name in FRAMEWORKS if name in sys.modules]


def _check_plugin(task: Task, teller: _Teller) -> None:
    from furnace.plugins.installed import installed_plugins
    from furnace.plugins.server_plugin import load_plugins

    others = [plugin.name for plugin in installed_plugins() if plugin.name != task.name]
    teller.begin("import")
    begun = time.monotonic()
    load_plugins(others)
    teller.checked.seconds = time.monotonic() - begun


def _find_devices(frameworks: Sequence[str], checked: Checked) -> None:
    from furnace.diagnosis.frameworks import DEVICES

    for name in frameworks:
        devices, threads = DEVICES[name]()
        checked.devices += devices
        checked.threads = threads or checked.threads


def _load(text: str) -> Loaded:
    import asyncio
    import resource

    from furnace.plugins import load_engine

    begun = time.monotonic()
    engine = load_engine(text)

    async def start_and_end() -> float:
        try:
            await engine.start()
            return time.monotonic() - begun
        finally:
            await engine.aclose()

    seconds = asyncio.run(start_and_end())
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Loaded(engine.name, engine.max_context, seconds, most if sys.platform == "darwin" else most * 1024)


if __name__ == "__main__":
    main(sys.argv[1:])
