"""A recorded run is planned again, step by step, and a changed policy is found."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from furnace.contracts import GenerateRequest, Generation, InvalidRequestError, SamplingParams, TextInput
from furnace.runtime import Scheduled
from furnace.runtime.recorder import Recorder
from furnace.runtime.replay import replay
from furnace.scheduler import Plan, SchedulerConfig, SchedulerState
from furnace_mock.pytest_plugin import MakeMock, mock_engine

__all__ = ["mock_engine"]

SECRET = "my secret is the word swordfish, and nobody may read it in a record of the scheduler"


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


async def drain(generation: Generation) -> None:
    async for _ in generation:
        pass


async def served(make: MakeMock, path: Path, model: str, *, seed: int = 0, tokens: bool = False, **options: Any) -> Any:
    """Serve a mix of requests, some of which are cancelled, and record it."""
    rng = random.Random(seed)
    speculation = options.pop("speculation", None)
    mock = make(model, max_context=160, **options)
    assert isinstance(mock.engine, Scheduled)
    mock.engine.configure(SchedulerConfig(speculation=speculation))
    mock.engine.record(Recorder(path, tokens=tokens))
    async with mock:

        async def client(n: int) -> None:
            prompt = SECRET[: rng.choice([20, 48, 80])] + rng.choice(["", "!", "?"])
            request = GenerateRequest(
                input=TextInput(prompt),
                params=SamplingParams(max_tokens=rng.randrange(1, 40), temperature=0.0),
                client=f"alice-{n % 3}",
                cache_salt=rng.choice(["", "bob"]),
            )
            leaves = rng.choice([None, None, 1, 3])
            generation = await mock.engine.generate(request)
            taken = 0
            async for _ in generation:
                taken += 1
                if taken == leaves:
                    break
            await generation.aclose()

        await asyncio.gather(*[client(n) for n in range(16)])
        await asyncio.gather(*[client(n) for n in range(16)])
        # Together these need more KV than the small caches have, whatever the clock does.
        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        crowd = [GenerateRequest(input=TextInput(f"request number {n} of all"), params=params) for n in range(8)]
        generations = await mock.engine.generate_many(crowd)
        await asyncio.gather(*[drain(generation) for generation in generations])
        return mock.engine.stats()


@pytest.mark.parametrize("model", ["lorem", "recurrent", "echo"])
@pytest.mark.parametrize("seed", range(3))
def test_a_run_with_preemptions_and_a_prefix_cache_replays_equal(
    mock_engine: MakeMock, tmp_path: Path, model: str, seed: int
) -> None:
    path = tmp_path / "run.jsonl"

    async def test() -> None:
        stats = await served(
            mock_engine,
            path,
            model,
            seed=seed,
            kv_tokens=168,
            kv_block=8,
            grid=8,
            max_step_tokens=24,
            fail_at=5 if seed == 2 else None,
            fault_on="?",
            speculation=3 if model == "echo" else None,
        )
        report = replay(path)
        assert report.difference is None
        assert not report.cut_off
        assert report.steps >= stats.steps
        assert report.sequences == 40
        assert report.preemptions == stats.preemptions > 0
        assert stats.cached_tokens > 0

    run(test())


def test_a_changed_policy_is_found_at_the_first_step_that_differs(mock_engine: MakeMock, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    class Greedy(SchedulerState):
        """Leaves nobody of the running ones a block."""

        def plan(self, now: float) -> Plan:
            plan = super().plan(now)
            if len(plan.chunks) > 3:
                del plan.chunks[-1]
            return plan

    async def test() -> None:
        await served(mock_engine, path, "lorem", kv_tokens=200, kv_block=8)
        assert replay(path).difference is None
        difference = replay(path, policy=Greedy).difference
        assert difference is not None
        recorded = msgspec.json.decode(difference.recorded)
        replayed = msgspec.json.decode(difference.replayed)
        assert recorded["type"] == replayed["type"] == "planned"
        assert recorded["chunks"][:-1] == replayed["chunks"]
        planned = [line for line in path.read_bytes().splitlines() if b'"planned"' in line]
        assert planned[difference.step - 1] == path.read_bytes().splitlines()[difference.line - 1]
        # All steps before have three chunks or fewer, so that they are the same.
        assert all(len(msgspec.json.decode(line).get("chunks", [])) <= 3 for line in planned[: difference.step - 1])

    run(test())


def test_a_record_shows_no_text_no_token_and_no_client_unless_asked(mock_engine: MakeMock, tmp_path: Path) -> None:
    hidden, shown = tmp_path / "hidden.jsonl", tmp_path / "shown.jsonl"

    async def test() -> None:
        await served(mock_engine, hidden, "echo")
        await served(mock_engine, shown, "echo", tokens=True)

    run(test())
    text = hidden.read_text()
    ids = ",".join(str(byte) for byte in SECRET[:12].encode())
    assert ids in shown.read_text()
    for word in ("swordfish", "alice", "bob", ids):
        assert word not in text
    assert '"token' not in text
    # The key is drawn for each file: the same prompt has another hash in the next one.
    added = [msgspec.json.decode(line) for line in text.splitlines() if '"added"' in line]
    assert not any(str(hash) in shown.read_text() for each in added for hash in each["prompt"]["blocks"][:9])
    assert replay(hidden).difference is None
    assert replay(shown).difference is None


def test_a_file_that_ends_in_a_line_is_replayed_as_far_as_it_goes(mock_engine: MakeMock, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run(served(mock_engine, path, "lorem"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    report = replay(path)
    assert report.cut_off
    assert report.difference is None
    assert report.steps > 0


@pytest.mark.parametrize("content", ["", "{}\n", "hello\n", '{"type":"ended","id":1}\n'])
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other"
    path.write_text(content)
    with pytest.raises(InvalidRequestError, match="no record"):
        replay(path)
