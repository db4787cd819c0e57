"""``LlmEngine``s that send wrong text."""

from __future__ import annotations

import numpy as np

from furnace.contracts import Event, GenerateRequest, InvalidRequestError, Text
from furnace.runtime.text_output import TextOutput
from furnace.testing.wrong.little_engine import LittleEngine
from furnace.testing.wrong.little_job import LittleJob
from furnace.testing.wrong.registry import caught_by
from furnace.text import TextPipeline

__all__: list[str] = []


class _AllAtOnce(LittleJob):
    def piece(self, text: str) -> list[Event]:
        self.held = getattr(self, "held", "") + text
        return [Text(self.held, self.tokens)] if self.finished else []


@caught_by("test_text_comes_as_it_is_generated")
class TextAtTheEnd(LittleEngine):
    """Sends all text at the end."""

    job_type = _AllAtOnce


class _Stripped(LittleJob):
    def piece(self, text: str) -> list[Event]:
        return super().piece(text.strip(" "))


@caught_by("test_the_text_is_that_of_the_tokens")
class SpacesLost(LittleEngine):
    """Strips the spaces of every piece."""

    job_type = _Stripped


class _Halves(LittleJob):
    def piece(self, text: str) -> list[Event]:
        (event,) = super().piece(text)
        assert isinstance(event, Text)  # noqa: S101 - for the type checker
        data = b"".join(map(self.pipeline.token_bytes, event.tokens))
        return [Text(data.decode(errors="surrogateescape"), event.tokens)]


@caught_by("test_characters_are_never_cut")
class HalfCharacters(LittleEngine):
    """Sends bytes that are no character as halves of one."""

    job_type = _Halves


class _NumpyIds(LittleJob):
    def piece(self, text: str) -> list[Event]:
        (event,) = super().piece(text)
        assert isinstance(event, Text)  # noqa: S101 - for the type checker
        return [Text(event.text, list(np.array(event.tokens)))]


@caught_by("test_what_is_sent_survives_msgpack")
class NumpyTokenIds(LittleEngine):
    """Sends token ids as numpy has them, which can't cross to another process."""

    job_type = _NumpyIds


class _NoRest(TextOutput):
    def flush(self) -> str:
        return ""


class _RestLost(LittleJob):
    def __init__(self, request: GenerateRequest, prompt: list[int], max_tokens: int, pipeline: TextPipeline) -> None:
        super().__init__(request, prompt, max_tokens, pipeline)
        self.text = _NoRest(pipeline, request, prompt)


@caught_by("test_a_stop_string_that_never_comes_changes_nothing")
class HeldTextLost(LittleEngine):
    """Drops the text at the end that it had held back for a stop string."""

    job_type = _RestLost


class _FirstStop(LittleJob):
    def __init__(self, request: GenerateRequest, prompt: list[int], max_tokens: int, pipeline: TextPipeline) -> None:
        super().__init__(request, prompt, max_tokens, pipeline)
        del request.stop[1:]
        self.text = TextOutput(pipeline, request, prompt)


@caught_by("test_of_several_stop_strings_the_first_that_is_complete_wins")
class OneStopString(LittleEngine):
    """Looks only for the first of several stop strings."""

    job_type = _FirstStop


@caught_by("test_as_many_stop_strings_as_declared_work")
class FewStopStrings(LittleEngine):
    """Declares 16 stop strings, but refuses more than 4."""

    def check(self, request: GenerateRequest) -> None:
        super().check(request)
        if len(request.stop) > 4:
            raise InvalidRequestError("There are too many stop strings.", param="stop")


class _Odd(LittleJob):
    def __init__(self, request: GenerateRequest, prompt: list[int], max_tokens: int, pipeline: TextPipeline) -> None:
        if "\x00" in pipeline.decode(prompt):
            raise ValueError("embedded null character")
        super().__init__(request, prompt, max_tokens, pipeline)


@caught_by("test_odd_requests_end_alone")
class OddTextCrashes(LittleEngine):
    """Raises a ValueError for a prompt with a NUL in it."""

    job_type = _Odd
