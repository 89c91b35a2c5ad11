"""JSON answers of what msgspec knows: structs, dataclasses, containers."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Response


class MsgspecJSONResponse(Response):
    """The content as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)
