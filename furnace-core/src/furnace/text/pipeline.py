"""From requests to token ids and from token ids to text, for one model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from furnace.checkpoint.errors import CheckpointError
from furnace.contracts.capabilities import OutputFormat
from furnace.contracts.errors import InvalidRequestError, quote
from furnace.contracts.request import ChatInput
from furnace.text.chat_template import ChatTemplate, Renderer
from furnace.text.detokenizer import Detokenizer
from furnace.text.gguf_tokenizer import tokenizer_from_gguf
from furnace.text.template_input import ContentForm, FinalMessageTag, template_variables
from furnace.text.template_worker import WorkerRenderer
from furnace.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from furnace.checkpoint import Checkpoint

__all__ = ["TextPipeline"]

_TEMPLATE_KEY = "tokenizer.chat_template"
# How many of a prompt's last tokens are looked at for an open reasoning section.
_REASONING_TAIL = 2048


class TextPipeline:
    """The text side of one model: chat template, tokenizer, detokenizer, end tokens.

    All methods may be called from several threads at once; the encoding ones take about a second for a megabyte and
    belong in a worker thread, detokenizers are cheap. Nothing about it changes but the processes of its renderer, which
    the first chat starts and ``close`` ends.

    Args:
        tokenizer: the model's tokenizer.
        renderer: renders the model's chat template, or None if it has none. It is closed with the pipeline.
        output_format: how to read the model's output, or None for plain text.
        chat_adds_bos: put BOS before a rendered chat that does not start with it. GGUF files ask for that; with a
            ``tokenizer.json`` it is left to the template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        renderer: Renderer | None = None,
        *,
        output_format: OutputFormat | None = None,
        chat_adds_bos: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.output_format = output_format
        self._renderer = renderer
        self._chat_adds_bos = chat_adds_bos
        # Found by the first chat: rendering starts a process, which is not for those who never chat.
        self._form: ContentForm | None = None

    @classmethod
    def from_files(
        cls,
        tokenizer_json: str | PathLike[str],
        tokenizer_config: str | PathLike[str] | None = None,
        chat_template: str | PathLike[str] | None = None,
        generation_config: str | PathLike[str] | None = None,
        *,
        isolate: bool = True,
    ) -> TextPipeline:
        """The pipeline of a model in Hugging Face's layout. Reads files: call it in a worker thread.

        Args:
            tokenizer_json: path of ``tokenizer.json``.
            tokenizer_config: path of ``tokenizer_config.json``: names special tokens, may hold the chat template.
            chat_template: path of ``chat_template.jinja``: replaces the template in ``tokenizer_config.json``.
            generation_config: path of ``generation_config.json``: names end tokens.
            isolate: render the chat template in a process of its own (``WorkerRenderer``); False is for a template that
                you trust with this process's time and memory.

        Raises:
            CheckpointError: a file is missing, damaged or not supported.
        """
        template = None if chat_template is None else _read(chat_template)
        return cls._from_layout(tokenizer_json, tokenizer_config, template, generation_config, isolate)

    @classmethod
    def _from_layout(
        cls,
        tokenizer_json: str | PathLike[str],
        tokenizer_config: str | PathLike[str] | None,
        chat_template: str | None,
        generation_config: str | PathLike[str] | None,
        isolate: bool,
    ) -> TextPipeline:
        """As ``from_files``, with the template's text."""
        config = {} if tokenizer_config is None else _read_object(tokenizer_config)
        generation = {} if generation_config is None else _read_object(generation_config)
        named = _named_tokens(config)
        ends = _token_ids(generation.get("eos_token_id"))
        bare = Tokenizer.from_json(_read(tokenizer_json), named_tokens=named, eos_token_ids=ends)
        templates = _named_templates(config.get("chat_template")) if chat_template is None else {"": chat_template}
        return cls._assembled(bare, templates, chat_adds_bos=False, isolate=isolate)

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, object], *, chat_template: str | None = None, isolate: bool = True
    ) -> TextPipeline:
        """The pipeline that a GGUF file's metadata describes.

        Args:
            metadata: all keys of the file, arrays as sequences.
            chat_template: template text that replaces the file's own.
            isolate: as in ``from_files``.

        Raises:
            CheckpointError: a key is missing or wrong, or the tokenizer is of an unknown kind.
        """
        templates = {"": chat_template} if chat_template is not None else _gguf_templates(metadata)
        return cls._assembled(tokenizer_from_gguf(metadata), templates, chat_adds_bos=True, isolate=isolate)

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, *, chat_template: str | None = None, isolate: bool = True
    ) -> TextPipeline:
        """The pipeline of an open checkpoint, from its GGUF metadata or the text files beside its weights.

        Args:
            checkpoint: may be closed afterwards.
            chat_template: template text that replaces the model's own.
            isolate: as in ``from_files``.

        Raises:
            CheckpointError: as ``from_files`` and ``from_gguf``; also when there is no ``tokenizer.json``.
        """
        if checkpoint.gguf_metadata is not None:
            return cls.from_gguf(checkpoint.gguf_metadata, chat_template=chat_template, isolate=isolate)
        return cls._from_text_files(checkpoint.text_file, checkpoint.name, chat_template, isolate)

    @classmethod
    def from_directory(
        cls, directory: str | PathLike[str], *, chat_template: str | None = None, isolate: bool = True
    ) -> TextPipeline:
        """The pipeline of the text files in a directory, whatever its weights are.

        Args:
            directory: has ``tokenizer.json``; may have the other files of ``from_files``, under their usual names.
            chat_template: template text that replaces the model's own.
            isolate: as in ``from_files``.

        Raises:
            CheckpointError: as ``from_files``; also when there is no ``tokenizer.json``.
        """

        def text_file(name: str) -> Path | None:
            path = Path(directory, name)
            return path if path.is_file() else None

        return cls._from_text_files(text_file, str(directory), chat_template, isolate)

    @classmethod
    def _from_text_files(
        cls, text_file: Callable[[str], Path | None], name: str, chat_template: str | None, isolate: bool
    ) -> TextPipeline:
        tokenizer_json = text_file("tokenizer.json")
        if tokenizer_json is None:
            raise CheckpointError(f"{quote(name)} has no tokenizer.json")
        template_file = text_file("chat_template.jinja")
        if chat_template is None and template_file is not None:
            chat_template = _read(template_file)
        config, generation = text_file("tokenizer_config.json"), text_file("generation_config.json")
        return cls._from_layout(tokenizer_json, config, chat_template, generation, isolate)

    @classmethod
    def _assembled(
        cls, tokenizer: Tokenizer, templates: Mapping[str, str], *, chat_adds_bos: bool, isolate: bool
    ) -> TextPipeline:
        renderer: Renderer | None = None
        if templates:
            renderer = WorkerRenderer(templates) if isolate else ChatTemplate(templates)
        form = _output_format("\n".join(templates.values()))
        return cls(tokenizer, renderer, output_format=form, chat_adds_bos=chat_adds_bos)

    def close(self) -> None:
        """End what rendering runs: worker processes; renderings under way fail. Idempotent, from any thread.

        The pipeline can still be used, also by another engine: its next chat starts a worker again. Without ``close``
        they end with the process, and when the pipeline is garbage.
        """
        if self._renderer is not None:
            self._renderer.close()

    @property
    def has_chat_template(self) -> bool:
        """Whether ``encode_chat`` works."""
        return self._renderer is not None

    @property
    def vocab_size(self) -> int:
        """Number of token ids, from 0; the model's own vocabulary may be padded beyond it."""
        return self.tokenizer.vocab_size

    @property
    def missing_token_ids(self) -> frozenset[int]:
        """Ids below ``vocab_size`` that no token has; to be masked like those above it."""
        return self.tokenizer.missing_token_ids

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end the output: of ``generation_config.json`` and the tokenizer, or of the GGUF file."""
        return self.tokenizer.eos_token_ids

    @property
    def control_token_ids(self) -> frozenset[int]:
        """Ids that text of a request never becomes, and that don't show in the output."""
        return self.tokenizer.control_token_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; see ``Tokenizer.token_bytes``."""
        return self.tokenizer.token_bytes(token_id)

    def encode_chat(self, chat: ChatInput, tools: str | None = None) -> list[int]:
        """Token ids of a chat, through the chat template. Text in the chat never becomes a control token.

        With ``continue_final_message`` the prompt ends inside the last message, and ``add_generation_prompt`` is
        ignored.

        Args:
            chat: the messages.
            tools: JSON text of the list of tools, or None.

        Raises:
            InvalidRequestError: the template refuses the chat or fails on it, some of its JSON text is damaged, or
                the model has no chat template; ``param`` names what is at fault.
            EngineUnavailableError: the template can't be rendered now.
        """
        if self._renderer is None:
            raise InvalidRequestError("this model has no chat template: send a completion instead", param="messages")
        if self._form is None:
            # Two threads may both find it, and find the same.
            self._form = ContentForm.probed(self._renderer, self.tokenizer.named_tokens)
        marker = self.tokenizer.marker()
        variables = template_variables(chat, tools, self.tokenizer.named_tokens, self._form, marker)
        if chat.continue_final_message:
            tag = FinalMessageTag()
            if not chat.messages:
                raise InvalidRequestError("there is no message to continue", param="messages")
            tag.put(variables["messages"][-1])
            rendered = tag.cut(self._renderer.render(variables))
        else:
            rendered = self._renderer.render(variables)
        ids = self.tokenizer.encode_rendered(rendered, marker)
        return self.tokenizer.with_prefix(ids) if self._chat_adds_bos else ids

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a raw prompt: control tokens are parsed, BOS is put first once.

        Raises:
            InvalidRequestError: the text is not valid Unicode (``param="prompt"``).
        """
        return self.tokenizer.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, control tokens left out."""
        return self.tokenizer.decode(ids)

    def detokenizer(self, keep_tokens: Iterable[str] = (), *, context: Sequence[int] = ()) -> Detokenizer:
        """A detokenizer for one sequence; see ``Tokenizer.detokenizer``.

        Args:
            keep_tokens: control tokens that give text all the same (``GenerateRequest.keep_tokens``).
            context: the prompt's ids if the output continues its text: for a completion or a continued message.
        """
        return self.tokenizer.detokenizer(keep_tokens, context=context)

    def prompt_in_reasoning(self, ids: Sequence[int]) -> bool:
        """Whether a prompt ends inside a reasoning section (``Started.in_reasoning``).

        Looks at the text behind the last control token, so that what a user wrote in an earlier turn can't open one;
        in a model without control tokens the prompt must end with the opening itself.
        """
        form = self.output_format
        if form is None or form.reasoning_start is None or form.reasoning_end is None:
            return False
        marks = {self.tokenizer.token_id(form.reasoning_start), self.tokenizer.token_id(form.reasoning_end)}
        boundaries = self.control_token_ids - marks
        tail = list(ids[-_REASONING_TAIL:])
        last = max((index for index, token_id in enumerate(tail) if token_id in boundaries), default=None)
        detokenizer = self.detokenizer((form.reasoning_start, form.reasoning_end), context=tail)
        turn = tail if last is None else tail[last + 1 :]
        text = "".join([*map(detokenizer.push, turn), detokenizer.flush()])
        if last is None:
            return text.rstrip().endswith(form.reasoning_start)
        return text.rfind(form.reasoning_start) > text.rfind(form.reasoning_end)


def _output_format(template: str) -> OutputFormat | None:
    """What a template's text says about the model's output.

    ``<tool_call>`` around a JSON object is Hermes' format, which Qwen's templates write too.
    """
    reasons = "</think>" in template
    calls = "<tool_call>" in template
    if not (reasons or calls):
        return None
    return OutputFormat(
        tool_parser="hermes" if calls else None,
        reasoning_start="<think>" if reasons else None,
        reasoning_end="</think>" if reasons else None,
    )


def _gguf_templates(metadata: Mapping[str, object]) -> dict[str, str]:
    default = metadata.get(_TEMPLATE_KEY)
    if not isinstance(default, str):
        return {}
    tool_use = metadata.get(f"{_TEMPLATE_KEY}.tool_use")
    return {"default": default} | ({"tool_use": tool_use} if isinstance(tool_use, str) else {})


def _named_templates(value: object) -> dict[str, str]:
    """One template, or several as a list of name and template, or as an object."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"": value}
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        value = {item.get("name"): item.get("template") for item in value}
    if isinstance(value, dict) and value and all(isinstance(text, str) for pair in value.items() for text in pair):
        return value
    raise CheckpointError("chat_template must be a text, or a list of objects with name and template")


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The ``..._token`` entries of a ``tokenizer_config.json``, each a string or an object with its content."""
    named: dict[str, str] = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str) and content:
            named[name] = content
    return named


def _token_ids(value: object) -> frozenset[int]:
    items = value if isinstance(value, list) else [value]
    return frozenset(item for item in items if isinstance(item, int))


def _read(path: str | PathLike[str]) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"can't read {Path(path).name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"can't read {Path(path).name}: it is not UTF-8 text") from error


def _read_object(path: str | PathLike[str]) -> dict[str, Any]:
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{Path(path).name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{Path(path).name} must hold a JSON object")
    return value
