"""Real Ray: the stages of one model on several raylets of this machine, one of which is killed under streams."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("ray", reason="needs Ray: pip install 'ray[serve]'")

from ray.cluster_utils import Cluster

from tests.cluster.test_ray import SECONDS, body, client
from tests.support.servers.balance_backend import run
from tests.support.servers.ray_cluster import ClusterProcess, Stream, raylets
from tests.support.servers.server_process import ServerProcess

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

NUM_STREAMS, NUM_TOKENS = 12, 96


async def read_all(http: httpx.AsyncClient, url: str, streams: list[Stream]) -> None:
    await asyncio.gather(*(one.read(http, url, body(one.number)) for one in streams))


@pytest.fixture(scope="module")
def alone() -> list[Stream]:
    """What one process without Ray answers."""
    streams = [Stream(number) for number in range(NUM_STREAMS)]

    async def work() -> None:
        async with client() as http:
            await read_all(http, server.url, streams)

    with ServerProcess("--no-spare_engine") as server:
        run(work, SECONDS)
    return streams


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        with raylets(4) as made:
            yield made


def parents() -> dict[int, tuple[str, int]]:
    """Name and parent of each process."""
    known = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            name, stat = (entry / "comm").read_text().strip(), (entry / "stat").read_text()
        except (OSError, UnicodeDecodeError):
            continue
        known[int(entry.name)] = name, int(stat.rpartition(")")[2].split()[1])
    return known


def stages_of(raylet: int) -> list[int]:
    """Processes of stages below a raylet."""
    known = parents()

    def is_below(pid: int) -> bool:
        while pid in known and pid != raylet:
            pid = known[pid][1]
        return pid == raylet

    return [pid for pid, (name, _) in known.items() if name == "kt-rank" and is_below(pid)]


def raylet_of(node: Any) -> int:
    pid: int = node.all_processes["raylet"][0].process.pid
    return pid


async def kill_while_streaming(server: ClusterProcess, alone: list[Stream], kill: Callable[[], None]) -> None:
    streams = [Stream(number) for number in range(NUM_STREAMS)]
    async with client() as http:
        await server.until(http, lambda status: len(status["replicas"]) == 1)
        reading = asyncio.create_task(read_all(http, server.url, streams))
        while sum(len(one.logprobs) for one in streams) < NUM_STREAMS * NUM_TOKENS // 5:
            assert not reading.done()
            await asyncio.sleep(0.01)
        kill()
        await reading
    for one, other in zip(streams, alone, strict=True):
        assert (one.text, one.logprobs, one.reason) == (other.text, other.logprobs, other.reason)


def test_stages_on_several_nodes(cluster: Cluster, alone: list[Stream]) -> None:
    """A process of one is killed, then a whole node with a stage: answers are those of one process."""
    with ClusterProcess(cluster, "--pipeline", "3") as server:
        places = {raylet_of(node): stages_of(raylet_of(node)) for node in cluster.worker_nodes}
        assert sorted(map(len, places.values())) == [0, 0, 1, 1]  # one has the driver, and one is left

        def kill_process() -> None:
            os.kill(next(pids[0] for pids in places.values() if pids), signal.SIGKILL)

        def kill_node() -> None:
            os.kill(next(raylet for raylet in places if stages_of(raylet)), signal.SIGKILL)

        run(lambda: kill_while_streaming(server, alone, kill_process), SECONDS)
        run(lambda: kill_while_streaming(server, alone, kill_node), SECONDS)
        assert server.terminate() == 0
