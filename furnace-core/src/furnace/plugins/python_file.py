"""The scheme ``python``: an engine out of a file or module of your own, ``python:my_model.py:engine``.

In front of the last colon stands a file or a dotted module, behind it the name of an engine in it, or of a function
that makes one: without parameters, or with one, to which the ``EngineContext`` goes. It runs with all rights of this
process, like any Python program.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from furnace.contracts.engine import LlmEngine
from furnace.contracts.errors import quote
from furnace.contracts.factory import EngineContext, EngineFactory, NoOptions
from furnace.plugins.engine_loader import why_no_engine
from furnace.plugins.errors import EngineLoadError
from furnace.plugins.hookspecs import hookimpl

__all__ = ["PythonFileFactory", "furnace_engine"]


class PythonFileFactory(EngineFactory[NoOptions]):
    """Takes an engine out of a Python file or module."""

    api_version = 1
    options = NoOptions

    def create(self, model: str, options: NoOptions, context: EngineContext) -> LlmEngine:
        """Import ``FILE.py:NAME`` or ``package.module:NAME`` and get or make the engine."""
        where, colon, attribute = model.rpartition(":")
        if not colon or not where or not attribute:
            raise EngineLoadError(
                f"{quote(model)} does not say which engine: write python:my_model.py:NAME, "
                "where NAME is an engine in my_model.py or a function that makes one"
            )
        module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
        value: Any = module
        for part in attribute.split("."):
            try:
                value = getattr(value, part)
            except AttributeError:
                raise EngineLoadError(f"{where} has no {quote(attribute)}") from None
        if callable(value) and not isinstance(value, LlmEngine):
            value = _call(value, attribute, context)
        if not isinstance(value, LlmEngine):
            raise EngineLoadError(f"{quote(attribute)} in {where}: {why_no_engine(value)}")
        return value


def _import_file(path: Path) -> ModuleType:
    """Run a file as a module, with its folder importable, as ``python FILE`` has it."""
    if not path.is_file():
        raise EngineLoadError(f"there is no file {path}")
    path = path.resolve()
    _make_importable(str(path.parent))
    # A name that nothing else has: my json.py must not become everybody's json.
    name = f"_furnace_python_file_{path.stem}_{abs(hash(path)):x}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise EngineLoadError(f"{path} can't be imported as Python")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and Structs look their module up here while it runs.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_module(name: str) -> ModuleType:
    """Import a dotted module, with the working directory importable, as ``python -m`` has it."""
    _make_importable(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise EngineLoadError(f"there is no module {quote(name)}; a file's name ends with .py") from None
        raise


def _make_importable(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _call(make: Callable[..., Any], attribute: str, context: EngineContext) -> object:
    """Call what makes the engine, with the context if it has a parameter for it."""
    if inspect.iscoroutinefunction(make):
        raise EngineLoadError(f"{quote(attribute)} is async; make it a plain function, it runs in a thread of its own")
    required = [
        parameter
        for parameter in inspect.signature(make).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if not required:
        return make()
    if len(required) == 1 and required[0].kind is not inspect.Parameter.KEYWORD_ONLY:
        return make(context)
    names = ", ".join(parameter.name for parameter in required)
    raise EngineLoadError(
        f"{quote(attribute)} needs the arguments ({names}); furnace calls it with none, or with the EngineContext"
    )


@hookimpl
def furnace_engine() -> PythonFileFactory:
    """The factory of the scheme ``python``."""
    return PythonFileFactory()
