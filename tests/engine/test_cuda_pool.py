"""An engine for a GPU at the pool actor of one: CuPy is a stand-in, kernels are emulated, all else is what serves."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from engine_support import FINGERPRINT, Harness
from fake_cupy import FakeRuntime, fake_cupy
from pool_helpers import Handle, set_quota, settings
from tiny_llama import LLAMA_GEOMETRY, tiny_llama, tiny_llama_on

from remora.cache_actors.block_exports import checksum
from remora.cache_actors.pool_actor import PoolActor
from remora.cache_actors.pool_client import PoolClient
from remora.cache_actors.pool_messages import HoldReply
from remora.cache_actors.port import OpenGate
from remora.deployments.engine.base import EngineNamespace
from remora.deployments.engine.engine import Engine
from remora.deployments.engine.messages import TokenDelta
from remora.kernels.cuda.runtime import Runtime
from remora.namespaces.hold_commands import Hold
from remora.platform.base.clock import SystemClock
from remora.platform.base.errors import PoolError
from remora.platform.base.ids import HoldId, LeaseId, ModelId, NamespaceId, ReplicaId

BLOCK_BYTES = LLAMA_GEOMETRY.block_bytes
TOTAL_BYTES = 64 * BLOCK_BYTES
PROMPT = np.random.default_rng(3).integers(0, 256, 40).tolist()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    cupy = fake_cupy(TOTAL_BYTES)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return cupy.cuda.runtime


@pytest.fixture
async def actor(card: FakeRuntime, tmp_path: Path) -> AsyncIterator[PoolActor]:
    plain = settings(tmp_path, set_quota("ns", model="model"), arena_bytes=32 * BLOCK_BYTES)
    device = plain.device.model_copy(
        update={"name": "gpu0", "kind": "cuda", "extent_bytes": 8 * BLOCK_BYTES, "reserved_bytes": None}
    )
    made = PoolActor(msgspec.structs.replace(plain, device=device))
    yield made
    await made.check_integrity()
    await made.retire()
    assert card.allocations == {}


async def attach(actor: PoolActor, reserved_bytes: int = 0) -> PoolClient:
    return await PoolClient.attach(
        Handle(actor),
        replica_id=ReplicaId("r"),
        model_id=ModelId("model"),
        geometry=LLAMA_GEOMETRY,
        fingerprint=FINGERPRINT,
        relocates=True,
        reserved_bytes=reserved_bytes,
    )


async def test_an_engine_computes_in_the_memory_that_the_pool_of_a_gpu_lends(
    actor: PoolActor, card: FakeRuntime, runtime: Runtime
) -> None:
    plain = Harness(model=tiny_llama("reference"), geometry=LLAMA_GEOMETRY)
    expected = plain.run(PROMPT, max_tokens=6, request_id="0").token_ids
    lease = await attach(actor)
    assert len(card.opened) == 1
    deltas: list[TokenDelta] = []
    engine = Engine(
        tiny_llama_on(runtime),
        lease.memory,
        lease,
        OpenGate(),
        SystemClock(),
        lambda router_id, batch: deltas.extend(batch),
        find_namespace=lambda namespace_id: EngineNamespace(root=plain.root("ns")),
    )
    engine.start()
    for number in range(2):
        engine.submit(plain.request(PROMPT, max_tokens=6, request_id=str(number)))
        async with asyncio.timeout(60):
            while len(deltas) <= number or deltas[-1].finish_reason is None or deltas[-1].request_id != str(number):
                await asyncio.sleep(0.005)
        said = [token_id for delta in deltas if delta.request_id == str(number) for token_id in delta.token_ids]
        assert said == expected
    assert max(delta.num_cached_tokens or 0 for delta in deltas) == 32
    await asyncio.to_thread(engine.stop)

    # What is cached there can be read by others, from the actor.
    hold = Hold(
        lease_id=LeaseId(""),
        hold_id=HoldId("h"),
        namespace_id=NamespaceId("ns"),
        fingerprint=FINGERPRINT,
        hashes=plain.hashes("ns", PROMPT),
        hold_s=60.0,
    )
    reply = msgspec.msgpack.decode(await actor.hold(msgspec.msgpack.encode(hold)), type=HoldReply)
    assert (len(reply.held.blocks), reply.arena_path) == (2, "")
    found = await actor.read_blocks(HoldId("h"), 0, 2)
    assert found is not None
    assert [checksum(row) for row in found.data_NB] == list(found.checksums)
    own = plain.pool.device
    held = own.hold(msgspec.structs.replace(hold, hold_id=HoldId("o")))
    plain_NB = np.empty((2, BLOCK_BYTES), np.uint8)
    held.read(0, plain_NB)
    held.close()
    assert np.allclose(found.data_NB.view(np.float32), plain_NB.view(np.float32), atol=1e-4)
    await actor.unhold([HoldId("h")])
    await lease.detach()
    plain.close()
    assert card.opened == {}


async def test_a_model_that_does_not_fit_beside_the_arena_is_refused_with_what_is_left(actor: PoolActor) -> None:
    left_bytes = TOTAL_BYTES - 32 * BLOCK_BYTES
    with pytest.raises(PoolError, match=f"needs {left_bytes + 1} bytes besides KV, but 0 of the device's {left_bytes}"):
        await attach(actor, left_bytes + 1)
    lease = await attach(actor, left_bytes)
    await lease.detach()
