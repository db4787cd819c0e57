"""What a scraper reads at /metrics."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from asgi_driver import JSON, PATIENCE, Driver, chat, completion
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import Script, ScriptedEngine

from furnace.contracts import EngineBusyError, EngineFailedError, FinishReason, SchedulerStats, Text
from furnace.server import Server
from furnace.telemetry.names import exposed_names

CHAT = "/v1/chat/completions"

STATS = SchedulerStats(
    waiting=3,
    running=2,
    steps=10,
    step_seconds=0.5,
    prefill_tokens=70,
    decode_tokens=30,
    kv_used=64,
    kv_cached=16,
    kv_total=256,
    preemptions=4,
    prefix_hits=5,
    evictions=6,
)


class Scraped:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = list(text_string_to_metric_families(text))

    @property
    def samples(self) -> Iterator[Any]:
        return (sample for family in self.families for sample in family.samples)

    def value(self, name: str, **labels: str) -> float:
        """The value of the only sample with these labels."""
        (value,) = self.values(name, **labels)
        return value

    def values(self, name: str, **labels: str) -> list[float]:
        return [s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items()]


async def scrape(driver: Driver, accept: bytes = b"") -> Scraped:
    reply = await driver.call("/metrics", method="GET", headers=[(b"accept", accept)])
    assert reply.status == 200
    return Scraped(reply.body.decode())


def scheduled(name="scripted"):
    engine = ScriptedEngine(name)
    engine.stats = lambda: STATS
    return engine


def test_every_metric_that_has_a_name_is_there_and_no_other():
    async def test(driver):
        await driver.call(CHAT, chat())
        scraped = await scrape(driver)
        # A counter's family has its name without the suffix.
        found = {f.name + ("_total" if f.type == "counter" else "") for f in scraped.families}
        assert found == exposed_names()
        assert all(f.documentation for f in scraped.families)

    Driver(scheduled()).run(test)


def test_the_formats_are_those_of_prometheus():
    async def test(driver):
        reply = await driver.call("/metrics", method="GET")
        assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        accept = b"application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
        reply = await driver.call("/metrics", method="GET", headers=[(b"accept", accept)])
        assert reply.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
        assert list(parse_openmetrics(reply.body.decode()))
        garbage = await driver.call("/metrics", method="GET", headers=[(b"accept", b"\xff\x00;;q=x,,")])
        assert garbage.status == 200

    Driver(scheduled()).run(test)


def test_both_names_of_a_measurement_say_the_same():
    async def test(driver):
        for _ in range(3):
            await driver.call(CHAT, chat(stream=True))
        await driver.call("/v1/completions", completion())
        scraped = await scrape(driver)
        for ours, vllm in [
            ("gen_ai_server_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
            ("gen_ai_server_time_per_output_token_seconds", "vllm:request_time_per_output_token_seconds"),
            ("gen_ai_server_request_duration_seconds", "vllm:e2e_request_latency_seconds"),
        ]:
            for suffix in ("_count", "_sum"):
                both = [sum(scraped.values(name + suffix)) for name in (ours, vllm)]
                assert both[0] == pytest.approx(both[1])
            assert scraped.value(f"{ours}_count", gen_ai_operation_name="chat", gen_ai_request_model="scripted") == 3
            assert scraped.value(f"{ours}_count", gen_ai_operation_name="text_completion") == 1
            assert scraped.value(f"{vllm}_count", model_name="scripted") == 4
        # Three tokens each: two gaps.
        for name in ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"):
            assert scraped.value(f"{name}_count") == 8
        usage = "gen_ai_client_token_usage_sum"
        assert sum(scraped.values(usage, gen_ai_token_type="output")) == 12
        assert scraped.value("vllm:generation_tokens_total") == scraped.value("vllm:request_generation_tokens_sum")
        assert sum(scraped.values(usage, gen_ai_token_type="input")) == scraped.value("vllm:prompt_tokens_total") == 8
        for name in ("queue", "prefill", "decode"):
            assert scraped.value(f"vllm:request_{name}_time_seconds_count") == 4

    Driver(ScriptedEngine()).run(test)


def test_requests_count_by_how_they_ended_with_what_they_used():
    engine = ScriptedEngine()
    endless = Script([], never_ends=True)
    scripts = [
        Script(),
        Script(["a"], reason=FinishReason.LENGTH),
        Script(["a", "b", EngineFailedError("x")]),
        Script(refusal=EngineBusyError("full")),
        endless,
    ]
    engine.choose = lambda request: scripts.pop(0)

    async def test(driver):
        for _ in range(4):
            await driver.call(CHAT, chat(stream=True))
        exchange = driver.open("/v1/completions", b'{"model":"scripted","prompt":"a b c","stream":true}')
        await exchange.until(lambda reply: len(reply.writes) >= 3)
        running = await scrape(driver)
        assert running.value("vllm:num_requests_running") == 1
        assert running.value("vllm:prompt_tokens_total") == 9
        assert running.value("vllm:generation_tokens_total") >= 6 + 3
        exchange.disconnect()
        await exchange.end()
        scraped = await scrape(driver)
        finished = {s.labels["outcome"]: s.value for s in scraped.samples if s.name.startswith("furnace_requests_fin")}
        assert finished == {"stop": 1, "length": 1, "tool_calls": 0, "content_filter": 0, "cancelled": 1, "error": 1}
        reasons = {
            s.labels["finished_reason"]: s.value for s in scraped.samples if s.name.startswith("vllm:request_su")
        }
        assert reasons == {"stop": 1, "length": 1, "abort": 1, "error": 1}
        assert scraped.value("furnace_requests_rejected_total") == 1
        assert scraped.value("furnace_requests_total") == 5
        assert scraped.value("vllm:prompt_tokens_total") == 2 + 2 + 2 + 3
        used = engine.generations[-1].usage.completion_tokens
        assert scraped.value("vllm:generation_tokens_total") == 3 + 1 + 2 + used
        durations = "gen_ai_server_request_duration_seconds_count"
        assert scraped.value(durations, error_type="error") == 1
        assert scraped.value(durations, error_type="cancelled") == 1
        assert scraped.value("vllm:num_requests_running") == 0

    Driver(engine).run(test)


def test_the_scheduler_is_read_when_somebody_looks():
    async def test(driver):
        scraped = await scrape(driver)
        assert scraped.value("vllm:num_requests_running", model_name="scripted") == 2
        assert scraped.value("vllm:num_requests_waiting") == 3
        assert scraped.value("vllm:kv_cache_usage_perc") == 0.25
        assert scraped.value("vllm:num_preemptions_total") == 4
        assert scraped.value("furnace_step_time_seconds_total") == 0.5
        assert scraped.value("furnace_steps_total") == 10
        assert scraped.value("furnace_kv_size") == 256
        assert scraped.value("furnace_prefix_hits_total") == 5

    Driver(scheduled()).run(test)


def test_what_an_engine_does_not_count_is_left_out():
    class Older:
        """The statistics of an engine that knows few fields."""

        waiting, running, kv_used, kv_total = 1, 1, 0, None

    older, silent, broken = ScriptedEngine("older"), ScriptedEngine("silent"), ScriptedEngine("broken")
    older.stats = Older

    def fail():
        raise RuntimeError("no")

    broken.stats = fail

    async def test(driver):
        scraped = await scrape(driver)
        assert scraped.value("vllm:num_requests_waiting", model_name="older") == 1
        assert not scraped.values("vllm:num_preemptions_total")
        assert not scraped.values("vllm:kv_cache_usage_perc")
        assert scraped.value("vllm:num_requests_running", model_name="silent") == 0
        assert scraped.value("vllm:num_requests_running", model_name="broken") == 0

    Driver(older, silent, broken).run(test)


def test_servers_in_one_process_share_nothing():
    async def inner(driver):
        assert not (await scrape(driver)).values("vllm:e2e_request_latency_seconds_count")

    async def test(driver):
        await driver.call(CHAT, chat())
        assert (await scrape(driver)).value("vllm:e2e_request_latency_seconds_count") == 1
        other = Driver(ScriptedEngine("other"))
        async with other.server.running():
            await inner(other)

    Driver(ScriptedEngine()).run(test)


def test_a_name_with_quotes_and_line_breaks_stays_one_label():
    name = 'a"b\\c\nvllm:forged 1'
    engine = ScriptedEngine(name)

    async def test(driver):
        await driver.call(CHAT, chat(model=name))
        scraped = await scrape(driver)
        assert scraped.value("vllm:e2e_request_latency_seconds_count", model_name=name) == 1
        assert not scraped.values("vllm:forged")

    Driver(engine).run(test)


def test_an_unknown_model_makes_no_series():
    async def test(driver):
        await driver.call(CHAT, chat(model="nobody"))
        assert "nobody" not in (await scrape(driver)).text

    Driver(ScriptedEngine()).run(test)


def test_it_answers_before_the_models_are_there_and_is_not_in_the_log(caplog):
    caplog.set_level(logging.INFO, "furnace.access")
    driver = Driver(ScriptedEngine())

    async def test():
        assert "vllm:prompt_tokens_total{" not in (await scrape(driver)).text

    import asyncio

    asyncio.run(test())
    assert not [record for record in caplog.records if record.name == "furnace.access"]


def test_a_step_with_many_tokens_counts_each():
    engine = ScriptedEngine(script=Script(["a", [Text("b", [1, 2, 3])], [Text("c", [4]), Text("d", [5])]]))

    async def test(driver):
        await driver.call(CHAT, chat(), headers=[JSON])
        assert (await scrape(driver)).value("vllm:inter_token_latency_seconds_count") == 5

    Driver(engine).run(test)


def test_it_works_over_a_socket_and_with_head(server: Server):
    import httpx

    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        answer = client.get("/metrics")
        assert answer.status_code == 200
        assert "x-request-id" in answer.headers
        assert client.head("/metrics").status_code == 200
        assert client.get("/v1/metrics").status_code == 404
