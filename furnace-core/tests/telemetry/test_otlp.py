"""When traces are sent, and what is said when they can't be."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from furnace.telemetry import otlp
from furnace.telemetry.otlp import tracer_provider_from_environment

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("EXPORTER_OTLP_ENDPOINT", "EXPORTER_OTLP_TRACES_ENDPOINT", "TRACES_EXPORTER", "SDK_DISABLED"):
        monkeypatch.delenv(f"OTEL_{name}", raising=False)
    for name in ("EXPORTER_OTLP_PROTOCOL", "EXPORTER_OTLP_TRACES_PROTOCOL", "SERVICE_NAME", "RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(f"OTEL_{name}", raising=False)


def test_without_an_endpoint_nothing_is_made():
    with tracer_provider_from_environment() as provider:
        assert provider is None


@pytest.mark.parametrize(("name", "value"), [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")])
def test_the_standard_switches_turn_it_off(monkeypatch, name, value):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", NOWHERE)
    monkeypatch.setenv(name, value)

    with tracer_provider_from_environment() as provider:
        assert provider is None


def test_a_missing_exporter_is_a_line_with_the_command_that_installs_it(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", NOWHERE)
    monkeypatch.setattr(otlp, "EXPORTER", "opentelemetry.exporter.nobody.http")

    with tracer_provider_from_environment() as provider:
        assert provider is None
    assert "pip install 'furnace-core[otlp]'" in caplog.text


def test_another_protocol_is_a_line_too(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", NOWHERE)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")

    with tracer_provider_from_environment() as provider:
        assert provider is None
    assert "must be http/protobuf" in caplog.text


@pytest.mark.parametrize("named", [None, "mine"])
def test_spans_are_sent_at_the_end_at_the_latest(monkeypatch, named):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    bodies = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args):
            logging.getLogger("collector").debug("%s", args)

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        if named:
            monkeypatch.setenv("OTEL_SERVICE_NAME", named)
        with tracer_provider_from_environment() as provider:
            provider.get_tracer("furnace").start_span("a span of ours").end()
        collector.shutdown()
        thread.join()

    ((path, body),) = bodies
    assert path == "/v1/traces"
    assert b"a span of ours" in body
    assert (named or "furnace").encode() in body


@pytest.mark.parametrize("arguments", [["--help"], ["engines"], ["serve", "--help"]])
def test_commands_that_serve_nothing_import_no_opentelemetry(arguments):
    code = (
        "import sys; from furnace.cli import main; main(sys.argv[1:]); "
        "sys.exit(any(name.partition('.')[0] in ('opentelemetry', 'prometheus_client') for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
