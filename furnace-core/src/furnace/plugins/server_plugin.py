"""The plugins of the HTTP process, loaded: the only place where their hooks are called.

Each has a PluginManager of its own, so that what one does wrong is known to be its fault and hurts no other.
"""

from __future__ import annotations

import difflib
import inspect
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import pluggy

from furnace.contracts.errors import quote
from furnace.plugins import hookspecs
from furnace.plugins.api_version import version_problem
from furnace.plugins.errors import BrokenPluginError, UnknownPluginError, describe
from furnace.plugins.installed import InstalledPlugin, installed_plugins
from furnace.plugins.observed_request import ObservedRequest

if TYPE_CHECKING:
    from furnace.server import Server

__all__ = ["ObserverHook", "ServerPlugin", "load_plugins"]

ObserverHook = Literal["furnace_request_started", "furnace_request_first_token", "furnace_request_ended"]

_HOOKS = (
    "furnace_request_started",
    "furnace_request_first_token",
    "furnace_request_ended",
    "furnace_routes",
    "furnace_metrics",
)


class ServerPlugin:
    """One plugin whose hooks fit.

    Args:
        name: the entry point's name, for messages.
        plugin: a module, or any object with methods that are marked with ``furnace.hookimpl``.
        installed: where it comes from; None for an object that was handed over in Python.

    Raises:
        BrokenPluginError: a hook does not fit, there is none, or the plugin was written for another version.
    """

    def __init__(self, name: str, plugin: object, installed: InstalledPlugin | None = None) -> None:
        self.label = _label(name, installed)
        self._name = name
        self._installed = installed
        manager = pluggy.PluginManager(hookspecs.PROJECT)
        manager.add_hookspecs(hookspecs)
        try:
            manager.register(plugin, name=name)
            manager.check_pending()
        except Exception as error:
            self.refuse(f"has a hook that does not fit: {describe(error)}", error)
        self._hook: Any = manager.hook
        implemented = [hook for hook in _HOOKS if getattr(self._hook, hook).get_hookimpls()]
        if not implemented:
            self.refuse(f"has no hook: one of {', '.join(_HOOKS)} with the decorator @furnace.hookimpl")
        self.hooks = frozenset(implemented)
        for hook in implemented:
            for implementation in getattr(self._hook, hook).get_hookimpls():
                if inspect.iscoroutinefunction(implementation.function):
                    self.refuse(f"has an async {hook}, which must be a plain function")
        problem = version_problem(
            getattr(plugin, "api_version", 1),
            api="hooks",
            oldest=hookspecs.OLDEST_HOOK_API_VERSION,
            current=hookspecs.HOOK_API_VERSION,
            label=self.label,
            distribution=name if installed is None else installed.distribution,
        )
        if problem is not None:
            self.refuse(problem)

    @classmethod
    def of(cls, plugin: object) -> ServerPlugin:
        """A plugin that was handed over in Python, under the name of its module or class."""
        if isinstance(plugin, ServerPlugin):
            return plugin
        return cls(getattr(plugin, "__name__", type(plugin).__name__), plugin)

    def tell(self, hook: ObserverHook, request: ObservedRequest) -> None:
        """Call an observer's hook; raises what the plugin raises."""
        getattr(self._hook, hook)(request=request)

    def routes(self, server: Server) -> list[Any]:
        """What its hook for routes gives."""
        return self._given("furnace_routes", server)

    def metrics(self, server: Server) -> list[Any]:
        """What its hook for metrics gives."""
        return self._given("furnace_metrics", server)

    def _given(self, hook: str, server: Server) -> list[Any]:
        try:
            return [item for items in getattr(self._hook, hook)(server=server) for item in items]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # as at import: whatever the plugin raises is one line
            self.refuse(f"failed in its {hook} hook: {describe(error)}", error)

    def refuse(self, what: str, cause: BaseException | None = None) -> NoReturn:
        """Say that this can't be used, and how to go on without it.

        Raises:
            BrokenPluginError: always.
        """
        raise _refusal(self._name, self._installed, what) from cause


def load_plugins(disabled: Collection[str] = ()) -> list[ServerPlugin]:
    """Import all installed plugins of the HTTP process, by name.

    Args:
        disabled: names of plugins that are not imported.

    Raises:
        BrokenPluginError: one can't be imported or does not fit; the message says which, and how to go on without it.
        UnknownPluginError: a disabled one is not installed.
    """
    installed = installed_plugins()
    names = {plugin.name for plugin in installed}
    for name in disabled:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"installed: {', '.join(sorted(names)) or 'none'}"
            raise UnknownPluginError(f"no installed plugin has the name {quote(name)}; {hint}")
    wanted = [plugin for plugin in installed if plugin.name not in disabled]
    _refuse_duplicates(wanted)
    return [_load(plugin) for plugin in wanted]


def _refuse_duplicates(plugins: Sequence[InstalledPlugin]) -> None:
    for name, times in Counter(plugin.name for plugin in plugins).items():
        if times > 1:
            labels = [plugin.label for plugin in plugins if plugin.name == name]
            raise BrokenPluginError(
                f"plugin {name!r} is brought by {' and by '.join(labels)}; keep one of them, "
                f"or go on without both: --disable-plugin {name}"
            )


def _load(plugin: InstalledPlugin) -> ServerPlugin:
    try:
        loaded = plugin.entry_point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit, and a panic of a Rust extension: one line each
        raise _refusal(plugin.name, plugin, f"can't be imported: {describe(error)}") from error
    return ServerPlugin(plugin.name, loaded, plugin)


def _label(name: str, installed: InstalledPlugin | None) -> str:
    return f"plugin {name!r}" if installed is None else f"plugin {name!r} ({installed.label})"


def _refusal(name: str, installed: InstalledPlugin | None, what: str) -> BrokenPluginError:
    way_out = "" if installed is None else f" (to go on without it: --disable-plugin {name})"
    return BrokenPluginError(f"{_label(name, installed)} {what}{way_out}")
