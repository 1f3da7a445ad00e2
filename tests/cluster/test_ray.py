"""Real Ray: raylets on this machine, replicas of the bundled model, and what is killed under 64 streams."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("ray", reason="needs Ray: pip install 'ray[serve]'")

from ray.cluster_utils import Cluster

from tests.support.servers.balance_backend import gone, run
from tests.support.servers.ray_cluster import ClusterProcess, Stream, raylets
from tests.support.servers.server_process import ServerProcess

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

NUM_STREAMS, NUM_TOKENS = 64, 96
SECONDS = 400.0  # a deadline for a busy machine


def body(number: int) -> dict[str, Any]:
    return {
        "prompt": f"Question {number}: what is {number} + {3 * number}? Answer:",
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "temperature": 1.0,
        "seed": number,
        "logprobs": 1,
    }


async def read_all(client: httpx.AsyncClient, url: str) -> list[Stream]:
    streams = [Stream(number) for number in range(NUM_STREAMS)]
    await asyncio.gather(*(one.read(client, url, body(one.number)) for one in streams))
    return streams


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=SECONDS, limits=httpx.Limits(max_connections=200), trust_env=False)


@pytest.fixture(scope="module")
def alone() -> list[Stream]:
    """What one server without Ray answers."""
    answers: list[Stream] = []

    async def work() -> None:
        async with client() as http:
            answers.extend(await read_all(http, server.url))

    with ServerProcess("--no-spare_engine") as server:
        run(work, SECONDS)
    assert all(len(one.logprobs) == NUM_TOKENS for one in answers)
    return answers


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")  # and so no file in the home folder
        with raylets(3) as made:
            yield made


@pytest.fixture(scope="module")
def server(cluster: Cluster) -> Iterator[ClusterProcess]:
    with ClusterProcess(cluster, "--replicas", "3") as made:
        yield made
        assert made.terminate() == 0


def test_turns_of_a_chat_go_to_one_replica(server: ClusterProcess) -> None:
    async def work() -> None:
        async with client() as http:
            await server.until(http, lambda status: len(status["replicas"]) == 3)
            prompts = [list(range(100 + number, 400 + number)) for number in range(6)]
            for turn in range(3):
                for prompt in prompts:
                    asked = {"prompt": prompt, "max_tokens": 8, "temperature": 0.0, "return_token_ids": True}
                    answer = (await http.post(f"{server.url}/v1/completions", json=asked)).raise_for_status().json()
                    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                    assert cached >= (len(prompt) - 100 if turn else 0) // 64 * 64, (turn, cached)
                    prompt += range(500, 600)
            status = await server.until(http, lambda status: status["prefix"]["hits"] > 0)
            assert all(one["prefix"]["queries"] for one in status["replicas"])  # chats are spread

    run(work, SECONDS)


def check_equal(streams: list[Stream], alone: list[Stream]) -> None:
    for one, other in zip(streams, alone, strict=True):
        assert (one.text, one.logprobs, one.reason) == (other.text, other.logprobs, other.reason)


async def num_taken_over(http: httpx.AsyncClient, server: ClusterProcess) -> float:
    text = (await http.get(f"{server.url}/metrics")).text
    (line,) = [line for line in text.splitlines() if line.startswith("ktransformers:requests_taken_over_total")]
    return float(line.rsplit(" ", 1)[1])


async def kill_while_streaming(server: ClusterProcess, alone: list[Stream], kill: Any) -> None:
    """All streams, of which `kill` ends something once a fifth of their tokens has come. kill: given /v1/status."""
    streams = [Stream(number) for number in range(NUM_STREAMS)]
    async with client() as http:
        await server.until(http, lambda status: len(status["replicas"]) >= 2)
        reading = asyncio.gather(*(one.read(http, server.url, body(one.number)) for one in streams))
        while sum(len(one.logprobs) for one in streams) < NUM_STREAMS * NUM_TOKENS // 5:
            assert not reading.done()
            await asyncio.sleep(0.01)
        kill(await server.status(http))
        await reading
    check_equal(streams, alone)


def busiest(status: dict[str, Any]) -> dict[str, Any]:
    chosen: dict[str, Any] = max(status["replicas"], key=lambda one: one["running"])
    return chosen


def test_a_killed_replica_is_no_loss(server: ClusterProcess, alone: list[Stream]) -> None:
    killed: list[int] = []

    def kill(status: dict[str, Any]) -> None:
        killed.append(busiest(status)["pid"])
        os.kill(killed[0], signal.SIGKILL)

    async def work() -> None:
        async with client() as http:
            before = await num_taken_over(http, server)
            await kill_while_streaming(server, alone, kill)
            assert await num_taken_over(http, server) > before
            # Another one takes its place.
            status = await server.until(
                http, lambda status: len([one for one in status["replicas"] if one["pid"] not in killed]) == 3
            )
            assert gone(killed[0])
            assert status["state"] == "ready"

    run(work, SECONDS)


def test_a_killed_raylet_is_no_loss(cluster: Cluster, server: ClusterProcess, alone: list[Stream]) -> None:
    killed: list[str] = []

    def kill(status: dict[str, Any]) -> None:
        name = busiest(status)["node"]
        killed.append(name)
        (node,) = [node for node in cluster.worker_nodes if node.node_id == name]
        os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)

    async def work() -> None:
        await kill_while_streaming(server, alone, kill)
        async with client() as http:  # its processes live on for a while, and must not do harm
            while killed[0] in [one["node"] for one in (await server.status(http))["replicas"]]:
                check_equal(await read_all(http, server.url), alone)
            check_equal(await read_all(http, server.url), alone)

    run(work, SECONDS)
