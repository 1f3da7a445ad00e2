"""`ktransformers completion SHELL`: prints the script by which a shell completes commands, flags and paths."""

from __future__ import annotations

import argparse
from pathlib import Path

from ktransformers.cli.parsing.parser import ArgumentParser, leaves, user_path

__all__ = ["SHELLS", "add_parser", "completion_script"]

SHELLS = ("bash", "zsh", "fish")

_DESCRIPTION = """Print the script by which a shell completes commands, flags and paths.
Keep it where the shell looks for such scripts:

  bash  ~/.local/share/bash-completion/completions/ktransformers
  zsh   ~/.zfunc/_ktransformers, with ~/.zfunc in $fpath
  fish  ~/.config/fish/completions/ktransformers.fish

or try it in this shell: source <(ktransformers completion bash)"""


def add_parser(subparsers: argparse._SubParsersAction[ArgumentParser], whole: ArgumentParser) -> None:
    """Register `completion` among the subcommands. whole: the parser that the script completes."""
    parser = subparsers.add_parser(
        "completion", has_settings=False, help="print a shell's completion script", description=_DESCRIPTION
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=f"one of {', '.join(SHELLS)}")
    parser.set_defaults(run=lambda args: _print_script(whole, args.shell))


def completion_script(parser: ArgumentParser, shell: str) -> str:
    """Return the script by which one of SHELLS completes what `parser` takes."""
    import shtab

    for leaf in leaves(parser):
        for action in leaf._actions:
            if action.type in (user_path, Path) or action.dest == "model":
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell))


def _print_script(parser: ArgumentParser, shell: str) -> int:
    print(completion_script(parser, shell))
    return 0
