"""A replica without an engine: a process of its own that holds a lease and does what it is told."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import ray

from remora.cache_actors.pool_client import PoolClient
from remora.cache_actors.port import EngineCommand
from remora.namespaces.commands import Admit, AnyAnswer, AnyEvent, Publish, Release, Seal
from remora.namespaces.geometry import KVGeometry, LayerGroup
from remora.namespaces.hashing import chain_hashes, chain_root
from remora.platform.base.config import RemoraConfig, parse_config
from remora.platform.base.ids import BlockHash, LeaseId, ModelId, NamespaceId, ReplicaId, SequenceId

BLOCK_TOKENS = 16
KiB = 1024
MakePool = Callable[..., Awaitable[Any]]
MakeProbe = Callable[..., Awaitable[Any]]


def config(name: str, tmp_path: Path, arena_bytes: int = 256 * KiB, extent_bytes: int = 32 * KiB) -> RemoraConfig:
    """Three models with one namespace (and tenant) each on one small device."""
    return parse_config(
        {
            "cluster": {"name": name, "state_dir": str(tmp_path / "state"), "debug": True},
            "devices": [
                {
                    "name": "cpu0",
                    "arena_bytes": arena_bytes,
                    "extent_bytes": extent_bytes,
                    "block_tokens": 16,
                    "reserved_bytes": "1GiB",
                }
            ],
            "models": [{"name": model, "source": "unused"} for model in "abc"],
            "namespaces": [{"name": model, "model": model, "tenant": model} for model in "abc"],
        }
    )


def node_id() -> str:
    found: str = ray.get_runtime_context().get_node_id()
    return found


class ReplicaProbe:
    """Prompts are given as a number of blocks and a seed; equal ones have equal tokens. A geometry has 1 KiB blocks a
    layer."""

    async def attach(self, pool: Any, model: str, num_layers: int = 1) -> str:
        self._pool = pool
        self._model = model
        self._answers: deque[asyncio.Future[AnyAnswer]] = deque()
        self._events: list[AnyEvent] = []
        self._stop_writing = threading.Event()
        self.lost: list[str] = []
        geometry = KVGeometry(
            groups=(LayerGroup(num_layers=num_layers, num_kv_heads=1, head_dim=16),), block_tokens=BLOCK_TOKENS
        )
        self._block_bytes = geometry.block_bytes
        self._fingerprint = f"{model}-{num_layers}".encode()
        self._client = await PoolClient.attach(
            pool,
            replica_id=ReplicaId(f"probe-{os.getpid()}"),
            model_id=ModelId(model),
            geometry=geometry,
            fingerprint=self._fingerprint,
            on_lost=self.lost.append,
        )
        self._client.bind(lambda _, answer: self._answers.popleft().set_result(answer), self._events.append)
        return self._client.lease_id

    async def admit(self, name: str, num_blocks: int, seed: int = 0, extra: int = 0) -> AnyAnswer:
        """`extra` tokens behind the full blocks, so that all of those can be cached."""
        num_tokens = num_blocks * BLOCK_TOKENS + extra
        held = num_blocks + (extra > 0)
        return await self._ask(
            Admit(
                lease_id=LeaseId(""),
                sequence_id=SequenceId(name),
                namespace_id=NamespaceId(self._model),
                hashes=self._hashes(num_blocks, seed),
                num_tokens=num_tokens,
                num_blocks=held,
                max_blocks=held,
            )
        )

    async def publish(self, name: str, num_blocks: int, seed: int = 0) -> AnyAnswer:
        seals = tuple(
            Seal(sequence_id=SequenceId(name), position=position, block_hash=block_hash)
            for position, block_hash in enumerate(self._hashes(num_blocks, seed))
        )
        return await self._ask(Publish(lease_id=LeaseId(""), seals=seals))

    async def release(self, *names: str) -> AnyAnswer:
        return await self._ask(Release(lease_id=LeaseId(""), sequence_ids=tuple(SequenceId(name) for name in names)))

    async def write(self, blocks: tuple[int, ...], value: int) -> None:
        for block in blocks:
            self._client.memory.data[block * self._block_bytes : (block + 1) * self._block_bytes] = value

    async def values(self, blocks: tuple[int, ...]) -> set[int]:
        """Every byte value that occurs in the blocks."""
        data = self._client.memory.data
        return {
            value
            for block in blocks
            for value in data[block * self._block_bytes : (block + 1) * self._block_bytes].tolist()
        }

    async def keep_writing(self, blocks: tuple[int, ...], value: int) -> None:
        """Writes from a thread as fast as it can, until the process ends."""

        def write() -> None:
            while True:
                for block in blocks:
                    self._client.memory.data[block * self._block_bytes : (block + 1) * self._block_bytes] = value

        threading.Thread(target=write, daemon=True).start()

    async def may_emit(self) -> bool:
        return self._client.may_emit()

    async def lost_reasons(self) -> list[str]:
        return self.lost

    async def wait_event(self, timeout_s: float = 20.0) -> AnyEvent:
        """The next event that was not yet taken."""
        async with asyncio.timeout(timeout_s):
            while not self._events:
                await asyncio.sleep(0.005)
        return self._events.pop(0)

    async def num_events(self) -> int:
        return len(self._events)

    async def repeat_call(self, name: str, num_blocks: int, call_no: int) -> AnyAnswer:
        """Sends an admission under any call number past the client, as a late or repeated message would come."""
        from remora.cache_actors.pool_messages import decode_call_reply, encode_commands

        command = Admit(
            lease_id=self._client.lease_id,
            call_no=call_no,
            sequence_id=SequenceId(name),
            namespace_id=NamespaceId(self._model),
            hashes=self._hashes(num_blocks, 0),
            num_tokens=num_blocks * BLOCK_TOKENS,
            num_blocks=num_blocks,
            max_blocks=num_blocks,
        )
        reply = await self._pool.call.remote(self._client.lease_id, encode_commands([command]), 0)
        return decode_call_reply(reply).answers[0]

    async def detach(self) -> None:
        await self._client.detach()

    async def pid(self) -> int:
        return os.getpid()

    async def lease_id(self) -> str:
        return self._client.lease_id

    async def _ask(self, command: EngineCommand) -> AnyAnswer:
        future: asyncio.Future[AnyAnswer] = asyncio.get_running_loop().create_future()
        self._answers.append(future)
        self._client.send(command)
        return await future

    def _hashes(self, num_blocks: int, seed: int) -> tuple[BlockHash, ...]:
        root = chain_root(self._fingerprint, self._model)
        tokens = [seed * 100_000 + number for number in range(num_blocks * BLOCK_TOKENS)]
        return tuple(chain_hashes(root, tokens, BLOCK_TOKENS))
