"""A pool under everything at once: four geometries, share groups, borrowers, repeated and reordered calls, lost leases
and crashes at every command. A shadow of the bytes of the arena shows whether anybody could read what is not his.
"""

from __future__ import annotations

import random

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from pool_driver import BLOCK_TOKENS
from pool_rules import CRASH, PICK, PoolRules
from pool_specs import EXTENT_BYTES, FINGERPRINTS, GEOMETRIES, NUM_EXTENTS, SPECS, WIDE, Client, Spec

from remora.namespaces.commands import (
    AddFormat,
    Admit,
    Admitted,
    Attach,
    Attached,
    Detach,
    Detached,
    Extend,
    Extended,
    ExtendItem,
    FormatAdded,
    LeaseLost,
    OverQuota,
    ProcessIdentity,
    Publish,
    Published,
    QuotaSet,
    Refused,
    Release,
    Seal,
    Tick,
)
from remora.namespaces.eviction import POLICY_NAMES
from remora.namespaces.hashing import chain_hashes
from remora.namespaces.hold_commands import Unhold
from remora.namespaces.pool import PoolState
from remora.namespaces.sequence_commands import (
    Settle,
    Settled,
)
from remora.platform.base.ids import Epoch, HoldId, LeaseId, NamespaceId, SessionId


class PoolMachine(PoolRules):
    @initialize(eviction=st.sampled_from(POLICY_NAMES))
    def start(self, eviction: str) -> None:
        self.begin(eviction)
        for name in self.specs:
            assert isinstance(self.set_quota(name), QuotaSet)
        for model in ("m1", "m2", "m3"):
            self.attach(model=model)

    # ---- rules ----------------------------------------------------------------------------------------------------

    @rule(model=st.sampled_from(["m1", "m1", "m2", "m3"]), relocates=st.sampled_from([True, True, False]), crash=CRASH)
    @precondition(lambda self: len(self.clients) < 5)
    def attach(self, model: str, relocates: bool = True, crash: str = "") -> None:
        self.next_id += 1
        client = Client(LeaseId(f"lease-{self.next_id}"), model)
        attach = Attach(
            lease_id=client.lease_id,
            call_no=1,
            replica_id="r",
            model_id=model,
            geometry=GEOMETRIES[model],
            fingerprint=FINGERPRINTS[GEOMETRIES[model].geometry_id],
            process=ProcessIdentity(pid=self.next_id, start_time_ticks=0, boot_id="b"),
            relocates=relocates,
        )
        answer = self.apply(attach, crash)
        assert isinstance(answer, Attached) == (len(self.clients) < 4)
        if isinstance(answer, Attached):
            client.calls.append((attach, answer))
            self.clients.append(client)
            if model == "m1":
                wide = {"geometry": WIDE, "fingerprint": FINGERPRINTS[WIDE.geometry_id]}
                assert isinstance(self.call(client, AddFormat, crash, **wide), FormatAdded)

    @rule(
        pick=PICK,
        name=PICK,
        family=st.integers(0, 3),
        branch=st.integers(0, 2),
        length=st.integers(1, 90),
        more=st.integers(0, 6),
        session=st.integers(0, 6),
        crash=CRASH,
        wait_s=st.none() | st.floats(-1, 20),
        priority=st.integers(-1, 1),
        kept=st.integers(0, 90),
    )
    @precondition(lambda self: self.clients)
    def admit(
        self, pick: int, name: int, family: int, branch: int, length: int, more: int, session: int, crash: str,
        wait_s: float | None, priority: int, kept: int,
    ) -> None:  # fmt: skip
        client = self.clients[pick % len(self.clients)]
        names = [n for n, spec in self.specs.items() if spec.model == client.model]
        namespace = names[name % len(names)]
        tokens = self.tokens_of(family, branch, length)
        self.next_id += 1
        sequence_id = f"s{self.next_id}"
        self.prompts[sequence_id] = tokens
        num_blocks = -(-length // BLOCK_TOKENS) + more
        epoch = self.epochs.get(f"x{session}", 0) + (self.next_id % 3) - 1 if session < 3 else 0
        stale = session < 3 and epoch < self.epochs.get(f"x{session}", epoch)
        answer = self.call_admit(
            client,
            crash,
            sequence_id=sequence_id,
            namespace_id=namespace,
            geometry_id=self.specs[namespace].geometry.geometry_id,
            hashes=tuple(chain_hashes(self.root(namespace), tokens, BLOCK_TOKENS)),
            kept=self.kept_chains(namespace, tokens[:kept]),
            num_tokens=length,
            num_blocks=num_blocks,
            max_blocks=num_blocks + more,
            session_id=SessionId(f"x{session}") if session < 3 else None,
            epoch=Epoch(epoch),
            deadline_s=None if wait_s is None else self.now_s + wait_s,
            priority=priority,
        )
        assert isinstance(answer, Refused) == stale
        if stale:
            assert answer.error == "StaleEpoch"
        elif session < 3:
            self.epochs[f"x{session}"] = max(epoch, self.epochs.get(f"x{session}", epoch))

    @rule(pick=PICK, picks=st.lists(PICK, min_size=1, max_size=4), count=st.integers(1, 12), crash=CRASH)
    @precondition(lambda self: any(c.running for c in self.clients))
    def extend(self, pick: int, picks: list[int], count: int, crash: str) -> None:
        client = self.with_running(pick)
        names = sorted(client.running)
        chosen = sorted({names[p % len(names)] for p in picks})
        items = tuple(ExtendItem(sequence_id=name, num_blocks=count) for name in chosen)
        answer = self.call(client, Extend, crash, items=items)
        assert isinstance(answer, Extended)
        assert sorted([*(grant.sequence_id for grant in answer.grants), *answer.refused]) == chosen
        assert set(answer.preempted) <= set(answer.refused)
        for grant in answer.grants:
            running = client.running[grant.sequence_id]
            assert len(grant.blocks) == count
            first = len(running.blocks)
            self.write(client, running, grant.blocks, first)
            running.blocks.extend(grant.blocks)

    @rule(pick=PICK, picks=st.lists(PICK, min_size=1, max_size=3), count=st.integers(1, 20), crash=CRASH)
    @precondition(lambda self: any(c.running for c in self.clients))
    def publish(self, pick: int, picks: list[int], count: int, crash: str) -> None:
        client = self.with_running(pick)
        names = sorted(client.running)
        seals: list[Seal] = []
        for name in sorted({names[p % len(names)] for p in picks}):
            running = client.running[name]
            end = min(running.num_published + count, len(running.blocks))
            for position in range(running.num_published, end):
                seals.append(Seal(sequence_id=name, position=position, block_hash=running.hashes[position]))
            running.num_published = end
        answer = self.call(client, Publish, crash, seals=tuple(seals))
        assert isinstance(answer, Published)

    @rule(pick=PICK, picks=st.lists(PICK, min_size=1, max_size=4), crash=CRASH)
    @precondition(lambda self: any(c.running or c.waiting for c in self.clients))
    def release(self, pick: int, picks: list[int], crash: str) -> None:
        able = [c for c in self.clients if c.running or c.waiting]
        client = able[pick % len(able)]
        names = sorted([*client.running, *client.waiting])
        self.release_names(client, sorted({names[p % len(names)] for p in picks}), crash)

    @rule(
        pick=PICK, start=st.integers(-1, 60), length=st.integers(0, 40), kind=st.sampled_from(["rm", "add", "cp"]),
        close_gap=st.booleans(), crash=CRASH,
    )  # fmt: skip
    @precondition(lambda self: any(c.running for c in self.clients))
    def edit(self, pick: int, start: int, length: int, kind: str, close_gap: bool, crash: str) -> None:
        client = self.with_running(pick)
        name = sorted(client.running)[pick % len(client.running)]
        self.edit_one(client, name, kind, start, length, close_gap=close_gap, crash=crash)

    @rule(pick=PICK, crash=CRASH)
    @precondition(lambda self: any(r.sources for c in self.clients for r in c.running.values()))
    def settle(self, pick: int, crash: str) -> None:
        copying = [(c, name) for c in self.clients for name, r in c.running.items() if r.sources]
        client, name = copying[pick % len(copying)]
        client.running[name].sources = {}
        assert isinstance(self.call(client, Settle, crash, sequence_ids=(name,)), Settled)

    @rule(crash=CRASH)
    def release_preempted(self, crash: str) -> None:
        for client in self.clients:
            names = [name for name, running in client.running.items() if running.preempted]
            if names:
                self.release_names(client, names, crash)

    @rule(pick=PICK, peaceful=st.booleans(), crash=CRASH)
    @precondition(lambda self: len(self.clients) > 1)
    def end_a_lease(self, pick: int, peaceful: bool, crash: str) -> None:
        client = self.clients.pop(pick % len(self.clients))
        if peaceful:
            client.call_no += 1
            command = Detach(lease_id=client.lease_id, call_no=client.call_no)
            assert isinstance(self.apply(command, crash), Detached)
            assert isinstance(self.apply(command), Detached)
        else:
            self.apply(LeaseLost(lease_id=client.lease_id), crash)
        late = self.apply(Release(lease_id=client.lease_id, call_no=client.call_no + 1, sequence_ids=()))
        assert isinstance(late, Refused)
        assert late.error == "StaleLease"

    @rule(
        name=st.sampled_from(sorted(SPECS)), guaranteed=st.integers(0, 2), limit=st.integers(1, 6),
        weight=st.sampled_from([0.5, 1.0, 4.0]), crash=CRASH,
    )  # fmt: skip
    def change_quota(self, name: str, guaranteed: int, limit: int, weight: float, crash: str) -> None:
        old = self.specs[name]
        self.specs[name] = Spec(
            old.model, old.tenant, old.share_group, guaranteed * EXTENT_BYTES // 2,
            max(guaranteed * EXTENT_BYTES // 2, limit * EXTENT_BYTES), weight, old.kv_precision,
        )  # fmt: skip
        if not isinstance(self.set_quota(name, crash), QuotaSet):
            self.specs[name] = old

    @rule(seconds=st.floats(0, 10), crash=CRASH)
    def tick(self, seconds: float, crash: str) -> None:
        self.now_s += seconds
        self.apply(Tick(lease_id=LeaseId("")), crash)
        for client in self.clients:
            assert all(a.deadline_s is None or a.deadline_s > self.now_s for a in client.waiting.values())

    @rule()
    def rotate_the_journal(self) -> None:
        self.snapshot = self.state.snapshot()
        self.journal, self.first_record_no = b"", self.record_no

    @rule(order=st.permutations(sorted(SPECS)), share=st.integers(1, 100))
    def once_nothing_runs_every_request_that_fits_is_admitted(self, order: list[str], share: int) -> None:
        """On a copy of the state: guarantees are reachable by revocation, and nothing waits for nobody."""
        copy = PoolState.restore(self.state.snapshot())
        for lease in copy.leases():
            copy.apply(LeaseLost(lease_id=lease.lease_id), self.now_s)
        copy.apply(Unhold(lease_id=LeaseId(""), hold_ids=tuple(HoldId(hold_id) for hold_id in self.held)), self.now_s)
        report = copy.describe()
        assert (report.used_bytes, report.num_referenced_blocks, report.num_preempting) == (0, 0, 0)
        assert all(namespace.num_waiting == namespace.num_running == 0 for namespace in report.namespaces)
        for name in order:
            spec = self.specs[name]
            geometry, own = spec.geometry, GEOMETRIES[spec.model]
            lease_id = LeaseId(f"probe-{name}")
            attach = Attach(
                lease_id=lease_id, call_no=1, replica_id="r", model_id=spec.model, geometry=own,
                fingerprint=b"", process=ProcessIdentity(pid=1, start_time_ticks=0, boot_id=""),
            )  # fmt: skip
            assert isinstance(copy.apply(attach, self.now_s), Attached)
            add = AddFormat(lease_id=lease_id, call_no=2, geometry=geometry, fingerprint=b"")
            assert isinstance(copy.apply(add, self.now_s), FormatAdded)
            namespace = copy._parts.book.namespaces[NamespaceId(name)]
            own_bytes = namespace.guaranteed_bytes - sum(child.guaranteed_bytes for child in namespace.children)
            guaranteed = own_bytes // geometry.block_bytes
            sizes = [guaranteed, max(1, spec.limit // geometry.block_bytes * share // 100)]
            for call_no, size in enumerate(filter(None, sizes), 1):
                admit = Admit(
                    lease_id=lease_id, call_no=2 * call_no + 1, sequence_id=f"p{call_no}", namespace_id=name, hashes=(),
                    num_tokens=1, num_blocks=size, max_blocks=size, geometry_id=geometry.geometry_id,
                )  # fmt: skip
                answer = copy.apply(admit, self.now_s)
                assert isinstance(answer, Admitted | OverQuota), answer
                assert isinstance(answer, Admitted) or size > guaranteed
                release = Release(lease_id=lease_id, call_no=2 * call_no + 2, sequence_ids=(f"p{call_no}",))
                copy.apply(release, self.now_s)
            copy.apply(LeaseLost(lease_id=lease_id), self.now_s)
            copy.check_integrity()

    @rule(seed=st.integers(0, 2**32), num_steps=st.integers(5, 40), pressure=st.integers(1, 3))
    def traffic(self, seed: int, num_steps: int, pressure: int) -> None:
        """Many ordinary calls in a row: fills the pool, which single rules seldom do."""
        draw = random.Random(seed)
        for _ in range(num_steps):
            if not self.clients:
                self.attach("m1")
            busy = any(client.running for client in self.clients)
            crash = draw.choice(["", "", "", "", "", "", "", "", "whole", "torn"])
            picks = [draw.randrange(1000) for _ in range(3)]
            actions = {
                "admit": 8,
                "publish": 6,
                "extend": 3,
                "release": 4,
                "leave": 2,
                "tick": 1,
                "edit": 3,
                "settle": 2,
                "hold": 2,
                "change precision": 1,
                "unhold": 1,
            }
            action = draw.choices(list(actions), list(actions.values()))[0]
            if action == "leave":
                self.release_preempted(crash)
            elif action == "tick":
                self.tick(draw.random(), crash)
            elif action == "compact":
                self.compact(draw.choice(sorted(SPECS)), draw.randint(1, 60), crash)
            elif action == "change precision":
                name = draw.choice(["group-b", "group-wide"])
                length, num_blocks = draw.randint(5, 60), draw.randint(1, 30)
                if any(client.model == "m1" for client in self.clients):
                    self.change_precision(picks[0], name, draw.randrange(4), length, num_blocks, crash)
            elif action == "acknowledge":
                if any(client.relocations for client in self.clients):
                    self.acknowledge(picks[0], crash)
            elif action == "admit" or not busy:
                self.admit(
                    *picks[:2], draw.randrange(4), draw.randrange(3), draw.randint(1, 60 * pressure), draw.randrange(4),
                    draw.randrange(40), crash, draw.choice([None, None, 5.0]), draw.randint(-1, 1),
                    draw.choice([0, 0, 90]),
                )  # fmt: skip
            elif action == "edit":
                kind = draw.choice(["rm", "add", "cp", "cp"])
                self.edit(picks[0], draw.randint(-1, 60), draw.randrange(40), kind, draw.random() < 0.5, crash)
            elif action == "settle":
                if any(running.sources for client in self.clients for running in client.running.values()):
                    self.settle(picks[0], crash)
            elif action == "hold":
                self.hold(
                    draw.choice(sorted(SPECS)), draw.randrange(4), draw.randrange(3), draw.randint(1, 90),
                    draw.choice([0.5, 30.0]), crash,
                )  # fmt: skip
            elif action == "unhold":
                if self.held:
                    self.unhold(picks[0], crash)
            elif action == "publish":
                self.publish(picks[0], picks[1:], draw.randint(1, 30), crash)
            elif action == "extend":
                self.extend(picks[0], picks[1:], draw.randint(1, 4), crash)
            else:
                self.release(picks[0], picks[1:], crash)
            self.the_state_is_sound()
            self.pool_and_replicas_agree_about_who_runs_and_who_waits()
            self.what_replicas_wrote_and_sealed_is_still_there()
            self.what_readers_hold_is_still_there()

    # ---- invariants -----------------------------------------------------------------------------------------------

    @invariant()
    def the_state_is_sound(self) -> None:
        self.state.check_integrity()
        report = self.state.describe()
        assert report.used_bytes + report.cached_bytes == sum(n.used_bytes + n.cached_bytes for n in report.namespaces)
        in_use = sum(g.num_used_blocks * g.block_bytes for g in report.geometries)
        moving = sum(g.num_moving_blocks * g.block_bytes for g in report.geometries)
        assert in_use == report.used_bytes + report.cached_bytes + moving
        assert sum(g.num_extents for g in report.geometries) + report.num_unleased_extents == NUM_EXTENTS

    @invariant()
    def pool_and_replicas_agree_about_who_runs_and_who_waits(self) -> None:
        for lease, client in zip(self.state.leases(), self.clients, strict=True):
            assert lease.lease_id == client.lease_id
            assert lease.num_sequences == len(client.running)
            assert lease.num_waiting == len(client.waiting)

    @invariant()
    def what_replicas_wrote_and_sealed_is_still_there(self) -> None:
        for client in self.clients:
            for running in client.running.values():
                name = running.admit.namespace_id
                domain = self.specs[name].domain(name)
                for position, block in enumerate(running.blocks):
                    for part, unit in enumerate(self.units_of(running, block)):
                        content = self.converted.get(running.hashes[position], running.hashes[position])
                        assert self.shadow[unit] == (domain, (content, part))
                for block, content in running.sources.items():
                    assert [self.shadow[unit] for unit in self.units_of(running, block)] == content


#: What each part of the pool is driven with, and how many of these commands there are at least.
PARTS = {
    "quotas": (300, ("SetQuota", "Trim")),
    "leases": (300, ("Attach", "AddFormat", "Detach", "LeaseLost")),
    "blocks": (600, ("Admit", "Extend", "Release", "Compact", "Relocated")),
    "prefix index": (500, ("Admit", "Publish")),
    "sequence operations": (50, ("SequenceCopy", "SequenceRemove", "SequenceShift", "Settle")),  # test_edit_machine.py
    "conversions": (5, ("converted",)),
    "hits of converted blocks": (3, ("converted hits",)),
    "crashes": (200, ("crash",)),
    "calls that come twice, too early or too late": (50, ("repeated", "overtaking", "late")),
}


def test_a_pool_stays_sound_whatever_happens_in_whatever_order() -> None:
    PoolMachine.run(max_examples=90, stateful_step_count=30)
    for part, (least, kinds) in PARTS.items():
        assert sum(PoolMachine.counts[kind] for kind in kinds) >= least, part
