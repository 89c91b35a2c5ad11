"""Blocks that are on the move when their pool is killed."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from pool_helpers import BLOCK_TOKENS, KiB, ReplicaCalls, geometry, set_quota, settings
from test_durable_pool import block_bytes, fill, one, restart

from remora.cache_actors.durable_pool import DurablePool
from remora.namespaces.commands import Admitted, Attached, Compact
from remora.platform.base.clock import ManualClock
from remora.platform.base.ids import LeaseId, NamespaceId


@pytest.mark.parametrize("num_done", [0, 4, 9, 12, 30])
def test_a_pool_that_dies_while_blocks_move_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_done: int
) -> None:
    """Blocks are copied and their old places zeroed for another tenant in one go; none of it may be done twice."""
    quotas = [set_quota(name, tenant=name, model=name) for name in "ab"]
    pool = DurablePool(settings(tmp_path, *quotas, arena_bytes=128 * KiB), ManualClock())
    one_layer = ReplicaCalls("a", geometry(), b"a", model="a")
    two_layers = ReplicaCalls("b", geometry(num_layers=2), b"b", model="b")
    for calls in (one_layer, two_layers):
        assert isinstance(one(pool, calls.attach()), Attached)
    prompts = {f"keep{n}": list(range(9000 * n, 9000 * n + 3 * BLOCK_TOKENS)) for n in range(4)}
    for number, (name, tokens) in enumerate(prompts.items()):
        admitted = one(pool, one_layer.admit(name, tokens, "a"))
        assert isinstance(admitted, Admitted)
        fill(pool, admitted.blocks, 10 + number)
        one(pool, one_layer.publish(name, tokens, "a"))
        one(
            pool, one_layer.admit(f"drop{number}", list(range(70_000 + 999 * number, 70_000 + 999 * number + 464)), "a")
        )
    for number in range(4):
        one(pool, one_layer.release(f"drop{number}"))
    for name in prompts:
        one(pool, one_layer.release(name))
    done = 0

    def dies(method: Any) -> Any:
        def act(*arguments: int) -> None:
            nonlocal done
            done += 1
            if done > num_done:
                raise SystemExit
            method(*arguments)

        return act

    for name in ("zero", "copy"):
        monkeypatch.setattr(pool.arena, name, dies(getattr(pool.arena, name)))
    command = two_layers.admit("big", list(range(45 * BLOCK_TOKENS)), "b")
    compact = Compact(lease_id=LeaseId(""), namespace_id=NamespaceId("a"))
    with contextlib.suppress(SystemExit):
        pool.apply([compact, command])
    pool = restart(pool)
    pool.check_integrity()
    admitted = one(pool, command)
    assert isinstance(admitted, Admitted)
    assert all(not any(block_bytes(pool, block, 2 * KiB)) for block in admitted.blocks), "bytes of another tenant"
    for number, tokens in enumerate(prompts.values()):
        hit = one(pool, one_layer.admit(f"again{number}", [*tokens, 1], "a"))
        assert isinstance(hit, Admitted)
        assert hit.num_cached_blocks == 3
        for block in hit.blocks[:3]:
            assert set(block_bytes(pool, block)) == {10 + number}
