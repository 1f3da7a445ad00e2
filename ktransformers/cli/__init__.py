"""The `ktransformers` command: parses flags, calls the layers below, turns their errors into one line.

`parsing` reads command lines, variables and files; `loading.py` opens a model with a bar; then a folder for each kind
of command: `models` (pull, list, rm, plan, quantize, pack), `chat`, `serve`, `doctor`, `bench`, and `profile.py`.

Importing it must stay cheap: torch and transformers are imported by the commands that need them, when they run.

Does not know how anything is computed.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence

from ktransformers.cli import profile
from ktransformers.cli.bench import command as bench_command
from ktransformers.cli.chat import command as chat_command
from ktransformers.cli.doctor import command as doctor_command
from ktransformers.cli.models import command as models_command
from ktransformers.cli.models import imatrix, pack, plan, pull, quantize
from ktransformers.cli.parsing import completion
from ktransformers.cli.parsing.exit_codes import FAILED, INTERRUPTED, WRONG_USAGE, exit_code
from ktransformers.cli.parsing.options import version
from ktransformers.cli.parsing.parser import COMMAND_LINE, ArgumentParser, leaves
from ktransformers.cli.parsing.settings import unknown_variables
from ktransformers.cli.serve import command as serve_command
from ktransformers.cli.serve import stage
from ktransformers.errors import ConfigError, KTransformersError, reason_of

__all__ = ["build_parser", "guarded", "local_chat_main", "main", "run_command", "server_main"]

_COMMANDS = (
    chat_command,
    serve_command,
    plan,
    pull,
    models_command,
    quantize,
    imatrix,
    pack,
    bench_command,
    profile,
    stage,
    doctor_command,
)

_EXAMPLES = """Examples:
  ktransformers chat Qwen3-30B-A3B-Q4_K_M.gguf
  ktransformers serve Qwen3-30B-A3B-Q4_K_M.gguf --port 8000

`ktransformers help COMMAND` shows its flags. Each can be a variable (KTRANSFORMERS_PORT=8000) or a line of a file
(--config FILE.yaml) as well. Flags of llama.cpp, vLLM and SGLang are understood
where there is the same thing here: docs/flags.md."""


def build_parser() -> ArgumentParser:
    """Build the parser of the whole command, with one subparser per file of this package."""
    parser = ArgumentParser(
        prog="ktransformers",
        has_settings=False,
        description="Run Mixture-of-Experts language models that do not fit into the GPU's memory.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"ktransformers {version()}")
    subparsers = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(subparsers)
    subparsers.choices["plan"].set_defaults(plan_models=serve_command.plan_several)
    completion.add_parser(subparsers, parser)
    _add_help(subparsers)
    parser.elsewhere = _flags_of(parser)
    for leaf in leaves(parser):
        leaf.elsewhere = parser.elsewhere
    return parser


def _flags_of(parser: ArgumentParser) -> dict[str, str]:
    """The names of all commands' flags, and of the first command that has each."""
    found = reversed(list(leaves(parser)))
    return {name: leaf.prog for leaf in found for name in (*leaf.option_names(), *leaf.settings())}


def _add_help(subparsers: argparse._SubParsersAction[ArgumentParser]) -> None:
    text = "show the flags of a command"
    parser = subparsers.add_parser("help", has_settings=False, help=text, description=text.capitalize() + ".")
    parser.add_argument("words", metavar="COMMAND", nargs="*")
    parser.set_defaults(run=_help)


def _help(args: argparse.Namespace) -> int:
    """Print a command's help, as --help does. Ends the process."""
    build_parser().parse_args([*args.words, "--help"])
    return 0


def guarded(run: Callable[[], int], args: argparse.Namespace | None = None) -> int:
    """Return the exit code of `run`; this program's errors become one line on standard error and what `exit_code` says.

    args: parsed arguments; with them an error that names a flag says which variable or file set it.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported: see engine/model/threads.py
    try:
        return run()
    except ConfigError as error:
        print(f"error: {_origin(str(error), args)}{error}", file=sys.stderr)
        return exit_code(error)
    except KTransformersError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output left. Python would complain once more while it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:  # a file, a folder or a device that the system refuses
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{reason_of(error)}", file=sys.stderr)
        return FAILED


def _origin(message: str, args: argparse.Namespace | None) -> str:
    """Where the value that `message` is about was set, with a colon; nothing when on the command line."""
    named = re.match(r"(\w+) must be", message) or re.search(r"--(\w+)", message)
    sources: dict[str, str] = getattr(args, "value_sources", {})
    is_model = message.startswith(f"{getattr(args, 'model', None)} ")
    origin = sources.get("model" if is_model else named[1] if named else "")
    return f"{origin}: " if origin not in (None, COMMAND_LINE) else ""


def _warn_of_variables() -> None:
    if any(name.startswith("KTRANSFORMERS_") for name in os.environ):
        line = unknown_variables(os.environ, {name for leaf in leaves(build_parser()) for name in leaf.settings()})
        if line is not None:
            print(f"warning: {line}", file=sys.stderr)


def run_command(parser: ArgumentParser, argv: Sequence[str] | None = None) -> int:
    """Parse `argv` (default: the process's) and run the command. Returns the exit code; wrong usage exits with 2."""
    _warn_of_variables()
    if not parser.elsewhere:
        parser.elsewhere = _flags_of(build_parser())
    args = parser.parse_args(argv)
    return guarded(lambda: int(args.run(args)), args)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's). Returns the exit code; wrong usage exits with 2.

    Flags without a command are those of `serve`: upstream's `ktransformers` was its server.
    """
    parser = build_parser()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        parser.print_help(sys.stderr)
        return WRONG_USAGE
    if words[0].startswith("-") and words[0] not in ("-h", "--help", "--version"):
        words.insert(0, "serve")
    return run_command(parser, words)


def local_chat_main(argv: Sequence[str] | None = None) -> int:
    """Run the command line of local_chat.py. Returns the exit code."""
    return run_command(chat_command.local_chat_parser(), argv)


def server_main(argv: Sequence[str] | None = None) -> int:
    """Run the command line of server/main.py. Returns the exit code."""
    return run_command(serve_command.server_parser(), argv)
