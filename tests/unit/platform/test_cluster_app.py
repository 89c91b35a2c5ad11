"""The application of a Ray cluster that somebody else runs: which document it takes, and what it refuses."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest
import yaml

from remora.platform.base.errors import ConfigError
from remora.platform.cluster_app import ClusterAppArgs, cluster_app, read_cluster_config

TRUSTED = {"host": "0.0.0.0", "trusted_network": True}


def document(**sections: object) -> bytes:
    return yaml.safe_dump({"models": [{"name": "m", "source": "/models/m"}], "http": TRUSTED, **sections}).encode()


def digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def test_the_application_has_a_deployment_per_model_and_the_router(tmp_path: Path) -> None:
    path = tmp_path / "remora.yaml"
    text = document(models=[{"name": name, "source": "/models/m"} for name in ("a", "b")])
    path.write_bytes(text)
    application = cluster_app({"config": str(path), "sha256": digest(text)})
    assert application._bound_deployment.name == "Router"
    config, models = application._bound_deployment.init_args
    assert [model.name for model in config.models] == ["a", "b"]
    assert {name: model._bound_deployment.name for name, model in models.items()} == {"a": "a", "b": "b"}


def test_a_document_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    path, new = tmp_path / "remora.yaml", document(cluster={"name": "new"})
    path.write_bytes(document(cluster={"name": "old"}))
    timer = threading.Timer(0.2, path.write_bytes, (new,))
    timer.start()
    config = read_cluster_config(ClusterAppArgs(config=path, sha256=digest(new)), timeout_s=30)
    timer.join()
    assert config.cluster.name == "new"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_document_that_does_not_come_fails_with_its_digest(tmp_path: Path, is_there: bool) -> None:
    path = tmp_path / "remora.yaml"
    if is_there:
        path.write_bytes(document())
    with pytest.raises(ConfigError, match=r"remora\.yaml: the configuration with digest 000.* is not there yet"):
        read_cluster_config(ClusterAppArgs(config=path, sha256="0" * 64), timeout_s=0)


def test_a_cluster_without_a_trusted_network_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "remora.yaml"
    path.write_bytes(document(http={}))
    with pytest.raises(ConfigError, match=r"http\.trusted_network: must be true"):
        cluster_app({"config": str(path)})


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "config"),
        ({"config": "/etc/x", "sha": "1"}, "sha"),
        ({"config": "/etc/x", "sha256": "abc"}, "sha256"),
    ],
)
def test_wrong_arguments_are_named(args: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"args of the Serve application.*\n{message}"):
        cluster_app(args)


def test_a_wrong_configuration_is_refused_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "remora.yaml"
    path.write_bytes(document(devices=[{"name": "cpu0", "arena_bytes": "much"}]))
    with pytest.raises(ConfigError, match=r"remora.yaml:\ndevices.0.arena_bytes: 'much'"):
        cluster_app({"config": str(path)})


def test_with_tenants_a_cluster_need_not_be_trusted_and_late_tenants_are_waited_for(tmp_path: Path) -> None:
    path, tenants = tmp_path / "remora.yaml", tmp_path / "tenants.yaml"

    def listed(name: str) -> bytes:
        return yaml.safe_dump([{"name": name, "operator": True, "key_sha256": ["0" * 64]}]).encode()

    path.write_bytes(document(http={"host": "0.0.0.0"}, tenants_file="tenants.yaml"))
    tenants.write_bytes(listed("old"))
    timer = threading.Timer(0.2, tenants.write_bytes, (listed("new"),))
    timer.start()
    config = read_cluster_config(ClusterAppArgs(config=path, tenants_sha256=digest(listed("new"))), timeout_s=30)
    timer.join()
    assert [tenant.name for tenant in config.tenants] == ["new"]
