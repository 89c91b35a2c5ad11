"""Stage workers as Ray actors: a worker that is killed is noticed, and another goes on in the memory that it left."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from remora.cache_actors.arena import Arena
from remora.cache_actors.arena_header import ArenaIdentity
from remora.cache_actors.port import OpenGate
from remora.cache_actors.process_watch import boot_id
from remora.cache_actors.stale_files import remove_stale
from remora.deployments.models.load import load_model
from remora.deployments.models.loaded_model import LoadedModel
from remora.deployments.pipeline.base import SameTables, StageCard, StageLease
from remora.deployments.pipeline.connect import connect_stages
from remora.deployments.pipeline.hops import choose_transports
from remora.deployments.pipeline.pipeline_decoder import PipelineDecoder, PipelineLimits
from remora.deployments.pipeline.stage_worker import StageWorker
from remora.kernels.batch import StepBatch
from remora.kernels.stages import StagePart
from remora.platform.base.config import RemoraConfig
from remora.platform.base.errors import ConfigError, StageLost
from remora.platform.base.paths import SHARED_MEMORY_DIR, shared_memory_prefix

sys.path.append(str(Path(__file__).parents[2] / "engine" / "models"))

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

CLUSTER = "stages-test"
SPLIT = (1, 2)
NUM_BLOCKS = 4
TOKENS = list(range(5, 45))


class Memory:
    def __init__(self, model: LoadedModel) -> None:
        self.geometry = model.geometry
        self.data = np.zeros(NUM_BLOCKS * model.geometry.block_bytes, np.uint8)


def step(first: int, end: int) -> StepBatch:
    batch = StepBatch(max_tokens=64, max_sequences=2, max_blocks=4)
    batch.add(TOKENS[first:end], first_position=first, blocks=[2, 0, 3], logits="last")
    return batch


@pytest.fixture
def config(tmp_path: Path) -> Iterator[RemoraConfig]:
    from model_support import save_tiny

    save_tiny(tmp_path / "model", "llama", num_hidden_layers=3)
    yield RemoraConfig.model_validate(
        {
            "cluster": {"name": CLUSTER},
            "devices": [{"name": name, "num_threads": 1, "block_tokens": 16} for name in ("a", "b")],
            "models": [
                {
                    "name": "m",
                    "source": str(tmp_path / "model"),
                    "weights": "fp32",
                    "pipeline_stages": 2,
                    "stage_devices": ["a", "b"],
                }
            ],
            "namespaces": [{"name": "m", "model": "m"}],
        }
    )
    # Packed weights outlive the workers.
    remove_stale(CLUSTER, SHARED_MEMORY_DIR)


@pytest.fixture
def lease(tmp_path: Path) -> Iterator[tuple[Arena, StageLease]]:
    """An arena without a pool, and the word in its header that says the lease holds."""
    identity = ArenaIdentity(
        cluster_name=CLUSTER, device_name="b", boot_id=boot_id(), data_bytes=1 << 20, layout="test"
    )
    arena = Arena.create(tmp_path / "arena", identity)
    arena.header.set_generation(3, 7)
    yield (
        arena,
        StageLease(
            arena_path=str(arena.path),
            step_lock_path=str(tmp_path / "lock"),
            lease_slot=3,
            generation=7,
            incarnation=arena.header.incarnation,
        ),
    )
    arena.close()


def start_worker(config: RemoraConfig, lease: StageLease) -> tuple[Any, StageCard]:
    part = StagePart(split=SPLIT, stage=1)
    worker = ray.remote(StageWorker).options(num_cpus=0, max_concurrency=2).remote(config, "m", part, "b")
    card = ray.get(worker.load.remote(), timeout=60)
    ray.get(worker.attach.remote(lease), timeout=30)
    return worker, card


def test_a_worker_that_is_killed_is_noticed_and_the_next_one_finds_its_kv(
    config: RemoraConfig, lease: tuple[Arena, StageLease]
) -> None:
    (model_config,) = config.models
    whole = load_model(model_config, block_tokens=16, num_threads=1)
    memory = Memory(whole)
    expected = [whole.decoder.forward(step(first, end), memory).copy() for first, end in [(0, 33), (33, 34), (34, 35)]]
    model = load_model(model_config, block_tokens=16, num_threads=1, part=StagePart(split=SPLIT, stage=0))
    own = Memory(model)
    limits = PipelineLimits(
        num_stages=2,
        hidden_size=64 if model.shape is None else model.shape.hidden_size,
        vocab_size=model.vocab_size,
        max_blocks=4,
        max_num_seqs=2,
        max_step_tokens=64,
        max_micro_tokens=16,
    )
    arena, stage_lease = lease

    def connect(worker: Any, card: StageCard) -> PipelineDecoder:
        return connect_stages(
            model,
            [worker],
            [card],
            limits=limits,
            gate=OpenGate(),
            tables=SameTables(),
            cluster_name=CLUSTER,
        )

    worker, card = start_worker(config, stage_lease)
    assert (card.first_layer, card.geometry.num_layers) == (1, 2)
    decoder = connect(worker, card)
    assert decoder.forward(step(0, 33), own).tobytes() == expected[0].tobytes()
    assert list(SHARED_MEMORY_DIR.glob(f"{shared_memory_prefix(CLUSTER)}stages-*")) == []
    assert decoder.forward(step(33, 34), own).tobytes() == expected[1].tobytes()
    ended = worker.ended.remote()
    stats = ray.get(worker.stats.remote(), timeout=30)
    assert (stats.stage, stats.num_tokens, stats.num_micro_batches) == (1, 34, 4)

    os.kill(card.process.pid, signal.SIGKILL)
    started_s = time.monotonic()
    with pytest.raises(StageLost):
        decoder.forward(step(34, 35), own)
    assert time.monotonic() - started_s < limits.deadline_s / 4
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(ended, timeout=30)
    with pytest.raises(StageLost):
        decoder.submit(step(34, 35), own)
    with pytest.raises(StageLost):
        connect(worker, card)
    decoder.close()

    worker, card = start_worker(config, stage_lease)
    decoder = connect(worker, card)
    # Nothing is computed again: what the first worker stored is in the arena.
    assert decoder.forward(step(34, 35), own).tobytes() == expected[2].tobytes()

    ended = worker.ended.remote()
    arena.header.set_generation(3, 8)
    with pytest.raises(StageLost):
        decoder.forward(step(34, 35), own)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(ended, timeout=30)
    decoder.close()


def test_the_transport_of_each_hop_follows_from_the_nodes_of_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_transports(["n1", "n1"]) == ("shared_memory", "shared_memory")
    assert choose_transports(["n1", "n2", "n2", "n1"]) == ("tcp", "shared_memory", "tcp", "shared_memory")
    monkeypatch.setenv("RAY_USE_TLS", "1")
    assert choose_transports(["n1", "n1"]) == ("shared_memory", "shared_memory")
    with pytest.raises(ConfigError, match="stages on 2 nodes are not served with RAY_USE_TLS"):
        choose_transports(["n1", "n2"])
