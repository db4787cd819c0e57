from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from scripted_endpoint import (
    DONE,
    FINISH,
    SLACK,
    Answer,
    Asked,
    Reply,
    ScriptedEndpoint,
    Silent,
    content,
    polite,
    usage,
)

from furnace.bench import ClosedLoop, Lengths, OpenLoop, Plan, Report, Target, TargetError, run
from furnace.bench import load as load_module
from furnace.bench.calibration import calibrate
from furnace.bench.client import Client
from furnace.bench.errors import BenchError


def plan_for(url: str, **changes: Any) -> Plan:
    settings: dict[str, Any] = {"requests": 4, "duration": None, "prompt": Lengths(23, 23), "output": Lengths(3, 3)}
    return Plan(target=Target(url), **{**settings, **changes})


async def report_of(plan: Plan, observer: Silent | None = None, interrupt: asyncio.Event | None = None) -> Report:
    return await asyncio.wait_for(run(plan, observer or Silent(), interrupt=interrupt), SLACK)


def refusing(status: int, message: str, parameter: str) -> Answer:
    """A server that takes no request with a parameter."""

    async def answer(asked: Asked, reply: Reply) -> None:
        if asked.body is not None and parameter in asked.body:
            await reply.json(status, {"error": {"message": message}})
            return
        if asked.body is not None:
            asked.body.setdefault("max_tokens", asked.body.get("max_completion_tokens"))
        await polite(asked, reply)

    return answer


async def test_prompts_have_the_length_that_was_asked_for() -> None:
    async with ScriptedEndpoint(polite) as server:
        report = await report_of(plan_for(server.url, warmup=0))

    (measurement,) = report.measurements
    assert measurement.all.succeeded == 4
    assert measurement.all.prompt_tokens == 4 * 23  # the server counts three beside the words
    assert measurement.all.completion_tokens == 4 * 3
    (described,) = report.servers
    assert (described.model, described.tokens_per_word, described.prompt_overhead) == ("tiny", 1.0, 3.0)


async def test_words_that_differ_in_tokens_are_known_by_their_average() -> None:
    def tokens(text: str) -> int:
        return 9 + sum(1 + (word < "f") for word in text.split())  # a tokenizer that does not know all of them

    async def answer(asked: Asked, reply: Reply) -> None:
        await reply.head()
        await reply.events(content("x"), FINISH, usage(tokens(asked.body["messages"][0]["content"]), 1), DONE)
        await reply.end()

    async with ScriptedEndpoint(answer) as server:
        plan = plan_for(server.url, prompt=Lengths(400, 400), requests=10)
        report = await report_of(msgspec.structs.replace(plan, target=Target(server.url, "m")))

    assert report.measurements[0].all.prompt_tokens / 10 == pytest.approx(400, rel=0.05)


async def test_no_prompt_is_sent_twice_in_a_benchmark() -> None:
    async with ScriptedEndpoint(polite) as server:
        await report_of(plan_for(server.url, rounds=2, loads=[ClosedLoop(1), ClosedLoop(3)]))

    texts = [asked.body["messages"][0]["content"] for asked in server.asked if asked.method == "POST"]
    assert len(texts) == 2 + 2 * 2 * 4 + 1 + 3  # to calibrate, to measure, to warm up
    assert len(set(texts)) == len(texts)


async def test_a_seed_repeats_a_benchmark() -> None:
    async def bodies(seed: int) -> list[Any]:
        async with ScriptedEndpoint(polite) as server:
            await report_of(plan_for(server.url, seed=seed, prompt=Lengths(10, 40), output=Lengths(1, 9)))
        return [asked.body for asked in server.asked]

    assert await bodies(1) == await bodies(1) != await bodies(2)


async def test_a_warm_up_is_not_counted() -> None:
    async with ScriptedEndpoint(polite) as server:
        report = await report_of(plan_for(server.url, warmup=5))

    assert len(server.asked) == 1 + 2 + 5 + 4
    assert report.measurements[0].all.succeeded == 4


async def test_two_servers_take_turns_and_get_the_same_text() -> None:
    order: list[str] = []

    def noting(name: str) -> Answer:
        async def answer(asked: Asked, reply: Reply) -> None:
            order.append(name)
            await polite(asked, reply)

        return answer

    async with ScriptedEndpoint(noting("A")) as a, ScriptedEndpoint(noting("B")) as b:
        plan = plan_for(a.url, against=Target(b.url), rounds=3, requests=2, warmup=0)
        report = await report_of(plan)

    assert "".join(order[6:]) == "AABBBBAAAABB"  # each began with its list of models and two prompts
    assert [asked.body for asked in a.asked[3:]] == [asked.body for asked in b.asked[3:]]
    assert [server.name for server in report.servers] == ["A", "B"]
    (comparison,) = report.comparisons
    assert {len(ratio.rounds) for ratio in comparison.ratios} == {3}


async def test_an_open_loop_is_reported_with_its_lag() -> None:
    async with ScriptedEndpoint(polite) as server:
        report = await report_of(plan_for(server.url, loads=[OpenLoop(500.0)]))

    assert report.measurements[0].load == OpenLoop(500.0)
    assert report.measurements[0].all.lag is not None
    assert report.measurements[0].all.lag.count == 4


async def test_a_report_survives_json() -> None:
    async with ScriptedEndpoint(polite) as server:
        loads = [ClosedLoop(2), OpenLoop(500.0)]
        report = await report_of(plan_for(server.url, against=Target(server.url), loads=loads, rounds=2))

    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report


async def test_interrupted_it_reports_what_was_measured_so_far() -> None:
    interrupt = asyncio.Event()

    async def answer(asked: Asked, reply: Reply) -> None:
        if len(server.asked) == 3 + 3:
            interrupt.set()
            await asyncio.Event().wait()
        await polite(asked, reply)

    async with ScriptedEndpoint(answer) as server:
        report = await report_of(plan_for(server.url, warmup=0, requests=100), interrupt=interrupt)

    assert report.stopped == "interrupted"
    assert report.measurements[0].all.succeeded == 2


async def test_a_round_that_was_cut_off_is_not_compared() -> None:
    interrupt = asyncio.Event()

    async def answer(asked: Asked, reply: Reply) -> None:
        if len(server.asked) == 6 + 4 + 2:
            interrupt.set()
            await asyncio.Event().wait()
        await polite(asked, reply)

    async with ScriptedEndpoint(answer) as server:
        plan = plan_for(server.url, against=Target(server.url), warmup=0, requests=2, rounds=4)
        report = await report_of(plan, interrupt=interrupt)

    assert [len(measurement.rounds) for measurement in report.measurements] == [1, 2]
    assert [len(ratio.rounds) for ratio in report.comparisons[0].ratios] == [1] * len(report.comparisons[0].ratios)


async def test_interrupted_before_anything_it_reports_nothing() -> None:
    interrupt = asyncio.Event()
    interrupt.set()

    async with ScriptedEndpoint(polite) as server:
        report = await report_of(plan_for(server.url), interrupt=interrupt)

    assert report.measurements == []


async def test_a_server_that_disappears_ends_the_benchmark_with_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "PAUSE_AFTER_FAILURE", 0.0)

    async def answer(asked: Asked, reply: Reply) -> None:
        if len(server.asked) > 3 + 4:
            reply.writer.close()
            return
        await polite(asked, reply)

    async with ScriptedEndpoint(answer) as server:
        report = await report_of(plan_for(server.url, warmup=0, requests=1000))

    assert report.stopped is not None
    assert "can't be reached any more" in report.stopped
    assert report.measurements[0].all.succeeded == 4


async def test_an_unknown_model_is_said_before_anything_is_measured() -> None:
    with pytest.raises(TargetError, match=r"refuses a request for 'no': 404: there is no such model$"):
        async with ScriptedEndpoint(refusing(404, "there is no such model", "model")) as server:
            await report_of(msgspec.structs.replace(plan_for(server.url), target=Target(server.url, "no")))


async def test_prompts_that_the_model_can_not_hold_are_said_before_anything_is_measured() -> None:
    async def answer(asked: Asked, reply: Reply) -> None:
        if asked.body is not None and len(asked.body["messages"][0]["content"].split()) > 40:
            await reply.json(400, {"error": {"message": "The prompt is too long."}})
            return
        await polite(asked, reply)

    with pytest.raises(TargetError, match="400: The prompt is too long"):
        async with ScriptedEndpoint(answer) as server:
            await report_of(plan_for(server.url, prompt=Lengths(300, 300)))


async def test_a_server_with_several_models_asks_for_a_choice() -> None:
    async def answer(asked: Asked, reply: Reply) -> None:
        await reply.json(200, {"data": [{"id": "one"}, {"id": "two"}]})

    with pytest.raises(TargetError, match="name one with --model: one, two"):
        async with ScriptedEndpoint(answer) as server:
            await report_of(plan_for(server.url))


@pytest.mark.parametrize("status", [400, 422])
async def test_a_server_that_refuses_ignore_eos_is_asked_without(status: int) -> None:
    async with ScriptedEndpoint(refusing(status, "unknown parameter ignore_eos", "ignore_eos")) as server:
        report = await report_of(plan_for(server.url))

    assert report.servers[0].ignore_eos is False
    assert report.measurements[0].all.failures == 0


async def test_a_server_that_refuses_max_tokens_gets_its_newer_name() -> None:
    message = "Use 'max_completion_tokens' instead."
    async with ScriptedEndpoint(refusing(400, message, "max_tokens")) as server:
        report = await report_of(plan_for(server.url))

    assert report.servers[0].ignore_eos is True
    assert report.measurements[0].all.failures == 0


async def test_a_server_that_counts_nothing_is_asked_for_a_token_a_word() -> None:
    async def answer(asked: Asked, reply: Reply) -> None:
        await reply.head()
        await reply.events({"choices": [{"index": 0, "text": "a"}]}, "[DONE]")
        await reply.end()

    async with ScriptedEndpoint(answer) as server:
        plan = plan_for(server.url)
        client = Client(Target(server.url, "m"), plan, asyncio.get_running_loop().time)
        found = await calibrate(client, plan)
        client.close()

    assert not found.counts
    assert found.scale.words(50) == 50


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loads": []}, "no load"),
        ({"loads": [ClosedLoop(2), ClosedLoop(2)]}, "twice"),
        ({"requests": None, "duration": None}, "needs an end"),
        ({"requests": 0}, "at least 1"),
        ({"duration": float("nan")}, "above 0"),
        ({"shared_prefix": -1}, "at least 0"),
    ],
)
def test_a_plan_that_can_not_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        plan_for("http://x", **changes)


@pytest.mark.parametrize("make", [lambda: ClosedLoop(0), lambda: OpenLoop(0.0), lambda: OpenLoop(float("inf"))])
def test_a_load_that_can_not_be_is_refused(make: Any) -> None:
    with pytest.raises(BenchError):
        make()
