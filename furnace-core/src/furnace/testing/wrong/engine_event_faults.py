"""``LlmEngine``s that send wrong events."""

from __future__ import annotations

from furnace.contracts import (
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    InvalidRequestError,
    Started,
    Text,
    Usage,
)
from furnace.testing.wrong.little_engine import LittleEngine
from furnace.testing.wrong.little_generation import LittleGeneration
from furnace.testing.wrong.little_job import LittleJob
from furnace.testing.wrong.registry import caught_by

__all__: list[str] = []


class _LastTwice(LittleJob):
    def put(self, events: list[Event]) -> None:
        last = [event for event in events if isinstance(event, Finished)]
        super().put([*events, *last])


@caught_by("test_there_is_exactly_one_last_event")
class LastEventTwice(LittleEngine):
    """Sends the last event twice."""

    job_type = _LastTwice


class _NoLast(LittleJob):
    def put(self, events: list[Event]) -> None:
        super().put([event for event in events if not isinstance(event, Finished)])
        if any(isinstance(event, Finished) for event in events):
            self._closed = True


@caught_by("test_there_is_exactly_one_last_event")
class NoLastEvent(LittleEngine):
    """Ends a stream without its last event."""

    job_type = _NoLast


class _NeverEnds(LittleJob):
    def put(self, events: list[Event]) -> None:
        super().put([event for event in events if not isinstance(event, Finished)])


@caught_by("test_there_is_exactly_one_last_event")
class StreamNeverEnds(LittleEngine):
    """Neither ends a stream nor sends its last event."""

    job_type = _NeverEnds


class _LosesLast(LittleJob):
    def finish(self, reason: FinishReason, text: str, matched: str | int | None) -> list[Event]:
        return super().finish(reason, text, matched)[-1:]


@caught_by("test_all_pieces_together_hold_each_token_once")
class LosesLastToken(LittleEngine):
    """Drops the text of the last token."""

    job_type = _LosesLast


class _TextAfter(LittleJob):
    def finish(self, reason: FinishReason, text: str, matched: str | int | None) -> list[Event]:
        return super().finish(reason, text, matched)[::-1]


@caught_by("test_there_is_exactly_one_last_event")
class TextAfterLastEvent(LittleEngine):
    """Sends the last text behind the last event."""

    job_type = _TextAfter


class _StartedTwice(LittleJob):
    def started(self) -> list[Event]:
        return super().started() * 2


@caught_by("test_events_come_in_order")
class StartedTwice(LittleEngine):
    """Sends Started twice."""

    job_type = _StartedTwice


class _NoStarted(LittleJob):
    def started(self) -> list[Event]:
        return []


@caught_by("test_events_come_in_order")
class StartedMissing(LittleEngine):
    """Sends no Started."""

    job_type = _NoStarted


class _StartedLate(LittleJob):
    def started(self) -> list[Event]:
        return []

    def finish(self, reason: FinishReason, text: str, matched: str | int | None) -> list[Event]:
        *pieces, last = super().finish(reason, text, matched)
        return [*pieces, *super().started(), last]


@caught_by("test_events_come_in_order")
class StartedAtTheEnd(LittleEngine):
    """Sends Started behind the text."""

    job_type = _StartedLate


class _EmptyText(LittleJob):
    def piece(self, text: str) -> list[Event]:
        return [*super().piece(text), Text("")]


@caught_by("test_no_event_is_empty")
class EmptyText(LittleEngine):
    """Sends pieces without text and tokens."""

    job_type = _EmptyText


class _OneTokenAPiece(LittleJob):
    def piece(self, text: str) -> list[Event]:
        (event,) = super().piece(text)
        assert isinstance(event, Text)  # noqa: S101 - for the type checker
        return [Text(text, event.tokens[-1:])]


@caught_by("test_parts_of_characters_are_joined_and_counted")
class OneTokenAPiece(LittleEngine):
    """Sends only the last token id of a piece of several."""

    job_type = _OneTokenAPiece


class _SameTokens(LittleJob):
    def piece(self, text: str) -> list[Event]:
        return [Text(text, list(self.tokens))]


@caught_by("test_all_pieces_together_hold_each_token_once")
class TokensSentAgain(LittleEngine):
    """Sends all token ids so far with each piece."""

    job_type = _SameTokens


class _AlwaysStop(LittleJob):
    def finish(self, reason: FinishReason, text: str, matched: str | int | None) -> list[Event]:
        return super().finish(FinishReason.STOP, text, matched)


@caught_by("test_max_tokens_is_kept")
class LengthIsStop(LittleEngine):
    """Says that it stopped when it ran out of tokens."""

    job_type = _AlwaysStop


class _OneMore(LittleJob):
    def push(self, token: int) -> list[Event]:
        if not self.tokens and self.request.params.max_tokens is not None:
            self.max_tokens += 1
        return super().push(token)


@caught_by("test_max_tokens_is_kept")
class OneTokenTooMany(LittleEngine):
    """Generates one token more than max_tokens."""

    job_type = _OneMore


class _StopShown(LittleJob):
    def finish(self, reason: FinishReason, text: str, matched: str | int | None) -> list[Event]:
        return super().finish(reason, text + matched if isinstance(matched, str) else text, matched)


@caught_by("test_a_stop_string_ends_the_output_and_is_not_in_it")
class StopStringShown(LittleEngine):
    """Leaves the stop string in the text."""

    job_type = _StopShown


class _StopByToken(LittleJob):
    def push(self, token: int) -> list[Event]:
        self.text._stops = None
        text = self.pipeline.decode([token])
        for stop in self.request.stop:
            if stop in text:
                self.tokens.append(token)
                self._unsent.append(token)
                return self.finish(FinishReason.STOP, text.partition(stop)[0], stop)
        return super().push(token)


@caught_by("test_a_stop_string_ends_the_output_and_is_not_in_it")
class StopStringWithinTokens(LittleEngine):
    """Finds a stop string only if it lies inside one token."""

    job_type = _StopByToken


class _NoMatched(LittleJob):
    def finish(self, reason: FinishReason, text: str, matched: str | int | None) -> list[Event]:
        return super().finish(reason, text, None)


@caught_by("test_a_stop_string_ends_the_output_and_is_not_in_it")
class MatchedNotSaid(LittleEngine):
    """Does not say which stop string ended the output."""

    job_type = _NoMatched


class _TokenTexts(LittleJob):
    def piece(self, text: str) -> list[Event]:
        (event,) = super().piece(text)
        assert isinstance(event, Text)  # noqa: S101 - for the type checker
        return [Text("".join(self.pipeline.decode([token]) for token in event.tokens), event.tokens)]


@caught_by("test_parts_of_characters_are_joined_and_counted")
class BrokenCharacters(LittleEngine):
    """Decodes each token for itself, which breaks characters that span tokens."""

    job_type = _TokenTexts


class _StopTokensIgnored(LittleJob):
    def ends(self) -> frozenset[int]:
        return self.pipeline.eos_token_ids


@caught_by("test_a_stop_token_ends_the_output_without_text")
class StopTokensIgnored(LittleEngine):
    """Ignores stop_token_ids."""

    job_type = _StopTokensIgnored


class _CountsPieces(LittleJob):
    pieces = 0

    def piece(self, text: str) -> list[Event]:
        self.pieces += bool(text)
        return super().piece(text)

    @property
    def usage(self) -> Usage:
        return Usage(prompt_tokens=len(self.prompt), completion_tokens=self.pieces)


@caught_by("test_parts_of_characters_are_joined_and_counted")
class UsageCountsPieces(LittleEngine):
    """Counts pieces of text for tokens."""

    job_type = _CountsPieces


class _EndNotCounted(LittleJob):
    @property
    def usage(self) -> Usage:
        ended = bool(self.tokens) and self.tokens[-1] in self.ends()
        return Usage(prompt_tokens=len(self.prompt), completion_tokens=len(self.tokens) - ended)


@caught_by("test_a_stop_token_ends_the_output_without_text")
class UsageWithoutTheEnd(LittleEngine):
    """Does not count the token that ended the output."""

    job_type = _EndNotCounted


class _PromptOfWords(LittleJob):
    def started(self) -> list[Event]:
        return [Started(prompt_tokens=len(self.prompt) - 1)]


@caught_by("test_the_prompt_is_counted")
class StartedCountsWrong(LittleEngine):
    """Says in Started one prompt token less than in the usage."""

    job_type = _PromptOfWords


class _AllCached(LittleJob):
    @property
    def usage(self) -> Usage:
        return Usage(prompt_tokens=len(self.prompt), completion_tokens=len(self.tokens), cached_tokens=len(self.prompt))


@caught_by("test_cached_tokens_are_part_of_the_prompt")
class EverythingCached(LittleEngine):
    """Says that the whole prompt came from a cache that it does not have."""

    job_type = _AllCached


class _NoUsageAfterClose(LittleGeneration):
    closed = False

    async def aclose(self) -> None:
        await super().aclose()
        self.closed = True

    @property
    def usage(self) -> Usage:
        return Usage() if self.closed else super().usage


@caught_by("test_usage_grows_while_it_runs_and_stays_after_aclose")
class UsageForgottenAtClose(LittleEngine):
    """Forgets the usage of a closed stream."""

    generation_type = _NoUsageAfterClose


class _UsageAtTheEnd(LittleJob):
    @property
    def usage(self) -> Usage:
        return super().usage if self.finished else Usage()


@caught_by("test_usage_grows_while_it_runs_and_stays_after_aclose")
class UsageOnlyAtTheEnd(LittleEngine):
    """Counts nothing for a request that was cancelled."""

    job_type = _UsageAtTheEnd


class _LosesEvents(LittleGeneration):
    async def batch(self) -> list[Event]:
        return (await super().batch())[-1:]


@caught_by("test_a_slow_reader_misses_nothing")
class EventsLost(LittleEngine):
    """Gives only the newest of the events that a slow reader finds."""

    generation_type = _LosesEvents


class _HangsAtTheEnd(LittleGeneration):
    async def batch(self) -> list[Event]:
        events = await super().batch()
        if not events:
            await self.job.arrived.wait()
            self.job.arrived.clear()
            await self.job.arrived.wait()
        return events


@caught_by("test_there_is_exactly_one_last_event")
class ReadingAfterTheEndHangs(LittleEngine):
    """Lets a reader wait for ever behind the last event."""

    generation_type = _HangsAtTheEnd


@caught_by("test_values_out_of_bounds_are_refused_by_name")
class RefusedInTheStream(LittleEngine):
    """Refuses a bad value with an event, when the status was sent already."""

    async def generate(self, request: GenerateRequest) -> LittleGeneration:
        try:
            return await super().generate(request)
        except InvalidRequestError as error:
            job = self.job_type(request, [0], 1, self.pipeline)
            job.put([Failed(error.info)])
            job.ended.set()
            return self.generation_type(job, self.cancel)
