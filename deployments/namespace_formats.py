"""In which precision each namespace of a replica has its KV, and the memory that belongs to it.

The pool knows what every namespace's precision is; a replica looks when it starts, whenever a router connects, and when
it is told that something changed. New requests get the new precision, those that run keep theirs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from remora.cache_actors.pool_client import PoolClient
from remora.cache_actors.pool_messages import KVFormats
from remora.deployments.accuracy.gate import check_compatible_gate, check_gate
from remora.deployments.derivations import Derivations, derivations_of
from remora.deployments.model_card import NamespaceCard
from remora.deployments.models.kv_identity import KVIdentity
from remora.deployments.models.loaded_model import LoadedModel
from remora.kernels.base import KVMemory
from remora.namespaces.geometry import KVGeometry, KVPrecision
from remora.namespaces.quantise_commands import KVFormat, Quantise
from remora.platform.base.errors import RemoraError, Unavailable
from remora.platform.base.ids import LeaseId, NamespaceId
from remora.platform.base.model_config import ModelConfig

logger = logging.getLogger(__name__)


class NamespaceFormat(NamedTuple):
    """The arena in one precision, and what names the KV in it."""

    memory: KVMemory
    fingerprint: bytes
    #: KV of other fingerprints that sessions may bring into it.
    takes: Derivations


#: How old what is known of other precisions in the pool may be when a session's KV is looked for in them.
_LOOK_EVERY_S: Final = 1.0

AskFormats = Callable[[], Awaitable[KVFormats]]


class NamespaceFormats:
    """Of one replica. Changes on its event loop; `find` may be called from any thread."""

    def __init__(
        self,
        model: LoadedModel,
        config: ModelConfig,
        lease: PoolClient,
        namespace_ids: Iterable[NamespaceId],
        *,
        ask: AskFormats,
        state_dir: Path,
        others: Sequence[KVIdentity] = (),
    ) -> None:
        """`ask`: what the pool says; `others`: models whose KV this one may use. Until `start` every namespace has the
        model's precision."""
        self._model = model
        self._others = others
        self._config = config
        self._lease = lease
        self._ask = ask
        self._state_dir = state_dir
        own = self._format(lease.memory, model.fingerprint)
        self._ready: dict[KVPrecision, NamespaceFormat] = {model.geometry.kv_precision: own}
        self._formats = dict.fromkeys(namespace_ids, own)
        self._lock = asyncio.Lock()
        #: Other precisions of the model's KV that the pool may have blocks of, with their fingerprints.
        self._siblings: tuple[tuple[KVGeometry, bytes], ...] = ()
        self._looked_s = -_LOOK_EVERY_S
        #: Grows with every change of a namespace's precision.
        self.version = 0

    def find(self, namespace_id: NamespaceId) -> NamespaceFormat:
        """What new requests of the namespace get."""
        return self._formats[namespace_id]

    def siblings(self, namespace_id: NamespaceId) -> list[tuple[KVGeometry, bytes]]:
        """Other precisions than the namespace's in which its sessions may have KV, with their fingerprints."""
        own = self._formats[namespace_id].memory.geometry
        return [each for each in self._siblings if each[0] != own]

    def quantise_command(self, namespace_id: NamespaceId) -> Quantise:
        """What tells a pool to re-encode what the namespace has cached in other precisions into its own."""
        memory, fingerprint, *_ = self._formats[namespace_id]
        return Quantise(
            lease_id=LeaseId(""),
            namespace_id=namespace_id,
            target=KVFormat(geometry=memory.geometry, fingerprint=fingerprint),
            sources=tuple(
                KVFormat(geometry=geometry, fingerprint=other) for geometry, other in self.siblings(namespace_id)
            ),
        )

    def cards(self) -> dict[NamespaceId, NamespaceCard]:
        """What routers must know of each."""
        return {
            name: NamespaceCard(
                fingerprint=each.fingerprint, block_bytes=each.memory.geometry.block_bytes, takes=tuple(each.takes)
            )
            for name, each in self._formats.items()
        }

    async def prepare(self, namespace_id: NamespaceId, kv_precision: KVPrecision) -> NamespaceFormat:
        """Makes sure that the namespace could have this precision, without giving it.

        Raises ModelError when it, or KV of another model in it, failed its accuracy gate, KernelError when no kernel of
        the decoder has it, PoolError when the pool refuses.
        """
        found = self._ready.get(kv_precision)
        if found is not None and self._formats[namespace_id] is found:
            return found
        geometry, fingerprint = self._model.in_precision(kv_precision)
        # On a GPU kernels are compiled for it.
        await asyncio.to_thread(self._model.decoder.check_geometry, geometry)
        check_gate(self._config, geometry, fingerprint, self._state_dir, namespace=namespace_id)
        check_compatible_gate(self._config, self._model.kv_identity, self._others, kv_precision, self._state_dir)
        if found is None:
            memory = await self._lease.add_format(geometry, fingerprint)
            # Another call may have been faster: one memory a precision, so that a step has one pass for each.
            found = self._ready.setdefault(kv_precision, self._format(memory, fingerprint))
        return found

    async def start(self) -> None:
        """Takes over what the pool says. Raises like `prepare`."""
        async with self._lock:
            precisions = await self._look()
            for namespace_id in self._formats:
                self._set(namespace_id, await self.prepare(namespace_id, self._wanted(precisions, namespace_id)))

    async def refresh(self) -> None:
        """The same while requests run: a namespace whose precision cannot be had keeps the one it has."""
        async with self._lock:
            precisions = await self._look()
            for namespace_id in self._formats:
                try:
                    found = await self.prepare(namespace_id, self._wanted(precisions, namespace_id))
                except RemoraError as error:
                    logger.error("namespace %s keeps its KV precision: %s", namespace_id, error)
                else:
                    self._set(namespace_id, found)

    async def look_for_siblings(self) -> None:
        """Makes sure that other precisions that have come to the pool are known; does nothing if it has just looked.
        A pool that does not answer changes nothing."""
        if time.monotonic() - self._looked_s >= _LOOK_EVERY_S:
            try:
                await self._look()
            except Unavailable as error:
                logger.warning("other precisions in the pool stay as they are known: %s", error)

    async def _look(self) -> Mapping[NamespaceId, KVPrecision | None]:
        self._looked_s = time.monotonic()
        found = await self._ask()
        alike = {each.kv_precision for each in found.geometries if each.differs_in_precision_only(self._model.geometry)}
        self._siblings = tuple(self._model.in_precision(each) for each in sorted(alike))
        return found.precisions

    def _format(self, memory: KVMemory, fingerprint: bytes) -> NamespaceFormat:
        takes = derivations_of(self._model.kv_identity, self._others, memory.geometry.kv_precision)
        return NamespaceFormat(memory, fingerprint, takes)

    def _wanted(self, precisions: Mapping[NamespaceId, KVPrecision | None], namespace_id: NamespaceId) -> KVPrecision:
        return precisions.get(namespace_id) or self._model.geometry.kv_precision

    def _set(self, namespace_id: NamespaceId, found: NamespaceFormat) -> None:
        if self._formats[namespace_id] is not found:
            self._formats[namespace_id] = found
            self.version += 1
            logger.info("namespace %s has KV in %s/%s", namespace_id, *found.memory.geometry.kv_precision)
