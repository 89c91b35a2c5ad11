"""Every error Remora raises, in one tree.

RemoraError
├── ConfigError                  a configuration value is wrong; raised at start
├── RequestError                 the caller can mend it; becomes a 4xx
│   ├── InvalidRequest           400, names the field
│   ├── ContextLengthExceeded    400, both numbers
│   ├── Unauthorized             401
│   ├── Forbidden                403
│   ├── NotFound                 404 (model, namespace, session)
│   ├── Conflict                 409 (stale epoch, concurrent writers)
│   ├── TooLarge                 413
│   ├── RateLimited              429 with Retry-After, names the limit of the tenant
│   └── OverQuota                429 with Retry-After
├── Unavailable                  503 with Retry-After: starting, restarting, draining
│   └── StageLost                a stage of the model's pipeline is gone or silent
├── PoolError                    a call to a pool that breaks its protocol
│   ├── StaleEpoch               lower than the highest epoch the pool has seen for the session
│   ├── StaleLease               the lease was revoked, or belongs to another incarnation
│   ├── CallOrder                a call number skipped or too old to be replayed
│   └── UnknownSequence          not a sequence of this lease
├── ArenaError                   memory cannot be created, adopted or mapped
├── JournalError                 a journal that cannot be read as a whole
├── ModelError                   a model that cannot be loaded or served right, by name
├── KernelError                  a shape or precision that a kernel does not support
└── IntegrityError               an invariant is broken: a bug in Remora

Capacity is never an error inside the system: it is an answer (`Admitted | Wait | OverQuota`).
"""

from __future__ import annotations


class RemoraError(Exception):
    """Root of the tree. `code` is stable and machine-readable, the message says what to do."""

    code = "internal_error"
    status = 500
    field: str | None = None
    retry_after_s: float | None = None


class ConfigError(RemoraError):
    """A configuration value is wrong; the message holds its name, its value and what is allowed."""

    code = "invalid_config"


class RequestError(RemoraError):
    """The caller can mend the request."""

    code = "invalid_request_error"
    status = 400

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class InvalidRequest(RequestError):
    """A field has a value that cannot be served; `field` names it."""

    code = "invalid_value"


class ContextLengthExceeded(RequestError):
    """Prompt and requested tokens do not fit the model's context."""

    code = "context_length_exceeded"

    def __init__(self, num_tokens: int, max_tokens: int, *, field: str = "messages") -> None:
        super().__init__(
            f"This request needs {num_tokens} tokens but the model's context holds {max_tokens}; "
            "shorten the prompt or lower max_tokens.",
            field=field,
        )
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


class Unauthorized(RequestError):
    """No key, or a wrong one."""

    code = "invalid_api_key"
    status = 401


class Forbidden(RequestError):
    """The key is good, but not for this."""

    code = "insufficient_permissions"
    status = 403


class NotFound(RequestError):
    """The named model, namespace or session does not exist."""

    code = "not_found"
    status = 404


class Conflict(RequestError):
    """Another writer holds the session, or the epoch is old."""

    code = "conflict"
    status = 409


class TooLarge(RequestError):
    """The request body is larger than allowed."""

    code = "request_too_large"
    status = 413


class RateLimited(RequestError):
    """The tenant has reached one of its limits, which `field` names; try again after `retry_after_s`."""

    code = "rate_limit_exceeded"
    status = 429

    def __init__(self, message: str, *, retry_after_s: float, field: str) -> None:
        super().__init__(message, field=field)
        self.retry_after_s = retry_after_s


class OverQuota(RequestError):
    """The namespace's quota cannot serve this request in time; try again after `retry_after_s`."""

    code = "over_quota"
    status = 429

    def __init__(self, message: str, *, retry_after_s: float, field: str | None = None) -> None:
        super().__init__(message, field=field)
        self.retry_after_s = retry_after_s


class Unavailable(RemoraError):
    """Starting, restarting or draining; the same request can succeed later."""

    code = "unavailable"
    status = 503

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ReplicaLeaving(Unavailable):
    """Calls no longer reach this replica, because it is stopping; what it has begun goes on for a while."""


class StageLost(Unavailable):
    """A stage of a pipeline has died, or did not answer in time; the group is started again."""

    code = "stage_lost"


class PoolError(RemoraError):
    """A call to a pool that breaks its protocol; nothing was changed."""

    code = "pool_error"


class StaleEpoch(PoolError):
    """The session has moved on; a newer epoch was seen."""

    code = "stale_epoch"
    status = 409


class StaleLease(PoolError):
    """The lease was revoked or belongs to an earlier incarnation; attach again."""

    code = "stale_lease"


class CallOrder(PoolError):
    """A call number that skips ahead or is too old to be replayed."""

    code = "call_order"


class UnknownSequence(PoolError):
    """The sequence does not belong to this lease."""

    code = "unknown_sequence"


class ArenaError(RemoraError):
    """Memory for the arena cannot be created, adopted or mapped; the message names the limit to raise."""

    code = "arena_error"


class JournalError(RemoraError):
    """A journal that cannot be read as a whole."""

    code = "journal_error"


class ModelError(RemoraError):
    """The named model cannot be loaded or cannot be served right."""

    code = "model_error"


class KernelError(RemoraError):
    """A shape, precision or block index that a kernel does not support."""

    code = "kernel_error"


class IntegrityError(RemoraError):
    """An invariant does not hold. Always a bug; the sentence says which invariant."""

    code = "integrity_error"


def error_class(name: str) -> type[RemoraError] | None:
    """The class of this tree that has the name, which is how an error crosses between processes; else None."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, RemoraError) else None


def named_error(name: str, message: str, *, field: str | None = None, retry_after_s: float = 1.0) -> RemoraError:
    """An error that crossed between processes, as the class that raised it; RemoraError for a name not in the tree.

    ContextLengthExceeded, whose numbers stayed behind, becomes InvalidRequest with its sentence.
    """
    kind = error_class(name) or RemoraError
    if issubclass(kind, OverQuota):
        return OverQuota(message, retry_after_s=retry_after_s, field=field)
    if issubclass(kind, RateLimited):
        return RateLimited(message, retry_after_s=retry_after_s, field=field or "")
    if issubclass(kind, Unavailable):
        return Unavailable(message, retry_after_s=retry_after_s)
    if issubclass(kind, ContextLengthExceeded):
        kind = InvalidRequest
    return kind(message, field=field) if issubclass(kind, RequestError) else kind(message)
