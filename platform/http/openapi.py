"""Documents bodies that the routes read themselves."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that takes `model` as its JSON body."""
    schema = model.model_json_schema(by_alias=True, ref_template="#/components/schemas/{model}")
    # Definitions stay inside the body's own schema: routes do not share components.
    definitions = schema.pop("$defs", {})
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": _inlined(schema, definitions)}}}
    }


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, dict):
        reference = node.get("$ref")
        if isinstance(reference, str):
            return _inlined(definitions[reference.rsplit("/", 1)[1]], definitions)
        return {key: _inlined(value, definitions) for key, value in node.items()}
    if isinstance(node, list):
        return [_inlined(each, definitions) for each in node]
    return node
