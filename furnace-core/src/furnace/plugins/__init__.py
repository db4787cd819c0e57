"""Engines as plugins: a pip package brings one under a scheme, and furnace finds it by its entry point.

A plugin needs two things: an entry point in the group ``furnace.engines``, whose name is the scheme, and in its
module a hook that gives the factory::

    import furnace

    @furnace.hookimpl
    def furnace_engine():
        return AcmeFactory()
"""

from furnace.plugins.engine_loader import default_context, load_engine
from furnace.plugins.engine_spec import EngineSpec
from furnace.plugins.errors import (
    BrokenPluginError,
    DuplicateSchemeError,
    EngineLoadError,
    EngineOptionError,
    EngineSpecError,
    PluginError,
    UnknownSchemeError,
)
from furnace.plugins.hookspecs import ENGINE_GROUP, hookimpl
from furnace.plugins.registry import InstalledEngine, installed_engines, load_factory

__all__ = [
    "ENGINE_GROUP",
    "BrokenPluginError",
    "DuplicateSchemeError",
    "EngineLoadError",
    "EngineOptionError",
    "EngineSpec",
    "EngineSpecError",
    "InstalledEngine",
    "PluginError",
    "UnknownSchemeError",
    "default_context",
    "hookimpl",
    "installed_engines",
    "load_engine",
    "load_factory",
]
