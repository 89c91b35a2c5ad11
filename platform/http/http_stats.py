"""Counters of the HTTP face, in Prometheus form."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LATENCY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_INTER_TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
_BY_NAMESPACE = ("model", "namespace")


class HttpStats:
    """One router's counters."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "remora_http_requests_total", "Answers, by route and status.", ("route", "status"), registry=registry
        )
        self.in_flight = Gauge(
            "remora_generations_in_flight", "Generations under way.", _BY_NAMESPACE, registry=registry
        )
        self.finished = Counter(
            "remora_generations_total",
            "Generations that ended, by outcome: ok, disconnected, or the error's code.",
            (*_BY_NAMESPACE, "outcome"),
            registry=registry,
        )
        self.duration_s = Histogram(
            "remora_generation_duration_seconds",
            "From the request's arrival to its last token.",
            _BY_NAMESPACE,
            buckets=_LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.first_token_s = Histogram(
            "remora_time_to_first_token_seconds",
            "From the request's arrival to its first token, queueing and tokenizing included.",
            _BY_NAMESPACE,
            buckets=_LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.inter_token_s = Histogram(
            "remora_inter_token_seconds",
            "Between two deliveries of tokens of a request, as its client sees them.",
            _BY_NAMESPACE,
            buckets=_INTER_TOKEN_BUCKETS_S,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "remora_prompt_tokens_total", "Prompt tokens of answered requests.", _BY_NAMESPACE, registry=registry
        )
        self.cached_tokens = Counter(
            "remora_cached_prompt_tokens_total", "Of those, found in the cache.", _BY_NAMESPACE, registry=registry
        )
        self._limited = Counter(
            "remora_tenant_limited_requests_total",
            "Requests refused because their tenant had reached a limit.",
            ("tenant", "limit"),
            registry=registry,
        )
        self.output_tokens = Counter(
            "remora_output_tokens_total", "Tokens generated and sent.", _BY_NAMESPACE, registry=registry
        )

    def refused(self, tenant: str, limit: str) -> None:
        self._limited.labels(tenant, limit).inc()


class CountAnswers:
    """ASGI middleware: counts every answer by its route and status."""

    def __init__(self, app: ASGIApp, stats: HttpStats) -> None:
        self._app = app
        self._stats = stats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                # Only known routes become labels: paths are the client's to choose.
                route = getattr(scope.get("route"), "path", "unknown")
                self._stats.requests.labels(route, message["status"]).inc()
            await send(message)

        await self._app(scope, receive, count)
