from __future__ import annotations

import enum
from typing import Annotated, Literal

import msgspec
import pytest

from furnace.contracts import NoOptions
from furnace.plugins import BrokenPluginError, EngineOptionError
from furnace.plugins.options import build_options, describe_options, parse_assignment


class Level(enum.Enum):
    STEP = "step"
    ENGINE = "engine"


class Options(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    dtype: Literal["float32", "bfloat16"] = "float32"
    level: Level = Level.STEP
    max_sequences: Annotated[int, msgspec.Meta(ge=1)] = 8
    step_delay: float = 0.0
    eager: bool = False
    seed: int | None = None
    devices: list[str] = []
    sizes: tuple[int, ...] | None = None
    label: str = ""


class Needy(msgspec.Struct, forbid_unknown_fields=True):
    path: str
    low: int = 0
    high: int = 9

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError("low is above high")


def build(**values: object) -> Options:
    return build_options(Options, values, where="acme:demo")


def test_texts_become_what_the_fields_are() -> None:
    assert build(
        dtype="bfloat16",
        level="engine",
        max_sequences="3",
        step_delay="1.5",
        eager="true",
        seed="7",
        devices="cpu, gpu",
        sizes="1,2",
        label="a,b",
    ) == Options("bfloat16", Level.ENGINE, 3, 1.5, True, 7, ["cpu", "gpu"], (1, 2), "a,b")


def test_values_from_python_stay_what_they_are() -> None:
    assert build(max_sequences=3, devices=["a"], seed=None) == Options(max_sequences=3, devices=["a"])


def test_null_unsets_and_nothing_is_an_empty_list() -> None:
    assert build(seed="null", devices="") == Options()


@pytest.mark.parametrize(
    ("values", "hint"),
    [
        ({"dtype": "int3"}, "option dtype is float32 | bfloat16, not 'int3'"),
        ({"level": "none"}, "option level is step | engine, not 'none'"),
        ({"max_sequences": "0"}, "option max_sequences is int, not '0'"),
        ({"max_sequences": "many"}, "option max_sequences is int, not 'many'"),
        ({"eager": "yes"}, "option eager is true | false, not 'yes'"),
        ({"sizes": "1,x"}, "option sizes is int,... | null"),
        ({"label": "x", "seed": "1.5"}, "option seed is int | null"),
    ],
)
def test_a_bad_value_names_its_option(values: dict[str, object], hint: str) -> None:
    with pytest.raises(EngineOptionError) as caught:
        build(**values)
    assert str(caught.value).startswith("acme:demo: ")
    assert hint in str(caught.value)


def test_an_unknown_option_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(EngineOptionError) as caught:
        build(max_sequence="3")
    message = str(caught.value)
    assert "'max_sequence', did you mean 'max_sequences'?" in message
    assert "dtype: float32 | bfloat16 = float32" in message
    assert "devices: str,... = " in message
    with pytest.raises(EngineOptionError, match="did you mean 'step_delay'"):
        build(**{"step-delay": "1"})


def test_an_engine_without_options_says_so() -> None:
    with pytest.raises(EngineOptionError, match="it has none"):
        build_options(NoOptions, {"a": "1"}, where="acme:demo")


def test_a_missing_option_and_a_check_of_the_plugin_are_one_line() -> None:
    assert describe_options(Needy) == "path: str (required), low: int = 0, high: int = 9"
    with pytest.raises(EngineOptionError, match="required field `path`; its options: path: str"):
        build_options(Needy, {}, where="acme:demo")
    with pytest.raises(EngineOptionError, match="low is above high"):
        build_options(Needy, {"path": "x", "low": "10"}, where="acme:demo")


def test_an_options_type_that_cannot_be_resolved_is_the_plugins_fault() -> None:
    broken = msgspec.defstruct("Broken", [("a", "NoSuchType")])
    with pytest.raises(BrokenPluginError, match="options type"):
        build_options(broken, {"a": "1"}, where="acme:demo")


def test_a_long_value_is_quoted_in_part() -> None:
    with pytest.raises(EngineOptionError) as caught:
        build(seed="x" * 10_000)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("dtype=float32", (None, "dtype", "float32")),
        ("small.dtype=float32", ("small", "dtype", "float32")),
        ("Qwen2.5-7B.dtype=a.b=c", ("Qwen2.5-7B", "dtype", "a.b=c")),
        ("path=./x.y", (None, "path", "./x.y")),
        ("label=", (None, "label", "")),
    ],
)
def test_an_assignment_is_for_all_engines_or_for_the_named_one(text: str, parsed: tuple[str | None, str, str]) -> None:
    assert parse_assignment(text) == parsed


@pytest.mark.parametrize("text", ["", "dtype", "=float32", ".dtype=x", "small.=x"])
def test_what_is_no_assignment_says_how_to_write_one(text: str) -> None:
    with pytest.raises(EngineOptionError, match="KEY=VALUE"):
        parse_assignment(text)
