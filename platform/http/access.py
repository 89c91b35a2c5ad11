"""Who may do what: API keys, and the paths that they open.

    /health /ready /ui /docs           everybody: they tell nothing about anybody
    generation, sessions, traces, ...  tenants, each within its own namespaces
    everything else                    operators

Whatever is not named here is the operators': a new route is closed until somebody decides.
"""

from __future__ import annotations

import re
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from remora.cache_actors.session_client import SessionPort, ask
from remora.deployments.catalog import Catalog
from remora.namespaces.session_commands import SessionHead, ShowSession
from remora.platform.base.clock import Clock
from remora.platform.base.config import RemoraConfig
from remora.platform.base.errors import Forbidden, NotFound, RemoraError, Unauthorized
from remora.platform.base.ids import NamespaceId, SessionId
from remora.platform.base.tenants import key_hash
from remora.platform.http.caller import Caller, set_caller
from remora.platform.http.errors import error_response
from remora.platform.http.http_stats import HttpStats
from remora.platform.http.limits import TenantLimits

_OPEN: Final = re.compile(r"/(health|ready|docs|openapi\.json|ui(/[\w.]*)?)")
_NAMESPACE_PATH: Final = re.compile(r"/v1/namespaces/(.+)")
_SESSION_PATH: Final = re.compile(r"/v1/sessions/([^/]+)(/.*)?")
#: Method and path of what tenants may do.
_FOR_TENANTS: Final = re.compile(
    r"POST /v1/(chat/)?completions"
    r"|POST /(de)?tokenize"
    r"|GET /v1/models(/.+)?"
    r"|GET /v1/namespaces(/.+)?"
    r"|GET /v1/traces(/[^/]+)?"
    r"|(GET|POST) /v1/sessions"
    r"|(GET|DELETE) /v1/sessions/[^/]+"
    r"|POST /v1/sessions/[^/]+/(fork|truncate|pin|unpin)"
)


class Access:
    """The keys of one configuration. Without any, everybody is an operator."""

    def __init__(self, config: RemoraConfig, catalog: Catalog, clock: Clock, stats: HttpStats) -> None:
        self.limits: dict[str, TenantLimits] = {}
        self._callers: dict[str, Caller] = {}
        for tenant in config.tenants:
            own = {NamespaceId(each.name) for each in catalog.namespaces.values() if each.tenant == tenant.name}
            limits = TenantLimits(
                tenant.name, tenant.limits, clock, num_routers=config.http.num_routers, on_refused=stats.refused
            )
            self.limits[tenant.name] = limits
            caller = Caller(tenant.name, None if tenant.operator else frozenset(own), limits, tenant.min_priority)
            self._callers |= dict.fromkeys(tenant.key_sha256, caller)

    @property
    def asks_for_keys(self) -> bool:
        return bool(self._callers)

    def recognise(self, authorization: str | None) -> Caller:
        """Raises Unauthorized for a missing or unknown key."""
        scheme, _, key = (authorization or "").partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise Unauthorized("Send your API key in the header Authorization: Bearer KEY.")
        caller = self._callers.get(key_hash(key))
        if caller is None:
            raise Unauthorized(f"The API key {_shown(key)} is not known here.")
        return caller


class Authenticate:
    """ASGI middleware: lets a request through as the caller of its key, or answers 401, 403, 404 or 429."""

    def __init__(self, app: ASGIApp, access: Access, sessions: SessionPort) -> None:
        self._app = app
        self._access = access
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._access.asks_for_keys and not _OPEN.fullmatch(scope["path"]):
            try:
                set_caller(scope, await self._admit(scope))
            except RemoraError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _admit(self, scope: Scope) -> Caller:
        caller = self._access.recognise(Headers(scope=scope).get("authorization"))
        method, path = scope["method"], scope["path"]
        if not caller.is_operator and not _FOR_TENANTS.fullmatch(f"{method} {path}"):
            raise Forbidden(f"{method} {path}: needs an operator's key.")
        if method != "GET" and caller.limits is not None:
            caller.limits.take_request()
        namespace = _NAMESPACE_PATH.fullmatch(path)
        if namespace is not None and not caller.sees(namespace[1]):
            raise NotFound(f"There is no namespace {namespace[1]!r}.", field="namespace")
        session = _SESSION_PATH.fullmatch(path)
        if session is not None:
            await require_session(self._sessions, caller, SessionId(session[1]))
        return caller


async def require_session(port: SessionPort, caller: Caller, session_id: SessionId) -> None:
    """Raises NotFound for a session that does not exist, and for another's as if it did not."""
    if caller.is_operator:
        return
    found = await ask(port, ShowSession(session_id=session_id), SessionHead)
    if not caller.sees(found.state.namespace_id):
        raise NotFound(f"The session {session_id!r} does not exist.", field="session_id")


def _shown(key: str) -> str:
    """Enough to recognise a key by, and far too little to use it."""
    return f"{key[:6]}…" if len(key) > 20 else "that was sent"
