"""Brings the configuration's part of values.schema.json up to date with the code: python helm/update_schema.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from remora.platform.base.config import RemoraConfig

SCHEMA_PATH = Path(__file__).with_name("values.schema.json")


def config_definitions() -> dict[str, Any]:
    """JSON schema of every section, by the name of its class."""
    schema = RemoraConfig.model_json_schema(ref_template="#/$defs/{model}")
    sections: dict[str, Any] = schema.pop("$defs")
    definitions: dict[str, Any] = _bare({**sections, RemoraConfig.__name__: schema})
    return definitions


def _bare(node: Any) -> Any:
    """Without titles and descriptions: docs/configuration.md has better ones."""
    if isinstance(node, dict):
        texts = ("title", "description")
        return {name: _bare(child) for name, child in node.items() if name not in texts or not isinstance(child, str)}
    return [_bare(child) for child in node] if isinstance(node, list) else node


def updated(text: str) -> str:
    """The file's text with present definitions; those of the chart itself (lower case) stay."""
    document = json.loads(text)
    own = {name: value for name, value in document["$defs"].items() if name[0].islower()}
    document["$defs"] = {**own, **config_definitions()}
    return json.dumps(document, indent=2) + "\n"


if __name__ == "__main__":
    SCHEMA_PATH.write_text(updated(SCHEMA_PATH.read_text()))
