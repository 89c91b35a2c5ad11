"""Every value set gives manifests that Kubernetes, KubeRay and Remora itself accept."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from chart_support import (
    CHART_DIR,
    VALUE_SETS,
    Manifests,
    config_of,
    document_text,
    groups_of,
    named,
    of_kind,
    pods_of,
    ray_service,
    serve_config,
    values_of,
)
from crd_schema import strict_schema

from remora.platform.base.config import parse_config

helm_python = pytest.importorskip("helm_python", reason="needs helm-python-sdk, which exists for x86-64 only")

KUBERNETES_VERSIONS = ("1.28", "1.34")
#: Kinds of operators, whose schemas are not in Kubernetes.
FOREIGN = {
    ("ray.io/v1", "RayService"),
    ("monitoring.coreos.com/v1", "ServiceMonitor"),
    ("monitoring.coreos.com/v1", "PodMonitor"),
    ("monitoring.coreos.com/v1", "PrometheusRule"),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"),
}


@pytest.fixture(scope="session")
def ray_service_schema(require_data: Callable[[str], Path]) -> dict[str, Any]:
    return strict_schema(require_data("REMORA_KUBERAY_CRDS") / "ray.io_rayservices.yaml", "v1")


def test_lint_has_no_complaint() -> None:
    found = helm_python.lint(CHART_DIR)
    assert found["errors"] == []
    assert [each["error"] for each in found["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_kubernetes_accepts_its_own_kinds(manifests: Manifests, version: str) -> None:
    for manifest in manifests:
        if (manifest["apiVersion"], manifest["kind"]) not in FOREIGN:
            kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_kubernetes_accepts_the_pods_of_ray(manifests: Manifests, version: str) -> None:
    for pod in pods_of(manifests):
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod.name, "labels": pod.labels}, "spec": pod.spec},
            version,
            strict=True,
        )


def test_kuberay_accepts_the_ray_service(manifests: Manifests, ray_service_schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(ray_service_schema).validate(named(manifests, "RayService"))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.rayClusterConfig.headGroupSpec.rayStartParams.num-cpus", 0),
        ("spec.upgradeStrategy.tpye", "None"),
        ("spec.rayClusterConfig.autoscalerOptions", {"upscalingMode": "Fast"}),
    ],
)
def test_the_strict_schema_of_kuberay_finds_mistakes(
    rendered: Callable[[str], Manifests], ray_service_schema: dict[str, Any], path: str, value: object
) -> None:
    manifest: Any = named(rendered("default"), "RayService")
    *parents, last = path.split(".")
    here = manifest
    for part in parents:
        here = here[part]
    here[last] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(ray_service_schema).validate(manifest)


def test_names_of_manifests_are_unique_and_short_enough_for_kuberay(manifests: Manifests) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in manifests]
    assert len(set(names)) == len(names)
    assert len(named(manifests, "RayService")["metadata"]["name"] + "-serve-svc") <= 50


def test_a_long_release_name_stays_short_enough(render: Callable[..., Manifests]) -> None:
    manifests = render({"ingress": {"enabled": True, "hosts": ["a.example.com"]}}, name="a" * 53)
    name = named(manifests, "RayService")["metadata"]["name"]
    assert name == "a" * 40
    (rule,) = named(manifests, "Ingress")["spec"]["rules"]
    assert rule["http"]["paths"][0]["backend"]["service"]["name"] == f"{name}-serve-svc"


def test_the_configuration_in_the_pods_is_one_that_remora_accepts(manifests: Manifests) -> None:
    config = config_of(manifests)
    assert config.http.trusted_network or config.tenants
    options = serve_config(manifests)["http_options"]
    assert (options["host"], options["port"]) == (config.http.host, config.http.port)


@pytest.mark.parametrize("name", VALUE_SETS)
def test_the_configuration_says_what_the_values_say(
    name: str, rendered: Callable[[str], Manifests], chart: Any
) -> None:
    given = parse_config(chart.merge_values(values_of(name))["config"]).model_dump(exclude={"tenants_file"})
    config = config_of(rendered(name)).model_dump(exclude={"tenants_file"})
    for device, given_device in zip(config["devices"], given["devices"], strict=True):
        if given_device["num_threads"] is None:
            device["num_threads"] = None
        device["node_resource"] = None
    if name == "everything":
        assert config["telemetry"].pop("otlp_endpoint") == "http://127.0.0.1:4317"
        given["telemetry"].pop("otlp_endpoint")
    assert config == given


def test_the_serve_configuration_names_the_mounted_document_by_its_digest(manifests: Manifests) -> None:
    (application,) = serve_config(manifests)["applications"]
    assert application["args"]["sha256"] == hashlib.sha256(document_text(manifests).encode()).hexdigest()
    folder = application["args"]["config"].rpartition("/")[0]
    for pod in pods_of(manifests):
        if pod.name != "test":
            (mount,) = [each for each in pod.spec["containers"][0]["volumeMounts"] if each["name"] == "config"]
            assert mount["mountPath"] == folder
            assert "subPath" not in mount, "a subPath mount never follows a change"


def test_serve_accepts_the_serve_configuration_and_finds_the_builder(manifests: Manifests) -> None:
    from ray._common.utils import import_attr
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(serve_config(manifests))
    (application,) = schema.applications
    assert callable(import_attr(application.import_path))


def test_every_model_is_placed_where_its_device_is(manifests: Manifests) -> None:
    import json

    config = config_of(manifests)
    for device in config.devices:
        assert device.node_resource == f"remora_device_{device.name}", "what replicas ask for"
        offers = [
            # As KubeRay's shell and Ray's autoscaler undo the quoting.
            json.loads(group["rayStartParams"]["resources"][1:-1].replace("\\", "")).get(device.node_resource, 0)
            for group in groups_of(manifests).values()
        ]
        assert sum(offers) >= 1


def test_the_head_runs_no_replicas(manifests: Manifests) -> None:
    parameters = ray_service(manifests)["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]
    assert parameters["num-cpus"] == "0"
    assert "resources" not in parameters
    assert ray_service(manifests)["excludeHeadPodFromServeSvc"] is True


def test_everything_off_leaves_only_what_must_be(rendered: Callable[[str], Manifests]) -> None:
    kinds = sorted(manifest["kind"] for manifest in rendered("cpu_minimal"))
    assert kinds == ["ConfigMap", "Pod", "RayService"]


def test_everything_on_has_every_kind(rendered: Callable[[str], Manifests]) -> None:
    manifests = rendered("everything")
    kinds = {manifest["kind"] for manifest in manifests}
    assert {kind for _, kind in FOREIGN} <= kinds
    assert {"NetworkPolicy", "PodDisruptionBudget", "ServiceAccount", "PersistentVolumeClaim", "Ingress"} <= kinds
    assert len(of_kind(manifests, "PodDisruptionBudget")) == 4
