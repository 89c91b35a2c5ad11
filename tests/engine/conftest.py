from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# Test modules are not packages (--import-mode=importlib); this makes engine_support importable for them, and what tests
# of pools have.
sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit" / "cache_actors")]

if TYPE_CHECKING:
    from engine_support import Harness


@pytest.fixture
def harness() -> Iterator[Callable[..., Harness]]:
    """Makes engines on a pool of their own; afterwards each must have given all blocks back."""
    from engine_support import Harness

    made: list[Harness] = []

    def make(**options) -> Harness:
        made.append(Harness(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()
        assert one.num_referenced_blocks == 0
