"""Rules of the pool machine that need no other: repeated, reordered and late calls, and blocks on the move."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from pool_driver import BLOCK_BYTES
from pool_world import SPECS, PoolWorld

from remora.namespaces.commands import (
    Compact,
    Compacted,
    Done,
    Extend,
    ExtendItem,
    Publish,
    Refused,
    Release,
    Relocated,
    Seal,
    Trim,
    Trimmed,
)
from remora.platform.base.ids import BlockHash, LeaseId, NamespaceId

CRASH = st.sampled_from(["", "", "", "", "", "", "whole", "torn"])
PICK = st.integers(0, 1000)


class PoolRules(PoolWorld):
    @rule(pick=PICK, back=st.integers(1, 5))
    @precondition(lambda self: self.clients)
    def repeat_a_call(self, pick: int, back: int) -> None:
        client = self.clients[pick % len(self.clients)]
        command, answer = client.calls[-min(back, len(client.calls))]
        self.counts["repeated"] += 1
        before = self.state.snapshot()
        assert self.apply(command) == answer
        assert self.state.snapshot() == before

    @rule(pick=PICK, ahead=st.integers(2, 5))
    @precondition(lambda self: self.clients)
    def skip_ahead(self, pick: int, ahead: int) -> None:
        client = self.clients[pick % len(self.clients)]
        self.counts["overtaking"] += 1
        before = self.state.snapshot()
        names = tuple(client.running)
        answer = self.apply(Release(lease_id=client.lease_id, call_no=client.call_no + ahead, sequence_ids=names))
        assert isinstance(answer, Refused)
        assert answer.error == "CallOrder"
        assert self.state.snapshot() == before

    @rule(pick=PICK)
    @precondition(lambda self: any(c.finished for c in self.clients))
    def call_late(self, pick: int) -> None:
        """Calls about finished sequences change no block."""
        self.counts["late"] += 1
        able = [c for c in self.clients if c.finished]
        client = able[pick % len(able)]
        name = client.finished[pick % len(client.finished)]
        before = self.state.describe()
        self.call(client, Publish, seals=(Seal(sequence_id=name, position=0, block_hash=BlockHash(b"x" * 16)),))
        assert self.call(client, Extend, items=(ExtendItem(sequence_id=name, num_blocks=1),)).refused == (name,)
        after = self.state.describe()
        assert (after.used_bytes, after.num_referenced_blocks) >= (before.used_bytes, before.num_referenced_blocks)

    @rule(name=st.sampled_from(sorted(SPECS)), max_blocks=st.integers(1, 60), crash=CRASH)
    def compact(self, name: str, max_blocks: int, crash: str) -> None:
        command = Compact(lease_id=LeaseId(""), namespace_id=NamespaceId(name), max_blocks=max_blocks)
        assert isinstance(self.apply(command, crash), Compacted)

    @rule(name=st.sampled_from(sorted(SPECS)), target_blocks=st.integers(0, 40), crash=CRASH)
    def trim(self, name: str, target_blocks: int, crash: str) -> None:
        command = Trim(lease_id=LeaseId(""), namespace_id=NamespaceId(name), target_bytes=target_blocks * BLOCK_BYTES)
        assert isinstance(self.apply(command, crash), Trimmed)

    @rule(pick=PICK, crash=CRASH)
    @precondition(lambda self: any(c.relocations for c in self.clients))
    def acknowledge(self, pick: int, crash: str) -> None:
        able = [c for c in self.clients if c.relocations]
        client = able[pick % len(able)]
        self.switch(client)
        assert isinstance(self.call(client, Relocated, crash, event_no=client.relocated_no), Done)
