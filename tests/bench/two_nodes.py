"""A platform on two nodes of this machine, for benchmarks: a Ray of its own, and a raylet, pool and replica a node."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster" / "nodes"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from node_platform import MODEL, NodePlatform, node_platform

from remora.platform.base.local_ray import new_temp_dir, start_local_ray, stop_local_ray

__all__ = ["MODEL", "NodePlatform", "two_nodes"]


@contextmanager
def two_nodes(*, max_model_len: int = 2048) -> Iterator[NodePlatform]:
    """Whole when the block begins, gone when it ends."""
    temp_dir = new_temp_dir()
    start_local_ray(temp_dir, namespace="bench", num_cpus=16, object_store_bytes=128 * 1024 * 1024)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            node_platform(Path(folder), max_model_len=max_model_len) as nodes,
        ):
            nodes.complete()
            yield nodes
    finally:
        stop_local_ray(temp_dir)
