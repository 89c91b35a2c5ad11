"""Body of POST /v1/sessions/{id}/fork: one new session, or branches that generate at once.

Beside `branches` stand the fields that all of them share, those of a chat or text completion; a branch may have its
own instead. `messages` make them chats, `prompt` makes them text completions.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from remora.namespaces.session_log import SessionState, cut_log
from remora.platform.base.errors import InvalidRequest, RequestError
from remora.platform.base.ids import SessionId
from remora.platform.http.chat_request import ChatRequest
from remora.platform.http.completion_request import CompletionRequest
from remora.platform.http.errors import invalid_request
from remora.platform.http.session_requests import SessionName

MAX_BRANCHES: Final = 32
#: Where a single new session goes on, if not with its parent's model.
_OF_A_MODEL: Final = ("model", "namespace")
#: What only the whole call can say.
_OF_THE_CALL: Final = ("stream", "stream_options", "num_tokens", "id", "branches")


class BranchFields(BaseModel):
    """What a branch does in its own way: any field of a generation request, and these."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    #: Its name; made up if left out.
    session_id: SessionName | None = None
    #: Whether it stays as a session of its own; as the call says if left out.
    keep: bool | None = None


class ForkBody(BaseModel):
    """POST /v1/sessions/{id}/fork. Without `branches` only `id`, `num_tokens`, and `model` with `namespace`."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    #: Of the one new session.
    id: SessionName | None = None
    #: How much of the log the new sessions have; all if left out.
    num_tokens: Annotated[int, Field(ge=0)] | None = None
    branches: Annotated[list[BranchFields], Field(min_length=1, max_length=MAX_BRANCHES)] | None = None
    #: Whether branches stay as sessions of their own.
    keep: bool = True

    @model_validator(mode="after")
    def _together(self) -> ForkBody:
        if self.branches is None:
            extra = self.model_extra or {}
            others = [*(name for name in extra if name not in _OF_A_MODEL), *(self.model_fields_set & {"keep"})]
            if others:
                raise InvalidRequest(f"{others[0]}: is only allowed with branches.", field=others[0])
            for name, value in extra.items():
                if not (isinstance(value, str) and value):
                    raise InvalidRequest(f"{name}: {value!r} is not allowed; must be a name.", field=name)
            if "namespace" in extra and "model" not in extra:
                raise InvalidRequest("namespace: is only allowed with a model.", field="namespace")
        elif self.id is not None:
            raise InvalidRequest("id: is not allowed with branches; a branch has a session_id.", field="id")
        return self

    @property
    def other_model(self) -> str | None:
        """Of the one new session, if it is to go on with another model; and its namespace there."""
        return None if self.branches is not None else (self.model_extra or {}).get("model")

    @property
    def other_namespace(self) -> str | None:
        return (self.model_extra or {}).get("namespace")


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchRequest:
    """One branch, validated."""

    index: int
    #: Its name, if the client has given one.
    session_id: SessionId | None
    keep: bool
    fields: ChatRequest | CompletionRequest
    #: Fields that stand in the branch itself.
    own: frozenset[str]

    def named(self, error: RequestError) -> RequestError:
        """The error, with its field named from the call's body."""
        return _named(error, self.index, self.own)


def cut_parent(parent: SessionState, num_tokens: int | None) -> SessionState:
    """The session, with its tokens, as far as its forks have it; None: all of it. Raises InvalidRequest."""
    if num_tokens is None:
        return parent
    if num_tokens > parent.num_tokens:
        raise InvalidRequest(f"num_tokens: {num_tokens} is not 0 to {parent.num_tokens}.", field="num_tokens")
    return msgspec.structs.replace(parent, **cut_log(parent, num_tokens))


def branch_requests(parent_id: SessionId, model: str, body: ForkBody) -> list[BranchRequest]:
    """Of a body with branches. Raises a RequestError that names the field, and its branch if it stands there."""
    shared = {"model": model, **(body.model_extra or {})}
    branches = body.branches or []
    is_text = any("prompt" in each for each in (shared, *(branch.model_extra or {} for branch in branches)))
    kind: type[ChatRequest | CompletionRequest] = CompletionRequest if is_text else ChatRequest
    made: list[BranchRequest] = []
    for index, branch in enumerate(branches):
        name = None if branch.session_id is None else SessionId(branch.session_id)
        if name is not None and any(name == earlier.session_id for earlier in made):
            raise _of_branch(index, InvalidRequest(f"session_id: {name!r} names two branches.", field="session_id"))
        own = branch.model_extra or {}
        misplaced = next((field for field in _OF_THE_CALL if field in own), None)
        if misplaced is not None:
            message = f"{misplaced}: belongs beside branches, not into one."
            raise _of_branch(index, InvalidRequest(message, field=misplaced))
        keep = body.keep if branch.keep is None else branch.keep
        # That it goes on from a session also says what it may not ask for, whatever it will be called.
        fields = {**shared, **own, "session_id": name or parent_id}
        parsed = _parsed(kind, index, fields, own)
        made.append(BranchRequest(index=index, session_id=name, keep=keep, fields=parsed, own=frozenset(own)))
    return made


def _parsed(
    kind: type[ChatRequest | CompletionRequest], index: int, fields: dict[str, Any], own: dict[str, Any]
) -> ChatRequest | CompletionRequest:
    try:
        return kind.model_validate_json(msgspec.json.encode(fields))
    except ValidationError as error:
        found = invalid_request(error)
    except RequestError as error:
        found = error
    raise _named(found, index, own)


def _named(error: RequestError, index: int, own: Collection[str]) -> RequestError:
    return _of_branch(index, error) if (error.field or "").partition(".")[0] in own else error


def _of_branch(index: int, error: RequestError) -> RequestError:
    """The error, with its field named from the call's body."""
    return type(error)(f"branches.{index}.{error}", field=f"branches.{index}.{error.field}")
