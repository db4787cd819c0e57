"""``StepModel``s with one fault each."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from furnace.testing.wrong.little_lm import MAX_CONTEXT, Floats
from furnace.testing.wrong.little_step import LittleCache, LittleStepModel
from furnace.testing.wrong.registry import caught_by

__all__: list[str] = []


@caught_by("test_decoding_goes_on_where_the_prefill_ended")
class StepPositionOffByOne(LittleStepModel):
    """Decodes every token as if it stood one place further on."""

    def decode(self, state: LittleCache, token: int) -> Floats:
        return self.lm.logits(self.write(state, token, min(state.length + 1, MAX_CONTEXT - 1)))


@caught_by("test_sequences_that_take_turns_keep_apart")
class StepOneCacheForAll(LittleStepModel):
    """Keeps one KV cache for all sequences."""

    def __init__(self) -> None:
        super().__init__()
        self._cache = LittleCache()

    def new_cache(self) -> LittleCache:
        self._cache.length = 0
        return self._cache


@caught_by("test_decoding_goes_on_where_the_prefill_ended")
class StepLosesLastPromptToken(LittleStepModel):
    """Leaves the last token of a prompt out of the KV cache."""

    def prefill(self, prompt: Sequence[int]) -> tuple[LittleCache, Floats]:
        cache, logits = super().prefill(prompt)
        cache.length -= 1
        return cache, logits


@caught_by("test_decoding_goes_on_where_the_prefill_ended")
class StepDecodeForgets(LittleStepModel):
    """Computes a decoded token's logits, but does not append the token."""

    def decode(self, state: LittleCache, token: int) -> Floats:
        logits = super().decode(state, token)
        state.length -= 1
        return logits


@caught_by("test_a_step_model_returns_float32_and_leaves_the_prompt_alone")
class StepDoubleLogits(LittleStepModel):
    """Returns float64 logits."""

    def decode(self, state: LittleCache, token: int) -> Floats:
        return super().decode(state, token).astype(np.float64)


@caught_by("test_a_step_model_returns_float32_and_leaves_the_prompt_alone")
class StepPaddedLogits(LittleStepModel):
    """Returns rows that are longer than the vocabulary."""

    def decode(self, state: LittleCache, token: int) -> Floats:
        return np.pad(super().decode(state, token), (0, 8))


@caught_by("test_exactly_max_context_tokens_fit")
class StepNanInLongSequences(LittleStepModel):
    """Gives NaN from the 100th token on."""

    def append(self, cache: LittleCache, token: int) -> Floats:
        hidden = super().append(cache, token)
        return hidden * np.float32(np.nan) if cache.length > 100 else hidden


@caught_by("test_memory_does_not_grow_with_steps")
class StepKeepsReleasedStates(LittleStepModel):
    """Keeps the KV cache of every sequence for ever."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[LittleCache] = []

    def new_cache(self) -> LittleCache:
        self._kept.append(super().new_cache())
        return self._kept[-1]


@caught_by("test_prompts_in_one_step_do_not_touch_each_other")
class StepReleaseRaises(LittleStepModel):
    """Can't release a sequence that never decoded."""

    def __init__(self) -> None:
        super().__init__()
        self._decoded: set[int] = set()

    def decode(self, state: LittleCache, token: int) -> Floats:
        self._decoded.add(id(state))
        return super().decode(state, token)

    def release(self, state: LittleCache) -> None:
        self._decoded.remove(id(state))


@caught_by("test_a_new_state_takes_a_prompt_beside_one_that_was_released")
class StepReleaseFreesAll(LittleStepModel):
    """Clears the KV cache of all sequences when one is released."""

    def __init__(self) -> None:
        super().__init__()
        self._open: list[LittleCache] = []

    def new_cache(self) -> LittleCache:
        self._open.append(super().new_cache())
        return self._open[-1]

    def release(self, state: LittleCache) -> None:
        for cache in self._open:
            cache.entries[:] = 0
        self._open.clear()


@caught_by("test_a_state_starts_empty_whatever_was_there_before")
class StepDirtyReuse(LittleStepModel):
    """Gives a released KV cache to the next sequence without emptying it."""

    def __init__(self) -> None:
        super().__init__()
        self._free: list[LittleCache] = []

    def new_cache(self) -> LittleCache:
        return self._free.pop() if self._free else super().new_cache()

    def append(self, cache: LittleCache, token: int) -> Floats:
        cache.length = min(cache.length, MAX_CONTEXT - 1)
        return super().append(cache, token)

    def release(self, state: LittleCache) -> None:
        self._free.append(state)


@caught_by("test_a_prompt_of_one_token_works")
class StepBoundToItsThread(LittleStepModel):
    """Works only in the thread that built it."""

    def __init__(self) -> None:
        super().__init__()
        self._local = threading.local()
        self._local.ready = True

    def append(self, cache: LittleCache, token: int) -> Floats:
        if not getattr(self._local, "ready", False):
            raise RuntimeError("this thread has no context")
        return super().append(cache, token)


@caught_by("test_two_models_in_one_process_keep_apart")
class StepSharedByAllModels(LittleStepModel):
    """Keeps the sequences of all models in one place, by numbers that each model gives."""

    _caches: ClassVar[dict[int, LittleCache]] = {}

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[int, int] = {}

    def new_cache(self) -> LittleCache:
        number = next(each for each in range(1000) if each not in self._open.values())
        cache = self._caches.setdefault(number, super().new_cache())
        self._open[id(cache)] = number
        cache.length = 0
        return cache

    def release(self, state: LittleCache) -> None:
        del self._open[id(state)]


@caught_by("test_a_step_model_returns_float32_and_leaves_the_prompt_alone")
class StepEmptiesThePrompt(LittleStepModel):
    """Takes the prompt's tokens out of the caller's list."""

    def prefill(self, prompt: Sequence[int]) -> tuple[LittleCache, Floats]:
        result = super().prefill(prompt)
        if isinstance(prompt, list):
            prompt.clear()
        return result


@caught_by("test_a_step_model_returns_float32_and_leaves_the_prompt_alone")
class StepGoesOnInThePrompt(LittleStepModel):
    """Appends decoded tokens to the caller's list."""

    def __init__(self) -> None:
        super().__init__()
        self._tokens: dict[int, list[int]] = {}

    def prefill(self, prompt: Sequence[int]) -> tuple[LittleCache, Floats]:
        cache, logits = super().prefill(prompt)
        self._tokens[id(cache)] = prompt if isinstance(prompt, list) else list(prompt)
        return cache, logits

    def decode(self, state: LittleCache, token: int) -> Floats:
        self._tokens[id(state)].append(token)
        return super().decode(state, token)

    def release(self, state: LittleCache) -> None:
        del self._tokens[id(state)]


@caught_by("test_exactly_max_context_tokens_fit")
class StepContextOffByOne(LittleStepModel):
    """Has room for one token less than it says."""

    def append(self, cache: LittleCache, token: int) -> Floats:
        if cache.length == MAX_CONTEXT - 1:
            raise IndexError("the KV cache is full")
        return super().append(cache, token)


@caught_by("test_exactly_max_context_tokens_fit")
class StepWindowInDecode(LittleStepModel):
    """Sees only the last 64 tokens when it decodes, but everything in a prompt."""

    def decode(self, state: LittleCache, token: int) -> Floats:
        self.append(state, token)
        seen = state.entries[max(0, state.length - 64) : state.length]
        return self.lm.logits(self.lm.hidden(token, state.length - 1, seen))


@caught_by("test_prompts_of_all_lengths_go_on_as_they_would_in_one_piece")
class StepPiecesOverwriteTheWindow(LittleStepModel):
    """Reads a prompt in pieces of 128, of which the first 48 tokens see nothing of the piece before."""

    def prefill(self, prompt: Sequence[int]) -> tuple[LittleCache, Floats]:
        cache, logits = super().prefill(prompt)
        last = len(prompt) - 1
        start = last // 128 * 128
        if last - start < 48:
            logits = self.lm.logits(self.lm.hidden(prompt[-1], last, cache.entries[start : cache.length]))
        return cache, logits


@caught_by("test_a_prompt_that_begins_an_earlier_one_has_its_own_row")
class StepKeepsTheLastRow(LittleStepModel):
    """Gives a prompt that begins the one before that one's logits, since all of its KV is there."""

    def __init__(self) -> None:
        super().__init__()
        self._last: list[int] = []
        self._logits = np.empty(0, np.float32)

    def prefill(self, prompt: Sequence[int]) -> tuple[LittleCache, Floats]:
        cache, logits = super().prefill(prompt)
        if self._last[: len(prompt)] != list(prompt):
            self._last, self._logits = list(prompt), logits
        return cache, self._logits.copy()


@caught_by("test_a_token_outside_the_vocabulary_hurts_nobody")
class StepDiesOfOneError(LittleStepModel):
    """Refuses everything after one request failed."""

    _dead = False

    def append(self, cache: LittleCache, token: int) -> Floats:
        if self._dead:
            raise RuntimeError("an earlier request failed")
        try:
            return super().append(cache, token)
        except ValueError:
            self._dead = True
            raise


@caught_by("test_decoding_goes_on_where_the_prefill_ended")
class StepOneTokenLate(LittleStepModel):
    """Returns the logits of the token before."""

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[int, Floats] = {}

    def decode(self, state: LittleCache, token: int) -> Floats:
        logits = super().decode(state, token)
        late = self._before.get(id(state), logits)
        self._before[id(state)] = logits
        return late

    def release(self, state: LittleCache) -> None:
        self._before.pop(id(state), None)


@caught_by("test_equal_prompts_part_where_their_tokens_do")
class StepStateByPrompt(LittleStepModel):
    """Gives two sequences with the same prompt one state."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[tuple[int, ...], tuple[LittleCache, Floats]] = {}

    def prefill(self, prompt: Sequence[int]) -> tuple[LittleCache, Floats]:
        key = tuple(prompt)
        if key not in self._known:
            self._known[key] = super().prefill(prompt)
        return self._known[key]

    def release(self, state: LittleCache) -> None:
        self._known = {key: value for key, value in self._known.items() if value[0] is not state}


@caught_by("test_equal_prompts_part_where_their_tokens_do")
class StepSharesTheLastPrompt(LittleStepModel):
    """Takes the KV of a long beginning over from the prompt before, and writes behind it in the same array."""

    def __init__(self) -> None:
        super().__init__()
        self._last: list[int] = []
        self._cache = LittleCache()

    def prefill(self, prompt: Sequence[int]) -> tuple[LittleCache, Floats]:
        cache = self.new_cache()
        pairs = list(zip(self._last, prompt[:-1], strict=False))
        common = next((place for place, (old, new) in enumerate(pairs) if old != new), len(pairs))
        if common >= 64:
            cache.entries, cache.length = self._cache.entries, common
        for token in prompt[cache.length :]:
            hidden = self.append(cache, token)
        self._last, self._cache = list(prompt), cache
        return cache, self.lm.logits(hidden)


@caught_by("test_every_position_has_its_effect")
class StepLosesAnEntry(LittleStepModel):
    """Keeps all entries but the last when the KV array of 64 tokens grows."""

    def write(self, cache: LittleCache, token: int, position: int) -> Floats:
        if cache.length == 64:
            cache.entries[63] = 0
        return super().write(cache, token, position)


@caught_by("test_decoding_over_a_power_of_two_is_as_a_prompt")
class StepLosesAnEntryInDecode(LittleStepModel):
    """Keeps all entries but the last when the KV array of 128 tokens grows while it decodes."""

    def decode(self, state: LittleCache, token: int) -> Floats:
        if state.length == 128:
            state.entries[127] = 0
        return super().decode(state, token)


@caught_by("test_memory_does_not_grow_with_steps")
class StepCountsStates(LittleStepModel):
    """Fails after fifty sequences."""

    _opened = 0

    def new_cache(self) -> LittleCache:
        self._opened += 1
        if self._opened > 50:
            raise MemoryError("out of handles")
        return super().new_cache()


@caught_by("test_the_same_steps_give_the_same_rows_again")
class StepNoisy(LittleStepModel):
    """Gives other logits for the same tokens every time."""

    def __init__(self) -> None:
        super().__init__()
        self._random = np.random.default_rng()

    def append(self, cache: LittleCache, token: int) -> Floats:
        return super().append(cache, token) + self._random.standard_normal(1, dtype=np.float32)


@caught_by("test_failed_sequences_leave_their_places_free")
class StepPlaceOfAFailedPrompt(LittleStepModel):
    """Has 32 places, and loses one with every prompt that it refuses."""

    def __init__(self) -> None:
        super().__init__()
        self._places = 32

    def new_cache(self) -> LittleCache:
        if not self._places:
            raise MemoryError("no place is free")
        self._places -= 1
        return super().new_cache()

    def release(self, state: LittleCache) -> None:
        self._places += 1
