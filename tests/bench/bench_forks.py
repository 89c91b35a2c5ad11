"""Milliseconds that a fork takes inside a pool, whatever its length. Run: python tests/bench/bench_forks.py

`seq_cp` is the operation on a running sequence, `next turn` the admission of a forked session's next request, which
finds the trunk by its hashes; both share every sealed block. Blocks of 32 tokens. `drop` is the end of the fork.
"""

from __future__ import annotations

import platform
import statistics
import time
from typing import Any

from remora.namespaces.commands import (
    Admit,
    Admitted,
    Attach,
    Attached,
    ProcessIdentity,
    Publish,
    Quota,
    Release,
    Seal,
    SetQuota,
)
from remora.namespaces.geometry import KVGeometry, LayerGroup
from remora.namespaces.hashing import chain_hashes, chain_root, kv_fingerprint, sharing_domain
from remora.namespaces.pool import PoolState, PoolStateConfig
from remora.namespaces.sequence_commands import Edited, SequenceCopy, Settle

BLOCK_TOKENS = 32
GEOMETRY = KVGeometry(groups=(LayerGroup(num_layers=1, num_kv_heads=1, head_dim=16),), block_tokens=BLOCK_TOKENS)
FINGERPRINT = kv_fingerprint(GEOMETRY, "weights", "tokenizer")
NUM_FORKS = 50


class Forks:
    """One trunk, and forks of it."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        num_blocks = num_tokens // BLOCK_TOKENS + 3 * NUM_FORKS + 8
        data_bytes = num_blocks * GEOMETRY.block_bytes
        self.state = PoolState(PoolStateConfig(data_bytes=data_bytes, extent_bytes=data_bytes, reserved_bytes=0))
        quota = Quota(guaranteed_bytes=0, limit_bytes=data_bytes)
        self.state.apply(SetQuota(lease_id="", namespace_id="ns", model_id="m", quota=quota), 0.0)
        self.call_no = 0
        process = ProcessIdentity(pid=1, start_time_ticks=0, boot_id="")
        attach = {"replica_id": "r", "model_id": "m", "geometry": GEOMETRY, "fingerprint": FINGERPRINT}
        assert isinstance(self.call(Attach, process=process, **attach)[0], Attached)
        root = chain_root(FINGERPRINT, sharing_domain("ns", "", ""))  # type: ignore[arg-type]
        self.hashes = tuple(chain_hashes(root, range(num_tokens), BLOCK_TOKENS))
        self.admit("trunk")
        seals = tuple(Seal(sequence_id="trunk", position=i, block_hash=each) for i, each in enumerate(self.hashes))
        self.call(Publish, seals=seals)

    def call(self, kind: Any, **fields: Any) -> tuple[Any, float]:
        """The answer, and the milliseconds it took."""
        self.call_no += 1
        command = kind(lease_id="l", call_no=self.call_no, **fields)
        start = time.perf_counter()
        answer = self.state.apply(command, 0.0)
        took_ms = (time.perf_counter() - start) * 1e3
        self.state.take_effects()
        return answer, took_ms

    def admit(self, name: str) -> float:
        count = -(-self.num_tokens // BLOCK_TOKENS) + 1
        answer, took_ms = self.call(
            Admit, sequence_id=name, namespace_id="ns", hashes=self.hashes, num_tokens=self.num_tokens,
            num_blocks=count, max_blocks=count,
        )  # fmt: skip
        assert isinstance(answer, Admitted)
        return took_ms

    def fork(self, name: str) -> float:
        answer, took_ms = self.call(SequenceCopy, source_id="trunk", target_id=name, num_tokens=self.num_tokens)
        assert isinstance(answer, Edited)
        assert answer.num_kept_blocks == self.num_tokens // BLOCK_TOKENS, "a sealed block was copied"
        assert len(answer.moves) <= 1
        self.call(Settle, sequence_ids=(name,))
        return took_ms


def main() -> None:
    print(f"Python {platform.python_version()}, {platform.machine()}; milliseconds, {NUM_FORKS} forks")
    print(f"{'tokens':>8}{'seq_cp':>10}{'p99':>8}{'next turn':>12}{'p99':>8}{'drop':>8}")
    for num_tokens in (100, 10_000, 100_000):
        forks = Forks(num_tokens)
        copies = [forks.fork(f"copy-{number}") for number in range(NUM_FORKS)]
        turns = [forks.admit(f"turn-{number}") for number in range(NUM_FORKS)]
        drops = [forks.call(Release, sequence_ids=(f"copy-{number}",))[1] for number in range(NUM_FORKS)]
        forks.state.check_integrity()
        columns = [statistics.median(copies), _p99(copies), statistics.median(turns), _p99(turns)]
        widths = (10, 8, 12, 8)
        print(f"{num_tokens:>8}" + "".join(f"{ms:{width}.3f}" for ms, width in zip(columns, widths, strict=True))
              + f"{statistics.median(drops):8.3f}")  # fmt: skip


def _p99(times: list[float]) -> float:
    return sorted(times)[int(0.99 * (len(times) - 1))]


if __name__ == "__main__":
    main()
