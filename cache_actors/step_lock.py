"""The fair lock that lets the replicas of one device take turns, one engine step each (a StepGate).

Start-time fair queueing over used time: a request is due at max(virtual clock, end of the participant's last turn),
a turn of u seconds costs u / weight, and whoever is due first goes first. So busy participants share the time of the
device by weight, whatever the lengths of their steps; an idle one costs nothing and earns nothing. Nobody waits longer
than `MAX_WAIT_S` past others' turns. Between two turns of a participant that is owed more time than the waiting ones,
the device stays free for it for a moment (`FAVOUR_S`): without that, two participants would always alternate and
weights would have no effect. Participants of one group (the replicas of a model) have one share together: what one of
them uses makes all of them due later.

The lock keeps cores from being oversubscribed; it does not guard memory. So a holder that died is passed over when the
waiters notice (`CHECK_S`), and one that is stuck for `patience_s` loses its turn with a warning.
"""

from __future__ import annotations

import hashlib
import logging
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, NamedTuple

from remora.cache_actors.step_table import Slot, SlotState, StepTable
from remora.platform.base.errors import IntegrityError

logger = logging.getLogger(__name__)

#: Waiters look this often whether the holder still lives.
CHECK_S: Final = 0.05
#: A request that waited this long goes before all that are due earlier.
MAX_WAIT_S: Final = 1.0
#: Longest time the device stays free for a participant that is expected back.
FAVOUR_S: Final = 0.02
#: A single turn costs no more than this, so that one slow step (a first compilation) is not paid back for minutes.
MAX_CHARGE_S: Final = 1.0


class Usage(NamedTuple):
    """One participant as others see it."""

    pid: int
    weight: float
    used_s: float
    state: str


class StepLock:
    """One participant of a device's lock. `turn()` is for one thread at a time; not reentrant."""

    def __init__(self, path: Path, *, weight: float = 1.0, group: str = "", patience_s: float = 30.0) -> None:
        """Joins the lock of that file (one file a device). Participants that name the same group should have the same
        weight: it is that of the group. Raises OSError when the file cannot be opened or is full."""
        if not weight > 0:
            raise ValueError(f"weight must be positive: {weight}")
        self._table = StepTable(path)
        self._slot = self._table.join(weight, _group_number(group))
        self._patience_s = patience_s
        self._released_s = time.monotonic()
        #: Smoothed seconds from the end of a turn to the next request: tells whether waiting for this one pays.
        self._absence_s = 0.0
        self._turn = _Turn(self)

    def turn(self) -> AbstractContextManager[None]:
        """Blocks until it is this participant's turn; the turn ends with the context."""
        return self._turn

    def set_weight(self, weight: float) -> None:
        """Takes effect with the next turn."""
        if not weight > 0:
            raise ValueError(f"weight must be positive: {weight}")
        with self._table.critical():
            self._slot.weight = weight

    def acquire(self) -> None:
        """Blocks until it is this participant's turn."""
        table, me = self._table, self._slot
        now_s = time.monotonic()
        self._absence_s += 0.25 * (min(now_s - self._released_s, 1.0) - self._absence_s)
        with table.critical():
            if me.state != SlotState.IDLE:
                raise RuntimeError("this participant already waits for, or has, its turn")
            me.since = now_s
            me.start_tag = max(table.virtual_clock, me.finish_tag)
            me.state = SlotState.WAITING
            sleep_s = self._dispatch(now_s)
            granted, seen = table.holder is me, me.futex.value
        try:
            while not granted:
                me.futex.wait(seen, sleep_s)
                with table.critical():
                    if table.holder is not me:
                        sleep_s = self._dispatch(time.monotonic())
                    granted, seen = table.holder is me, me.futex.value
        except BaseException:  # KeyboardInterrupt: a waiter that went away must not be given the turn
            self._withdraw()
            raise

    def release(self) -> None:
        """Ends the turn and passes it on."""
        table, me = self._table, self._slot
        now_s = self._released_s = time.monotonic()
        with table.critical():
            used_s = now_s - me.since
            me.used += used_s
            me.finish_tag = me.start_tag + min(used_s, MAX_CHARGE_S) / me.weight
            me.state = SlotState.IDLE
            for other in table.others_of(me):
                other.finish_tag = max(other.finish_tag, me.finish_tag)
                if other.state == SlotState.WAITING:
                    other.start_tag = max(other.start_tag, me.finish_tag)
            if table.holder is not me:
                return  # the turn was taken away
            table.holder = None
            best = self._next_waiter(now_s)
            if best is None:
                return
            overdue = now_s - best.since > MAX_WAIT_S
            if me.finish_tag < best.start_tag and not overdue and self._absence_s < min(used_s, FAVOUR_S / 2):
                table.favour(me, now_s + min(2 * self._absence_s + 0.0005, FAVOUR_S))
                best.futex.advance_and_wake()  # it must now wake up by itself when the favour ends
            else:
                self._dispatch(now_s)

    def close(self) -> None:
        """Leaves; a turn that is held ends."""
        with self._table.critical():
            if self._table.favoured is self._slot:
                self._table.favour(None, 0.0)
        self._withdraw(SlotState.FREE)
        self._table.close()

    def usage(self) -> list[Usage]:
        """All participants, for metrics."""
        with self._table.critical():
            return [
                Usage(slot.pid, slot.weight, slot.used, SlotState(slot.state).name.lower())
                for slot in self._table.slots_in_use()
                if slot.state != SlotState.FREE
            ]

    def check_integrity(self) -> None:
        """Raises IntegrityError when the shared table contradicts itself."""
        with self._table.critical():
            holding = [slot.index for slot in self._table.slots_in_use() if slot.state == SlotState.HOLDING]
            holder = self._table.holder
            if holder is not None and holder.process_lives() and holding != [holder.index]:
                raise IntegrityError(f"slot {holder.index} has the turn, but slots {holding} think they do")

    def _withdraw(self, state: SlotState = SlotState.IDLE) -> None:
        """Neither waits nor holds any more."""
        with self._table.critical():
            self._slot.state = state
            if self._table.holder is self._slot:
                self._table.holder = None
                self._dispatch(time.monotonic())

    def _dispatch(self, now_s: float) -> float:
        """Gives a free device to whoever is next. Returns after how many seconds to look again."""
        table = self._table
        holder = table.holder
        if holder is not None:
            overdue = now_s - holder.since > self._patience_s
            if holder.process_lives() and not overdue:
                return CHECK_S
            if overdue:
                logger.warning(
                    "process %d holds its step for %.0f s: passing over it", holder.pid, now_s - holder.since
                )
                holder.state = SlotState.IDLE
            else:
                holder.state = SlotState.FREE
            table.holder = None
        favoured = table.favoured
        if favoured is not None:
            if favoured.state == SlotState.IDLE and now_s < table.favoured_until:
                return table.favoured_until - now_s
            table.favour(None, 0.0)
        best = self._next_waiter(now_s)
        if best is not None:
            table.virtual_clock = max(table.virtual_clock, best.start_tag)
            best.state = SlotState.HOLDING
            best.since = now_s
            table.holder = best
            if best is not self._slot:
                best.futex.advance_and_wake()
        return CHECK_S

    def _next_waiter(self, now_s: float) -> Slot | None:
        """Whoever waited too long, oldest first; else whoever is due first. Frees the slots of dead waiters."""
        waiting = [slot for slot in self._table.slots_in_use() if slot.state == SlotState.WAITING]
        waiting.sort(
            key=lambda slot: (
                (0, slot.since, 0.0) if now_s - slot.since > MAX_WAIT_S else (1, slot.start_tag, slot.since)
            )
        )
        for slot in waiting:
            if slot.process_lives():
                return slot
            slot.state = SlotState.FREE
        return None


def _group_number(name: str) -> int:
    """A word that stands for the name; 0 for none."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") if name else 0


class _Turn(AbstractContextManager[None]):
    def __init__(self, lock: StepLock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
