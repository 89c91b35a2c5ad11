"""The Serve application for a Ray cluster that somebody else runs (KubeRay): its Serve configuration names it.

    applications:
      - import_path: remora.platform.cluster_app:cluster_app
        args: {config: /etc/remora/remora.yaml, sha256: ...}

The digest says which document is meant: Serve rolls the application over when its arguments change, and a mounted
ConfigMap follows a change only some time later.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from remora.platform.base.config import RemoraConfig, load_config
from remora.platform.base.errors import ConfigError

if TYPE_CHECKING:
    from ray import serve

#: The kubelet renews mounted ConfigMaps within its sync period and the life of its cache: a minute each.
MOUNT_TIMEOUT_S = 240.0
_POLL_S = 1.0


Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ClusterAppArgs(BaseModel):
    """What the Serve configuration passes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: The configuration file, on the node that builds the application (the head).
    config: Path
    #: Hex digest of the file that is meant; None: whatever the file holds now.
    sha256: Sha256 | None = None
    #: The same for the file that `tenants_file` of the configuration names.
    tenants_sha256: Sha256 | None = None


def cluster_app(args: dict[str, Any]) -> serve.Application:
    """Builds the application, and tells living pools their quotas: Serve calls it once for every new configuration.

    Raises ConfigError; Serve shows the message in the application's status, and what ran before runs on.
    """
    import ray

    from remora.deployments.quota_update import update_quotas
    from remora.platform.app import build_app

    try:
        parsed = ClusterAppArgs.model_validate(args)
    except ValidationError as error:
        raise ConfigError(f"args of the Serve application: {error}") from None
    config = read_cluster_config(parsed)
    if ray.is_initialized():
        update_quotas(config)
    return build_app(config, drain_timeout_s=config.http.drain_timeout_s)


def read_cluster_config(args: ClusterAppArgs, *, timeout_s: float = MOUNT_TIMEOUT_S) -> RemoraConfig:
    """Waits for the document that is meant, and validates it.

    Raises ConfigError when it does not come, is wrong, or has not been allowed to be served to a network.
    """
    deadline_s = time.monotonic() + timeout_s
    if args.sha256 is not None:
        _await_digest(args.config, args.sha256, deadline_s)
    config = load_config(args.config)
    if args.tenants_sha256 is not None and config.tenants_file is not None:
        _await_digest(args.config.parent / config.tenants_file, args.tenants_sha256, deadline_s)
        config = load_config(args.config)
    # Where Serve listens is up to the Serve configuration of the cluster: it cannot be told from here.
    if not config.http.trusted_network and not config.tenants:
        raise ConfigError(
            f"{args.config}: http.trusted_network: must be true on a cluster without tenants, because its HTTP port "
            "can be reached by others; set it when a network policy or an authenticating proxy controls access."
        )
    return config


def _await_digest(path: Path, sha256: str, deadline_s: float) -> None:
    while True:
        try:
            found = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            found = str(error.strerror)
        if found == sha256:
            return
        if time.monotonic() >= deadline_s:
            raise ConfigError(f"{path}: the configuration with digest {sha256} is not there yet, but {found}.")
        time.sleep(_POLL_S)
