from __future__ import annotations

from typing import Any

import pytest

from furnace.config import ConfigError, ServeConfig, assign_options
from furnace.contracts import EngineContext
from furnace.plugins import EngineOptionError, EngineSpec
from furnace.plugins.cores import usable_cores
from furnace.plugins.engine_loader import kv_memory
from furnace.scheduler import SchedulerConfig

DEMO = EngineSpec(scheme="acme", model="demo")


def test_what_nobody_set_is_left_to_furnace_and_the_engine() -> None:
    config = ServeConfig(engines=[DEMO])
    assert (config.host, config.port) == ("127.0.0.1", 8080)
    assert config.scheduler == SchedulerConfig()
    assert config.context() == EngineContext(threads=usable_cores(), memory_bytes=kv_memory(1))


def test_settings_go_to_the_scheduler_and_to_the_engines_context() -> None:
    config = ServeConfig(engines=[DEMO], max_context=1, kv_tokens=2, max_queue=3, threads=4, chat_template="T")
    assert config.scheduler == SchedulerConfig(max_context=1, kv_tokens=2, max_queue=3)
    context = config.context()
    assert (context.threads, context.max_context, context.kv_tokens, context.chat_template) == (4, 1, 2, "T")


def test_engines_share_the_cores() -> None:
    assert ServeConfig(engines=[DEMO] * 1000).context().threads == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engines": []}, "no engine to serve"),
        ({"port": 65536}, "65536 is not between 0 and 65535"),
        ({"port": -1}, "-1 is not between"),
        ({"log_level": "loud"}, "'loud' is no log level; there are debug, info"),
        ({"max_context": 0}, "max_context is 0, but must be at least 1"),
        ({"threads": -1}, "threads is -1"),
        *(
            ({"allowed_hosts": (host,)}, "must be a name alone")
            for host in ("", "http://a.example", "a.example:80", "*.a.example", "a b", "grün.example", "a..b", "a@b")
        ),
        (
            {"engines": [EngineSpec.parse("a=acme:x"), DEMO, EngineSpec.parse("a=acme:y")]},
            "two engines .* name 'a'",
        ),
    ],
)
def test_a_setting_that_cannot_be_says_what_to_change(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServeConfig(**{"engines": [DEMO], **settings})


def test_host_names_are_taken() -> None:
    hosts = ("chat.example.com", "Chat.Example.com.", "my_box", "xn--grn-hoa.example", "10-0-0-1.local")
    assert ServeConfig(engines=[DEMO], allowed_hosts=hosts).allowed_hosts == hosts


def test_options_go_to_all_engines_or_to_the_named_one() -> None:
    specs = [EngineSpec.parse(text) for text in ("a=acme:demo?x=0&y=0", "acme:org/b.c", "acme:demo")]
    assigned = assign_options(specs, ["x=1", "a.x=2", "org/b.c.z=3", "demo.z=4"])
    assert [spec.options for spec in assigned] == [{"x": "2", "y": "0"}, {"x": "1", "z": "3"}, {"x": "1", "z": "4"}]


@pytest.mark.parametrize(
    ("assignments", "error", "message"),
    [
        (["x"], EngineOptionError, "KEY=VALUE"),
        (["c.x=1"], ConfigError, "is for no engine: the engines are 'demo'"),
        (["x=1", "x=2"], ConfigError, "given twice"),
        (["demo.x=1", "demo.x=1"], ConfigError, "given twice"),
    ],
)
def test_an_option_for_nobody_is_an_error(assignments: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        assign_options([DEMO], assignments)
