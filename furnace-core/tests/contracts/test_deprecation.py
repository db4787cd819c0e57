"""How something that plugins use goes away."""

from __future__ import annotations

import pluggy
import pytest

import furnace
from furnace.contracts.deprecation import deprecated, deprecation
from furnace.plugins.hookspecs import PROJECT, hookspec

NEW = "write furnace_new"


def test_a_deprecated_method_works_and_warns_at_the_line_of_its_caller() -> None:
    class Context:
        new = 3

        @property
        @deprecated(since="0.2", until="0.3", instead="use new")
        def old(self) -> int:
            """The old name of ``new``."""
            return self.new

    with pytest.warns(
        DeprecationWarning, match=r"Context\.old is deprecated since furnace 0\.2 .* 0\.3: use new"
    ) as got:
        assert Context().old == 3
    assert got[0].filename == __file__


def test_a_plugin_with_a_deprecated_hook_loads_and_warns() -> None:
    class Specs:
        @hookspec(warn_on_impl=deprecation("furnace_old", since="0.2", until="0.3", instead=NEW))
        def furnace_old(self) -> None:
            """A hook that goes."""

    class Plugin:
        @furnace.hookimpl
        def furnace_old(self) -> int:
            return 3

    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Specs)
    with pytest.warns(DeprecationWarning, match=r"furnace_old is deprecated since furnace 0\.2 .*write furnace_new"):
        manager.register(Plugin())
    assert manager.hook.furnace_old() == [3]


def test_a_plugin_with_a_deprecated_argument_of_a_hook_loads_and_warns() -> None:
    class Specs:
        @hookspec(warn_on_impl_args={"old": deprecation("the argument old", since="0.9", until="1.0", instead=NEW)})
        def furnace_hook(self, old: int, new: int) -> None:
            """A hook that changes."""

    class Plugin:
        @furnace.hookimpl
        def furnace_hook(self, old: int) -> int:
            return old

    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Specs)
    with pytest.warns(DeprecationWarning, match="the argument old is deprecated"):
        manager.register(Plugin())
    assert manager.hook.furnace_hook(old=1, new=2) == [1]


@pytest.mark.parametrize(("since", "until"), [("0.2", "0.4"), ("0.2", "0.2"), ("0.2", "0.1"), ("1.2", "3.0")])
def test_what_is_deprecated_lives_for_one_minor_version(since: str, until: str) -> None:
    with pytest.raises(ValueError, match="old: what is deprecated since"):
        deprecation("old", since=since, until=until, instead="use new")


def test_a_version_is_a_minor_version() -> None:
    with pytest.raises(ValueError, match="is not a minor version"):
        deprecation("old", since="0.2.1", until="0.3", instead="use new")
