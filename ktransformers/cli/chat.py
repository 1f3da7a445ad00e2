"""`ktransformers chat`, and `python ktransformers/local_chat.py`, which takes the same flags.

With no model given it chats with the bundled one. When standard input or output is not a terminal, each line of input
is one turn, answers go to standard output as plain text and everything else to standard error.
"""

from __future__ import annotations

import argparse
import importlib
import io
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ktransformers.cli.options import (
    ArgumentParser,
    add_logging_flag,
    add_model_flags,
    add_sampling_flags,
    add_toggle,
    engine_config,
    sampling_params,
    set_up_logging,
    with_default_model,
)
from ktransformers.errors import UnsupportedError

if TYPE_CHECKING:
    from ktransformers.cli.chat_input import ReadLine
    from ktransformers.cli.chat_output import View
    from ktransformers.config import EngineConfig
    from ktransformers.engine.builder import Engine

__all__ = ["add_parser", "local_chat_parser", "run"]

_log = logging.getLogger(__name__)

_DESCRIPTION = "Chat with a model in the terminal; without a model, with the small one that comes with the program."

BuildEngine = Callable[["EngineConfig", "Callable[[int, int, str], None] | None"], "Engine"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser("chat", help="chat with a model in the terminal", description=_DESCRIPTION)
    _add_flags(parser)


def local_chat_parser() -> ArgumentParser:
    """The parser of local_chat.py: the flags of `chat` without a command in front."""
    parser = ArgumentParser(prog="local_chat.py", description=_DESCRIPTION)
    _add_flags(parser)
    return parser


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    add_sampling_flags(parser)
    group = parser.add_argument_group("chat")
    group.add_argument("--system", metavar="TEXT", help="system prompt")
    group.add_argument("--prompt_file", type=Path, help="a file whose text is the first prompt")
    add_toggle(group, "force_think", default=False, help="begin every answer with the model's thinking tag")
    modes = ("normal", "long_context")
    group.add_argument("--mode", choices=modes, default="normal", help="long_context is not supported")
    group.add_argument("--markdown", action="store_true", help="format answers: blocks appear when they are complete")
    add_logging_flag(group)
    parser.set_defaults(run=run)


def _check_flags(args: argparse.Namespace) -> None:
    if args.mode == "long_context":
        raise UnsupportedError(
            "--mode long_context is not supported; use --mode normal and a --cache_lens as long as the context you need"
        )


def run(args: argparse.Namespace, build: BuildEngine | None = None) -> int:
    """Load the model and chat. Returns the exit code. `build` replaces the loading of a real model, for tests."""
    set_up_logging(args.log_level)
    _check_flags(args)
    config = with_default_model(engine_config(args)).resolved()  # before the slow imports: a wrong path shows at once
    from ktransformers.cli.loading import early_line, loading_bar

    name = _model_name(config)
    with early_line(sys.stderr, f"loading {name} ..."):  # what takes seconds to import, before anything else
        importlib.import_module("ktransformers.engine.llm" if build else "ktransformers.engine.builder")
    from ktransformers.cli.chat_input import Turn, read_prompt_file
    from ktransformers.cli.chat_loop import ChatLoop, ChatOptions
    from ktransformers.engine.llm import LLM, default_sampling_params

    first_turns = [] if args.prompt_file is None else [Turn(read_prompt_file(args.prompt_file), is_literal=True)]
    # What can be wrong with the flags shows before the model loads, not minutes later.
    sampling_params(args, default_sampling_params({}, args.max_new_tokens))
    if build is None:
        from ktransformers.engine.builder import build_engine

        build = build_engine
    is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
    with loading_bar(sys.stderr, name) as progress:
        engine = build(config, progress)
    try:
        llm = LLM.from_engine(engine)
        params = sampling_params(args, llm.default_params)
        options = ChatOptions(params, args.system, args.force_think, is_interactive)
        view, read_line = _terminal(args.markdown) if is_interactive else _pipe()
        chat = ChatLoop(llm, view, read_line, options)
        if is_interactive:
            view.note(f"{engine.description}\n{llm.session.max_len} tokens of context; /help lists the commands")
        return chat.run(first_turns)
    finally:
        engine.close()


def _model_name(config: EngineConfig) -> str:
    path = config.gguf_path or config.model_path
    return "" if path is None else path.resolve().name


def _terminal(is_markdown: bool) -> tuple[View, ReadLine]:
    from ktransformers.cli.chat_input import prompt_lines
    from ktransformers.cli.terminal_view import MarkdownView, TerminalView

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that is not UTF-8 must not end a chat
            stream.reconfigure(errors="replace")
    in_fd = sys.stdin.fileno()
    if not is_markdown:
        return TerminalView(sys.stdout, in_fd), prompt_lines()
    from rich.console import Console

    return MarkdownView(Console(file=sys.stdout), in_fd), prompt_lines()


def _pipe() -> tuple[View, ReadLine]:
    from ktransformers.cli.chat_input import lines_of
    from ktransformers.cli.chat_output import PlainView

    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(
            stream, io.TextIOWrapper
        ):  # text is UTF-8 whatever the locale says; bad bytes must not end a chat
            stream.reconfigure(encoding="utf-8", errors="replace")
    return PlainView(sys.stdout, sys.stderr), lines_of(sys.stdin)


def main(argv: Sequence[str] | None = None) -> int:
    """The whole of local_chat.py. Returns the exit code."""
    from ktransformers.cli import guarded

    args = local_chat_parser().parse_args(argv)
    return guarded(lambda: run(args))
