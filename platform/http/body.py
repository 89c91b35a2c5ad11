"""Request bodies: bounded, JSON, validated."""

from __future__ import annotations

from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from remora.platform.base.errors import InvalidRequest, TooLarge
from remora.platform.http.errors import invalid_request

BodyModel = TypeVar("BodyModel", bound=BaseModel)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises TooLarge as soon as it is known to exceed `max_bytes`, whatever the header says."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise TooLarge(f"The body has {declared} bytes; at most {max_bytes} are allowed.")
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise TooLarge(f"The body has more than the {max_bytes} bytes that are allowed.")
        chunks.append(chunk)
    return b"".join(chunks)


async def read_model(request: Request, model: type[BodyModel], max_bytes: int) -> BodyModel:
    """The body as `model`.

    Only JSON content types are taken: a browser then asks first (CORS) before a foreign page may post here.
    """
    content_type = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise InvalidRequest(
            f"content-type: {content_type!r} is not allowed: send application/json.", field="content-type"
        )
    try:
        return model.model_validate_json(await read_body(request, max_bytes))
    except ValidationError as error:
        raise invalid_request(error) from None
