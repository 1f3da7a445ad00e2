"""Ollama's answer at `/`, which its clients look for before anything else."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import PlainTextResponse, Response

__all__ = ["running"]


def running(request: Request) -> Response | None:
    """Return the response "Ollama is running" for a program that takes any type; None for browsers and who asks for
    JSON.

    For GET and HEAD of `/`.
    """
    accept = request.headers.get("accept", "").lower()
    if "text/html" in accept or "json" in accept:
        return None
    return PlainTextResponse("Ollama is running", headers={"Vary": "Accept", "Cache-Control": "no-store"})
