"""The sequences of a model whose layers lie on several devices, over the pools of all its stages.

    engine ── Admit ─► StageBook ── Admit(hashes) ────────────► pool of stage 0 ─► found c0 blocks
                                 ── Admit(first c0 hashes) ───► pool of stage 1 ─► found c1 <= c0
           ◄─ Admitted ─────────  all have found as many        ...

Each stage has its own blocks for the same tokens. A sequence runs when every stage has granted it, with the prefix that
all of them have; a stage that has found more lets go and is asked again with as many hashes. Stages are asked in order,
and who waits at one holds nothing of those behind it: sequences that wait for each other cannot form a ring. A pool
never evicts for another one: a block that only some stages still have is a miss, and ages out where it is left.

An extension is asked of all stages at once. What some grant and others refuse stays with the sequence, is not told, and
counts when it asks again. A stage that is lost ends its part of every sequence: those that run are told to go, those
that come wait until it is back, and find what its pool has kept.

No I/O: calls to pools, answers and events are left in queues for whoever carries them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple

import msgspec

from remora.namespaces.commands import (
    Admit,
    Admitted,
    AnyAnswer,
    AnyCommand,
    AnyEvent,
    Denied,
    Extend,
    Extended,
    ExtendItem,
    Grant,
    Granted,
    OverQuota,
    Preempt,
    Publish,
    Refused,
    Release,
    Released,
    Relocate,
    Relocated,
    Wait,
)
from remora.namespaces.stage_gather import STALE, Gather, first_wrong, published
from remora.namespaces.stage_run import StageRun
from remora.platform.base.errors import IntegrityError
from remora.platform.base.ids import GeometryId, SequenceId

#: Events of a pipeline are acknowledged to nobody, except those of stage 0 that are passed on as they are.
_NO_EVENT: Final = 0


class StageCall(NamedTuple):
    """To be sent to the pool of a stage. Its answer comes back by `answer`, in the order of the stage's calls."""

    stage: int
    command: AnyCommand


class StageBook:
    """One lease of each stage's pool, seen as one. Not thread-safe.

    Every command is answered once; answers to different commands may overtake each other.
    """

    def __init__(self, geometry_ids: Sequence[GeometryId]) -> None:
        """`geometry_ids`: of each stage's KV."""
        self.num_stages: Final = len(geometry_ids)
        self._geometry_ids = list(geometry_ids)
        self._is_up = [True] * self.num_stages
        #: What is to be carried to pools, and to the engine.
        self.calls: deque[StageCall] = deque()
        self.answers: deque[tuple[AnyCommand, AnyAnswer]] = deque()
        self.events: deque[AnyEvent] = deque()
        self.runs: dict[SequenceId, StageRun] = {}
        #: By their names in the pools.
        self._named: list[dict[SequenceId, StageRun]] = [{} for _ in geometry_ids]
        #: What happens with the answers to the calls of each stage.
        self._pending: list[deque[Callable[[AnyAnswer], None]]] = [deque() for _ in geometry_ids]

    # ---- from the engine

    def command(self, command: AnyCommand) -> None:
        match command:
            case Admit():
                self._admit(command)
            case Extend():
                self._extend(command)
            case Publish():
                self._publish(command)
            case Release():
                self._release(command)
            case Relocated():
                self._call(0, command, partial(self._answer, command))
            case _:
                message = f"{type(command).__name__}: the KV of a pipeline is not edited; it is computed anew"
                self._answer(command, Refused(error="InvalidRequest", message=message))

    def blocks(self, sequence_id: SequenceId, stage: int) -> Sequence[int]:
        """Where the stage has the sequence; only grows while it runs. Raises IntegrityError unless it runs."""
        run = self.runs.get(sequence_id)
        if run is None or not run.is_running:
            raise IntegrityError(f"{sequence_id!r} does not run in all stages")
        return run.parts[stage].blocks

    def is_intact(self, sequence_id: SequenceId) -> bool:
        """Whether the engine has not been told to release it."""
        run = self.runs.get(sequence_id)
        return run is not None and not run.is_broken

    # ---- from the pools

    def answer(self, stage: int, answer: AnyAnswer) -> None:
        """To the oldest call of the stage that has none."""
        self._pending[stage].popleft()(answer)

    def event(self, stage: int, event: AnyEvent) -> None:
        match event:
            case Granted(admitted=admitted):
                self._granted(stage, admitted)
            case Denied(over_quota=over_quota):
                run = self._named[stage].get(over_quota.sequence_id)
                if run is not None:
                    self._give_up(run, over_quota)
            case Preempt(sequence_id=sequence_id, reason=reason):
                run = self._named[stage].get(sequence_id)
                if run is not None:
                    self._preempt(run, reason)
            case Relocate() if stage == 0:
                self.events.append(event)
            case _:
                raise IntegrityError(f"stage {stage} said {type(event).__name__}, which it was not to say")

    # ---- stages that go and come

    def is_up(self, stage: int) -> bool:
        return self._is_up[stage]

    def lose(self, stage: int, reason: str) -> None:
        """The stage's lease is gone, and everything it held with it; what it had published its pool may still have.
        Answers that have not come will not come. Harmless when said twice."""
        if not self._is_up[stage]:
            return
        self._is_up[stage] = False
        self.calls = deque(call for call in self.calls if call.stage != stage)
        pending, self._pending[stage] = self._pending[stage], deque()
        for take in pending:
            take(Refused(error=STALE, message=reason))
        for run in list(self.runs.values()):
            run.parts[stage].forget()
            if run.is_running:
                self._preempt(run, reason)
            else:
                self._advance(run)
        self._named[stage].clear()

    def restore(self, stage: int) -> None:
        """The stage has a new lease on its pool."""
        if self._is_up[stage]:
            raise IntegrityError(f"stage {stage} is not away")
        self._is_up[stage] = True
        for run in list(self.runs.values()):
            if not run.is_running and not run.is_broken and run.asked is None:
                self._advance(run)

    # ---- admission

    def _admit(self, admit: Admit) -> None:
        if admit.sequence_id in self.runs:
            message = f"sequence id {admit.sequence_id!r} was used before; ids are never reused"
            self._answer(admit, Refused(error="Conflict", message=message))
            return
        run = self.runs[admit.sequence_id] = StageRun(admit, self.num_stages)
        self._advance(run)

    def _advance(self, run: StageRun) -> None:
        """Asks the next stage, or says that all have granted."""
        if not all(self._is_up):
            # Others need the memory more than one who cannot run.
            self._let_go(run, range(self.num_stages))
            run.asked = None
            self._announce(run, 0)
            return
        limit = run.num_common
        self._let_go(run, [stage for stage, part in enumerate(run.parts) if part.num_cached > limit])
        for stage, part in enumerate(run.parts):
            if part.name is None:
                run.asked = stage
                name = part.ask(run.admit.sequence_id)
                self._named[stage][name] = run
                ask = msgspec.structs.replace(
                    run.admit,
                    sequence_id=name,
                    hashes=run.admit.hashes[:limit],
                    geometry_id=self._geometry_ids[stage],
                )
                self._call(stage, ask, partial(self._admission_answered, run, stage, name))
                return
        run.asked = None
        run.num_told = run.admit.num_blocks
        first = run.parts[0]
        admitted = Admitted(
            sequence_id=run.admit.sequence_id,
            blocks=tuple(first.blocks),
            num_cached_blocks=limit,
            num_shared_blocks=min(run.num_shared_blocks, limit),
            taken=run.taken,
        )
        if run.is_announced:
            self.events.append(Granted(event_no=_NO_EVENT, admitted=admitted))
        else:
            self._answer(run.admit, admitted)

    def _admission_answered(self, run: StageRun, stage: int, name: SequenceId, answer: AnyAnswer) -> None:
        if self.runs.get(run.admit.sequence_id) is not run or run.parts[stage].name != name:
            return  # it was let go meanwhile, and so told behind this call
        match answer:
            case Admitted():
                self._granted(stage, answer)
            case Wait(queue_position=position):
                if run.asked == stage:
                    self._let_go(run, range(stage + 1, self.num_stages))
                    self._announce(run, position)
            case Refused(error=error) if error == STALE and stage > 0:
                pass  # the stage is lost, which says the rest
            case OverQuota() | Refused():
                self._give_up(run, answer)
            case _:
                raise IntegrityError(f"stage {stage} answered an admission with {type(answer).__name__}")

    def _granted(self, stage: int, admitted: Admitted) -> None:
        run = self._named[stage].get(admitted.sequence_id)
        if run is None or run.asked != stage:
            return  # let go, or heard already
        run.parts[stage].take(admitted)
        if stage == 0:
            run.taken, run.num_shared_blocks = admitted.taken, admitted.num_shared_blocks
        self._advance(run)

    def _announce(self, run: StageRun, position: int) -> None:
        """The engine hears once that it waits; whatever comes then is an event."""
        if not run.is_announced:
            run.is_announced = True
            self._answer(run.admit, Wait(sequence_id=run.admit.sequence_id, queue_position=position))

    def _give_up(self, run: StageRun, answer: OverQuota | Refused) -> None:
        """A stage refused it for good: the others let go."""
        self._let_go(run, range(self.num_stages))
        del self.runs[run.admit.sequence_id]
        if isinstance(answer, OverQuota):
            answer = msgspec.structs.replace(answer, sequence_id=run.admit.sequence_id)
        if not run.is_announced:
            self._answer(run.admit, answer)
            return
        if isinstance(answer, Refused):
            answer = OverQuota(
                sequence_id=run.admit.sequence_id,
                namespace_id=run.admit.namespace_id,
                needed_bytes=0,
                limit_bytes=0,
                reason=answer.message,
            )
        self.events.append(Denied(event_no=_NO_EVENT, over_quota=answer))

    def _preempt(self, run: StageRun, reason: str) -> None:
        """Tells the engine to release it; said once."""
        if not run.is_broken:
            run.is_broken = True
            self.events.append(Preempt(event_no=_NO_EVENT, sequence_id=run.admit.sequence_id, reason=reason))

    # ---- growth

    def _extend(self, command: Extend) -> None:
        unknown = [item.sequence_id for item in command.items if item.sequence_id not in self.runs]
        if unknown:
            message = f"{unknown[0]!r} is not a running sequence of this lease"
            self._answer(command, Refused(error="UnknownSequence", message=message))
            return
        growing = [(self.runs[item.sequence_id], item.num_blocks) for item in command.items]
        gather = Gather(lambda replies: self._extended(command, growing, replies))
        for stage in range(self.num_stages):
            items = tuple(
                ExtendItem(sequence_id=name, num_blocks=missing)
                for run, num_blocks in growing
                if (name := run.parts[stage].name) is not None
                and not run.is_broken
                and (missing := run.num_told + num_blocks - len(run.parts[stage].blocks)) > 0
            )
            if items:
                ask = Extend(lease_id=command.lease_id, items=items)
                self._call(stage, ask, gather.expect(partial(self._take_grants, stage)))
        gather.close()

    def _take_grants(self, stage: int, answer: AnyAnswer) -> None:
        for grant in answer.grants if isinstance(answer, Extended) else ():
            run = self._named[stage].get(grant.sequence_id)
            if run is not None:
                run.parts[stage].blocks.extend(grant.blocks)
                if stage == 0:
                    run.taken = grant.taken

    def _extended(self, command: Extend, growing: list[tuple[StageRun, int]], replies: list[AnyAnswer]) -> None:
        wrong = next((reply for reply in replies if isinstance(reply, Refused) and reply.error != STALE), None)
        if wrong is not None:
            self._answer(command, wrong)
            return
        preempted = {name for reply in replies if isinstance(reply, Extended) for name in reply.preempted}
        grants: list[Grant] = []
        refused: list[SequenceId] = []
        told_to_go: list[SequenceId] = []
        for run, num_blocks in growing:
            sequence_id, end = run.admit.sequence_id, run.num_told + num_blocks
            if run.is_running and not run.is_broken and min(len(part.blocks) for part in run.parts) >= end:
                blocks = tuple(run.parts[0].blocks[run.num_told : end])
                grants.append(Grant(sequence_id=sequence_id, blocks=blocks, taken=run.taken))
                run.num_told = end
            else:
                refused.append(sequence_id)
                if any(part.name in preempted for part in run.parts):
                    told_to_go.append(sequence_id)
        self._answer(command, Extended(grants=tuple(grants), refused=tuple(refused), preempted=tuple(told_to_go)))

    # ---- publishing and releasing

    def _publish(self, command: Publish) -> None:
        gather = Gather(lambda replies: self._answer(command, published(replies)))
        for stage in range(self.num_stages):
            seals = tuple(
                msgspec.structs.replace(seal, sequence_id=name)
                for seal in command.seals
                if (run := self.runs.get(seal.sequence_id)) is not None
                and run.is_running
                and (name := run.parts[stage].name) is not None
            )
            if seals:
                self._call(stage, Publish(lease_id=command.lease_id, seals=seals), gather.expect())
        gather.close()

    def _release(self, command: Release) -> None:
        runs = [self.runs.pop(name) for name in command.sequence_ids if name in self.runs]
        released = Released(num_released=len(runs))
        gather = Gather(lambda replies: self._answer(command, first_wrong(replies) or released))
        for stage in range(self.num_stages):
            names = tuple(name for run in runs if (name := self._forget(run, stage)) is not None)
            if names:
                self._call(stage, Release(lease_id=command.lease_id, sequence_ids=names), gather.expect())
        for run in runs:
            if run.is_unanswered:
                self._announce(run, 0)
        gather.close()

    def _let_go(self, run: StageRun, stages: Iterable[int]) -> None:
        """Takes back what the stages hold or have been asked for."""
        for stage in stages:
            if (name := self._forget(run, stage)) is not None:
                give_back = Release(lease_id=run.admit.lease_id, sequence_ids=(name,))
                self._call(stage, give_back, lambda answer: None)

    def _forget(self, run: StageRun, stage: int) -> SequenceId | None:
        """Its name in the stage's pool, which it has no more."""
        name = run.parts[stage].forget()
        if name is not None:
            self._named[stage].pop(name, None)
        return name

    # ---- inside

    def _call(self, stage: int, command: AnyCommand, take: Callable[[AnyAnswer], None]) -> None:
        if self._is_up[stage]:
            self._pending[stage].append(take)
            self.calls.append(StageCall(stage, command))
        else:
            take(Refused(error=STALE, message=f"stage {stage} is away"))

    def _answer(self, command: AnyCommand, answer: AnyAnswer) -> None:
        if isinstance(command, Admit) and (run := self.runs.get(command.sequence_id)) is not None:
            run.is_unanswered = False
        self.answers.append((command, answer))

    def check_integrity(self) -> None:
        """Raises IntegrityError when tables are not complete, or names and runs do not agree."""
        for sequence_id, run in self.runs.items():
            run.check_integrity(sequence_id)
            for stage, part in enumerate(run.parts):
                if part.name is not None and self._named[stage].get(part.name) is not run:
                    raise IntegrityError(f"{sequence_id}: stage {stage} does not know it as {part.name!r}")
        num_named = sum(len(names) for names in self._named)
        num_held = sum(part.name is not None for run in self.runs.values() for part in run.parts)
        if num_named != num_held:
            raise IntegrityError(f"{num_named} names in pools, {num_held} of them of sequences")
