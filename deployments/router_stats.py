"""The router's counters, in Prometheus form."""

from __future__ import annotations

from typing import Literal

from prometheus_client import CollectorRegistry, Counter

from remora.deployments.placement import RouteReason
from remora.platform.base.ids import ModelId

ResumeReason = Literal["replica_lost", "unavailable", "gap"]


class RouterStats:
    """One router's counters, in a registry of their own so that several routers can live in one process."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._routed = Counter(
            "remora_router_routed_requests_total",
            "Attempts given to a replica, by why that replica was chosen.",
            ("model", "reason"),
            registry=self.registry,
        )
        self._resumed = Counter(
            "remora_router_resumed_requests_total",
            "Requests that went on elsewhere, by why their attempt had ended.",
            ("model", "reason"),
            registry=self.registry,
        )
        self._abandoned = Counter(
            "remora_router_abandoned_requests_total",
            "Requests whose client left before the end.",
            ("model",),
            registry=self.registry,
        )

    def routed(self, model_id: ModelId, reason: RouteReason) -> None:
        self._routed.labels(model_id, reason).inc()

    def resumed(self, model_id: ModelId, reason: ResumeReason) -> None:
        self._resumed.labels(model_id, reason).inc()

    def abandoned(self, model_id: ModelId) -> None:
        self._abandoned.labels(model_id).inc()
