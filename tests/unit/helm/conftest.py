"""The chart, rendered without a cluster."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))

from chart_support import CHART_DIR, VALUE_SETS, Manifests, Render, values_of


@pytest.fixture(scope="session")
def chart() -> Iterator[Any]:
    helm_python = pytest.importorskip("helm_python")
    with helm_python.Chart.load(CHART_DIR) as loaded:
        yield loaded


@pytest.fixture(scope="session")
def render(chart: Any) -> Render:
    """`render(values)` gives every manifest."""

    def documents(values: dict[str, Any] | None = None, name: str = "demo") -> Manifests:
        texts = chart.render(values or {}, name=name, namespace="models")
        return [
            document
            for path, text in texts.items()
            if path.endswith(".yaml")
            for document in yaml.load_all(text, yaml.CSafeLoader)
            if document is not None
        ]

    return documents


@pytest.fixture(scope="session")
def rendered(render: Render) -> Callable[[str], Manifests]:
    """The manifests of a value set, rendered once; each caller gets its own."""
    cache: dict[str, Manifests] = {}

    def of(name: str) -> Manifests:
        if name not in cache:
            cache[name] = render(values_of(name))
        return copy.deepcopy(cache[name])

    return of


@pytest.fixture(params=VALUE_SETS)
def manifests(request: pytest.FixtureRequest, rendered: Callable[[str], Manifests]) -> Manifests:
    """The manifests of every value set in turn."""
    return rendered(request.param)
