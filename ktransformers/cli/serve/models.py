"""`ktransformers serve FILE.yaml`: plans the models that the file lists, and serves them.

What is wrong with any model is found here, before the port is taken: flags, paths, headers, and whether it fits.
"""

from __future__ import annotations

import argparse
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ktransformers.cli.parsing.options import ArgumentParser, engine_config
from ktransformers.cli.parsing.parser import COMMAND_LINE, user_path
from ktransformers.cli.parsing.settings import Setting
from ktransformers.cli.serve.cluster_options import check_cluster_flags
from ktransformers.cli.serve.models_file import ModelEntry, ModelsFile, read_models_file
from ktransformers.cli.serve.serving import MAX_BATCH_SIZE, PAGE_SIZE, backend_maker, check_flags, server_config
from ktransformers.config import EngineConfig
from ktransformers.core import format_bytes
from ktransformers.errors import CapacityError, ConfigError, KTransformersError, UnsupportedError
from ktransformers.server.utils.create_interface import interface_class

if TYPE_CHECKING:
    from ktransformers.server.config import ServerConfig
    from ktransformers.server.multi_model.needs import ModelNeeds, ToPlan
    from ktransformers.server.multi_model.serving import ModelToServe

__all__ = ["IDLE_SECONDS", "check_pool_flags", "models_file", "plan_models", "run_models"]

_log = logging.getLogger("ktransformers.server")

IDLE_SECONDS = 600.0
_POOL_FLAGS = ("memory", "idle_seconds")
_MODEL_PATHS = frozenset({"model", "model_path", "gguf_path", "model_name", "architectures"})
_OF_SERVER = frozenset(
    {
        "host", "port", "api_key", "api_key_file", "ssl_keyfile", "ssl_certfile", "cors_origins", "allowed_hosts",
        "allowed_image_hosts",
        "web", "strict_model_name", "strict_requests", "max_queue", "max_queue_per_key", "responses_store",
        "max_suspended", "max_keep_seconds", "kept_streams", "request_timeout", "drain_seconds", "ping_seconds",
        "otlp_traces_endpoint", "profile_root", "profile_max_bytes", "log_level", "models", *_POOL_FLAGS,
    }
)  # fmt: skip
"""Flags that hold for the address, whatever model is asked for."""

_REFUSED = {
    "state_dir": "streams are taken up again by a server of one model only",
    "profile": "a profile is of one model: give --profile_root, and start one with POST /v1/profile/start?model=NAME",
    "cluster": "replicas are of one model",
}
_REASONS = {"backend_type": "the transformers backend plans no memory; use balance_serve or ktransformers"}


def models_file(args: argparse.Namespace) -> Path | None:
    """Return the file that --models or MODEL name; None: one model is to be served. Raises ConfigError for both."""
    given: Path | None = args.models
    model = user_path(args.model) if args.model else None
    if given is not None and args.model is not None:
        raise ConfigError("MODEL and --models together say too much; leave one out")
    if given is None and model is not None and model.suffix in (".yaml", ".yml"):
        return model
    return given


def check_pool_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that mean nothing for one model."""
    for flag in _POOL_FLAGS:
        if getattr(args, flag) is not None:
            raise ConfigError(f"--{flag} is about several models: give a YAML file that lists them as MODEL")


@dataclass(frozen=True, slots=True)
class _Asked:
    """A model as its flags ask for it."""

    entry: ModelEntry
    args: argparse.Namespace
    config: EngineConfig
    server: ServerConfig


def run_models(args: argparse.Namespace, path: Path, parser: ArgumentParser) -> int:
    """Serve the models of a file until a signal comes; return the exit code. parser: of `serve`, for the file."""
    parser.prog = "ktransformers serve"
    planned = _planned(args, path, parser)
    models = [_to_serve(one, found) for one, found in zip(planned.asked, planned.needs, strict=True)]
    for line in planned.lines():
        _log.info("%s", line)
    idle = IDLE_SECONDS if planned.idle_seconds is None else planned.idle_seconds
    from ktransformers.server.multi_model.serving import serve_models

    serve_models(models, planned.server, planned.memory, idle or math.inf)
    return 0


def plan_models(args: argparse.Namespace, path: Path, parser: ArgumentParser) -> int:
    """Print what each model of a file takes; return the exit code. parser: of `serve`, for the file."""
    planned = _planned(args, path, parser)
    print("\n".join(planned.lines()))
    return 0


@dataclass(frozen=True, slots=True)
class _Planned:
    """The models of a file, planned beside each other. server, idle_seconds: of the address. memory: for all models, by
    device."""

    file: ModelsFile
    server: ServerConfig
    idle_seconds: float | None
    asked: Sequence[_Asked]
    needs: Sequence[ModelNeeds]
    memory: Mapping[str, int]

    def lines(self) -> Iterator[str]:
        """Say what each takes, and what there is."""
        for entry, needs in zip(self.file.models, self.needs, strict=True):
            slots = ""
            if needs.expert_slots:
                slots = (
                    f"; {format_bytes(needs.expert_slots)} of that hold those of its experts that are used most, of "
                    f"{format_bytes(needs.stored_experts)} on the disk"
                )
            yield f"{', '.join(entry.names)} takes {_shown(needs.nbytes)}{slots}"
        yield f"memory for all models: {_shown(self.memory)}"


def _planned(args: argparse.Namespace, path: Path, parser: ArgumentParser) -> _Planned:
    """Plan the models of a file. Raises ConfigError for what is wrong with any of them."""
    file = read_models_file(path)
    given = argparse.Namespace(**vars(args))
    general = parser.with_settings(given, file.settings, without=("model", "models"))
    args.value_sources = general.value_sources  # errors about them say where they stand
    _check_general(general, file)
    server = server_config(general, EngineConfig())
    asked = [_asked(given, general, file, entry, parser) for entry in file.models]
    _check_folders(asked)
    from ktransformers.server.multi_model.needs import find_needs, with_shares  # slow imports

    _log.info("planning %d models", len(asked))
    needs = find_needs([_to_plan(one, general) for one in asked])
    memory = _memory(general, file, needs)
    are_open = [one.config.experts_ram == 0 for one in asked]
    are_wanted = [entry.is_first or entry.is_kept for entry in file.models]
    needs = with_shares(needs, are_open, are_wanted, memory["cpu"])
    _check_first(file, needs, memory)
    return _Planned(file, server, general.idle_seconds, asked, needs, memory)


def _check_general(general: argparse.Namespace, file: ModelsFile) -> None:
    """Flags of the server, from everywhere. Raises ConfigError."""
    for dest in _MODEL_PATHS:
        origin = general.value_sources.get(dest)
        if origin is not None:
            where = "on the command line" if origin == COMMAND_LINE else f"in {origin}"
            raise ConfigError(f"{dest} {where} is about one model: give it to one of those that {file.path} lists")
    _refuse(general, file.path)
    check_cluster_flags(general)
    for flag in _POOL_FLAGS:
        value = getattr(general, flag)
        if value is not None and not 0 <= value < 1 << 40:
            raise ConfigError(f"--{flag} must be at least 0, got {value}")


def _refuse(args: argparse.Namespace, where: object) -> None:
    for flag, reason in _REFUSED.items():
        if getattr(args, flag) is not None:
            raise UnsupportedError(f"{args.value_sources.get(flag, where)}: {flag} is not for several models: {reason}")


def _asked(
    args: argparse.Namespace, general: argparse.Namespace, file: ModelsFile, entry: ModelEntry, parser: ArgumentParser
) -> _Asked:
    """One model: the command line and variables before its own lines, those before what stands above `models`."""
    own = parser.with_settings(argparse.Namespace(value_sources={}), entry.settings)
    for dest, origin in own.value_sources.items():
        if dest in _OF_SERVER or dest == "model_name":
            reason = "name says it" if dest == "model_name" else "it is a flag of the server: put it above `models`"
            raise ConfigError(f"{origin}: {dest}: {reason}")
    above = _without_memory(file.settings, parser)
    made = parser.with_settings(args, entry.settings, above, without=("model", "models", "gpu_memory"))
    made.model_name = list(entry.names)
    _refuse(made, entry.origin)
    try:
        check_cluster_flags(made)
        check_flags(made)
        if made.backend_type == "transformers":
            raise UnsupportedError(f"--backend_type transformers: {_REASONS['backend_type']}")
        config = engine_config(made)
        if config.model_path is None and config.gguf_path is None:
            raise ConfigError("the model has no files: give it gguf_path, model_path or model")
        config = replace(config, gpu_memory=config.gpu_memory or general.gpu_memory).resolved()
        for flag in ("tensor_parallel", "pipeline"):
            if getattr(config, flag) > 1:
                raise UnsupportedError(
                    f"--{flag}: the memory of models beside each other is planned for a process each"
                )
        server = replace(server_config(made, config), model_names=entry.names)
    except KTransformersError as error:
        raise ConfigError(f"{entry.origin} ({entry.names[0]}): {error}") from error
    return _Asked(entry, made, config, server)


def _without_memory(settings: Sequence[Setting], parser: ArgumentParser) -> list[Setting]:
    """Without gpu_memory, which is for all models together above them, whatever it is called."""
    probe = argparse.Namespace(value_sources={})
    return [one for one in settings if "gpu_memory" not in parser.with_settings(probe, [one]).value_sources]


def _check_folders(asked: Sequence[_Asked]) -> None:
    folders = Counter(one.config.kv_disk_path for one in asked)
    for one in asked:
        if one.config.kv_disk_path is not None and folders[one.config.kv_disk_path] > 1:
            raise ConfigError(
                f"{one.entry.origin} ({one.entry.names[0]}): {one.config.kv_disk_path} is the kv_disk_path of several "
                "models; give each its own folder"
            )


def _to_plan(one: _Asked, general: argparse.Namespace) -> ToPlan:
    from ktransformers.server.balance.supervisor import SPARE_BYTES
    from ktransformers.server.multi_model.needs import ToPlan

    config = one.config
    memory = 0 if general.memory is None else int(general.memory * 2**30)
    if one.args.backend_type != "balance_serve":
        return ToPlan(config, memory=memory)
    page_size = PAGE_SIZE if one.args.page_size is None else one.args.page_size
    batch_size = MAX_BATCH_SIZE if one.args.max_batch_size is None else one.args.max_batch_size
    num_engines = 1 if one.args.spare_engine is False else 2
    return ToPlan(config, page_size, batch_size, num_engines * SPARE_BYTES, memory)


def _memory(general: argparse.Namespace, file: ModelsFile, needs: Sequence[ModelNeeds]) -> dict[str, int]:
    """What there is for all models, by device. Raises the first error that planning found."""
    for entry, found in zip(file.models, needs, strict=True):
        if found.error:
            raise ConfigError(f"{entry.origin} ({entry.names[0]}): {found.error}")
    free, ram = needs[0].memory, needs[0].ram_bytes
    host = free["cpu"] if not general.memory else int(general.memory * 2**30)
    if host > ram:
        raise ConfigError(f"--memory must be at most {ram / 2**30:.1f} (this machine's), got {general.memory:g}")
    if host > free["cpu"]:
        _log.warning("--memory %g: only %s are free now", general.memory, format_bytes(free["cpu"]))
    most = int(general.gpu_memory * 2**30) or math.inf
    return {"cpu": host} | {name: int(min(nbytes, most)) for name, nbytes in free.items() if name != "cpu"}


def _to_serve(one: _Asked, needs: ModelNeeds) -> ModelToServe:
    from ktransformers.server.multi_model.needs import pinned
    from ktransformers.server.multi_model.outline import outline_of
    from ktransformers.server.multi_model.serving import ModelToServe

    config = pinned(one.config, needs)
    try:
        outline = outline_of(config, needs)
        make = backend_maker(one.args, config)
    except KTransformersError as error:
        raise ConfigError(f"{one.entry.origin} ({one.entry.names[0]}): {error}") from error
    return ModelToServe(
        config=one.server,
        kind=interface_class(one.args.backend_type),
        make=make,
        outline=outline,
        nbytes=needs.nbytes,
        is_kept=one.entry.is_kept,
        is_first=one.entry.is_first,
    )


def _check_first(file: ModelsFile, needs: Sequence[ModelNeeds], memory: Mapping[str, int]) -> None:
    """Those that are wanted from the start have to fit side by side."""
    for device, most in memory.items():
        pairs = zip(file.models, needs, strict=True)
        taken = sum(found.nbytes.get(device, 0) for entry, found in pairs if entry.is_first)
        if taken > most:
            raise CapacityError(
                f"{file.path}: the models with `load: start` take {format_bytes(taken)} of {device} together, and "
                f"there are {format_bytes(most)} for all models; load some of them on_demand, or raise memory"
            )


def _shown(nbytes: Mapping[str, int]) -> str:
    return ", ".join(f"{format_bytes(size)} of {device}" for device, size in nbytes.items() if size)
