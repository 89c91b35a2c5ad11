"""docs/traces.md says what is in traces, no less and no more, and nothing in the list of names is without use."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from remora.deployments.moves import Transfer
from remora.deployments.placement import RouteReason
from remora.namespaces.blocks import EvictionCause
from remora.platform.base import telemetry_names

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "traces.md").read_text()
CONSTANTS = {name: value for name, value in vars(telemetry_names).items() if name.isupper()}
ATTRIBUTE = re.compile(r"(?:gen_ai|remora|service|process|host|error)\.[a-z0-9_.]+")


def test_every_name_is_on_the_page_and_every_name_on_the_page_exists() -> None:
    attributes = {value for value in CONSTANTS.values() if ATTRIBUTE.fullmatch(value)}
    assert set(re.findall(rf"`({ATTRIBUTE.pattern})`", PAGE)) - {"remora.router"} == attributes
    operations = {value for name, value in CONSTANTS.items() if name.startswith("OPERATION_")} | {telemetry_names.FORK}
    spans = set(CONSTANTS.values()) - attributes - operations - {telemetry_names.PROVIDER}
    table = PAGE.split("## Spans")[1].split("## Attributes")[0]
    assert set(re.findall(r"^\| `(\w+(?:\.\w+)?)` \|", table, re.MULTILINE)) == spans
    assert set(re.findall(r"`(\w+) MODEL`", table)) == operations


def test_every_value_that_code_chooses_from_is_on_the_page() -> None:
    for name, values in (
        (telemetry_names.REMORA_ROUTE_REASON, RouteReason),
        (telemetry_names.REMORA_EVICT_CAUSE, EvictionCause),
        (telemetry_names.REMORA_MIGRATE_TRANSFER, Transfer),
    ):
        (meaning,) = re.findall(rf"^\| `{re.escape(name)}` \| (.*) \|$", PAGE, re.MULTILINE)
        assert set(re.findall(r"`(\w+)`", meaning)) == set(get_args(values)), name


def test_every_name_is_used() -> None:
    sources = [
        path.read_text()
        for room in ("platform", "deployments", "cache_actors")
        for path in (ROOT / room).rglob("*.py")
        if path.name != "telemetry_names.py"
    ]
    unused = [name for name in CONSTANTS if not any(re.search(rf"\bnames\.{name}\b", text) for text in sources)]
    assert unused == []
