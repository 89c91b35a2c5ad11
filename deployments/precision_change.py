"""Gives a namespace another KV precision while everything runs, and what it has cached with it if that is wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import msgspec

from remora.deployments.replica_connection import ReplicaConnection
from remora.deployments.router import RouterCore
from remora.namespaces.commands import Quota
from remora.namespaces.geometry import QUANTISED, KVPrecision
from remora.namespaces.quantise_commands import Quantise, Quantised
from remora.platform.base.errors import Conflict, InvalidRequest, KernelError, ModelError, PoolError, Unavailable
from remora.platform.base.ids import ModelId, NamespaceId
from remora.platform.base.namespace_tree import parent_of

Result = TypeVar("Result")

#: Replicas answer from what they know; the pool's part is one command.
_TIMEOUT_S = 10.0


class QuotaSetter(Protocol):
    """What pools do about it (deployments/pool_reports.py: ClusterPools)."""

    async def set_quota(
        self, namespace_id: NamespaceId, change: Callable[[Quota], Quota], kv_precision: KVPrecision | None = None
    ) -> None: ...


class Quantiser(QuotaSetter, Protocol):
    """What pools do besides (ClusterPools)."""

    async def quantise(self, namespace_id: NamespaceId, command: Quantise) -> dict[str, Quantised]: ...


async def change_precision(
    core: RouterCore,
    pools: QuotaSetter,
    namespace_id: NamespaceId,
    kv_precision: KVPrecision,
    change: Callable[[Quota], Quota],
) -> None:
    """Changes precision, and quota with it: first every replica says that it could, then the pools take it on record,
    then replicas give it to new requests. Running ones keep theirs, and what is cached stays under its own names.

    A replica that does not hear of it asks the pool when a router connects to it next. Raises Conflict for a precision
    that failed its gate, InvalidRequest for one that cannot be had, Unavailable without a replica to ask.
    """
    parent = parent_of(namespace_id, core.catalog.namespaces)
    if parent is not None:
        raise InvalidRequest(
            f"kv_precision: {namespace_id!r} is a part of {parent!r} and has its precision; change that of {parent!r}.",
            field="kv_precision",
        )
    replicas = await _replicas(core, namespace_id)
    try:
        await asyncio.gather(*(_ask(each.link.prepare_precision(namespace_id, kv_precision)) for each in replicas))
    except ModelError as error:
        raise Conflict(f"kv_precision: {error}", field="kv_precision") from None
    except (KernelError, PoolError) as error:
        raise InvalidRequest(f"kv_precision: {error}", field="kv_precision") from None
    await pools.set_quota(namespace_id, change, kv_precision)
    await asyncio.gather(*(_ask(each.link.refresh_namespaces()) for each in replicas), return_exceptions=True)


async def quantise(
    core: RouterCore, pools: Quantiser, namespace_id: NamespaceId, kv_precision: KVPrecision | None
) -> tuple[KVPrecision, dict[str, Quantised]]:
    """Re-encodes what the namespace has cached in other precisions, in every pool; says into which, and what they did.

    If it is to be another than new requests get, those get it first, as by `change_precision`, which see for what is
    raised. None: the one that they get, or int8 if K and V are not quantised in that.
    """
    replicas = await _replicas(core, namespace_id)
    commands = await asyncio.gather(*(_ask(each.link.quantise_command(namespace_id)) for each in replicas))
    present = commands[0].target.geometry.kv_precision
    wanted = kv_precision or (present if QUANTISED.intersection(present) else ("int8", "int8"))
    if wanted != present:
        await change_precision(core, pools, namespace_id, wanted, lambda quota: quota)
        commands = await asyncio.gather(*(_ask(each.link.quantise_command(namespace_id)) for each in replicas))
    # Each replica knows what its own pool may have.
    sources = {each.geometry.geometry_id: each for command in commands for each in command.sources}
    command = msgspec.structs.replace(commands[0], sources=tuple(sources.values()))
    return wanted, await pools.quantise(namespace_id, command)


async def _replicas(core: RouterCore, namespace_id: NamespaceId) -> list[ReplicaConnection]:
    """Connected ones of the namespace's model. Raises Unavailable when there are none."""
    model_id = ModelId(core.catalog.namespaces[namespace_id].model)
    await core.waker.ready(model_id)
    replicas = [each for each in core.fleet.connections() if each.connected and _serves(core, each, model_id)]
    if not replicas:
        raise Unavailable(f"No replica of {model_id!r} is up to say whether it has this precision; try again.")
    return replicas


def _serves(core: RouterCore, connection: ReplicaConnection, model_id: ModelId) -> bool:
    return core.fleet.listed(connection.replica_id).model_id == model_id


async def _ask(call: Awaitable[Result]) -> Result:
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await call
    except TimeoutError:
        raise Unavailable("A replica does not answer; try again.") from None
