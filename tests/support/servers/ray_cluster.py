"""Several raylets on one machine, a cluster of `ktransformers serve --cluster` on them, and streams through it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from ray.cluster_utils import Cluster

from tests.support.servers.server_process import ServerProcess

OBJECT_STORE = 80 << 20


@contextmanager
def raylets(num_workers: int) -> Iterator[Cluster]:
    """A head without cores, and workers with one each, whatever cores there are."""
    common = {"object_store_memory": OBJECT_STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **common})
    try:
        for _ in range(num_workers):
            cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE)
        yield cluster
    finally:
        cluster.shutdown()


class ClusterProcess(ServerProcess):
    """`ktransformers serve --cluster` on these raylets."""

    def __init__(self, cluster: Cluster, *flags: str):
        super().__init__("--cluster", cluster.address, "--replica_cpus", "1", "--no-spare_engine", *flags)

    async def status(self, client: httpx.AsyncClient) -> dict[str, Any]:
        """What /v1/status says."""
        answer = await client.get(f"{self.url}/v1/status")
        status: dict[str, Any] = answer.raise_for_status().json()
        return status

    async def until(self, client: httpx.AsyncClient, is_true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first status that is so."""
        while not is_true(status := await self.status(client)):
            await asyncio.sleep(0.05)
        return status


@dataclass
class Stream:
    """One answer of /v1/completions, as it comes."""

    number: int
    text: str = ""
    num_chunks: int = 0
    reason: str | None = None
    logprobs: list[float] = field(default_factory=list)

    async def read(self, client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> None:
        async with client.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}) as answer:
            if answer.status_code != 200:
                raise AssertionError((await answer.aread()).decode())
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise AssertionError(chunk)
                for choice in chunk["choices"]:
                    self.text += choice["text"]
                    self.num_chunks += 1
                    self.reason = choice["finish_reason"] or self.reason
                    if choice.get("logprobs"):
                        self.logprobs += choice["logprobs"]["token_logprobs"]
