"""docs/cases.md says which tests stand for which reported fault; the tests say so by their names."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
NUM_CASES = 25


def test_every_reported_case_is_a_test_with_its_number_in_the_name_or_has_a_reason() -> None:
    tested, _, untested = (REPOSITORY / "docs" / "cases.md").read_text().partition("These cannot happen here")
    listed = {
        int(row[1]): set(re.findall(r"`([^`]+\.py)`", row[2]))
        for row in re.finditer(r"^\| (\d+) \|(.*)$", tested, re.M)
    }
    named: dict[int, set[str]] = {}
    for path in (REPOSITORY / "tests").rglob("test_*.py"):
        for number in re.findall(r"def test_case_(\d\d)_", path.read_text()):
            named.setdefault(int(number), set()).add(str(path.relative_to(REPOSITORY / "tests")))
    assert listed == named
    reasons = [int(row[1]) for row in re.finditer(r"^\| (\d+) \| .+ \| .{20,} \|$", untested, re.M)]
    assert sorted([*listed, *reasons]) == list(range(1, NUM_CASES + 1))
