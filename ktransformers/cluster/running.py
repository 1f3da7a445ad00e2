"""`ktransformers serve --cluster`: starts Ray or joins it, deploys, says where, and ends on a signal."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ktransformers.cluster.config import ClusterArgs
from ktransformers.cluster.deployments import application
from ktransformers.errors import ConfigError, EngineError, reason_of
from ktransformers.system.cores import usable_cpus
from ktransformers.tokenizer.tools import AUTO, tool_format_named

import ray  # isort: skip - deployments says what to do where it is missing
from ray import serve  # isort: skip
from ray.exceptions import RayError  # isort: skip
from ray.serve.exceptions import RayServeException  # isort: skip

__all__ = ["APP_NAME", "LOCAL", "run_cluster"]

logger = logging.getLogger("ktransformers.server")

APP_NAME = "ktransformers"
LOCAL = "local"
"""In place of an address: a Ray of its own on this machine, which ends with the service."""

_OBJECT_STORE = 128 << 20
"""Bytes of Ray's shared memory, of which messages between ingress and replicas need next to nothing."""


def run_cluster(args: ClusterArgs, address: str) -> None:
    """Serve until a signal comes. args: checked. address: of a Ray that runs, or LOCAL.

    Raises ConfigError for an address where there is none, EngineError when no replica can start.
    """
    if args.server.tool_format != AUTO:
        tool_format_named(args.server.tool_format)
    args.server.warn_if_open()
    is_local = address == LOCAL
    _start_ray(args, None if is_local else address)
    stop = threading.Event()
    try:
        with _signals(stop):
            _serve(args, stop)
    finally:
        if is_local:
            serve.shutdown()
        ray.shutdown()
    logger.info("stopped")


def _start_ray(args: ClusterArgs, address: str | None) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody is told that this runs
    cores, stages = usable_cpus(), args.engine.pipeline
    if address is None and args.replicas.least * stages * args.replicas.cpus > cores:
        each = f"{stages} stages of {args.replicas.cpus:g}" if stages > 1 else f"{args.replicas.cpus:g}"
        raise ConfigError(
            f"{args.replicas.least} replicas of {each} cores do not fit this machine of {cores}: "
            "lower --replicas or --replica_cpus"
        )
    local: dict[str, Any] = {"num_cpus": cores, "include_dashboard": False, "object_store_memory": _OBJECT_STORE}
    try:
        if address is None:
            ray.init(resources=_numbers(args), logging_level=logging.WARNING, **local)
        else:
            ray.init(address=address, logging_level=logging.WARNING)
    except (RayError, ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"--cluster {address or LOCAL}: {reason_of(error)}") from error


def _numbers(args: ClusterArgs) -> dict[str, float]:
    """Resources of other names: a Ray of our own has as many as all replicas and their stages want."""
    return {
        name: number * args.replicas.most * args.engine.pipeline for name, number in args.replicas.resources.items()
    }


def _serve(args: ClusterArgs, stop: threading.Event) -> None:
    port = args.server.port or _free_port(args.server.host)
    tls = {"ssl_keyfile": args.server.ssl_keyfile, "ssl_certfile": args.server.ssl_certfile}
    http = {"host": args.server.host, "port": port, "keep_alive_timeout_s": 30}
    http |= {name: str(path) for name, path in tls.items() if path is not None}
    try:
        serve.start(proxy_location="HeadOnly", http_options=http)
        ingress: Any = serve.run(application(args), name=APP_NAME, route_prefix="/", blocking=False)
        names = ingress.names.remote().result()
    except (RayError, RayServeException, RuntimeError, ValueError) as error:
        raise EngineError(f"the replicas cannot be started: {reason_of(error)}; their logs say why") from error
    scheme, host = "http" if args.server.ssl_certfile is None else "https", args.server.host
    shown = f"[{host}]" if ":" in host else host
    logger.info("serving %s on %s://%s:%d/v1", ", ".join(names), scheme, shown, port)
    if args.server.has_web:
        logger.info("chat in a browser on %s://%s:%d", scheme, shown, port)
    stop.wait()
    _drain(ingress, args.server.drain_seconds)
    serve.delete(APP_NAME)


def _drain(ingress: Any, seconds: float) -> None:
    logger.info("stopping: requests may finish within %g s", seconds)
    try:
        num_left = ingress.drain.remote(seconds).result(timeout_s=seconds + 10.0)
    except (RayError, RayServeException, TimeoutError) as error:
        logger.warning("the ingress does not say whether its requests have finished: %s", reason_of(error))
        return
    if num_left:
        logger.warning("%d requests were cut off", num_left)


def _free_port(host: str) -> int:
    """For --port 0: Serve wants a number."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@contextmanager
def _signals(stop: threading.Event) -> Iterator[None]:
    """The first one ends the service in order, the second one at once."""

    def received(number: int, _: object) -> None:
        if stop.is_set():
            sys.exit(128 + number)
        stop.set()

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, received)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
