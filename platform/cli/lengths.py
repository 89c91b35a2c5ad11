"""How long prompts or answers of a load are: `128`, evenly `64-256`, or `128~0.5`, whose logarithm is normal."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

import click

_FORM = re.compile(r"(\d+)(?:-(\d+)|~(\d*\.?\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens: `low` alone, any from `low` to `high`, or around the median `low` with `sigma` of the logarithm."""

    low: int
    high: int | None = None
    sigma: float = 0.0

    def draw(self, numbers: random.Random, *, most: int = 1 << 20) -> int:
        """At least 1, at most `most`."""
        if self.high is not None:
            return min(most, numbers.randint(self.low, self.high))
        if self.sigma:
            return max(1, min(most, round(self.low * math.exp(numbers.gauss(0.0, self.sigma)))))
        return min(most, self.low)

    def __str__(self) -> str:
        return f"{self.low}" + (f"-{self.high}" if self.high is not None else f"~{self.sigma:g}" if self.sigma else "")


def lengths(_context: click.Context, _parameter: click.Parameter, value: str) -> Lengths:
    """The callback of an option. Raises BadParameter with the forms that there are."""
    found = _FORM.fullmatch(value)
    if found is None or int(found[1]) < 1 or (found[2] is not None and int(found[2]) < int(found[1])):
        raise click.BadParameter(f"{value!r} is no length such as 128, 64-256 or 128~0.5")
    return Lengths(low=int(found[1]), high=None if found[2] is None else int(found[2]), sigma=float(found[3] or 0.0))
