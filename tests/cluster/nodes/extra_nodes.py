"""Further nodes of the session's Ray, which can be killed whole."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from remora.platform.cli.processes import kill_marked

#: Names the processes of a node in their environment.
_MARK = "REMORA_TEST_NODE"
_START_TIMEOUT_S = 60.0


class ExtraNodes:
    """Each is a raylet of this machine, on loopback."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._names: dict[str, str] = {}
        self._num_started = 0

    @property
    def node_ids(self) -> set[str]:
        return set(self._names)

    def add(self, *, num_gpus: int = 0, **resources: float) -> str:
        """Starts a node that offers these; returns its id when Ray knows it. One at a time, or Ray mixes them up."""
        import ray

        self._num_started += 1
        name = f"{os.getpid()}-{self._num_started}"
        known = _living()
        with (self._log_dir / f"node-{self._num_started}.log").open("wb") as log:
            subprocess.Popen(
                [
                    sys.executable,
                    str(Path(__file__).with_name("start_node.py")),
                    ray.get_runtime_context().gcs_address,
                    str(num_gpus),
                    *(f"{resource}={count}" for resource, count in resources.items()),
                ],
                env=os.environ | {_MARK: name},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not (found := _living() - known):
            assert time.monotonic() < deadline_s, "the node has not joined"
            time.sleep(0.05)
        (node_id,) = found
        self._names[node_id] = name
        return node_id

    def kill(self, node_id: str) -> None:
        """SIGKILL of the raylet and of everything that it started."""
        assert kill_marked(_MARK, self._names.pop(node_id))

    def close(self) -> None:
        for node_id in list(self._names):
            self.kill(node_id)


def _living() -> set[str]:
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}
