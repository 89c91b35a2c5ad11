"""What a router knows of a replica from the directory alone."""

from __future__ import annotations

from typing import NamedTuple

from remora.platform.base.ids import ModelId


class Listed(NamedTuple):
    """A replica in the directory."""

    model_id: ModelId
    node_id: str
    #: False while it drains: it gets nothing new, and what it has is moved away.
    accepts: bool

    def takes(self, model_id: ModelId) -> bool:
        """Whether it takes requests of the model."""
        return self.accepts and self.model_id == model_id
