"""The world around a pool in test_pool_machine.py: its shell with journal and crashes, its replicas, and a shadow of
the bytes of the arena.
"""

from __future__ import annotations

from typing import Any

import msgspec
from counted_machine import CountedMachine
from pool_driver import BLOCK_BYTES, BLOCK_TOKENS
from pool_specs import (
    BY_ID,
    DATA_BYTES,
    EXTENT_BYTES,
    FINGERPRINTS,
    GEOMETRIES,
    SPECS,
    WIDE,
    Client,
    Running,
    Spec,
    units,
)

from remora.namespaces.commands import (
    Admit,
    Admitted,
    AnyAnswer,
    AnyCommand,
    Denied,
    Granted,
    LeaseLost,
    OverQuota,
    Preempt,
    Quota,
    Refused,
    Release,
    Released,
    Relocate,
    SetQuota,
    Tick,
    Wait,
)
from remora.namespaces.effects import CopyBlocks, Effect, ReencodeBlocks, ZeroBlocks
from remora.namespaces.hashing import (
    chain_hashes,
    chain_root,
    converted_hash,
    following_hash,
    next_hash,
)
from remora.namespaces.hold_commands import MAX_HOLD_S
from remora.namespaces.journal import encode_record, read_journal
from remora.namespaces.kept_chains import KeptChain
from remora.namespaces.pool import PoolState, PoolStateConfig
from remora.namespaces.sequence_commands import Edited, NoRoom, SequenceCopy, SequenceRemove, SequenceShift
from remora.platform.base.ids import BlockHash, LeaseId, NamespaceId


class PoolWorld(CountedMachine):
    """What the rules do it with. `begin` comes first."""

    def begin(self, eviction: str) -> None:
        config = PoolStateConfig(
            data_bytes=DATA_BYTES,
            extent_bytes=EXTENT_BYTES,
            reserved_bytes=100,
            max_leases=4,
            incarnation=3,
            eviction=eviction,
        )
        self.state = PoolState(config)
        self.now_s = 0.0
        self.snapshot = self.state.snapshot()
        self.journal = b""
        self.record_no = self.first_record_no = 1
        #: What a replica would find in each 256 bytes of the arena: nothing, or (domain, block hash or sequence).
        self.shadow: list[tuple[str, object] | None] = [None] * (DATA_BYTES // BLOCK_BYTES)
        self.clients: list[Client] = []
        self.prompts: dict[str, list[int]] = {}
        #: What lies in a block under the name of a converted one: a mark, and what it was converted from.
        self.converted: dict[BlockHash, object] = {}
        self.epochs: dict[str, int] = {}
        self.next_id = 0
        #: Of readers: until when they hold, and what they found where.
        self.held: dict[str, tuple[float, dict[int, object]]] = {}
        #: Whose operation on which sequence the next command is, and which it makes: events are heard after it.
        self.editing: tuple[Client, Running, Running] | None = None
        self.specs = {name: Spec(**vars(spec)) for name, spec in SPECS.items()}

    # ---- the shell: journal, apply, effects, crash ----------------------------------------------------------------

    def apply(self, command: AnyCommand, crash: str = "") -> AnyAnswer:
        """Journals and applies; on a crash the pool comes back before or after the command, without having answered."""
        self.counts[type(command).__name__] += 1
        self.counts["crash"] += bool(crash)
        frame = encode_record(self.record_no, command, self.now_s)
        self.journal += frame
        self.record_no += 1
        answer = self.state.apply(command, self.now_s)
        self.do(self.state.take_effects())
        if crash:
            expected = self.state.snapshot()
            journal = self.journal if crash == "whole" else self.journal[: -len(frame) // 2]
            self.state = self.recover(journal)
            if crash == "torn":  # never answered: the caller sends it again
                again = self.state.apply(command, self.now_s)
                self.state.take_effects()
                assert again == answer
            assert self.state.snapshot() == expected
        if isinstance(answer, Edited) and self.editing is not None:
            self.take_edit(*self.editing, answer)
        self.editing = None
        self.hear_events()
        return answer

    def recover(self, journal: bytes) -> PoolState:
        state = PoolState.restore(self.snapshot)
        contents = read_journal(journal, first_record_no=self.first_record_no)
        for record in contents.records:
            state.apply(record.command, record.now_s)
            state.take_effects()
        return state

    def do(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, ZeroBlocks):
                for block in effect.blocks:
                    for unit in units(block, effect.block_bytes):
                        self.shadow[unit] = None
            elif isinstance(effect, CopyBlocks):
                assert not {source for source, _ in effect.pairs} & {target for _, target in effect.pairs}
                for pair in effect.pairs:
                    for old, new in zip(*(units(block, effect.block_bytes) for block in pair), strict=True):
                        self.shadow[new] = self.shadow[old]

            elif isinstance(effect, ReencodeBlocks):
                assert effect.source != effect.target
                for source, target in effect.pairs:
                    domain, (name, part) = self.shadow[units(source, effect.source.block_bytes)[0]]
                    assert part == 0
                    for number, unit in enumerate(units(target, effect.target.block_bytes)):
                        self.shadow[unit] = (domain, (("converted", name), number))

    def switch(self, client: Client) -> None:
        """Does what it was told about blocks that moved, as a replica does before it says anything more."""
        for event in client.relocations:
            client.relocated_no = event.event_no
            for item in event.items:
                running = client.running.get(item.sequence_id)
                if running is None or running.blocks[item.position : item.position + 1] != [item.old_block]:
                    continue
                if item.copy:
                    places = (self.units_of(running, block) for block in (item.old_block, item.new_block))
                    for old, new in zip(*places, strict=True):
                        self.shadow[new] = self.shadow[old]
                running.blocks[item.position] = item.new_block
        client.relocations.clear()

    def call(self, client: Client, kind: Any, crash: str = "", **fields: Any) -> Any:
        self.switch(client)
        client.call_no += 1
        command = kind(lease_id=client.lease_id, call_no=client.call_no, **fields)
        answer = self.apply(command, crash)
        client.calls.append((command, answer))
        return answer

    # ---- the replica's side ---------------------------------------------------------------------------------------

    def hear_events(self) -> None:
        for client in self.clients:
            for event in self.state.events_after(client.lease_id, client.event_no):
                assert event.event_no == client.event_no + 1
                client.event_no = event.event_no
                match event:
                    case Granted(admitted=admitted):
                        self.started(client, client.waiting.pop(admitted.sequence_id), admitted)
                    case Denied(over_quota=over_quota):
                        client.waiting.pop(over_quota.sequence_id)
                        client.finished.append(over_quota.sequence_id)
                    case Preempt(sequence_id=sequence_id):
                        # The answer to the very call that caused it may not have been taken in yet.
                        if sequence_id in client.running:
                            client.running[sequence_id].preempted = True
                    case Relocate():
                        client.relocations.append(event)

    def started(self, client: Client, admit: Admit, admitted: Admitted) -> None:
        tokens = self.prompts[admit.sequence_id]
        spec = self.specs[admit.namespace_id]
        assert len(admitted.blocks) == admit.num_blocks
        assert len(set(admitted.blocks)) == len(admitted.blocks)
        assert admitted.num_cached_blocks * BLOCK_TOKENS < admit.num_tokens
        hashes = self.names_of(admit, admitted)
        running = Running(admit, list(admitted.blocks), tokens, hashes, num_published=admitted.num_cached_blocks)
        domain = spec.domain(admit.namespace_id)
        for position in range(admitted.num_cached_blocks):
            for part, unit in enumerate(self.units_of(running, admitted.blocks[position])):
                content = self.converted.get(hashes[position], hashes[position])
                assert self.shadow[unit] == (domain, (content, part)), "a hit that holds something else"
        self.write(client, running, admitted.blocks[admitted.num_cached_blocks :], admitted.num_cached_blocks)
        client.running[admit.sequence_id] = running

    def names_of(self, admit: Admit, admitted: Admitted) -> list[BlockHash]:
        """Of the prompt's full blocks: plain ones, or from some block on those that were converted, then what is
        computed behind them."""
        match, num_cached = admitted.kept, admitted.num_cached_blocks
        if match is None or not match.stem:
            return list(admit.hashes)
        assert match.num_plain + len(match.hashes) == num_cached
        self.counts["converted hits"] += 1
        names = [*admit.hashes[: match.num_plain], *match.hashes]
        for position in range(match.num_plain, num_cached):
            parent = names[position - 1] if position else None
            for chain in admit.kept:
                if position < len(chain.hashes):
                    source = chain.hashes[position]
                    name = converted_hash(parent, source, chain.fingerprint, FINGERPRINTS[admit.geometry_id])
                    self.converted[name] = ("converted", source)
        return names + [following_hash(each, match.stem) for each in admit.hashes[num_cached:]]

    def write(self, client: Client, running: Running, blocks: tuple[int, ...], first_position: int) -> None:
        """Fills granted blocks; what lay there was empty or of the same sharing domain, and nobody's."""
        domain = self.specs[running.admit.namespace_id].domain(running.admit.namespace_id)
        held = {
            unit
            for each in self.clients
            for one in each.running.values()
            for held_block in (*one.blocks, *one.sources)
            for unit in self.units_of(one, held_block)
        }
        own = {u for block in running.blocks[:first_position] for u in self.units_of(running, block)}
        for position, block in enumerate(blocks, first_position):
            while len(running.hashes) <= position:  # generated tokens, so that every block has content
                parent = running.hashes[-1] if running.hashes else self.root(running.admit.namespace_id)
                running.hashes.append(next_hash(parent, [position, len(running.tokens)]))
            for part, unit in enumerate(self.units_of(running, block)):
                assert unit not in held or running.admit.sequence_id in client.running, "granted while in use"
                assert unit not in own
                before = self.shadow[unit]
                assert before is None or before[0] == domain, "content of another tenant"
                self.shadow[unit] = (domain, (running.hashes[position], part))

    def units_of(self, running: Running, block: int) -> range:
        return units(block, BY_ID[running.admit.geometry_id].block_bytes)

    @staticmethod
    def tokens_of(family: int, branch: int, length: int) -> list[int]:
        """A prompt; those of a family begin alike."""
        tokens = [family * 1000 + i for i in range(length // 2)]
        return tokens + [family * 1000 + branch * 100 + i for i in range(length - length // 2)]

    def kept_chains(self, namespace: str, tokens: list[int]) -> tuple[KeptChain, ...]:
        """The tokens in the other precision, if the model has one."""
        spec = self.specs[namespace]
        if spec.model != "m1" or len(tokens) < BLOCK_TOKENS:
            return ()
        other = WIDE if spec.geometry != WIDE else GEOMETRIES["m1"]
        fingerprint = FINGERPRINTS[other.geometry_id]
        hashes = chain_hashes(chain_root(fingerprint, spec.domain(namespace)), tokens, BLOCK_TOKENS)
        return (KeptChain(fingerprint=fingerprint, hashes=tuple(hashes)),)

    def root(self, namespace: str) -> BlockHash:
        spec = self.specs[namespace]
        return chain_root(FINGERPRINTS[spec.geometry.geometry_id], spec.domain(namespace))

    def call_admit(self, client: Client, crash: str, **fields: Any) -> AnyAnswer:
        self.switch(client)
        client.call_no += 1
        command = Admit(lease_id=client.lease_id, call_no=client.call_no, **fields)
        client.waiting[command.sequence_id] = command  # events of the same command may speak of it
        answer = self.apply(command, crash)
        client.calls.append((command, answer))
        if isinstance(answer, Admitted):
            self.started(client, client.waiting.pop(command.sequence_id), answer)
        elif not isinstance(answer, Wait):
            assert client.waiting.pop(command.sequence_id) is command
            if isinstance(answer, OverQuota):
                client.finished.append(command.sequence_id)
        return answer

    def take_edit(self, client: Client, source: Running, target: Running, answer: Edited) -> None:
        """What an operation on a sequence left: blocks that stayed, and copies that nobody else has."""
        copies = {move.target_block for move in answer.moves}
        shared = [block for block in answer.blocks if block not in copies]
        table = source.blocks[: answer.num_kept_blocks] + shared
        sources = {move.source_block for move in answer.moves}
        # A sealed block that the pool has moved, and whose user has not switched yet, is copied from its new place.
        table_units = [[self.shadow[unit] for unit in self.units_of(source, block)] for block in source.blocks]
        assert all([self.shadow[unit] for unit in self.units_of(source, block)] in table_units for block in sources)
        num_plain = answer.num_tokens if answer.first_edited_token is None else answer.first_edited_token
        num_sealed = min(source.num_published, num_plain // BLOCK_TOKENS)
        hashes = source.hashes[: len(table)]
        target.sources = {block: [self.shadow[unit] for unit in self.units_of(source, block)] for block in sources}
        target.blocks, target.hashes, target.num_published = table, hashes, num_sealed
        self.next_id += 1
        while len(target.hashes) < len(table) + len(copies):
            target.hashes.append(next_hash(BlockHash(b"e" * 16), [self.next_id, len(target.hashes)]))
        fresh = tuple(block for block in answer.blocks if block in copies)
        assert list(answer.blocks) == shared + list(fresh)
        self.write(client, target, fresh, len(table))
        target.blocks = table + list(fresh)
        client.running[target.admit.sequence_id] = target

    def edit_one(
        self, client: Client, name: str, kind: str, start: int, length: int, *, close_gap: bool, crash: str
    ) -> None:
        """Every token of the table counts as computed."""
        running = client.running[name]
        span = {"start": start, "end": max(start, 0) + length, "num_tokens": len(running.blocks) * BLOCK_TOKENS}
        self.editing = (client, running, running)
        if kind == "cp":
            self.next_id += 1
            copied = msgspec.structs.replace(running.admit, sequence_id=f"s{self.next_id}")
            self.editing = (client, running, Running(copied, [], running.tokens, [], 0))
            answer = self.call(client, SequenceCopy, crash, source_id=name, target_id=copied.sequence_id, **span)
        elif kind == "rm":
            answer = self.call(client, SequenceRemove, crash, sequence_id=name, close_gap=close_gap, **span)
        else:
            answer = self.call(client, SequenceShift, crash, sequence_id=name, delta=-length, **span)
        if isinstance(answer, Refused):
            # A shift may put tokens on each other; a sequence that was told to go, or still copies, takes no edit.
            assert kind == "add" or running.preempted or running.sources
        else:
            assert isinstance(answer, Edited | NoRoom)

    def release_names(self, client: Client, names: list[str], crash: str) -> None:
        expected = len(names)
        for name in names:
            if client.running.pop(name, None) is None:
                del client.waiting[name]
            client.finished.append(name)
        answer = self.call(client, Release, crash, sequence_ids=(*names, *client.finished[:2]))
        assert isinstance(answer, Released)
        assert answer.num_released in (expected, expected - 1)  # a parked one may run into its deadline first

    def with_running(self, pick: int) -> Client:
        able = [c for c in self.clients if c.running]
        return able[pick % len(able)]

    def set_quota(self, name: str, crash: str = "") -> AnyAnswer:
        spec = self.specs[name]
        quota = Quota(guaranteed_bytes=spec.guaranteed, limit_bytes=spec.limit, weight=spec.weight)
        return self.apply(
            SetQuota(
                lease_id=LeaseId(""),
                namespace_id=NamespaceId(name),
                model_id=spec.model,
                quota=quota,
                kv_precision=spec.kv_precision,
                tenant=spec.tenant,
                share_group=spec.share_group,
            ),
            crash,
        )

    def teardown(self) -> None:
        if not hasattr(self, "clients"):
            return
        for client in list(self.clients):
            self.apply(LeaseLost(lease_id=self.clients.pop(0).lease_id))
            del client
        self.now_s += MAX_HOLD_S
        self.apply(Tick(lease_id=LeaseId("")))
        report = self.state.describe()
        assert (report.used_bytes, report.num_referenced_blocks, report.reserved_bytes) == (0, 0, 0)
        assert all(namespace.num_waiting == 0 for namespace in report.namespaces)
        self.state.check_integrity()
