"""One sequence in the pools of a pipeline's stages."""

from __future__ import annotations

from dataclasses import dataclass, field

from remora.namespaces.commands import Admit, Admitted, Taken
from remora.platform.base.errors import IntegrityError
from remora.platform.base.ids import SequenceId


@dataclass(slots=True)
class StagePart:
    """What one stage's pool has of a sequence."""

    #: As the pool knows it, from the time it is asked.
    name: SequenceId | None = None
    #: How often the pool was asked: names are never reused.
    num_asked: int = 0
    #: Empty until it is granted.
    blocks: list[int] = field(default_factory=list)
    num_cached: int = 0

    def ask(self, sequence_id: SequenceId) -> SequenceId:
        """A new name for it."""
        self.name = SequenceId(f"{sequence_id}~{self.num_asked}") if self.num_asked else sequence_id
        self.num_asked += 1
        return self.name

    def take(self, admitted: Admitted) -> None:
        self.blocks = list(admitted.blocks)
        self.num_cached = admitted.num_cached_blocks

    def forget(self) -> SequenceId | None:
        """Returns the name it had."""
        name, self.name = self.name, None
        # A new list: the old one may be with who computes a step.
        self.blocks, self.num_cached = [], 0
        return name


class StageRun:
    """From its admission to its release."""

    def __init__(self, admit: Admit, num_stages: int) -> None:
        #: As the engine said it.
        self.admit = admit
        self.parts = [StagePart() for _ in range(num_stages)]
        #: The stage whose grant is waited for; None: all have granted, or one is away.
        self.asked: int | None = None
        #: Whether the engine was told that it waits.
        self.is_announced = False
        self.is_unanswered = True
        #: The engine was told to release it.
        self.is_broken = False
        #: Blocks of each stage that the engine knows; 0 until it runs. Stages may have granted more.
        self.num_told = 0
        #: Of stage 0, for traces.
        self.num_shared_blocks = 0
        self.taken: Taken | None = None

    @property
    def is_running(self) -> bool:
        """Whether the engine was told that it is admitted."""
        return self.num_told > 0

    @property
    def num_common(self) -> int:
        """Blocks at the beginning that every stage asked so far has found."""
        found = [part.num_cached for part in self.parts if part.blocks]
        return min([len(self.admit.hashes), *found])

    def check_integrity(self, sequence_id: SequenceId) -> None:
        """Raises IntegrityError when parts do not agree with each other."""
        granted = [part for part in self.parts if part.blocks]
        for is_true, sentence in (
            (self.admit.sequence_id == sequence_id, "it is on the books under its id"),
            (all(part.name is not None for part in granted), "blocks have a name in their pool"),
            (not self.is_running or not self.is_unanswered, "who runs was answered"),
            (not self.is_running or self.asked is None, "who runs waits for no stage"),
            (
                not self.is_running or self.is_broken or len({part.num_cached for part in self.parts}) == 1,
                "stages begin at one place",
            ),
            (
                not self.is_running or self.is_broken or all(len(p.blocks) >= self.num_told for p in self.parts),
                "tables are complete",
            ),
            (all(len(set(part.blocks)) == len(part.blocks) for part in self.parts), "no block twice in a table"),
        ):
            if not is_true:
                raise IntegrityError(f"{sequence_id}: broken: {sentence}")
