"""What a run's REST routes take and answer, in OpenAPI 3.1, made from the handlers' own signatures and docstrings."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import msgspec

from .actor import Actor
from .remote import TOKEN_HEADER

__all__ = ["Json", "arguments_type", "describe"]

ABOUT = """\
A worker in any language leases prompts, samples under the version that its lease names, and posts whole groups.

Every request may be made again: what is asked twice happens once. So ask again after 429 (not yet: something is full
or empty; wait for Retry-After), after 503, and after a connection that broke. 410 is the end of the run. A request
waits for up to {wait_s:g} s before it becomes 429, and for as long in line if many wait on its route.
"""
PROBLEMS = {
    "401": "the token is wrong or missing",
    "408": "the body did not come in time",
    "410": "the run has ended",
    "413": "the body is too large",
    "422": "the arguments are not what is described here",
    "429": "not yet: ask again after Retry-After seconds",
    "500": "the handler refused it; the error says why",
    "503": "whoever answers is being restarted, or there are too many connections: ask again",
}

Json = dict[str, Any]


def arguments_type(handler: Callable[..., Any]) -> type[msgspec.Struct]:
    """A strict type for the handler's arguments, so that a body is checked before anything sees it."""
    hints = get_type_hints(handler, include_extras=True)  # a bound of a number is a part of its type
    fields: list[Any] = []
    for name, parameter in list(inspect.signature(handler).parameters.items())[1:]:
        default = () if parameter.default is parameter.empty else (parameter.default,)
        fields.append((name, hints[name], *default))
    return msgspec.defstruct(
        f"{handler.__qualname__} arguments", fields, forbid_unknown_fields=True, kw_only=True
    )


def describe(roles: Mapping[str, type[Actor]], wait_s: float, others: Mapping[str, str]) -> Json:
    """The document. others: routes that no role lists ("GET /v1/run"), and what each is for."""
    handlers = {
        route: getattr(actor, method) for actor in roles.values() for route, method in actor.http.items()
    }
    arguments = {route: arguments_type(handler) for route, handler in handlers.items()}
    answers = {
        route: get_type_hints(handler, include_extras=True).get("return", Any)
        for route, handler in handlers.items()
    }
    schemas, components = msgspec.json.schema_components(
        [*arguments.values(), *answers.values()], ref_template="#/components/schemas/{name}"
    )
    taken, given = schemas[: len(handlers)], schemas[len(handlers) :]
    paths: dict[str, Json] = {}
    for (route, handler), takes, gives in zip(handlers.items(), taken, given, strict=True):
        verb, path = route.split()
        name = takes["$ref"].rpartition("/")[2]
        operation = _operation(inspect.getdoc(handler) or "", gives)
        operation |= _request(verb, components.pop(name))
        paths.setdefault(path, {})[verb.lower()] = operation
    for route, text in others.items():
        verb, path = route.split()
        paths.setdefault(path, {})[verb.lower()] = _other(path, text)
    components["Error"] = {
        "type": "object",
        "properties": {"error": {"type": "string"}},
        "required": ["error"],
    }
    key = {
        "type": "apiKey",
        "in": "header",
        "name": TOKEN_HEADER,
        "description": "what the run's token file holds",
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "A Rolecall run", "version": "1", "description": ABOUT.format(wait_s=wait_s)},
        "paths": paths,
        "components": {"schemas": _finite(components), "securitySchemes": {"token": key}},
        "security": [{"token": []}],
    }


def _operation(doc: str, gives: Json) -> Json:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses: Json = {
        "200": {"description": "the answer", "content": {"application/json": {"schema": gives}}}
    }
    for status, text in PROBLEMS.items():
        responses[status] = {"description": text, "content": error}
    after = {"Retry-After": {"description": "seconds", "schema": {"type": "number", "minimum": 0}}}
    responses["429"] = {"description": PROBLEMS["429"], "headers": after}
    responses["503"] |= {"headers": after, "content": error | {"text/plain": {"schema": {"type": "string"}}}}
    summary, _, rest = doc.partition("\n\n")
    return {"summary": " ".join(summary.split()), "description": rest, "responses": responses}


def _request(verb: str, takes: Json) -> Json:
    """Where the arguments are: in the query of a GET, in the body of others."""
    takes = _finite({name: value for name, value in takes.items() if name != "title"})
    required = takes.get("required", [])
    if verb != "GET":
        return {
            "requestBody": {"required": bool(required), "content": {"application/json": {"schema": takes}}}
        }
    fields = takes["properties"].items()
    return {
        "parameters": [
            {"name": name, "in": "query", "required": name in required, "schema": schema}
            for name, schema in fields
        ]
    }


def _other(path: str, text: str) -> Json:
    kind, schema = "application/json", {}
    if path.startswith("/v1/relay"):
        kind, schema = "application/octet-stream", {"type": "string", "contentEncoding": "binary"}
    if path == "/v1/docs":
        kind, schema = "text/html", {"type": "string"}
    operation = _operation(text, schema)
    operation["responses"]["200"]["content"] = {kind: {"schema": schema}}
    return operation | ({} if path.startswith(("/v1/r",)) else {"security": []})


def _finite(schema: Any) -> Any:
    """Without defaults that JSON has no word for."""
    if isinstance(schema, dict):
        return {name: _finite(value) for name, value in schema.items() if not _is_nan(value)}
    return [_finite(value) for value in schema] if isinstance(schema, list) else schema


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
