"""The chart's README names every value, with the default that it has."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml
from chart_support import CHART_DIR

#: Documented as a whole.
WHOLE = ("config", "env", "resources", "global")


def documented() -> dict[str, tuple[str, str]]:
    rows = re.findall(r"^\| `([^`]+)` \| (.+?) \| (.+) \|$", (CHART_DIR / "README.md").read_text(), re.MULTILINE)
    _, table = (CHART_DIR / "README.md").read_text().split("## Values")
    return {name: (default, text) for name, default, text in rows if f"| `{name}` |" in table}


def leaves(schema: dict[str, Any], definitions: dict[str, Any], path: str = "") -> set[str]:
    """Dotted paths of all values; those in a list's entries below `name[]`."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    name = path.rpartition(".")[2]
    if name in WHOLE or not schema.get("properties"):
        inside = schema.get("items", {})
        if path == "workers":
            return {path} | leaves(inside, definitions, f"{path}[]")
        return {path}
    return {
        leaf
        for key, child in schema["properties"].items()
        for leaf in leaves(child, definitions, f"{path}.{key}" if path else key)
    }


def test_every_value_of_the_schema_is_documented_and_no_other() -> None:
    schema = json.loads((CHART_DIR / "values.schema.json").read_text())
    assert set(documented()) == leaves(schema, schema["$defs"]) - {"global"}


def test_every_default_is_the_one_of_the_values_file() -> None:
    values = yaml.safe_load((CHART_DIR / "values.yaml").read_text())
    for name, (default, _) in documented().items():
        if "[]" in name:
            assert default == "–"
            continue
        here = values
        for part in name.split("."):
            here = here[part]
        if isinstance(here, dict | list) and here:
            assert default == "see values.yaml", name
        else:
            assert default == f"`{json.dumps(here)}`", name


def test_every_value_of_the_values_file_is_in_the_schema() -> None:
    values = yaml.safe_load((CHART_DIR / "values.yaml").read_text())
    schema = json.loads((CHART_DIR / "values.schema.json").read_text())
    assert set(values) == set(schema["properties"]) - {"global"}
