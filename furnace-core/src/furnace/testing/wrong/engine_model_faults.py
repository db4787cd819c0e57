"""``LlmEngine``s with a scheduler of their own, below which something is wrong that only their tokens show."""

from __future__ import annotations

import asyncio
import threading

from furnace.contracts import GenerateRequest
from furnace.testing.wrong.batch_row_faults import BatchLeaksNeighbour
from furnace.testing.wrong.batch_sampler_faults import ForgetfulSampler
from furnace.testing.wrong.batch_state_faults import BatchPositionOffByOne
from furnace.testing.wrong.little_engine import LittleEngine
from furnace.testing.wrong.little_generation import LittleGeneration
from furnace.testing.wrong.little_job import LittleJob
from furnace.testing.wrong.registry import caught_by

__all__: list[str] = []


@caught_by("test_output_goes_on_where_a_prompt_ends")
class DecodesOnePlaceOn(LittleEngine):
    """Decodes every token as if it stood one place further on."""

    def __init__(self) -> None:
        super().__init__()
        self.model = BatchPositionOffByOne(limits={"kv_tokens": self.model.limits.kv_tokens})


@caught_by("test_greedy_output_is_the_same_alone_and_in_company")
class NeighboursMix(LittleEngine):
    """Mixes a tenth of its neighbour's logits into those of each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.model = BatchLeaksNeighbour(limits={"kv_tokens": self.model.limits.kv_tokens})


@caught_by("test_seeded_output_is_the_same_alone_and_in_company")
class DrawsByPlace(LittleEngine):
    """Draws with a sequence's place in the batch for its seed."""

    def __init__(self) -> None:
        super().__init__()
        self.sampler = ForgetfulSampler()


@caught_by("test_an_engine_works_on_any_thread")
class BoundToItsThread(LittleEngine):
    """Starts only in the thread that built it."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    async def start(self) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError("this thread has no context")
        await super().start()


@caught_by("test_many_requests_at_once_all_end")
class SmallQueue(LittleEngine):
    """Forgets requests when more than 32 wait."""

    def admit(self, job: LittleJob) -> None:
        super().admit(job)
        del self.waiting[32:]


@caught_by("test_a_task_that_is_cancelled_in_generate_leaves_nothing")
class ServesNobody(LittleEngine):
    """Runs a request whose client left while it was admitted."""

    def __init__(self) -> None:
        super().__init__()
        self._admitted: set[asyncio.Task[LittleGeneration]] = set()

    async def generate(self, request: GenerateRequest) -> LittleGeneration:
        admission = asyncio.ensure_future(super().generate(request))
        self._admitted.add(admission)
        generation = await asyncio.shield(admission)
        self._admitted.remove(admission)
        return generation
