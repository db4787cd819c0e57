"""A recorded run is planned again, step by step, and a changed policy is found."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from furnace.contracts import GenerateRequest, Generation, InvalidRequestError, SamplingParams, Text, TextInput
from furnace.runtime import Scheduled, recorder
from furnace.runtime.record import Ended, Record
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


async def said(generation: Generation) -> str:
    return "".join([event.text async for event in generation if isinstance(event, Text)])


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
    assert "middle of a line" in report.cut_off
    assert report.difference is None
    assert report.steps > 0


def test_a_file_without_its_last_line_is_said_to_be_cut_off(mock_engine: MakeMock, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run(served(mock_engine, path, "lorem"))
    lines = path.read_bytes().splitlines(keepends=True)
    assert replay(path).cut_off == ""
    path.write_bytes(b"".join(lines[:-1]))
    report = replay(path)
    assert "without an end mark" in report.cut_off
    assert report.difference is None


def test_a_recorder_that_falls_behind_ends_with_a_mark_and_never_holds_up_who_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder, "MOST_WAITING", 100)
    go_on = threading.Event()
    writing = Recorder(tmp_path / "run.jsonl")

    def slow() -> Record:
        assert go_on.wait(60)
        return Ended(-1)

    writing.put(slow)
    for id in range(10_000):
        writing.put(lambda id=id: Ended(id))  # type: ignore[misc] # a lambda's default
    go_on.set()
    writing.close()
    lines = [msgspec.json.decode(line) for line in (tmp_path / "run.jsonl").read_bytes().splitlines()]
    # What was taken is there in order; one may be in the thread's hands beside those that wait.
    assert [line["id"] for line in lines[:-1]] == list(range(-1, len(lines) - 2))
    assert 100 <= len(lines) <= 102
    assert lines[-1]["type"] == "closed"
    assert "fell behind" in lines[-1]["reason"]
    (message,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert "fell behind" in message


def test_a_file_that_takes_nothing_more_changes_no_text_and_its_replay_says_that_it_is_incomplete(
    mock_engine: MakeMock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MOST_WAITING", 50)
    # A pipe that nobody reads is a disk that does not write.
    pipe, path = tmp_path / "pipe", tmp_path / "run.jsonl"
    os.mkfifo(pipe)

    reader = open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb")  # noqa: SIM115 - closed with its reading
    os.set_blocking(reader.fileno(), True)

    def read() -> bytes:
        with reader:
            return reader.read()

    async def test() -> None:
        mock = mock_engine("echo")
        assert isinstance(mock.engine, Scheduled)
        mock.engine.record(Recorder(pipe))
        async with mock:
            text = "said again in spite of the record " * 20
            request = GenerateRequest(input=TextInput(text), params=SamplingParams(temperature=0.0))
            for _ in range(4):
                assert await said(await mock.engine.generate(request)) == text
            # Closing the engine waits for the pipe to be read.
            written = asyncio.create_task(asyncio.to_thread(read))
        path.write_bytes(await written)

    run(test())
    report = replay(path)
    assert "fell behind" in report.cut_off
    assert report.difference is None
    assert report.sequences >= 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_ends_the_record_with_one_logged_line_and_nothing_piles_up(
    mock_engine: MakeMock, caplog: pytest.LogCaptureFixture
) -> None:
    full = Recorder("/dev/full")

    async def test() -> None:
        mock = mock_engine("echo")
        assert isinstance(mock.engine, Scheduled)
        mock.engine.record(full)
        async with mock:
            for _ in range(3):
                assert await said(await mock.engine.generate(GenerateRequest(input=TextInput("still here")))) != ""

    run(test())
    assert full.waiting <= 1
    (message,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert "No space left" in message


def test_what_can_not_be_written_down_ends_the_record_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writing = Recorder(tmp_path / "run.jsonl")
    writing.put(lambda: 1 / 0)  # type: ignore[arg-type, return-value] # a bug of a later version
    writing.put(lambda: Ended(1))
    writing.close()
    assert writing.waiting <= 1
    assert "division by zero" in caplog.text


@pytest.mark.parametrize("content", ["", "{}\n", "hello\n", '{"type":"ended","id":1}\n'])
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other"
    path.write_text(content)
    with pytest.raises(InvalidRequestError, match="no record"):
        replay(path)
