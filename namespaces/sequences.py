"""Running sequences: a block table each, and what of it is sealed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from remora.namespaces.blocks import Block, BlockLedger
from remora.namespaces.commands import Admit, Refused, Seal
from remora.namespaces.extents import GeometrySpace
from remora.namespaces.holds import Holds
from remora.namespaces.positions import Runs, num_tokens_of
from remora.namespaces.prefix_index import Realm
from remora.namespaces.quotas import Namespace
from remora.platform.base.errors import IntegrityError
from remora.platform.base.ids import BlockHash, LeaseId

#: A refused extension holds back admissions until it is served: of everyone, or only of borrowers.
Claim = Literal["", "guaranteed", "borrowed"]


class Sequence:
    """One admitted sequence of one lease. It holds one reference on every block of its table and on every anchor."""

    __slots__ = ("admit", "admitted_no", "anchors", "blocks", "claim", "hashes", "lease_id", "namespace", "num_bound",
                 "num_cached", "preempted", "realm", "runs", "sources", "space")  # fmt: skip

    def __init__(
        self, admit: Admit, admitted_no: int, namespace: Namespace, space: GeometrySpace, realm: Realm
    ) -> None:
        self.admit = admit
        self.lease_id: LeaseId = admit.lease_id
        self.admitted_no = admitted_no
        self.namespace = namespace
        self.space = space
        self.realm = realm
        self.blocks: list[Block] = []
        self.num_cached = 0
        #: Hashes of the leading blocks that were matched or published; the next seal has position len(hashes).
        self.hashes: list[BlockHash] = []
        #: Where the table holds a private twin of an indexed block below a sealed block of this sequence: the indexed
        #: one, by position. The reference keeps every ancestor of a referenced block referenced.
        self.anchors: dict[int, Block] = {}
        #: Leading blocks that can only be published under the hashes of the admission.
        self.num_bound = len(admit.hashes)
        #: Positions of its tokens, as far as an operation has asked for them (namespaces/sequence_edits.py).
        self.runs: Runs = ()
        #: Referenced until the lease has copied what it needs of them; in the order of their tables.
        self.sources: list[Block] = []
        #: The lease has been told to release it.
        self.preempted = False
        self.claim: Claim = ""

    def check_seal(self, seal: Seal, position: int, previous: BlockHash | None) -> Refused | None:
        """Whether `seal` may be applied after `position` hashes, the last of them `previous`; changes nothing."""
        if seal.position < position:
            if seal.position < len(self.hashes) and self.hashes[seal.position] == seal.block_hash:
                return None  # said again
            problem = f"block {seal.position} of {seal.sequence_id} is published under another hash"
        elif seal.position > position:
            problem = f"block {seal.position} of {seal.sequence_id} is published before block {position}"
        elif position >= len(self.blocks):
            problem = f"{seal.sequence_id} has {len(self.blocks)} blocks, block {position} cannot be published"
        elif position < self.num_bound and self.admit.hashes[position] != seal.block_hash:
            problem = f"block {position} of {seal.sequence_id} is not published under its prompt's hash"
        else:
            twin = self.realm.blocks.get(seal.block_hash)
            if twin is None or (twin.parent.block_hash if twin.parent is not None else None) == previous:
                return None
            problem = f"the hash of block {position} of {seal.sequence_id} is indexed behind another block"
        return Refused(error="InvalidRequest", message=problem)

    def seal(self, ledger: BlockLedger, block_hash: BlockHash) -> bool:
        """Publishes the next block; False when the hash is indexed already and the block stays private."""
        position = len(self.hashes)
        self.hashes.append(block_hash)
        indexed = self.realm.blocks
        if block_hash in indexed:
            return False
        # Blocks that stayed private because of a twin that has been evicted since are sealed now: no gap in the chain.
        first = position
        while first and self.hashes[first - 1] not in indexed:
            first -= 1
        if any(self.blocks[place].refs > 1 for place in range(first, position + 1)):
            return False  # a copy of it is being made: sealed, it would need its ancestors for as long
        parent = indexed[self.hashes[first - 1]] if first else None
        self._anchor(ledger, first - 1)
        for place in range(first, position + 1):
            ledger.seal(self.blocks[place], self.realm, self.hashes[place], parent)
            parent = self.blocks[place]
        return True

    def _anchor(self, ledger: BlockLedger, position: int) -> None:
        """References indexed twins from `position` down to the first ancestor that is referenced already."""
        while position >= 0 and position not in self.anchors:
            twin = self.realm.blocks[self.hashes[position]]
            if twin is self.blocks[position]:
                return
            ledger.acquire(twin)
            self.anchors[position] = twin
            position -= 1

    def references(self) -> Iterator[Block]:
        """Every block it holds a reference on, as often as it does."""
        yield from self.blocks
        yield from self.anchors.values()
        yield from self.sources

    def num_tokens(self, told: int = 0) -> int:
        """Tokens it is known to have, by publications, by operations, or because its writer says so."""
        published = len(self.hashes) * self.space.geometry.block_tokens
        return max(num_tokens_of(self.runs), published, told)

    def owns(self, place: int) -> bool:
        """Whether nobody else can read the block, so that its unused slots may be written."""
        block = self.blocks[place]
        return block.block_hash is None and block.refs == 1

    def num_shareable(self, most: int) -> int:
        """How many of the first `most` blocks are sealed, or have a sealed twin."""
        most = min(most, len(self.hashes))
        if most and self.hashes[most - 1] in self.realm.blocks:
            return most  # whoever is indexed has indexed ancestors
        indexed = self.realm.blocks
        return next((place for place in range(most) if self.hashes[place] not in indexed), most)

    def share(self, ledger: BlockLedger, count: int) -> tuple[list[Block], int]:
        """The first `count` blocks, or their sealed twins, with one more reference each; and how many of the first
        ones are those of this table."""
        shared = self.blocks[:count]
        num_same = count
        for place, block in enumerate(shared):
            if block.block_hash is not None:
                block.refs += 1  # it is referenced already, so this is all that acquire would do
                continue
            num_same = min(num_same, place)
            shared[place] = self.realm.blocks[self.hashes[place]]
            ledger.acquire(shared[place])
        return shared, num_same

    def cut(self, ledger: BlockLedger, num_kept: int, *, num_hashes: int, num_sources: int) -> None:
        """Takes the blocks behind the first `num_kept` out of the table. Those before `num_sources` stay referenced
        until `settle`, with their anchors: a sealed one among them needs its ancestors."""
        for place in range(len(self.blocks) - 1, num_hashes - 1, -1):
            anchor = self.anchors.pop(place, None)
            gone = (self.blocks[place] if place >= num_kept else None, anchor)
            for block in gone:
                if block is not None and num_kept < num_sources > place:
                    self.sources.append(block)
                elif block is not None:
                    ledger.drop(block)
        self.sources.reverse()
        self.blocks = self.blocks[:num_kept]
        self.hashes = self.hashes[:num_hashes]
        self.num_cached = min(self.num_cached, num_hashes)
        self.num_bound = min(self.num_bound, num_hashes)

    def settle(self, ledger: BlockLedger) -> None:
        """Gives back what was kept for copying."""
        for block in reversed(self.sources):
            ledger.drop(block)
        self.sources = []

    def release(self, ledger: BlockLedger) -> None:
        """Drops all references, tail first, so that children are older than their parents in the eviction order."""
        level = self.admit.priority
        # What a copy found is as important as to those who had used it.
        num_kept = self.num_cached if self.admit.background else 0
        self.settle(ledger)
        for position in range(len(self.blocks) - 1, -1, -1):
            if position >= num_kept:
                self.blocks[position].level = level
            ledger.drop(self.blocks[position])
            anchor = self.anchors.pop(position, None)
            if anchor is not None:
                ledger.drop(anchor)
        self.blocks = []


class RunningTable:
    """All running sequences of a pool in order of admission."""

    def __init__(self, holds: Holds) -> None:
        self._holds = holds
        self.sequences: dict[int, Sequence] = {}
        self.next_no = 1
        #: Sequences that were told to go and have not gone.
        self.num_preempted = 0
        self._claims: dict[Claim, int] = {"guaranteed": 0, "borrowed": 0}

    def add(self, sequence: Sequence) -> None:
        self.sequences[sequence.admitted_no] = sequence
        self.next_no = max(self.next_no, sequence.admitted_no + 1)
        self.num_preempted += sequence.preempted
        if sequence.claim:
            self._claims[sequence.claim] += 1

    def remove(self, sequence: Sequence) -> None:
        del self.sequences[sequence.admitted_no]
        self.num_preempted -= sequence.preempted
        self.set_claim(sequence, "")

    def preempt(self, sequence: Sequence) -> None:
        """Marks a sequence as told to go; it has no claim any more."""
        if not sequence.preempted:
            sequence.preempted = True
            sequence.namespace.num_preempted += 1
            self.num_preempted += 1
        self.set_claim(sequence, "")

    def set_claim(self, sequence: Sequence, claim: Claim) -> None:
        if sequence.claim:
            self._claims[sequence.claim] -= 1
        sequence.claim = claim
        if claim:
            self._claims[claim] += 1

    @property
    def has_claim(self) -> bool:
        """Whether a refused extension is to be tried again before everybody is admitted."""
        return any(self._claims.values())

    def holds_back(self, *, entitled: bool) -> bool:
        """Whether an admission must wait for a refused extension: one by a namespace within its guarantee (`entitled`)
        waits only for such extensions."""
        return bool(self._claims["guaranteed"] or (self._claims["borrowed"] and not entitled))

    def check_integrity(self) -> None:
        """Raises IntegrityError when references do not balance or a table names a foreign block."""
        counted = Counter(self._holds.references())
        copied = {block for sequence in self.sequences.values() for block in sequence.sources}
        claims: dict[Claim, int] = {"guaranteed": 0, "borrowed": 0}
        for sequence in self.sequences.values():
            if sequence.claim:
                claims[sequence.claim] += 1
            for block in sequence.references():
                counted[block] += 1
                if block.extent.blocks.get(block.index) is not block or block.extent.space is not sequence.space:
                    raise IntegrityError(f"{sequence.admit.sequence_id} references block {block.index}, which is free")
                if block.holding.namespace.domain != sequence.namespace.domain:
                    raise IntegrityError(f"{sequence.admit.sequence_id} references a block outside its share group")
            private = [block for block in sequence.blocks if block.block_hash is None]
            if any(block.refs != 1 and block not in copied for block in private):
                raise IntegrityError(f"a private block of {sequence.admit.sequence_id} is shared")
            if sequence.num_tokens() > len(sequence.blocks) * sequence.space.geometry.block_tokens:
                raise IntegrityError(f"{sequence.admit.sequence_id} has more tokens than its blocks hold")
        for block, count in counted.items():
            if block.refs != count:
                raise IntegrityError(f"block {block.index} counts {block.refs} references, {count} are held")
        if claims != self._claims or self.num_preempted != sum(s.preempted for s in self.sequences.values()):
            raise IntegrityError("claims or preempted sequences are miscounted")
