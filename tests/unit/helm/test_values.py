"""Wrong values fail before anything is installed, with their path and what is allowed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chart_support import CHART_DIR, VALUE_SETS, Render, replaced, values_of
from module_file import load_module

helm_python = pytest.importorskip("helm_python", reason="needs helm-python-sdk, which exists for x86-64 only")


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        ("colour", "red", "colour"),
        ("image.tag", "latest", "/image/tag"),
        ("image.digest", "sha256:12", "/image/digest"),
        ("config.tenants", [{"name": "a", "key_sha256": ["rmr_plain"]}], "/config/tenants/0/key_sha256/0"),
        ("tenants.secret", "a", "/tenants"),
        ("config.http.colour", 1, "colour"),
        ("config.http.port", 80, "/config/http/port"),
        ("config.devices.0.arena_byte", 1, "arena_byte"),
        ("config.devices.0.block_tokens", 48, "/config/devices/0/block_tokens"),
        ("config.devices.0.arena_bytes", "much", "/config/devices/0/arena_bytes"),
        ("config.models.0.weights", "int3", "/config/models/0/weights"),
        ("config.models.0.name", "Large Model", "/config/models/0/name"),
        ("config.models", [], "/config/models"),
        ("config.cluster.ray_address", "auto", "/config/cluster/ray_address"),
        ("config.cluster.database_url", "postgresql://remora:secret@db/remora", "/config/cluster/database_url"),
        ("config.cluster.object_store_bytes", None, "object_store_bytes"),
        ("workers", [], "/workers"),
        ("workers.0.replicas", -1, "/workers/0/replicas"),
        ("workers.0.gpu", {"cuont": 1}, "/workers/0/gpu"),
        ("workers.0.resources.limits", {"cpu": "4"}, "memory"),
        ("workers.0.resources.limits.memory", "8 gigabytes", "/workers/0/resources/limits/memory"),
        ("head.resources.limits.cpu", "many", "/head/resources/limits/cpu"),
        ("ray.version", "2.61.0", "/ray/version"),
        ("ray.gcsFaultTolerance.enabled", True, "/ray/gcsFaultTolerance/redisAddress"),
        ("upgradeStrategy", "Recreate", "/upgradeStrategy"),
        ("securityContext.runAsUser", 0, "/securityContext/runAsUser"),
        ("state.type", "hostPath", "/state/type"),
        ("ingress.enabled", True, "/ingress/hosts"),
        ("httpRoute.enabled", True, "/httpRoute/parentRefs"),
        ("collector.enabled", True, "/collector/exporters"),
        ("collector.image", "otel/collector", "/collector/image"),
        ("terminationGracePeriodSeconds", 5, "/terminationGracePeriodSeconds"),
        ("env.RAY-X", "1", "RAY-X"),
        ("secretEnv", [{"name": "A", "value": "secret"}], "/secretEnv/0"),
        ("probes.readinessPath", "/healthz", "/probes/readinessPath"),
    ],
)
def test_a_value_against_the_schema_fails_with_its_path(path: str, value: object, where: str, chart: Any) -> None:
    values = replaced(chart.values, path, value)
    if value is None:
        del values["config"]["cluster"]["object_store_bytes"]
        values = replaced(values, "config.cluster", {"object_store_bytes": None})
    with pytest.raises(helm_python.HelmError) as caught:
        chart.validate_schema(values)
    assert where in str(caught.value)


def test_a_database_without_a_password_in_its_url_is_allowed(chart: Any) -> None:
    chart.validate_schema(replaced(chart.values, "config.cluster.database_url", "postgresql://remora@db:5432/remora"))


@pytest.mark.parametrize("name", VALUE_SETS)
def test_good_values_pass_the_schema(name: str, chart: Any) -> None:
    chart.validate_schema(values_of(name))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("config.http.host", "127.0.0.1", 'config.http.host: nobody outside of the pod reaches "127.0.0.1"'),
        ("config.http.trusted_network", False, "config.http.trusted_network: without tenants whoever reaches the port"),
        ("workers.0.devices", ["cpu0", "gpu7"], 'workers.cpu.devices: no device "gpu7" in config.devices; one of cpu0'),
        ("config.devices.0.kind", "cuda", "workers.cpu.gpu.count: is 0, but the group holds 1 devices of kind cuda"),
        ("workers.0.gpu", {"count": 1}, "workers.cpu.gpu.count: is 1, but the group holds 0"),
        ("workers.0.resources.limits.memory", "2Gi", "workers.cpu.resources.limits.memory: 2Gi do not hold the 2658 M"),
        ("config.models.0.device", "gpu0", 'workers: no group holds the device "gpu0" of the model "smollm2"'),
        ("config.models.0.more_devices", ["cpu1"], 'workers.cpu.devices: holds "cpu0" of the model "smollm2", but not'),
        ("config.models.0.stage_devices", ["cpu0", "cpu1"], 'workers: no group holds the device "cpu1" of the model'),
        ("config.devices.0.node_resource", "rack", 'config.devices: node_resource of "cpu0": the chart says which'),
        ("ray.autoscaling.enabled", True, "workers.cpu.replicasPerNode: is needed with ray.autoscaling.enabled"),
    ],
)
def test_what_a_schema_cannot_say_fails_with_a_sentence(
    path: str, value: object, message: str, chart: Any, render: Render
) -> None:
    with pytest.raises(helm_python.HelmRenderError) as caught:
        render(replaced(chart.values, path, value))
    assert message in str(caught.value)


def test_a_number_of_replicas_outside_of_its_bounds_fails(chart: Any, render: Render) -> None:
    values = replaced(chart.values, "ray.autoscaling.enabled", True)
    values["workers"][0] |= {"replicasPerNode": 1, "replicas": 3, "minReplicas": 1, "maxReplicas": 2}
    with pytest.raises(helm_python.HelmRenderError, match=r"workers\.cpu\.replicas: 3 is not between"):
        render(values)


def test_two_groups_of_one_name_fail(chart: Any, render: Render) -> None:
    values = replaced(chart.values, "workers", [chart.values["workers"][0]] * 2)
    with pytest.raises(helm_python.HelmRenderError, match='the name "cpu" is used twice'):
        render(values)


def test_tenants_come_from_one_place_and_monitoring_needs_a_key(render: Render) -> None:
    values = values_of("everything")
    with pytest.raises(helm_python.HelmRenderError, match=r"tenants\.existingSecret: not allowed beside"):
        render(replaced(values, "tenants", {"existingSecret": "mine"}))
    with pytest.raises(helm_python.HelmRenderError, match=r"tenants\.key: is only for"):
        render(replaced(values, "tenants", {"key": "other.yaml"}))
    with pytest.raises(helm_python.HelmRenderError, match=r"operatorKey\.existingSecret: is needed"):
        render(replaced(values, "operatorKey", {"existingSecret": ""}))


@pytest.mark.parametrize("port", [6379, 8080, 8265, 10001, 30500, 40500, 52365])
def test_a_port_of_ray_is_refused_for_clients(port: int, render: Render) -> None:
    with pytest.raises(helm_python.HelmRenderError, match=rf"config\.http\.port: {port} is a port of Ray"):
        render({"config": {"http": {"port": port}}})


def test_an_endpoint_beside_a_collector_fails(render: Render) -> None:
    values = replaced(values_of("everything"), "config.telemetry", {"otlp_endpoint": "http://other:4317"})
    with pytest.raises(helm_python.HelmRenderError, match=r"config\.telemetry\.otlp_endpoint"):
        render(values)


def test_the_schema_of_the_configuration_is_that_of_the_code() -> None:
    module = load_module(CHART_DIR / "update_schema.py")
    text = (CHART_DIR / "values.schema.json").read_text()
    assert json.loads(module.updated(text)) == json.loads(text), "run: python helm/update_schema.py"


def test_every_object_of_the_charts_own_schema_refuses_unknown_keys() -> None:
    schema = json.loads((CHART_DIR / "values.schema.json").read_text())

    def open_objects(node: object, path: str) -> list[str]:
        if isinstance(node, list):
            return [each for index, child in enumerate(node) for each in open_objects(child, f"{path}/{index}")]
        if not isinstance(node, dict):
            return []
        found = (
            [path]
            if "properties" in node and node.get("type") == "object" and node.get("additionalProperties") is not False
            else []
        )
        return found + [each for key, child in node.items() for each in open_objects(child, f"{path}/{key}")]

    assert open_objects(schema, "") == ["/$defs/clusterConfig"], "it only adds to RemoraConfig, which is closed"
