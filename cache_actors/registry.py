"""The registry actor: one per cluster, named and detached, the directory of replicas.

Of replicas it keeps nothing that they do not tell it again: after a restart each replica's next heartbeat is answered
"unknown" and the replica registers anew; readers keep their copy meanwhile. Sessions are in the cluster's database.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from functools import partial
from typing import Any, Final

import msgspec
import ray
from ray.exceptions import RayError

from remora.cache_actors.cluster_names import REGISTRY_NAME, ray_namespace
from remora.cache_actors.model_sleep import ModelSleep
from remora.cache_actors.process_watch import is_alive
from remora.cache_actors.registry_state import (
    Changes,
    RegistryEvent,
    RegistryState,
    ReplicaChanged,
    ReplicaLoad,
    ReplicaRecord,
    ReplicaRemoved,
    ReplicaStatus,
    Settled,
)
from remora.cache_actors.serve_scaler import ServeScaler
from remora.cache_actors.session_ends import end_sessions
from remora.cache_actors.session_registry import SessionRegistry
from remora.namespaces.session_commands import SessionCommand
from remora.platform.base.config import ClusterConfig
from remora.platform.base.ids import ModelId, ReplicaId
from remora.platform.base.state_store import StateStore, database_url_of

logger = logging.getLogger(__name__)

#: Readers are woken together for the changes of this time.
_COALESCE_S: Final = 0.02
_command_decoder = msgspec.msgpack.Decoder(SessionCommand)
_encoder = msgspec.msgpack.Encoder()


def _open_store(database_url: str) -> StateStore:
    # Here, so that replicas and routers, which only call the registry, do without SQLAlchemy.
    from remora.platform.base.sql_state_store import SqlStateStore

    return SqlStateStore(database_url)


class RegistryActor:
    """All methods run on the actor's event loop; mutations contain no await."""

    def __init__(
        self,
        database_url: str,
        cluster_name: str,
        heartbeat_s: float = 1.0,
        settle_s: float = 10.0,
        debug: bool = False,
    ) -> None:
        """Replicas are lost after 5 heartbeats of silence and forgotten after 60.

        For `settle_s` after a start readers keep replicas they know from before; Ray's own reconnection takes seconds.
        """
        self._heartbeat_s = heartbeat_s
        self._settle_s = settle_s
        self._debug = debug
        self._state = RegistryState(uuid.uuid4().hex)
        self._heard_s: dict[ReplicaId, float] = {}
        self._changed = asyncio.Event()
        self._sleep = ModelSleep(ServeScaler())
        context = ray.get_runtime_context()
        self._node_id: str = context.get_node_id()
        self._sessions = SessionRegistry(
            partial(_open_store, database_url),
            cluster_id=context.get_session_name(),
            on_removed=partial(end_sessions, cluster_name),
        )
        self._task = asyncio.get_event_loop().create_task(self._watch())

    async def register(self, record: ReplicaRecord) -> None:
        """Adds a replica, or replaces what was known about it."""
        self._heard_s[record.replica_id] = time.monotonic()
        self._apply(ReplicaChanged(record=record))

    async def heartbeat(self, replica_id: ReplicaId, status: ReplicaStatus, load: ReplicaLoad) -> bool:
        """Says the replica lives. False: it is unknown (the registry restarted) and must register again."""
        record = self._state.replica(replica_id)
        if record is None:
            return False
        self._heard_s[replica_id] = time.monotonic()
        if (record.status, record.load) != (status, load):
            self._apply(ReplicaChanged(record=msgspec.structs.replace(record, status=status, load=load)))
        if load.wants_sleep and self._state.settled:
            # Here, and not now and then: no other moment's word of the replica is as fresh.
            await self._sleep.look(record.model_id, self._of(record.model_id))
        return True

    async def unregister(self, replica_id: ReplicaId) -> None:
        """Removes a replica that ends in peace."""
        self._remove(replica_id, "unregistered")

    async def mark_dead(self, replica_id: ReplicaId, reason: str) -> None:
        """Removes a replica that a router or pool has seen dead. If it lives after all, it registers again."""
        self._remove(replica_id, reason)

    async def replicas(self) -> tuple[ReplicaRecord, ...]:
        """The whole directory."""
        return self._state.replicas()

    async def wait_changes(self, incarnation: str, version: int, timeout_s: float) -> Changes:
        """Answers as soon as there is something newer than `version`, else after `timeout_s`."""
        if incarnation == self._state.incarnation and version == self._state.version:
            try:
                await asyncio.wait_for(self._changed.wait(), timeout_s)
                await asyncio.sleep(_COALESCE_S)
            except TimeoutError:
                pass
        return self._state.changes_since(incarnation, version)

    async def wake_model(self, app_name: str, model_id: ModelId, num_replicas: int) -> bool:
        """Starts the replicas of a model that sleeps; see ModelSleep.wake."""
        return await self._sleep.wake(app_name, model_id, num_replicas)

    async def sleep_model(self, app_name: str, model_id: ModelId) -> None:
        """Stops the replicas of a model that has nothing to do; see ModelSleep.sleep_now."""
        await self._sleep.sleep_now(app_name, model_id, self._of(model_id))

    async def session_call(self, data: bytes) -> bytes:
        """Answers one SessionCommand with a SessionAnswer, both as msgpack."""
        return _encoder.encode(await self._sessions.call(_command_decoder.decode(data)))

    async def pid(self) -> int:
        """Process id of the actor on its node."""
        return os.getpid()

    async def check_integrity(self) -> None:
        """Raises IntegrityError when an invariant is broken."""
        self._state.check_integrity()
        self._sleep.check_integrity()
        self._sessions.check_integrity()

    def _of(self, model_id: ModelId) -> list[ReplicaRecord]:
        return [record for record in self._state.replicas() if record.model_id == model_id]

    def _apply(self, event: RegistryEvent) -> None:
        self._state.apply(event)
        self._changed.set()
        self._changed = asyncio.Event()

    def _remove(self, replica_id: ReplicaId, reason: str) -> None:
        self._heard_s.pop(replica_id, None)
        self._sleep.forget(replica_id)
        if self._state.replica(replica_id) is not None:
            logger.info("replica %s left the directory: %s", replica_id, reason)
            self._apply(ReplicaRemoved(replica_id=replica_id, reason=reason))

    async def _gone_nodes(self) -> set[str]:
        """Of the nodes of silent replicas, those that Ray has given up. Asked only when somebody is silent."""
        limit_s = time.monotonic() - 2 * self._heartbeat_s
        silent = {record.node_id for record in self._state.replicas() if self._heard_s[record.replica_id] < limit_s}
        silent.discard(self._node_id)
        if not silent:
            return set()
        try:
            nodes = await asyncio.to_thread(ray.nodes)
        except RayError as error:
            logger.warning("Ray does not say which nodes live: %s", error)
            return set()
        return silent - {node["NodeID"] for node in nodes if node["Alive"]}

    async def _watch(self) -> None:
        settled_s = time.monotonic() + self._settle_s
        while True:
            await asyncio.sleep(self._heartbeat_s)
            gone = await self._gone_nodes()
            now_s = time.monotonic()
            if not self._state.settled and now_s >= settled_s:
                self._apply(Settled())
            for record in self._state.replicas():
                silence_s = now_s - self._heard_s[record.replica_id]
                local = record.node_id == self._node_id
                if (
                    silence_s > 60 * self._heartbeat_s
                    or (local and silence_s > 2 * self._heartbeat_s and not is_alive(record.process))
                    or record.node_id in gone
                ):
                    self._remove(record.replica_id, f"silent for {silence_s:.1f} s")
                elif silence_s > 5 * self._heartbeat_s and record.status != "lost":
                    self._apply(ReplicaChanged(record=msgspec.structs.replace(record, status="lost")))
            if self._debug:
                self._state.check_integrity()
                self._sessions.check_integrity()


def get_or_create_registry(cluster: ClusterConfig, *, heartbeat_s: float = 1.0, settle_s: float = 10.0) -> Any:
    """Handle of the cluster's registry. Ray must be initialised."""
    return (
        ray.remote(RegistryActor)
        .options(
            name=REGISTRY_NAME,
            namespace=ray_namespace(cluster.name),
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_task_retries=0,
            num_cpus=0,
            max_concurrency=4096,
        )
        .remote(database_url_of(cluster), cluster.name, heartbeat_s=heartbeat_s, settle_s=settle_s, debug=cluster.debug)
    )
