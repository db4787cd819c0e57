"""The description of the API."""

from __future__ import annotations

import json
import re

from asgi_driver import JSON, Driver, chat, completion
from scripted_engine import ScriptedEngine

from furnace.server.apis.chat.types import ChatRequest
from furnace.server.apis.completions.types import CompletionRequest


def fetch(path):
    replies = []

    async def test(driver):
        replies.append(await driver.call(path, method="GET"))

    Driver(ScriptedEngine()).run(test)
    return replies[0]


def test_the_document_describes_every_route_of_the_application():
    document = fetch("/openapi.json").json
    assert document["openapi"].startswith("3.1")
    from furnace.server import Server

    routes = {
        (re.sub(r"\{\w+:path\}", "{model}", route.path), method)
        for route in Server()._app._app.routes
        for method in route.methods
        if method != "OPTIONS"
    } - {("/openapi.json", "GET"), ("/docs", "GET")}
    described = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    assert routes == described


def test_the_document_has_every_field_of_the_requests_and_no_dangling_reference():
    document = fetch("/openapi.json").json
    schemas = document["components"]["schemas"]
    for kind in (ChatRequest, CompletionRequest):
        assert set(schemas[kind.__name__]["properties"]) == set(kind.__struct_fields__)
        assert all(f"{field}:" in schemas[kind.__name__]["description"] or field in
                   schemas["StreamOptions"]["properties"] or field in _inherited() for field in
                   kind.__struct_fields__)  # fmt: skip
    for reference in re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(document)):
        assert reference in schemas


def _inherited():
    from furnace.server.apis.sampling import SamplingFields

    return SamplingFields.__struct_fields__


def test_what_is_answered_has_the_fields_that_are_described():
    schemas = fetch("/openapi.json").json["components"]["schemas"]

    async def test(driver):
        whole = (await driver.call("/v1/chat/completions", chat())).json
        assert set(whole) <= set(schemas["ChatCompletion"]["properties"])
        assert set(schemas["ChatCompletion"]["required"]) <= set(whole)
        options = {"include_usage": True}
        *chunks, _ = (await driver.call("/v1/chat/completions", chat(stream=True, stream_options=options))).events
        for chunk in chunks:
            assert set(chunk) <= set(schemas["ChatChunk"]["properties"])
        *chunks, _ = (await driver.call("/v1/completions", completion(stream=True))).events
        for chunk in chunks:
            assert set(chunk["choices"][0]) == set(schemas["CompletionChunkChoice"]["properties"])

    Driver(ScriptedEngine()).run(test)


def test_the_page_is_plain_html_that_loads_nothing():
    page = fetch("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    text = page.body.decode()
    assert "/v1/chat/completions" in text
    assert "max_completion_tokens" in text
    assert "<script" not in text
    assert "http:" not in text
    assert "https:" not in text
    assert "<link" not in text
    anchors = set(re.findall(r"id='(\w+)'", text))
    assert set(re.findall(r"href='#(\w+)'", text)) <= anchors


def test_no_other_site_may_read_an_answer():
    """Cross-origin sharing is off: a browser keeps from a page what no header permits."""

    async def test(driver):
        origin = (b"origin", b"https://elsewhere.example")
        for method, path, body in (
            ("GET", "/v1/models", b""),
            ("GET", "/docs", b""),
            ("POST", "/v1/chat/completions", chat()),
            ("POST", "/v1/chat/completions", chat(stream=True)),
        ):
            reply = await driver.call(path, body, method=method, headers=[JSON, origin])
            assert reply.status == 200
            assert not [name for name in reply.headers if name.startswith("access-control")]
        asked = [origin, (b"access-control-request-method", b"POST")]
        preflight = await driver.call("/v1/chat/completions", method="OPTIONS", headers=asked)
        assert not [name for name in preflight.headers if name.startswith("access-control")]

    Driver(ScriptedEngine()).run(test)
