"""Blocks that are being re-encoded when their pool is killed."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from pool_helpers import BLOCK_TOKENS, ReplicaCalls, geometry, set_quota, settings
from test_durable_pool import Killed, block_bytes, one, restart

from remora.cache_actors import durable_pool as module
from remora.cache_actors.durable_pool import DurablePool
from remora.kernels.reencoder import HostMemory
from remora.kernels.reference.reencode import reencode_blocks as reference
from remora.namespaces.commands import AddFormat, Admitted
from remora.namespaces.kept_chains import KeptChain
from remora.namespaces.quantise_commands import KVFormat, Quantise, Quantised
from remora.platform.base.clock import ManualClock
from remora.platform.base.ids import LeaseId, NamespaceId

INT8 = geometry().with_precision(("int8", "int8"))
NUM_BLOCKS = 5


@pytest.mark.parametrize("moment", ["before", "in the middle", "after"])
def test_a_pool_that_dies_while_it_re_encodes_gives_out_whole_blocks_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    pool, calls = DurablePool(settings(tmp_path), ManualClock()), ReplicaCalls("l1")
    tokens = list(range(NUM_BLOCKS * BLOCK_TOKENS))
    one(pool, calls.attach())
    admitted = one(pool, calls.admit("s", tokens))
    assert isinstance(admitted, Admitted)
    values = np.random.default_rng(1).normal(0, 1, (NUM_BLOCKS, geometry().block_bytes // 2)).astype(np.float32)
    source = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    for block, row in zip(admitted.blocks, source, strict=True):
        pool.arena.data[block * len(row) : (block + 1) * len(row)] = row
    one(pool, calls.publish("s", tokens))
    one(pool, calls.release("s"))
    one(pool, AddFormat(lease_id=calls.lease_id, call_no=calls._next(), geometry=INT8, fingerprint=b"8"))
    one(pool, msgspec.structs.replace(set_quota("a", tenant="a"), kv_precision=INT8.kv_precision))
    command = Quantise(
        lease_id=LeaseId(""),
        namespace_id=NamespaceId("a"),
        target=KVFormat(geometry=INT8, fingerprint=b"8"),
        sources=(KVFormat(geometry=geometry(), fingerprint=b"f"),),
    )
    real = module.reencode_blocks

    def dies(source: Any, target: Any, sources: Any, targets: Any) -> None:
        if moment == "in the middle":
            real(source, target, sources[:2], targets[:2])
            target.data[int(targets[2]) * INT8.block_bytes :][:100] = 0xEE
        elif moment == "after":
            real(source, target, sources, targets)
        raise Killed

    monkeypatch.setattr(module, "reencode_blocks", dies)
    with contextlib.suppress(Killed):
        one(pool, command)
    monkeypatch.undo()
    pool = restart(pool)
    pool.check_integrity()
    again = one(pool, command)
    assert isinstance(again, Quantised)
    assert (again.num_converted_blocks, again.num_left_blocks) == (0, 0), "the round took effect before it died"
    chain = KeptChain(fingerprint=b"f", hashes=calls.hashes(tokens, "a"))
    other = ReplicaCalls("l1", INT8, b"8")
    admit = msgspec.structs.replace(
        other.admit("t", [*tokens, 1]), call_no=calls._next(), geometry_id=INT8.geometry_id, kept=(chain,)
    )
    found = one(pool, admit)
    assert isinstance(found, Admitted)
    assert found.num_cached_blocks == NUM_BLOCKS
    expected = HostMemory(np.zeros(NUM_BLOCKS * INT8.block_bytes, np.uint8), INT8)
    places = np.arange(NUM_BLOCKS, dtype=np.int32)
    reference(HostMemory(source.reshape(-1), geometry()), expected, places, places)
    for position, block in enumerate(found.blocks[:NUM_BLOCKS]):
        wanted = expected.data[position * INT8.block_bytes : (position + 1) * INT8.block_bytes]
        assert block_bytes(pool, block, INT8.block_bytes) == bytes(wanted)
