"""What every pod of the chart keeps to: least privilege, limits, probes, memory that fits, secrets by reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_support import (
    Manifests,
    Pod,
    Render,
    config_of,
    document_text,
    groups_of,
    named,
    of_kind,
    pods_of,
    ray_service,
    values_of,
    volume,
)
from pydantic import ByteSize, TypeAdapter

from remora.cache_actors.arena import file_bytes
from remora.cache_actors.pool_settings import PoolSettings
from remora.platform.base.serve_environment import DRAIN_TIMEOUT_S, serve_environment

MiB = 1024 * 1024
#: What the restricted Pod Security Standard allows, less what is of no use here.
ALLOWED_VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "ephemeral", "secret"}


def quantity_bytes(text: str) -> int:
    return int(TypeAdapter(ByteSize).validate_python(text + ("B" if text[-1:] == "i" else "")))


def test_no_pod_has_more_privileges_than_the_restricted_standard_allows(manifests: Manifests) -> None:
    for pod in pods_of(manifests):
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.spec.keys()
        assert pod.spec["securityContext"]["runAsNonRoot"] is True
        assert pod.spec["securityContext"]["runAsUser"] > 0
        assert pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod.containers:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}
            assert "privileged" not in context
        for each in pod.spec.get("volumes", []):
            assert set(each) - {"name"} <= ALLOWED_VOLUMES


def test_every_container_has_requests_and_limits(manifests: Manifests) -> None:
    for pod in pods_of(manifests):
        for container in pod.containers:
            for part in ("requests", "limits"):
                assert {"cpu", "memory"} <= container["resources"][part].keys(), (pod.name, container["name"])


def test_every_lasting_container_has_probes(manifests: Manifests) -> None:
    for pod in pods_of(manifests):
        for container in pod.spec["containers"] if pod.name != "test" else []:
            assert {"livenessProbe", "readinessProbe"} <= container.keys()
            ports = {port["name"] for port in container["ports"]}
            assert {container[probe]["httpGet"]["port"] for probe in ("livenessProbe", "readinessProbe")} <= ports


def test_workers_take_traffic_when_a_router_answers_and_the_head_does_not_wait_for_serve(manifests: Manifests) -> None:
    for pod in pods_of(manifests):
        if pod.name != "test":
            probe = pod.spec["containers"][0]["readinessProbe"]["httpGet"]
            expected = ("/api/healthz", "agent") if pod.name == "head" else ("/health", "serve")
            assert (probe["path"], probe["port"]) == expected


def test_images_are_pinned(manifests: Manifests) -> None:
    for pod in pods_of(manifests):
        for container in pod.containers:
            name, _, tag = container["image"].rpartition("/")[2].partition(":")
            assert name
            assert tag not in ("", "latest"), container["image"]


def test_each_group_may_have_an_image_of_its_own(rendered: Callable[[str], Manifests]) -> None:
    images = {pod.name: pod.spec["containers"][0]["image"] for pod in pods_of(rendered("everything"))}
    repository = "registry.example.com/ml/remora"
    assert images == {
        "head": f"{repository}:0.1.0-cpu",
        "h100": f"{repository}:0.1.0-cuda",
        "l4": f"{repository}:0.1.0-cuda",
        "cpu": f"{repository}:0.1.0-cpu",
        "test": f"{repository}:0.1.0-cpu",
    }
    (pinned,) = [each.spec["containers"][0]["image"] for each in pods_of(rendered("one_gpu")) if each.name == "l4"]
    assert pinned.startswith(f"{repository}@sha256:0123")


def test_shared_memory_holds_arenas_journals_and_the_object_store(manifests: Manifests) -> None:
    config = config_of(manifests)
    devices = {device.name: device for device in config.devices}
    offered: dict[str, list[str]] = {"head": []}
    for group in groups_of(manifests).values():
        text = group["rayStartParams"]["resources"]
        offered[group["groupName"]] = [name for name in devices if f"remora_device_{name}\\" in text]
    for pod in pods_of(manifests):
        if pod.name == "test":
            continue
        needed = int(config.cluster.object_store_bytes)
        for name in offered[pod.name]:
            settings = PoolSettings.from_config(config, name, node_id="n" * 56, session_name="s")
            needed += settings.journal_spare_bytes()
            needed += file_bytes(int(devices[name].arena_bytes)) if devices[name].kind == "cpu" else 0
        shm = volume(pod, "shared-mem")["emptyDir"]
        assert shm["medium"] == "Memory"
        assert needed + 32 * MiB <= int(shm["sizeLimit"]) <= needed + 96 * MiB
        memory = pod.spec["containers"][0]["resources"]["limits"]["memory"]
        assert int(shm["sizeLimit"]) < quantity_bytes(memory)
        (mount,) = [each for each in pod.spec["containers"][0]["volumeMounts"] if each["name"] == "shared-mem"]
        assert mount["mountPath"] == "/dev/shm"


def test_rays_object_store_is_the_configured_one(manifests: Manifests) -> None:
    config = config_of(manifests)
    cluster = ray_service(manifests)["rayClusterConfig"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        assert group["rayStartParams"]["object-store-memory"] == str(int(config.cluster.object_store_bytes))


@pytest.mark.parametrize(
    "size",
    ["512MiB", "1.5GB", "2gib", "12.5GB", "0.5 TiB", "64kb", "1000", "7b", "3k", "1PB", 4096, 137438953472, "1.75GiB"],
)
def test_sizes_are_read_as_the_configuration_reads_them(size: str | int, render: Render) -> None:
    values = values_of("cpu_minimal")
    values["config"]["cluster"]["object_store_bytes"] = size
    values["workers"][0]["resources"]["limits"]["memory"] = "2Ei"
    head = ray_service(render(values))["rayClusterConfig"]["headGroupSpec"]
    assert head["rayStartParams"]["object-store-memory"] == str(int(TypeAdapter(ByteSize).validate_python(size)))


@pytest.mark.parametrize(
    ("cpu", "num_threads"), [("4", 4), ("1500m", 1), ("500m", 1), (2.5, 2), ("16000m", 16), (3, 3)]
)
def test_engines_take_as_many_threads_as_their_pod_may_use(cpu: object, num_threads: int, render: Render) -> None:
    values = values_of("cpu_minimal")
    values["workers"][0]["resources"]["limits"]["cpu"] = cpu
    (device,) = yaml.safe_load(document_text(render(values)))["devices"]
    assert device["num_threads"] == num_threads


def test_devices_of_one_pod_share_its_threads_unless_told_otherwise(rendered: Callable[[str], Manifests]) -> None:
    devices = yaml.safe_load(document_text(rendered("everything")))["devices"]
    assert {device["name"]: device["num_threads"] for device in devices} == {
        "h100-0": 8,
        "h100-1": 8,
        "l4-0": 3,
        "cpu0": 8,
    }


def test_gpus_are_requested_for_ray_and_for_kubernetes_alike(rendered: Callable[[str], Manifests]) -> None:
    groups = groups_of(rendered("everything"))
    for name, count in (("h100", 2), ("l4", 1), ("cpu", 0)):
        spec = groups[name]["template"]["spec"]
        limits = spec["containers"][0]["resources"]["limits"]
        assert limits.get("nvidia.com/gpu", 0) == count
        assert groups[name]["rayStartParams"]["num-gpus"] == str(count)
        assert spec.get("runtimeClassName") == ("nvidia" if count else None)
    shared = groups_of(rendered("one_gpu"))["l4"]
    assert shared["rayStartParams"]["num-gpus"] == "1"
    assert shared["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu.shared"] == 1
    assert "runtimeClassName" not in shared["template"]["spec"]


def environment(pod: Pod) -> dict[str, Any]:
    return {each["name"]: each.get("value") for each in pod.spec["containers"][0]["env"]}


def test_serve_runs_in_the_environment_that_the_platform_sets_elsewhere(
    rendered: Callable[[str], Manifests], tmp_path: Path
) -> None:
    wanted = {
        name: value.replace(str(tmp_path), "/tmp/remora")
        for name, value in serve_environment(tmp_path, drain_timeout_s=DRAIN_TIMEOUT_S).items()
        if name.startswith("RAY_SERVE_")
    }
    for pod in pods_of(rendered("default")):
        if pod.name != "test":
            found = environment(pod)
            assert {name: value for name, value in found.items() if name.startswith("RAY_SERVE_")} == wanted
            assert found["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] == "0"
            (files,) = pod.spec["initContainers"]
            assert str(Path(wanted["RAY_SERVE_HAPROXY_BINARY_PATH"]).parent) in files["command"][-1]


def test_head_and_workers_have_the_same_environment(manifests: Manifests) -> None:
    head, *workers = [environment(pod) for pod in pods_of(manifests) if pod.name != "test"]
    assert all(worker == head for worker in workers)


def test_own_variables_win(rendered: Callable[[str], Manifests]) -> None:
    (head,) = [pod for pod in pods_of(rendered("everything")) if pod.name == "head"]
    assert environment(head)["RAY_SERVE_HAPROXY_NBTHREAD"] == "4"


def test_secrets_are_only_referred_to(rendered: Callable[[str], Manifests]) -> None:
    manifests = rendered("everything")
    assert [each["metadata"]["name"] for each in of_kind(manifests, "Secret")] == ["demo-remora-tenants"]
    for pod in pods_of(manifests):
        if pod.name == "test":
            continue
        for container, variable in (
            ("ray-", "HF_TOKEN"),
            ("ray-", "REMORA_DATABASE_URL"),
            ("collector", "OTEL_TOKEN"),
        ):
            (found,) = [each for each in pod.spec["containers"] if each["name"].startswith(container)]
            (entry,) = [each for each in found["env"] if each["name"] == variable]
            assert set(entry) == {"name", "valueFrom"}
    password = ray_service(manifests)["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisPassword"]
    assert password == {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}}
    assert "${env:OTEL_TOKEN}" in named(manifests, "ConfigMap", "-collector")["data"]["config.yaml"]


def test_only_the_head_with_an_autoscaler_gets_a_token_of_kubernetes(rendered: Callable[[str], Manifests]) -> None:
    for values, with_token in (("default", set()), ("everything", {"head"})):
        manifests = rendered(values)
        tokens = {pod.name for pod in pods_of(manifests) if pod.spec["automountServiceAccountToken"]}
        assert tokens == with_token
        assert not of_kind(manifests, "Role") + of_kind(manifests, "ClusterRole")
        assert named(manifests, "ServiceAccount")["automountServiceAccountToken"] is False


def test_a_pod_outlives_the_requests_it_drains(manifests: Manifests) -> None:
    from remora.platform import app

    for pod in pods_of(manifests):
        if pod.name != "test":
            assert pod.spec["terminationGracePeriodSeconds"] > app._SHUTDOWN_TIMEOUT_S + 10


def test_state_shared_by_pods_has_a_folder_for_each(rendered: Callable[[str], Manifests]) -> None:
    manifests = rendered("everything")
    claim = named(manifests, "PersistentVolumeClaim", "-state")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for pod in pods_of(manifests):
        if pod.name != "test":
            assert volume(pod, "state")["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}
            (mount,) = [each for each in pod.spec["containers"][0]["volumeMounts"] if each["name"] == "state"]
            assert mount == {"name": "state", "mountPath": "/srv/remora", "subPathExpr": "$(POD_NAME)"}
            assert environment(pod)["REMORA_STATE_DIR"] == "/srv/remora"
            assert "ephemeral" in volume(pod, "models")
