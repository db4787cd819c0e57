"""Compiles and renders chat templates in jinja2's sandbox, as transformers does.

Loads only jinja2 and the standard library: the worker process imports it, and has to start quickly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

__all__ = [
    "MAX_RENDERED_CHARS",
    "OUT_OF_MEMORY",
    "SandboxedTemplates",
    "TemplateRefusedError",
    "TemplateSourceError",
    "check_syntax",
]

MAX_RENDERED_CHARS = 8 * 1024 * 1024
"""Longest text that a template may make."""

OUT_OF_MEMORY = "the chat template needs more memory for these messages than it may use"
"""What a client is told then."""

# Ten times the longest template of a known model; jinja2 parses so much in a second or two.
_MAX_SOURCE_CHARS = 512 * 1024
# Longest text that a template may put into an error.
_WORDS_LIMIT = 200


class TemplateSourceError(Exception):
    """The text of a template can't be used, whatever the request; the message is one line for the operator."""


class TemplateRefusedError(Exception):
    """A template refuses a request or fails on it; the message is one line for the client.

    Attributes:
        out_of_memory: it failed because there was no more memory.
    """

    def __init__(self, message: str, *, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.out_of_memory = out_of_memory


class SandboxedTemplates:
    """The templates of one model, compiled. Immutable; ``render`` may be called from several threads at once.

    Args:
        sources: template text by name; see ``ChatTemplate``.
        now: the clock behind ``strftime_now``.
        max_chars: longest text that ``render`` makes.

    Raises:
        TemplateSourceError: a template does not compile, they are too long, or none is the default.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
        max_chars: int = MAX_RENDERED_CHARS,
    ) -> None:
        environment = _environment(now)
        default = _default(sources)
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            with _named(name):
                self._templates[name] = environment.from_string(source)
        self._default = self._templates[default]
        self._max_chars = max_chars

    def render(self, variables: Mapping[str, object]) -> str:
        """The rendered text.

        Raises:
            TemplateRefusedError: the template refuses the request or fails on it.
        """
        template = self._default
        if variables.get("tools") is not None:
            template = self._templates.get("tool_use", template)
        parts: list[str] = []
        size = 0
        try:
            for part in template.generate(variables):
                size += len(part)
                if size > self._max_chars:
                    raise TemplateRefusedError(f"the chat template made more than {self._max_chars} characters")
                parts.append(part)
            return "".join(parts)
        except TemplateRefusedError:
            raise
        except jinja2.exceptions.SecurityError as error:
            raise TemplateRefusedError(f"the chat template tried something unsafe: {_one_line(error)}") from error
        except jinja2.exceptions.TemplateError as error:
            raise TemplateRefusedError(f"the chat template refused: {_one_line(error)}") from error
        except MemoryError as error:
            raise TemplateRefusedError(OUT_OF_MEMORY, out_of_memory=True) from error
        except Exception as error:
            # Whatever Python raises inside a template is about the template and the request. Its text may name
            # classes or addresses of ours, so it stays in the cause.
            raise TemplateRefusedError("the chat template can't render these messages") from error


def check_syntax(sources: Mapping[str, str]) -> None:
    """Find what is wrong with templates without running any of their code.

    Compiling is not as harmless: jinja2 computes constant expressions then.

    Raises:
        TemplateSourceError: a template has a syntax error, they are too long, or none is the default.
    """
    _default(sources)
    environment = _environment(datetime.now)
    for name, source in sources.items():
        with _named(name):
            environment.parse(source)


def _default(sources: Mapping[str, str]) -> str:
    if sum(map(len, sources.values())) > _MAX_SOURCE_CHARS:
        raise TemplateSourceError(f"the chat template has more than {_MAX_SOURCE_CHARS} characters")
    if len(sources) == 1:
        return next(iter(sources))
    if "default" not in sources:
        names = repr(sorted(sources))[:_WORDS_LIMIT]
        raise TemplateSourceError(f"none of the chat templates {names} is named 'default'")
    return "default"


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
            raise jinja2.exceptions.SecurityError(f"a namespace can't hold {name[:_WORDS_LIMIT]!r}")
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


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Say of what goes wrong inside which template it is about."""
    subject = f"the chat template {name[:_WORDS_LIMIT]!r}"
    try:
        yield
    except jinja2.exceptions.TemplateSyntaxError as error:
        raise TemplateSourceError(f"{subject} has a syntax error in line {error.lineno}: {_one_line(error)}") from error
    except (RecursionError, SyntaxError, MemoryError) as error:
        raise TemplateSourceError(f"{subject} is nested too deeply to compile") from error
    except Exception as error:
        # A number with too many digits, for one.
        raise TemplateSourceError(f"{subject} can't be compiled") from error


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
    text = " ".join((error.message or "no reason given")[: 2 * _WORDS_LIMIT].split())
    return text if len(text) <= _WORDS_LIMIT else text[: _WORDS_LIMIT - 1] + "…"
