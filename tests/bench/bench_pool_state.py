"""Microseconds per command of the pool's state machine. Run: python tests/bench/bench_pool_state.py

A pool of 4,096 blocks in two namespaces, filled to the brim; prompts of 2,000 tokens in blocks of 32 (63 blocks).
`journal` is the encoding of the record alone, `snapshot` the whole state.
"""

from __future__ import annotations

import itertools
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from remora.namespaces.commands import (
    Admit,
    Admitted,
    Attach,
    Attached,
    Extend,
    ExtendItem,
    ProcessIdentity,
    Publish,
    Quota,
    Release,
    Seal,
    SetQuota,
    Wait,
)
from remora.namespaces.geometry import KVGeometry, LayerGroup
from remora.namespaces.hashing import chain_hashes, chain_root, kv_fingerprint, sharing_domain
from remora.namespaces.journal import encode_record
from remora.namespaces.pool import PoolState, PoolStateConfig

NUM_TOKENS, BLOCK_TOKENS = 2000, 32
NUM_BLOCKS = -(-NUM_TOKENS // BLOCK_TOKENS)
GEOMETRY = KVGeometry(
    groups=(LayerGroup(num_layers=30, num_kv_heads=3, head_dim=64),), block_tokens=BLOCK_TOKENS, rope="theta=10000.0"
)
FINGERPRINT = kv_fingerprint(GEOMETRY, "weights", "tokenizer")
EXTENT_BYTES = 24 * GEOMETRY.block_bytes


class Bench:
    def __init__(self, num_blocks: int) -> None:
        data_bytes = num_blocks // 24 * EXTENT_BYTES
        self.state = PoolState(PoolStateConfig(data_bytes=data_bytes, extent_bytes=EXTENT_BYTES, reserved_bytes=0))
        for name in ("a", "b"):
            quota = Quota(guaranteed_bytes=data_bytes // 4, limit_bytes=data_bytes)
            self.state.apply(SetQuota(lease_id="", namespace_id=name, model_id="m", quota=quota), 0.0)
        process = ProcessIdentity(pid=1, start_time_ticks=0, boot_id="")
        attach = Attach(
            lease_id="l", call_no=1, replica_id="r", model_id="m", geometry=GEOMETRY, fingerprint=FINGERPRINT,
            process=process,
        )  # fmt: skip
        assert isinstance(self.state.apply(attach, 0.0), Attached)
        self.call_no = 1
        self.times: dict[str, list[float]] = {}
        self.names = (f"s{number}" for number in itertools.count())

    def call(self, label: str, kind: Any, **fields: Any) -> Any:
        self.call_no += 1
        command = kind(lease_id="l", call_no=self.call_no, **fields)
        start = time.perf_counter()
        answer = self.state.apply(command, 0.0)
        self.times.setdefault(label, []).append((time.perf_counter() - start) * 1e6)
        self.time("journal " + label.split(":")[0], lambda: encode_record(1, command, 0.0))
        self.state.take_effects()
        return answer

    def time(self, label: str, do: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = do()
        self.times.setdefault(label, []).append((time.perf_counter() - start) * 1e6)
        return result

    def hashes(self, seed: int, namespace: str = "a") -> tuple[Any, ...]:
        root = chain_root(FINGERPRINT, sharing_domain(namespace, "", ""))  # type: ignore[arg-type]
        tokens = range(seed * 4000, seed * 4000 + NUM_TOKENS)
        return tuple(self.time("hash 2,000 tokens", lambda: chain_hashes(root, tokens, BLOCK_TOKENS)))

    def admit(self, label: str, hashes: tuple[Any, ...], namespace: str = "a") -> tuple[str, Any]:
        name = next(self.names)
        answer = self.call(
            label, Admit, sequence_id=name, namespace_id=namespace, hashes=hashes, num_tokens=NUM_TOKENS,
            num_blocks=NUM_BLOCKS + 1, max_blocks=NUM_BLOCKS + 4,
        )  # fmt: skip
        return name, answer

    def publish(self, label: str, name: str, hashes: tuple[Any, ...], start: int, end: int) -> None:
        seals = tuple(Seal(sequence_id=name, position=p, block_hash=hashes[p]) for p in range(start, end))
        self.call(label, Publish, seals=seals)


def main() -> None:
    num_blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 4096
    bench = Bench(num_blocks)
    for seed in range(num_blocks // NUM_BLOCKS * 3):  # three times the pool: most admissions evict all they need
        hashes = bench.hashes(seed)
        name, answer = bench.admit("admit: cold (evicts when full)", hashes, "ab"[seed % 2])
        assert isinstance(answer, Admitted)
        bench.publish("publish: 62 blocks", name, hashes, 0, len(hashes))
        bench.call("release: 64 blocks", Release, sequence_ids=(name,))
    hashes = bench.hashes(10**5)
    name, _ = bench.admit("warm up", hashes)
    bench.publish("warm up", name, hashes, 0, len(hashes))
    for _ in range(200):
        hit, answer = bench.admit("admit: 62 of 63 blocks cached", hashes)
        assert answer.num_cached_blocks == NUM_TOKENS // BLOCK_TOKENS
        bench.call("extend: 1 block, pool full", Extend, items=(ExtendItem(sequence_id=hit, num_blocks=1),))
        bench.call("release: 65 blocks, 62 shared", Release, sequence_ids=(hit,))
    runners = [bench.admit("warm up", bench.hashes(2 * 10**5 + n))[0] for n in range(16)]
    for _ in range(20):
        items = tuple(ExtendItem(sequence_id=runner, num_blocks=1) for runner in runners)
        bench.call("extend: 16 sequences, 1 block each", Extend, items=items)
    position = 0
    one = bench.hashes(2 * 10**5)
    for position in range(len(one)):
        bench.publish("publish: 1 block", runners[0], one, position, position + 1)
    while isinstance(bench.admit("admit: parked", bench.hashes(3 * 10**5 + position))[1], Admitted):
        position += 1
    bench.call("release: with a blocked line", Release, sequence_ids=())
    for _ in range(100):
        bench.call("release: with a blocked line", Release, sequence_ids=())
    snapshot = bench.time("snapshot", bench.state.snapshot)
    bench.time("restore", lambda: PoolState.restore(snapshot))
    assert isinstance(bench.admit("admit: parked", hashes)[1], Wait)
    bench.state.check_integrity()
    print(f"{num_blocks} blocks, Python {platform.python_version()}, {platform.machine()}; microseconds")
    print(f"{'':40}{'calls':>7}{'median':>10}{'p99':>10}")
    for label, times in sorted(bench.times.items()):
        if "warm up" not in label:
            p99 = sorted(times)[int(0.99 * (len(times) - 1))]
            print(f"{label:40}{len(times):7}{statistics.median(times):10.1f}{p99:10.1f}")


if __name__ == "__main__":
    main()
