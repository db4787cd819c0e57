"""Renders chat templates, as transformers does, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Protocol

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from furnace.checkpoint.errors import CheckpointError
from furnace.contracts.errors import QUOTE_LIMIT, InvalidRequestError, quote

__all__ = ["MAX_RENDERED_CHARS", "ChatTemplate", "Renderer"]

MAX_RENDERED_CHARS = 8 * 1024 * 1024
"""Longest text that a template may make."""

_PARAM = "messages"


class Renderer(Protocol):
    """Turns the variables of one request into prompt text.

    Called from several threads at once. A ``ChatTemplate`` is one; so is whatever runs a template elsewhere.
    """

    def render(self, variables: Mapping[str, object]) -> str:
        """The rendered text.

        Args:
            variables: plain data (what JSON can say): messages, tools, documents and so on; not changed.

        Raises:
            InvalidRequestError: the template refuses the request or fails on it (``param="messages"``).
        """


class ChatTemplate:
    """A model's chat template, or its several named ones. Immutable.

    It sees what templates see in transformers: ``raise_exception``, ``strftime_now``, ``tojson`` that does not escape
    HTML, ``break`` and ``continue``, and ``{% generation %}`` blocks. The sandbox stops code, not memory or time: run
    templates of strangers in a process of their own.

    Args:
        sources: template text by name. A request with tools uses ``tool_use`` if there is one, all others
            ``default``; a single template may have any name.
        now: the clock behind ``strftime_now``.

    Raises:
        CheckpointError: a template has a syntax error, or no template is the default.
    """

    def __init__(self, sources: Mapping[str, str], *, now: Callable[[], datetime] = datetime.now) -> None:
        environment = _environment(now)
        self.sources: Mapping[str, str] = dict(sources)
        self._templates = {name: _compiled(environment, name, source) for name, source in sources.items()}
        if len(self._templates) == 1:
            self._default = next(iter(self._templates.values()))
        elif "default" in self._templates:
            self._default = self._templates["default"]
        else:
            raise CheckpointError(f"none of the chat templates {quote(sorted(sources))} is named 'default'")

    def render(self, variables: Mapping[str, object]) -> str:
        """See ``Renderer.render``."""
        template = self._default
        if variables.get("tools") is not None:
            template = self._templates.get("tool_use", template)
        parts: list[str] = []
        size = 0
        try:
            for part in template.generate(variables):
                size += len(part)
                if size > MAX_RENDERED_CHARS:
                    raise InvalidRequestError(
                        f"the chat template made more than {MAX_RENDERED_CHARS} characters", param=_PARAM
                    )
                parts.append(part)
        except InvalidRequestError:
            raise
        except jinja2.exceptions.SecurityError as error:
            raise InvalidRequestError(
                f"the chat template tried something unsafe: {_one_line(error)}", param=_PARAM
            ) from error
        except jinja2.exceptions.TemplateError as error:
            raise InvalidRequestError(f"the chat template refused: {_one_line(error)}", param=_PARAM) from error
        except Exception as error:
            # Whatever Python raises inside a template is about the template and the request. Its text may name
            # classes or addresses of ours, so it stays in the cause.
            raise InvalidRequestError("the chat template can't render these messages", param=_PARAM) from error
        return "".join(parts)


class _SafeEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox without names that start with an underscore, and without classes to call or look into."""

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        return not (attr.startswith("_") or isinstance(obj, type)) and super().is_safe_attribute(obj, attr, value)

    def is_safe_callable(self, obj: object) -> bool:
        allowed = not isinstance(obj, type) or obj in _CALLABLE_CLASSES
        return allowed and super().is_safe_callable(obj)


class _Namespace(jinja2.utils.Namespace):
    """``namespace()`` for templates: holds no name that starts with an underscore."""

    def __setitem__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace can't hold {quote(name)}")
        super().__setitem__(name, value)


_CALLABLE_CLASSES = frozenset({range, _Namespace, jinja2.utils.Cycler, jinja2.utils.Joiner})


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; here it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration of the attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment(now: Callable[[], datetime]) -> jinja2.Environment:
    environment = _SafeEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: now().strftime(format)
    environment.globals["dict"] = _dict
    environment.globals["namespace"] = _Namespace
    # Makes text of any length out of nothing; no chat template has a use for it.
    del environment.globals["lipsum"]
    return environment


def _compiled(environment: jinja2.Environment, name: str, source: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except jinja2.exceptions.TemplateSyntaxError as error:
        raise CheckpointError(
            f"the chat template {quote(name)} has a syntax error in line {error.lineno}: {_one_line(error)}"
        ) from error
    except (RecursionError, SyntaxError, MemoryError) as error:
        raise CheckpointError(f"the chat template {quote(name)} is nested too deeply to compile") from error


def _raise_exception(message: object) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
    return dict(*args, **kwargs)


def _one_line(error: jinja2.exceptions.TemplateError) -> str:
    text = " ".join((error.message or "no reason given")[: 2 * QUOTE_LIMIT].split())
    return text if len(text) <= QUOTE_LIMIT else text[: QUOTE_LIMIT - 1] + "…"
