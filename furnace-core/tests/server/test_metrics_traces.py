"""One span a request, when somebody collects them."""

from __future__ import annotations

import asyncio
import logging

import pytest
from asgi_driver import JSON, Driver, chat, completion
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from scripted_engine import Script, ScriptedEngine

from furnace.contracts import EngineFailedError
from furnace.server import Server
from furnace.telemetry import tracing

CHAT = "/v1/chat/completions"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01".encode()


class Traced(Driver):
    """A driver whose server makes spans."""

    def __init__(self, engine):
        super().__init__()
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.server = Server(tracer_provider=self.provider).llm(engine)

    @property
    def spans(self):
        return self.exporter.get_finished_spans()


def test_a_request_is_one_span_with_its_phases_as_events():
    async def test(driver):
        await driver.call(CHAT, chat(stream=True), headers=[JSON, (b"x-request-id", b"id-1")])
        (span,) = driver.spans
        assert span.name == "chat scripted"
        assert span.kind is SpanKind.SERVER
        assert [event.name for event in span.events] == [
            "furnace.started",
            "furnace.first_token",
            "furnace.decode_end",
        ]
        times = [span.start_time, *(event.timestamp for event in span.events), span.end_time]
        assert times == sorted(times)
        assert span.events[0].attributes == {"prompt_tokens": 2, "cached_tokens": 0}
        assert dict(span.attributes) == {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "furnace",
            "gen_ai.request.model": "scripted",
            "gen_ai.response.model": "scripted",
            "gen_ai.response.finish_reasons": ("stop",),
            "gen_ai.usage.input_tokens": 2,
            "gen_ai.usage.output_tokens": 3,
            "gen_ai.usage.cache_read.input_tokens": 0,
            "http.response.status_code": 200,
            "furnace.request_id": "id-1",
            "furnace.outcome": "stop",
        }
        assert span.parent is None

    Traced(ScriptedEngine()).run(test)


def test_the_clients_trace_goes_on_here_and_in_the_engine():
    engine = ScriptedEngine()

    async def test(driver):
        await driver.call(CHAT, chat(), headers=[JSON, (b"traceparent", PARENT), (b"tracestate", b"a=1")])
        (span,) = driver.spans
        assert f"{span.context.trace_id:032x}" == TRACE
        assert span.parent.span_id == 0x00F067AA0BA902B7
        assert engine.requests[0].trace["traceparent"] == f"00-{TRACE}-{span.context.span_id:016x}-01"
        assert engine.requests[0].trace["tracestate"] == "a=1"

    Traced(engine).run(test)


@pytest.mark.parametrize(
    "header", [b"garbage", b"\xff" * 20, b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01", b"x" * 600]
)
def test_a_traceparent_that_is_none_begins_a_trace(header):
    async def test(driver):
        reply = await driver.call(CHAT, chat(), headers=[JSON, (b"traceparent", header)])
        assert reply.status == 200
        (span,) = driver.spans
        assert span.parent is None

    Traced(ScriptedEngine()).run(test)


def test_an_unsampled_trace_stays_so():
    async def test(driver):
        header = PARENT[:-1] + b"0"
        assert (await driver.call(CHAT, chat(), headers=[JSON, (b"traceparent", header)])).status == 200
        assert not driver.spans

    Traced(ScriptedEngine()).run(test)


def test_what_is_refused_and_what_fails_has_a_span_without_the_prompt():
    engine = ScriptedEngine(script=Script(["a", EngineFailedError("x")]))

    async def test(driver):
        await driver.call(CHAT, chat(model="nobody", messages=[{"role": "user", "content": "secret"}]))
        await driver.call("/v1/completions", completion(prompt="secret", stream=True))
        refused, failed = driver.spans
        assert refused.name == "chat"
        assert refused.attributes["http.response.status_code"] == 404
        assert refused.attributes["error.type"] == "rejected"
        assert refused.status.status_code is StatusCode.UNSET
        assert failed.name == "text_completion scripted"
        assert failed.attributes["error.type"] == "error"
        assert failed.attributes["gen_ai.usage.output_tokens"] == 1
        assert failed.status.status_code is StatusCode.ERROR
        assert "secret" not in "".join(span.to_json() for span in driver.spans)

    Traced(engine).run(test)


def test_a_client_that_leaves_ends_the_span():
    async def test(driver):
        exchange = driver.open(CHAT, b'{"model":"scripted","stream":true,"messages":[{"role":"user","content":"a"}]}')
        await exchange.until(lambda reply: len(reply.writes) >= 3)
        exchange.disconnect()
        await exchange.end()
        (span,) = driver.spans
        assert span.attributes["furnace.outcome"] == "cancelled"
        assert span.events[-1].name == "furnace.decode_end"

    Traced(ScriptedEngine(script=Script([], never_ends=True))).run(test)


def test_the_line_in_the_log_has_the_id_of_the_trace(caplog):
    caplog.set_level(logging.INFO, "furnace.access")

    async def test(driver):
        await driver.call(CHAT, chat(), headers=[JSON, (b"traceparent", PARENT)])
        assert f"trace_id={TRACE}" in caplog.text

    Traced(ScriptedEngine()).run(test)


def test_without_a_provider_no_span_is_made_and_the_clients_headers_go_on(monkeypatch):
    engine = ScriptedEngine()
    monkeypatch.setattr(tracing, "RequestSpan", None)
    driver = Driver(engine)

    async def test():
        async with driver.server.running():
            await driver.call(CHAT, chat(), headers=[JSON, (b"traceparent", PARENT)])

    asyncio.run(test())
    assert engine.requests[0].trace == {"traceparent": PARENT.decode()}
