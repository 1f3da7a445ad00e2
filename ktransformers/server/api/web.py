"""The chat page, served at GET / to browsers, with its scripts, styles and fonts below /page.

The files are built from web/ (`make web`) and ship with the package; the routes of the API do the rest. They hold
nothing to hide: where an API key is needed, the page asks for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles

from ktransformers.errors import ConfigError
from ktransformers.server.http.api_paths import PAGE_PREFIX

__all__ = ["WEB_PATH", "page", "page_files"]

WEB_PATH = Path(__file__).resolve().parents[2] / "assets" / "web"
"""index.html, and the folder that it refers to."""

_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",  # blob: pictures that a person has attached, from the browser's own store
        "font-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # No script can make markup of a string but the sanitizer, nor an address of a worker but the reader of PDFs.
        "require-trusted-types-for 'script'",
        "trusted-types dompurify ktransformers-pdf",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-cache",  # names stay the same from version to version: the ETag says whether the content does
}


def page() -> Response:
    """Return the chat page, for GET / of a browser."""
    return FileResponse(WEB_PATH / "index.html", media_type="text/html", headers={**_HEADERS, "Vary": "Accept"})


class _PageFiles(StaticFiles):
    def file_response(self, *args: Any, **more: Any) -> Response:
        response = super().file_response(*args, **more)
        response.headers.update(_HEADERS)
        return response


def page_files() -> StaticFiles:
    """Return the app that serves the page's files, to be mounted at PAGE_PREFIX. Raises ConfigError where the built
    page is missing.
    """
    folder = WEB_PATH / PAGE_PREFIX.strip("/")
    if not folder.is_dir():
        raise ConfigError(f"the built web page is missing ({folder}): build it with `make web`, or serve with --no_web")
    return _PageFiles(directory=folder)
