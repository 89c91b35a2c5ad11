"""What Ray is asked for, so that replicas and stages land on nodes with their devices."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from remora.cache_actors.device_resources import (
    actor_options,
    placement_strategy,
    pool_gpus,
    process_resources,
    select_gpu,
)
from remora.platform.app import build_app
from remora.platform.base.config import DeviceConfig, parse_config
from remora.platform.base.errors import ArenaError

CPU = DeviceConfig(name="cpu0")
FAR = DeviceConfig(name="far", node_resource="rack2")
GPU = DeviceConfig(name="gpu0", kind="cuda")


def test_a_process_asks_for_what_only_nodes_with_its_devices_have() -> None:
    assert process_resources([CPU]) == {"CPU": 0.01}
    assert process_resources([FAR, CPU, FAR]) == {"CPU": 0.01, "rack2": 1.0}
    assert process_resources([CPU, FAR]) == {"CPU": 0.01, "rack2": 0.001}, "one of its devices, and it may be another"
    assert process_resources([GPU])["GPU"] > 0
    assert actor_options({"CPU": 0.01, "GPU": 0.5, "rack2": 1.0}) == {
        "num_cpus": 0.01,
        "num_gpus": 0.5,
        "resources": {"rack2": 1.0},
    }


def test_no_two_pools_have_one_gpu_and_many_processes_compute_beside_one() -> None:
    assert pool_gpus(CPU) == 0
    assert 2 * pool_gpus(GPU) > 1 > pool_gpus(GPU) + 100 * process_resources([GPU])["GPU"]


def test_stages_are_on_one_node_unless_their_devices_say_which_nodes_have_them() -> None:
    assert placement_strategy([CPU, GPU]) == "STRICT_PACK"
    assert placement_strategy([CPU, FAR]) == "PACK"


def test_a_deployment_asks_for_a_bundle_for_each_stage_and_is_in_the_first() -> None:
    config = parse_config(
        {
            "devices": [
                {"name": "gpu0", "kind": "cuda"},
                {"name": "far", "node_resource": "rack2"},
                {"name": "cpu0"},
                {"name": "cpu1", "node_resource": "rack1"},
            ],
            "models": [
                {
                    "name": "split",
                    "source": "x",
                    "pipeline_stages": 2,
                    "stage_devices": ["gpu0", "far"],
                    "stage_layers": [3, 1],
                },
                {"name": "whole", "source": "x", "device": "cpu0", "more_devices": ["cpu1"]},
                {"name": "onegpu", "source": "x", "device": "gpu0"},
            ],
        }
    )
    _, models = build_app(config)._bound_deployment.init_args
    configs = {name: app._bound_deployment._replica_config for name, app in models.items()}
    bundles = configs["split"].placement_group_bundles
    assert bundles == [process_resources(config.devices[:1]), process_resources(config.devices[1:2])]
    assert configs["split"].placement_group_strategy == "PACK"
    assert configs["split"].ray_actor_options["num_gpus"] == bundles[0]["GPU"]
    assert configs["whole"].placement_group_bundles is None
    assert configs["whole"].ray_actor_options["resources"] == {"rack1": 0.001}
    assert configs["onegpu"].ray_actor_options["num_gpus"] > 0


def test_the_gpu_of_a_pool_is_selected_before_anything_uses_another(monkeypatch: pytest.MonkeyPatch) -> None:
    class Torch:
        class cuda:
            is_initialized: Any = staticmethod(lambda: True)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    select_gpu("")
    select_gpu("2")
    monkeypatch.setitem(sys.modules, "torch", Torch)
    with pytest.raises(ArenaError, match="uses a GPU already"):
        select_gpu("GPU-1")
    Torch.cuda.is_initialized = staticmethod(lambda: False)
    select_gpu("GPU-1")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-1"
