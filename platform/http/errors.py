"""Errors in OpenAI's shape, {"error": {"message", "type", "param", "code"}}, with the status the error tree gives."""

from __future__ import annotations

import logging
import math
import re

import msgspec
from fastapi import FastAPI, Request, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from remora.platform.base.errors import InvalidRequest, NotFound, RemoraError, RequestError
from remora.platform.base.model_config import KV_FORMS

logger = logging.getLogger(__name__)

#: As OpenAI answers; a wrong key is an invalid request there.
_TYPES = {401: "invalid_request_error", 403: "permission_error", 429: "rate_limit_error"}
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}


class MalformedBody(RequestError):
    """The body cannot be read as JSON at all."""

    code = "invalid_json"


def error_document(error: RemoraError) -> dict[str, dict[str, str | None]]:
    """The JSON document of an error. Faults of ours say no more than their class."""
    code = error.code
    if isinstance(error, NotFound) and error.field == "model":
        code = "model_not_found"
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    if error.status == 500:
        message = f"Internal error ({type(error).__name__}); the log of the router or the replica has the details."
    else:
        message = str(error)
    return {"error": {"message": message, "type": kind, "param": error.field, "code": code}}


def error_response(error: RemoraError) -> Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    body = msgspec.json.encode(error_document(error))
    return Response(body, status_code=error.status, headers=headers, media_type="application/json")


def invalid_request(error: ValidationError) -> RequestError:
    """The first fault that pydantic found, as a sentence that starts with the field's name."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return MalformedBody(f"The body is not valid JSON: {first['ctx']['error']}.")
    field = ".".join(str(part) for part in first["loc"] if part not in KV_FORMS)
    message = re.sub(r"^(Value error|Assertion failed), ", "", first["msg"])
    if first["type"] == "missing":
        return InvalidRequest(f"{field}: is required.", field=field)
    if not field:
        return InvalidRequest(f"The body must be a JSON object: {message}.")
    if first["type"] == "value_error":
        return InvalidRequest(f"{field}: {message}", field=field)
    shown = repr(first["input"])
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return InvalidRequest(f"{field}: {shown} is not allowed: {message}.", field=field)


def install_error_handlers(app: FastAPI) -> None:
    """Makes every error that leaves a route one of the shape above."""

    @app.exception_handler(RemoraError)
    async def on_remora_error(_request: Request, error: RemoraError) -> Response:
        if error.status == 500:
            logger.error("request failed", exc_info=error)
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        document = {
            "error": {
                "message": message,
                "type": _TYPES.get(error.status_code, "invalid_request_error"),
                "param": None,
                "code": _HTTP_CODES.get(error.status_code, "http_error"),
            }
        }
        body = msgspec.json.encode(document)
        return Response(body, status_code=error.status_code, headers=error.headers, media_type="application/json")

    @app.exception_handler(Exception)
    async def on_bug(_request: Request, error: Exception) -> Response:
        logger.error("request failed", exc_info=error)
        return error_response(RemoraError(str(error)))
