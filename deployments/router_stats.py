"""The router's counters, in Prometheus form."""

from __future__ import annotations

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram

from remora.deployments.placement import RouteReason
from remora.platform.base.ids import ModelId

ResumeReason = Literal["replica_lost", "unavailable", "gap", "refused"]
#: Why a running request was moved.
MoveReason = Literal["asked", "drain", "load", "memory"]
_WAKE_BUCKETS_S = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
_PAUSE_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


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
        self._moved = Counter(
            "remora_router_moved_requests_total",
            "Unfinished requests that went on at another replica, by why.",
            ("model", "reason"),
            registry=self.registry,
        )
        self._failed_moves = Counter(
            "remora_router_failed_moves_total",
            "Moves that the router decided on and that did not come about, by why it did.",
            ("model", "reason"),
            registry=self.registry,
        )
        self._wakes = Counter(
            "remora_model_wakes_total",
            "Times that a request ended the sleep of a model.",
            ("model",),
            registry=self.registry,
        )
        self._wake_s = Histogram(
            "remora_model_wake_seconds",
            "From the first request for a sleeping model to a replica that takes it.",
            ("model",),
            buckets=_WAKE_BUCKETS_S,
            registry=self.registry,
        )
        self._pause_s = Histogram(
            "remora_migration_pause_seconds",
            "From the end of a moved request's work at one replica to its first token from another.",
            ("model", "reason"),
            buckets=_PAUSE_BUCKETS_S,
            registry=self.registry,
        )

    def routed(self, model_id: ModelId, reason: RouteReason) -> None:
        self._routed.labels(model_id, reason).inc()

    def resumed(self, model_id: ModelId, reason: ResumeReason) -> None:
        self._resumed.labels(model_id, reason).inc()

    def moved(self, model_id: ModelId, reason: MoveReason, pause_s: float) -> None:
        self._moved.labels(model_id, reason).inc()
        self._pause_s.labels(model_id, reason).observe(pause_s)

    def requeued(self, model_id: ModelId, reason: MoveReason) -> None:
        """Moved before anything had come of it."""
        self._moved.labels(model_id, reason).inc()

    def move_failed(self, model_id: ModelId, reason: MoveReason) -> None:
        self._failed_moves.labels(model_id, reason).inc()

    def woke(self, model_id: ModelId, took_s: float) -> None:
        self._wakes.labels(model_id).inc()
        self._wake_s.labels(model_id).observe(took_s)

    def abandoned(self, model_id: ModelId) -> None:
        self._abandoned.labels(model_id).inc()
