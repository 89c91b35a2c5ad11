"""Bodies and queries of /v1/sessions."""

from __future__ import annotations

import uuid
from typing import Annotated, Literal

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from remora.namespaces.edits import ContextPolicy
from remora.platform.base.namespace_config import NamespaceConfig
from remora.platform.http.errors import invalid_request

#: Part of URLs and of names in logs.
SessionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$")]


def new_session_id() -> str:
    """A name for a session that its client leaves unnamed."""
    return f"sess-{uuid.uuid4().hex}"


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class CreateBody(_Body):
    """POST /v1/sessions."""

    #: Made up if left out.
    id: SessionName | None = None
    model: Annotated[str, Field(min_length=1)]
    #: The model's default if left out; the header X-Remora-Namespace goes first.
    namespace: str | None = None
    #: Seconds without use after which it goes; never if left out.
    ttl_s: Annotated[float, Field(gt=0, le=10 * 365 * 86400)] | None = None
    #: Of its turns, where a request gives none: lower goes first.
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    #: Whether a turn is on disk before its end is sent.
    durable: bool = True
    #: These three: the namespace's if left out.
    context_overflow: Literal["error", "roll"] | None = None
    keep_tokens: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    #: Bytes of KV.
    cache_limit: Annotated[int, Field(ge=1)] | None = None


def context_policy(body: CreateBody, namespace: NamespaceConfig) -> ContextPolicy:
    """Of a new session."""
    own_limit = namespace.cache_limit if body.cache_limit is None else body.cache_limit
    return ContextPolicy(
        overflow=body.context_overflow or namespace.context_overflow,
        keep_tokens=namespace.keep_tokens if body.keep_tokens is None else body.keep_tokens,
        cache_limit_bytes=None if own_limit is None else int(own_limit),
    )


class RemoveBody(_Body):
    """Tokens [start, end) of the log."""

    start: Annotated[int, Field(ge=0)]
    #: To the end of the log if left out.
    end: Annotated[int, Field(ge=0)] | None = None


class TruncateBody(_Body):
    """POST /v1/sessions/{id}/truncate: what is kept (the first tokens or turns), or what goes; one of the three."""

    num_tokens: Annotated[int, Field(ge=0)] | None = None
    num_turns: Annotated[int, Field(ge=0)] | None = None
    remove: RemoveBody | None = None


class EmptyBody(_Body):
    """POST /v1/sessions/{id}/pin and unpin."""


class ListQuery(BaseModel):
    """GET /v1/sessions."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    namespace: str | None = None
    #: The last id of the page before.
    after: str = ""
    limit: Annotated[int, Field(ge=1, le=1000)] = 100


class ShowQuery(BaseModel):
    """GET /v1/sessions/{id}."""

    model_config = ConfigDict(extra="forbid")

    include_tokens: bool = False


def read_list_query(request: Request) -> ListQuery:
    """Raises InvalidRequest naming the parameter."""
    try:
        return ListQuery.model_validate(dict(request.query_params))
    except ValidationError as error:
        raise invalid_request(error) from None


def read_show_query(request: Request) -> ShowQuery:
    """Raises InvalidRequest naming the parameter."""
    try:
        return ShowQuery.model_validate(dict(request.query_params))
    except ValidationError as error:
        raise invalid_request(error) from None
