"""The namespaces of the configuration: shares of devices' arenas."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ByteSize, Field

from remora.platform.base.config_types import Name, NamespaceName, Section
from remora.platform.base.model_config import KVPrecision, KVWord, precision_pair


class NamespaceConfig(Section):
    """A share of a device's arena for one model: `guaranteed <= limit`, idle memory in between is borrowed.

    `a/b` is a part of `a`, if there is one: guarantee and limit of `a` count what is below it.
    """

    name: NamespaceName
    model: Name
    guaranteed: ByteSize = ByteSize(0)
    #: None: the whole arena.
    limit: ByteSize | None = None
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    tenant: str = ""
    share_group: str = ""
    #: Precision of its KV, as in models; None: the model's. A part of another namespace has that one's.
    kv_precision: KVPrecision | None = None
    #: Nodes that have its sealed KV: 2: it is copied to another one in the background.
    kv_replicas: Literal[1, 2] = 1
    #: Sessions kept; beyond it the least recently used one that is neither pinned nor in use goes.
    max_sessions: Annotated[int, Field(ge=1, le=1_000_000)] = 1000
    #: When a session's context is full: "error", or "roll": the older half of what is not kept leaves it.
    context_overflow: Literal["error", "roll"] = "error"
    #: Tokens at the beginning that a rolling context keeps.
    keep_tokens: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    #: Most KV of one session; None: what the model's context takes.
    cache_limit: ByteSize | None = None

    @property
    def kv_precisions(self) -> tuple[KVWord, KVWord] | None:
        """Of K and of V; None: the model's, or those of the namespace above it."""
        return None if self.kv_precision is None else precision_pair(self.kv_precision)
