"""GET /v1/status, and what it is made of."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch

from ktransformers.operators.base import ExpertStats
from ktransformers.optimize.machine_speed import CpuSpeed, MachineSpeed, SpeedFile
from ktransformers.scheduler.commands import EngineTotals
from ktransformers.scheduler.records import SchedulerStats, counts_in
from ktransformers.scheduler.tier_records import TierStats
from ktransformers.server.app import create_app
from ktransformers.server.backend.balance_stats import BalanceStats
from ktransformers.server.config import ServerConfig
from ktransformers.server.service import measured_gbps
from ktransformers.server.telemetry.metrics import Counts
from ktransformers.server.telemetry.status_window import MAX_REQUESTS, PastRequest, RecentRequests, SpeedMeter
from tests.support.servers.fake_backend import FakeBackend

SCHEDULER = SchedulerStats(
    num_running=2,
    num_waiting=1,
    num_pages=10,
    num_used_pages=4,
    num_idle_pages=3,
    num_preemptions=0,
    num_expired=0,
    num_engine_losses=0,
    prefix_query_len=100,
    prefix_hit_len=40,
)


def test_status() -> None:
    async def test() -> dict[str, Any]:
        backend = FakeBackend()
        transport = httpx.ASGITransport(create_app(backend, ServerConfig(model_names=("demo",), max_queue=9)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            before = (await client.get("/v1/status")).json()
            assert (before["kv"], before["prefix"], before["requests"]) == (None, None, [])
            await client.post("/v1/completions", json={"prompt": [1, 2, 3, 4], "max_tokens": 3, "n": 2})
            await client.post("/v1/completions", json={"prompt": [1], "temperature": "my secret"})
            await client.post("/no/such/my-secret", json={})
            backend.now = BalanceStats(2, 1, 0.4, 640, SCHEDULER, EngineTotals(num_tokens=50))
            answer = await client.get("/v1/status")
            assert "secret" not in answer.text
            assert before["tiers"] is answer.json()["tiers"] is None
            tiers = TierStats(host_bytes=1, max_host_bytes=2, disk_bytes=3, max_disk_bytes=4, disk_hit_len=64)
            scheduler = msgspec.structs.replace(SCHEDULER, tiers=tiers)
            backend.now = BalanceStats(2, 1, 0.4, 640, scheduler, EngineTotals(num_tokens=50))
            shown = (await client.get("/v1/status")).json()["tiers"]
            assert (shown["max_host_bytes"], shown["disk_bytes"], shown["disk_hit_len"]) == (2, 3, 64)
            assert before["hot_experts"] is answer.json()["hot_experts"] is None
            totals = EngineTotals(num_hot_reads=8, num_hot_hits=6, num_hot_uploads=2, hot_upload_bytes=99)
            backend.now = BalanceStats(2, 1, 0.4, 640, SCHEDULER, totals)
            shown = (await client.get("/v1/status")).json()["hot_experts"]
            assert shown == {"reads": 8, "hits": 6, "uploads": 2, "upload_bytes": 99}
            metrics = (await client.get("/metrics")).text
            for name, value in (("reads", 8), ("hits", 6), ("uploads", 2), ("upload_bytes", 99)):
                assert f'ktransformers:hot_expert_{name}_total{{model_name="demo"}} {value}.0' in metrics
            return answer.json()

    status = asyncio.run(test())
    assert (status["model"], status["backend"], status["state"]) == ("demo", "fake", "ready")
    assert status["queue"] == {"running": 2, "waiting": 1, "suspended": 0, "max_running": 1, "max_waiting": 9}
    assert status["kv"] == {"used_tokens": 256, "total_tokens": 640}
    assert status["prefix"] == {"hits": 40, "queries": 100}
    assert status["speed"]["prefill_tps"] > 0
    assert status["speed"]["decode_tps"] > 0
    refused, answered = status["requests"]
    assert (refused["status"], refused["prompt_tokens"], refused["finish_reason"]) == (400, None, None)
    assert answered["id"].startswith("cmpl-")
    assert answered["path"] == "/v1/completions"
    assert (answered["status"], answered["prompt_tokens"], answered["completion_tokens"]) == (200, 4, 6)
    assert answered["finish_reason"] == "length"
    assert 0 <= answered["ttft"] <= answered["seconds"]
    assert answered["at"] <= refused["at"]


def test_the_last_requests_are_kept() -> None:
    recent = RecentRequests()
    for number in range(MAX_REQUESTS + 5):
        recent.add(PastRequest(f"id-{number}", 0.0, "/", 200, 1.0))
    described = recent.described()
    assert len(described) == MAX_REQUESTS
    assert (described[0]["id"], described[-1]["id"]) == (f"id-{MAX_REQUESTS + 4}", "id-5")


def test_speed_is_of_the_last_seconds() -> None:
    now, counts, backend = 0.0, Counts(), FakeBackend()
    meter = SpeedMeter(backend, counts, clock=lambda: now)
    for second in range(1, 31):
        now, counts.answer_tokens, counts.prompt_tokens = float(second), 5 * second, 100 * (second >= 25)
        speed, _ = meter.read()
        assert speed["decode_tps"] == 5.0
    assert speed["prefill_tps"] == 10.0
    now = 1000.0
    assert meter.read() == ({"prefill_tps": 0.0, "decode_tps": 0.0}, None)
    now, counts.answer_tokens = 1001.0, counts.answer_tokens + 7  # an hour of nothing is forgotten at once
    assert meter.read()[0]["decode_tps"] == 7.0


def test_prompts_count_while_they_are_computed() -> None:
    now, counts, backend = 0.0, Counts(), FakeBackend()
    meter = SpeedMeter(backend, counts, clock=lambda: now)
    now, counts.answer_tokens = 2.0, 10
    backend.now = BalanceStats(1, 0, engine=EngineTotals(num_tokens=210))
    assert meter.read() == ({"prefill_tps": 100.0, "decode_tps": 5.0}, None)


def test_bytes_of_experts_are_those_that_steps_touched() -> None:
    now, backend = 0.0, FakeBackend()
    meter = SpeedMeter(backend, Counts(), clock=lambda: now, limit_gbps=42.5)
    for second in (1, 2, 3):
        now = float(second)
        engine = EngineTotals(
            num_steps=20 * second,
            busy_seconds=0.5 * second,
            num_expert_samples=4 * second,
            num_touched_experts=32 * second,
        )
        backend.now = BalanceStats(1, 0, engine=engine, expert_bytes=5e7)
        # 40 steps in a second of work, each touches 8 experts of a layer; one of every layer are 50 MB
        assert meter.read()[1] == {"gbps": 16.0, "limit_gbps": 42.5}


def test_experts_are_counted_by_layer() -> None:
    stats = ExpertStats()
    for layer, ids in ((1, [[0, 2], [2, 3]]), (-1, [[1, 1]]), (3, [[1, 5]])):
        stats.note(torch.tensor(ids), 5, layer)
    assert list(counts_in(stats.take_counts())) == [(1, 0, 1), (1, 2, 2), (1, 3, 1), (3, 1, 1)]
    assert stats.totals() == (7, 3, 5)  # a fifth expert is none: it was skipped
    stats.note(torch.tensor([[3, 2]]), 5, 1)
    assert list(counts_in(stats.take_counts())) == [(1, 2, 1), (1, 3, 1)]
    assert stats.take_counts() == b""


def test_the_limit_is_what_doctor_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert measured_gbps() is None
    SpeedFile().write(MachineSpeed(0.0, 0.0, CpuSpeed(2, "avx2", {1: 20e9, 2: 42.5e9})))
    assert measured_gbps() == 42.5
