"""How likely a cached block is to be found again, by its class and its age: learnt while the pool runs.

Ages are counted in releases, so that a busy hour and a quiet one look alike. For each class and age the model keeps
how many blocks came back at that age and how long blocks were exposed at it, both fading: their quotient is the rate of
return. Blocks that were evicted stay under observation while their ghost is remembered, so that the model also knows
ages that the cache does not hold. What a class lacks in observations it borrows from all classes together.

Worth of a block: the best ratio of returns to occupied time that keeping it up to any age can give, which is what the
occupied block could earn at most (Gittins' index; Beckmann et al., "LHD", NSDI 2018, rank by a similar density).
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

#: Two age buckets an octave: bucket b holds ages from _FIRST_AGES[b] to _FIRST_AGES[b + 1] - 1.
_NUM_BUCKETS = 48
_FIRST_AGES = [((2 + bucket % 2) << (bucket // 2)) - 2 for bucket in range(_NUM_BUCKETS + 1)]
_WIDTHS = [_FIRST_AGES[bucket + 1] - _FIRST_AGES[bucket] for bucket in range(_NUM_BUCKETS)]
#: Epochs in a turnover of the cache, at most.
_MAX_TICKS = 24
#: Share of old observations that is left after a tick.
_FADING = 0.995
#: Observed blocks that are as good as what all classes together say; in a small cache, a share of it.
_MAX_PRIOR_BLOCKS = 200.0
_PRIOR_SHARE = 1 / 8
#: Observed returns that are as good as the common ratio.
_PRIOR_RETURNS = 20.0
#: Rate of return at ages not observed yet, against the one a bucket before: about 1 / age.
_SLOPE = 0.7


def age_bucket(age: int) -> int:
    """0 → 0, 1 → 1, 2 and 3 → 2, 4 and 5 → 3, 6 to 9 → 4, ..."""
    octave = (age + 2).bit_length() - 2
    bucket = 2 * octave + ((age + 2) >> octave) - 2
    return bucket if bucket < _NUM_BUCKETS else _NUM_BUCKETS - 1


class _Class(msgspec.Struct, array_like=True):
    """Observations of one class of blocks."""

    #: Blocks under observation, by the epoch in which they were released.
    cohorts: dict[int, int]
    returns: list[float]
    exposure: list[float]
    worth: list[float]


class _State(msgspec.Struct, array_like=True):
    epoch_length: int = 8
    next_tick: int = 8
    classes: dict[int, _Class] = {}


class _Learnt(NamedTuple):
    """What a tick found."""

    #: Returns and exposure, by class in ascending order: sums of floats depend on it.
    classes: dict[int, tuple[list[float], list[float]]]
    capacity: int


class ReuseModel:
    """Observes releases, returns and departures of blocks; `tick` learns from them.

    `now` is the number of releases so far, `since` the number at the release of the block.
    """

    def __init__(self) -> None:
        self._state = _State()
        #: Of the last tick, until somebody asks what it says: most ticks of a cache that is not full are never asked.
        self._learnt: _Learnt | None = None

    @property
    def next_tick(self) -> int:
        return self._state.next_tick

    def enter(self, rank: int, now: int) -> None:
        """A block of this class was released."""
        found = self._state.classes.get(rank)
        if found is None:
            zeros = [0.0] * _NUM_BUCKETS
            recency = [1.0 / (1 + age) for age in _FIRST_AGES[:_NUM_BUCKETS]]
            found = self._state.classes[rank] = _Class({}, zeros, list(zeros), recency)
        epoch = now // self._state.epoch_length
        found.cohorts[epoch] = found.cohorts.get(epoch, 0) + 1

    def leave(self, rank: int, since: int) -> None:
        """The block is observed no longer."""
        cohorts = self._state.classes[rank].cohorts
        epoch = since // self._state.epoch_length
        cohorts[epoch] -= 1
        if not cohorts[epoch]:
            del cohorts[epoch]

    def returned(self, rank: int, age: int) -> None:
        """A block of this class was found, or would have been if it had been kept."""
        self._state.classes[rank].returns[age_bucket(age)] += 1.0

    def worth(self, rank: int, age: int) -> float:
        """Returns per block and release, as of the last tick."""
        self._weigh()
        return self._state.classes[rank].worth[age_bucket(age)]

    def tick(self, now: int, capacity: int) -> None:
        """Learns from what was observed; due when `now` reaches `next_tick`: twelve to twenty-four times while a cache
        of this capacity turns over."""
        state = self._state
        while _MAX_TICKS * state.epoch_length < capacity:
            self._double_epochs()
        state.next_tick = now + state.epoch_length
        for each in state.classes.values():
            self._observe(each, now)
        self._learnt = _Learnt(
            {rank: (list(each.returns), list(each.exposure)) for rank, each in sorted(state.classes.items())}, capacity
        )

    def _weigh(self) -> None:
        """Makes worth of what the last tick found, if that is still to be done."""
        if self._learnt is None:
            return
        classes, capacity = self._learnt
        self._learnt = None
        prior_blocks = min(_MAX_PRIOR_BLOCKS, _PRIOR_SHARE * capacity)
        common = _common_rates(list(classes.values()), capacity, prior_blocks)
        for rank, (returns, exposure) in classes.items():
            rates = _smooth(returns, exposure, common, prior_blocks)
            self._state.classes[rank].worth = _best_ratios(rates, 4 * capacity)

    def _double_epochs(self) -> None:
        self._state.epoch_length *= 2
        for each in self._state.classes.values():
            merged: dict[int, int] = {}
            for epoch, num_blocks in each.cohorts.items():
                merged[epoch // 2] = merged.get(epoch // 2, 0) + num_blocks
            each.cohorts = merged

    def _observe(self, each: _Class, now: int) -> None:
        """Everybody under observation has been exposed for one more epoch."""
        length = self._state.epoch_length
        for bucket in range(_NUM_BUCKETS):
            each.returns[bucket] *= _FADING
            each.exposure[bucket] *= _FADING
        for epoch, num_blocks in each.cohorts.items():
            age = max(0, now - epoch * length - length // 2)
            each.exposure[age_bucket(age)] += num_blocks * length

    def dump(self) -> bytes:
        """Equal models give equal bytes."""
        self._weigh()
        state = self._state
        classes = {}
        for rank, each in sorted(state.classes.items()):
            classes[rank] = _Class(dict(sorted(each.cohorts.items())), each.returns, each.exposure, each.worth)
        return msgspec.msgpack.encode(_State(state.epoch_length, state.next_tick, classes))

    def load(self, data: bytes) -> None:
        self._state = msgspec.msgpack.decode(data, type=_State)
        self._learnt = None


def _common_rates(classes: list[tuple[list[float], list[float]]], capacity: int, prior_blocks: float) -> list[float]:
    """Rate of return of all classes together, by age."""
    all_returns = [sum(returns[bucket] for returns, _ in classes) for bucket in range(_NUM_BUCKETS)]
    all_exposure = [sum(exposure[bucket] for _, exposure in classes) for bucket in range(_NUM_BUCKETS)]
    rate = (sum(all_returns) + 1.0) / (sum(all_exposure) + max(1, capacity))
    rates = []
    for bucket in range(_NUM_BUCKETS):
        prior = prior_blocks * _WIDTHS[bucket]
        smoothed = (all_returns[bucket] + prior * rate) / (all_exposure[bucket] + prior)
        rates.append(smoothed)
        rate = smoothed if all_exposure[bucket] else rate * _SLOPE
    return rates


def _smooth(returns: list[float], exposure: list[float], common: list[float], prior_blocks: float) -> list[float]:
    """Rates of return of one class. Where it has been observed little, they are drawn towards the higher of two
    guesses: the common rate times the ratio of its returns to those that common rates would have given it, and what
    its own rate at a lower age suggests."""
    expected = 0.0
    for bucket, rate in enumerate(common):
        expected += exposure[bucket] * rate
    ratio = (sum(returns) + _PRIOR_RETURNS) / (expected + _PRIOR_RETURNS)
    rates: list[float] = []
    before = 0.0
    for bucket, rate in enumerate(common):
        prior = prior_blocks * _WIDTHS[bucket]
        expected_rate = max(ratio * rate, _SLOPE * before)
        before = (returns[bucket] + prior * expected_rate) / (exposure[bucket] + prior)
        rates.append(before)
    return rates


def _best_ratios(rates: list[float], horizon: int) -> list[float]:
    """For each age the highest ratio of expected returns to expected time, over all ages to keep the block up to."""
    chances = []
    for bucket, rate in enumerate(rates):
        expected = rate * _WIDTHS[bucket]
        chances.append(expected / (1.0 + expected))  # of returning in this bucket; exact arithmetic on every machine
    times = [_WIDTHS[bucket] * (1.0 - chance / 2) for bucket, chance in enumerate(chances)]
    # Beyond twice the horizon everything is as old as can be.
    last = age_bucket(2 * horizon) + 1
    best_ratios = []
    for first in range(last):
        alive, returns, time, best = 1.0, 0.0, 0.0, 0.0
        for bucket in range(first, last):
            chance = chances[bucket]
            returns += alive * chance
            time += alive * times[bucket]
            alive *= 1.0 - chance
            if returns > best * time:
                best = returns / time
            if time > horizon:
                break
        best_ratios.append(best)
    return best_ratios + best_ratios[-1:] * (_NUM_BUCKETS - last)
