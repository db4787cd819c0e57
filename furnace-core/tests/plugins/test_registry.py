from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from furnace.plugins import (
    BrokenPluginError,
    DuplicateSchemeError,
    PluginError,
    UnknownSchemeError,
    installed_engines,
    load_factory,
)
from furnace.plugins.registry import FIRST_PARTY

Install = Callable[..., Path]

GOOD = """
import furnace

class AcmeFactory(furnace.EngineFactory):
    def create(self, model, options, context):
        raise NotImplementedError

@furnace.hookimpl
def furnace_engine():
    return AcmeFactory()
"""


def error_of(scheme: str) -> str:
    """The one line that loading the scheme ends with."""
    with pytest.raises(PluginError) as caught:
        load_factory(scheme)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_listing_reads_metadata_and_imports_nothing(install: Install) -> None:
    install("furnace-acme", scheme="acme", version="1.2", code="raise SystemExit('imported')")
    (acme,) = [engine for engine in installed_engines() if engine.scheme == "acme"]
    assert (acme.distribution, acme.version, acme.target) == ("furnace-acme", "1.2", "furnace_acme")
    assert acme.label == "furnace-acme 1.2"
    assert "furnace_acme" not in sys.modules


def test_loading_imports_the_one_that_is_asked_for(install: Install) -> None:
    install("furnace-acme", scheme="acme", code=GOOD)
    install("furnace-bomb", scheme="bomb", code="raise SystemExit('imported')")
    assert type(load_factory("acme")).__name__ == "AcmeFactory"
    assert "furnace_bomb" not in sys.modules


def test_the_plugin_may_be_an_object_in_the_module(install: Install) -> None:
    code = GOOD.partition("@furnace.hookimpl")[0] + (
        "class Plugin:\n"
        "    @furnace.hookimpl\n"
        "    def furnace_engine(self):\n"
        "        return AcmeFactory()\n"
        "plugin = Plugin()\n"
    )
    install("furnace-acme", scheme="acme", target="furnace_acme:plugin", code=code)
    assert type(load_factory("acme")).__name__ == "AcmeFactory"


def test_a_distribution_that_is_on_the_path_twice_is_listed_once(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadowed = tmp_path / "older" / "Furnace.Acme-0.9.dist-info"
    info = install("furnace-acme", scheme="acme", code=GOOD)
    shadowed.mkdir(parents=True)
    for file in info.iterdir():
        (shadowed / file.name).write_text(file.read_text().replace("furnace-acme", "Furnace.Acme"))
    monkeypatch.setattr(sys, "path", [*sys.path, str(shadowed.parent)])
    assert [engine.label for engine in installed_engines() if engine.scheme == "acme"] == ["furnace-acme 1.0"]


def test_two_distributions_with_one_scheme_are_named_before_any_import(install: Install) -> None:
    install("furnace-acme", scheme="acme", code="raise SystemExit('imported')")
    install("acme-llm", scheme="acme", version="3", code="raise SystemExit('imported')")
    with pytest.raises(DuplicateSchemeError, match=r"acme-llm 3 .* and by furnace-acme 1\.0 .*pip uninstall") as caught:
        load_factory("acme")
    assert "\n" not in str(caught.value)
    assert not {"furnace_acme", "acme_llm"} & sys.modules.keys()


def test_a_duplicate_scheme_hurts_no_other_scheme(install: Install) -> None:
    install("furnace-acme", scheme="acme")
    install("acme-llm", scheme="acme")
    install("furnace-fine", scheme="fine", code=GOOD)
    assert type(load_factory("fine")).__name__ == "AcmeFactory"


def test_broken_metadata_of_somebody_else_is_passed_over_with_a_warning(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    (install("somebody-else", scheme="other") / "entry_points.txt").write_text("[furnace.engines]\nno equals sign\n")
    install("furnace-acme", scheme="acme", code=GOOD)
    with caplog.at_level(logging.WARNING):
        assert load_factory("acme")
    assert "somebody-else" in caplog.text


def test_a_distribution_without_a_name_is_still_listed(install: Install) -> None:
    (install("nameless", scheme="nameless", code=GOOD) / "METADATA").write_text("Metadata-Version: 2.1\n")
    (found,) = [engine for engine in installed_engines() if engine.scheme == "nameless"]
    assert found.label == "unknown distribution"


@pytest.mark.parametrize(
    ("scheme", "hint"),
    [
        ("comet", "pip install furnace-comet"),
        ("comte", "did you mean 'comet'? pip install furnace-comet"),
        ("acne", "did you mean 'acme'?"),
        ("zzz.Zz", "perhaps its package is named furnace-zzz-zz"),
    ],
)
def test_an_unknown_scheme_gets_the_installed_ones_and_what_to_install(
    install: Install, monkeypatch: pytest.MonkeyPatch, scheme: str, hint: str
) -> None:
    # A scheme of this project whose package is installed nowhere.
    monkeypatch.setitem(FIRST_PARTY, "comet", "furnace-comet")
    install("furnace-acme", scheme="acme")
    with pytest.raises(UnknownSchemeError) as caught:
        load_factory(scheme)
    assert hint in str(caught.value)
    assert "installed: acme" in str(caught.value)


def test_a_scheme_that_is_no_name_at_all_is_quoted_in_part() -> None:
    assert len(error_of("x" * 10_000)) < 11_000
    assert "…" in error_of("x" * 10_000)


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        ("import furnace_no_such_module", "pip install furnace_no_such_module"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise GeneratorExit", "GeneratorExit"),
        (
            "class Panic(BaseException): pass\nraise Panic('index out of\\nbounds \\x1b[31m')",
            "index out of bounds \\x1b",
        ),
        ("1/0", "ZeroDivisionError"),
        ("def f(:", "SyntaxError"),
        ("", "no furnace_engine hook"),
        ("import furnace\n@furnace.hookimpl\ndef furnace_engin(): pass", "furnace_engin"),
        ("import furnace\n@furnace.hookimpl\ndef furnace_engine(model): pass", "model"),
        (
            "import furnace\n@furnace.hookimpl\ndef furnace_engine(): raise SystemExit('x')",
            "failed in its furnace_engine",
        ),
        ("import furnace\n@furnace.hookimpl\ndef furnace_engine(): return 3", "gives a int"),
        (GOOD.replace("return AcmeFactory()", "return AcmeFactory"), "must return AcmeFactory()"),
        (GOOD.replace("def create", "def make"), "abstract"),
        (GOOD.replace("    def create", "    api_version = 2\n    def create"), "pip install --upgrade furnace-core"),
        (GOOD.replace("    def create", "    api_version = 0\n    def create"), "pip install --upgrade furnace-acme"),
        (GOOD.replace("    def create", "    api_version = '1'\n    def create"), "not an integer"),
        (GOOD.replace("    def create", "    options = dict\n    def create"), "not a msgspec.Struct"),
    ],
)
def test_a_broken_plugin_is_one_clear_line(install: Install, code: str, hint: str) -> None:
    install("furnace-acme", scheme="acme", code=code)
    install("furnace-fine", scheme="fine", code=GOOD)
    with pytest.raises(BrokenPluginError) as caught:
        load_factory("acme")
    message = str(caught.value)
    assert hint in message
    assert "'acme' (furnace-acme 1.0)" in message
    assert message.isprintable()
    assert load_factory("fine")


def test_an_interrupt_by_the_user_is_no_plugin_error(install: Install) -> None:
    install("furnace-acme", scheme="acme", code="raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_factory("acme")


def test_a_target_that_is_not_there_is_a_broken_plugin(install: Install) -> None:
    install("furnace-acme", scheme="acme", target="furnace_acme:nothing")
    assert "nothing" in error_of("acme")


def test_exports_are_what_all_says() -> None:
    import furnace.plugins as plugins

    exported: dict[str, Any] = {name: getattr(plugins, name) for name in plugins.__all__}
    assert None not in exported.values()
    assert plugins.__all__ == sorted(
        plugins.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name)
    )


def test_an_older_version_of_the_contracts_still_works_and_is_named_in_the_log(
    install: Install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("furnace.plugins.registry.API_VERSION", 2)
    install("furnace-acme", scheme="acme", code=GOOD)
    assert type(load_factory("acme")).__name__ == "AcmeFactory"
    (record,) = caplog.records
    assert "was written for contracts version 1" in record.getMessage()
    assert "pip install --upgrade furnace-acme" in record.getMessage()
