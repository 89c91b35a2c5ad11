"""Writes the golden files anew: python tests/unit/helm/update_golden.py. Read the difference before you commit it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from chart_support import CHART_DIR, GOLDEN_DIR, GOLDEN_SETS, golden_text, values_of


def main() -> None:
    import helm_python

    with helm_python.Chart.load(CHART_DIR) as chart:
        for name in GOLDEN_SETS:
            texts = chart.render(values_of(name), name="demo", namespace="models")
            (GOLDEN_DIR / f"{name}.yaml").write_text(golden_text(texts))


if __name__ == "__main__":
    main()
