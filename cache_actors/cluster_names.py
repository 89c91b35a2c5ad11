"""Under which Ray namespace the named actors of a cluster live."""

from __future__ import annotations


def ray_namespace(cluster_name: str) -> str:
    """Ray namespace of the cluster's named actors."""
    return f"remora-{cluster_name}"
