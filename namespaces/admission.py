"""Admissions: matched, granted, parked, denied.

A matched block is referenced before anything else happens to memory: what was found cannot be given away
(vLLM #37076), and what was promised is delivered (LMCache #4133).
"""

from __future__ import annotations

from typing import Literal

from remora.namespaces.commands import Admit, Admitted, OverQuota, Refused, Wait
from remora.namespaces.leases import Lease
from remora.namespaces.placement import Shortage
from remora.namespaces.pool_parts import PoolParts
from remora.namespaces.prefix_index import PrefixIndex
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
        if admit.session_id is not None and parts.sessions.see(admit.session_id, admit.epoch):
            self._fence(admit)
            self.pump(now_s)
        reason = self._never(lease, admit, namespace)
        if reason is not None:
            return self._over_quota(lease, admit, namespace, reason)
        entitled = self._is_entitled(lease, admit, namespace)
        if not parts.room.in_front_of(namespace, entitled=entitled) and not parts.running.holds_back(entitled=entitled):
            answer = self._try(lease, admit, namespace)
            if isinstance(answer, Admitted):
                return answer
            if answer.kind == "memory":
                if self._is_hopeless(lease, admit, namespace):
                    return self._over_quota(lease, admit, namespace, _HOPELESS)
                parts.room.blocked = "guaranteed" if entitled else "borrowed"
                if entitled:
                    self._revoke(lease, namespace, answer)
        if admit.deadline_s is not None and admit.deadline_s <= now_s:
            return self._over_quota(lease, admit, namespace, _TOO_LATE)
        parked = Parked(admit, lease, namespace, parts.room.next_order_no)
        return Wait(sequence_id=admit.sequence_id, queue_position=parts.room.add(parked))

    def _problem(self, lease: Lease, admit: Admit, namespace: Namespace | None) -> Refused | None:
        """A broken protocol, as an answer."""
        tokens = lease.space.geometry.block_tokens
        error = "InvalidRequest"
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
        needed = admit.max_blocks * lease.space.block_bytes
        if needed > namespace.quota.limit_bytes:
            return f"the request can come to need {needed} bytes, the limit is {namespace.quota.limit_bytes}"
        if admit.max_blocks > lease.space.max_arena_blocks:
            return f"the request can come to need {admit.max_blocks} blocks, the arena holds less"
        return None

    def _is_hopeless(self, lease: Lease, admit: Admit, namespace: Namespace) -> bool:
        """Whether the request would lack memory even if everything that runs ended: the rest is guaranteed to others
        and holds their cache. Asked after a try has failed."""
        parts = self.parts
        if not parts.ledger.num_referenced:
            return True
        spaces = iter(parts.extents.spaces.values())
        return admit.num_blocks > parts.book.obtainable_blocks(namespace, lease.space, spaces)

    def _is_entitled(self, lease: Lease, admit: Admit, namespace: Namespace) -> bool:
        """Whether the namespace stays within its guarantee with what it would then use."""
        size = lease.space.block_bytes
        spare = namespace.guaranteed_bytes - namespace.used_bytes
        if admit.num_blocks * size <= spare:
            return True
        if spare < 0:
            return False
        matched = PrefixIndex.match(self.parts.realm(lease, namespace), admit.hashes, self._max_match(lease, admit))
        charged = sum(1 for block in matched if not block.refs and block.holding.namespace is namespace)
        return (admit.num_blocks - len(matched) + charged) * size <= spare

    @staticmethod
    def _max_match(lease: Lease, admit: Admit) -> int:
        """Full blocks before the one with the last prompt token: at least one token is always evaluated."""
        return (admit.num_tokens - 1) // lease.space.geometry.block_tokens

    def _try(self, lease: Lease, admit: Admit, namespace: Namespace) -> Admitted | Shortage:
        """References the longest cached prefix and grants the rest, or does neither."""
        parts = self.parts
        ledger, space = parts.ledger, lease.space
        idle = not ledger.num_referenced
        realm = parts.realm(lease, namespace)
        matched = PrefixIndex.match(realm, admit.hashes, self._max_match(lease, admit))
        for block in matched:
            ledger.acquire(block)
        count = admit.num_blocks - len(matched)
        plan = parts.placement.plan(namespace, space, count, idle=idle)
        if isinstance(plan, Shortage):
            for block in reversed(matched):
                ledger.drop(block)
            return plan
        for block in matched:
            block.holding.policy.hit(block)
        parts.placement.apply(plan, space)
        parts.room.charge(namespace, count * space.block_bytes)
        sequence = Sequence(admit, parts.running.next_no, namespace, space, realm)
        sequence.blocks = matched + ledger.grant(namespace, space, count)
        sequence.num_cached = len(matched)
        sequence.hashes = list(admit.hashes[: len(matched)])
        lease.sequences[admit.sequence_id] = sequence
        parts.running.add(sequence)
        namespace.num_admitted += 1
        namespace.adviser.look_up(admit.hashes[: self._max_match(lease, admit)])
        namespace.lookup_tokens += admit.num_tokens
        namespace.hit_tokens += len(matched) * space.geometry.block_tokens
        return Admitted(
            sequence_id=admit.sequence_id,
            blocks=tuple([block.index for block in sequence.blocks]),
            num_cached_blocks=len(matched),
        )

    def _revoke(self, lease: Lease, namespace: Namespace, shortage: Shortage) -> None:
        """A namespace within its guarantee lacks memory that borrowers use: they are told to give it back."""
        if not self.parts.running.num_preempted:
            running = self.parts.running.sequences.values()
            for victim in choose_victims(running, namespace, lease.space, shortage, asker=None, entitled=True):
                self.parts.preempt(victim, "a namespace below its guarantee needs the borrowed memory")

    def _over_quota(self, lease: Lease, admit: Admit, namespace: Namespace, reason: str) -> OverQuota:
        """Ends an admission without memory; its id is used up."""
        lease.bury(admit.sequence_id)
        return OverQuota(
            sequence_id=admit.sequence_id,
            namespace_id=namespace.namespace_id,
            needed_bytes=admit.max_blocks * lease.space.block_bytes,
            limit_bytes=namespace.quota.limit_bytes,
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
        """Grants parked admissions in fair order until the next one lacks memory. Called whenever memory may have
        been freed; afterwards something is referenced or nobody waits."""
        self.parts.trim_to_limits()
        self.expire(now_s)
        room = self.parts.room
        room.blocked = ""
        over_limit: set[str] = set()
        while True:
            heads = [p for p in room.heads() if p.namespace.namespace_id not in over_limit]
            ranked = [(not self._is_entitled(p.lease, p.admit, p.namespace), n, p) for n, p in enumerate(heads)]
            if not ranked:
                return
            borrows, _, parked = min(ranked)
            if self.parts.running.holds_back(entitled=not borrows):
                return
            outcome = self._advance(parked, entitled=not borrows)
            if outcome == "limit":
                over_limit.add(parked.namespace.namespace_id)
            elif outcome == "memory":
                room.blocked = "borrowed" if borrows else "guaranteed"
                return

    def _advance(self, parked: Parked, *, entitled: bool) -> Literal["done", "limit", "memory"]:
        """Grants or denies the head of a line; else says what it lacks."""
        lease, admit, namespace = parked.lease, parked.admit, parked.namespace
        reason = self._never(lease, admit, namespace)
        if reason is None:
            answer = self._try(lease, admit, namespace)
            if isinstance(answer, Admitted):
                self.parts.room.remove(parked)
                lease.tell_granted(answer)
                return "done"
            if answer.kind == "limit":
                return "limit"
            if not self._is_hopeless(lease, admit, namespace):
                if entitled:
                    self._revoke(lease, namespace, answer)
                return "memory"
            reason = _HOPELESS
        self._deny(parked, reason)
        return "done"


_HOPELESS = "the rest of the memory is guaranteed to other namespaces"
_TOO_LATE = "the deadline has passed"
