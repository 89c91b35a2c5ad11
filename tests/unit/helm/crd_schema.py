"""Strict JSON schema of KubeRay's kinds, made from their custom resource definitions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_INT_OR_STRING = {"anyOf": [{"type": "integer"}, {"type": "string"}]}


def strict_schema(crd_path: Path, version: str) -> dict[str, Any]:
    """JSON schema of a kind; unknown keys are errors, as `kubectl --validate=strict` has it."""
    definition = yaml.load(crd_path.read_text(), yaml.CSafeLoader)
    (found,) = [each for each in definition["spec"]["versions"] if each["name"] == version]
    schema = _hardened(found["schema"]["openAPIV3Schema"])
    # The API server knows what metadata is; the definition only says that it is an object.
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def _hardened(node: dict[str, Any]) -> dict[str, Any]:
    if node.get("x-kubernetes-int-or-string"):
        return _INT_OR_STRING
    known = (
        "type",
        "enum",
        "pattern",
        "minimum",
        "maximum",
        "required",
        "minItems",
        "maxItems",
        "minLength",
        "maxLength",
    )
    result = {key: node[key] for key in known if key in node}
    if "properties" in node:
        result["properties"] = {name: _hardened(child) for name, child in node["properties"].items()}
        if not node.get("x-kubernetes-preserve-unknown-fields"):
            result["additionalProperties"] = False
    elif isinstance(node.get("additionalProperties"), dict):
        result["additionalProperties"] = _hardened(node["additionalProperties"])
    if "items" in node:
        result["items"] = _hardened(node["items"])
    if node.get("nullable"):
        result = {"anyOf": [result, {"type": "null"}]}
    return result
