"""The flags of `serve --cluster`, and what they mean together with its others. Imports nothing heavy."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

from ktransformers.cli.parsing.options import given_flags
from ktransformers.errors import ConfigError, UnsupportedError
from ktransformers.system.cores import usable_cores

if TYPE_CHECKING:
    from ktransformers.cluster.config import ClusterArgs
    from ktransformers.config import EngineConfig
    from ktransformers.server.config import ServerConfig

__all__ = ["add_cluster_flags", "check_cluster_flags", "cluster_args"]

LOCAL = "local"
_REPLICA_FLAGS = (
    "replicas", "replica_cpus", "replica_memory", "replica_gpus", "replica_resources", "replica_queue",
    "replica_imbalance", "replica_drain_seconds",
)  # fmt: skip
_COUNT = re.compile(r"(\d+)(?:-(\d+))?")


def add_cluster_flags(parser: argparse.ArgumentParser) -> None:
    """Add --cluster and the flags of its replicas to the parser of `serve`."""
    group = parser.add_argument_group("several replicas of the model behind one address (pip install ray[serve])")
    group.add_argument(
        "--cluster",
        nargs="?",
        const=LOCAL,
        metavar="ADDRESS",
        help="join the Ray at this address; without one start Ray on this machine",
    )
    group.add_argument("--replicas", metavar="N|MIN-MAX", help="how many; MIN-MAX: as their queues ask for (1)")
    group.add_argument("--replica_cpus", type=float, metavar="CORES", help="of each (this machine's, shared out)")
    group.add_argument("--replica_memory", type=float, metavar="GIB", help="host memory that Ray sets aside for each")
    group.add_argument("--replica_gpus", type=float, metavar="N", help="GPUs of each (0)")
    group.add_argument(
        "--replica_resources",
        action="append",
        metavar="NAME=N",
        help="what else of Ray's resources each needs, such as numa:0=1; repeatable",
    )
    group.add_argument(
        "--replica_queue", type=float, metavar="N", help="answers to do of each that MIN-MAX aims at (--max_batch_size)"
    )
    group.add_argument(
        "--replica_imbalance",
        type=int,
        metavar="N",
        help="answers that a replica may have more than another and still get prompts whose beginning it knows "
        "(half of --max_batch_size)",
    )
    group.add_argument(
        "--replica_drain_seconds",
        type=float,
        metavar="SECONDS",
        help="for the streams of a replica that is to go; then they go on at others (600)",
    )


def check_cluster_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that do nothing together, UnsupportedError for what a cluster cannot honour."""
    if args.cluster is None:
        for flag in _REPLICA_FLAGS:
            if getattr(args, flag) is not None:
                raise ConfigError(f"--{flag} is about replicas, which only --cluster has; add that")
        return
    from ktransformers.cluster.config import REFUSED_FLAGS

    if args.backend_type != "balance_serve":
        raise UnsupportedError(f"--cluster has replicas of balance_serve, not of {args.backend_type}")
    for flag, reason in REFUSED_FLAGS.items():
        if getattr(args, flag) is not None:
            raise UnsupportedError(f"--{flag} does not work with --cluster: {reason}")


def cluster_args(args: argparse.Namespace, engine: EngineConfig, server: ServerConfig) -> ClusterArgs:
    """Return the configuration of a cluster from the flags of `serve --cluster`. Raises ConfigError."""
    from ktransformers.cluster.config import BatchArgs, ClusterArgs, ReplicaArgs

    least, most = _count(args.replicas or "1")
    replica: dict[str, Any] = {
        "cpus": _share(most * max(engine.pipeline, 1))
        if args.replica_cpus is None and args.cluster == LOCAL
        else args.replica_cpus,
        "memory": args.replica_memory,
        "gpus": args.replica_gpus,
        "resources": _resources(args.replica_resources or []),
        "queue_target": args.replica_queue,
        "max_imbalance": args.replica_imbalance,
        "drain_seconds": args.replica_drain_seconds,
    }
    batch = given_flags(args, BatchArgs.model_fields)
    if args.spare_engine is not None:
        batch["has_spare_engine"] = args.spare_engine
    made = ClusterArgs(
        engine=engine,
        server=server,
        batch=BatchArgs(**batch),
        replicas=ReplicaArgs(least=least, most=most, **{name: one for name, one in replica.items() if one is not None}),
        log_level=args.log_level,
    )
    return made.checked()


def _count(text: str) -> tuple[int, int]:
    found = _COUNT.fullmatch(text)
    if found is None:
        raise ConfigError(f"--replicas must be a number, or two with a - between them, got {text!r:.40}")
    least = int(found[1])
    return least, least if found[2] is None else int(found[2])


def _share(num_replicas: int) -> float:
    """Cores of this machine for each of so many, or of so many stages."""
    cores = usable_cores()
    return float(cores // num_replicas) if cores >= num_replicas >= 1 else cores / max(num_replicas, 1)


def _resources(given: list[str]) -> dict[str, float]:
    made = {}
    for text in given:
        name, _, number = text.rpartition("=")
        try:
            made[name] = float(number)
        except ValueError:
            name = ""
        if not name:
            raise ConfigError(f"--replica_resources must be NAME=NUMBER, got {text!r:.60}")
    return made
