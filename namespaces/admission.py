"""Admissions: matched, granted, parked, denied.

A matched block is referenced before anything else happens to memory: what was found cannot be given away
(vLLM #37076), and what was promised is delivered (LMCache #4133).
"""

from __future__ import annotations

from typing import Literal

from remora.namespaces.blocks import Block
from remora.namespaces.commands import Admit, Admitted, OverQuota, Refused, Wait
from remora.namespaces.extents import GeometrySpace
from remora.namespaces.fair_share import fair_shares
from remora.namespaces.gathering import make_room
from remora.namespaces.kept_chains import KeptMatch, match_kept
from remora.namespaces.leases import Lease
from remora.namespaces.placement import Shortage
from remora.namespaces.pool_parts import PoolParts
from remora.namespaces.prefix_index import PrefixIndex, Realm
from remora.namespaces.quotas import Namespace
from remora.namespaces.sequences import Sequence
from remora.namespaces.victims import choose_victims
from remora.namespaces.waiting import Parked


class Admission:
    """Who gets in, and when. Uses and changes a pool's parts."""

    def __init__(self, parts: PoolParts) -> None:
        self.parts = parts

    def admit(self, lease: Lease, admit: Admit, now_s: float) -> Admitted | Wait | OverQuota | Refused:
        """Answers an admission; a refusal changes nothing."""
        parts = self.parts
        namespace = parts.book.namespaces.get(admit.namespace_id)
        problem = self._problem(lease, admit, namespace)
        if problem is not None or namespace is None:
            return problem or Refused(error="NotFound", message=f"no namespace {admit.namespace_id!r} in this pool")
        if admit.background:
            return self._admit_in_background(lease, admit, namespace)
        if admit.session_id is not None and parts.sessions.see(admit.session_id, admit.epoch):
            self._fence(admit)
            self.pump(now_s)
        reason = self._never(lease, admit, namespace)
        if reason is not None:
            return self._over_quota(lease, admit, namespace, reason)
        entitled = self._entitlement(lease, admit, namespace)
        parked = Parked(admit, lease, namespace, parts.room.next_order_no)
        passed = self._passed_by(parked, entitled)
        if passed is not None:
            answer = self._try(lease, admit, namespace)
            if isinstance(answer, Admitted):
                _let_pass(passed, parked)
                return answer
            if self._is_hopeless(lease, admit, namespace):
                return self._over_quota(lease, admit, namespace, _HOPELESS)
            if answer.kind == "memory":
                self._make_room(parked, answer, entitled)
                parts.room.blocked = "borrowed" if entitled is None else "guaranteed"
            if entitled is not None:
                self._revoke(lease.space_of(admit), namespace, answer, entitled)
        if admit.deadline_s is not None and admit.deadline_s <= now_s:
            return self._over_quota(lease, admit, namespace, _TOO_LATE)
        return Wait(sequence_id=admit.sequence_id, queue_position=parts.room.add(parked))

    def _admit_in_background(self, lease: Lease, admit: Admit, namespace: Namespace) -> Admitted | OverQuota:
        """Nothing for it while anybody waits for memory."""
        is_idle = not len(self.parts.room) and not self.parts.running.has_claim
        answer = self._try(lease, admit, namespace) if is_idle else None
        return answer if isinstance(answer, Admitted) else self._over_quota(lease, admit, namespace, _NOT_IDLE)

    def _problem(self, lease: Lease, admit: Admit, namespace: Namespace | None) -> Refused | None:
        """A broken protocol, as an answer."""
        tokens = lease.space.geometry.block_tokens
        error = "InvalidRequest"
        if admit.geometry_id is not None and admit.geometry_id not in lease.formats:
            message = f"{admit.sequence_id}: the lease has no format of geometry {admit.geometry_id!r}"
            return Refused(error=error, message=message)
        if namespace is not None and namespace.model_id != lease.attach.model_id:
            message = f"namespace {admit.namespace_id!r} belongs to model {namespace.model_id!r}"
        elif lease.knows(admit.sequence_id):
            error, message = "Conflict", f"sequence id {admit.sequence_id!r} was used before; ids are never reused"
        elif admit.num_tokens < 1 or admit.num_blocks * tokens < admit.num_tokens:
            message = f"{admit.num_blocks} blocks of {tokens} tokens do not hold {admit.num_tokens} tokens"
        elif admit.max_blocks < admit.num_blocks:
            message = f"max_blocks {admit.max_blocks} is less than num_blocks {admit.num_blocks}"
        elif len(admit.hashes) * tokens > admit.num_tokens:
            message = f"{len(admit.hashes)} hashes of full blocks do not fit {admit.num_tokens} tokens"
        elif self.parts.sessions.is_stale(admit.session_id, admit.epoch):
            error = "StaleEpoch"
            highest = self.parts.sessions.highest[admit.session_id] if admit.session_id else 0
            message = f"session {admit.session_id!r} is at epoch {highest}, the call has {admit.epoch}"
        else:
            return None
        return Refused(error=error, message=message)

    def _fence(self, admit: Admit) -> None:
        """A session has moved on: what still runs or waits under an older epoch is told to go."""
        parts = self.parts
        reason = f"session {admit.session_id} has moved on to epoch {admit.epoch}"
        for sequence in parts.running.sequences.values():
            if sequence.admit.session_id == admit.session_id:
                parts.preempt(sequence, reason)
        waiting = [parked for parked in parts.room if parked.admit.session_id == admit.session_id]
        for parked in sorted(waiting, key=lambda parked: parked.order_no):
            self._deny(parked, reason)

    def _never(self, lease: Lease, admit: Admit, namespace: Namespace) -> str | None:
        """Why waiting can never help, whatever the others do."""
        space = lease.space_of(admit)
        needed = admit.max_blocks * space.block_bytes
        for account in namespace.lineage():
            if needed > account.quota.limit_bytes:
                whose = "the limit" if account is namespace else f"the limit of {account.namespace_id}"
                return f"the request can come to need {needed} bytes, {whose} is {account.quota.limit_bytes}"
        if admit.max_blocks > space.max_arena_blocks:
            return f"the request can come to need {admit.max_blocks} blocks, the arena holds less"
        return None

    def _is_hopeless(self, lease: Lease, admit: Admit, namespace: Namespace) -> bool:
        """Whether the request would lack memory even if everything that runs ended: the rest is guaranteed to others
        and holds their cache. Asked after a try has failed."""
        parts = self.parts
        if not parts.ledger.num_referenced and not parts.relocations.moves:
            return True
        spaces = iter(parts.extents.spaces.values())
        return admit.num_blocks > parts.book.obtainable_blocks(namespace, lease.space_of(admit), spaces)

    def _entitlement(self, lease: Lease, admit: Admit, namespace: Namespace) -> Namespace | None:
        """The closest of the namespace's lineage that stays within its guarantee with what it would then use."""
        space = lease.space_of(admit)
        size = space.block_bytes
        entitled = namespace.entitlement(admit.num_blocks * size)
        if entitled is namespace or namespace.entitlement(0) is None:
            return entitled
        matched, _ = self._match(lease, admit, self.parts.realm(lease, space, namespace))
        charged = sum(1 for block in matched if not block.refs and namespace.contains(block.holding.namespace))
        return namespace.entitlement((admit.num_blocks - len(matched) + charged) * size)

    def _passed_by(self, newcomer: Parked, entitled: Namespace | None) -> list[Parked] | None:
        """Who waits for memory and would be passed by a newcomer; None: it has to line up."""
        parts = self.parts
        blocked = parts.room.blocked
        if parts.running.holds_back(entitled=entitled is not None) or parts.room.has_line(newcomer.namespace):
            return None
        if not blocked or (entitled is not None and blocked == "borrowed"):
            return []
        heads = parts.room.heads()
        return heads if blocked == "borrowed" and self._may_pass(newcomer, heads) else None

    def _may_pass(self, parked: Parked, blocked: list[Parked]) -> bool:
        """Whether a borrower may go before others that lack memory: within its fair share, and only for so long."""
        parts, size = self.parts, parked.num_bytes
        arena_bytes = len(parts.extents.extents) * parts.extents.extent_bytes
        if any(other.passed_bytes + size > arena_bytes for other in blocked):
            return False
        shares = fair_shares(parts.book.roots(), arena_bytes, lambda n: parts.room.has_line(n) or n is parked.namespace)
        return all(account.tree_used_bytes + size <= shares[account] for account in parked.namespace.lineage())

    @staticmethod
    def _max_match(lease: Lease, admit: Admit) -> int:
        """Full blocks before the one with the last prompt token: at least one token is always evaluated."""
        return (admit.num_tokens - 1) // lease.space.geometry.block_tokens  # in all of its formats

    def _match(self, lease: Lease, admit: Admit, realm: Realm) -> tuple[list[Block], KeptMatch | None]:
        """The longest cached prefix, and of kept chains what else there is to know."""
        max_blocks = self._max_match(lease, admit)
        if admit.kept:
            return match_kept(self.parts.index, realm, admit.hashes, admit.kept, max_blocks)
        return PrefixIndex.match(realm, admit.hashes, max_blocks), None

    def _try(self, lease: Lease, admit: Admit, namespace: Namespace) -> Admitted | Shortage:
        """References the longest cached prefix and grants the rest, or does neither."""
        parts = self.parts
        ledger, space = parts.ledger, lease.space_of(admit)
        realm = parts.realm(lease, space, namespace)
        matched, kept = self._match(lease, admit, realm)
        num_shared = sum(1 for block in matched if block.refs)
        borrowed_bytes = namespace.borrowed_bytes
        for block in matched:
            ledger.acquire(block)
        count = admit.num_blocks - len(matched)
        plan = parts.placement.plan(namespace, space, count)
        if isinstance(plan, Shortage):
            for block in reversed(matched):
                ledger.drop(block)
            return plan
        if not admit.background:
            for block in matched:
                block.holding.policy.hit(block)
        parts.placement.apply(plan, space)
        sequence = Sequence(admit, parts.running.next_no, namespace, space, realm)
        sequence.blocks = matched + ledger.grant(namespace, space, count)
        sequence.num_cached = len(matched)
        sequence.hashes = [block.block_hash for block in matched if block.block_hash is not None]
        if kept is not None:
            # Behind these it may be converted, or computed behind what was.
            sequence.num_bound = len(matched)
        lease.sequences[admit.sequence_id] = sequence
        parts.running.add(sequence)
        if not admit.background:
            namespace.num_admitted += 1
            namespace.adviser.look_up(admit.hashes[: self._max_match(lease, admit)])
            namespace.lookup_tokens += admit.num_tokens
            namespace.hit_tokens += len(matched) * space.geometry.block_tokens
        return Admitted(
            sequence_id=admit.sequence_id,
            blocks=tuple([block.index for block in sequence.blocks]),
            num_cached_blocks=len(matched),
            num_shared_blocks=num_shared,
            taken=plan.taken(namespace, borrowed_bytes),
            kept=kept,
        )

    def _make_room(self, parked: Parked, shortage: Shortage, entitled: Namespace | None) -> None:
        """Has other geometries gather their blocks: for this request, or, within a guarantee, for all that wait in its
        line, as far as the guarantee goes."""
        space, num_blocks = parked.lease.space_of(parked.admit), shortage.num_missing
        if entitled is not None:
            spare = (entitled.guaranteed_bytes - entitled.tree_used_bytes) // space.block_bytes
            waiting = self.parts.room.waiting_bytes(parked.namespace) // space.block_bytes
            num_blocks = max(num_blocks, min(spare, waiting))
        make_room(self.parts, parked.namespace, space, num_blocks)

    def _revoke(self, space: GeometrySpace, namespace: Namespace, shortage: Shortage, entitled: Namespace) -> None:
        """A namespace within a guarantee lacks memory that borrowers use: they are told to give it back."""
        if not self.parts.running.num_preempted:
            running = self.parts.running.sequences.values()
            for victim in choose_victims(running, namespace, space, shortage, asker=None, entitled=entitled):
                self.parts.preempt(victim, "a namespace below its guarantee needs the borrowed memory")

    def _over_quota(self, lease: Lease, admit: Admit, namespace: Namespace, reason: str) -> OverQuota:
        """Ends an admission without memory; its id is used up."""
        lease.bury(admit.sequence_id)
        return OverQuota(
            sequence_id=admit.sequence_id,
            namespace_id=namespace.namespace_id,
            needed_bytes=admit.max_blocks * lease.space_of(admit).block_bytes,
            limit_bytes=min(account.quota.limit_bytes for account in namespace.lineage()),
            reason=reason,
        )

    def _deny(self, parked: Parked, reason: str) -> None:
        self.parts.room.remove(parked)
        over_quota = self._over_quota(parked.lease, parked.admit, parked.namespace, reason)
        parked.lease.tell_denied(over_quota)

    def withdraw(self, parked: Parked) -> None:
        """The lease wants it no more."""
        self.parts.room.remove(parked)
        parked.lease.bury(parked.admit.sequence_id)

    def expire(self, now_s: float) -> None:
        """Denies what has waited past its deadline."""
        while (parked := self.parts.room.pop_expired(now_s)) is not None:
            self._deny(parked, _TOO_LATE)

    def pump(self, now_s: float) -> None:
        """Grants parked admissions in fair order. Called whenever memory may have been freed; afterwards something is
        referenced, a refused extension comes first, or nobody waits."""
        self.parts.trim_to_limits()
        self.expire(now_s)
        room = self.parts.room
        room.blocked = ""
        #: Heads that cannot go now: their limit is reached, or they lack memory.
        stuck: set[Parked] = set()
        blocked: list[Parked] = []
        while heads := [parked for parked in room.heads() if parked not in stuck]:
            parked, entitled = self._next(heads)
            if self.parts.running.holds_back(entitled=entitled is not None):
                return
            if blocked and entitled is None and not self._may_pass(parked, blocked):
                stuck.add(parked)
                continue
            outcome = self._advance(parked, entitled)
            if outcome == "granted":
                if entitled is None:
                    _let_pass(blocked, parked)
            elif outcome != "denied":
                stuck.add(parked)
                if outcome == "memory" and entitled is not None:
                    room.blocked = "guaranteed"
                    return
                if outcome == "memory":
                    room.blocked = "borrowed"
                    blocked.append(parked)

    def _next(self, heads: list[Parked]) -> tuple[Parked, Namespace | None]:
        """The first that is within a guarantee, else the first."""
        for parked in heads:
            entitled = self._entitlement(parked.lease, parked.admit, parked.namespace)
            if entitled is not None:
                return parked, entitled
        return heads[0], None

    def _advance(self, parked: Parked, entitled: Namespace | None) -> Literal["granted", "denied", "limit", "memory"]:
        """Grants or denies the head of a line; else says what it lacks."""
        lease, admit, namespace = parked.lease, parked.admit, parked.namespace
        reason = self._never(lease, admit, namespace)
        if reason is None:
            answer = self._try(lease, admit, namespace)
            if isinstance(answer, Admitted):
                self.parts.room.remove(parked)
                lease.tell_granted(answer)
                return "granted"
            if not self._is_hopeless(lease, admit, namespace):
                if answer.kind == "memory":
                    self._make_room(parked, answer, entitled)
                if entitled is not None:
                    self._revoke(lease.space_of(admit), namespace, answer, entitled)
                return answer.kind
            reason = _HOPELESS
        self._deny(parked, reason)
        return "denied"


def _let_pass(blocked: list[Parked], parked: Parked) -> None:
    for other in blocked:
        other.passed_bytes += parked.num_bytes


_HOPELESS = "the rest of the memory is guaranteed to other namespaces"
_TOO_LATE = "the deadline has passed"
_NOT_IDLE = "no memory is idle"
