"""How sealed KV is copied to other nodes, for namespaces with `kv_replicas: 2`."""

from __future__ import annotations

from typing import Annotated

from pydantic import ByteSize, Field

from remora.platform.base.config_types import Section


class ReplicationConfig(Section):
    #: Most that one pool sends to others in a second.
    max_bytes_per_s: Annotated[ByteSize, Field(ge=64 * 1024)] = ByteSize(256 * 1024 * 1024)
