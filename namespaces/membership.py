"""Who takes part: leases come and go, namespaces get their quotas."""

from __future__ import annotations

from remora.namespaces.admission import Admission
from remora.namespaces.commands import (
    AddFormat,
    AnyAnswer,
    Attach,
    Attached,
    AttachRefused,
    Detach,
    Detached,
    Done,
    FormatAdded,
    LeaseLost,
    QuotaSet,
    Refused,
    SetQuota,
)
from remora.namespaces.effects import SetGeneration
from remora.namespaces.extents import GeometrySpace
from remora.namespaces.geometry import KVGeometry
from remora.namespaces.leases import Lease
from remora.namespaces.pool_parts import MIN_EXTENT_BLOCKS, PoolParts
from remora.namespaces.victims import choose_surplus
from remora.platform.base.ids import ModelId


class Membership:
    """Attaches, detaches and sets quotas. Uses and changes a pool's parts."""

    def __init__(self, parts: PoolParts, admission: Admission) -> None:
        self.parts = parts
        self.admission = admission

    def attach(self, command: Attach) -> AnyAnswer:
        """Registers a replica, or says in a sentence why not."""
        parts = self.parts
        known = parts.leases.route_attach(command)
        if known is not None:
            return known
        reason = self._attach_problem(command)
        slot = parts.leases.free_slot()
        if slot is None:
            reason = reason or f"all {parts.config.max_leases} lease slots of the arena are taken"
        if reason is not None or slot is None:
            return AttachRefused(reason=reason or "")
        space = parts.extents.space_of(command.geometry)
        parts.book.model_spaces[command.model_id] = space
        parts.book.refresh_guarantees()
        attached = Attached(
            lease_slot=slot,
            generation=self._next_generation(slot),
            incarnation=parts.config.incarnation,
            block_bytes=space.block_bytes,
        )
        parts.leases.leases[command.lease_id] = Lease(command, attached, space)
        return attached

    def _attach_problem(self, command: Attach) -> str | None:
        parts, config = self.parts, self.parts.config
        space = self._sketch(command.geometry)
        problem = self._space_problem(command.model_id, space)
        if problem is not None:
            return problem
        taken = parts.leases.reserved_bytes
        if command.reserved_bytes < 0 or taken + command.reserved_bytes > config.reserved_bytes:
            return (
                f"{command.replica_id} needs {command.reserved_bytes} bytes besides KV, but {taken} of the device's "
                f"{config.reserved_bytes} bytes are reserved already"
            )
        return parts.book.extents_short(model_id=command.model_id, attached=space)

    def _sketch(self, geometry: KVGeometry) -> GeometrySpace:
        """Looked up without being kept: what is refused leaves no trace."""
        extents = self.parts.extents
        return extents.spaces.get(geometry.geometry_id) or extents.sketch_space(geometry)

    def _space_problem(self, model_id: ModelId, space: GeometrySpace) -> str | None:
        block_bytes = space.block_bytes
        if block_bytes < 1 or space.geometry.block_tokens < 1:
            return f"the geometry of {model_id} has no bytes"
        if space.min_extent_blocks < MIN_EXTENT_BLOCKS:
            return (
                f"an extent of {space.extent_bytes} bytes holds only {space.min_extent_blocks} whole blocks of "
                f"{block_bytes} bytes of {model_id}; at least {MIN_EXTENT_BLOCKS} are needed: set extent_bytes "
                f"to {(MIN_EXTENT_BLOCKS + 1) * block_bytes} or more, or block_tokens lower"
            )
        return None

    def add_format(self, lease: Lease, command: AddFormat) -> FormatAdded | Refused:
        """Lets the lease have sequences in one more precision, or says why not."""
        parts, geometry, model_id = self.parts, command.geometry, lease.attach.model_id
        if not lease.attach.geometry.differs_in_precision_only(geometry):
            message = f"the formats of {model_id} may differ in precision only, not {geometry}"
            return Refused(error="InvalidRequest", message=message)
        known = lease.formats.get(geometry.geometry_id)
        if known is not None and known.fingerprint != command.fingerprint:
            return Refused(error="Conflict", message=f"{model_id} has this geometry under another fingerprint")
        space = self._sketch(geometry)
        problem = self._space_problem(model_id, space) or parts.book.extents_short(added=space)
        if problem is not None:
            return Refused(error="ConfigError", message=problem)
        space = parts.extents.space_of(geometry)
        lease.add_format(space, command.fingerprint)
        parts.book.refresh_guarantees()
        return FormatAdded(block_bytes=space.block_bytes)

    def _next_generation(self, slot: int) -> int:
        """Bumps the slot's generation word: whoever held the old value may emit nothing more."""
        generations = self.parts.leases.generations
        generations[slot] += 1
        self.parts.ledger.effects.append(SetGeneration(lease_slot=slot, value=generations[slot]))
        return generations[slot]

    def detach(self, lease: Lease, command: Detach, now_s: float) -> Detached:
        """Ends a lease in peace."""
        answer = Detached()
        self._end(lease, now_s)
        self.parts.leases.end(lease, command.call_no, answer)
        self.admission.pump(now_s)
        return answer

    def lose(self, command: LeaseLost, now_s: float) -> Done:
        """The process of the lease is gone; saying it twice is harmless."""
        lease = self.parts.leases.leases.get(command.lease_id)
        if lease is not None:
            self._end(lease, now_s)
            self.parts.leases.end(lease)
            self.admission.pump(now_s)
        return Done()

    def _end(self, lease: Lease, now_s: float) -> None:
        for parked in list(lease.parked.values()):
            self.admission.withdraw(parked)
        for sequence in list(lease.sequences.values()):
            self.parts.finish(lease, sequence)
        self.parts.relocations.forget(lease.attach.lease_id, now_s)
        self._next_generation(lease.attached.lease_slot)

    def set_quota(self, command: SetQuota, now_s: float) -> QuotaSet | Refused:
        """Creates a namespace or changes its quota and precision. Cached blocks above a lowered limit go at once,
        sequences above it are told to go; what others borrow of a raised guarantee is taken back as soon as somebody
        asks for it."""
        parts = self.parts
        quota, name = command.quota, command.namespace_id
        if not 0 <= quota.guaranteed_bytes <= quota.limit_bytes or not quota.weight > 0:
            message = (
                f"namespace {name}: guaranteed {quota.guaranteed_bytes}, limit {quota.limit_bytes}, weight "
                f"{quota.weight}; allowed is 0 <= guaranteed <= limit and weight > 0"
            )
            return Refused(error="ConfigError", message=message)
        namespace = parts.book.namespaces.get(name)
        if namespace is not None:
            fixed = (namespace.model_id, namespace.tenant, namespace.share_group)
            if fixed != (command.model_id, command.tenant, command.share_group):
                message = f"namespace {name}: model, tenant and share group are {fixed} and cannot change"
                return Refused(error="Conflict", message=message)
        problem = parts.book.tree_problem(command) or parts.book.extents_short(changed=command)
        if problem is not None:
            return Refused(error="ConfigError", message=f"namespace {name}: {problem}")
        if namespace is None:
            namespace = parts.book.add(command)
        namespace.quota, namespace.kv_precision = quota, command.kv_precision
        parts.book.refresh_guarantees()
        revoked = parts.placement.trim(namespace, quota.limit_bytes)
        if namespace.tree_used_bytes > quota.limit_bytes:
            for victim in choose_surplus([*parts.running.sequences.values()], namespace):
                parts.preempt(victim, f"the limit of {name} was lowered")
        self.admission.pump(now_s)
        return QuotaSet(revoked_bytes=revoked)
