"""How tests find their way through rendered manifests."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from remora.platform.base.config import RemoraConfig, parse_config

ROOT = Path(__file__).resolve().parents[3]
CHART_DIR = ROOT / "helm"
VALUES_DIR = Path(__file__).parent / "values"
GOLDEN_DIR = Path(__file__).parent / "golden"
#: Value sets whose manifests are kept as they were reviewed.
GOLDEN_SETS = ("default", "everything")
VALUE_SETS = ("default", *sorted(path.stem for path in VALUES_DIR.glob("*.yaml")))

Manifest = dict[str, Any]
Manifests = list[Manifest]
Render = Callable[..., Manifests]


class Pod(NamedTuple):
    name: str
    labels: dict[str, str]
    spec: dict[str, Any]

    @property
    def containers(self) -> list[dict[str, Any]]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]


def values_of(name: str) -> dict[str, Any]:
    """A value set by its name; `default` is the chart's own."""
    if name == "default":
        return {}
    loaded: dict[str, Any] = yaml.safe_load((VALUES_DIR / f"{name}.yaml").read_text())
    return loaded


def of_kind(manifests: Manifests, kind: str) -> Manifests:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def named(manifests: Manifests, kind: str, suffix: str = "") -> Manifest:
    (found,) = [each for each in of_kind(manifests, kind) if each["metadata"]["name"].endswith(suffix)]
    return found


def ray_service(manifests: Manifests) -> dict[str, Any]:
    spec: dict[str, Any] = named(manifests, "RayService")["spec"]
    return spec


def groups_of(manifests: Manifests) -> dict[str, dict[str, Any]]:
    """Worker groups by name."""
    return {group["groupName"]: group for group in ray_service(manifests)["rayClusterConfig"]["workerGroupSpecs"]}


def pods_of(manifests: Manifests) -> Iterator[Pod]:
    """Every pod that the release makes: head, worker groups, test."""
    head = ray_service(manifests)["rayClusterConfig"]["headGroupSpec"]["template"]
    yield Pod("head", head["metadata"]["labels"], head["spec"])
    for name, group in groups_of(manifests).items():
        yield Pod(name, group["template"]["metadata"]["labels"], group["template"]["spec"])
    for manifest in of_kind(manifests, "Pod"):
        yield Pod("test", manifest["metadata"]["labels"], manifest["spec"])


def serve_config(manifests: Manifests) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(ray_service(manifests)["serveConfigV2"])
    return loaded


def document_text(manifests: Manifests) -> str:
    """The configuration as pods get it."""
    text: str = named(manifests, "ConfigMap", "-config")["data"]["remora.yaml"]
    return text


def tenants_text(manifests: Manifests) -> str | None:
    """The list of tenants as the head gets it; None without one."""
    found = [each for each in of_kind(manifests, "Secret") if each["metadata"]["name"].endswith("-tenants")]
    return base64.b64decode(found[0]["data"]["tenants.yaml"]).decode() if found else None


def config_of(manifests: Manifests) -> RemoraConfig:
    """The configuration that the head loads, with the tenants."""
    document = yaml.safe_load(document_text(manifests))
    text = tenants_text(manifests)
    if text is not None:
        document["tenants"] = yaml.safe_load(text)
    return parse_config(document)


def volume(pod: Pod, name: str) -> dict[str, Any]:
    (found,) = [each for each in pod.spec["volumes"] if each["name"] == name]
    loaded: dict[str, Any] = found
    return loaded


def golden_text(texts: dict[str, str]) -> str:
    """Rendered templates as they are kept: digests and the dashboard, which other files say, are left out."""
    kept = [
        f"# {path}\n{text.strip()}\n" for path, text in sorted(texts.items()) if path.endswith(".yaml") and text.strip()
    ]
    joined = re.sub(r"\b[0-9a-f]{64}\b", "DIGEST", "\n".join(kept))
    return re.sub(r"( remora\.json: \|-\n)(?: {4}.*\n)+", r"\1    DASHBOARD\n", joined)


def replaced(values: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy with `value` at a dotted path; numbers are list indices."""
    import copy

    changed = copy.deepcopy(values)
    *parents, last = path.split(".")
    here: Any = changed
    for part in parents:
        here = here[int(part)] if isinstance(here, list) else here.setdefault(part, {})
    here[int(last) if isinstance(here, list) else last] = value
    return changed
