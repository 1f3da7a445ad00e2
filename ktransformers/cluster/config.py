"""The arguments of a cluster: one model, and how many replicas of it with what each. Checked here, and sent as JSON.

No annotations as strings here: Ray Serve reads the type of what `app` takes.
"""

import math
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from ktransformers.config import EngineConfig, bundled_model
from ktransformers.errors import ConfigError
from ktransformers.hub.locate import title_of
from ktransformers.scheduler.config import MAX_GAP_MS, MAX_ITL_RATIO
from ktransformers.server.balance.supervisor import BalanceConfig
from ktransformers.server.config import ServerConfig
from ktransformers.server.http.keys import read_api_keys

__all__ = ["REFUSED_FLAGS", "BatchArgs", "ClusterArgs", "ReplicaArgs"]

REFUSED_FLAGS = {
    "state_dir": "answers go on at another replica instead, and no replica has a journal of them",
    "kv_disk_path": "replicas would write the same files; host memory (cpu_memory_size_GB) is each one's own",
    "otlp_traces_endpoint": "when a replica began is on its own clock",
    "profile": "steps are run by the processes of replicas; profile one with `ktransformers serve` alone",
    "profile_root": "steps are run by the processes of replicas; profile one with `ktransformers serve` alone",
}
"""What `ktransformers serve` takes and a cluster does not, with the reason."""


class _Args(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class BatchArgs(_Args):
    """The arguments of each replica's scheduler, see BalanceConfig."""

    page_size: int = 64
    max_batch_size: int = 16
    max_itl_ratio: float = MAX_ITL_RATIO
    max_gap_ms: float = MAX_GAP_MS
    max_engine_restarts: int = 5
    engine_timeout: float = 300.0
    has_spare_engine: bool = True
    factory: str = "ktransformers.server.balance.model_engine:load_engine"


class ReplicaArgs(_Args):
    """The number of replicas, and what Ray sets aside for each.

    least, most: replicas; where they differ, their queues decide. queue_target: answers that are computed or wait, per
    replica, that more replicas are started for; None: as many as one computes at once.
    cpus: cores, fractions too; the engine takes as many threads where cpu_infer does not say otherwise. memory: GiB of
    host memory. gpus: without any, replicas use no GPU. resources: others by name, such as {"numa:0": 1}.
    max_imbalance: how many more answers than the least loaded replica one may have that still gets a prompt because it
    knows its beginning; None: half of what a replica computes at once.
    drain_seconds: how long a replica that is to go may finish its streams; then they go on at others.
    health_seconds: between two questions to a replica whether it lives.
    """

    least: int = 1
    most: int = 1
    queue_target: float | None = None
    cpus: float = 1.0
    memory: float = 0.0
    gpus: float = 0.0
    resources: dict[str, float] = Field(default_factory=dict)
    max_imbalance: int | None = None
    drain_seconds: float = 600.0
    health_seconds: float = 10.0


class ClusterArgs(_Args):
    """The arguments of a cluster. engine, server: as `ktransformers serve` has them. api_key_file: keys besides those
    in server."""

    engine: EngineConfig = Field(default_factory=EngineConfig)
    batch: BatchArgs = Field(default_factory=BatchArgs)
    server: ServerConfig = Field(default_factory=ServerConfig)
    replicas: ReplicaArgs = Field(default_factory=ReplicaArgs)
    api_key_file: Path | None = None
    log_level: str = "info"

    def checked(self) -> "ClusterArgs":
        """Return a copy in which the model exists, has a name, and every value can work. Raises ConfigError."""
        replicas, engine, server = self.replicas, self.engine, self.server
        for flag, reason in REFUSED_FLAGS.items():
            if getattr(server, flag, None) is not None or getattr(engine, flag, None) is not None:
                raise ConfigError(f"--{flag} does not work with --cluster: {reason}")
        if engine.stage_hosts:
            raise ConfigError("--stage_hosts does not work with --cluster: Ray places stages; give --pipeline N alone")
        _check_replicas(replicas)
        if engine.model_path is None and engine.gguf_path is None:
            engine = replace(engine, gguf_path=bundled_model("name a model in engine.model_path or engine.gguf_path"))
        threads = engine.cpu_infer or max(math.floor(replicas.cpus), 1)
        use_cuda = False if engine.use_cuda is None and not replicas.gpus else engine.use_cuda
        engine = replace(engine, cpu_infer=threads, use_cuda=use_cuda).resolved()
        names = server.model_names or tuple(
            title_of(path) for path in (engine.model_path, engine.gguf_path) if path is not None
        )
        keys = dict(server.key_limits)
        if self.api_key_file is not None:
            keys |= read_api_keys([], self.api_key_file)
        server = replace(
            server, model_names=names, key_limits=keys, api_keys=tuple(dict.fromkeys((*server.api_keys, *keys)))
        )
        made = self.model_copy(update={"engine": engine, "server": server, "api_key_file": None})
        made.balance()
        return made

    def balance(self) -> BalanceConfig:
        """Return the config that each replica's BalanceServeInterface is started with. Raises ConfigError."""
        return BalanceConfig(
            engine=self.engine,
            log_level=self.log_level,
            **self.batch.model_dump(),
        )

    @property
    def max_imbalance(self) -> int:
        given = self.replicas.max_imbalance
        return max(self.batch.max_batch_size // 2, 1) if given is None else given

    @property
    def queue_target(self) -> float:
        given = self.replicas.queue_target
        return float(self.batch.max_batch_size) if given is None else given


def _check_replicas(replicas: ReplicaArgs) -> None:
    for is_valid, message in (
        (1 <= replicas.least <= replicas.most, f"--replicas {replicas.least}-{replicas.most}: 1 <= least <= most"),
        (0 < replicas.cpus < math.inf, f"--replica_cpus must be positive, got {replicas.cpus}"),
        (0 <= replicas.memory < math.inf, f"--replica_memory must be at least 0, got {replicas.memory}"),
        (0 <= replicas.gpus < math.inf, f"--replica_gpus must be at least 0, got {replicas.gpus}"),
        (
            replicas.queue_target is None or 0 < replicas.queue_target < math.inf,
            f"queue_target must be positive, got {replicas.queue_target}",
        ),
        (
            replicas.max_imbalance is None or replicas.max_imbalance >= 0,
            f"max_imbalance must be at least 0, got {replicas.max_imbalance}",
        ),
        (0 <= replicas.drain_seconds < math.inf, f"drain_seconds must be at least 0, got {replicas.drain_seconds}"),
        (0 < replicas.health_seconds < math.inf, f"health_seconds must be positive, got {replicas.health_seconds}"),
    ):
        if not is_valid:
            raise ConfigError(message)
