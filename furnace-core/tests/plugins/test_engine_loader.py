from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from furnace.contracts import EngineContext, LlmEngine
from furnace.plugins import EngineLoadError, EngineOptionError, EngineSpec, load_engine
from furnace.scheduler import SchedulerConfig

Install = Callable[..., Path]

CODE = """
import furnace, msgspec

class Engine(furnace.LlmEngine):
    name = "acme"
    max_context = 64

    def __init__(self, *made_with):
        self.made_with = made_with

    async def generate(self, request):
        raise NotImplementedError

class ScheduledEngine(Engine):
    def configure(self, defaults):
        self.configured = defaults

class Options(msgspec.Struct, forbid_unknown_fields=True):
    size: int = 1
    label: str = ""

class AcmeFactory(furnace.EngineFactory):
    options = Options

    def create(self, model, options, context):
        if model == "scheduled":
            return ScheduledEngine()
        if model == "raises":
            raise eval(options.label)
        if model == "value":
            return eval(options.label)
        return Engine(model, options, context)

class Step(furnace.StepModel):
    name = "step"
    max_context = 1
    vocab_size = 1
    def prefill(self, prompt): ...
    def decode(self, state, token): ...

@furnace.hookimpl
def furnace_engine():
    return AcmeFactory()
"""


@pytest.fixture(autouse=True)
def acme(install: Install) -> None:
    install("furnace-acme", scheme="acme", code=CODE)


def made_with(engine: LlmEngine) -> tuple[Any, ...]:
    made: tuple[Any, ...] = engine.made_with  # type: ignore[attr-defined]
    return made


def test_an_engine_is_made_from_model_options_and_context() -> None:
    context = EngineContext(threads=3)
    model, options, given = made_with(load_engine("acme:demo?size=2", context=context, options={"label": "x"}))
    assert (model, options.size, options.label) == ("demo", 2, "x")
    assert given is context


def test_options_given_apart_win_over_those_in_the_spec() -> None:
    _, options, _ = made_with(load_engine("acme:demo?size=2", options=[("size", 3)]))
    assert options.size == 3


def test_a_parsed_spec_serves_as_well_and_the_context_has_threads() -> None:
    _, _, context = made_with(load_engine(EngineSpec(scheme="acme", model="demo", name="ignored")))
    assert context.threads >= 1


def test_an_engine_that_furnace_schedules_gets_the_operators_bounds() -> None:
    bounds = SchedulerConfig(max_queue=7)
    assert load_engine("acme:scheduled", scheduler=bounds).configured is bounds  # type: ignore[attr-defined]


def test_bounds_that_an_engine_cannot_take_are_not_dropped_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_engine("acme:demo", scheduler=SchedulerConfig(max_context=8, kv_tokens=8))
        assert not caplog.records
        load_engine("acme:demo", scheduler=SchedulerConfig(max_queue=8))
    assert "max_queue is not used" in caplog.text


def test_a_bad_option_names_the_spec() -> None:
    with pytest.raises(EngineOptionError, match="acme:demo: option size is int"):
        load_engine("acme:demo?size=big")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("ValueError('no such model')", "acme:raises: no such model"),
        (
            "FileNotFoundError(2, 'No such file or directory', 'x.gguf')",
            "acme:raises: No such file or directory: x.gguf",
        ),
        ("KeyError('dtype')", "acme:raises: KeyError: 'dtype'"),
        ("RuntimeError()", "acme:raises: RuntimeError"),
        ("SystemExit(1)", "acme:raises: SystemExit: 1"),
        ("ValueError('two\\n lines')", "acme:raises: two lines"),
    ],
)
def test_whatever_create_raises_is_one_line(error: str, message: str) -> None:
    with pytest.raises(EngineLoadError) as caught:
        load_engine("acme:raises", options={"label": error})
    assert str(caught.value) == message


def test_an_endless_message_of_a_plugin_is_cut() -> None:
    with pytest.raises(EngineLoadError) as caught:
        load_engine("acme:raises", options={"label": "ValueError('x' * 100_000)"})
    assert len(str(caught.value)) < 1000


def test_an_interrupt_while_loading_stays_an_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt):
        load_engine("acme:raises", options={"label": "KeyboardInterrupt()"})


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("None", "a NoneType is no engine"),
        ("Engine", "the class Engine is no engine"),
        ("Step()", "furnace.Scheduled(Step(...), furnace.TextPipeline.from_files("),
    ],
)
def test_what_is_no_engine_says_what_is_needed(value: str, hint: str) -> None:
    with pytest.raises(EngineLoadError) as caught:
        load_engine("acme:value", options={"label": value})
    assert hint in str(caught.value)
