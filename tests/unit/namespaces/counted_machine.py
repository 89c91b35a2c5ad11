"""State machines that say how much of them ran."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, run_state_machine_as_test

#: Steps that every machine takes in one run of the tests, at least.
MIN_STEPS = 2000


class CountedMachine(RuleBasedStateMachine):
    """Counts its steps, and whatever else its rules count, over all examples of a run."""

    num_examples: ClassVar[int] = 0
    num_checks: ClassVar[int] = 0
    counts: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        type(self).num_examples += 1

    @invariant()
    def _a_step_is_counted(self) -> None:
        type(self).num_checks += 1

    @classmethod
    def num_steps(cls) -> int:
        """Rules that ran; the invariants are checked once more in each example, before the first."""
        return cls.num_checks - cls.num_examples

    @classmethod
    def run(cls, *, max_examples: int, stateful_step_count: int) -> None:
        """Runs the machine; fails when it took fewer than MIN_STEPS."""
        cls.num_examples, cls.num_checks, cls.counts = 0, 0, Counter()
        given = settings(max_examples=max_examples, stateful_step_count=stateful_step_count, deadline=None)
        run_state_machine_as_test(cls, settings=given)
        assert cls.num_steps() >= MIN_STEPS, f"{cls.__name__} took {cls.num_steps()} steps"
