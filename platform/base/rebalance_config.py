"""When routers move running requests by themselves."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from remora.platform.base.config_types import Section


class RebalanceConfig(Section):
    """Between replicas of a model; deployments/rebalance.py says what the figures mean."""

    enabled: bool = True
    #: How often each router looks.
    interval_s: Annotated[float, Field(ge=0.05, le=60)] = 1.0
    #: How long a replica must have a reason before anything leaves it.
    patience_s: Annotated[float, Field(ge=0, le=3600)] = 5.0
    #: Between two moves of a model: what replicas report must have caught up with the one before.
    settle_s: Annotated[float, Field(ge=0, le=3600)] = 3.0
    #: A request that was moved stays for so long.
    cooldown_s: Annotated[float, Field(ge=0, le=86400)] = 120.0
    #: A replica gives away from `start_ratio` times the least loaded one's tokens plus the gap on, until
    #: `stop_ratio` times plus half of the gap.
    start_ratio: Annotated[float, Field(gt=1, le=100)] = 2.0
    stop_ratio: Annotated[float, Field(ge=1, le=100)] = 1.5
    min_gap_tokens: Annotated[int, Field(ge=1)] = 4096

    @model_validator(mode="after")
    def _has_hysteresis(self) -> RebalanceConfig:
        if self.stop_ratio >= self.start_ratio:
            raise ValueError(
                f"rebalance.stop_ratio: {self.stop_ratio:g} must be less than start_ratio, {self.start_ratio:g}"
            )
        return self
