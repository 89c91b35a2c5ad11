"""How a router reaches one replica, whatever carries the calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from remora.deployments.engine.messages import FeedMessage, FreezeOrder, GenerationRequest, Resumption
from remora.deployments.model_card import ModelCard
from remora.namespaces.geometry import KVPrecision
from remora.namespaces.quantise_commands import Quantise
from remora.platform.base.ids import NamespaceId, RequestId, RouterId


class ReplicaLink(Protocol):
    """Calls to one replica. Every method raises Unavailable when the replica cannot be reached or is gone; it then
    may or may not have taken effect. ReplicaLeaving: it has not, for the replica is stopping (or not there yet), but a
    feed that is open goes on."""

    async def describe(self) -> ModelCard: ...

    def feed(self, router_id: RouterId) -> AsyncIterator[FeedMessage]:
        """Everything the replica has for this router, the first message at once and then at least one a second.

        Opening a feed starts a new era: requests that this router sent before are cancelled at the replica, and when
        the feed ends so are those sent since. Numbers of messages are consecutive from 0. The replica ends the feed of
        a router that neither submits nor keeps it alive for five seconds.
        """
        ...

    async def keep_alive(self, router_id: RouterId, wanted_traces: Sequence[str] = ()) -> None:
        """Says that the router is there, and which traces are kept though they were not sampled. To be called every
        second while a feed is open."""
        ...

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Hands requests over; they run at most once. Needs an open feed."""
        ...

    async def freeze(self, orders: Sequence[FreezeOrder]) -> None:
        """Stops requests between two steps; the handover of each comes over the feed, behind its last token. They keep
        their blocks until they are cancelled. Unknown ones are ignored."""
        ...

    async def resume(self, resumptions: Sequence[Resumption]) -> None:
        """Lets standbys go on. Unknown ones are ignored."""
        ...

    async def cancel(self, request_ids: Sequence[RequestId]) -> None:
        """Stops requests; unknown ones are ignored."""
        ...

    async def drain(self, draining: bool) -> None:
        """Tells the replica to take nothing new (or to take requests again); it tells the directory."""
        ...

    async def prepare_precision(self, namespace_id: NamespaceId, kv_precision: KVPrecision) -> None:
        """Makes sure that a namespace could have its KV in this precision, without giving it. Raises ModelError when it
        failed its accuracy gate, KernelError or PoolError when it cannot be had."""
        ...

    async def refresh_namespaces(self) -> None:
        """Lets new requests have the precisions that the pool says namespaces have."""
        ...

    async def quantise_command(self, namespace_id: NamespaceId) -> Quantise:
        """What a pool must be told to re-encode the namespace's cache into the precision that it has by now."""
        ...

    async def stats(self) -> dict[str, Any]:
        """Counters and gauges of the engine."""
        ...
