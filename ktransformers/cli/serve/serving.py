"""The configuration of the service from the flags of `serve`, and the function that makes its backend."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from ktransformers.cli.parsing.options import check_disk_size, given_flags, given_sampling
from ktransformers.errors import ConfigError, UnsupportedError
from ktransformers.hub.locate import title_of
from ktransformers.server.utils.create_interface import BACKENDS, create_interface, interface_class
from ktransformers.system.restart_policy import MAX_DEATHS

if TYPE_CHECKING:
    from ktransformers.config import EngineConfig
    from ktransformers.server.backend.base import BackendInterfaceBase
    from ktransformers.server.backend.profiler import ProfileConfig
    from ktransformers.server.balance.supervisor import BalanceConfig
    from ktransformers.server.config import ServerConfig

__all__ = [
    "DEFAULT_BACKEND",
    "ENGINE_TIMEOUT",
    "MAX_BATCH_SIZE",
    "MAX_ENGINE_RESTARTS",
    "PAGE_SIZE",
    "backend_maker",
    "check_flags",
    "server_config",
]

_log = logging.getLogger(__name__)

DEFAULT_BACKEND = "balance_serve"
_TIER_FLAGS = ("cpu_memory_size_GB", "kv_disk_path", "kv_disk_size_GB")
_BALANCE_FLAGS = (
    "max_batch_size", "max_itl_ratio", "max_gap_ms", "page_size", "max_engine_restarts", "engine_timeout",
    "spare_engine"
)  # fmt: skip
PAGE_SIZE = 64
MAX_BATCH_SIZE = 16
MAX_ENGINE_RESTARTS = MAX_DEATHS
ENGINE_TIMEOUT = 300.0


def check_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that contradict each other; log those that have no effect with this backend."""
    if args.backend_type not in BACKENDS:
        raise UnsupportedError(f"--backend_type {args.backend_type} is not one of {', '.join(BACKENDS)}")
    if args.backend_type != "balance_serve":
        for flag in _BALANCE_FLAGS:
            if getattr(args, flag) is not None:
                _log.warning(
                    "--%s has no effect: the %s backend computes one request at a time", flag, args.backend_type
                )
    if args.backend_type == "transformers":
        for flag in _TIER_FLAGS:
            if getattr(args, flag) is not None:
                _log.warning("--%s has no effect: the transformers backend keeps no pages below its cache", flag)
            setattr(args, flag, None)
    else:
        check_disk_size(args)


def _names(texts: Sequence[str]) -> tuple[str, ...]:
    """Names given one by one, or with commas."""
    return tuple(name.strip() for text in texts for name in text.split(",") if name.strip())


def listed_names(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the names that --model_name gives, split at commas, each once. Raises ConfigError for an empty one."""
    names = [name.strip() for text in args.model_name for name in text.split(",")]
    if not all(names):
        raise ConfigError("--model_name must not be empty")
    return tuple(dict.fromkeys(names))


def model_names(args: argparse.Namespace, config: EngineConfig) -> tuple[str, ...]:
    """Return the names that a model is served by: those of --model_name, then what its paths are called."""
    names = list(listed_names(args))
    names += [title_of(path) for path in (config.model_path, config.gguf_path) if path is not None]
    return tuple(dict.fromkeys(name.strip() for name in names if name.strip()))


def server_config(args: argparse.Namespace, config: EngineConfig) -> ServerConfig:
    """Return the service's configuration for a model whose configuration is resolved. Raises ConfigError."""
    from ktransformers.server.config import ServerConfig
    from ktransformers.server.http.keys import read_api_keys

    keys = read_api_keys(args.api_key, args.api_key_file)
    if args.backend_type != "balance_serve" and any(limits.priority is not None for limits in keys.values()):
        _log.warning(
            "priority= in --api_key_file has no effect: the %s backend serves by order of arrival", args.backend_type
        )

    more = {
        "host": args.host[1:-1] if args.host.startswith("[") and args.host.endswith("]") else args.host,
        "model_names": model_names(args, config),
        "api_keys": tuple(keys),
        "key_limits": keys,
        "listed_names": listed_names(args),
        "cors_origins": tuple(args.cors_origins),
        "allowed_hosts": _names(args.allowed_hosts),
        "sampling": given_sampling(args),
        "is_strict_on_names": args.strict_model_name,
        "is_strict_on_fields": args.strict_requests,
        "reads_special_tokens": args.special_tokens_in_content,
        "ignores_images": args.ignore_images,
        "image_hosts": _names(args.allowed_image_hosts),
        "drops_oldest": args.context_overflow == "drop",
        "responses_store": args.responses_store << 20,
        "kept_streams": args.kept_streams << 20,
    }
    return ServerConfig(**given_flags(args, (one.name for one in fields(ServerConfig))) | more)


def _profile_config(args: argparse.Namespace) -> ProfileConfig:
    from ktransformers.profiling.capture import ProfileLimits
    from ktransformers.server.backend.profiler import ProfileConfig

    limits = ProfileLimits(args.profile_max_bytes)
    config = ProfileConfig(args.profile, args.profile_root, limits, args.log_level)
    config.check()
    return config


def backend_maker(args: argparse.Namespace, config: EngineConfig) -> Callable[[], BackendInterfaceBase]:
    """Return a function that makes the backend. Imports it here, before the port is taken. Raises ConfigError."""
    from ktransformers.cache.page_folder import private_folder

    profile = _profile_config(args)
    interface_class(args.backend_type)
    if config.kv_disk_path is not None:
        private_folder(config.kv_disk_path)  # balance_serve logs one line later on where it cannot be used
    if args.state_dir is not None:  # requests that go on in the next server find their pictures
        config = replace(config, picture_folder=args.state_dir / "pictures")
    balance = _balance_config(args, config) if args.backend_type == "balance_serve" else None
    return lambda: create_interface(args.backend_type, config, profile, balance)


def _balance_config(args: argparse.Namespace, config: EngineConfig) -> BalanceConfig:
    from ktransformers.server.balance.supervisor import BalanceConfig

    return BalanceConfig(
        engine=config,
        has_spare_engine=args.spare_engine is not False,
        has_traces=args.otlp_traces_endpoint is not None,
        **given_flags(args, (one.name for one in fields(BalanceConfig))),
    )
