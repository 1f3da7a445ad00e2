"""The deployments of Ray Serve: one Ingress with the HTTP API, and replicas that compute."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ktransformers.errors import ConfigError

try:
    import ray
    from ray import serve
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "ray":
        raise
    raise ConfigError(
        "a cluster needs Ray: pip install 'ktransformers-engine[cluster]', or pip install 'ray[serve]'"
    ) from error

from ktransformers.cluster.backend import ReplicaInterface
from ktransformers.cluster.config import ClusterArgs, ReplicaArgs
from ktransformers.cluster.handles import ServeReplicas
from ktransformers.cluster.records import Ask, Order, decode, encode
from ktransformers.cluster.replica import Replica
from ktransformers.cluster.stages import Stages, actor_options, bundle
from ktransformers.engine.model.checks import check_tokenizer
from ktransformers.engine.model.opened import describe_model, open_model
from ktransformers.server.app import create_app
from ktransformers.server.backend.interfaces.balance_serve import BalanceServeInterface
from ktransformers.server.config import ServerConfig
from ktransformers.server.service import Service
from ktransformers.system.logs import set_up_logging
from ktransformers.tokenizer import Tokenizer

__all__ = ["EngineReplica", "Ingress", "application"]

logger = logging.getLogger("ktransformers.server")

HEAD = "node:__internal_head__"
"""Ray's resource of the node that it was started on: the address that clients know is there, and so is the ingress."""

_ONGOING = 1 << 16
"""Requests that Serve lets through to a replica or to the ingress: which of them wait is our own matter."""


class EngineReplica:
    """A replica: balance_serve with its processes, on one node. text: ClusterArgs as JSON."""

    async def __init__(self, text: str):  # type: ignore[misc]  # Serve awaits it
        args = ClusterArgs.model_validate_json(text)
        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id
        set_up_logging(args.log_level, f"replica {self._name}", with_time=True)
        self._replica: Replica | None = None
        self._stages: Stages | None = None
        if args.engine.pipeline > 1:
            self._stages = Stages(args, f"replica {self._name}")
            args = await self._stages.start()
        self._backend = BalanceServeInterface(args.balance())
        await self._backend.start()
        node = ray.get_runtime_context().get_node_id()
        self._replica = Replica(self._name, self._backend, node)
        logger.info("replica %s is ready on node %s, process %d", self._name, node, os.getpid())

    @property
    def _ready(self) -> Replica:
        assert self._replica is not None, "Serve asks nothing before __init__ has returned"
        return self._replica

    async def answer(self, ask: bytes, keys: bytes) -> AsyncGenerator[bytes, None]:
        """Yield the messages for an Ask, encoded, see Replica.answer. keys: what PrefixRouter has read."""
        async with aclosing(self._ready.answer(decode(ask, Ask))) as messages:
            async for message in messages:
                yield encode(message)

    async def facts(self) -> bytes:
        """Return the replica's Facts, encoded."""
        return encode(self._ready.facts())

    async def report(self) -> bytes:
        """Return the replica's ReplicaReport, encoded."""
        return encode(self._ready.report())

    async def obey(self, order: bytes) -> None:
        """Do what an Order says, see Replica.obey."""
        self._ready.obey(decode(order, Order))

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the figures that `QueuePolicy` scales by."""
        stats = self._ready.report().stats
        return {"num_queued": float(stats.num_running + stats.num_waiting)}

    def check_health(self) -> None:
        """Raise EngineError when the replica's service cannot go on: Serve then replaces the replica."""
        if self._stages is not None and self._stages.lost is not None:
            raise self._stages.lost
        if self._replica is not None and self._replica.lost is not None:
            raise self._replica.lost

    async def __del__(self) -> None:
        if self._replica is not None:
            await self._replica.close()
        await self._backend.close()
        if self._stages is not None:
            self._stages.close()


@serve.ingress()
class Ingress:
    """The HTTP API over all replicas. There is one: what it keeps of requests is in its memory. text: ClusterArgs."""

    async def __init__(self, text: str, replicas: Any):  # type: ignore[misc]  # as above
        args = ClusterArgs.model_validate_json(text)
        set_up_logging(args.log_level, "ingress", with_time=True)
        self._args = args
        self._backend = ReplicaInterface(ServeReplicas(replicas, args.batch.page_size), self._open_tokenizer)
        self._app = create_app(self._backend, args.server)
        self._starting = asyncio.create_task(self._start())

    def __serve_build_asgi_app__(self) -> Any:
        return self._app

    @property
    def _service(self) -> Service:
        service = self._app.state.service
        assert isinstance(service, Service)
        return service

    def _open_tokenizer(self) -> Tokenizer:
        check_tokenizer(self._args.engine)
        tokenizer = describe_model(open_model(self._args.engine)).tokenizer
        tokenizer.use_tool_format(self._args.server.tool_format)
        return tokenizer

    async def _start(self) -> None:
        """Until this is over, requests get a 503."""
        await self._backend.start()
        await asyncio.to_thread(lambda: self._service.json_limits)  # looks at the whole vocabulary
        logger.info("%s", self._backend.model.description)

    def check_health(self) -> None:
        """Raise what went wrong while the model was opened."""
        if self._starting.done():
            self._starting.result()

    async def names(self) -> list[str]:
        """The names that requests may use, once a replica is there."""
        await asyncio.shield(self._starting)
        return list(self._service.model_names)

    async def drain(self, seconds: float) -> int:
        """Let no request in any more, and wait for those that are. Returns how many are left then."""
        self._service.ongoing.end_suspended()
        await self._service.admission.drain(seconds)
        return self._service.admission.num_active

    async def __del__(self) -> None:
        self._starting.cancel()
        await self._backend.close()
        self._service.workers.close()


def application(args: ClusterArgs) -> Any:
    """Make the application of Serve. args: checked."""
    replicas = args.replicas
    scaling: dict[str, Any] = {"num_replicas": replicas.least}
    if replicas.least != replicas.most:
        scaling = {"autoscaling_config": _autoscaling(args)}
    if args.engine.pipeline > 1:  # the replica is in the first bundle, and starts what is in the others
        bundles = [bundle(replicas)] * args.engine.pipeline
        scaling |= {"placement_group_bundles": bundles, "placement_group_strategy": "SPREAD"}
    engines = serve.deployment(EngineReplica).options(
        name="replicas",
        ray_actor_options=actor_options(replicas),
        max_ongoing_requests=_ONGOING,
        graceful_shutdown_timeout_s=replicas.drain_seconds,
        graceful_shutdown_wait_loop_s=1.0,
        health_check_period_s=replicas.health_seconds,
        logging_config={"enable_access_log": False},
        request_router_config={
            "request_router_class": "ktransformers.cluster.router:PrefixRouter",
            "request_router_kwargs": {"max_imbalance": args.max_imbalance},
        },
        **scaling,
    )
    ingress = serve.deployment(Ingress).options(
        name="ingress",
        ray_actor_options={"num_cpus": 0, "resources": {HEAD: 0.001}},
        max_ongoing_requests=_ONGOING,
        graceful_shutdown_timeout_s=args.server.drain_seconds,
        graceful_shutdown_wait_loop_s=1.0,
        logging_config={"enable_access_log": False},
    )
    # Each is told what it needs and no more: replicas never see API keys.
    of_ingress = args.model_copy(update={"replicas": ReplicaArgs()})
    of_engines = args.model_copy(update={"server": ServerConfig()})
    return ingress.bind(of_ingress.model_dump_json(), engines.bind(of_engines.model_dump_json()))


def _autoscaling(args: ClusterArgs) -> dict[str, Any]:
    return {
        "min_replicas": args.replicas.least,
        "max_replicas": args.replicas.most,
        "policy": {
            "policy_function": "ktransformers.cluster.scaling:QueuePolicy",
            "policy_kwargs": {"target": args.queue_target},
        },
    }
