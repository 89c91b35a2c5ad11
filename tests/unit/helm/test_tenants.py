"""Tenants lie in a Secret, reach the head, and change in place."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_support import (
    Manifests,
    Render,
    config_of,
    document_text,
    named,
    of_kind,
    pods_of,
    replaced,
    serve_config,
    tenants_text,
    values_of,
    volume,
)

from remora.platform.base.config import load_config
from remora.platform.cluster_app import ClusterAppArgs, read_cluster_config


def test_hashes_are_in_the_secret_and_nowhere_else(rendered: Callable[[str], Manifests]) -> None:
    manifests = rendered("everything")
    assert [tenant.name for tenant in config_of(manifests).tenants] == ["team-a", "ops"]
    assert not config_of(manifests).http.trusted_network
    others = [each for each in manifests if each["kind"] != "Secret"]
    assert "1" * 64 not in json.dumps(others)
    assert "tenants:" not in document_text(manifests)


def test_the_head_loads_them_from_where_they_are_mounted(rendered: Callable[[str], Manifests], tmp_path: Path) -> None:
    manifests = rendered("everything")
    (head,) = [pod for pod in pods_of(manifests) if pod.name == "head"]
    (container,) = [each for each in head.containers if each["name"] == "ray-head"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    secret = volume(head, "tenants")["secret"]
    assert secret["secretName"] == named(manifests, "Secret")["metadata"]["name"]
    (item,) = secret["items"]
    document = yaml.safe_load(document_text(manifests))
    assert document["tenants_file"] == f"{mounts['tenants']}/{item['path']}"
    path, tenants_path = tmp_path / "remora.yaml", tmp_path / "tenants.yaml"
    tenants_path.write_text(tenants_text(manifests) or "")
    path.write_text(document_text(manifests).replace(document["tenants_file"], str(tenants_path)))
    assert load_config(path).tenants == config_of(manifests).tenants
    (application,) = serve_config(manifests)["applications"]
    digest = application["args"]["tenants_sha256"]
    assert digest == hashlib.sha256(tenants_path.read_bytes()).hexdigest()
    read_cluster_config(ClusterAppArgs(config=path, tenants_sha256=digest), timeout_s=0)


def test_a_changed_tenant_changes_the_application_and_no_pod(render: Render) -> None:
    values = values_of("everything")
    before, after = (
        render(replaced(values, "config.tenants.0.limits", limits)) for limits in ({}, {"max_concurrent": 3})
    )
    assert serve_config(before) != serve_config(after)
    assert [pod.spec for pod in pods_of(before)] == [pod.spec for pod in pods_of(after)]


def test_a_secret_of_the_users_own_is_mounted_under_the_expected_name(render: Render) -> None:
    values = {"config": {"http": {"trusted_network": False}}, "tenants": {"existingSecret": "mine", "key": "list"}}
    manifests = render(values)
    assert of_kind(manifests, "Secret") == []
    assert yaml.safe_load(document_text(manifests))["tenants_file"] == "/etc/remora-tenants/tenants.yaml"
    (head,) = [pod for pod in pods_of(manifests) if pod.name == "head"]
    assert volume(head, "tenants")["secret"] == {
        "secretName": "mine",
        "items": [{"key": "list", "path": "tenants.yaml"}],
    }


def test_prometheus_and_the_test_pod_get_the_operators_key(rendered: Callable[[str], Manifests]) -> None:
    manifests = rendered("everything")
    reference = {"name": "remora-operator", "key": "api-key"}
    (endpoint,) = named(manifests, "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == reference
    (test,) = [pod for pod in pods_of(manifests) if pod.name == "test"]
    (container,) = test.spec["containers"]
    assert container["env"] == [{"name": "REMORA_API_KEY", "valueFrom": {"secretKeyRef": reference}}]


@pytest.mark.parametrize(("values", "with_tenants"), [("default", False), ("everything", True)])
def test_the_notes_say_whether_keys_are_asked_for_and_sessions_are_kept(
    values: str, with_tenants: bool, chart: Any
) -> None:
    notes = chart.render(values_of(values), name="demo", namespace="models")["remora/templates/NOTES.txt"]
    assert ("Requests need an API key" in notes) == with_tenants
    assert ("WARNING: without tenants" in notes) != with_tenants
    assert ("Sessions are kept in a file of one pod" in notes) != with_tenants
