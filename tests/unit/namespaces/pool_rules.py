"""Rules of the pool machine that need no other: repeated, reordered and late calls, blocks on the move, readers."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from pool_driver import BLOCK_BYTES, BLOCK_TOKENS
from pool_specs import FINGERPRINTS, GEOMETRIES, SPECS, WIDE, Client, units
from pool_world import PoolWorld

from remora.namespaces.commands import (
    Admitted,
    Compact,
    Compacted,
    Done,
    Extend,
    ExtendItem,
    Publish,
    Published,
    QuotaSet,
    Refused,
    Release,
    Relocated,
    Seal,
    Trim,
    Trimmed,
)
from remora.namespaces.hashing import chain_hashes
from remora.namespaces.hold_commands import Held, Hold, Unheld, Unhold
from remora.namespaces.quantise_commands import KVFormat, Quantise, Quantised
from remora.platform.base.ids import BlockHash, HoldId, LeaseId, NamespaceId

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

    @rule(
        pick=PICK, name=st.sampled_from(["group-b", "group-wide"]), family=st.integers(0, 3),
        length=st.integers(5, 60), num_blocks=st.integers(1, 30), crash=CRASH,
    )  # fmt: skip
    @precondition(lambda self: any(c.model == "m1" for c in self.clients))
    def change_precision(self, pick: int, name: str, family: int, length: int, num_blocks: int, crash: str) -> None:
        """A session has a turn, its namespace (one without a guarantee) gets the other precision, what it cached is
        re-encoded, and it has another turn."""
        spec = self.specs[name]
        if spec.guaranteed:
            return
        able = [client for client in self.clients if client.model == "m1"]
        self.take_turn(able[pick % len(able)], name, self.tokens_of(family, 0, length), crash)
        spec.kv_precision = None if spec.kv_precision else WIDE.kv_precision
        assert isinstance(self.set_quota(name, crash), QuotaSet)
        self.quantise(name, num_blocks, crash)
        self.take_turn(able[pick % len(able)], name, self.tokens_of(family, 0, length + 9), crash)

    @rule(name=st.sampled_from(["group-b", "group-wide"]), num_blocks=st.integers(1, 30), crash=CRASH)
    @precondition(lambda self: any(c.model == "m1" for c in self.clients))
    def quantise(self, name: str, num_blocks: int, crash: str) -> None:
        spec = self.specs[name]
        other = GEOMETRIES["m1"] if spec.kv_precision else WIDE
        source, target = (
            KVFormat(geometry=each, fingerprint=FINGERPRINTS[each.geometry_id]) for each in (other, spec.geometry)
        )
        command = Quantise(
            lease_id=LeaseId(""), namespace_id=NamespaceId(name), target=target, sources=(source,),
            max_bytes=num_blocks * BLOCK_BYTES,
        )  # fmt: skip
        answer = self.apply(command, crash)
        assert isinstance(answer, Quantised), answer
        self.counts["converted"] += bool(answer.num_converted_blocks)

    def take_turn(self, client: Client, name: str, tokens: list[int], crash: str) -> None:
        """Admits, publishes and ends a sequence whose tokens a session had, if there is memory for it now."""
        self.next_id += 1
        sequence_id = f"s{self.next_id}"
        self.prompts[sequence_id] = tokens
        num_blocks = -(-len(tokens) // BLOCK_TOKENS)
        answer = self.call_admit(
            client,
            crash,
            sequence_id=sequence_id,
            namespace_id=name,
            geometry_id=self.specs[name].geometry.geometry_id,
            hashes=tuple(chain_hashes(self.root(name), tokens, BLOCK_TOKENS)),
            kept=self.kept_chains(name, tokens),
            num_tokens=len(tokens),
            num_blocks=num_blocks,
            max_blocks=num_blocks,
            deadline_s=self.now_s,
        )
        if isinstance(answer, Admitted):
            running = client.running[sequence_id]
            seals = tuple(
                Seal(sequence_id=sequence_id, position=position, block_hash=running.hashes[position])
                for position in range(running.num_published, len(tokens) // BLOCK_TOKENS)
            )
            assert isinstance(self.call(client, Publish, crash, seals=seals), Published)
            running.num_published = len(tokens) // BLOCK_TOKENS
            self.release_names(client, [sequence_id], crash)

    @rule(pick=PICK, crash=CRASH)
    @precondition(lambda self: any(c.relocations for c in self.clients))
    def acknowledge(self, pick: int, crash: str) -> None:
        able = [c for c in self.clients if c.relocations]
        client = able[pick % len(able)]
        self.switch(client)
        assert isinstance(self.call(client, Relocated, crash, event_no=client.relocated_no), Done)

    @rule(
        name=st.sampled_from(sorted(SPECS)), family=st.integers(0, 3), branch=st.integers(0, 2),
        length=st.integers(1, 90), seconds=st.floats(0, 40), crash=CRASH,
    )  # fmt: skip
    def hold(self, name: str, family: int, branch: int, length: int, seconds: float, crash: str) -> None:
        """A reader outside the pool holds what is cached of a prompt (the prompts of `admit`)."""
        self.next_id += 1
        geometry = self.specs[name].geometry
        fingerprint, size = FINGERPRINTS[geometry.geometry_id], geometry.block_bytes
        hashes = chain_hashes(self.root(name), self.tokens_of(family, branch, length), BLOCK_TOKENS)
        command = Hold(
            lease_id=LeaseId(""), hold_id=HoldId(f"h{self.next_id}"), namespace_id=NamespaceId(name),
            fingerprint=fingerprint, hashes=tuple(hashes), hold_s=seconds,
        )  # fmt: skip
        answer = self.apply(command, crash)
        assert isinstance(answer, Held)
        found = self.state.find_blocks(NamespaceId(name), fingerprint, hashes)
        assert len(answer.blocks) <= found
        for position, block in enumerate(answer.blocks):
            for part, unit in enumerate(units(block, size)):
                assert self.shadow[unit] == (self.specs[name].domain(name), (hashes[position], part))
        if answer.blocks:
            assert self.now_s <= answer.until_s <= self.now_s + 30
            content = {unit: self.shadow[unit] for block in answer.blocks for unit in units(block, size)}
            self.held[command.hold_id] = (answer.until_s, content)

    @rule(pick=PICK, crash=CRASH)
    @precondition(lambda self: self.held)
    def unhold(self, pick: int, crash: str) -> None:
        hold_id = sorted(self.held)[pick % len(self.held)]
        until_s, _ = self.held.pop(hold_id)
        answer = self.apply(Unhold(lease_id=LeaseId(""), hold_ids=(hold_id,)), crash)
        assert isinstance(answer, Unheld)
        assert answer.num_ended or until_s <= self.now_s

    @invariant()
    def what_readers_hold_is_still_there(self) -> None:
        for until_s, content in self.held.values():
            if until_s > self.now_s:
                assert {unit: self.shadow[unit] for unit in content} == content
