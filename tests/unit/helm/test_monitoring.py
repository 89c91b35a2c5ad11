"""Alerts and the dashboard ask for metrics that exist."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_support import CHART_DIR, Manifests, named

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))

from exported_metrics import exported_metrics, sample_names


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((CHART_DIR / "files" / "alerts.yaml").read_text())
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((CHART_DIR / "files" / "dashboard.json").read_text())
    return loaded


def queries() -> list[str]:
    panels = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]
    variables = [each["query"]["query"] for each in dashboard()["templating"]["list"] if each["type"] == "query"]
    return [*(rule["expr"] for rule in alerts()), *panels, *variables]


@pytest.mark.parametrize("query", queries())
def test_a_query_names_only_what_is_exported(query: str) -> None:
    names = set(re.findall(r"remora_\w+", query))
    assert names
    assert names <= sample_names()
    exported = exported_metrics()
    used = {
        name: exported[re.sub(r"_(bucket|sum|count)$", "", name) if name not in exported else name] for name in names
    }
    known = {label for each in used.values() for label in each.labels} | {"le"}
    for selector, group in re.findall(r"\{([^}]*)\}|by \(([^)]*)\)", query):
        labels = re.findall(r"(\w+)=", selector) if selector else [each.strip() for each in group.split(",")]
        assert set(labels) <= known, query
    assert query.count("(") == query.count(")")


def test_counters_are_asked_for_rates_and_gauges_are_not() -> None:
    exported = exported_metrics()
    for query in queries():
        for name in re.findall(r"(?:rate|increase)\((remora_\w+)", query):
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            assert exported.get(name, exported.get(base)).type in ("counter", "histogram"), query  # type: ignore[union-attr]


def test_alerts_say_what_is_wrong_and_how_bad_it_is() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)
    for rule in alerts():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"].endswith(".")


def test_the_panels_fit_the_grid_without_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_templates_of_alerts_reach_prometheus_unrendered(rendered: Callable[[str], Manifests]) -> None:
    manifests = rendered("everything")
    (group,) = named(manifests, "PrometheusRule")["spec"]["groups"]
    assert group["rules"] == alerts()
    found = named(manifests, "ConfigMap", "-dashboard")
    assert json.loads(found["data"]["remora.json"]) == dashboard()
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
