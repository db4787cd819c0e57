"""The OpenAPI document as a page: plain HTML, nothing loaded from anywhere, no script."""

from __future__ import annotations

from functools import lru_cache
from html import escape
from typing import Any

from furnace.server.page.openapi import openapi_document

__all__ = ["html_page"]

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code { font-family: ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; }
td, th { border-bottom: 1px solid #8884; padding: .3rem .6rem; text-align: left; vertical-align: top; }
@media (prefers-color-scheme: dark) { body { background: #161616; color: #ddd; } a { color: #8bf; } }
"""


@lru_cache(maxsize=1)
def html_page() -> bytes:
    """The page, encoded."""
    document = openapi_document()
    operations = "".join(
        _operation(path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    types = "".join(_type(name, schema) for name, schema in document["components"]["schemas"].items())
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width'><title>furnace API</title>"
        f"<style>{_STYLE}</style><h1>furnace {escape(document['info']['version'])}</h1>"
        "<p>The same for tools: <a href='openapi.json'>openapi.json</a></p>"
        f"<h2>Operations</h2>{operations}<h2>Types</h2>{types}</html>"
    ).encode()


def _operation(path: str, method: str, operation: dict[str, Any]) -> str:
    lines = [f"<h3><code>{method.upper()} {escape(path)}</code></h3><p>{escape(operation['summary'])}</p><table>"]
    if "requestBody" in operation:
        lines.append(f"<tr><td>body<td>{_content(operation['requestBody']['content'])}<td>")
    for status, response in operation["responses"].items():
        text = escape(response["description"])
        lines.append(f"<tr><td>{escape(status)}<td>{_content(response['content'])}<td>{text}")
    return "".join(lines) + "</table>"


def _content(content: dict[str, Any]) -> str:
    return "<br>".join(f"{escape(kind)}: {_shape(value['schema'])}" for kind, value in content.items())


def _type(name: str, schema: dict[str, Any]) -> str:
    text = escape(schema.get("description", ""))
    required = schema.get("required", [])
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code>{'' if field in required else ' (optional)'}<td>{_shape(shape)}"
        for field, shape in schema.get("properties", {}).items()
    )
    body = f"<table>{rows}</table>" if rows else f"<p>{_shape(schema)}</p>"
    return f"<h3 id='{escape(name)}'>{escape(name)}</h3><p style='white-space:pre-wrap'>{text}</p>{body}"


def _shape(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = escape(schema["$ref"].rsplit("/", 1)[-1])
        return f"<a href='#{name}'>{name}</a>"
    if "anyOf" in schema:
        return " or ".join(_shape(option) for option in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(str(value))}</code>" for value in schema["enum"])
    kind = escape(str(schema.get("type", "any")))
    return f"{kind} of {_shape(schema['items'])}" if schema.get("items") else kind
