"""Joins one more node to a Ray of this machine, on loopback.

    python start_node.py GCS_ADDRESS NUM_GPUS RESOURCE=COUNT...

GPUs are what Ray is told, and need not be there. `ray start` would take the machine's address.
"""

from __future__ import annotations

import signal
import sys

from ray._private.node import Node
from ray._private.parameter import RayParams


def main(gcs_address: str, num_gpus: int, resources: dict[str, float]) -> None:
    parameters = RayParams(
        gcs_address=gcs_address,
        node_ip_address="127.0.0.1",
        num_cpus=2,
        num_gpus=num_gpus,
        resources=resources,
        object_store_memory=80 * 1024 * 1024,
        min_worker_port=0,
        max_worker_port=0,
        node_manager_port=0,
        include_log_monitor=False,
    )
    parameters.dashboard_agent_listen_port = None
    Node(parameters, head=False, shutdown_at_exit=True, spawn_reaper=False)
    signal.pause()


if __name__ == "__main__":
    main(
        sys.argv[1],
        int(sys.argv[2]),
        {name: float(count) for name, count in (item.split("=") for item in sys.argv[3:])},
    )
