"""How a model of the configuration is split into stages: by hand, or by the time that its layers take here."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from remora.deployments.models.load import read_shape
from remora.deployments.pipeline.split import balanced_split, measure_costs
from remora.platform.base.errors import ModelError
from remora.platform.base.model_config import ModelConfig

logger = logging.getLogger(__name__)


def stage_split(model: ModelConfig, num_threads: Sequence[int]) -> tuple[int, ...]:
    """Layers of each stage, whose devices compute with so many threads: stage_layers if given, else balanced by timing
    a layer and the head on this machine.

    Raises ModelError for a model that cannot be split, or not like this.
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
    costs = {count: measure_costs(shape, count) for count in {*num_threads}}
    split = balanced_split([costs[count] for count in num_threads])
    logger.info("model %s: stages of %s layers, by measured time", model.name, split)
    return split
