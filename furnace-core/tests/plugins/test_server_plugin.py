"""Plugins of the HTTP process: found by metadata, loaded one by one, refused by name."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import furnace
from furnace.plugins import (
    BrokenPluginError,
    ObservedRequest,
    ServerPlugin,
    UnknownPluginError,
    installed_engines,
    installed_plugins,
    load_plugins,
    server_plugin,
)

Install = Callable[..., Path]

OBSERVER = """
import furnace

seen = []

@furnace.hookimpl
def furnace_request_ended(request):
    seen.append(request)
"""


@pytest.fixture
def install_plugin(install: Install, monkeypatch: pytest.MonkeyPatch, site: Path) -> Install:
    """Like ``install``, for the group ``furnace.plugins``; plugins of this environment are not there."""
    monkeypatch.setattr(
        server_plugin, "installed_plugins", lambda: [p for p in installed_plugins() if not p.name.startswith("budget")]
    )
    return partial(install, group="furnace.plugins")


def error_of_loading(*disabled: str) -> str:
    """The one line that loading ends with."""
    with pytest.raises(BrokenPluginError) as caught:
        load_plugins(disabled)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_listing_reads_metadata_and_imports_nothing(install_plugin: Install) -> None:
    install_plugin("furnace-audit", scheme="audit", version="1.2", code="raise SystemExit('imported')")
    (found,) = [plugin for plugin in installed_plugins() if plugin.name == "audit"]
    assert (found.distribution, found.version, found.target) == ("furnace-audit", "1.2", "furnace_audit")
    assert found.label == "furnace-audit 1.2"
    assert "furnace_audit" not in sys.modules


def test_an_engine_is_no_plugin_of_the_http_process_and_the_other_way_round(
    install: Install, install_plugin: Install
) -> None:
    install("furnace-acme", scheme="acme")
    install_plugin("furnace-audit", scheme="audit")
    assert "acme" not in {plugin.name for plugin in installed_plugins()}
    assert "audit" not in {engine.scheme for engine in installed_engines()}


def test_all_installed_plugins_are_loaded_and_told(install_plugin: Install) -> None:
    install_plugin("furnace-audit", scheme="audit", code=OBSERVER)
    install_plugin("furnace-other", scheme="other", code=OBSERVER)
    loaded = load_plugins()
    assert [plugin.label for plugin in loaded] == [
        "plugin 'audit' (furnace-audit 1.0)",
        "plugin 'other' (furnace-other 1.0)",
    ]
    request = ObservedRequest(id="1", operation="chat", model="m")
    for plugin in loaded:
        plugin.tell("furnace_request_ended", request)
    assert sys.modules["furnace_audit"].seen == sys.modules["furnace_other"].seen == [request]


def test_a_disabled_plugin_is_not_imported(install_plugin: Install) -> None:
    install_plugin("furnace-bomb", scheme="bomb", code="raise SystemExit('imported')")
    install_plugin("furnace-audit", scheme="audit", code=OBSERVER)
    assert len(load_plugins(["bomb"])) == 1
    assert "furnace_bomb" not in sys.modules


def test_disabling_what_is_not_installed_names_what_is(install_plugin: Install) -> None:
    install_plugin("furnace-audit", scheme="audit", code=OBSERVER)
    with pytest.raises(UnknownPluginError, match="did you mean 'audit'"):
        load_plugins(["audti"])
    with pytest.raises(UnknownPluginError, match="installed: audit"):
        load_plugins(["something"])


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit('no licence')", "can't be imported: SystemExit: no licence"),
        ("import absent_module", "no module named 'absent_module'"),
        ("", "has no hook: one of furnace_request_started, "),
        (OBSERVER.replace("request_ended", "request_edned"), "has a hook that does not fit: unknown hook"),
        (OBSERVER.replace("(request)", "(request, mood)"), "has a hook that does not fit"),
        (OBSERVER.replace("def ", "async def "), "has an async furnace_request_ended"),
        (OBSERVER + "api_version = 2", "for hooks version 2, but furnace .* pip install --upgrade furnace-core"),
        (OBSERVER + "api_version = 0", "for hooks version 0, but furnace .* pip install --upgrade furnace-audit"),
        (OBSERVER + "api_version = '1'", "not an integer"),
    ],
)
def test_a_broken_plugin_is_one_line_with_its_name_and_the_way_on(
    install_plugin: Install, code: str, message: str
) -> None:
    install_plugin("furnace-audit", scheme="audit", code=code)
    with pytest.raises(BrokenPluginError, match=message):
        load_plugins()
    line = error_of_loading()
    assert line.startswith("plugin 'audit' (furnace-audit 1.0) ")
    assert line.endswith("(to go on without it: --disable-plugin audit)")
    assert load_plugins(["audit"]) == []


def test_two_distributions_with_a_plugin_of_one_name_are_named_before_any_import(install_plugin: Install) -> None:
    install_plugin("furnace-audit", scheme="audit", code="raise SystemExit('imported')")
    install_plugin("audit-log", scheme="audit", code="raise SystemExit('imported')")
    assert "audit-log 1.0 and by furnace-audit 1.0" in error_of_loading()


def test_an_older_version_of_the_hooks_still_works_and_is_named_in_the_log(
    install_plugin: Install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("furnace.plugins.hookspecs.HOOK_API_VERSION", 2)
    install_plugin("furnace-audit", scheme="audit", code=OBSERVER)
    assert len(load_plugins()) == 1
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "pip install --upgrade furnace-audit" in record.getMessage()


def test_an_object_from_python_has_the_name_of_its_module_or_class() -> None:
    class Watcher:
        @furnace.hookimpl
        def furnace_request_started(self) -> None:
            """It takes fewer arguments than the hook has."""

    plugin = ServerPlugin.of(Watcher())
    plugin.tell("furnace_request_started", ObservedRequest(id="1", operation="chat", model="m"))
    assert plugin.label == "plugin 'Watcher'"
    assert plugin.hooks == {"furnace_request_started"}
    assert ServerPlugin.of(plugin) is plugin


def test_an_object_without_hooks_is_refused_without_a_word_about_the_command() -> None:
    with pytest.raises(BrokenPluginError, match="plugin 'SimpleNamespace' has no hook") as caught:
        ServerPlugin.of(SimpleNamespace())
    assert "--disable-plugin" not in str(caught.value)
