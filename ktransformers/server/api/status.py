"""GET /v1/status: the figures of the page's status view, for anybody else who may use the service, too. No texts are in
it.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ktransformers.profiling.stored_counts import StoredCounts
from ktransformers.scheduler.commands import EngineTotals
from ktransformers.server.backend.balance_stats import BalanceStats, ClusterStats
from ktransformers.server.backend.base import BackendStats
from ktransformers.server.responses import ApiResponse
from ktransformers.server.service import Service, service_of

__all__ = ["router", "state_of"]

router = APIRouter()


def state_of(service: Service) -> str:
    """Return the service's state in one word: loading, ready, paused (requests wait for an engine) or stopping.

    Of several models each may be stopped, which is no reason not to ask for it: it is ready, too.
    """
    if service.admission.is_draining:
        return "stopping"
    if not service.backend.is_ready:
        is_loading = service.group is None or service.group.state_of(service) == "loading"
        return "loading" if is_loading else "ready"
    return "ready" if service.backend.pause is None else "paused"


def _kv(stats: BackendStats) -> dict[str, int] | None:
    if not stats.cache_len:
        return None
    return {"used_tokens": round(stats.cache_usage * stats.cache_len), "total_tokens": stats.cache_len}


def _prefix(stats: BackendStats) -> dict[str, int] | None:
    if not isinstance(stats, BalanceStats) or stats.scheduler is None:
        return None
    return {"hits": stats.scheduler.prefix_hit_len, "queries": stats.scheduler.prefix_query_len}


def _drafts(service: Service) -> dict[str, int | str] | None:
    """Draft tokens since the start, and what finds them; None where the loaded model has none."""
    if not service.backend.is_ready or not service.backend.model.max_drafts:
        return None
    counts = service.metrics.counts
    return {
        "drafter": service.backend.model.drafter,
        "drafted": counts.draft_tokens,
        "accepted": counts.accepted_tokens,
    }


def _pictures(service: Service, totals: EngineTotals) -> dict[str, Any] | None:
    """Pictures that were read and that the tower computed since the start; None where the loaded model reads none."""
    if not service.backend.is_ready or service.backend.model.no_pictures is not None:
        return None
    computed = {"computed": totals.num_tower_pictures, "tower_seconds": round(totals.tower_seconds, 4)}
    return {"read": service.metrics.counts.pictures, **computed}


def _experts(stats: BackendStats) -> dict[str, Any] | None:
    if not isinstance(stats, BalanceStats) or not stats.experts:
        return None
    return {"layers": [{"layer": layer, "counts": counts} for layer, counts in sorted(stats.experts.items())]}


def _hot_experts(stats: BackendStats) -> dict[str, int] | None:
    if not isinstance(stats, BalanceStats) or not stats.engine.num_hot_reads:
        return None
    engine = stats.engine
    return {
        "reads": engine.num_hot_reads,
        "hits": engine.num_hot_hits,
        "uploads": engine.num_hot_uploads,
        "upload_bytes": engine.hot_upload_bytes,
    }


def _stored(counts: StoredCounts) -> dict[str, int | float] | None:
    names = ("hits", "misses", "read_bytes", "wait_seconds", "read_errors")
    return dict(zip(names, counts, strict=True)) if sum(counts[:2]) else None


def _replicas(stats: BackendStats) -> list[dict[str, Any]] | None:
    if not isinstance(stats, ClusterStats):
        return None
    return [
        {
            "name": one.name,
            "node": one.node,
            "pid": one.pid,
            "pause": one.pause,
            "running": one.stats.num_running,
            "waiting": one.stats.num_waiting,
            "suspended": one.stats.num_suspended,
            "kv": _kv(one.stats),
            "prefix": _prefix(one.stats),
        }
        for one in stats.replicas
    ]


def _status(service: Service) -> dict[str, Any]:
    stats, (speed, memory) = service.backend.stats(), service.speed.read()
    totals = stats.engine if isinstance(stats, BalanceStats) else EngineTotals()
    return {
        "model": service.model_names[0],
        "description": service.backend.model.description if service.backend.is_ready else None,
        "state": state_of(service),
        "pause": service.backend.pause,
        "backend": service.backend.name,
        "queue": {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "suspended": stats.num_suspended,
            "max_running": service.backend.max_running,
            "max_waiting": service.config.max_queue,
        },
        "kv": _kv(stats),
        "prefix": _prefix(stats),
        "tiers": stats.tiers if isinstance(stats, BalanceStats) else None,
        "drafts": _drafts(service),
        "pictures": _pictures(service, totals),
        "speed": speed,
        "memory": memory,
        "experts": _experts(stats),
        "hot_experts": _hot_experts(stats),
        "stored_experts": _stored(totals.stored),
        "stored_rows": _stored(totals.stored_rows),
        "replicas": _replicas(stats),
        "models": None if service.group is None else service.group.described(),
        "requests": service.recent.described(),
    }


@router.get("/v1/status")
async def status(request: Request) -> Response:
    """Answer with queue, cache, speed and the last requests, as JSON. What this backend does not know is null."""
    return ApiResponse(_status(service_of(request)), headers={"Cache-Control": "no-store"})
