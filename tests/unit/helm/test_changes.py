"""Which changes roll over in place, and which make KubeRay start a second cluster."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_support import CHART_DIR, Render, ray_service, replaced

helm_python = pytest.importorskip("helm_python", reason="needs helm-python-sdk, which exists for x86-64 only")


def parts(render: Render, values: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The Serve configuration, and what KubeRay compares to see whether a new cluster is needed."""
    spec = ray_service(render(values))
    return spec["serveConfigV2"], spec["rayClusterConfig"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("config.models.0.max_num_seqs", 8),
        ("config.models.0.num_replicas", 2),
        ("config.models", [{"name": "other", "source": "org/other"}]),
        ("config.namespaces", [{"name": "smollm2", "model": "smollm2", "guaranteed": "1GiB"}]),
        ("config.http.queue_timeout_s", 5),
        ("config.http.num_routers", 3),
        ("config.telemetry", {"sample_ratio": 0.1}),
    ],
)
def test_models_namespaces_and_http_change_in_place(path: str, value: object, chart: Any, render: Render) -> None:
    serve_before, cluster_before = parts(render, chart.values)
    serve_after, cluster_after = parts(render, replaced(chart.values, path, value))
    assert cluster_after == cluster_before
    assert serve_after != serve_before


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("config.devices.0.arena_bytes", "3GiB"),
        ("config.devices.0.extent_bytes", "32MiB"),
        ("config.devices.0.num_threads", 2),
        ("config.cluster.name", "other"),
        ("image.tag", "0.2.0"),
    ],
)
def test_what_pools_read_once_makes_new_pods(path: str, value: object, chart: Any, render: Render) -> None:
    assert parts(render, replaced(chart.values, path, value))[1] != parts(render, chart.values)[1]


def test_a_new_version_of_the_chart_alone_changes_nothing_of_the_cluster(
    chart: Any, render: Render, tmp_path: Path
) -> None:
    values = replaced(chart.values, "image.tag", "fixed")
    folder = tmp_path / "remora"
    _copy(CHART_DIR, folder)
    metadata = yaml.safe_load((folder / "Chart.yaml").read_text()) | {"version": "9.9.9", "appVersion": "9.9.9"}
    (folder / "Chart.yaml").write_text(yaml.safe_dump(metadata))
    with helm_python.Chart.load(folder) as newer:
        texts = newer.render(copy.deepcopy(values), name="demo", namespace="models")
    manifest = yaml.safe_load(texts["remora/templates/rayservice.yaml"])
    assert manifest["metadata"]["labels"]["helm.sh/chart"] == "remora-9.9.9"
    assert (manifest["spec"]["serveConfigV2"], manifest["spec"]["rayClusterConfig"]) == parts(render, values)


def _copy(source: Path, target: Path) -> None:
    import shutil

    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
