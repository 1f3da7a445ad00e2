"""Stages of one replica on other nodes: an actor in each further bundle of its placement group, which runs an agent.

The replica's engine leads and connects to the agents (engine/parallel/ranks/agent.py). A stage whose process dies is
replaced by another one of its agent; an actor that dies, with its node for example, takes the replica with it: Serve
places a new one, and its answers go on there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ktransformers.cluster.config import ClusterArgs, ReplicaArgs
from ktransformers.engine.parallel.ranks.agent import StageAgent
from ktransformers.errors import EngineError, reason_of
from ktransformers.system.logs import set_up_logging

__all__ = ["Stages", "actor_options", "bundle"]

logger = logging.getLogger("ktransformers.server")

_START_SECONDS = 120.0
"""For all actors to say where they listen."""


def bundle(replicas: ReplicaArgs) -> dict[str, float]:
    """Return the resources that Ray sets aside for a replica, or for each stage of one."""
    found = {"CPU": replicas.cpus, **replicas.resources}
    if replicas.gpus:
        found["GPU"] = replicas.gpus
    if replicas.memory:
        found["memory"] = int(replicas.memory * (1 << 30))
    return found


class StageActor:
    """An agent on a node, for the one driver that has the secret, 64 hexadecimal digits."""

    def __init__(self, name: str, secret: str, log_level: str):
        set_up_logging(log_level, name, with_time=True)
        self._agent = StageAgent(ray.util.get_node_ip_address(), 0, secret.encode())
        self._thread = threading.Thread(target=self._agent.serve, daemon=True)
        self._thread.start()

    def address(self) -> str:
        """Return the agent's address as HOST:PORT."""
        host = f"[{self._agent.host}]" if ":" in self._agent.host else self._agent.host
        return f"{host}:{self._agent.port}"

    def run(self) -> None:
        """Wait for the agent: returns, or raises, when it is over."""
        self._thread.join()


class Stages:
    """The stages of a replica on other nodes: all but the last one. lost: why the replica cannot go on."""

    def __init__(self, args: ClusterArgs, name: str) -> None:
        self._args, self._secret = args, secrets.token_hex(32)
        self._folder = tempfile.TemporaryDirectory(prefix="kt-stages-")
        self.lost: EngineError | None = None
        group = ray.util.get_current_placement_group()
        options = actor_options(args.replicas)
        made: Any = ray.remote(StageActor)
        self._actors = [
            made.options(
                max_concurrency=2,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
                **options,
            ).remote(f"stage {index} of {name}", self._secret, args.log_level)
            for index in range(1, args.engine.pipeline)
        ]
        self._watching: list[asyncio.Task[None]] = []

    async def start(self) -> ClusterArgs:
        """Start the stages and return the arguments with their addresses. Raises EngineError when there is no place for
        them."""
        try:
            hosts = await asyncio.wait_for(
                asyncio.gather(*(actor.address.remote() for actor in self._actors)), _START_SECONDS
            )
        except (RayError, TimeoutError) as error:
            raise EngineError(f"stages were not placed: {reason_of(error)}") from error
        logger.info("stages of this replica are at %s", ", ".join(hosts))
        self._watching = [
            asyncio.create_task(self._watch(actor, host)) for actor, host in zip(self._actors, hosts, strict=True)
        ]
        path = Path(self._folder.name) / "secret"
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(self._secret)
        engine = replace(self._args.engine, stage_hosts=",".join(hosts), stage_key_file=path)
        return self._args.model_copy(update={"engine": engine})

    async def _watch(self, actor: Any, host: str) -> None:
        try:
            await actor.run.remote()
            reason = "it has ended"
        except RayError as error:
            reason = reason_of(error)
        self.lost = self.lost or EngineError(f"the stage at {host} is lost: {reason}")
        logger.error("%s; another replica will take this one's place", self.lost)

    def close(self) -> None:
        """End all stages."""
        for task in self._watching:
            task.cancel()
        for actor in self._actors:
            ray.kill(actor)
        self._folder.cleanup()


def actor_options(replicas: ReplicaArgs) -> dict[str, Any]:
    """Return what `bundle` sets aside as options of an actor."""
    options: dict[str, Any] = {
        "num_cpus": replicas.cpus,
        "num_gpus": replicas.gpus,
        "resources": dict(replicas.resources),
    }
    if replicas.memory:
        options["memory"] = int(replicas.memory * (1 << 30))
    return options
