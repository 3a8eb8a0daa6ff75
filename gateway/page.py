"""GET /: the playground, a page that talks to this server by its public API. No build step: the files are the source.

It knows nothing of what they show; it serves them as they are, with a policy that lets a browser run and fetch nothing
but what this server gives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from importlib import resources
from pathlib import PurePosixPath

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

_HOME = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    # Trusted types: no script may turn text into HTML, not by mistake either.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # asked for again each time, and sent again only when it changed
}


def _routes() -> Sequence[Route]:
    """A route for each file, which is kept in memory; whatever else is asked for is not there."""
    folder = resources.files("gateway") / "page"
    files = sorted((entry for entry in folder.iterdir() if _suffix(entry.name) in _TYPES), key=lambda entry: entry.name)
    return [
        Route("/" if file.name == _HOME else f"/page/{file.name}", _endpoint(file.read_bytes(), _suffix(file.name)))
        for file in files
    ]


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix


def _endpoint(content: bytes, suffix: str) -> Callable[[Request], Awaitable[ASGIApp]]:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "etag": tag}

    async def page_file(request: Request) -> ASGIApp:
        """The file, or 304 for who has it."""
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=_TYPES[suffix], headers=headers)

    return page_file


ROUTES = _routes()
PATHS = frozenset(route.path for route in ROUTES)  # anyone may have them, key or not: they hold no secret
