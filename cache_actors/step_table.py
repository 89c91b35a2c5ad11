"""The shared file behind a step lock: who takes part, who waits, who holds.

    0     magic · holder (slot + 1, 0 = nobody) · virtual clock · favoured (slot + 1) · favoured until · slots used
    128   64 slots of 128 bytes: pid · start time · state · start tag · finish tag · weight · since · used · wake word ·
          group

Everything but the wake words is read and written under an flock, which the kernel drops when its holder dies. Each
change is a sequence of single-word writes in an order that leaves a usable table after any prefix of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Final

from remora.cache_actors.futex import Futex
from remora.cache_actors.process_watch import start_time_ticks

MAX_SLOTS: Final = 64
_SLOT_WORDS: Final = 16
_MAGIC: Final = 0x31_5045_5453_4D52  # "RMSTEP1"
_FILE_BYTES: Final = 128 * (1 + MAX_SLOTS)
_HOLDER, _VIRTUAL_CLOCK, _FAVOURED, _FAVOURED_UNTIL, _NUM_SLOTS = 1, 2, 3, 4, 5
_PID, _START_TIME, _STATE, _START_TAG, _FINISH_TAG, _WEIGHT, _SINCE, _USED, _WAKE, _GROUP = range(10)


class SlotState(IntEnum):
    FREE = 0
    IDLE = 1
    WAITING = 2
    HOLDING = 3


def _words(index: int) -> property:
    """An unsigned word of a slot."""

    def get(self: Slot) -> int:
        return self._table.integers[self._first + index]

    def put(self: Slot, value: int) -> None:
        self._table.integers[self._first + index] = value

    return property(get, put)


def _floats(index: int) -> property:
    """A floating point word of a slot."""

    def get(self: Slot) -> float:
        return self._table.floats[self._first + index]

    def put(self: Slot, value: float) -> None:
        self._table.floats[self._first + index] = value

    return property(get, put)


class Slot:
    """One participant. Attributes are views of shared words; touch them inside `StepTable.critical()` only."""

    pid = _words(_PID)
    start_time = _words(_START_TIME)
    state = _words(_STATE)
    #: Virtual time at which the present request is due; order of service.
    start_tag = _floats(_START_TAG)
    #: Virtual time up to which the participant is served: its next request is not due before.
    finish_tag = _floats(_FINISH_TAG)
    weight = _floats(_WEIGHT)
    #: Monotonic second since which it waits, or holds.
    since = _floats(_SINCE)
    #: Seconds held, in total.
    used = _floats(_USED)
    #: Participants of one group have one share together; 0: alone.
    group = _words(_GROUP)

    def __init__(self, table: StepTable, index: int) -> None:
        self._table = table
        self._first = _SLOT_WORDS * (1 + index)
        self.index = index
        self.futex = Futex(table.mapping, 8 * (self._first + _WAKE))

    def process_lives(self) -> bool:
        """Whether the participant's process still runs (zombies of unreaped children count as dead)."""
        if self.pid == os.getpid():
            return True
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                stat = file.read()
        except (FileNotFoundError, ProcessLookupError):
            return False
        state, *fields = stat[stat.rindex(b")") + 2 :].split()
        return int(fields[18]) == self.start_time and state not in (b"Z", b"X")


class StepTable:
    """A mapped table file, created when missing."""

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            if os.fstat(self._fd).st_size < _FILE_BYTES:
                os.posix_fallocate(self._fd, 0, _FILE_BYTES)
            self.mapping = mmap.mmap(self._fd, _FILE_BYTES)
            self._bytes = memoryview(self.mapping)
            self.integers = self._bytes.cast("Q")
            self.floats = self._bytes.cast("d")
            if self.integers[0] != _MAGIC:
                self._bytes[8:] = bytes(_FILE_BYTES - 8)
                self.integers[0] = _MAGIC
            self.slots: Final = tuple(Slot(self, index) for index in range(MAX_SLOTS))
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def critical(self) -> Iterator[None]:
        """The short exclusive section of all processes that use the file."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def join(self, weight: float, group: int = 0) -> Slot:
        """Takes a free slot, or one whose process is dead. Raises OSError when all are taken by living processes."""
        start_time = start_time_ticks(os.getpid())
        assert start_time is not None
        with self.critical():
            for slot in self.slots:
                if slot.state != SlotState.FREE and slot.process_lives():
                    continue
                if self.holder is slot:
                    self.holder = None
                if self.favoured is slot:
                    self.favour(None, 0.0)
                slot.state = SlotState.FREE
                slot.pid, slot.start_time = os.getpid(), start_time
                slot.weight, slot.used, slot.start_tag, slot.finish_tag = weight, 0.0, 0.0, 0.0
                slot.group = group
                slot.finish_tag = max((each.finish_tag for each in self.others_of(slot)), default=0.0)
                slot.state = SlotState.IDLE
                self.integers[_NUM_SLOTS] = max(self.integers[_NUM_SLOTS], slot.index + 1)
                return slot
        raise OSError(f"{self.path}: all {MAX_SLOTS} slots are taken")

    def slots_in_use(self) -> tuple[Slot, ...]:
        """Slots that were ever taken; only these need looking at."""
        return self.slots[: self.integers[_NUM_SLOTS]]

    def others_of(self, slot: Slot) -> list[Slot]:
        """The other participants of the slot's group."""
        return [
            other
            for other in self.slots_in_use()
            if slot.group and other.group == slot.group and other is not slot and other.state != SlotState.FREE
        ]

    @property
    def holder(self) -> Slot | None:
        number = self.integers[_HOLDER]
        return self.slots[number - 1] if 0 < number <= MAX_SLOTS else None

    @holder.setter
    def holder(self, slot: Slot | None) -> None:
        self.integers[_HOLDER] = 0 if slot is None else slot.index + 1

    @property
    def virtual_clock(self) -> float:
        """Start tag of the latest turn: never goes back. Who joins or wakes up is due no earlier."""
        return self.floats[_VIRTUAL_CLOCK]

    @virtual_clock.setter
    def virtual_clock(self, value: float) -> None:
        self.floats[_VIRTUAL_CLOCK] = value

    @property
    def favoured(self) -> Slot | None:
        """Who may come back first until `favoured_until`, while others wait."""
        number = self.integers[_FAVOURED]
        return self.slots[number - 1] if 0 < number <= MAX_SLOTS else None

    @property
    def favoured_until(self) -> float:
        return self.floats[_FAVOURED_UNTIL]

    def favour(self, slot: Slot | None, until_s: float) -> None:
        self.floats[_FAVOURED_UNTIL] = until_s
        self.integers[_FAVOURED] = 0 if slot is None else slot.index + 1

    def close(self) -> None:
        """Unmaps the file; it stays."""
        for slot in self.slots:
            slot.futex.release()
        for view in (self.floats, self.integers, self._bytes):
            view.release()
        self.mapping.close()
        os.close(self._fd)
