"""``LlmEngine``s that do something else than a request's parameters say."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from furnace.contracts import (
    Capabilities,
    ChatInput,
    Chunk,
    ChunkKind,
    Event,
    FinishReason,
    GenerateRequest,
    Generation,
    Input,
    SamplingParams,
)
from furnace.testing.wrong.little_engine import LittleEngine
from furnace.testing.wrong.little_job import LittleJob
from furnace.testing.wrong.registry import caught_by
from furnace.text import TextPipeline

__all__: list[str] = []


class _SeedOfLength(LittleJob):
    def __init__(self, request: GenerateRequest, prompt: list[int], max_tokens: int, pipeline: TextPipeline) -> None:
        super().__init__(request, prompt, max_tokens, pipeline)
        self.row.seed += max_tokens


@caught_by("test_parameters_that_ask_for_nothing_change_nothing")
class SeedMixedWithTheLength(LittleEngine):
    """Draws from seed and max_tokens."""

    job_type = _SeedOfLength


class _SharedCounts(LittleJob):
    seen: ClassVar[dict[tuple[int, ...], Counter[int]]] = {}

    def __init__(self, request: GenerateRequest, prompt: list[int], max_tokens: int, pipeline: TextPipeline) -> None:
        super().__init__(request, prompt, max_tokens, pipeline)
        self.counts = self.seen.setdefault(tuple(prompt), Counter())
        self.row.counts = self.counts


@caught_by("test_parameters_of_one_request_do_not_reach_another")
class PenaltiesOfAll(LittleEngine):
    """Counts tokens for the penalties of all requests with one prompt together."""

    job_type = _SharedCounts


class _Instead(LittleJob):
    """Samples with other parameters than the request's."""

    def __init__(self, request: GenerateRequest, prompt: list[int], max_tokens: int, pipeline: TextPipeline) -> None:
        super().__init__(request, prompt, max_tokens, pipeline)
        self.row.params = self.instead(request.params)

    def instead(self, params: SamplingParams) -> SamplingParams:
        """The parameters that are used."""
        raise NotImplementedError


class _NoneIsGreedy(_Instead):
    def instead(self, params: SamplingParams) -> SamplingParams:
        return msgspec.structs.replace(params, temperature=params.temperature or 0.0)


@caught_by("test_without_a_temperature_it_samples")
class NoTemperatureIsZero(LittleEngine):
    """Takes 0 for a temperature that is missing."""

    job_type = _NoneIsGreedy


class _ZeroIsOne(_Instead):
    def instead(self, params: SamplingParams) -> SamplingParams:
        return msgspec.structs.replace(params, top_k=1 if params.top_k == 0 else params.top_k)


@caught_by("test_parameters_that_ask_for_nothing_change_nothing")
class TopKOfZeroIsOne(LittleEngine):
    """Takes a top_k of 0 for 1."""

    job_type = _ZeroIsOne


class _OneMoreCandidate(_Instead):
    def instead(self, params: SamplingParams) -> SamplingParams:
        return msgspec.structs.replace(params, top_k=params.top_k and params.top_k + 1)


@caught_by("test_what_leaves_one_token_leaves_nothing_to_draw")
class TopKKeepsOneMore(LittleEngine):
    """Keeps one token more than top_k."""

    job_type = _OneMoreCandidate


class _PresenceEachTime(_Instead):
    def instead(self, params: SamplingParams) -> SamplingParams:
        return msgspec.structs.replace(params, frequency_penalty=params.frequency_penalty or params.presence_penalty)


@caught_by("test_penalties_count_what_was_generated")
class PresenceGrows(LittleEngine):
    """Subtracts presence_penalty for each time that a token was generated."""

    job_type = _PresenceEachTime


class _PromptPenalized(LittleJob):
    def __init__(self, request: GenerateRequest, prompt: list[int], max_tokens: int, pipeline: TextPipeline) -> None:
        super().__init__(request, prompt, max_tokens, pipeline)
        self.counts.update(prompt)


@caught_by("test_penalties_count_what_was_generated")
class PenaltiesCountThePrompt(LittleEngine):
    """Counts the prompt's tokens for frequency_penalty."""

    job_type = _PromptPenalized


class _ZeroSeed(LittleJob):
    def __init__(self, request: GenerateRequest, prompt: list[int], max_tokens: int, pipeline: TextPipeline) -> None:
        super().__init__(request, prompt, max_tokens, pipeline)
        self.row.seed = request.params.seed or secrets.randbits(63)


@caught_by("test_a_seed_of_zero_is_a_seed")
class SeedZeroIsNone(LittleEngine):
    """Draws a seed for a request whose seed is 0."""

    job_type = _ZeroSeed


class _Empties(LittleJob):
    def finish(self, reason: FinishReason, text: str, matched: str | int | None) -> list[Event]:
        self.request.params.logit_bias.clear()
        return super().finish(reason, text, matched)


@caught_by("test_a_request_is_left_as_it_was")
class BiasCleared(LittleEngine):
    """Empties the dict of a request's logit_bias when it ends."""

    job_type = _Empties


@caught_by("test_a_text_or_chat_that_is_too_long_is_refused")
class LongChatsCut(LittleEngine):
    """Silently drops the beginning of a chat that is too long."""

    def encode(self, input: Input) -> list[int]:
        tokens = super().encode(input)
        return tokens[16 - self.max_context :] if isinstance(input, ChatInput) else tokens


@caught_by("test_parts_of_a_message_are_its_text")
class FirstPartOnly(LittleEngine):
    """Reads only the first part of a message."""

    def encode(self, input: Input) -> list[int]:
        if isinstance(input, ChatInput):
            first = [
                msgspec.structs.replace(message, content=message.content[:1])
                if isinstance(message.content, list)
                else message
                for message in input.messages
            ]
            input = msgspec.structs.replace(input, messages=first)
        return super().encode(input)


@caught_by("test_detokenize_refuses_what_is_no_token")
class OddIdsIgnored(LittleEngine):
    """Leaves ids that are no tokens out of the text."""

    async def detokenize(self, tokens: list[int]) -> str:
        return await super().detokenize([token for token in tokens if 0 <= token < self.pipeline.vocab_size])


@caught_by("test_prompt_logprobs_are_those_of_the_prompt")
class PromptLogprobsDeclared(LittleEngine):
    """Declares log probabilities of the prompt, but sends none."""

    @property
    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(super().capabilities, prompt_logprobs=0)

    def check(self, request: GenerateRequest) -> None:
        super().check(msgspec.structs.replace(request, prompt_logprobs=None))


@caught_by("test_declared_constraints_hold")
class ConstraintsDeclared(LittleEngine):
    """Declares constraints, but ignores them."""

    @property
    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(super().capabilities, constraints=frozenset({"choice"}))

    def check(self, request: GenerateRequest) -> None:
        super().check(msgspec.structs.replace(request, constraint=None))


@caught_by("test_generate_many_is_as_generate")
class ParametersOfTheFirst(LittleEngine):
    """Gives all requests of one call the parameters of the first."""

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        return await super().generate_many(
            [msgspec.structs.replace(request, params=requests[0].params) for request in requests]
        )


@caught_by("test_choices_without_a_seed_differ")
class OneSeedForAllPrompts(LittleEngine):
    """Draws one seed for all prompts of a call."""

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        drawn = secrets.randbits(62)
        return await super().generate_many(
            [
                msgspec.structs.replace(request, params=msgspec.structs.replace(request.params, seed=drawn))
                if request.params.seed is None
                else request
                for request in requests
            ]
        )


class _Rereads(LittleJob):
    def chunk(self) -> Chunk:
        chunk = super().chunk()
        if chunk.kind is ChunkKind.DECODE and chunk.position == 64 and len(self.tokens) > 1:
            return Chunk(chunk.state, self.tokens[-2:-1], chunk.position, chunk.kind, chunk.output)
        return chunk


@caught_by("test_output_of_every_length_goes_on_as_a_prompt")
class WrongTokenAtABlocksEnd(LittleEngine):
    """Decodes the token before once more at position 64."""

    job_type = _Rereads


@caught_by("test_a_cached_prefix_changes_no_answer")
class CacheByLengthAndBeginning(LittleEngine):
    """Takes prompts for equal that have one length and begin alike."""

    def __init__(self) -> None:
        super().__init__()
        self._cache: dict[tuple[object, ...], list[int]] = {}

    def admit(self, job: LittleJob) -> None:
        if len(job.prompt) > 64:
            key = (job.request.cache_salt, len(job.prompt), *job.prompt[:32])
            job.prompt = self._cache.setdefault(key, job.prompt)
        super().admit(job)


@caught_by("test_a_prompt_that_was_left_changes_no_answer")
class HalfAPromptCached(LittleEngine):
    """Takes what it had read of a prompt when its client left for the whole prompt."""

    def __init__(self) -> None:
        super().__init__()
        self._cache: dict[tuple[object, ...], int] = {}

    def release(self, job: LittleJob) -> None:
        if job.cancelled and job.computed:
            self._cache[(job.request.cache_salt, *job.prompt)] = job.computed
        super().release(job)

    def admit(self, job: LittleJob) -> None:
        read = self._cache.get((job.request.cache_salt, *job.prompt), len(job.prompt))
        job.prompt = job.prompt[:read]
        super().admit(job)


@caught_by("test_a_prompt_that_was_left_while_it_was_read_changes_no_answer")
class PartOfAPrefillCached(HalfAPromptCached):
    """The same where the prompt is new, and some of it was read but not all."""

    def release(self, job: LittleJob) -> None:
        if job.computed < len(job.prompt):
            super().release(job)
        else:
            LittleEngine.release(self, job)
