from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import pytest

from furnace.checkpoint import CheckpointError
from furnace.contracts import InvalidRequestError
from furnace.text import ChatTemplate, WorkerRenderer

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "b": "<&>", "a": ["é"]}}}]
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be  brief."},
    {"role": "user", "content": " What's <b> & é? \n"},
    {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"x": 1}}}]},
    {"role": "tool", "content": "[1, 2]", "name": "look"},
    {"role": "user", "content": "and?"},
]

# Between them they use what templates of well-known models use.
TEMPLATES = {
    "roles": (
        "{{ bos_token }}{% for message in messages %}\n    {% if message.role == 'tool' %}{% continue %}{% endif %}\n"
        "<{{ message['role'] | upper }}>{{ message['content'] | trim if message.content is defined else 'none' }}\n"
        "{% endfor %}{% if add_generation_prompt %}<ASSISTANT>{% endif %}"
    ),
    "namespace and loop controls": (
        "{%- set ns = namespace(count=0, last='') -%}{%- for m in messages -%}{%- set ns.count = ns.count + 1 -%}"
        "{%- if m.content is string -%}{%- set ns.last = m.content -%}{%- endif -%}"
        "{%- if loop.index0 == 3 -%}{%- break -%}{%- endif -%}{%- endfor -%}{{ ns.count }}|{{ ns.last }}"
    ),
    "json": (
        "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{{ tool | tojson(indent=2) }}\n"
        "{{ tool.function | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}{% endfor %}{% endif %}"
        "{% for m in messages if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}"
    ),
    "macro and slices": (
        "{% macro show(m, extra='') %}[{{ m.role }}{{ extra }}]{% endmacro %}{% for m in messages[1:] | reverse %}"
        "{{ show(m, extra=loop.index) }}{% endfor %}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
        "{{ messages | map(attribute='role') | join(',') }}{{ '%s-%d' | format('x', 3) }}{{ 'a b'.split(' ')[-1] }}"
    ),
    "generation block": (
        "{% for m in messages %}{% generation %}{{ m.role }}\n{% set x = 1 %}{% endgeneration %}{{ x }}{% endfor %}"
    ),
    "undefined names": "{{ none_such }}|{{ messages[0].x }}|{{ 'x' if none_such else 'y' }}|{{ documents }}{{ tools }}",
    "whitespace": "  {% if true %}\n  yes\n  {% endif %}\n\n{%- if true %}  no{% endif %}\n",
    "dict": "{{ dict(a=1, b=2) | tojson }}{{ {'k': [1, none, true]} | tojson }}{{ messages[0].items() | list }}",
}


def render(source: str, **variables: Any) -> str:
    return ChatTemplate({"default": source}).render(variables)


def reference(source: str, variables: Mapping[str, Any]) -> str:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    named = dict(variables)
    messages = named.pop("messages")
    rendered, _ = utils.render_jinja_template([messages], chat_template=source, **named)
    return str(rendered[0])


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_rendering_equals_that_of_transformers(name: str, tools: Any) -> None:
    variables = {"messages": CHAT, "tools": tools, "documents": None, "bos_token": "<s>", "add_generation_prompt": True}

    assert render(TEMPLATES[name], **variables) == reference(TEMPLATES[name], variables)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_worker_renders_the_same(name: str) -> None:
    here, there = ChatTemplate({"default": TEMPLATES[name]}), WorkerRenderer({"default": TEMPLATES[name]})

    for tools in (None, TOOLS):
        variables = {"messages": CHAT, "tools": tools, "bos_token": "<s>", "add_generation_prompt": True}
        assert there.render(variables) == here.render(variables)
    there.close()


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must\n alternate') }}",
        "{{ raise_exception('x' * 5000) }}",
        "{{ messages + 1 }}",
        "{{ messages[0].update(a=1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for a in range(9999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% macro deeper(n) %}{{ deeper(n + 1) }}{% endmacro %}{{ deeper(0) }}",
    ],
)
def test_a_worker_refuses_with_the_same_words_and_is_kept(source: str) -> None:
    words = []
    there = WorkerRenderer({"default": "{% if fine %}fine{% else %}" + source + "{% endif %}"})
    assert there.render({"fine": True}) == "fine"
    (worker,) = there._pool._idle
    for renderer in (ChatTemplate({"default": source}), there):
        with pytest.raises(InvalidRequestError) as caught:
            renderer.render({"messages": CHAT})
        words.append((caught.value.message, caught.value.param, caught.value.code))

    assert words[0] == words[1]
    assert there.render({"fine": True}) == "fine"
    assert there._pool._idle == [worker]
    there.close()


def test_the_date_comes_from_the_clock() -> None:
    template = ChatTemplate({"default": "{{ strftime_now('%d %b %Y') }}"}, now=lambda: datetime(2024, 7, 26))

    assert template.render({}) == "26 Jul 2024"


def test_raise_exception_refuses_the_messages_with_the_templates_own_words() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must\n alternate') }}")

    assert caught.value.param == "messages"


def test_long_words_of_a_template_are_cut() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render("{{ raise_exception('x' * 5000) }}")

    assert len(caught.value.message) < 250


@pytest.mark.parametrize(
    "source",
    ["{{ messages + 1 }}", "{{ messages[0].a.b.c }}", "{{ 1 / 0 }}", "{{ messages | tojson(indent=messages) }}"],
)
def test_a_template_that_fails_on_a_request_refuses_it_without_naming_classes(source: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render(source, messages=[{"role": "user"}])

    assert caught.value.param == "messages"
    assert "0x" not in caught.value.message
    assert "Error" not in caught.value.message


def test_a_syntax_error_is_found_when_the_template_is_loaded() -> None:
    with pytest.raises(CheckpointError, match="'default' has a syntax error in line 2"):
        ChatTemplate({"default": "{% if x %}\n{% endfor %}"})


def test_a_template_nested_too_deeply_is_found_when_it_is_loaded() -> None:
    with pytest.raises(CheckpointError, match="nested too deeply"):
        ChatTemplate({"default": "{% if x %}" * 5_000 + "{% endif %}" * 5_000})


def test_endless_output_is_cut_off() -> None:
    source = "{% for a in range(99999) %}{% for b in range(99999) %}{{ text }}{% endfor %}{% endfor %}"

    with pytest.raises(InvalidRequestError, match="more than 8388608 characters"):
        render(source, text="x" * 100_000)


def test_a_template_for_tools_is_used_when_there_are_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools", "rag": "documents"})

    assert template.render({"tools": None}) == "plain"
    assert template.render({"tools": TOOLS}) == "tools"


def test_several_templates_need_a_default() -> None:
    with pytest.raises(CheckpointError, match="'rag', 'tool_use'"):
        ChatTemplate({"tool_use": "", "rag": ""})


def test_a_template_can_not_change_what_it_is_given() -> None:
    messages = [{"role": "user", "content": "x"}]
    before = json.dumps(messages)

    for source in ("{{ messages.append(1) }}", "{{ messages[0].update(a=1) }}", "{{ messages[0].pop('role') }}"):
        with pytest.raises(InvalidRequestError, match="unsafe"):
            render(source, messages=messages)

    assert json.dumps(messages) == before
