"""Loading a stage of a model: its layers and nothing else, with the bits of the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_support import Memory, random_prompt, save_tiny

from remora.deployments.models.load import load_model
from remora.deployments.models.loaded_model import LoadedModel
from remora.deployments.models.safetensors_weights import SafetensorsSource
from remora.deployments.pipeline.stage_split import stage_split
from remora.kernels.batch import StepBatch
from remora.kernels.stages import StagePart, stage_decoder
from remora.platform.base.errors import ModelError
from remora.platform.base.model_config import ModelConfig

SPLIT = (1, 2)
DEVICES: dict[str, Any] = {"pipeline_stages": 2, "stage_devices": ("a", "b")}


def load(folder: Path, part: StagePart | None = None, **options: Any) -> LoadedModel:
    config = ModelConfig(name="m", source=str(folder), **{"weights": "fp32", **options})
    return load_model(config, block_tokens=16, num_threads=1, part=part)


@pytest.mark.parametrize("weights", ["bf16", "int4"])
def test_stages_of_a_tied_model_read_their_own_tensors_and_give_the_whole_models_bits(
    tmp_path: Path, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, "llama", tie_word_embeddings=True, num_hidden_layers=3)
    whole = load(tmp_path, weights=weights)
    read: list[str] = []
    plain_read = SafetensorsSource.read
    monkeypatch.setattr(
        SafetensorsSource, "read", lambda self, name, dtype: (read.append(name), plain_read(self, name, dtype))[1]
    )
    stages, names = [], []
    for stage in range(2):
        read.clear()
        stages.append(load(tmp_path, StagePart(split=SPLIT, stage=stage), weights=weights))
        names.append({name.split(".")[2] for name in read if ".layers." in name})
        assert ("model.norm.weight" in read) == (stage == 1)
        assert "model.embed_tokens.weight" in read
    assert names == [{"0"}, {"1", "2"}]
    assert len({whole.fingerprint, *(stage.fingerprint for stage in stages)}) == 3
    assert stages[0].weights_bytes < whole.weights_bytes
    assert stages[1].weights_bytes < whole.weights_bytes

    batch = StepBatch(max_tokens=20, max_sequences=1, max_blocks=2)
    batch.add(random_prompt(20, whole.vocab_size), first_position=0, blocks=[1, 0], logits="all")

    def memory(model: LoadedModel) -> Memory:
        return Memory(np.zeros(2 * model.geometry.block_bytes, np.uint8), model.geometry)

    hidden = stage_decoder(stages[0].decoder).forward_stage(batch, memory(stages[0]), None).copy()
    logits = stage_decoder(stages[1].decoder).forward_stage(batch, memory(stages[1]), hidden)
    assert logits.tobytes() == whole.decoder.forward(batch, memory(whole)).tobytes()


def test_other_splits_have_other_kv(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", num_hidden_layers=3)
    parts = [((1, 1, 1), 0), ((1, 2), 0), ((1, 1, 1), 1)]
    loaded = [load(tmp_path, StagePart(split=split, stage=stage)) for split, stage in parts]
    assert len({model.geometry for model in loaded}) == 1
    assert len({model.fingerprint for model in loaded}) == 3


def test_a_split_is_by_hand_or_balanced_and_what_cannot_be_split_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path / "llama", "llama", num_hidden_layers=3)
    source = str(tmp_path / "llama")
    monkeypatch.setenv("REMORA_STATE_DIR", str(tmp_path / "default"))
    by_hand = ModelConfig(name="m", source=source, stage_layers=(2, 1), **DEVICES)
    assert stage_split(by_hand, [1, 1]) == (2, 1)
    measured = stage_split(ModelConfig(name="m", source=source, **DEVICES), [1, 1])
    assert sorted(measured) == [1, 2]
    assert len(list((tmp_path / "default" / "stage_splits").iterdir())) == 1
    state_dir = tmp_path / "state"
    monkeypatch.setattr("remora.deployments.pipeline.stage_split.balanced_split", lambda costs: (2, 1))
    assert stage_split(ModelConfig(name="m", source=source, **DEVICES), [1, 1], state_dir) == (2, 1)
    monkeypatch.setattr("remora.deployments.pipeline.stage_split.balanced_split", lambda costs: (1, 2))
    assert stage_split(ModelConfig(name="n", source=source, **DEVICES), [1, 1], state_dir) == (2, 1), "it was kept"
    assert stage_split(ModelConfig(name="m", source=source, **DEVICES), [1, 2], state_dir) == (1, 2), "other devices"
    (kept, *_) = (state_dir / "stage_splits").iterdir()
    kept.write_text("[9, 9]")
    assert stage_split(ModelConfig(name="m", source=source, **DEVICES), [1, 1], state_dir) in {(1, 2), (2, 1)}
    with pytest.raises(ModelError, match=r"models\.m\.stage_layers: \[2, 2\] are 4 layers; the model has 3"):
        stage_split(by_hand.model_copy(update={"stage_layers": (2, 2)}), [1, 1])
    with pytest.raises(ModelError, match="4 stages for 3 layers"):
        stage_split(by_hand.model_copy(update={"stage_layers": (), "pipeline_stages": 4}), [1] * 4)
    save_tiny(tmp_path / "gpt2", "gpt2")
    with pytest.raises(ModelError, match="'m' runs through transformers; it cannot be split"):
        stage_split(ModelConfig(name="m", source=str(tmp_path / "gpt2"), **DEVICES), [1, 1])
    with pytest.raises(ModelError, match="cannot be split"):
        load(tmp_path / "gpt2", StagePart(split=SPLIT, stage=0))
