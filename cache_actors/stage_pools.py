"""The pools of a pipeline's stages, as the one pool that an engine knows (port.PoolPort).

    engine ─ send ─► StageBook (namespaces/) ─ calls ─► lease of stage 0, 1, ..
           ◄─────────────────────────────── answers, events

The engine's block ids are stage 0's. Where the same blocks lie in the other stages is asked for each step (`physical`).
A stage can be lost and come back under a new lease; stage 0's lease is the replica's own, and the engine's end with it.

Shapes: S sequences of a step, B table columns.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from remora.cache_actors.port import EngineCommand, OnAnswer, OnEvent, PoolPort
from remora.namespaces.commands import AnyAnswer, AnyEvent
from remora.namespaces.geometry import KVGeometry
from remora.namespaces.stage_book import StageBook
from remora.platform.base.errors import IntegrityError, StageLost
from remora.platform.base.ids import SequenceId

Int32 = NDArray[np.int32]


class StagePools:
    """`select` and `physical` are for the engine's thread; everything else may be called from any."""

    def __init__(self, ports: Sequence[PoolPort], geometries: Sequence[KVGeometry]) -> None:
        """The leases of all stages, in order, with the geometry of each."""
        self._book = StageBook([geometry.geometry_id for geometry in geometries])
        self._ports = list(ports)
        self._on_answer: OnAnswer | None = None
        self._on_event: OnEvent | None = None
        self._lock = threading.RLock()
        self._is_carrying = False
        #: The next step's sequences and how many blocks of each it may use.
        self._rows: Sequence[tuple[SequenceId, int]] = ()
        for stage, port in enumerate(self._ports):
            self._listen(stage, port)

    @property
    def num_stages(self) -> int:
        return self._book.num_stages

    # ---- port.PoolPort

    def bind(self, on_answer: OnAnswer, on_event: OnEvent) -> None:
        self._on_answer, self._on_event = on_answer, on_event

    def send(self, command: EngineCommand) -> None:
        with self._lock:
            self._book.command(command)
            self._carry()

    def may_emit(self) -> bool:
        """Of stage 0. What a lost stage has a part in is not taken from the pipeline: see `check_stages`."""
        return self._ports[0].may_emit()

    # ---- stages that go and come

    def check_stages(self) -> None:
        """Raises StageLost unless every stage's memory is still ours: before the result of a step is used."""
        for stage, port in enumerate(self._ports):
            if stage and not (self._book.is_up(stage) and port.may_emit()):
                raise StageLost(f"stage {stage} has lost its lease on its pool")

    def lose(self, stage: int, reason: str) -> None:
        """The stage's lease is gone. The engine is told to release what runs; what comes waits for `restore`."""
        with self._lock:
            self._book.lose(stage, reason)
            self._carry()

    def lose_all(self, reason: str) -> None:
        """Every stage but the engine's own."""
        for stage in range(1, self.num_stages):
            self.lose(stage, reason)

    def restore(self, stage: int, port: PoolPort) -> None:
        """The stage has a new lease."""
        with self._lock:
            self._ports[stage] = port
            self._listen(stage, port)
            self._book.restore(stage)
            self._carry()

    # ---- tables (deployments/pipeline/base.py: StageTables)

    def select(self, rows: Sequence[tuple[SequenceId, int]]) -> None:
        """The sequences of the next step in the order of its rows, and how many blocks each has in stage 0."""
        self._rows = rows

    def physical(self, stage: int, geometry: KVGeometry, logical_SB: Int32) -> Int32:
        """Block ids of a stage for the rows that were selected; columns behind a row's blocks are 0.

        Raises StageLost for a sequence that a stage has lost, IntegrityError for one that it never had.
        """
        physical_SB = np.zeros_like(logical_SB)
        for row, (sequence_id, num_blocks) in enumerate(self._rows[: len(logical_SB)]):
            blocks = self._book.blocks(sequence_id, stage)[:num_blocks]
            if len(blocks) < num_blocks:
                if not self._book.is_intact(sequence_id):
                    raise StageLost(f"stage {stage} was lost with the blocks of {sequence_id}")
                raise IntegrityError(f"{sequence_id}: stage {stage} has {len(blocks)} of {num_blocks} blocks")
            width = min(num_blocks, physical_SB.shape[1])
            physical_SB[row, :width] = blocks[:width]
        return physical_SB

    def check_integrity(self) -> None:
        """Raises IntegrityError when tables are not complete or the books do not agree."""
        with self._lock:
            self._book.check_integrity()

    # ---- inside

    def _listen(self, stage: int, port: PoolPort) -> None:
        port.bind(partial(self._answered, stage, port), partial(self._happened, stage, port))

    def _answered(self, stage: int, port: PoolPort, command: EngineCommand, answer: AnyAnswer) -> None:
        with self._lock:
            # A lease that is lost answers what was still queued; the book has closed those accounts.
            if self._ports[stage] is port and self._book.is_up(stage):
                self._book.answer(stage, answer)
                self._carry()

    def _happened(self, stage: int, port: PoolPort, event: AnyEvent) -> None:
        with self._lock:
            if self._ports[stage] is port and self._book.is_up(stage):
                self._book.event(stage, event)
                self._carry()

    def _carry(self) -> None:
        """Empties the book's queues. A pool in this process answers within `send`: its answers queue up behind."""
        if self._is_carrying:
            return
        self._is_carrying = True
        book = self._book
        try:
            while True:
                if book.calls:
                    stage, command = book.calls.popleft()
                    self._ports[stage].send(command)  # type: ignore[arg-type]  # the book says engine's commands only
                elif book.answers:
                    said, answer = book.answers.popleft()
                    if self._on_answer is not None:
                        self._on_answer(said, answer)  # type: ignore[arg-type]
                elif book.events:
                    event = book.events.popleft()
                    if self._on_event is not None:
                        self._on_event(event)
                else:
                    return
        finally:
            self._is_carrying = False
