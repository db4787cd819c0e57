"""Which engines are installed, and the factory of the one that is asked for.

Listing reads metadata only. Loading imports one plugin, through a PluginManager of its own, so that a broken plugin
is loud only for who asked for it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec
import pluggy

from furnace.contracts.errors import quote
from furnace.contracts.factory import API_VERSION, OLDEST_API_VERSION, EngineFactory
from furnace.plugins import hookspecs
from furnace.plugins.api_version import version_problem
from furnace.plugins.errors import BrokenPluginError, DuplicateSchemeError, UnknownSchemeError, describe
from furnace.plugins.installed import InstalledPlugin, installed

__all__ = ["InstalledEngine", "find_engine", "import_factory", "installed_engines", "load_factory"]

FIRST_PARTY = {
    "candle": "furnace-candle-bridge",
    "mock": "furnace-mock",
    "openvino": "furnace-openvino",
    "python": "furnace-core",
    "torch": "furnace-torch",
}
"""The distribution of each scheme of this project."""


class InstalledEngine(InstalledPlugin):
    """What the metadata says of an engine; nothing was imported."""

    @property
    def scheme(self) -> str:
        """The name of the entry point."""
        return self.name


def installed_engines() -> list[InstalledEngine]:
    """All engines of all installed distributions, by scheme; a scheme that several bring is there several times."""
    return installed(hookspecs.ENGINE_GROUP, InstalledEngine)


def find_engine(scheme: str) -> InstalledEngine:
    """The one engine with this scheme; nothing is imported.

    Raises:
        UnknownSchemeError: nobody brings it; the message has the pip line.
        DuplicateSchemeError: several distributions bring it; the message names them.
    """
    engines = installed_engines()
    matching = [engine for engine in engines if engine.scheme == scheme]
    if not matching:
        raise UnknownSchemeError(_unknown_scheme(scheme, sorted({engine.scheme for engine in engines})))
    if len(matching) > 1:
        raise DuplicateSchemeError(
            f"scheme {quote(scheme)} is brought by {_enumerate(matching)}; "
            f"keep one of them: pip uninstall {matching[-1].distribution}"
        )
    return matching[0]


def _enumerate(engines: Sequence[InstalledEngine]) -> str:
    return " and by ".join(f"{engine.label} ({engine.target})" for engine in engines)


def _unknown_scheme(scheme: str, installed: Sequence[str]) -> str:
    text = f"no installed engine has the scheme {quote(scheme)} (installed: {', '.join(installed) or 'none'})"
    if scheme in FIRST_PARTY:
        return f"{text}; install it: pip install {FIRST_PARTY[scheme]}"
    near = difflib.get_close_matches(scheme, sorted({*installed, *FIRST_PARTY}), n=1)
    if near and near[0] in installed:
        return f"{text}; did you mean {near[0]!r}?"
    if near:
        return f"{text}; did you mean {near[0]!r}? pip install {FIRST_PARTY[near[0]]}"
    package = re.sub(r"[^a-z0-9]+", "-", scheme.lower()).strip("-")
    return f"{text}; perhaps its package is named furnace-{package}: look for it on PyPI"


def load_factory(scheme: str) -> EngineFactory[Any]:
    """Import the plugin of one scheme, and no other, and ask its hook for the factory.

    Raises:
        UnknownSchemeError: nobody brings it.
        DuplicateSchemeError: several distributions bring it.
        BrokenPluginError: see ``import_factory``.
    """
    return import_factory(find_engine(scheme))


def import_factory(engine: InstalledEngine) -> EngineFactory[Any]:
    """Import the plugin of an engine, and no other, and ask its hook for the factory.

    Raises:
        BrokenPluginError: the import fails (with whatever exception), the hook is missing or wrong, or the factory
            was written for another version of the contracts.
    """
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    try:
        plugin = engine.entry_point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit, and a panic of a Rust extension: one line each
        _broken(engine, f"can't be imported: {describe(error)}", error)
    try:
        manager.register(plugin, name=engine.scheme)
        manager.check_pending()
    except Exception as error:
        _broken(engine, f"has a hook that does not fit: {describe(error)}", error)
    if not manager.hook.furnace_engine.get_hookimpls():
        _broken(
            engine,
            f"has no furnace_engine hook: {engine.target} needs a function furnace_engine() with the decorator "
            "@furnace.hookimpl",
        )
    try:
        factory = manager.hook.furnace_engine()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        _broken(engine, f"failed in its furnace_engine hook: {describe(error)}", error)
    return _checked(engine, factory)


def _checked(engine: InstalledEngine, factory: object) -> EngineFactory[Any]:
    if isinstance(factory, type) and issubclass(factory, EngineFactory):
        _broken(engine, f"gives the class {factory.__name__}; its furnace_engine hook must return {factory.__name__}()")
    if not isinstance(factory, EngineFactory):
        _broken(engine, f"gives a {type(factory).__name__}; its furnace_engine hook must return an EngineFactory")
    problem = version_problem(
        factory.api_version,
        api="contracts",
        oldest=OLDEST_API_VERSION,
        current=API_VERSION,
        label=engine.label,
        distribution=engine.distribution,
    )
    if problem is not None:
        _broken(engine, problem)
    if not (isinstance(factory.options, type) and issubclass(factory.options, msgspec.Struct)):
        _broken(engine, f"has the options type {quote(factory.options)}, which is not a msgspec.Struct")
    return factory


def _broken(engine: InstalledEngine, what: str, cause: BaseException | None = None) -> NoReturn:
    raise BrokenPluginError(f"the plugin of scheme {engine.scheme!r} ({engine.label}) {what}") from cause
