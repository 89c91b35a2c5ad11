"""The world of test_sequence_edits.py and test_edit_machine.py: what one replica believes, and the bytes it moves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pool_driver import BLOCK_BYTES, BLOCK_TOKENS, Driver, Replica

from remora.namespaces.sequence_commands import Edited, Positions, SequenceCopy, SequencePositions, Settle, Settled


@dataclass
class Told:
    """What a sequence must hold: (position, token) in order, and where its writer believes it to lie."""

    cells: list[tuple[int, int]]
    table: list[int]


@dataclass
class World:
    """One replica that computes prompts, moves bytes as it is told, and remembers what must be where."""

    num_blocks: int = 24
    driver: Driver = field(init=False)
    replica: Replica = field(init=False)
    #: (block, slot) → (token, the position that K was rotated to).
    slots: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    told: dict[str, Told] = field(default_factory=dict)
    #: Operations with their answers, as they came.
    answered: list[tuple[Any, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.driver = Driver(num_extents=1, extent_bytes=self.num_blocks * BLOCK_BYTES)
        self.driver.namespace("ns")
        self.replica = self.driver.lease()

    def begin(self, name: str, tokens: list[int], *, publish: bool = True) -> Told:
        """Admits and computes a prompt; what is cached is there already."""
        admitted = self.replica.admit(name, "ns", tokens)
        told = self.told[name] = Told([], list(admitted.blocks))
        told.cells = list(enumerate(tokens))
        for slot in range(admitted.num_cached_blocks * BLOCK_TOKENS, len(tokens)):
            self.slots[self.place(told, slot)] = (tokens[slot], slot)
        if publish:
            self.replica.publish(name, "ns", tokens, start=admitted.num_cached_blocks)
        return told

    @staticmethod
    def place(told: Told, slot: int) -> tuple[int, int]:
        return told.table[slot // BLOCK_TOKENS], slot % BLOCK_TOKENS

    def edit(self, kind: Any, **fields: Any) -> Any:
        """An operation on one sequence, its moves, and the settlement."""
        return self.took(fields["sequence_id"], fields["sequence_id"], self.replica.call(kind, **fields))

    def copy(self, source: str, target: str, **fields: Any) -> Any:
        return self.took(source, target, self.replica.call(SequenceCopy, source_id=source, target_id=target, **fields))

    def took(self, source: str, target: str, answer: Any) -> Any:
        self.answered.append((self.replica.last, answer))
        if isinstance(answer, Edited):
            table = self.told[source].table[: answer.num_kept_blocks] + list(answer.blocks)
            self.told[target] = Told(list(self.told[target].cells) if target in self.told else [], table)
            self.move(answer)
            self.move(answer)
            assert self.replica.call(Settle, sequence_ids=(target,)) == Settled()
        return answer

    def move(self, answer: Edited) -> None:
        for move in answer.moves:
            for i in range(move.num_tokens):
                token, position = self.slots[move.source_block, move.source_slot + i]
                self.slots[move.target_block, move.target_slot + i] = (token, position + move.delta)

    def check(self) -> None:
        """Every sequence reads its own tokens, rotated to its own positions."""
        for name, told in self.told.items():
            read = [self.slots[self.place(told, slot)] for slot in range(len(told.cells))]
            assert read == [(token, position) for position, token in told.cells], name
            found = self.replica.call(SequencePositions, sequence_id=name, num_tokens=len(told.cells))
            expected = [position for position, _ in told.cells] or [-1]
            assert found == Positions(pos_min=expected[0], pos_max=expected[-1])
