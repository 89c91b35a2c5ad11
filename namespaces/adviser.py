"""How much memory a namespace could use: its working set, and its hit rate over sizes.

    least recent ... [ b9 | b7 | b4 | b2 | b1 ] ... most recent     a lookup of b4 has depth 3: a cache of 3 blocks or
                       5    4    3    2    1                        more that keeps the most recent finds it

Depths of looked-up blocks give the hit rate of every size at once (Mattson's stack; parents are never deeper than their
children, so that hits are prefixes). Depths are taken of a sample of the blocks, chosen by their hash, which stands for
all of them (Waldspurger et al., "Efficient MRC construction with SHARDS", FAST 2015: fixed-size, with its correction of
the first bucket). A sample has at most 2,048 blocks, whatever the namespace holds, and old observations fade.

The curve is that of plain recency (`lru`); the default policy is a little above it (docs/eviction.md).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import msgspec

from remora.platform.base.errors import IntegrityError
from remora.platform.base.ids import BlockHash

#: Blocks of the sample.
_MAX_SAMPLE = 2048
#: Sampled lookups after which all observations count half.
_FADING_LOOKUPS = 1 << 16
#: Depth buckets an octave.
_STEPS = 8
#: The working set is what was used in this time.
WORKING_SET_S = 3600.0
#: More memory than advised gains less than this share of the hit rate.
SMALL_GAIN = 0.05
_ALL = b"\xff" * 17


class CurvePoint(msgspec.Struct, frozen=True):
    """What a cache of this size finds of the blocks looked up."""

    size_bytes: int
    hit_rate: float


class CapacityAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """What was observed, and what it means for the size."""

    #: Share of the blocks that are observed, and the number now.
    sample_rate: float = 1.0
    num_sampled: int = 0
    #: Different blocks used in the last hour.
    working_set_bytes: int = 0
    #: Hit rate over sizes, rising; empty without lookups.
    curve: tuple[CurvePoint, ...] = ()
    #: Size beyond which the hit rate gains less than 5 % of itself, however much is added; 0 when nothing comes back.
    enough_bytes: int = 0


class _State(msgspec.Struct, array_like=True):
    #: Hashes below it are sampled.
    threshold: bytes = _ALL
    #: Weights of sampled lookups by depth bucket, of all sampled lookups, and how many were to be expected.
    depths: dict[int, float] = {}
    num_lookups: float = 0.0
    expected_lookups: float = 0.0
    #: Only in a dump: sampled blocks with the time of their last use, least recent first.
    recent: list[tuple[BlockHash, float]] = []


class CapacityAdviser:
    """Observes the lookups and releases of one namespace. About 0.1 µs a block, bounded memory, deterministic."""

    def __init__(self) -> None:
        self._state = _State()
        self._rate = 1.0
        #: Number and time of each sampled block's last use.
        self._uses: dict[BlockHash, tuple[int, float]] = {}
        #: Numbers of last uses, ascending.
        self._numbers: list[int] = []
        self._by_number: dict[int, BlockHash] = {}
        self._by_hash: list[BlockHash] = []
        self._next_number = 1

    def look_up(self, hashes: Sequence[BlockHash]) -> None:
        """A sequence was admitted that could have found these blocks."""
        state = self._state
        state.expected_lookups += len(hashes) * self._rate
        threshold = state.threshold
        for block_hash in hashes:
            if block_hash >= threshold:
                continue
            state.num_lookups += 1.0
            use = self._uses.get(block_hash)
            if use is not None:
                depth = len(self._numbers) - bisect_left(self._numbers, use[0])
                bucket = _bucket(max(1, round(depth / self._rate)))
                state.depths[bucket] = state.depths.get(bucket, 0.0) + 1.0
        if state.num_lookups > _FADING_LOOKUPS:
            self._scale(0.5)

    def touch(self, hashes: Sequence[BlockHash], now_s: float, horizon_blocks: int) -> None:
        """The blocks are the most recent now, the first one before all others. What is deeper than the horizon is
        forgotten."""
        threshold = self._state.threshold
        for block_hash in reversed(hashes):
            if block_hash >= threshold:
                continue
            use = self._uses.get(block_hash)
            if use is None:
                insort(self._by_hash, block_hash)
            else:
                del self._numbers[bisect_left(self._numbers, use[0])]
                del self._by_number[use[0]]
            self._append(block_hash, now_s)
        while len(self._numbers) > _MAX_SAMPLE:
            if len(self._numbers) > horizon_blocks * self._rate:
                oldest = self._by_number[self._numbers[0]]
                del self._by_hash[bisect_left(self._by_hash, oldest)]
                self._forget(oldest)
            else:
                self._lower_threshold()

    def _append(self, block_hash: BlockHash, now_s: float) -> None:
        self._uses[block_hash] = (self._next_number, now_s)
        self._by_number[self._next_number] = block_hash
        self._numbers.append(self._next_number)
        self._next_number += 1

    def _forget(self, block_hash: BlockHash) -> None:
        number, _ = self._uses.pop(block_hash)
        del self._numbers[bisect_left(self._numbers, number)]
        del self._by_number[number]

    def _lower_threshold(self) -> None:
        """Samples a sixteenth less: what was counted so far stands for as many lookups as before."""
        keep = _MAX_SAMPLE * 15 // 16
        self._state.threshold = self._by_hash[keep]
        for block_hash in self._by_hash[keep:]:
            self._forget(block_hash)
        del self._by_hash[keep:]
        before = self._rate
        self._rate = _rate_of(self._state.threshold)
        self._scale(self._rate / before)

    def _scale(self, factor: float) -> None:
        state = self._state
        state.num_lookups *= factor
        state.expected_lookups *= factor
        state.depths = {bucket: weight * factor for bucket, weight in state.depths.items()}

    def hit_rate(self, size_blocks: int) -> float:
        """Share of the looked-up blocks that a cache of this size finds."""
        return next((rate for size, rate in reversed(self._curve()) if size <= size_blocks), 0.0)

    def _curve(self) -> list[tuple[int, float]]:
        """Sizes in blocks, each the deepest of a bucket, and hit rates."""
        state = self._state
        if state.expected_lookups <= 0:
            return []
        # The sample may have more or less than its share of the few blocks that everybody looks up: those are shallow.
        hits = state.expected_lookups - state.num_lookups
        points = []
        for bucket in sorted(state.depths):
            hits += state.depths[bucket]
            points.append((_deepest(bucket), min(1.0, max(0.0, hits / state.expected_lookups))))
        return points

    def advice(self, block_bytes: int, now_s: float) -> CapacityAdvice:
        """What the observations so far say; costs a step for each sampled block."""
        curve = self._curve()
        best = max((rate for _, rate in curve), default=0.0)
        enough = next((size for size, rate in curve if rate * (1 + SMALL_GAIN) >= best), 0) if best else 0
        recent = sum(1 for _, used_s in self._uses.values() if used_s >= now_s - WORKING_SET_S)
        return CapacityAdvice(
            sample_rate=self._rate,
            num_sampled=len(self._uses),
            working_set_bytes=round(recent / self._rate) * block_bytes,
            curve=tuple(CurvePoint(size * block_bytes, round(rate, 4)) for size, rate in _thin(curve)),
            enough_bytes=enough * block_bytes,
        )

    def dump(self) -> bytes:
        """Equal advisers give equal bytes."""
        state = self._state
        recent = [(block_hash, self._uses[block_hash][1]) for block_hash in map(self._by_number.get, self._numbers)
                  if block_hash is not None]  # fmt: skip
        depths = dict(sorted(state.depths.items()))
        dumped = _State(state.threshold, depths, state.num_lookups, state.expected_lookups, recent)
        return msgspec.msgpack.encode(dumped)

    def load(self, data: bytes) -> None:
        """Makes a new adviser equal to the one that gave `data`."""
        self._state = msgspec.msgpack.decode(data, type=_State)
        self._rate = _rate_of(self._state.threshold)
        for block_hash, used_s in self._state.recent:
            self._append(block_hash, used_s)
        self._by_hash = sorted(self._uses)
        self._state.recent = []

    def check_integrity(self) -> None:
        """Raises IntegrityError when the sample's records disagree."""
        numbers = sorted(number for number, _ in self._uses.values())
        if numbers != self._numbers or sorted(self._uses) != self._by_hash or len(numbers) > _MAX_SAMPLE:
            raise IntegrityError("the capacity adviser's sample is inconsistent")


def _rate_of(threshold: bytes) -> float:
    """Share of all hashes that lie below the threshold."""
    return 1.0 if threshold == _ALL else int.from_bytes(threshold[:8].ljust(8, b"\0"), "big") / (1 << 64)


def _bucket(depth: int) -> int:
    """Exact up to 15, then eight buckets an octave."""
    shift = max(0, depth.bit_length() - 4)
    return shift * _STEPS + (depth >> shift)


def _deepest(bucket: int) -> int:
    """The largest depth of a bucket."""
    shift = max(0, bucket // _STEPS - 1)
    return ((bucket - shift * _STEPS + 1) << shift) - 1


def _thin(curve: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """About two points an octave, and the last."""
    thinned: list[tuple[int, float]] = []
    for point in curve:
        if not thinned or point[0] >= 1.4 * thinned[-1][0]:
            thinned.append(point)
    if curve and thinned[-1] != curve[-1]:
        thinned.append(curve[-1])
    return thinned
