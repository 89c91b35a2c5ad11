"""/ui: the page for people, as the static files in platform/ui. It asks the same API as everybody else."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fastapi import APIRouter, Response
from fastapi.responses import RedirectResponse

from remora.platform.base.errors import NotFound

_MEDIA_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
#: Nothing from another host, nothing inline but styles that scripts set, and nobody may frame the page.
_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page_files() -> dict[str, bytes]:
    """Name → content of everything the page is made of."""
    folder = Path(__file__).resolve().parents[1] / "ui"
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in _MEDIA_TYPES}


def page_routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    files = page_files()

    @router.get("/ui")
    async def to_page() -> Response:
        return RedirectResponse("/ui/", status_code=308)

    @router.get("/ui/")
    async def page() -> Response:
        return _file("index.html")

    @router.get("/ui/{name}")
    async def page_file(name: str) -> Response:
        return _file(name)

    def _file(name: str) -> Response:
        if name not in files:
            raise NotFound(f"The page has no file {name!r}.")
        return Response(files[name], media_type=_MEDIA_TYPES[Path(name).suffix], headers=_HEADERS)

    return router
