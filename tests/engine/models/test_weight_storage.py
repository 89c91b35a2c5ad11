"""Where the weights of a model come from when it is loaded again, and that it stays the same model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from model_support import Memory, random_prompt, save_tiny

from remora.cache_actors.weight_cache import WeightCache
from remora.cache_actors.weight_share import WeightShare
from remora.deployments.models import load_target, weight_storage
from remora.deployments.models.load import load_model
from remora.deployments.models.loaded_model import LoadedModel
from remora.deployments.models.safetensors_weights import SafetensorsSource
from remora.deployments.models.weight_storage import WeightStorage
from remora.kernels.batch import StepBatch
from remora.kernels.native.weight_memory import shared_memory_is_fast
from remora.kernels.stages import StagePart
from remora.platform.base.errors import ModelError
from remora.platform.base.model_config import ModelConfig

needs_sharing = pytest.mark.skipif(not shared_memory_is_fast(), reason="shared memory gets no huge pages here")


class Loader:
    """Loads a folder as a replica of some cluster on this node does, and tells where its weights came from."""

    def __init__(self, folder: Path, weights: str) -> None:
        self.folder, self.weights = folder, weights
        self.cache = folder / "cache"
        self.lines: list[str] = []

    def load(self, cluster: str = "c", part: StagePart | None = None, max_cache_bytes: int = 1 << 30) -> LoadedModel:
        storage = WeightStorage(WeightShare(self.folder, cluster), WeightCache(self.cache, max_cache_bytes))
        config = ModelConfig(name="m", source=str(self.folder), weights=self.weights)  # type: ignore[arg-type]
        self.lines.clear()
        model = load_model(
            config, block_tokens=16, num_threads=2, progress=self.lines.append, part=part, storage=storage
        )
        storage.settle()
        return model

    @property
    def origin(self) -> str:
        (line,) = [line for line in self.lines if "in memory" in line]
        return line.split(", ")[1]


def logits(model: LoadedModel) -> bytes:
    batch = StepBatch(max_tokens=20, max_sequences=1, max_blocks=2)
    batch.add(random_prompt(20, model.vocab_size), first_position=0, blocks=[1, 0], logits="all")
    memory = Memory(np.zeros(2 * model.geometry.block_bytes, np.uint8), model.geometry)
    return model.decoder.forward(batch, memory).tobytes()


def never(*args: object, **options: object) -> None:
    raise AssertionError("the model's files were read")


@needs_sharing
@pytest.mark.parametrize("weights", ["bf16", "int4"])
def test_weights_come_from_a_neighbour_else_from_disk_else_from_the_files(
    tmp_path: Path, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, "llama", tie_word_embeddings=True)
    loader = Loader(tmp_path, weights)
    first = loader.load()
    assert (loader.origin, first.shares_weights) == ("packed", True)
    expected = logits(first)
    with monkeypatch.context() as patch:
        patch.setattr(SafetensorsSource, "read", never)
        neighbour = loader.load()
        assert (loader.origin, neighbour.shares_weights) == ("shared", True)
        later = loader.load("another cluster")
        assert (loader.origin, later.shares_weights) == ("cached", True)
    (kept,) = loader.cache.iterdir()
    data = bytearray(kept.read_bytes())
    data[-1000] ^= 1
    kept.write_bytes(data)
    again = loader.load("a third cluster", max_cache_bytes=0)
    assert loader.origin == "packed"
    for model in (neighbour, later, again):
        assert logits(model) == expected
        assert (model.fingerprint, model.weights_bytes) == (first.fingerprint, first.weights_bytes)


@needs_sharing
def test_other_contents_and_the_stages_of_a_pipeline_have_weights_of_their_own(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    loader = Loader(tmp_path, "bf16")
    whole = loader.load()
    stages = [loader.load(part=StagePart(split=(1, 2), stage=stage)) for stage in range(2)]
    assert loader.origin == "packed"
    assert max(stage.weights_bytes for stage in stages) < whole.weights_bytes
    loader.load(part=StagePart(split=(1, 2), stage=1))
    assert loader.origin == "shared"
    save_tiny(tmp_path, "llama", seed=1)
    changed = loader.load()
    assert loader.origin == "packed"
    assert logits(changed) != logits(whole)


def test_where_shared_memory_is_slow_weights_are_a_processes_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, "llama")
    monkeypatch.setattr(weight_storage, "shared_memory_is_fast", lambda: False)
    loader = Loader(tmp_path, "bf16")
    first, second = loader.load(), loader.load()
    assert (loader.origin, second.shares_weights) == ("cached", False)
    assert logits(first) == logits(second)
    monkeypatch.setattr(load_target, "available_memory_bytes", lambda: 1000)
    with pytest.raises(ModelError, match="0 MiB of memory are available"):
        loader.load()


@needs_sharing
def test_an_index_that_cannot_be_had_leaves_weights_a_processes_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path, "llama")
    model = Loader(tmp_path, "bf16").load("missing/folder")
    assert not model.shares_weights
    assert "weights are not shared" in caplog.text
