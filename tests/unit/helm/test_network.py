"""Who reaches what: HTTP for clients, Ray's ports for its own pods, the operator's for the operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml
from chart_support import Manifests, Pod, named, pods_of


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """A label selector, as Kubernetes has it, with the operators that the chart uses."""
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    return wanted and all(
        expression["operator"] == "In" and labels.get(expression["key"]) in expression["values"]
        for expression in selector.get("matchExpressions", [])
    )


def open_ports(policy: dict[str, Any], labels: dict[str, str], *, same_namespace: bool = True) -> set[int] | None:
    """TCP ports that a pod with these labels reaches; None: all."""
    ports: set[int] = set()
    for rule in policy["spec"]["ingress"]:
        for peer in rule["from"]:
            if ("namespaceSelector" in peer or same_namespace) and matches(peer.get("podSelector", {}), labels):
                if "ports" not in rule:
                    return None
                ports |= {port["port"] for port in rule["ports"]}
    return ports


def ray_pods(manifests: Manifests) -> list[Pod]:
    return [pod for pod in pods_of(manifests) if pod.name != "test"]


def test_the_policy_is_about_every_pod_of_ray_and_no_other(rendered: Callable[[str], Manifests]) -> None:
    manifests = rendered("everything")
    selector = named(manifests, "NetworkPolicy")["spec"]["podSelector"]
    assert [pod.name for pod in pods_of(manifests) if matches(selector, pod.labels)] == ["head", "h100", "l4", "cpu"]
    assert not matches(selector, {"app": "other"})


def test_pods_of_ray_reach_each_other_on_every_port(rendered: Callable[[str], Manifests]) -> None:
    manifests = rendered("everything")
    for pod in ray_pods(manifests):
        assert open_ports(named(manifests, "NetworkPolicy"), pod.labels) is None


def test_others_reach_http_and_nothing_else(rendered: Callable[[str], Manifests]) -> None:
    policy = named(rendered("default"), "NetworkPolicy")
    assert open_ports(policy, {"app": "client"}) == {8000}
    assert open_ports(policy, {"app": "client"}, same_namespace=False) == set()
    assert open_ports(policy, {"app.kubernetes.io/name": "kuberay-operator"}, same_namespace=False) == {
        8000,
        8265,
        52365,
    }


def test_another_release_in_the_namespace_is_a_client_like_any_other(render: Callable[..., Manifests]) -> None:
    (other, *_) = ray_pods(render(name="other"))
    assert open_ports(named(render(name="demo"), "NetworkPolicy"), other.labels) == {8000}


def test_prometheus_gets_in_only_when_it_is_to_scrape(rendered: Callable[[str], Manifests]) -> None:
    prometheus = {"app.kubernetes.io/name": "prometheus"}
    assert open_ports(named(rendered("default"), "NetworkPolicy"), prometheus, same_namespace=False) == set()
    assert open_ports(named(rendered("everything"), "NetworkPolicy"), prometheus, same_namespace=False) >= {8001, 8080}


def test_the_test_pod_gets_in_whoever_the_clients_are(rendered: Callable[[str], Manifests]) -> None:
    manifests = rendered("everything")
    (test,) = [pod for pod in pods_of(manifests) if pod.name == "test"]
    assert 8001 in (open_ports(named(manifests, "NetworkPolicy"), test.labels) or set())


def test_egress_is_restricted_only_on_demand(rendered: Callable[[str], Manifests]) -> None:
    assert named(rendered("default"), "NetworkPolicy")["spec"]["policyTypes"] == ["Ingress"]
    spec = named(rendered("everything"), "NetworkPolicy")["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert len(spec["egress"]) == 3


def test_budgets_are_about_the_pods_of_their_group(rendered: Callable[[str], Manifests]) -> None:
    manifests = rendered("everything")
    for pod in ray_pods(manifests):
        budget = named(manifests, "PodDisruptionBudget", f"-{pod.name}")
        selected = [each.name for each in pods_of(manifests) if matches(budget["spec"]["selector"], each.labels)]
        assert selected == [pod.name]


def test_an_ingress_neither_buffers_nor_cuts_a_stream(rendered: Callable[[str], Manifests]) -> None:
    annotations = named(rendered("everything"), "Ingress")["metadata"]["annotations"]
    prefix = "nginx.ingress.kubernetes.io/"
    assert annotations[f"{prefix}proxy-buffering"] == "off"
    assert int(annotations[f"{prefix}proxy-read-timeout"]) >= 3600
    assert annotations[f"{prefix}proxy-body-size"] == "33554432"
    assert annotations[f"{prefix}auth-url"] == "https://auth.example.com/check"
    (rule,) = named(rendered("everything"), "HTTPRoute")["spec"]["rules"]
    assert rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}


def test_clients_reach_the_service_that_kuberay_makes(rendered: Callable[[str], Manifests]) -> None:
    manifests = rendered("everything")
    service = named(manifests, "RayService")["metadata"]["name"] + "-serve-svc"
    (rule,) = named(manifests, "Ingress")["spec"]["rules"]
    assert rule["http"]["paths"][0]["backend"]["service"] == {"name": service, "port": {"number": 8001}}
    (route,) = named(manifests, "HTTPRoute")["spec"]["rules"]
    assert route["backendRefs"] == [{"name": service, "port": 8001}]
    (test,) = [pod for pod in pods_of(manifests) if pod.name == "test"]
    assert test.spec["containers"][0]["args"][0] == f"http://{service}:8001"


def test_the_collector_takes_spans_from_its_pod_alone_and_sends_them_on(rendered: Callable[[str], Manifests]) -> None:
    config = yaml.safe_load(named(rendered("everything"), "ConfigMap", "-collector")["data"]["config.yaml"])
    assert config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"] == "127.0.0.1:4317"
    pipeline = config["service"]["pipelines"]["traces"]
    assert pipeline["exporters"] == ["otlphttp"]
    assert set(pipeline["processors"]) <= config["processors"].keys()


def test_one_target_is_scraped_because_every_router_answers_for_all(rendered: Callable[[str], Manifests]) -> None:
    manifests = rendered("everything")
    service = named(manifests, "Service", "-metrics")
    selected = [pod.name for pod in pods_of(manifests) if service["spec"]["selector"].items() <= pod.labels.items()]
    assert selected == ["head"]
    monitor = named(manifests, "ServiceMonitor")["spec"]
    assert matches(monitor["selector"], service["metadata"]["labels"])
    assert [endpoint["port"] for endpoint in monitor["endpoints"]] == ["http"]
