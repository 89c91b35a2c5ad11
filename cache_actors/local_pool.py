"""A pool in this process: the real pool state over private memory, as a port. For tests and benchmarks.

No journal and no shared memory: what the actor's shell does around `PoolState` (numbering, effects, generation words)
is done here in a few lines, synchronously.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from remora.cache_actors.block_exports import as_held, copy_blocks
from remora.cache_actors.local_delivery import Delivery, Lane
from remora.cache_actors.port import EngineCommand, LoadPath, OnAnswer, OnEvent
from remora.kernels.reencoder import HostMemory, reencode_blocks
from remora.namespaces.commands import (
    AddFormat,
    AnyAnswer,
    AnyCommand,
    AnyEvent,
    Attach,
    Attached,
    Compact,
    Compacted,
    FormatAdded,
    LeaseLost,
    ProcessIdentity,
    Quota,
    QuotaSet,
    Refused,
    SetQuota,
    Tick,
)
from remora.namespaces.effects import CopyBlocks, ReencodeBlocks, SetGeneration, ZeroBlocks
from remora.namespaces.geometry import KVGeometry, KVPrecision
from remora.namespaces.hold_commands import Held, Hold, Unhold
from remora.namespaces.pool import PoolState, PoolStateConfig
from remora.platform.base.clock import Clock, SystemClock
from remora.platform.base.errors import ArenaError, StaleLease, Unavailable
from remora.platform.base.ids import HoldId, LeaseId, ModelId, NamespaceId, ReplicaId

#: Answers a command in the pool's place; the pool then never sees it. None: the pool answers.
Deny = Callable[[EngineCommand], AnyAnswer | None]


class LocalDevice:
    """The pool of one device and its memory; any number of models attach to it. Thread-safe."""

    def __init__(self, *, data_bytes: int, extent_bytes: int, clock: Clock | None = None, data: Any = None) -> None:
        """`data`: the memory, where it is not this process's own: a tensor of a GPU's, say."""
        config = PoolStateConfig(
            data_bytes=data_bytes, extent_bytes=extent_bytes, reserved_bytes=1 << 40, incarnation=1
        )
        self.state = PoolState(config)
        self.data: NDArray[np.uint8] = np.zeros(data_bytes, np.uint8) if data is None else data
        self._clock = clock if clock is not None else SystemClock()
        self._lock = threading.RLock()
        self._generations: dict[int, int] = {}
        self._ports: list[LocalPool] = []

    def set_quota(
        self,
        namespace_id: NamespaceId,
        model_id: ModelId,
        *,
        guaranteed_bytes: int = 0,
        limit_bytes: int | None = None,
        weight: float = 1.0,
        tenant: str = "",
        share_group: str = "",
        kv_precision: KVPrecision | None = None,
    ) -> None:
        """Creates a namespace or changes its quota; no limit: the whole device. Raises ArenaError if refused."""
        answer = self.apply(
            SetQuota(
                lease_id=LeaseId(""),
                namespace_id=namespace_id,
                model_id=model_id,
                quota=Quota(
                    guaranteed_bytes=guaranteed_bytes,
                    limit_bytes=self.data.nbytes if limit_bytes is None else limit_bytes,
                    weight=weight,
                ),
                tenant=tenant,
                share_group=share_group,
                kv_precision=kv_precision,
            )
        )
        if not isinstance(answer, QuotaSet):
            raise ArenaError(f"the local pool refused the quota of {namespace_id}: {answer}")

    def attach(
        self,
        geometry: KVGeometry,
        *,
        model_id: ModelId,
        fingerprint: bytes,
        delivery: Delivery = "inline",
        seed: int = 0,
        relocates: bool = False,
    ) -> LocalPool:
        """A port for one more engine. Raises ArenaError if the pool refuses it."""
        return LocalPool(
            self,
            geometry,
            model_id=model_id,
            fingerprint=fingerprint,
            delivery=delivery,
            seed=seed,
            relocates=relocates,
        )

    def tick(self) -> None:
        """Lets parked admissions past their deadline be denied."""
        self.apply(Tick(lease_id=LeaseId("")))

    def compact(self, namespace_id: NamespaceId) -> Compacted:
        """One round of compaction. Raises ArenaError if refused."""
        answer = self.apply(Compact(lease_id=LeaseId(""), namespace_id=namespace_id))
        self.pass_on_events()
        if not isinstance(answer, Compacted):
            raise ArenaError(f"the local pool refused to compact {namespace_id}: {answer}")
        return answer

    def revoke(self, port: LocalPool) -> None:
        """Ends a port's lease as if its process were gone."""
        self.apply(LeaseLost(lease_id=port.lease_id))

    def hold(self, command: Hold) -> LocalReader:
        """For readers of other pools (block_loader.SourcePool)."""
        return LocalReader(self, command.hold_id, as_held(self.apply(command)))

    def generation(self, lease_slot: int) -> int:
        return self._generations.get(lease_slot, 0)

    def apply(self, command: AnyCommand) -> AnyAnswer:
        """Applies a command, does its effects and passes on the events it caused."""
        with self._lock:
            answer = self.state.apply(command, self._clock.now_s())
            for effect in self.state.take_effects():
                match effect:
                    case ZeroBlocks(block_bytes=size, blocks=blocks):
                        for block in blocks:
                            self.data[block * size : (block + 1) * size] = 0
                    case CopyBlocks(block_bytes=size, pairs=pairs):
                        for source, target in pairs:
                            self.data[target * size : (target + 1) * size] = self.data[
                                source * size : (source + 1) * size
                            ]
                    case ReencodeBlocks(source=geometry, target=other, pairs=pairs):
                        places = np.array(pairs, np.int32).T.copy()
                        reencode_blocks(HostMemory(self.data, geometry), HostMemory(self.data, other), *places)
                    case SetGeneration(lease_slot=slot, value=value):
                        self._generations[slot] = value
            return answer

    def pass_on_events(self) -> None:
        """Hands new events to the ports."""
        with self._lock:
            for port in self._ports:
                port.take_events(self.state)

    def connect(self, port: LocalPool) -> None:
        with self._lock:
            self._ports.append(port)


class LocalReader:
    """Blocks held for a reader (block_loader.HeldReader)."""

    def __init__(self, device: LocalDevice, hold_id: HoldId, held: Held) -> None:
        self.path: LoadPath = "mapped"
        self.num_blocks = len(held.blocks)
        self.block_bytes = held.block_bytes
        self._device, self._hold_id, self._held = device, hold_id, held

    def read(self, first: int, into_NB: NDArray[np.uint8]) -> tuple[int, ...]:
        sums = copy_blocks(self._device.data, self._held.blocks[first : first + len(into_NB)], into_NB)
        if not self._device.state.held(self._hold_id).blocks:
            raise Unavailable("its blocks were not held until they were copied")
        return sums

    def close(self) -> None:
        self._device.apply(Unhold(lease_id=LeaseId(""), hold_ids=(self._hold_id,)))
        self._device.pass_on_events()


class LocalPool:
    """One lease on a LocalDevice (port.PoolPort).

    Answers come in order; events come in order; how the two interleave is up to `delivery`.
    """

    def __init__(
        self,
        device: LocalDevice,
        geometry: KVGeometry,
        *,
        model_id: ModelId,
        fingerprint: bytes,
        delivery: Delivery = "inline",
        seed: int = 0,
        relocates: bool = False,
    ) -> None:
        """Attaches; `seed` fixes the delays of threads. Raises ArenaError if the pool refuses."""
        self.device = device
        self.memory = HostMemory(device.data, geometry)
        self.lease_id = LeaseId(f"local-{os.urandom(6).hex()}")
        #: Tests set it.
        self.deny: Deny | None = None
        self._delivery = delivery
        self._call_no = 1
        self._event_no = 0
        self._on_answer: OnAnswer | None = None
        self._on_event: OnEvent | None = None
        self._answers, self._events = Lane(delivery, seed), Lane(delivery, seed + 1)
        answer = device.apply(
            Attach(
                lease_id=self.lease_id,
                call_no=1,
                replica_id=ReplicaId(self.lease_id),
                model_id=model_id,
                geometry=geometry,
                fingerprint=fingerprint,
                process=ProcessIdentity(pid=os.getpid(), start_time_ticks=0, boot_id="local"),
                relocates=relocates,
            )
        )
        if not isinstance(answer, Attached):
            raise ArenaError(f"the local pool refused {model_id}: {answer}")
        self._attached = answer
        device.connect(self)

    @classmethod
    def alone(
        cls,
        geometry: KVGeometry,
        *,
        num_blocks: int,
        namespaces: Mapping[str, int | None],
        model_id: str = "model",
        fingerprint: bytes = b"local",
        clock: Clock | None = None,
        delivery: Delivery = "inline",
        seed: int = 0,
        relocates: bool = False,
        num_extents: int = 1,
    ) -> LocalPool:
        """A device of its own with `num_blocks` blocks, for one model; `namespaces`: name → limit in blocks."""
        data_bytes = num_blocks * geometry.block_bytes
        device = LocalDevice(data_bytes=data_bytes, extent_bytes=data_bytes // num_extents, clock=clock)
        for name, limit in namespaces.items():
            limit_bytes = None if limit is None else limit * geometry.block_bytes
            device.set_quota(NamespaceId(name), ModelId(model_id), limit_bytes=limit_bytes)
        return device.attach(
            geometry,
            model_id=ModelId(model_id),
            fingerprint=fingerprint,
            delivery=delivery,
            seed=seed,
            relocates=relocates,
        )

    # ---- port.PoolPort

    def bind(self, on_answer: OnAnswer, on_event: OnEvent) -> None:
        self._on_answer, self._on_event = on_answer, on_event

    def send(self, command: EngineCommand) -> None:
        answer = self.deny(command) if self.deny is not None else None
        if answer is None:
            answer = self._apply(command)
        on_answer, given = self._on_answer, answer
        if on_answer is not None:
            self._answers.hand_over(lambda: on_answer(command, given))
        self.device.pass_on_events()

    async def ask(self, command: EngineCommand) -> AnyAnswer:
        """The answer to a command, which then does not go to where `bind` said."""
        answer = self._apply(command)
        self.device.pass_on_events()
        return answer

    def add_format(self, geometry: KVGeometry, fingerprint: bytes) -> HostMemory:
        """The memory as sequences of one more precision see it. Raises ArenaError if the pool refuses."""
        answer = self._apply(AddFormat(lease_id=self.lease_id, geometry=geometry, fingerprint=fingerprint))
        if not isinstance(answer, FormatAdded):
            raise ArenaError(f"the local pool refused a format: {answer}")
        return HostMemory(self.device.data, geometry)

    def _apply(self, command: EngineCommand) -> AnyAnswer:
        self._call_no += 1
        stamped: EngineCommand = msgspec.structs.replace(command, lease_id=self.lease_id, call_no=self._call_no)
        answer = self.device.apply(stamped)
        if isinstance(answer, Refused) and answer.error in ("CallOrder", "StaleLease"):
            self._call_no -= 1
        return answer

    def may_emit(self) -> bool:
        return self.device.generation(self._attached.lease_slot) == self._attached.generation

    # ---- delivery

    def take_events(self, state: PoolState) -> None:
        """Queues the lease's new events."""
        on_event = self._on_event
        try:
            events = state.events_after(self.lease_id, self._event_no)
        except StaleLease:
            return  # the next answer says so
        for event in events:
            self._event_no = event.event_no
            if on_event is not None:
                self._events.hand_over(_call(on_event, event))

    def deliver_answers(self, most: int | None = None) -> int:
        """Manual delivery: hands over the next answers; returns how many."""
        return self._answers.deliver(most)

    def deliver_events(self, most: int | None = None) -> int:
        """Manual delivery: hands over the next events; returns how many."""
        return self._events.deliver(most)

    @property
    def has_threads(self) -> bool:
        """Whether answers and events come later, from threads."""
        return self._delivery == "threads"

    def close(self) -> None:
        """Ends the delivery threads."""
        self._answers.close()
        self._events.close()


def _call(on_event: OnEvent, event: AnyEvent) -> Callable[[], None]:
    return lambda: on_event(event)
