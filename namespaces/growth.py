"""What running sequences ask for: more blocks, and to publish full ones. Nothing here waits."""

from __future__ import annotations

from remora.namespaces.commands import Extend, Extended, Grant, Publish, Published, Refused
from remora.namespaces.leases import Lease
from remora.namespaces.placement import Shortage
from remora.namespaces.pool_parts import PoolParts
from remora.namespaces.prefix_index import RealmKey
from remora.namespaces.sequences import Sequence
from remora.namespaces.victims import choose_victims
from remora.platform.base.ids import BlockHash, SequenceId


class Growth:
    """Extends and publishes. Uses and changes a pool's parts."""

    def __init__(self, parts: PoolParts) -> None:
        self.parts = parts

    def extend(self, lease: Lease, command: Extend) -> Extended | Refused:
        """Grants item by item. A sequence that has finished, or was told to go, is refused; an unknown one refuses
        the whole command."""
        for item in command.items:
            if item.num_blocks < 1:
                return Refused(error="InvalidRequest", message=f"{item.sequence_id}: {item.num_blocks} more blocks")
            if item.sequence_id not in lease.sequences and item.sequence_id not in lease.finished:
                return _unknown(item.sequence_id)
        grants: list[Grant] = []
        refused: list[SequenceId] = []
        preempted: list[SequenceId] = []
        for item in command.items:
            sequence = lease.sequences.get(item.sequence_id)
            grant = self._extend(sequence, item.num_blocks) if sequence is not None else None
            if grant is not None:
                grants.append(grant)
                continue
            refused.append(item.sequence_id)
            if sequence is not None and sequence.preempted:
                preempted.append(item.sequence_id)
        return Extended(grants=tuple(grants), refused=tuple(refused), preempted=tuple(preempted))

    def _extend(self, sequence: Sequence, count: int) -> Grant | None:
        """New blocks at the end, or None after victims have been named."""
        parts = self.parts
        if sequence.preempted:
            return None
        namespace, space = sequence.namespace, sequence.space
        plan = parts.placement.plan(namespace, space, count)
        if isinstance(plan, Shortage):
            entitled = namespace.entitlement(count * space.block_bytes)
            parts.running.set_claim(sequence, "guaranteed" if entitled is not None else "borrowed")
            running = parts.running.sequences.values()
            for victim in choose_victims(running, namespace, space, plan, asker=sequence, entitled=entitled):
                parts.preempt(victim, f"memory is short for running sequences of {namespace.namespace_id}")
            return None
        borrowed_bytes = namespace.borrowed_bytes
        parts.placement.apply(plan, space)
        parts.running.set_claim(sequence, "")
        blocks = parts.ledger.grant(namespace, space, count)
        sequence.blocks.extend(blocks)
        return Grant(
            sequence_id=sequence.admit.sequence_id,
            blocks=tuple([block.index for block in blocks]),
            taken=plan.taken(namespace, borrowed_bytes),
        )

    def publish(self, lease: Lease, command: Publish) -> Published | Refused:
        """Seals in the order given. Seals of finished sequences, and of those whose session has moved on, are
        ignored; an unknown sequence or a seal out of order refuses the whole command."""
        problem = self._check(lease, command)
        if problem is not None:
            return problem
        num_sealed = num_duplicate = 0
        for seal in command.seals:
            sequence = self._publisher(lease, seal.sequence_id)
            if sequence is None:
                continue
            if seal.position == len(sequence.hashes) and sequence.seal(self.parts.ledger, seal.block_hash):
                num_sealed += 1
            else:
                num_duplicate += 1
        return Published(num_sealed=num_sealed, num_duplicate=num_duplicate)

    def _publisher(self, lease: Lease, sequence_id: SequenceId) -> Sequence | None:
        sequence = lease.sequences.get(sequence_id)
        if sequence is None or self.parts.sessions.is_stale(sequence.admit.session_id, sequence.admit.epoch):
            return None
        return sequence

    def _check(self, lease: Lease, command: Publish) -> Refused | None:
        """Plays the command through without changing anything."""
        progress: dict[SequenceId, tuple[int, BlockHash | None]] = {}
        parents: dict[tuple[RealmKey, BlockHash], BlockHash | None] = {}
        for seal in command.seals:
            if seal.sequence_id not in lease.sequences and seal.sequence_id not in lease.finished:
                return _unknown(seal.sequence_id)
            sequence = self._publisher(lease, seal.sequence_id)
            if sequence is None:
                continue
            hashes = sequence.hashes
            position, previous = progress.get(seal.sequence_id, (len(hashes), hashes[-1] if hashes else None))
            problem = sequence.check_seal(seal, position, previous)
            if problem is not None:
                return problem
            if seal.position == position:
                progress[seal.sequence_id] = (position + 1, seal.block_hash)
                if parents.setdefault((sequence.realm.key, seal.block_hash), previous) != previous:
                    message = f"two seals of one command put the hash of {seal.sequence_id} behind different blocks"
                    return Refused(error="InvalidRequest", message=message)
        return None


def _unknown(sequence_id: SequenceId) -> Refused:
    return Refused(error="UnknownSequence", message=f"{sequence_id!r} is not a running sequence of this lease")
