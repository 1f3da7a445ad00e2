"""Routes /v1/profile: whether a profile is written, and the beginning and end of one. No texts are in it, nor in
profiles.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from ktransformers.server.bodies import BodyRoute
from ktransformers.server.responses import ApiResponse
from ktransformers.server.service import service_of

__all__ = ["router"]

router = APIRouter(route_class=BodyRoute)

_MAX_SECONDS = 7 * 24 * 3600.0


class StartBody(BaseModel):
    """The body that starts a profile. dir: a name below --profile_root. max_seconds: after which the profile ends by
    itself.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    dir: str | None = None
    max_seconds: Annotated[float, Field(gt=0, le=_MAX_SECONDS, allow_inf_nan=False)] | None = None


@router.get("/v1/profile")
async def profile(request: Request) -> Response:
    """Answer whether a profile is being written, how many lines it has, and what was lost."""
    return ApiResponse(service_of(request).backend.profiler.status(), headers={"Cache-Control": "no-store"})


@router.post("/v1/profile/start")
async def start(request: Request, body: Annotated[StartBody | None, Body()] = None) -> Response:
    """Start a profile, from the next step on."""
    service, asked = service_of(request), body or StartBody()
    service.model  # noqa: B018 - raises while loading
    return ApiResponse(await service.backend.profiler.start(asked.dir, asked.max_seconds))


@router.post("/v1/profile/stop")
async def stop(request: Request) -> Response:
    """End the profile that is being written. Its files are complete when this answers."""
    return ApiResponse(await service_of(request).backend.profiler.stop())
