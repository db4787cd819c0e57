from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from furnace.plugins import EngineSpec, EngineSpecError

NAMES = st.text(min_size=1).filter(lambda text: ":" not in text and "=" not in text)
SPECS = st.builds(
    EngineSpec,
    scheme=st.from_regex(r"[A-Za-z][A-Za-z0-9_.+-]+", fullmatch=True),
    model=st.text(min_size=1) | st.text(alphabet="%?&=:@25f3F/", min_size=1),
    options=st.dictionaries(st.text(min_size=1), st.text()),
    name=st.none() | NAMES,
)


@given(SPECS)
def test_a_spec_written_as_text_reads_back_as_itself(spec: EngineSpec) -> None:
    assert EngineSpec.parse(str(spec)) == spec


@given(SPECS)
def test_a_spec_crosses_a_process_as_msgpack(spec: EngineSpec) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=EngineSpec) == spec


@given(st.text())
def test_any_text_is_a_spec_or_a_spec_error(text: str) -> None:
    with contextlib.suppress(EngineSpecError):
        assert EngineSpec.parse(text).model


@pytest.mark.parametrize(
    ("text", "scheme", "model", "options"),
    [
        ("torch:tiny-lm", "torch", "tiny-lm", {}),
        ("torch:tiny-lm?dtype=float32", "torch", "tiny-lm", {"dtype": "float32"}),
        ("torch:./dir", "torch", "./dir", {}),
        ("torch:/abs/file.gguf", "torch", "/abs/file.gguf", {}),
        ("torch:org/name@revision", "torch", "org/name@revision", {}),
        (r"torch:C:\models\tiny.gguf?dtype=float32", "torch", r"C:\models\tiny.gguf", {"dtype": "float32"}),
        ("python:my_model.py:engine", "python", "my_model.py:engine", {}),
        ("mock:echo?a=1&b=x%26y%3Dz", "mock", "echo", {"a": "1", "b": "x&y=z"}),
        ("mock:echo?a=what?", "mock", "echo", {"a": "what?"}),
        ("mock:echo?a=1=2&b=", "mock", "echo", {"a": "1=2", "b": ""}),
        ("mock:echo?a=1+1", "mock", "echo", {"a": "1+1"}),
        ("mock:echo?", "mock", "echo", {}),
        ("mock:100%", "mock", "100%", {}),
        ("mock:a%20b", "mock", "a%20b", {}),
        ("mock:why%3F", "mock", "why?", {}),
    ],
)
def test_scheme_model_and_options_are_told_apart(text: str, scheme: str, model: str, options: dict[str, str]) -> None:
    assert EngineSpec.parse(text) == EngineSpec(scheme=scheme, model=model, options=options)


def test_a_name_counts_only_before_the_first_colon() -> None:
    assert EngineSpec.parse("small=torch:tiny-lm") == EngineSpec(scheme="torch", model="tiny-lm", name="small")
    assert EngineSpec.parse("torch:a=b:c") == EngineSpec(scheme="torch", model="a=b:c")
    assert EngineSpec.parse("org/small=torch:x?k=v").name == "org/small"


def test_a_path_that_exists_is_taken_whole(tmp_path: Path) -> None:
    path = tmp_path / "what?is=this"
    path.write_text("")
    assert EngineSpec.parse(f"torch:{path}") == EngineSpec(scheme="torch", model=str(path))
    assert EngineSpec.parse(f"torch:{path}?dtype=float32").options == {"dtype": "float32"}
    escaped = tmp_path / "why%3F"
    escaped.write_text("")
    assert EngineSpec.parse(f"torch:{escaped}?dtype=float32").model == str(escaped)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("tiny-lm", "torch:tiny-lm"),
        ("acme", "or acme:MODEL if acme is a scheme"),
        ("", "SCHEME:MODEL"),
        ("torch:", "names no model"),
        ("torch:?a=1", "names no model"),
        (":tiny-lm", "no scheme"),
        (r"C:\models\tiny.gguf", "torch:PATH"),
        ("to rch:tiny-lm", "no scheme"),
        ("=torch:tiny-lm", "no name"),
        ("a=b=torch:tiny-lm", "no name"),
        ("torch:tiny-lm?dtype", "KEY=VALUE"),
        ("torch:tiny-lm?=float32", "KEY=VALUE"),
        ("torch:tiny-lm?a=1&&b=2", "KEY=VALUE"),
        ("torch:tiny-lm?a=1&a=2", "twice"),
        ("torch:tiny-lm?a=%FF", "UTF-8"),
    ],
)
def test_a_spec_that_cannot_be_read_says_what_to_write(text: str, hint: str) -> None:
    with pytest.raises(EngineSpecError) as caught:
        EngineSpec.parse(text)
    assert hint in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_an_endless_spec_is_quoted_in_part() -> None:
    with pytest.raises(EngineSpecError) as caught:
        EngineSpec.parse("x" * 100_000)
    assert len(str(caught.value)) < 400


def test_bytes_that_are_not_utf_8_do_not_break_the_text_of_a_spec() -> None:
    spec = EngineSpec.parse("torch:tiny-lm?path=\udcff")
    assert str(spec) == "torch:tiny-lm?path=%3F"


def test_further_options_win_over_those_in_the_spec() -> None:
    spec = EngineSpec.parse("torch:tiny-lm?a=1&b=2").with_options({"b": "3", "c": "4"})
    assert spec.options == {"a": "1", "b": "3", "c": "4"}
