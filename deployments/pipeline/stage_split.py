"""How a model of the configuration is split into stages: by hand, or by the time that its layers take here."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from remora.deployments.models.load import read_shape
from remora.deployments.pipeline.split import balanced_split, measure_costs
from remora.kernels.base import DecoderShape
from remora.platform.base.errors import ModelError
from remora.platform.base.model_config import ModelConfig
from remora.platform.base.paths import default_state_dir

logger = logging.getLogger(__name__)


def stage_split(model: ModelConfig, num_threads: Sequence[int], state_dir: Path | None = None) -> tuple[int, ...]:
    """Layers of each stage, whose devices compute with so many threads: stage_layers if given, else balanced by timing
    a layer and the head on this machine.

    What was measured is kept in `state_dir` (default: the user's): KV of another split is other KV, and two
    measurements seldom agree to the last layer. Raises ModelError for a model that cannot be split, or not like this.
    """
    shape = read_shape(model)
    if model.stage_layers:
        if sum(model.stage_layers) != shape.num_layers:
            raise ModelError(
                f"models.{model.name}.stage_layers: {list(model.stage_layers)} are {sum(model.stage_layers)} layers; "
                f"the model has {shape.num_layers}."
            )
        return model.stage_layers
    if shape.num_layers < model.pipeline_stages:
        raise ModelError(
            f"models.{model.name}.pipeline_stages: {model.pipeline_stages} stages for {shape.num_layers} layers; at "
            "most one stage a layer."
        )
    kept = _kept_path(state_dir or default_state_dir(), shape, num_threads)
    split = _read(kept, shape, len(num_threads))
    if split is None:
        costs = {count: measure_costs(shape, count) for count in {*num_threads}}
        split = balanced_split([costs[count] for count in num_threads])
        logger.info("model %s: stages of %s layers, by measured time", model.name, split)
        _write(kept, split)
    return split


def _kept_path(state_dir: Path, shape: DecoderShape, num_threads: Sequence[int]) -> Path:
    """A file for each shape on such devices."""
    text = json.dumps([dataclasses.asdict(shape), list(num_threads)], sort_keys=True)
    return state_dir / "stage_splits" / f"{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}.json"


def _read(path: Path, shape: DecoderShape, num_stages: int) -> tuple[int, ...] | None:
    """None when nothing was measured, or what is there does not fit."""
    try:
        split = msgspec.json.decode(path.read_bytes(), type=tuple[int, ...])
    except (OSError, msgspec.DecodeError):
        return None
    fits = len(split) == num_stages and sum(split) == shape.num_layers and min(split) > 0
    return split if fits else None


def _write(path: Path, split: tuple[int, ...]) -> None:
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(msgspec.json.encode(split))
        partial.replace(path)
    except OSError as error:
        # The next start may find another split, and then none of the KV of this one.
        logger.warning("%s: the measured split cannot be kept: %s", path, error.strerror)
