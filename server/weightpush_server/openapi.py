"""What ``/openapi.json`` says about our routes. They read their bodies themselves, so FastAPI cannot know."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel

from weightpush_protocol.errors import ErrorBody

#: Status -> when. Every error has the one shape.
_ERRORS: Final = {
    401: "no or wrong control token",
    408: "the body did not come in time",
    409: "a conflict, or a failed update",
    413: "over a limit",
    422: "refused before anything was changed",
    429: "too many control calls at the same time",
    500: "a fault of the server itself",
    503: "the server does not serve",
}


def responses(answer: type[BaseModel] | None, *, or_503: bool = False) -> dict[int | str, dict[str, Any]]:
    """Return FastAPI's ``responses`` of a route: 200 with ``answer``, and the errors.

    ``or_503``: the answer also comes with 503, while the server does not serve.
    """
    found: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorBody, "description": text} for status, text in _ERRORS.items()
    }
    if answer is not None:
        found[200] = {"model": answer}
    if or_503 and answer is not None:
        found[503] = {"model": answer, "description": _ERRORS[503]}
    return found


def json_body(model: type[BaseModel], **other_kinds: dict[str, Any]) -> dict[str, Any]:
    """Return FastAPI's ``openapi_extra`` of a route that takes ``model``; ``other_kinds`` are further media types."""
    content = {"application/json": {"schema": _resolved(model)}, **other_kinds}
    return {"requestBody": {"required": True, "content": content}}


def query(model: type[BaseModel]) -> list[dict[str, Any]]:
    """Return the query parameters that ``model`` holds, as OpenAPI lists them. All may be left out."""
    properties: dict[str, Any] = _resolved(model)["properties"]
    return [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in properties.items()]


def _resolved(model: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of ``model`` without references: those of pydantic point to where OpenAPI has nothing."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def resolve(part: Any) -> Any:
        if isinstance(part, list):
            return [resolve(item) for item in part]
        if not isinstance(part, dict):
            return part
        found = {key: resolve(value) for key, value in part.items() if key != "$ref"}
        if "$ref" in part:
            return {**resolve(definitions[part["$ref"].rpartition("/")[2]]), **found}
        return found

    resolved: dict[str, Any] = resolve(schema)
    return resolved
