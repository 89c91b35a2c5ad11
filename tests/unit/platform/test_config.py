"""Wrong values are told with their name, their value and what is allowed; one line for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from remora.platform.base.config import load_config, parse_config
from remora.platform.base.errors import ConfigError

MiB = 1024 * 1024


def document(**changes: Any) -> dict[str, Any]:
    return {"models": [{"name": "a", "source": "org/a"}], **changes}


def staged(**changes: Any) -> dict[str, Any]:
    """A model in two stages, on two of three devices."""
    devices = [{"name": "cpu0"}, {"name": "cpu1"}, {"name": "long", "block_tokens": 64}]
    stages = {"pipeline_stages": 2, "stage_devices": ["cpu0", "cpu1"]}
    return {"devices": devices, "models": [{"name": "a", "source": "x", **stages, **changes}]}


def related(*names: str, **changes: Any) -> dict[str, Any]:
    """A model that may use KV of the named ones, and another model."""
    devices = [{"name": "cpu0"}, {"name": "cpu1"}, {"name": "long", "block_tokens": 64}]
    models = [{"name": "a", "source": "x", "compatible_with": names, **changes}, {"name": "b", "source": "x"}]
    return {"devices": devices, "models": models}


def error_of(data: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(data)
    return str(caught.value)


def test_a_model_and_its_source_are_all_that_must_be_said() -> None:
    config = parse_config(document())
    assert config.http.host == "127.0.0.1"
    assert config.models[0].device == config.devices[0].name
    assert [namespace.name for namespace in config.namespaces_of("a")] == ["a"]


def test_sizes_are_numbers_or_text() -> None:
    config = parse_config(document(devices=[{"arena_bytes": "64MiB", "extent_bytes": 4 * MiB}]))
    assert (config.devices[0].arena_bytes, config.devices[0].extent_bytes) == (64 * MiB, 4 * MiB)


def test_a_namespace_has_its_models_precision_or_its_own() -> None:
    names = [{"name": "one", "model": "a"}, {"name": "two", "model": "a", "kv_precision": {"v": "int4"}}]
    one, two = parse_config({"models": [{"name": "a", "source": "x"}], "namespaces": names}).namespaces
    assert (one.kv_precisions, two.kv_precisions) == (None, ("bf16", "int4"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("int8", ("int8", "int8")),
        ("int4", ("int5", "int4")),
        ({"k": "int4", "v": "int4"}, ("int4", "int4")),
        ({"k": "int8", "v": "int4"}, ("int8", "int4")),
        ({"v": "int8"}, ("bf16", "int8")),
    ],
)
def test_kv_precision_is_a_word_or_one_for_k_and_one_for_v(given: Any, expected: tuple[str, str]) -> None:
    config = parse_config({"models": [{"name": "a", "source": "x", "kv_precision": given}]})
    assert config.models[0].kv_precisions == expected
    assert parse_config(config.model_dump()) == config


def test_the_default_namespace_of_a_model_comes_first() -> None:
    names = [{"name": "one", "model": "a"}, {"name": "two", "model": "a"}]
    config = parse_config({"models": [{"name": "a", "source": "x", "default_namespace": "two"}], "namespaces": names})
    assert [namespace.name for namespace in config.namespaces_of("a")] == ["two", "one"]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({}, "models: is required"),
        ({"models": []}, "models: must have at least one entry"),
        ("text", "config: 'text' is not allowed: must be a mapping of keys to values"),
        (document(colour="red"), "colour: unknown key 'colour'; allowed here: cluster, http, devices, models"),
        (document(http={"prot": 1}), "http.prot: unknown key 'prot'; allowed here: trusted_network, host, port"),
        (
            document(http={"port": 70000}),
            "http.port: 70000 is not allowed: Input should be less than or equal to 65535",
        ),
        (document(http={"host": "0.0.0.0"}), "http.host: '0.0.0.0' is not allowed: without API keys only loopback is"),
        (document(http={"host": "example.org"}), "http.host: 'example.org' is not allowed"),
        (document(devices=[{"arena_bytes": "1 potato"}]), "devices.0.arena_bytes: '1 potato' is not allowed"),
        (document(devices=[{"block_tokens": 48}]), "devices.0.block_tokens: 48 is not allowed: Input should be 16, 32"),
        (document(devices=[{"extent_bytes": 5000}]), "devices.cpu0.extent_bytes: 5000 must be a multiple of 4096"),
        (
            document(devices=[{"arena_bytes": "16MiB", "extent_bytes": "16MiB"}]),
            "devices.cpu0.extent_bytes: 16777216 must be a multiple of 4096 and at most half of arena_bytes (16777216)",
        ),
        ({"models": [{"name": "a", "source": "x", "weights": "int3"}]}, "models.0.weights: 'int3' is not allowed"),
        (
            {"models": [{"name": "a", "source": "x", "kv_precision": "int3"}]},
            "models.0.kv_precision: 'int3' is not allowed: Input should be 'bf16', 'fp32', 'int8', 'int5' or 'int4'",
        ),
        (
            {"models": [{"name": "a", "source": "x", "kv_precision": {"k": "int8", "v": 4}}]},
            "models.0.kv_precision.v: 4 is not allowed",
        ),
        (
            {"models": [{"name": "a", "source": "x", "kv_precision": {"q": "int8"}}]},
            "models.0.kv_precision.q: unknown key 'q'; allowed here: k, v",
        ),
        ({"models": [{"name": "A b", "source": "x"}]}, "models.0.name: 'A b' is not allowed"),
        ({"models": [{"name": "a", "source": "x", "device": "gpu7"}]}, "models.a.device: no device 'gpu7'; one of"),
        (
            {"models": [{"name": "a", "source": "x", "more_devices": ["cpu0"]}]},
            "models.a.more_devices: 'cpu0' is no other of ['cpu0']",
        ),
        (
            {
                "devices": [{"name": "cpu0"}, {"name": "cpu1", "block_tokens": 64}],
                "models": [{"name": "a", "source": "x", "more_devices": ["cpu1"]}],
            },
            "models.a.more_devices: block_tokens of 'cpu1' are 64, those of 'cpu0' 32",
        ),
        (related("a"), "models.a.compatible_with: 'a' is the model itself; leave it out"),
        (related("c"), "models.a.compatible_with: no model 'c'; one of ['b']"),
        (related("b", "b"), "models.a.compatible_with: 'b' is named twice"),
        (
            related("b", device="long"),
            "models.a.compatible_with: 'b' is on devices with block_tokens of 32, and this model with 64",
        ),
        (
            related("b", pipeline_stages=2, stage_devices=["cpu0", "cpu1"]),
            "models.a.compatible_with: 'b': 'a' has pipeline_stages; its KV lies in parts",
        ),
        (staged(stage_devices=["cpu0"]), "models.a.stage_devices: 1 entries for 2 pipeline_stages; one for each"),
        (staged(stage_devices=["cpu0", "cpu0"]), "models.a.stage_devices: 'cpu0' is used twice"),
        (staged(stage_devices=["cpu0", "gpu7"]), "models.a.stage_devices: 'gpu7' is no device of ['cpu0', 'cpu1', 'l"),
        (staged(stage_devices=["cpu0", "long"]), "models.a.stage_devices: block_tokens of 'long' are 64, those of"),
        (staged(stage_layers=[1, 2, 3]), "models.a.stage_layers: 3 entries for 2 pipeline_stages; one for each"),
        (staged(stage_layers=[1, 0]), "models.0.stage_layers.1: 0 is not allowed"),
        (
            staged(stage_devices=["cpu0", "gpu0"]) | {"devices": [{"name": "cpu0"}, {"name": "gpu0", "kind": "cuda"}]},
            "models.a.stage_layers: needed with stages on GPUs, and 'gpu0' is one",
        ),
        (document(devices=[{"node_resource": "a b"}]), "devices.0.node_resource: "),
        (staged(device="cpu1"), "models.a.device: 'cpu1' is not the first of stage_devices, 'cpu0'; leave one of them"),
        (staged(more_devices=["cpu1"]), "models.a.more_devices: not with pipeline_stages"),
        (staged(backend="transformers"), "models.a.backend: 'transformers' cannot be split"),
        (staged(pipeline_stages=1), "models.a.stage_devices: only for a pipeline; say in pipeline_stages how many"),
        (
            {**staged(), "namespaces": [{"name": "n", "model": "a", "kv_precision": "int8"}]},
            "namespaces.n.kv_precision: model 'a' has pipeline_stages, and then one precision for all its namespaces",
        ),
        (
            {**staged(), "namespaces": [{"name": "n", "model": "a", "kv_replicas": 2}]},
            "namespaces.n.kv_replicas: 2 is not possible yet for KV of a pipeline",
        ),
        (
            document(
                devices=[{"name": "cpu0", "kind": "cuda"}], namespaces=[{"name": "n", "model": "a", "kv_replicas": 2}]
            ),
            "namespaces.n.kv_replicas: 2 is not possible yet for KV on GPUs, and 'cpu0' is one; 1 is",
        ),
        (
            {
                "devices": [{"name": "cpu0", "kind": "cuda"}],
                "models": [{"name": "a", "source": "x", "weights": "int8"}],
            },
            "models.a.weights: int8 is not served on GPUs yet, and 'cpu0' is one; bf16 and fp32 are",
        ),
        (
            {
                "devices": [{"name": "cpu0", "kind": "cuda"}],
                "models": [{"name": "a", "source": "x", "backend": "transformers"}],
            },
            "models.a.backend: transformers is not served on GPUs, and 'cpu0' is one; auto is",
        ),
        (document(namespaces=[{"name": "n", "model": "a", "kv_replicas": 3}]), "namespaces.0.kv_replicas: 3 is not"),
        (document(replication={"max_bytes_per_s": 0}), "replication.max_bytes_per_s: 0 is not allowed"),
        ({"models": [{"name": "a", "source": "x"}] * 2}, "models: the name 'a' is used twice"),
        (
            document(namespaces=[{"name": "n", "model": "a", "kv_precision": "int3"}]),
            "namespaces.0.kv_precision: 'int3' is not allowed: Input should be 'bf16', 'fp32', 'int8', 'int5' or",
        ),
        (
            document(namespaces=[{"name": "n", "model": "a"}, {"name": "n/m", "model": "a", "kv_precision": "int8"}]),
            "namespaces.n/m.kv_precision: it is a part of 'n' and has its precision; set it there",
        ),
        (document(namespaces=[{"name": "n", "model": "b"}]), "namespaces.n.model: no model 'b'; one of ['a']"),
        (
            document(namespaces=[{"name": "n", "model": "a", "guaranteed": 3, "limit": 2}]),
            "namespaces.n.guaranteed: 3 bytes exceed its limit of 2 bytes",
        ),
        (
            document(
                namespaces=[
                    {"name": "n", "model": "a", "guaranteed": "600MiB"},
                    {"name": "m", "model": "a", "guaranteed": "600MiB"},
                ]
            ),
            "namespaces: guarantees on device 'cpu0' add up to 1258291200 bytes, more than its "
            "arena_bytes of 1073741824",
        ),
    ],
)
def test_a_wrong_value_is_told_in_one_line(data: Any, expected: str) -> None:
    message = error_of(data)
    assert message.startswith(expected)
    assert "\n" not in message


def test_every_wrong_value_gets_its_line() -> None:
    lines = error_of({"models": [{"name": "a", "weights": "int3"}], "http": {"port": 0}}).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["http.port", "models.0.source", "models.0.weights"]


def test_an_endless_value_is_shortened() -> None:
    assert len(error_of(document(http={"port": "x" * 10_000}))) < 300


@pytest.mark.parametrize(
    ("text", "expected"),
    [("models: [", "not YAML"), ("models:\n- name: a\n", "models.0.source: is required"), ("", "models")],
)
def test_a_files_errors_begin_with_its_name(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(str(path))
    assert expected in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        load_config(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    "path", sorted(Path(__file__).resolve().parents[3].glob("examples/*.yaml")), ids=lambda path: path.name
)
def test_every_example_is_valid(path: Path) -> None:
    load_config(path)


def test_a_trusted_network_may_be_listened_to() -> None:
    http = parse_config(document(http={"host": "0.0.0.0", "trusted_network": True})).http
    assert (http.host, http.trusted_network) == ("0.0.0.0", True)


def tenant(name: str = "team-a", digit: str = "0", **more: Any) -> dict[str, Any]:
    return {"name": name, "key_sha256": [digit * 64], **more}


def test_with_api_keys_any_address_may_be_listened_to() -> None:
    config = parse_config(document(http={"host": "0.0.0.0"}, tenants=[tenant(operator=True)]))
    assert config.http.host == "0.0.0.0"
    assert not config.http.trusted_network


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tenants": [tenant()]}, "tenants.team-a: has no namespace; set `tenant: team-a` at a namespace"),
        (
            {"tenants": [tenant(operator=True)], "namespaces": [{"name": "n", "model": "a", "tenant": "b"}]},
            "namespaces.n.tenant: no tenant 'b'; one of ['team-a']",
        ),
        ({"tenants": [tenant(operator=True)] * 2}, "tenants: the name 'team-a' is used twice"),
        (
            {"tenants": [tenant("a", operator=True), tenant("b", operator=True)]},
            "tenants.a.key_sha256: a key is used twice",
        ),
        ({"tenants": [{"name": "a", "key_sha256": ["rmr_abc"]}]}, "tenants.0.key_sha256.0: 'rmr_abc' is not allowed"),
        ({"tenants": [{"name": "a", "key_sha256": []}]}, "tenants.0.key_sha256: must have at least one entry"),
        ({"tenants": [tenant(limits={"rps": 1})]}, "tenants.0.limits.rps: unknown key 'rps'; allowed here: requests"),
    ],
)
def test_tenants_that_do_not_fit_are_told_in_one_line(changes: Any, expected: str) -> None:
    message = error_of(document(**changes))
    assert message.startswith(expected)
    assert "\n" not in message


def test_tenants_may_lie_in_a_file_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "tenants.yaml").write_text(yaml.safe_dump([tenant(operator=True)]))
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(document(tenants_file="secrets/tenants.yaml")))
    assert load_config(path).tenants == parse_config(document(tenants=[tenant(operator=True)])).tenants
    path.write_text(yaml.safe_dump(document(tenants_file="secrets/tenants.yaml", tenants=[tenant(operator=True)])))
    with pytest.raises(ConfigError, match="tenants_file: not allowed beside tenants"):
        load_config(path)
    path.write_text(yaml.safe_dump(document(tenants_file="nowhere.yaml")))
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        load_config(path)


def test_a_wrong_trusted_network_is_the_only_complaint() -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(document(http={"host": "0.0.0.0", "trusted_network": "perhaps"}))
    assert str(error.value).startswith("http.trusted_network: 'perhaps' is not allowed")
    assert "http.host" not in str(error.value)


def test_a_models_part_of_its_devices_time_is_what_is_said_or_what_its_namespaces_weigh() -> None:
    def weight(namespaces: list[dict[str, Any]], **of_model: Any) -> float:
        config = parse_config({"models": [{"name": "a", "source": "x", **of_model}], "namespaces": namespaces})
        return config.step_weight_of(config.models[0])

    own = [{"name": name, "model": "a", "weight": 2} for name in ("one", "two", "two/part")]
    assert (weight([]), weight(own), weight(own, step_weight=0.5)) == (1, 4, 0.5)


def test_replicas_of_a_node_are_spread_over_the_devices_of_their_model() -> None:
    config = parse_config(
        {
            "devices": [{"name": "cpu0"}, {"name": "cpu1"}],
            "models": [{"name": "a", "source": "x", "device": "cpu1", "more_devices": ["cpu0"], "num_replicas": 3}],
        }
    )
    assert [config.device_of(config.models[0], rank).name for rank in range(3)] == ["cpu1", "cpu0", "cpu1"]


def test_a_pipeline_computes_on_its_first_device_and_has_kv_on_all() -> None:
    config = parse_config(staged(stage_devices=["cpu1", "cpu0"], stage_layers=[3, 2], num_replicas=2))
    model = config.models[0]
    assert [config.device_of(model, rank).name for rank in range(2)] == ["cpu1", "cpu1"]
    assert model.devices == ("cpu1", "cpu0")
    assert parse_config(config.model_dump()) == config


def test_a_namespace_of_a_pipeline_has_its_guarantee_on_every_stage() -> None:
    namespaces = [{"name": "n", "model": "a", "guaranteed": "2GiB", "limit": "2GiB"}]
    assert "guarantees on device 'cpu0' add up to" in error_of({**staged(), "namespaces": namespaces})
    large = [{"name": "cpu0", "arena_bytes": "2GiB"}, {"name": "cpu1"}]
    message = error_of({**staged(), "devices": large, "namespaces": namespaces})
    assert "guarantees on device 'cpu1' add up to" in message
