"""A pool's state with its arena and journal, kept in step so that a crash at any moment loses nothing (design §4.6).

    append to the journal ─► apply ─► effects on the arena ─► note "effects done" in the header ─► answer
    ▲ a crash from here on: the command took effect,
      its unanswered caller repeats it and gets the stored answer

Effects of records behind the note that are not noted one by one are done at recovery: their answers cannot have left,
so nobody has written to those blocks yet. A record whose replay raises was never answered either; it is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence

import numpy as np

from remora.cache_actors.arena import MappedArena
from remora.cache_actors.arena_header import MAX_LEASES
from remora.cache_actors.arena_place import PlacedArena, find_arena, make_arena, remove_arena
from remora.cache_actors.journal_file import JournalFile, JournalLog, read_journal_file
from remora.cache_actors.pool_settings import PoolSettings
from remora.cache_actors.stale_files import journal_path
from remora.kernels.reencoder import HostMemory, reencode_blocks
from remora.namespaces.chains import Chain, Link
from remora.namespaces.commands import AnyAnswer, AnyCommand, AnyEvent, Refused, SetQuota
from remora.namespaces.effects import CopyBlocks, Effect, ReencodeBlocks, SetGeneration, ZeroBlocks
from remora.namespaces.geometry import KVGeometry, KVPrecision
from remora.namespaces.hold_commands import Held
from remora.namespaces.pool import PoolState, PoolStateConfig
from remora.namespaces.quota_changes import quota_changes
from remora.namespaces.report import LeaseReport, PoolReport
from remora.platform.base.clock import Clock
from remora.platform.base.errors import ConfigError, IntegrityError, JournalError, StaleLease
from remora.platform.base.ids import BlockHash, HoldId, LeaseId, NamespaceId

logger = logging.getLogger(__name__)

#: Value of a generation word while its lease is being revoked; no lease ever has this generation.
FENCED = (1 << 64) - 1


class DurablePool:
    """Owns the arena. Not thread-safe. After an exception of `apply` other than Unavailable it must not be used."""

    def __init__(self, settings: PoolSettings, clock: Clock) -> None:
        """Takes up where a predecessor ended, or starts anew, and says which in the log.

        Raises ArenaError (no room, or owned by another process), JournalError (no room for the journal), ConfigError
        (the quotas do not fit the arena).
        """
        self._settings = settings
        self._clock = clock
        found = find_arena(settings)
        if found is not None and not self._recover(found):
            remove_arena(found.arena)
            found = None
        if found is None:
            self._start(make_arena(settings))
        logger.info(
            "pool %s: arena %s %s (%s)", settings.pool_id, self.placed.outcome, self.arena.path, self.placed.backing
        )

    @property
    def arena(self) -> MappedArena:
        return self.placed.arena

    @property
    def journal_bytes(self) -> int:
        return self._journal.num_bytes

    def apply(self, commands: Sequence[AnyCommand]) -> list[AnyAnswer]:
        """Applies commands in order; when this returns they and their effects are safe. Raises Unavailable, with no
        effect, when the journal has no room."""
        now_s = self._clock.now_s()
        last_record_no = self._journal.append(commands, now_s)
        try:
            answers = [self._state.apply(command, now_s) for command in commands]
        except Exception:
            logger.exception("a command broke the pool's state: rebuilding it without the command")
            answers = self._rebuild(last_record_no - len(commands) + 1, len(commands))
        else:
            self._perform(self._state.take_effects())
        self._note_done(last_record_no)
        if self._journal.is_due:
            try:
                self._journal.compact(self._state.snapshot())
            except JournalError as error:
                logger.warning("the journal grows on: %s", error)
        return answers

    def events_after(self, lease_id: LeaseId, event_no: int) -> tuple[AnyEvent, ...]:
        """Events of a lease behind `event_no`; none for a lease that is not live."""
        try:
            return self._state.events_after(lease_id, event_no)
        except StaleLease:
            return ()

    def leases(self) -> tuple[LeaseReport, ...]:
        return self._state.leases()

    def lease(self, lease_id: LeaseId) -> LeaseReport | None:
        return next((lease for lease in self._state.leases() if lease.lease_id == lease_id), None)

    def kv_precisions(self) -> dict[NamespaceId, KVPrecision | None]:
        return self._state.kv_precisions()

    def geometries(self) -> tuple[KVGeometry, ...]:
        return self._state.geometries()

    @property
    def needs_time(self) -> bool:
        """Whether anything ends when its time is over, so that time must be let pass."""
        return self._state.needs_time

    def held(self, hold_id: HoldId) -> Held:
        """What a reader holds; nothing once that has ended."""
        return self._state.held(hold_id)

    def find_blocks(self, namespace_id: NamespaceId, fingerprint: bytes, hashes: Sequence[BlockHash]) -> int:
        """How many of the first blocks of a chain can be found."""
        return self._state.find_blocks(namespace_id, fingerprint, hashes)

    def find_link(self, block_hash: BlockHash) -> Link | None:
        """The sealed block of that hash, if there is one."""
        return self._state.find_link(block_hash)

    def find_chain(self, tip: BlockHash) -> Chain | None:
        """All sealed blocks from the root to the one of that hash, if there is one."""
        return self._state.find_chain(tip)

    def find_tips(self, namespace_ids: Container[NamespaceId]) -> list[BlockHash]:
        """The last blocks of all chains of these namespaces."""
        return self._state.find_tips(namespace_ids)

    def overdue_leases(self) -> set[LeaseId]:
        """Leases that did not switch to the new places of blocks in time."""
        return self._state.overdue_leases(self._clock.now_s())

    def describe(self) -> PoolReport:
        return self._state.describe()

    def fence(self, lease: LeaseReport) -> None:
        """From here on no token leaves the lease's process. Its blocks stay its own until LeaseLost."""
        self.arena.header.set_generation(lease.lease_slot, FENCED)

    def is_fenced(self, lease: LeaseReport) -> bool:
        return self.arena.header.generation(lease.lease_slot) == FENCED

    def check_integrity(self) -> None:
        """Raises IntegrityError when the state, or what the arena's header says about it, is broken."""
        self._state.check_integrity()
        header = self.arena.header
        for slot, generation in enumerate(self._state.generation_words()):
            if header.generation(slot) not in (generation, FENCED):
                raise IntegrityError(f"lease slot {slot}: word {header.generation(slot)}, state {generation}")
        if header.incarnation != self._state.config.incarnation:
            raise IntegrityError("the arena's incarnation is not the state's")
        if (header.effects_done, header.effect_step) != (self._journal.last_record_no, 0):
            raise IntegrityError("an answer may have left before its effects were done")

    def retire(self) -> None:
        """Removes the arena and the journal. Whoever maps the arena is told to stop."""
        self._journal.close()
        remove_arena(self.arena)

    # ---- start and recovery ------------------------------------------------------------------------------------------

    def _start(self, placed: PlacedArena) -> None:
        device = self._settings.device
        self.placed = placed
        reserved = device.reserved_bytes
        self._state = PoolState(
            PoolStateConfig(
                data_bytes=int(device.arena_bytes),
                extent_bytes=int(device.extent_bytes),
                reserved_bytes=int(reserved) if reserved is not None else placed.arena.free_bytes(),
                incarnation=placed.arena.header.incarnation,
                eviction=device.eviction,
                max_leases=MAX_LEASES,
            )
        )
        self._journal = JournalFile(journal_path(placed.arena.path), self._state.snapshot(), 0)
        refusal = self._set_quotas(self._settings.quotas)
        if refusal is not None:
            self.retire()
            raise ConfigError(f"devices.{device.name}: {refusal}")

    def _recover(self, placed: PlacedArena) -> bool:
        """Brings the predecessor's state back; False when that cannot be, and the arena is of no use."""
        self.placed = placed
        path = journal_path(placed.arena.path)
        try:
            log = read_journal_file(path)
            if log.last_record_no < placed.arena.header.effects_done:
                raise JournalError(f"{path}: ends before record {placed.arena.header.effects_done}, which was answered")
            state, effects, _ = replay(log, placed.arena.header.effects_done)
            if state.config.incarnation != placed.arena.header.incarnation:
                raise JournalError(f"{path}: belongs to another incarnation of the arena")
            state.check_integrity()
        except (JournalError, IntegrityError) as error:
            logger.error("the pool cannot be recovered and starts anew: %s", error)
            return False
        self._state = state
        self._adopt_effects(effects)
        self._journal = JournalFile(path, state.snapshot(), log.last_record_no)
        self._note_done(log.last_record_no)
        placed.arena.header.num_restarts += 1
        refusal = self._set_quotas(self._configured_quotas() if placed.is_orphan else self._missing_quotas())
        if refusal is not None:
            logger.error("the pool cannot be recovered under the present configuration and starts anew: %s", refusal)
            self._journal.close()
            return False
        return True

    def _rebuild(self, first_record_no: int, count: int) -> list[AnyAnswer]:
        """The state without the commands that raise. Answers of the `count` records from the given one on."""
        log = self._journal.read()
        self._state, effects, answers = replay(log, self.arena.header.effects_done)
        self._adopt_effects(effects)
        self._journal.compact(self._state.snapshot())
        failed = Refused(error=IntegrityError.__name__, message="the command broke the pool; it had no effect")
        return [answers.get(number, failed) for number in range(first_record_no, first_record_no + count)]

    def _adopt_effects(self, effects: Sequence[Effect]) -> None:
        """Does what has not been done, and sets every word but those of leases that are being revoked."""
        self._perform(effects, first=self.arena.header.effect_step, with_words=False)
        live = {lease.lease_slot for lease in self._state.leases()}
        header = self.arena.header
        for slot, generation in enumerate(self._state.generation_words()):
            if header.generation(slot) != FENCED or slot not in live:
                header.set_generation(slot, generation)

    def _perform(self, effects: Sequence[Effect], *, first: int = 0, with_words: bool = True) -> None:
        """Does effects of the records behind the note, from number `first` on, in order; notes each."""
        for number, effect in enumerate(effects[first:], first):
            match effect:
                case ZeroBlocks(block_bytes=size, blocks=blocks):
                    for block in blocks:
                        self.arena.zero(block * size, size)
                case CopyBlocks(block_bytes=size, pairs=pairs):
                    for source, target in pairs:
                        self.arena.copy(source * size, target * size, size)
                case ReencodeBlocks(source=source_geometry, target=target_geometry, pairs=pairs):
                    places = np.array(pairs, np.int32).T.copy()
                    memories = [HostMemory(self.arena.data, each) for each in (source_geometry, target_geometry)]
                    reencode_blocks(memories[0], memories[1], *places)
                case SetGeneration(lease_slot=slot, value=value) if with_words:
                    self.arena.header.set_generation(slot, value)
            self.arena.header.effect_step = number + 1

    def _note_done(self, record_no: int) -> None:
        """All effects up to the record are done. In this order: a crash in between leaves a step without effects."""
        self.arena.header.effects_done = record_no
        self.arena.header.effect_step = 0

    # ---- quotas ------------------------------------------------------------------------------------------------------

    def _set_quotas(self, quotas: Sequence[SetQuota]) -> str | None:
        """Sets them; returns why one was refused."""
        if quotas:
            for quota, answer in zip(quotas, self.apply(quotas), strict=True):
                if isinstance(answer, Refused):
                    return f"namespace {quota.namespace_id}: {answer.message}"
        return None

    def _missing_quotas(self) -> list[SetQuota]:
        """After a crash: what was changed while running stays changed; only what is missing is set."""
        known = {namespace.namespace_id for namespace in self.describe().namespaces}
        return [quota for quota in self._settings.quotas if quota.namespace_id not in known]

    def _configured_quotas(self) -> list[SetQuota]:
        """In a new session the configuration rules; namespaces that are configured no more keep their blocks as long as
        nobody else wants them."""
        return quota_changes(self.describe().namespaces, self._settings.quotas)


def replay(log: JournalLog, effects_done: int) -> tuple[PoolState, list[Effect], dict[int, AnyAnswer]]:
    """The state after a journal, effects that may not have been done, and the answers by record number.

    Raises JournalError when the snapshot cannot be read.
    """
    skipped: set[int] = set()
    while True:
        state = PoolState.restore(log.snapshot)
        effects: list[Effect] = []
        answers: dict[int, AnyAnswer] = {}
        for record in log.records:
            if record.record_no in skipped:
                continue
            try:
                answers[record.record_no] = state.apply(record.command, record.now_s)
            except Exception:
                # It may be half applied now: begin again without it.
                logger.exception("record %d of the journal cannot be replayed: leaving it out", record.record_no)
                skipped.add(record.record_no)
                break
            taken = state.take_effects()
            if record.record_no > effects_done:
                effects += taken
        else:
            return state, effects, answers
