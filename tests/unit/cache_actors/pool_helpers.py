"""Small pools for tests: geometries of a few hundred bytes, settings, a handle, and the commands of a replica."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from ray.exceptions import ActorUnavailableError

from remora.cache_actors.pool_actor import PoolActor
from remora.cache_actors.pool_settings import POOL_LEASE, PoolSettings
from remora.cache_actors.process_watch import process_identity
from remora.namespaces.commands import Admit, Attach, Detach, Publish, Quota, Release, Seal, SetQuota
from remora.namespaces.geometry import KVGeometry, LayerGroup
from remora.namespaces.hashing import chain_hashes, chain_root
from remora.platform.base.config import DeviceConfig
from remora.platform.base.ids import BlockHash, LeaseId, ModelId, NamespaceId, PoolId, ReplicaId, SequenceId

BLOCK_TOKENS = 16
KiB = 1024


def geometry(num_layers: int = 1, head_dim: int = 16) -> KVGeometry:
    """A block has 1 KiB a layer at 16 values a head."""
    return KVGeometry(
        groups=(LayerGroup(num_layers=num_layers, num_kv_heads=1, head_dim=head_dim),), block_tokens=BLOCK_TOKENS
    )


def set_quota(name: str, guaranteed: int = 0, limit: int = 1 << 30, tenant: str = "", model: str = "m") -> SetQuota:
    return SetQuota(
        lease_id=POOL_LEASE,
        namespace_id=NamespaceId(name),
        model_id=ModelId(model),
        quota=Quota(guaranteed_bytes=guaranteed, limit_bytes=limit),
        tenant=tenant,
    )


def settings(tmp_path: Path, *quotas: SetQuota, session: str = "s1", arena_bytes: int = 256 * KiB) -> PoolSettings:
    return PoolSettings(
        cluster_name="test",
        pool_id=PoolId(f"cpu0-n1-{session}"),
        session=session,
        device=DeviceConfig(
            arena_bytes=arena_bytes,  # type: ignore[arg-type]
            extent_bytes=32 * KiB,  # type: ignore[arg-type]
            block_tokens=BLOCK_TOKENS,
            reserved_bytes=1 << 30,  # type: ignore[arg-type]
        ),
        quotas=quotas or (set_quota("a", tenant="a"), set_quota("b", tenant="b")),
        shm_dir=tmp_path,
        state_dir=tmp_path / "state",
        object_store_bytes=0,
        debug=True,
    )


class ReplicaCalls:
    """Builds the numbered commands of one lease."""

    def __init__(self, name: str, kv: KVGeometry | None = None, fingerprint: bytes = b"f", model: str = "m") -> None:
        self.lease_id = LeaseId(name)
        self.kv = kv or geometry()
        self.fingerprint = fingerprint
        self.model = ModelId(model)
        self._call_no = 0

    def _next(self) -> int:
        self._call_no += 1
        return self._call_no

    def attach(self, pid: int | None = None) -> Attach:
        return Attach(
            lease_id=self.lease_id,
            call_no=self._next(),
            replica_id=ReplicaId(f"replica-{self.lease_id}"),
            model_id=self.model,
            geometry=self.kv,
            fingerprint=self.fingerprint,
            process=process_identity(os.getpid() if pid is None else pid),
        )

    def hashes(self, tokens: Iterable[int], namespace: str) -> tuple[BlockHash, ...]:
        root = chain_root(self.fingerprint, namespace)
        return tuple(chain_hashes(root, list(tokens), BLOCK_TOKENS))

    def admit(self, name: str, tokens: Iterable[int], namespace: str = "a", num_blocks: int | None = None) -> Admit:
        tokens = list(tokens)
        blocks = num_blocks or -(-len(tokens) // BLOCK_TOKENS)
        return Admit(
            lease_id=self.lease_id,
            call_no=self._next(),
            sequence_id=SequenceId(name),
            namespace_id=NamespaceId(namespace),
            hashes=self.hashes(tokens, namespace),
            num_tokens=len(tokens),
            num_blocks=blocks,
            max_blocks=blocks,
        )

    def publish(self, name: str, tokens: Iterable[int], namespace: str = "a") -> Publish:
        seals = tuple(
            Seal(sequence_id=SequenceId(name), position=position, block_hash=block_hash)
            for position, block_hash in enumerate(self.hashes(tokens, namespace))
        )
        return Publish(lease_id=self.lease_id, call_no=self._next(), seals=seals)

    def release(self, *names: str) -> Release:
        return Release(
            lease_id=self.lease_id, call_no=self._next(), sequence_ids=tuple(SequenceId(name) for name in names)
        )

    def detach(self) -> Detach:
        return Detach(lease_id=self.lease_id, call_no=self._next())


class Handle:
    """Like a Ray handle of the actor; loses calls on their way there or answers on their way back. `has_links`: gives
    links to it away, over which nothing is lost here."""

    def __init__(self, actor: PoolActor, loss: float = 0.0, *, has_links: bool = False) -> None:
        self.actor = actor
        self.loss = loss
        self.has_links = has_links
        self.num_rpcs = 0
        self._random = random.Random(4)

    def __getattr__(self, name: str) -> Any:
        handle = self

        class Method:
            async def remote(self, *arguments: Any) -> Any:
                if name == "open_calls" and not handle.has_links:
                    return msgspec.msgpack.encode(None)
                handle.num_rpcs += 1
                if handle._random.random() < handle.loss:
                    raise ActorUnavailableError("lost on the way there", None)
                answer = await getattr(handle.actor, name)(*arguments)
                if handle._random.random() < handle.loss:
                    raise ActorUnavailableError("lost on the way back", None)
                return answer

        return Method()
