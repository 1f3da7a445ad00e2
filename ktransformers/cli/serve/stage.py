"""`ktransformers stage`: runs a stage of a model for `ktransformers serve --stage_hosts` on another machine."""

from __future__ import annotations

import argparse
import signal
from types import FrameType

from ktransformers.cli.parsing.options import add_logging_flag, set_up_logging
from ktransformers.cli.parsing.parser import user_path
from ktransformers.errors import ConfigError

__all__ = ["add_parser"]

PORT = 7900
KEY_HINT = "make one with: (umask 077; openssl rand -hex 32 > FILE)"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `stage` among the subcommands.

    `run` is set to the function that takes the parsed arguments and returns an exit code.
    """
    parser = subparsers.add_parser(
        "stage",
        help="run a stage of a model for a server on another machine",
        description="Wait for `ktransformers serve --stage_hosts` on another machine, and run a stage of its model: "
        "some neighbouring layers, read from the same path here. One driver at a time. What goes over the network is "
        "not encrypted: only for networks of your own.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at, of that network (%(default)s)")
    parser.add_argument("--port", type=int, default=PORT, help="port; 0: any, which the log says (%(default)s)")
    parser.add_argument(
        "--stage_key_file",
        type=user_path,
        metavar="FILE",
        help=f"the secret that drivers must know; {KEY_HINT}",
    )
    add_logging_flag(parser)
    parser.set_defaults(run=stage_command)


def stage_command(args: argparse.Namespace) -> int:
    """Run a stage of a model until SIGINT or SIGTERM; return the exit code. Raises ConfigError."""
    set_up_logging(args.log_level)
    if args.stage_key_file is None:
        raise ConfigError(f"ktransformers stage needs --stage_key_file FILE, the secret of its drivers; {KEY_HINT}")
    from ktransformers.engine.parallel.ranks.agent import StageAgent, read_secret

    agent = StageAgent(args.host, args.port, read_secret(args.stage_key_file))

    def stop(number: int, frame: FrameType | None) -> None:
        agent.close()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    print(f"waiting for a driver at {agent.host}:{agent.port}", flush=True)
    agent.serve()
    return 0
