"""A ring of messages in shared memory, from one process of a node to another: the hop between two stages of a node.

    0      magic · capacity in bytes
    64     sent (futex word)         128   taken (futex word)
    192    bytes written in total    256   bytes read in total      320   closed
    384    capacity: messages one after the other, each 64 bytes with its length, then its bytes, 64-byte aligned;
           what does not fit before the end starts anew, behind a length of SKIP

One writer and one reader, each one thread. The writer sleeps while there is no room (back-pressure), the reader while
there is no message. Nobody spins. Who sleeps looks now and then whether the other process still lives.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from remora.cache_actors.futex import Futex
from remora.platform.base.errors import StageLost

Bytes = NDArray[np.uint8]

_MAGIC: Final = 0x31_474E_4952_4D52  # "RMRING1"
_LINE: Final = 64
_SENT, _TAKEN, _WRITTEN, _READ, _CLOSED, _DATA = (_LINE * line for line in range(1, 7))
_SKIP: Final = 2**64 - 1
#: Sleepers look this often whether the other side lives.
CHECK_S: Final = 0.1


def message_room(num_bytes: int) -> int:
    """What a message takes in the ring."""
    return _LINE + -(-num_bytes // _LINE) * _LINE


def _capacity(max_message_bytes: int, num_messages: int) -> int:
    # With padding before a message that starts anew, an empty ring has room for one only if it could hold two.
    return message_room(max_message_bytes) * max(2, num_messages)


def _head(capacity: int) -> bytes:
    return np.array([_MAGIC, capacity], np.uint64).tobytes()


class Ring:
    """One end of a mapped ring."""

    def __init__(self, mapping: mmap.mmap, name: str, *, peer_lives: Callable[[], bool]) -> None:
        """Use `open` or `private`. Raises StageLost when the mapping is no ring; `name` is for messages."""
        self.name: Final = name
        self._mapping = mapping
        whole: Bytes = np.frombuffer(mapping, np.uint8)
        words = whole[:_DATA].view(np.uint64)
        if int(words[0]) != _MAGIC or int(words[1]) != len(whole) - _DATA:
            raise StageLost(f"{name}: is no channel of a pipeline")
        self._data = whole[_DATA:]
        self._sent, self._taken = Futex(mapping, _SENT), Futex(mapping, _TAKEN)
        self._num_written = words[_WRITTEN // 8 : _WRITTEN // 8 + 1]
        self._num_read = words[_READ // 8 : _READ // 8 + 1]
        self._closed = words[_CLOSED // 8 : _CLOSED // 8 + 1]
        self._peer_lives = peer_lives
        #: Bytes that the message in work moves its own counter on.
        self._step_bytes = 0
        #: Entered between the bytes of a message and its counter: taking a lock orders memory on every processor.
        self._order = threading.Lock()

    @staticmethod
    def create(path: Path, *, max_message_bytes: int, num_messages: int) -> None:
        """Makes the file, allocated whole, with room for so many of the largest messages.

        Raises StageLost when there is no memory for it.
        """
        capacity = _capacity(max_message_bytes, num_messages)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # A sparse file would die by SIGBUS at the first write that finds no memory; this fails here and now.
            os.posix_fallocate(fd, 0, _DATA + capacity)
            os.pwrite(fd, _head(capacity), 0)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise StageLost(
                f"{path}: cannot allocate {_DATA + capacity} bytes for a pipeline's channel: {error.strerror}; raise "
                f"the size of {path.parent}, or lower max_step_tokens or max_num_seqs"
            ) from None
        finally:
            os.close(fd)

    @staticmethod
    def open(path: Path, *, peer_lives: Callable[[], bool]) -> Ring:
        """Maps a file that `create` has made. Raises StageLost when it is not there or no ring."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise StageLost(f"{path}: the channel of a pipeline cannot be opened: {error.strerror}") from None
        try:
            mapping = mmap.mmap(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)
        return Ring(mapping, str(path), peer_lives=peer_lives)

    @staticmethod
    def private(name: str, *, max_message_bytes: int, num_messages: int) -> tuple[Ring, Ring]:
        """The writer's and the reader's end of one between two threads of this process."""
        capacity = _capacity(max_message_bytes, num_messages)
        mapping = mmap.mmap(-1, _DATA + capacity)
        head = _head(capacity)
        mapping[: len(head)] = head
        return Ring(mapping, name, peer_lives=lambda: True), Ring(mapping, name, peer_lives=lambda: True)

    @property
    def capacity(self) -> int:
        return len(self._data)

    @property
    def num_waiting_bytes(self) -> int:
        return int(self._num_written[0]) - int(self._num_read[0])

    def reserve(self, num_bytes: int, deadline_s: float) -> Bytes:
        """Where to write the next message; it is sent by `commit`. Waits for room.

        Raises StageLost when the reader is gone, or makes no room until `deadline_s` (time.monotonic).
        """
        room = message_room(num_bytes)
        if 2 * room > self.capacity:
            raise StageLost(f"{self.name}: a message of {num_bytes} bytes in a channel of {self.capacity}")
        at = int(self._num_written[0]) % self.capacity
        padding = self.capacity - at if at + room > self.capacity else 0

        def is_full() -> bool:
            return self.num_waiting_bytes + padding + room > self.capacity

        while is_full():
            self._sleep(self._taken, is_full, deadline_s)
        self._check_open()
        if padding:
            self._data[at : at + 8].view(np.uint64)[0] = _SKIP
            at = 0
        self._data[at : at + 8].view(np.uint64)[0] = num_bytes
        self._step_bytes = padding + room
        return self._data[at + _LINE : at + _LINE + num_bytes]

    def commit(self) -> None:
        """Sends what `reserve` gave."""
        with self._order:
            self._num_written[0] += np.uint64(self._step_bytes)
        self._sent.advance_and_wake()

    def has_message(self) -> bool:
        return self.num_waiting_bytes > 0

    def peek(self, deadline_s: float) -> Bytes:
        """The oldest message, in place until `release`. Waits for one.

        Raises StageLost when the ring is closed, the writer is gone, or nothing comes until `deadline_s`.
        """
        while not self.has_message():
            self._sleep(self._sent, lambda: not self.has_message(), deadline_s)
        with self._order:
            at = int(self._num_read[0]) % self.capacity
            padding = 0
        num_bytes = int(self._data[at : at + 8].view(np.uint64)[0])
        if num_bytes == _SKIP:
            at, padding = 0, self.capacity - at
            num_bytes = int(self._data[:8].view(np.uint64)[0])
        self._step_bytes = padding + message_room(num_bytes)
        return self._data[at + _LINE : at + _LINE + num_bytes]

    def release(self) -> None:
        """Gives the room of the oldest message back to the writer."""
        with self._order:
            self._num_read[0] += np.uint64(self._step_bytes)
        self._taken.advance_and_wake()

    def close(self) -> None:
        """Tells the other side, which still gets what was sent, and wakes it. The mapping goes with the last array
        that refers to it; the file stays."""
        self._closed[0] = 1
        self._sent.wake()
        self._taken.wake()

    def _check_open(self) -> None:
        if self._closed[0]:
            raise StageLost(f"{self.name}: the other side has closed the channel")

    def _sleep(self, word: Futex, must_wait: Callable[[], bool], deadline_s: float) -> None:
        seen = word.value
        if not must_wait():
            return
        self._check_open()
        now_s = time.monotonic()
        if now_s >= deadline_s:
            raise StageLost(f"{self.name}: nothing came from the other side in time")
        word.wait(seen, min(CHECK_S, deadline_s - now_s))
        if word.value == seen and must_wait() and not self._peer_lives():
            raise StageLost(f"{self.name}: the process at the other side is gone")
