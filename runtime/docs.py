"""The REST routes as a page to read, of plain HTML that needs nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

from .openapi import Json
from .remote import TOKEN_HEADER

__all__ = ["page"]

STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;color:#222}
code,pre{font:.875em/1.5 ui-monospace,monospace}h2{margin-top:2.5rem;border-top:1px solid #ccc;padding-top:1rem}
td{padding:.1rem 1rem .1rem 0;vertical-align:top}pre{white-space:pre-wrap}
@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}a{color:#8bf}}"""


def page(document: Json) -> str:
    """An OpenAPI document of `describe` as HTML."""
    info = document["info"]
    parts = [
        f"<!doctype html><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{escape(info['title'])}</title><style>{STYLE}</style>"
    ]
    parts.append(f"<h1>{escape(info['title'])}</h1>{_text(info['description'])}")
    parts.append(f"<p>Every request has the header <code>{TOKEN_HEADER}</code>, unless it says otherwise.")
    routes = {
        f"{verb.upper()} {path}": operation
        for path, operations in document["paths"].items()
        for verb, operation in operations.items()
    }
    parts += ["<ul>", *(f'<li><a href="#{_id(route)}">{escape(route)}</a>' for route in routes), "</ul>"]
    for route, operation in routes.items():
        parts += _section(route, operation)
    for name, schema in document["components"]["schemas"].items():
        parts.append(f'<h2 id="{escape(name)}">{escape(name)}</h2>{_text(schema.get("description", ""))}')
        parts += _fields(schema)
    return "\n".join(parts)


def _section(route: str, operation: Json) -> Iterator[str]:
    yield f'<h2 id="{_id(route)}"><code>{escape(route)}</code></h2>'
    yield _text(operation["summary"]) + _text(operation["description"])
    yield "<p>Needs no token." if operation.get("security") == [] else ""
    body = operation.get("requestBody", {}).get("content", {})
    for kind, content in body.items():
        yield f"<h3>Body, {escape(kind)}</h3>"
        yield from _fields(content["schema"])
    if operation.get("parameters"):
        yield "<h3>Query</h3>"
        parameters = operation["parameters"]
        yield from _fields(
            {
                "properties": {one["name"]: one["schema"] for one in parameters},
                "required": [one["name"] for one in parameters if one["required"]],
            }
        )
    yield "<h3>Answers</h3><table>"
    for status, response in operation["responses"].items():
        schema = next(iter(response.get("content", {}).values()), {}).get("schema", {})
        what = _type(schema) if status == "200" else escape(response["description"])
        yield f"<tr><td>{status}<td>{what}"
    yield "</table>"


def _id(route: str) -> str:
    return escape(re.sub(r"\W+", "-", route))


def _text(text: str) -> str:
    """A docstring: paragraphs that flow, but for those with columns or indented lines."""
    parts: list[str] = []
    for part in filter(None, text.split("\n\n")):
        as_it_is = re.search(r"^ |^\w+: {2,}", part, re.MULTILINE)
        parts.append(f"<pre>{escape(part)}</pre>" if as_it_is else f"<p>{escape(part)}</p>")
    return re.sub("`+([^`]+)`+", r"<code>\1</code>", "\n".join(parts))


def _fields(schema: Json) -> Iterator[str]:
    yield "<table>"
    for name, field in schema.get("properties", {}).items():
        needed = "" if name in schema.get("required", []) else "may be left out"
        yield f"<tr><td><code>{escape(name)}</code><td>{_type(field)}<td>{needed}"
    yield "</table>"


def _type(schema: Json) -> str:
    """A schema in a few words of HTML."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if schema.get("type") == "array":
        return f"array of {_type(schema.get('items', {}))}"
    if schema.get("type") == "object":
        return f"object of {_type(schema.get('additionalProperties', {}))}"
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {_number(schema[name])}" for name, sign in bounds.items() if name in schema]
    return escape(", ".join([schema.get("type", "anything"), *limits]))


def _number(value: float) -> str:
    """Large powers of two as such."""
    whole = int(value)
    power = whole == value and whole >= 2**31 and not whole & (whole - 1)
    return f"2^{whole.bit_length() - 1}" if power else str(value)
