"""Brings sealed blocks from another pool, or in another precision from any: held there, copied piece by piece, verified
here, and converted if they must be.

    hold ─► read a piece ─► compare checksums ─► re-encode ─► hand it over ─► the next ...  ─► let go
            (the receiver gives its buffer back: at most NUM_BUFFERS pieces are on their way)

Nothing that goes wrong is more than a miss: the source is gone, does not answer in time, or a checksum differs. Blocks
are handed over whole and in order, so that what came is a prefix and the rest can be computed.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from remora.cache_actors.block_exports import checksum
from remora.cache_actors.port import KVSource, LoadedBlocks, LoadEnd, LoadOrder, LoadPath
from remora.kernels.reencoder import HostMemory, reencode_blocks
from remora.namespaces.hold_commands import Hold
from remora.platform.base.errors import RemoraError, Unavailable
from remora.platform.base.ids import HoldId, LeaseId

logger = logging.getLogger(__name__)

#: Bytes that cross at a time, at least one block: a millisecond of copying between two steps of the engine.
PIECE_BYTES: Final = 4 * 1024 * 1024
NUM_BUFFERS: Final = 3
#: What has not come by then is computed.
LOAD_TIMEOUT_S: Final = 10.0
#: Blocks are held a little longer than they are read.
HOLD_S: Final = LOAD_TIMEOUT_S + 5.0
MAX_PARALLEL_LOADS: Final = 4


class HeldReader(Protocol):
    """Blocks of a chain that a source holds for this reader."""

    @property
    def path(self) -> LoadPath: ...

    @property
    def num_blocks(self) -> int:
        """Leading blocks of the chain."""
        ...

    @property
    def block_bytes(self) -> int: ...

    def read(self, first: int, into_NB: NDArray[np.uint8]) -> tuple[int, ...]:
        """Copies consecutive blocks; returns their checksums as the source has them.

        Raises Unavailable when they are not held until the end of the copy: the bytes are then worth nothing.
        """
        ...

    def close(self) -> None:
        """Lets the blocks go; does not wait."""
        ...


class SourcePool(Protocol):
    """Another pool as a reader sees it. Called from threads."""

    def hold(self, command: Hold) -> HeldReader:
        """Raises Unavailable when it does not answer."""
        ...


class ThreadedLoader:
    """port.BlockLoader with a few threads that live while there are loads. `find_source` makes the way to a pool."""

    def __init__(self, find_source: Callable[[KVSource], SourcePool], *, piece_bytes: int = PIECE_BYTES) -> None:
        self._find_source = find_source
        self._piece_bytes = piece_bytes
        self._buffers: queue.SimpleQueue[NDArray[np.uint8]] = queue.SimpleQueue()
        for _ in range(NUM_BUFFERS):
            self._buffers.put(np.empty(0, np.uint8))  # grows when it is needed first
        self._lock = threading.Lock()
        self._waiting: deque[_Load] = deque()
        self._num_threads = 0

    def start(
        self, order: LoadOrder, on_blocks: Callable[[LoadedBlocks], None], on_end: Callable[[LoadEnd], None]
    ) -> Callable[[], None]:
        load = _Load(order, on_blocks, on_end)
        with self._lock:
            self._waiting.append(load)
            is_short = self._num_threads < MAX_PARALLEL_LOADS
            self._num_threads += is_short
        if is_short:
            threading.Thread(target=self._work, name="kv-load", daemon=True).start()
        return load.cancelled.set

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._num_threads -= 1
                    return
                load = self._waiting.popleft()
            self._run(load)

    def _run(self, load: _Load) -> None:
        problem = ""
        try:
            if load.time_left_s <= 0:
                raise Unavailable("too many loads are under way")
            self._load(load)
        except RemoraError as error:
            problem = str(error)
        except Exception as error:  # whatever it is, the tokens can be computed
            logger.exception("loading blocks from %s failed", load.order.source.pool_id)
            problem = f"{type(error).__name__}: {error}"
        if problem and not load.cancelled.is_set():
            logger.warning("blocks from pool %s: %s; the rest is computed", load.order.source.pool_id, problem)
        num_bytes = load.num_blocks * load.order.source_block_bytes
        load.on_end(LoadEnd(problem, load.path, load.num_blocks, num_bytes, load.num_damaged))

    def _load(self, load: _Load) -> None:
        order = load.order
        reader = self._find_source(order.source).hold(
            Hold(
                lease_id=LeaseId(""),
                hold_id=HoldId(uuid.uuid4().hex),
                namespace_id=order.namespace_id,
                fingerprint=order.fingerprint,
                hashes=order.hashes,
                hold_s=HOLD_S,
            )
        )
        try:
            if reader.num_blocks <= order.first:
                return
            if reader.block_bytes != order.source_block_bytes:
                raise Unavailable(f"its blocks have {reader.block_bytes} bytes, not {order.source_block_bytes}")
            load.path = reader.path
            logger.info(
                "blocks %d to %d come from pool %s: %s",
                order.first, reader.num_blocks - 1, order.source.pool_id, reader.path,
            )  # fmt: skip
            most = max(1, self._piece_bytes // order.source_block_bytes)
            for first in range(order.first, reader.num_blocks, most):
                count = min(most, reader.num_blocks - first)
                if not self._pass_on(load, reader, first, count):
                    return
        finally:
            reader.close()

    def _pass_on(self, load: _Load, reader: HeldReader, first: int, count: int) -> bool:
        """Reads one piece and hands over what is sound of it; False if that is not all."""
        size = load.order.source_block_bytes
        buffer = self._take_buffer(load, max(size, self._piece_bytes))
        try:
            into_NB = buffer[: count * size].reshape(count, size)
            expected = reader.read(first, into_NB)
            num_sound = 0
            while num_sound < count and checksum(into_NB[num_sound]) == expected[num_sound]:
                num_sound += 1
        except BaseException:
            self._buffers.put(buffer)
            raise
        if num_sound < count:
            load.num_damaged += 1
            source = load.order.source.pool_id
            logger.error("block %d from pool %s has another checksum here than there", first + num_sound, source)
        load.num_blocks += num_sound
        try:
            data_NB = _as_wanted(load.order, into_NB[:num_sound])
        except BaseException:
            self._buffers.put(buffer)
            raise
        # An empty piece only returns its buffer.
        load.on_blocks(LoadedBlocks(first, data_NB, lambda: self._buffers.put(buffer)))
        return num_sound == count

    def _take_buffer(self, load: _Load, num_bytes: int) -> NDArray[np.uint8]:
        while True:
            if load.cancelled.is_set():
                raise Unavailable("the load was given up")
            if load.time_left_s <= 0:
                raise Unavailable(f"not all blocks came within {LOAD_TIMEOUT_S:g} s")
            try:
                buffer = self._buffers.get(timeout=min(0.1, load.time_left_s))
            except queue.Empty:
                continue
            return buffer if len(buffer) >= num_bytes else np.empty(num_bytes, np.uint8)


def _as_wanted(order: LoadOrder, data_NB: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The blocks in the precision that they are wanted in. Raises KernelError when no kernel can do that."""
    if order.source_geometry is None or not len(data_NB):
        return data_NB
    out_NB = np.zeros((len(data_NB), order.geometry.block_bytes), np.uint8)
    blocks = np.arange(len(data_NB), dtype=np.int32)
    source = HostMemory(data_NB.reshape(-1), order.source_geometry)
    reencode_blocks(source, HostMemory(out_NB.reshape(-1), order.geometry), blocks, blocks)
    return out_NB


class _Load:
    """One load, in its thread."""

    def __init__(
        self, order: LoadOrder, on_blocks: Callable[[LoadedBlocks], None], on_end: Callable[[LoadEnd], None]
    ) -> None:
        self.order = order
        self.on_blocks = on_blocks
        self.on_end = on_end
        self.cancelled = threading.Event()
        self.path: LoadPath | None = None
        self.num_blocks = 0
        self.num_damaged = 0
        self._deadline_s = time.monotonic() + LOAD_TIMEOUT_S

    @property
    def time_left_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())
