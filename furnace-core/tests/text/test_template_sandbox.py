"""Templates come with models of strangers: none may reach Python behind the sandbox (T74)."""

from __future__ import annotations

import pytest

from furnace.contracts import ChatInput, InvalidRequestError, Message
from furnace.text import ChatTemplate, TextPipeline, Tokenizer

# Each prints something of Python's inside if it gets there: a class, a module, a global.
ESCAPES = [
    "{{ cycler.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ namespace().__class__ }}",
    "{{ namespace(__class__=1).__class__.__mro__ }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns.__class__ }}",
    "{% set ns = namespace() %}{% set ns._Namespace__attrs = {} %}{{ ns._Namespace__attrs }}",
    "{{ ''|attr('__class__') }}",
    "{{ ''|attr('__cla' ~ 'ss__')|attr('__mro__') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}",
    "{{ ()['__cla' + 'ss__'] }}",
    "{{ [''] | map(attribute='__class__') | list }}",
    "{{ [''] | map('attr', '__class__') | list }}",
    "{{ [''] | groupby('__class__') | list }}",
    "{{ [{'a': ''}] | map(attribute='a.__class__') | list }}",
    "{{ [''] | selectattr('__class__') | list | length and ''.__class__ }}",
    "{{ [''] | sort(attribute='__class__') | first and ''.__class__ }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ '{0.__class__.__mro__[1]}'.format('') }}",
    "{{ '{x.__class__}'.format_map({'x': ''}) }}",
    "{{ '{0.__class__}' | format('') | string and '{a.__class__}'.format(a='') }}",
    "{% set f = '{0.__class__}'.format %}{{ f('') }}",
    "{{ ['{0.__class__}'] | map('format', '') | list and ''.format.__self__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception.__closure__ }}",
    "{{ strftime_now.__closure__ }}",
    "{{ strftime_now.__code__.co_consts }}",
    "{{ dict.__base__ }}",
    "{{ dict.mro() }}",
    "{{ range.mro() }}",
    "{{ range.__doc__ }}",
    "{{ namespace.mro() }}",
    "{{ (1).__class__ }}",
    "{{ none.__class__ }}",
    "{{ undefined_name.__class__ }}",
    "{{ undefined_name._undefined_exception }}",
    "{{ undefined_name._fail_with_undefined_error.__globals__ }}",
    "{% for x in [1] %}{{ loop.__class__ }}{% endfor %}",
    "{% for x in [1] %}{{ loop._iterator }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m.__class__ }}",
    "{% macro m() %}{% endmacro %}{{ m._environment }}",
    "{% macro m() %}{{ caller._func.__globals__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "{{ messages.__class__ }}",
    "{{ messages[0].items.__self__ }}",
    "{{ messages[0].__getattribute__('keys') }}",
    "{{ messages | attr('append') and messages.append(1) }}",
    "{{ (messages | batch(1) | list).__class__ }}",
    "{{ (messages | map('upper')).gi_frame }}",
    "{{ (messages | map('upper')).gi_code }}",
    "{{ lipsum.__globals__ }}",
    "{{ lipsum() }}",
    "{{ get_flashed_messages.__globals__ }}",
    "{{ url_for.__globals__ }}",
    "{{ config.__class__ }}",
    "{{ request.application.__globals__ }}",
    "{% import 'os' as os %}{{ os }}",
    "{% include '/etc/passwd' %}",
    "{% extends '/etc/passwd' %}",
    "{% from 'os' import popen %}{{ popen }}",
    "{{ ''.encode().__class__ }}",
    "{{ 'x'.join.__self__.__class__ }}",
    "{{ (0.5).fromhex.__self__ }}",
    "{{ ''.maketrans.__self__ }}",
    "{{ messages | xmlattr }}{{ ''.__class__ }}",
    "{{ messages | pprint and ''.__reduce__() }}",
    "{{ messages.__reduce_ex__(2) }}",
    "{{ ''.__init_subclass__() }}",
    "{{ ''.__dir__() }}",
]

# What is left of some when every forbidden attribute is undefined.
HARMLESS = {"", "[]", "0", "1", "[Undefined]", "[(Undefined, [''])]"}


@pytest.mark.parametrize("source", ESCAPES)
def test_an_escape_is_refused_or_yields_nothing(source: str) -> None:
    template = ChatTemplate({"default": source})

    try:
        text = template.render({"messages": [{"role": "user", "content": "x"}]})
    except InvalidRequestError as error:
        refusal: InvalidRequestError | None = error
    else:
        refusal = None
        assert text.strip() in HARMLESS, text

    assert refusal is None or (refusal.param == "messages" and len(refusal.message) < 300)


def test_a_hostile_template_of_a_model_refuses_requests_and_leaves_completions_alone(byte_level: Tokenizer) -> None:
    pipeline = TextPipeline(byte_level, ChatTemplate({"default": "{{ cycler.__init__.__globals__ }}"}))

    with pytest.raises(InvalidRequestError, match="unsafe"):
        pipeline.encode_chat(ChatInput([Message("user", "hi")]))

    assert pipeline.decode(pipeline.encode_text("hi")) == "hi"


def test_names_and_texts_of_a_request_are_no_templates(byte_level: Tokenizer) -> None:
    pipeline = TextPipeline(byte_level, ChatTemplate({"default": "{{ messages[0].role }}:{{ messages[0].content }}"}))

    ids = pipeline.encode_chat(ChatInput([Message("{{ 1 + 1 }}", "{{ cycler.__init__ }}{% raw %}")]))

    assert pipeline.decode(ids) == "{{ 1 + 1 }}:{{ cycler.__init__ }}{% raw %}"
