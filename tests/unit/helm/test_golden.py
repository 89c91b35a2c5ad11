"""Manifests are those that somebody has read; a change of them is a change of a file here."""

from __future__ import annotations

from typing import Any

import pytest
from chart_support import GOLDEN_DIR, GOLDEN_SETS, golden_text, values_of


@pytest.mark.parametrize("name", GOLDEN_SETS)
def test_manifests_are_as_they_were_reviewed(name: str, chart: Any) -> None:
    rendered = golden_text(chart.render(values_of(name), name="demo", namespace="models"))
    kept = (GOLDEN_DIR / f"{name}.yaml").read_text()
    assert rendered == kept, "read what has changed, then run tests/unit/helm/update_golden.py"
