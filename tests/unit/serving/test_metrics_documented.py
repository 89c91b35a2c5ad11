"""docs/metrics.md says what is exported, no less and no more."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).parent))

from exported_metrics import exported_metrics

from remora.namespaces.blocks import EvictionCause

DOCS = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"
#: Names end in what they count: a unit, things, or _total for counters.
_UNITS = ("_seconds", "_bytes", "_tokens", "_sequences", "_requests", "_blocks", "_extents", "_steps")


def documented() -> dict[str, tuple[str, tuple[str, ...]]]:
    rows = re.findall(r"^\| `(remora_\w+)` \| (\w+) \| ([^|]*) \|", DOCS.read_text(), re.MULTILINE)
    assert len({name for name, _, _ in rows}) == len(rows), "a metric is documented twice"
    return {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def test_every_metric_is_documented_with_its_type_and_labels() -> None:
    exported = {each.name: (each.type, each.labels) for each in exported_metrics().values()}
    assert documented() == exported


def test_every_cause_of_an_eviction_is_explained() -> None:
    assert set(re.findall(r"^\| `(\w+)` \| [^|]+ \|$", DOCS.read_text(), re.MULTILINE)) == set(get_args(EvictionCause))


def test_names_of_durations_and_sizes_end_in_their_unit() -> None:
    for each in exported_metrics().values():
        if each.type == "histogram":
            assert each.name.endswith("_seconds")
        if each.type == "counter":
            assert each.name.endswith("_total")
        if re.search(r"\b(bytes|memory|size)\b", each.text, re.IGNORECASE) and each.type == "gauge":
            assert each.name.endswith(_UNITS), each.name
