"""What can be used is documented: an option, endpoint, parameter, hook or name without a word on it fails here."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

import furnace
from furnace.cli.entry import cli
from furnace.contracts import EngineError
from furnace.plugins import PluginError, hookspecs, load_factory
from furnace.plugins.registry import FIRST_PARTY
from furnace.server import ServerError
from furnace.server.answer import Services
from furnace.server.apis.chat.types import ChatRequest
from furnace.server.apis.completions.types import CompletionRequest
from furnace.server.app import build_app
from furnace.server.bounds import Bounds
from furnace.server.engines import Engines
from furnace.server.extensions import RESERVED
from furnace.server.job import StreamOptions
from furnace.server.traffic import Traffic

DOCS = Path(__file__).parents[2] / "docs"
CONF = runpy.run_path(str(DOCS / "conf.py"))
# An entry may end in the one name of a package that is public.
DESCRIBED = [entry.partition(":")[0] for entry in CONF["public_api_modules"]]
COMMANDS = cli.list_commands(click.Context(cli))
# Schemes of this project whose packages are in this repository. One is written in Rust, and only there where cargo is.
IN_RUST = ("candle",) if importlib.util.find_spec("furnace_candle_bridge") else ()
SCHEMES = (*IN_RUST, "mock", "openvino", "python", "torch")

Rows = Callable[[str], dict[str, list[str]]]
Section = Callable[[str, str], str]


def options_of(command: str) -> list[click.Option]:
    """The options of a command, ``--help`` included."""
    context = click.Context(cli, info_name="furnace", **cli.context_settings)
    found = cli.get_command(context, command)
    assert found is not None
    parameters = found.get_params(click.Context(found, parent=context))
    return [parameter for parameter in parameters if isinstance(parameter, click.Option)]


def plain(value: object) -> str:
    """A default value as the tables write it."""
    if value is None:
        return "null"
    return '""' if value == "" else str(getattr(value, "value", value))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_a_command_is_in_its_table(command: str, section: Section, rows: Rows) -> None:
    words = " ".join(rows(section("reference/cli.md", f"furnace {command}"))).split()

    for option in options_of(command):
        assert set(option.opts) <= set(words), f"{option.opts} of furnace {command} is not in reference/cli.md"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_table_of_a_command_has_no_option_that_is_not_there(command: str, section: Section, rows: Rows) -> None:
    documented = set(" ".join(rows(section("reference/cli.md", f"furnace {command}"))).split())

    known = {name for option in options_of(command) for name in (*option.opts, *option.secondary_opts)}
    assert {word for word in documented if word.startswith("-")} <= known


def test_the_defaults_of_serve_are_those_in_its_table(section: Section, rows: Rows) -> None:
    table = rows(section("reference/cli.md", "furnace serve"))

    for option in options_of("serve"):
        if isinstance(option.default, str | int) and not isinstance(option.default, bool):
            assert table[option.opts[-1]][1] == f"`{option.default}`"


def test_every_option_of_serve_has_its_variable(rows: Rows) -> None:
    table = rows((DOCS / "reference/environment.md").read_text())

    for option in options_of("serve"):
        if "--help" in option.opts:
            continue
        name = option.envvar or f"FURNACE_SERVE_{str(option.name).upper()}"
        assert f"`{name}`" in table[option.opts[-1]][1]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_option_of_an_engine_is_documented_with_its_default(scheme: str, section: Section, rows: Rows) -> None:
    table = rows(section("reference/engine-options.md", scheme))
    options = {field.encode_name: field for field in msgspec.structs.fields(load_factory(scheme).options)}

    assert table.keys() & options.keys() == options.keys(), f"not in reference/engine-options.md: {options.keys()}"
    for name, field in options.items():
        documented, default = table[name][1].strip("`"), plain(field.default)
        assert documented == default or float(documented) == float(default), f"{scheme}: the default of {name}"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_table_of_an_engine_has_no_option_that_is_not_there(scheme: str, section: Section, rows: Rows) -> None:
    table = rows(section("reference/engine-options.md", scheme))

    assert table.keys() <= set(load_factory(scheme).options.__struct_fields__)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_in_the_table_of_schemes(scheme: str, section: Section, rows: Rows) -> None:
    assert rows(section("reference/engine-specs.md", "Schemes"))[scheme][1] == FIRST_PARTY[scheme]


def test_every_endpoint_is_documented(section: Section, rows: Rows) -> None:
    documented = set(rows(section("reference/http.md", "Endpoints")))
    app = build_app(Services(Engines(), Traffic(lambda: None), Bounds()))

    served = set()
    for route in app.routes:
        path = re.sub(r"{[^}]*}", "{model}", route.path_format)
        for method in getattr(route, "methods", ()):
            if method != "OPTIONS":
                served.add(f"{method} {path}")
    assert served == documented


@pytest.mark.parametrize("body", [ChatRequest, CompletionRequest])
def test_every_field_of_a_request_is_documented(body: type[msgspec.Struct]) -> None:
    page = (DOCS / "reference/http.md").read_text()

    for name in body.__struct_fields__:
        assert f"`{name}`" in page, f"{name} of {body.__name__} is not in reference/http.md"


def test_every_stream_option_is_documented() -> None:
    page = (DOCS / "reference/http.md").read_text()

    for name in StreamOptions.__struct_fields__:
        assert re.search(rf"`(stream_options\.)?{name}(: true)?`", page)


@pytest.mark.parametrize("kind", EngineError.__subclasses__())
def test_every_code_of_an_engine_error_is_documented(kind: type[EngineError], section: Section) -> None:
    tree = section("reference/errors.md", "In Python")
    found = re.search(rf"^.* {kind.__name__} +(\d*)(.*)$", tree, re.MULTILINE)
    assert found

    status, text = found.groups()
    for code in kind.codes:
        assert code in text
        # Without a status it is no answer.
        row = rf"^\| {kind.status} \| `\w+` \| `{code}` \|"
        assert bool(status) == bool(re.search(row, (DOCS / "reference/errors.md").read_text(), re.MULTILINE))


@pytest.mark.parametrize("base", [EngineError, PluginError, ServerError])
def test_every_error_is_in_the_tree(base: type[Exception], section: Section) -> None:
    tree = section("reference/errors.md", "In Python")

    for kind in (base, *base.__subclasses__()):
        assert re.search(rf"\b{kind.__name__}\b", tree)


HOOKS = [name for name, value in vars(hookspecs).items() if hasattr(value, "furnace_spec")]


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_documented(hook: str, section: Section) -> None:
    text = section("reference/hooks.md", hook)
    signature = inspect.signature(getattr(hookspecs, hook))

    documented = re.search(rf"^@furnace\.hookimpl\ndef {hook}\((.*)\) -> .*: \.\.\.$", text, re.MULTILINE)
    assert documented, f"{hook} is not in reference/hooks.md as it is written"
    assert re.findall(r"(\w+):", documented[1]) == list(signature.parameters)
    for row in ("entry point", "called", "where", "thread", "must", "an exception"):
        assert re.search(rf"^\| {row} \| .+ \|$", text, re.MULTILINE), f"{hook} does not say {row}"


def test_no_hook_is_documented_that_is_not_there() -> None:
    page = (DOCS / "reference/hooks.md").read_text()

    assert re.findall(r"^### (\w+)$", page, re.MULTILINE) == HOOKS


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_in_an_example_that_is_shown(hook: str) -> None:
    shown = "".join(
        (DOCS / "reference" / target).resolve().read_text()
        for page in ("reference/hooks.md", "tutorial/3-plugin.md")
        for target in re.findall(r"{literalinclude} (\S+\.py)", (DOCS / page).read_text())
    )

    assert f"def {hook}(" in shown


def test_every_reserved_part_of_a_path_is_documented(section: Section) -> None:
    text = section("reference/hooks.md", "furnace_routes")

    assert all(f"`{word}`" in text for word in RESERVED)


@pytest.mark.parametrize("name", furnace.__all__)
def test_every_public_name_is_listed(name: str) -> None:
    page = (DOCS / "reference/api/index.md").read_text()

    assert re.search(rf"{{py:(class|func|data)}}`furnace\.{name}`", page)


def test_every_home_of_a_public_name_is_in_the_generated_reference() -> None:
    homes = set(furnace._HOME.values())

    assert homes <= set(DESCRIBED)


def test_every_package_of_the_generated_reference_has_its_directive() -> None:
    pages = "".join(page.read_text() for page in (DOCS / "reference/api").glob("*.rst"))

    assert sorted(re.findall(r"^\.\. public-api:: (\S+)$", pages, re.MULTILINE)) == sorted(DESCRIBED)


@pytest.mark.parametrize("module", DESCRIBED)
def test_a_documented_package_exports_what_it_names(module: str) -> None:
    imported: Any = importlib.import_module(module)

    assert imported.__all__
    for name in imported.__all__:
        assert hasattr(imported, name)
