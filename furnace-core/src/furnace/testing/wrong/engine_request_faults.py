"""``LlmEngine``s that take or refuse the wrong requests, or do not do what a request says."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from furnace.contracts import (
    Capabilities,
    EngineError,
    Event,
    GenerateRequest,
    Generation,
    Input,
    LlmEngine,
    PromptTooLongError,
    SamplingParams,
    Started,
    TokenInput,
    UnsupportedError,
    Usage,
)
from furnace.testing.wrong.little_engine import LittleEngine
from furnace.testing.wrong.little_generation import LittleGeneration
from furnace.testing.wrong.little_job import LittleJob
from furnace.testing.wrong.registry import caught_by

__all__: list[str] = []


@caught_by("test_a_prompt_that_is_too_long_is_refused_before_the_stream")
class LongPromptsTaken(LittleEngine):
    """Takes prompts that leave no room for output, and fails on them later."""

    def check_length(self, prompt: list[int]) -> None:
        pass


@caught_by("test_a_prompt_that_is_too_long_is_refused_before_the_stream")
class LongPromptsCut(LittleEngine):
    """Silently drops the beginning of a prompt that is too long."""

    def check_length(self, prompt: list[int]) -> None:
        del prompt[: max(0, len(prompt) - self.max_context + 16)]


@caught_by("test_the_longest_prompt_has_room_for_one_token")
class LongestPromptRefused(LittleEngine):
    """Refuses the longest prompt that leaves room for a token."""

    def check_length(self, prompt: list[int]) -> None:
        if len(prompt) >= self.max_context - 1:
            raise PromptTooLongError(len(prompt), self.max_context)


@caught_by("test_output_ends_with_the_context")
class RefusesAllMaxTokens(LittleEngine):
    """Refuses a prompt when max_tokens would reach behind the end of the context."""

    async def generate(self, request: GenerateRequest) -> LittleGeneration:
        prompt = await self.tokenize(request.input)
        if len(prompt) + (request.params.max_tokens or 0) > self.max_context:
            raise PromptTooLongError(len(prompt), self.max_context)
        return await super().generate(request)


@caught_by("test_what_is_not_declared_is_refused_by_name")
class FeaturesAcceptedSilently(LittleEngine):
    """Takes logprobs, constraints and tools, which it does not declare, and ignores them."""

    def check(self, request: GenerateRequest) -> None:
        request.validate(self.capabilities)


@caught_by("test_what_is_not_declared_is_refused_by_name")
class ConstraintAcceptedSilently(LittleEngine):
    """Takes constraints, which it does not declare, and ignores them."""

    def check(self, request: GenerateRequest) -> None:
        super().check(msgspec.structs.replace(request, constraint=None))


@caught_by("test_what_is_not_declared_is_refused_by_name")
class ToolsAcceptedSilently(LittleEngine):
    """Takes tools, which it does not declare, and ignores them."""

    def check(self, request: GenerateRequest) -> None:
        super().check(msgspec.structs.replace(request, tools=None))


@caught_by("test_what_is_not_declared_is_refused_by_name")
class RefusalNamesNoParameter(LittleEngine):
    """Refuses what it does not do without naming the parameter."""

    def check(self, request: GenerateRequest) -> None:
        try:
            super().check(request)
        except UnsupportedError as error:
            raise UnsupportedError("This can't be done.") from error


@caught_by("test_values_out_of_bounds_are_refused_by_name")
class NothingValidated(LittleEngine):
    """Takes values that are out of their bounds."""

    def check(self, request: GenerateRequest) -> None:
        super().check(GenerateRequest(input=request.input, logprobs=request.logprobs, tools=request.tools))


@caught_by("test_values_out_of_bounds_are_refused_by_name")
class TokenIdsUnchecked(LittleEngine):
    """Takes prompts of token ids that are not in the vocabulary, and fails on them later."""

    def check(self, request: GenerateRequest) -> None:
        super().check(msgspec.structs.replace(request, input=TokenInput([1])))


@caught_by("test_an_empty_prompt_is_refused")
class EmptyPromptCrashes(LittleEngine):
    """Raises an IndexError for an empty prompt."""

    def encode(self, input: Input) -> list[int]:
        try:
            return super().encode(input)
        except EngineError as error:
            raise IndexError("list index out of range") from error


@caught_by("test_logprobs_are_those_of_the_tokens")
class LogprobsDeclared(LittleEngine):
    """Declares log probabilities, but sends none."""

    @property
    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(super().capabilities, logprobs=5)

    def check(self, request: GenerateRequest) -> None:
        super().check(msgspec.structs.replace(request, logprobs=None))


@caught_by("test_what_is_declared_works")
class DeclaredButRefused(LittleEngine):
    """Declares that it takes tools, but refuses them."""

    @property
    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(super().capabilities, tools=True)


class _Bare(LlmEngine):
    """An engine without the optional interfaces, around one that has them."""

    def __init__(self) -> None:
        self._inner = LittleEngine()

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def max_context(self) -> int:
        return self._inner.max_context

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    async def start(self) -> None:
        await self._inner.start()

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def generate(self, request: GenerateRequest) -> LittleGeneration:
        return await self._inner.generate(request)


@caught_by("test_the_tokenizer_is_the_one_that_generate_uses")
class TokenizeNotThere(_Bare):
    """Declares that it tokenizes, but has no method for it."""


@caught_by("test_the_tokenizer_is_the_one_that_generate_uses")
class TokenizeDisagrees(LittleEngine):
    """Tokenizes a chat to other tokens than those that it starts from."""

    async def tokenize(self, input: Input) -> list[int]:
        return (await super().tokenize(input))[1:]


class _SeedIgnored(LittleJob):
    def __init__(self, request: GenerateRequest, *args: object) -> None:
        params = msgspec.structs.replace(request.params, seed=None)
        super().__init__(msgspec.structs.replace(request, params=params), *args)  # type: ignore[arg-type]  # handed on


@caught_by("test_a_seed_makes_sampling_repeatable")
class SeedIgnored(LittleEngine):
    """Ignores the seed."""

    job_type = _SeedIgnored


class _SameSeed(LittleJob):
    def __init__(self, request: GenerateRequest, *args: object) -> None:
        super().__init__(request, *args)  # type: ignore[arg-type]  # handed on
        self.row.seed = request.params.seed or 0


@caught_by("test_without_a_seed_answers_differ")
class MissingSeedIsZero(LittleEngine):
    """Takes 0 for a seed that is missing."""

    job_type = _SameSeed


class _Params(LittleJob):
    """Samples with other parameters than the request's."""

    def __init__(self, request: GenerateRequest, *args: object) -> None:
        super().__init__(request, *args)  # type: ignore[arg-type]  # handed on
        self.row.params = self.instead(request.params)

    def instead(self, params: SamplingParams) -> SamplingParams:
        """The parameters that are used."""
        raise NotImplementedError


class _NeverGreedy(_Params):
    def instead(self, params: SamplingParams) -> SamplingParams:
        return msgspec.structs.replace(params, temperature=params.temperature or 1.0)


@caught_by("test_the_most_likely_token_is_what_greedy_means")
class TemperatureZeroIsDefault(LittleEngine):
    """Takes a temperature of 0 for none, and samples with the default."""

    job_type = _NeverGreedy


class _NoBias(_Params):
    def instead(self, params: SamplingParams) -> SamplingParams:
        return msgspec.structs.replace(params, logit_bias={})


@caught_by("test_a_logit_bias_of_100_decides")
class BiasIgnored(LittleEngine):
    """Ignores logit_bias."""

    job_type = _NoBias


class _EndsAnyway(_Params):
    def instead(self, params: SamplingParams) -> SamplingParams:
        return msgspec.structs.replace(params, ignore_eos=False, min_tokens=0)


@caught_by("test_the_end_token_gives_no_text")
class EndsTooEarly(LittleEngine):
    """Ignores ignore_eos and min_tokens."""

    job_type = _EndsAnyway


class _OneChoice(LittleJob):
    def __init__(self, request: GenerateRequest, *args: object) -> None:
        super().__init__(msgspec.structs.replace(request, choice=0), *args)  # type: ignore[arg-type]  # handed on


@caught_by("test_choices_with_one_seed_differ")
class ChoicesAlike(LittleEngine):
    """Gives all choices of a request the same tokens."""

    job_type = _OneChoice


@caught_by("test_generate_many_admits_all_or_none")
class SomeAdmitted(LittleEngine):
    """Leaves the requests running that it admitted before one was refused."""

    def __init__(self) -> None:
        super().__init__()
        self._admitted: list[Generation] = []

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        for request in requests:
            self._admitted.append(await self.generate(request))
        admitted, self._admitted = self._admitted, []
        return admitted


@caught_by("test_generate_many_answers_each_request")
class ManyOutOfOrder(LittleEngine):
    """Returns the streams of several requests in the wrong order."""

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        return (await super().generate_many(requests))[::-1]


@caught_by("test_generate_does_not_block_the_event_loop")
class BlocksTheLoop(LittleEngine):
    """Blocks the event loop while it admits a request."""

    async def generate(self, request: GenerateRequest) -> LittleGeneration:
        time.sleep(0.5)  # noqa: ASYNC251 - the fault
        return await super().generate(request)


@caught_by("test_generate_returns_before_the_answer_is_there")
class WaitsForTheEnd(LittleEngine):
    """Returns from generate() only when the whole output is there."""

    async def generate(self, request: GenerateRequest) -> LittleGeneration:
        generation = await super().generate(request)
        await generation.job.ended.wait()
        return generation


@caught_by("test_a_request_does_not_wait_beyond_its_deadline")
class DeadlineIgnored(LittleEngine):
    """Lets a request wait beyond its deadline."""

    def expire(self, job: LittleJob) -> None:
        pass


class _Cached(LittleJob):
    cached = 0

    @property
    def usage(self) -> Usage:
        return msgspec.structs.replace(super().usage, cached_tokens=self.cached)

    def started(self) -> list[Event]:
        return [Started(prompt_tokens=len(self.prompt), cached_tokens=self.cached)]


@caught_by("test_a_cache_is_never_shared_between_salts")
class OneCacheForAllSalts(LittleEngine):
    """Says that a prompt was cached when anybody had asked it before."""

    job_type = _Cached

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[tuple[int, ...]] = set()

    @property
    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(super().capabilities, prefix_reuse=True)

    def admit(self, job: LittleJob) -> None:
        prompt = tuple(job.prompt)
        if isinstance(job, _Cached) and prompt in self._seen:
            job.cached = len(prompt) - 1
        self._seen.add(prompt)
        super().admit(job)
