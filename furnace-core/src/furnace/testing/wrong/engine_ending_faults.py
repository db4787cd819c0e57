"""``LlmEngine``s whose outputs end wrongly, or say wrongly how they ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from furnace.contracts import Event, FinishReason, GenerateRequest, Text, Usage
from furnace.runtime.text_output import TextOutput
from furnace.testing.wrong.little_engine import LittleEngine
from furnace.testing.wrong.little_generation import LittleGeneration
from furnace.testing.wrong.little_job import LittleJob
from furnace.testing.wrong.registry import caught_by
from furnace.text import TextPipeline

__all__: list[str] = []


class _HeldLost(LittleJob):
    def finish(self, reason: FinishReason, text: str, matched: str | int | None) -> list[Event]:
        return super().finish(reason, "" if isinstance(matched, int) else text, matched)


@caught_by("test_held_text_comes_out_however_the_output_ends")
class HeldTextLostAtATokensEnd(LittleEngine):
    """Drops the text that it had held back for a stop string when a token ends the output."""

    job_type = _HeldLost


class _LengthFirst(LittleJob):
    def finish(self, reason: FinishReason, text: str, matched: str | int | None) -> list[Event]:
        if isinstance(matched, int) and len(self.tokens) >= self.max_tokens:
            return super().finish(FinishReason.LENGTH, text, None)
        return super().finish(reason, text, matched)


@caught_by("test_a_stop_token_in_the_last_place_is_a_stop")
class LengthBeforeStopTokens(LittleEngine):
    """Says that it ran out of tokens when the last one was a stop token."""

    job_type = _LengthFirst


class _LengthBeforeStrings(LittleJob):
    def finish(self, reason: FinishReason, text: str, matched: str | int | None) -> list[Event]:
        if isinstance(matched, str) and len(self.tokens) >= self.max_tokens:
            return super().finish(FinishReason.LENGTH, text, None)
        return super().finish(reason, text, matched)


@caught_by("test_a_stop_string_in_the_last_place_is_a_stop")
class LengthBeforeStopStrings(LittleEngine):
    """Says that it ran out of tokens when the last one completed a stop string."""

    job_type = _LengthBeforeStrings


class _LengthMatches(LittleJob):
    def finish(self, reason: FinishReason, text: str, matched: str | int | None) -> list[Event]:
        return super().finish(reason, text, self.tokens[-1] if matched is None else matched)


@caught_by("test_max_tokens_is_kept")
class LengthIsMatched(LittleEngine):
    """Says that the last token was matched when it ran out of tokens."""

    job_type = _LengthMatches


class _StopTokensEarly(LittleJob):
    def __init__(self, request: GenerateRequest, prompt: list[int], max_tokens: int, pipeline: TextPipeline) -> None:
        super().__init__(request, prompt, max_tokens, pipeline)
        self.row.params = msgspec.structs.replace(request.params, stop_token_ids=[])


@caught_by("test_min_tokens_holds_back_stop_tokens_too")
class StopTokensEndTooEarly(LittleEngine):
    """Ends at a stop token before min_tokens."""

    job_type = _StopTokensEarly


class _SearchesThePrompt(LittleJob):
    def __init__(self, request: GenerateRequest, prompt: list[int], max_tokens: int, pipeline: TextPipeline) -> None:
        super().__init__(request, prompt, max_tokens, pipeline)
        self._seen = pipeline.decode(prompt)[-16:]

    def push(self, token: int) -> list[Event]:
        self._seen += self.pipeline.decode([token])
        for stop in self.request.stop:
            if stop in self._seen:
                self.tokens.append(token)
                self._unsent.append(token)
                return self.finish(FinishReason.STOP, "", stop)
        return super().push(token)


@caught_by("test_a_stop_string_is_searched_in_the_output_alone")
class StopStringInThePrompt(LittleEngine):
    """Finds a stop string in the prompt."""

    job_type = _SearchesThePrompt


class _Forgets(LittleJob):
    """Searches without looking again at what it has passed."""

    def __init__(self, request: GenerateRequest, prompt: list[int], max_tokens: int, pipeline: TextPipeline) -> None:
        super().__init__(msgspec.structs.replace(request, stop=[]), prompt, max_tokens, pipeline)
        self._stop = request.stop[0] if request.stop else ""
        self._matched = ""

    def push(self, token: int) -> list[Event]:
        for char in self.pipeline.decode([token]) if self._stop else "":
            again = self._matched + char
            self._matched = again if self._stop.startswith(again) else char if self._stop[0] == char else ""
            if self._matched == self._stop:
                self.tokens.append(token)
                self._unsent.append(token)
                return self.finish(FinishReason.STOP, "", self._stop)
        return super().push(token)


@caught_by("test_stop_strings_are_found_where_text_repeats_itself")
class StopStringMissedInRepeats(LittleEngine):
    """Does not find a stop string that begins inside a match that breaks off."""

    job_type = _Forgets


class _SearchesTokens(LittleJob):
    def __init__(self, request: GenerateRequest, prompt: list[int], max_tokens: int, pipeline: TextPipeline) -> None:
        super().__init__(msgspec.structs.replace(request, stop=[]), prompt, max_tokens, pipeline)
        self._stops = request.stop
        self._seen = ""

    def push(self, token: int) -> list[Event]:
        self._seen += self.pipeline.decode([token])
        for stop in self._stops:
            if stop in self._seen:
                self.tokens.append(token)
                self._unsent.append(token)
                return self.finish(FinishReason.STOP, self._seen.partition(stop)[0], stop)
        return super().push(token)


@caught_by("test_a_stop_string_whose_characters_are_several_tokens_is_found")
class StopStringInTokensTexts(LittleEngine):
    """Searches for stop strings in the texts of single tokens, put together."""

    job_type = _SearchesTokens


class _TailLost(LittleJob):
    def finish(self, reason: FinishReason, text: str, matched: str | int | None) -> list[Event]:
        return super().finish(reason, text.rstrip("\ufffd"), matched)


@caught_by("test_parts_of_characters_are_joined_and_counted")
class UnfinishedCharacterLost(LittleEngine):
    """Drops an unfinished character at the end."""

    job_type = _TailLost


class _AllHeld(LittleJob):
    def piece(self, text: str) -> list[Event]:
        if not self.request.stop:
            return super().piece(text)
        self.held = getattr(self, "held", "") + text
        return super().piece(self.held) if self.finished else []


@caught_by("test_stop_strings_hold_back_only_what_may_become_one")
class HoldsAllForStopStrings(LittleEngine):
    """Sends all text at the end when there are stop strings."""

    job_type = _AllHeld


class _NothingUsed(LittleGeneration):
    left = False

    async def aclose(self) -> None:
        self.left = not self.job.finished
        await super().aclose()

    @property
    def usage(self) -> Usage:
        return Usage() if self.left else super().usage


@caught_by("test_a_request_that_was_left_says_what_was_used")
class LeftIsNotCounted(LittleEngine):
    """Says that a request that was left used nothing."""

    generation_type = _NothingUsed


class _EndsOfAll(LittleJob):
    all_ends: ClassVar[set[int]] = set()

    def __init__(self, request: GenerateRequest, prompt: list[int], max_tokens: int, pipeline: TextPipeline) -> None:
        super().__init__(request, prompt, max_tokens, pipeline)
        self.all_ends.update(request.params.stop_token_ids)

    def ends(self) -> frozenset[int]:
        return super().ends() | self.all_ends


@caught_by("test_outputs_end_beside_others_as_alone")
class StopTokensOfAll(LittleEngine):
    """Ends every output at the stop tokens of any request."""

    job_type = _EndsOfAll


class _ListTakenBack(LittleGeneration):
    last: Text | None = None

    async def batch(self) -> list[Event]:
        if self.last is not None:
            self.last.tokens.clear()
        events = await super().batch()
        self.last = next((event for event in events[::-1] if isinstance(event, Text)), None)
        return events


@caught_by("test_a_batch_belongs_to_its_reader")
class TokensTakenBack(LittleEngine):
    """Empties the list of token ids of an event when it sends the next."""

    generation_type = _ListTakenBack


class _OneList(LittleGeneration):
    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]  # handed on
        self._events: list[Event] = []

    async def batch(self) -> list[Event]:
        self._events[:] = await super().batch()
        return self._events


@caught_by("test_a_batch_belongs_to_its_reader")
class OneListForAllBatches(LittleEngine):
    """Returns the same list each time, with other events."""

    generation_type = _OneList


class _ReaderIsClient(LittleGeneration):
    async def batch(self) -> list[Event]:
        left = True
        try:
            events = await super().batch()
            left = False
            return events
        finally:
            if left:
                self.cancel(self.job)
                self.job.leave()


@caught_by("test_a_reader_that_gives_up_and_comes_back_misses_nothing")
class CancelledReaderEndsTheRequest(LittleEngine):
    """Ends a request when a task that waits for its events is cancelled."""

    generation_type = _ReaderIsClient


class _LongestHeld(TextOutput):
    def __init__(self, pipeline: TextPipeline, request: GenerateRequest, prompt: Sequence[int]) -> None:
        ordered = sorted(request.stop, key=len)
        super().__init__(pipeline, msgspec.structs.replace(request, stop=ordered[-1:]), prompt)
        self.others = ordered[:-1]
        self.text = self.shown = ""

    def _certain(self, text: str) -> str:
        self.text += text
        certain = super()._certain(text)
        for stop in self.others:
            if stop in self.text and self.matched is None:
                self.matched = stop
                certain = self.text[len(self.shown) : self.text.index(stop)]
        self.shown += certain
        return certain


class _HoldsTheLongest(LittleJob):
    def __init__(self, request: GenerateRequest, prompt: list[int], max_tokens: int, pipeline: TextPipeline) -> None:
        super().__init__(request, prompt, max_tokens, pipeline)
        self.text = _LongestHeld(pipeline, request, prompt)


@caught_by("test_each_of_several_stop_strings_is_held_back")
class LongestStopStringHeld(LittleEngine):
    """Holds back only what may become the longest stop string."""

    job_type = _HoldsTheLongest


@caught_by("test_a_request_left_inside_a_character_leaves_none_of_it")
class DecoderKept(LittleEngine):
    """Goes on with the decoder of a request that was left inside a character."""

    def __init__(self) -> None:
        super().__init__()
        self._left: list[TextOutput] = []

    def cancel(self, job: LittleJob) -> None:
        if job.tokens and not job.finished and "\ufffd" in self.pipeline.decode(job.tokens[-1:]):
            self._left.append(job.text)
        super().cancel(job)

    def admit(self, job: LittleJob) -> None:
        if self._left:
            job.text = self._left.pop()
        super().admit(job)


class _SentIsUsed(LittleJob):
    @property
    def usage(self) -> Usage:
        return Usage(prompt_tokens=len(self.prompt), completion_tokens=len(self.tokens) - len(self._unsent))


@caught_by("test_tokens_whose_text_is_held_back_are_used")
class UsageWithTheText(LittleEngine):
    """Counts tokens when their text is sent."""

    job_type = _SentIsUsed
