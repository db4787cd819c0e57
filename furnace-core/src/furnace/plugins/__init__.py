"""Engines as plugins: a pip package brings one under a scheme, and furnace finds it by its entry point.

Such a plugin needs two things: an entry point in the group ``furnace.engines``, whose name is the scheme, and in its
module a hook that gives the factory::

    import furnace

    @furnace.hookimpl
    def furnace_engine():
        return AcmeFactory()

What is loaded into the HTTP process has the group ``furnace.plugins`` and other hooks: ``furnace.plugins.hookspecs``.
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
    UnknownPluginError,
    UnknownSchemeError,
)
from furnace.plugins.hookspecs import (
    ENGINE_GROUP,
    HOOK_API_VERSION,
    OLDEST_HOOK_API_VERSION,
    PLUGIN_GROUP,
    hookimpl,
)
from furnace.plugins.installed import InstalledPlugin, installed_plugins
from furnace.plugins.observed_request import ObservedRequest
from furnace.plugins.registry import InstalledEngine, installed_engines, load_factory
from furnace.plugins.server_plugin import ServerPlugin, load_plugins

__all__ = [
    "ENGINE_GROUP",
    "HOOK_API_VERSION",
    "OLDEST_HOOK_API_VERSION",
    "PLUGIN_GROUP",
    "BrokenPluginError",
    "DuplicateSchemeError",
    "EngineLoadError",
    "EngineOptionError",
    "EngineSpec",
    "EngineSpecError",
    "InstalledEngine",
    "InstalledPlugin",
    "ObservedRequest",
    "PluginError",
    "ServerPlugin",
    "UnknownPluginError",
    "UnknownSchemeError",
    "default_context",
    "hookimpl",
    "installed_engines",
    "installed_plugins",
    "load_engine",
    "load_factory",
    "load_plugins",
]
