"""Chat templates, rendered in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Protocol

from furnace.checkpoint.errors import CheckpointError
from furnace.contracts.errors import InvalidRequestError
from furnace.text.template_sandbox import (
    MAX_RENDERED_CHARS,
    SandboxedTemplates,
    TemplateRefusedError,
    TemplateSourceError,
)

__all__ = ["MAX_RENDERED_CHARS", "PARAM", "ChatTemplate", "Renderer", "TemplateKilledError"]

PARAM = "messages"
"""The request field that a template's refusal is about."""


class TemplateKilledError(InvalidRequestError):
    """A rendering was stopped: it took too long or too much memory, or broke the process that it ran in (400).

    It says nothing about what the template can render: the next time it may.
    """


class Renderer(Protocol):
    """Turns the variables of one request into prompt text.

    Called from several threads at once. ``ChatTemplate`` renders in this process, ``WorkerRenderer`` in another.
    """

    def render(self, variables: Mapping[str, object]) -> str:
        """The rendered text.

        Args:
            variables: plain data (what JSON can say): messages, tools, documents and so on; not changed.

        Raises:
            InvalidRequestError: the template refuses the request or fails on it (``param="messages"``);
                ``TemplateKilledError`` if it was stopped.
            EngineUnavailableError: rendering is not possible now.
        """

    def close(self) -> None:
        """Free what rendering holds, processes above all. Called more than once, and before further renders too."""


class ChatTemplate:
    """A model's chat template, or its several named ones. Immutable.

    It sees what templates see in transformers: ``raise_exception``, ``strftime_now``, ``tojson`` that does not escape
    HTML, ``break`` and ``continue``, and ``{% generation %}`` blocks. The sandbox stops code, not memory or time:
    ``WorkerRenderer`` is for templates of strangers.

    Args:
        sources: template text by name. A request with tools uses ``tool_use`` if there is one, all others
            ``default``; a single template may have any name.
        now: the clock behind ``strftime_now``.

    Raises:
        CheckpointError: a template has a syntax error, or no template is the default.
    """

    def __init__(self, sources: Mapping[str, str], *, now: Callable[[], datetime] = datetime.now) -> None:
        self.sources: Mapping[str, str] = dict(sources)
        try:
            self._templates = SandboxedTemplates(self.sources, now=now)
        except TemplateSourceError as error:
            raise CheckpointError(str(error)) from error

    def render(self, variables: Mapping[str, object]) -> str:
        """See ``Renderer.render``."""
        try:
            return self._templates.render(variables)
        except TemplateRefusedError as error:
            raise InvalidRequestError(error.message, param=PARAM) from error

    def close(self) -> None:
        """See ``Renderer.close``: there is nothing to free."""
