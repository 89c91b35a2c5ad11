"""Where the packed weights of a decoder come from: another process of the node, the disk, or the model's files.

    shared   a living process has them in memory: mapped, not copied (cache_actors/weight_share.py)
    cached   an earlier start has left them on disk (cache_actors/weight_cache.py)
    packed   from the model's files; then kept on disk, behind the caller's back

Where Linux gives no huge pages to shared memory, or none of it, every process has its own copy: reading weights from
small pages would make each step slower.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import threading
from collections.abc import Callable
from typing import Literal, NamedTuple

from remora.cache_actors.weight_cache import WeightCache
from remora.cache_actors.weight_share import WeightShare
from remora.kernels.base import DecoderShape, Weights
from remora.kernels.native.decoder import NativeDecoder
from remora.kernels.native.packed_weights import PackedManifest, PackedWeights, max_packed_bytes, packing_id
from remora.kernels.native.weight_memory import WeightMemory, shared_memory_is_fast
from remora.namespaces.geometry import KVGeometry
from remora.platform.base.config import ClusterConfig
from remora.platform.base.errors import IntegrityError, KernelError
from remora.platform.base.paths import default_state_dir

logger = logging.getLogger(__name__)

Origin = Literal["shared", "cached", "packed"]


class StoredDecoder(NamedTuple):
    decoder: NativeDecoder
    origin: Origin
    #: Whether other processes of the node use, or can come to use, the same memory.
    is_shared: bool
    num_bytes: int


class WeightStorage:
    """Of one cluster on one node."""

    def __init__(self, share: WeightShare, cache: WeightCache) -> None:
        self._share = share
        self._cache = cache
        self._keeping: threading.Thread | None = None

    @classmethod
    def of_cluster(cls, cluster: ClusterConfig, *, num_threads: int | None) -> WeightStorage:
        """As replicas and stage workers have it. `num_threads`: None: the cores of this process."""
        directory = (cluster.state_dir or default_state_dir()) / "packed-weights"
        cache = WeightCache(
            directory, cluster.packed_weights_bytes, num_threads=num_threads or len(os.sched_getaffinity(0))
        )
        return cls(WeightShare(directory, cluster.name), cache)

    def make_decoder(
        self,
        weights_id: str,
        shape: DecoderShape,
        geometry: KVGeometry,
        num_threads: int,
        *,
        read: Callable[[], Weights],
        check_room: Callable[[int], None],
    ) -> StoredDecoder:
        """A decoder with the weights of that id and shape. `read` is asked for them only where they are nowhere packed;
        `check_room` gets the bytes that are about to be taken, and raises where they are too many.

        Raises KernelError as NativeDecoder does.
        """
        key = hashlib.blake2b(f"{weights_id} {packing_id()}".encode(), digest_size=12).hexdigest()
        make = functools.partial(NativeDecoder, shape, geometry=geometry, num_threads=num_threads)
        if shared_memory_is_fast():
            try:
                return self._shared(key, shape, make, read, check_room)
            except (OSError, IntegrityError) as error:
                logger.warning("weights are not shared with other replicas of this node: %s", error)
        else:
            logger.info("weights are not shared: this system gives no huge pages to shared memory (Linux 6.1 does)")
        memory = WeightMemory(max_packed_bytes(shape))
        decoder, origin = self._fill(key, memory, make, read, check_room)
        return StoredDecoder(decoder, origin, False, decoder.manifest.num_bytes)

    def settle(self) -> None:
        """Waits for what is being written to disk."""
        if self._keeping is not None:
            self._keeping.join()

    def _shared(
        self,
        key: str,
        shape: DecoderShape,
        make: Callable[..., NativeDecoder],
        read: Callable[[], Weights],
        check_room: Callable[[int], None],
    ) -> StoredDecoder:
        with self._share.locked(key) as index:
            found = index.find()
            if found is not None:
                return StoredDecoder(make(found), "shared", True, found.manifest.num_bytes)
            draft = index.draft(max_packed_bytes(shape))
            decoder, origin = self._fill(key, draft.memory, make, read, check_room)
            index.publish(draft, decoder.manifest)
        return StoredDecoder(decoder, origin, True, decoder.manifest.num_bytes)

    def _fill(
        self,
        key: str,
        memory: WeightMemory,
        make: Callable[..., NativeDecoder],
        read: Callable[[], Weights],
        check_room: Callable[[int], None],
    ) -> tuple[NativeDecoder, Origin]:
        cached = self._cache.find(key)
        if cached is not None:
            check_room(cached.manifest.num_bytes)
            memory.allocate(cached.manifest.num_bytes)
            if self._cache.read(cached, memory.bytes_view(cached.manifest.num_bytes)):
                try:
                    return make(PackedWeights(cached.manifest, memory)), "cached"
                except KernelError as error:
                    self._cache.discard(cached.path, str(error))
        decoder = make(read(), memory=memory)
        self._keeping = threading.Thread(
            target=self._keep, args=(key, decoder.manifest, memory), name="keep-weights", daemon=True
        )
        self._keeping.start()
        return decoder, "packed"

    def _keep(self, key: str, manifest: PackedManifest, memory: WeightMemory) -> None:
        self._cache.keep(key, manifest, memory.bytes_view(manifest.num_bytes))
