"""`ktransformers serve`, and `python ktransformers/server/main.py`, which takes the same flags.

With no model given it serves the bundled one; with a YAML file in its place, the models that it lists.
"""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktransformers.cli.parsing.options import (
    ArgumentParser,
    add_disk_size_flag,
    add_logging_flag,
    add_model_argument,
    add_model_flags,
    add_overflow_flag,
    add_profile_flags,
    add_sampling_flags,
    add_template_flags,
    add_tier_flags,
    add_toggle,
    engine_config,
    set_up_logging,
    with_default_model,
)
from ktransformers.cli.parsing.parser import user_path
from ktransformers.cli.serve.cluster_options import add_cluster_flags, check_cluster_flags, cluster_args
from ktransformers.cli.serve.models import IDLE_SECONDS, check_pool_flags, models_file, plan_models, run_models
from ktransformers.cli.serve.serving import (
    DEFAULT_BACKEND,
    ENGINE_TIMEOUT,
    MAX_BATCH_SIZE,
    MAX_ENGINE_RESTARTS,
    PAGE_SIZE,
    backend_maker,
    check_flags,
    server_config,
)
from ktransformers.core import format_bytes
from ktransformers.errors import CapacityError
from ktransformers.scheduler.config import MAX_GAP_MS, MAX_ITL_RATIO
from ktransformers.server.utils.create_interface import BACKENDS

if TYPE_CHECKING:
    from ktransformers.config import EngineConfig
    from ktransformers.server.backend.base import BackendInterfaceBase
    from ktransformers.server.config import ServerConfig

__all__ = ["add_parser", "run", "server_parser"]

_DESCRIPTION = "Serve a model over HTTP (OpenAI's API); without a model, the small one that comes with the program."

_MIN_FILES = 256
_MIN_ADDRESS_SPACE = 4 << 30
"""Code of the libraries, and stacks of threads that are reserved and not used; a model comes on top of it."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `serve` among the subcommands."""
    parser = subparsers.add_parser("serve", help="serve a model over HTTP", description=_DESCRIPTION)
    _add_flags(parser)


def server_parser() -> ArgumentParser:
    """Build the parser of server/main.py: the flags of `serve` without a command in front."""
    parser = ArgumentParser(prog="main.py", description=_DESCRIPTION)
    _add_flags(parser)
    return parser


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_model_flags(parser, bounds_requests=True)
    add_sampling_flags(parser, has_seed=False)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s: this machine only)")
    group.add_argument("--port", type=int, default=10002, help="port; 0: any free one (%(default)s)")
    group.add_argument("--backend_type", default=DEFAULT_BACKEND, help=f"{', '.join(BACKENDS)} (%(default)s)")
    group.add_argument(
        "--max_batch_size", type=int, help=f"balance_serve: most requests computed at once ({MAX_BATCH_SIZE})"
    )
    group.add_argument(
        "--max_itl_ratio",
        type=float,
        metavar="X",
        help="balance_serve: beside prompts, a stream is at most X times slower over any two seconds; 0: no limit but "
        f"--chunk_size ({MAX_ITL_RATIO:g})",
    )
    group.add_argument(
        "--max_gap_ms",
        type=float,
        metavar="MS",
        help="balance_serve: most milliseconds between two tokens of a stream for the sake of prompts, or four steps "
        f"where these are longer; 0: no limit ({MAX_GAP_MS:g})",
    )
    group.add_argument("--page_size", type=int, help=f"balance_serve: tokens per page of the cache ({PAGE_SIZE})")
    add_toggle(group, "prefix_cache", default=None, help="use what is cached of prompts that begin alike (on)")
    add_tier_flags(group)
    add_disk_size_flag(group)
    group.add_argument(
        "--max_engine_restarts",
        type=int,
        help=f"balance_serve: engines that may die within 10 minutes ({MAX_ENGINE_RESTARTS})",
    )
    group.add_argument(
        "--engine_timeout",
        type=float,
        metavar="SECONDS",
        help=f"balance_serve: a step of few tokens that takes longer hangs, one of many gets more; 0: never "
        f"({ENGINE_TIMEOUT:.0f})",
    )
    add_toggle(
        group, "spare_engine", default=None, help="balance_serve: keep a process ready to become the next engine (on)"
    )
    _add_api_flags(group)
    _add_patience_flags(group)
    group.add_argument(
        "--otlp_traces_endpoint", metavar="URL", help="send OpenTelemetry spans of answers to this collector, over HTTP"
    )
    add_toggle(group, "web", default=None, help="the chat page at / (on where only this machine can connect)")
    add_profile_flags(group)
    group.add_argument(
        "--profile_root", type=user_path, metavar="DIR", help="folder below which POST /v1/profile/start may write"
    )
    add_logging_flag(group)
    _add_pool_flags(parser)
    add_cluster_flags(parser)
    parser.set_defaults(run=run)


def _add_pool_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several models at one address (MODEL is a YAML file that lists them)")
    group.add_argument("--models", type=user_path, metavar="FILE", help="that file, in the place of MODEL")
    group.add_argument(
        "--memory", type=float, metavar="GIB", help="host memory for all models together (what is free at the start)"
    )
    group.add_argument(
        "--idle_seconds",
        type=float,
        metavar="SECONDS",
        help=f"a model that nobody asks for so long is stopped; 0: never ({IDLE_SECONDS:.0f})",
    )


def _add_api_flags(group: argparse._ArgumentGroup) -> None:
    """What requests may say, and who may send them."""
    group.add_argument("--model_name", action="append", default=[], metavar="NAME", help="name in the API; repeatable")
    add_toggle(group, "strict_model_name", default=False, help="404 for requests that name another model (off)")
    add_toggle(group, "strict_requests", default=False, help="400 for fields that have no effect here (off)")
    add_toggle(
        group, "special_tokens_in_content", default=False, help="read special tokens that messages spell as such (off)"
    )
    group.add_argument("--api_key", action="append", default=[], metavar="KEY", help="repeatable, or with commas")
    group.add_argument(
        "--api_key_file", type=user_path, help="one API key per line, with limits: rpm=N concurrent=N ..."
    )
    group.add_argument("--ssl_keyfile", type=user_path, help="TLS: private key (PEM)")
    group.add_argument("--ssl_certfile", type=user_path, help="TLS: certificate chain (PEM)")
    group.add_argument("--cors_origins", action="append", default=[], metavar="ORIGIN", help="repeatable; * for all")
    group.add_argument(
        "--allowed_hosts",
        action="append",
        default=[],
        metavar="NAME",
        help="names of this server; repeatable; * for all",
    )
    add_toggle(
        group, "ignore_images", default=False, help="models without a tower read a note in the place of images (off)"
    )
    group.add_argument("--max_images", type=int, default=64, metavar="N", help="images of one request (%(default)s)")
    group.add_argument(
        "--allowed_image_hosts",
        action="append",
        default=[],
        metavar="NAME",
        help="hosts from which images are fetched by URL; repeatable, *.example.com (none)",
    )
    add_toggle(group, "force_think", default=False, help="begin every answer with the model's thinking tag")
    add_overflow_flag(group, default="error")
    group.add_argument(
        "--tool_format",
        default="auto",
        metavar="NAME",
        help="how the model writes tool calls (auto: as its chat template tells; none: refuse tools)",
    )
    add_template_flags(group)


def _add_patience_flags(group: argparse._ArgumentGroup) -> None:
    """How much, and how long."""
    group.add_argument("--max_queue", type=int, default=256, help="waiting answers beyond which 503 (%(default)s)")
    group.add_argument("--max_queue_per_key", type=int, metavar="N", help="answers at once for one API key (no limit)")
    group.add_argument(
        "--responses_store", type=int, default=64, metavar="MIB", help="of answers kept for /v1/responses (%(default)s)"
    )
    group.add_argument("--max_suspended", type=int, default=64, help="suspended requests at most (%(default)s)")
    group.add_argument(
        "--max_keep_seconds",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help="most that a stream goes on without its client, where that asks for it; 0: never (%(default)s)",
    )
    group.add_argument(
        "--kept_streams", type=int, default=64, metavar="MIB", help="of such streams, all together (%(default)s)"
    )
    group.add_argument(
        "--state_dir",
        type=user_path,
        metavar="DIR",
        help="folder for a journal of kept streams, which go on after a crash or a restart; not with transformers",
    )
    group.add_argument("--request_timeout", type=float, metavar="SECONDS", help="for requests that name no timeout")
    group.add_argument("--drain_seconds", type=float, default=30.0, help="for running answers at the end (%(default)s)")
    group.add_argument(
        "--ping_seconds",
        type=float,
        default=15.0,
        metavar="SECONDS",
        help="a stream that has been silent for so long sends a comment; 0: never (%(default)s)",
    )
    group.add_argument("--sched_strategy", choices=("FCFS",), default="FCFS", help="order of service (%(default)s)")


def plan_several(path: Path) -> int:
    """Print what the models of a file take beside each other. Returns the exit code."""
    parser = server_parser()
    return plan_models(parser.parse_args([str(path)]), path, parser)


def _run_cluster(args: argparse.Namespace, config: EngineConfig, server: ServerConfig) -> int:
    wanted = cluster_args(args, config, server)
    from ktransformers.cluster.running import run_cluster  # needs Ray, an extra

    run_cluster(wanted, args.cluster)
    return 0


def run(args: argparse.Namespace, backend: Callable[[], BackendInterfaceBase] | None = None) -> int:
    """Serve until a signal comes. Returns the exit code. `backend` replaces the real one, for tests."""
    set_up_logging(args.log_level, with_time=True)
    _check_process_limits()
    several = models_file(args)
    if several is not None:
        return run_models(args, several, server_parser())
    check_pool_flags(args)
    check_flags(args)
    check_cluster_flags(args)
    config = with_default_model(engine_config(args)).resolved()  # before the slow imports: a wrong path shows at once
    server = server_config(args, config)
    if args.cluster is not None:
        return _run_cluster(args, config, server)
    from ktransformers.cli.loading import loading_bar
    from ktransformers.server.run import serve

    def bar() -> Any:
        return loading_bar(sys.stderr)

    serve(backend or backend_maker(args, config), server, bar)
    return 0


def _check_process_limits() -> None:
    """Raise CapacityError when the limits on open files or on the address space let no server start: before the
    large imports, which die of too little."""
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files != resource.RLIM_INFINITY and num_files < _MIN_FILES:
        raise CapacityError(f"this process may open {num_files} files; a server needs {_MIN_FILES}: raise `ulimit -n`")
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY and space < _MIN_ADDRESS_SPACE:
        raise CapacityError(
            f"this process may have {format_bytes(space)} of address space (not memory); a server needs "
            f"{format_bytes(_MIN_ADDRESS_SPACE)} and the size of the model: raise `ulimit -v`"
        )
