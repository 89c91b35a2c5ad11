"""The FastAPI application, on whatever router it is given."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from fastapi import FastAPI, Request, Response

from remora.platform.base.clock import SystemClock
from remora.platform.http.access import Access, Authenticate
from remora.platform.http.admin import admin_routes
from remora.platform.http.chat import chat_routes
from remora.platform.http.completions import completion_routes
from remora.platform.http.disconnect import ClientGone
from remora.platform.http.errors import install_error_handlers
from remora.platform.http.http_stats import CountAnswers
from remora.platform.http.models_routes import model_routes
from remora.platform.http.namespaces import namespace_routes
from remora.platform.http.page import page_routes
from remora.platform.http.services import Services
from remora.platform.http.session_moves import move_routes
from remora.platform.http.sessions import session_routes
from remora.platform.http.tokenize import tokenize_routes
from remora.platform.http.traces import trace_routes

#: nginx's status for "the client closed the connection"; only counters see it.
CLIENT_CLOSED = 499

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def create_app(services: Services, lifespan: Lifespan | None = None) -> FastAPI:
    """All routes of the public API."""
    app = FastAPI(
        title="Remora",
        description="Many language models from shared, quota-managed KV memory.",
        docs_url="/docs",
        redoc_url=None,
        lifespan=lifespan,
    )
    install_error_handlers(app)

    @app.exception_handler(ClientGone)
    async def on_client_gone(_request: Request, _error: ClientGone) -> Response:
        return Response(status_code=CLIENT_CLOSED)

    app.include_router(chat_routes(services))
    app.include_router(completion_routes(services))
    app.include_router(tokenize_routes(services))
    app.include_router(model_routes(services, created=int(time.time())))
    app.include_router(session_routes(services))
    app.include_router(move_routes(services))
    app.include_router(trace_routes(services))
    app.include_router(admin_routes(services))
    app.include_router(namespace_routes(services))
    app.include_router(page_routes())
    access = Access(services.config, services.core.catalog, SystemClock(), services.stats)
    app.state.access = access
    app.add_middleware(Authenticate, access=access, sessions=services.turns.port)
    app.add_middleware(CountAnswers, stats=services.stats)
    return app
