"""`ktransformers chat`, and `python ktransformers/local_chat.py`, which takes the same flags.

With no model given it chats with the bundled one. When standard input or output is not a terminal, answers go to
standard output as plain text and everything else to standard error. A pipe is one prompt; with --lines, as in
local_chat.py, each of its lines is a turn.
"""

from __future__ import annotations

import argparse
import importlib
import io
import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, TextIO

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
    check_disk_size,
    engine_config,
    sampling_params,
    set_up_logging,
    with_default_model,
)
from ktransformers.cli.parsing.parser import user_path
from ktransformers.errors import ConfigError, UnsupportedError
from ktransformers.hub.locate import title_of
from ktransformers.system.user_folders import user_state_dir

if TYPE_CHECKING:
    from ktransformers.cli.chat.input import TurnSource, UserTurn
    from ktransformers.cli.chat.output import View
    from ktransformers.config import EngineConfig
    from ktransformers.engine.api.llm import LLM
    from ktransformers.engine.load.builder import Engine
    from ktransformers.profiling.capture import ProfileTarget

__all__ = ["add_parser", "local_chat_parser", "run"]

_log = logging.getLogger(__name__)

_DESCRIPTION = "Chat with a model in the terminal; without a model, with the small one that comes with the program."

BuildEngine = Callable[["EngineConfig", "Callable[[int, int, str], None] | None"], "Engine"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `chat` among the subcommands."""
    parser = subparsers.add_parser(
        "chat", aliases=["run"], help="chat with a model in the terminal", description=_DESCRIPTION
    )
    add_model_argument(parser)
    parser.add_argument("prompt_text", metavar="PROMPT", nargs="?", help="the same as -p PROMPT")
    _add_flags(parser, reads_lines=False)


def local_chat_parser() -> ArgumentParser:
    """Build the parser of local_chat.py: the flags of `chat` without a command in front; pipes are read by line."""
    parser = ArgumentParser(prog="local_chat.py", description=_DESCRIPTION)
    parser.set_defaults(model=None, prompt_text=None)
    _add_flags(parser, reads_lines=True)
    return parser


def _add_flags(parser: argparse.ArgumentParser, *, reads_lines: bool) -> None:
    add_model_flags(parser)
    add_sampling_flags(parser)
    group = parser.add_argument_group("chat")
    group.add_argument("-p", "--prompt", metavar="PROMPT", help="answer this prompt and exit; a pipe is added to it")
    group.add_argument("--system", metavar="TEXT", help="system prompt")
    group.add_argument("--prompt_file", type=user_path, help="a file whose text is the first prompt")
    text = "a pipe has one turn a line, commands among them" + ("" if reads_lines else "; default: it is one prompt")
    add_toggle(group, "lines", default=None, help=text)
    add_toggle(group, "prefix_cache", default=None, help="compute of a prompt only what is new in it (on)")
    add_tier_flags(group)
    add_disk_size_flag(group)
    add_toggle(group, "history", default=None, help="keep prompts for the Up key of later chats (on)")
    add_toggle(group, "force_think", default=False, help="begin every answer with the model's thinking tag")
    add_toggle(
        group, "special_tokens_in_content", default=False, help="read special tokens that prompts spell as such (off)"
    )
    add_overflow_flag(group, default="drop")
    modes = ("normal", "long_context")
    group.add_argument("--mode", choices=modes, default="normal", help="long_context is not supported")
    group.add_argument("--markdown", action="store_true", help="format answers: blocks appear when they are complete")
    add_template_flags(group)
    add_profile_flags(group)
    add_logging_flag(group)
    parser.set_defaults(run=run, reads_lines=reads_lines, log_level="warning")


def _check_flags(args: argparse.Namespace) -> None:
    if args.mode == "long_context":
        raise UnsupportedError(
            "--mode long_context is not supported; use --mode normal and a --cache_lens as long as the context you need"
        )
    if args.prompt is not None and args.prompt_text is not None:
        raise ConfigError("there are two prompts: PROMPT and --prompt; leave one out")
    check_disk_size(args)
    prompt = _prompt(args)
    if prompt is not None and not prompt.strip():
        raise ConfigError("--prompt is empty; it must be the text of a prompt")
    if prompt is not None and args.lines:
        raise ConfigError("--prompt adds the whole pipe to one prompt; leave --lines or --prompt out")


def _prompt(args: argparse.Namespace) -> str | None:
    given: str | None = args.prompt if args.prompt is not None else args.prompt_text
    return given


def run(args: argparse.Namespace, build: BuildEngine | None = None) -> int:
    """Load the model and chat. Returns the exit code. `build` replaces the loading of a real model, for tests."""
    set_up_logging(args.log_level)
    _check_flags(args)
    config = with_default_model(engine_config(args)).resolved()  # before the slow imports: a wrong path shows at once
    target = _profile_target(args)
    from ktransformers.cli.chat.terminal_keys import muted_keys

    first_turns: list[UserTurn] = []
    in_fd = sys.stdin.fileno() if _is_interactive(args) else -1
    with muted_keys(in_fd) if in_fd >= 0 else nullcontext():  # what is typed meanwhile is for the first prompt
        llm = _load(args, config, build, first_turns, target)
    from ktransformers.cli.chat.commands import bound_command
    from ktransformers.cli.chat.greeting import describe_machine, describe_model
    from ktransformers.cli.chat.loop import ChatLoop, ChatOptions

    with llm:
        params = sampling_params(args, llm.default_params)
        is_interactive = _is_interactive(args)
        if is_interactive:
            view, source = _terminal_view(args.markdown), _terminal_source(args)
        else:
            view, source = _script(args, first_turns)
        options = ChatOptions(
            params,
            args.system,
            args.force_think,
            is_interactive,
            bound_command,
            reads_special_tokens=args.special_tokens_in_content,
            drops_oldest=args.context_overflow == "drop",
        )
        chat = ChatLoop(llm, view, source, options)
        machine, model = describe_machine(config.use_cuda), describe_model(llm.engine)
        _log.info("%s; %s", machine, model)
        if is_interactive:
            view.note(f"{machine}\n{model}\n/help lists the commands, Ctrl-D leaves")
        return chat.run(first_turns)


def _load(
    args: argparse.Namespace,
    config: EngineConfig,
    build: BuildEngine | None,
    first_turns: list[UserTurn],
    target: ProfileTarget | None,
) -> LLM:
    """The model, with something to see meanwhile. Adds --prompt_file to the first turns, and checks flags, before."""
    from ktransformers.cli.loading import early_line, loading_bar

    name = _model_name(config)
    with early_line(sys.stderr, f"loading {name} ..."):  # what takes seconds to import, before anything else
        importlib.import_module("ktransformers.engine.api.llm" if build else "ktransformers.engine.load.builder")
    from ktransformers.cli.chat.input import UserTurn, read_prompt_file
    from ktransformers.engine.api.llm import default_sampling_params

    if args.prompt_file is not None:
        first_turns.append(UserTurn(read_prompt_file(args.prompt_file), is_literal=True, has_attachments=False))
    # What can be wrong with the flags shows before the model loads, not minutes later.
    sampling_params(args, default_sampling_params({}, args.max_new_tokens))
    if build is None:
        from ktransformers.engine.load.builder import build_engine

        _refuse_without_tokenizer(config)
        build = build_engine
    from ktransformers.engine.api.llm import LLM, open_with_pictures

    with loading_bar(sys.stderr, name) as progress:
        remedy = "start with a larger --cache_lens"
        loop, pictures = open_with_pictures(config, build, progress, target, "local_chat", remedy)
    return LLM.from_loop(loop, pictures)


def _is_interactive(args: argparse.Namespace) -> bool:
    """Whether a person sits at both ends."""
    return _is_terminal(sys.stdin) and _is_terminal(sys.stdout) and _prompt(args) is None


def _profile_target(args: argparse.Namespace) -> ProfileTarget | None:
    """--profile. Raises ConfigError for a folder in which no profile can begin."""
    from ktransformers.profiling.capture import ProfileLimits, ProfileTarget

    limits = ProfileLimits(args.profile_max_bytes)
    return None if args.profile is None else ProfileTarget(args.profile, limits)


def _refuse_without_tokenizer(config: EngineConfig) -> None:
    """Raises for a folder that holds no tokenizer, before its weights load; for what else is wrong with it first."""
    from ktransformers.engine.load.builder import plan_model
    from ktransformers.engine.model.checks import check_tokenizer
    from ktransformers.engine.model.opened import describe_model, folder_without_tokenizer, open_model

    if folder_without_tokenizer(config) is not None:
        opened = open_model(config)
        plan_model(config, opened)
        describe_model(opened)
        check_tokenizer(config)


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def _model_name(config: EngineConfig) -> str:
    path = config.gguf_path or config.model_path
    return "" if path is None else title_of(path)


def _terminal_view(is_markdown: bool) -> View:
    from ktransformers.cli.chat.terminal_view import MarkdownView, TerminalView

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that is not UTF-8 must not end a chat
            stream.reconfigure(errors="replace")
    in_fd = sys.stdin.fileno() if _is_terminal(sys.stdin) else -1
    if not is_markdown:
        return TerminalView(sys.stdout, in_fd)
    from rich.console import Console

    return MarkdownView(Console(file=sys.stdout), in_fd)


def _terminal_source(args: argparse.Namespace) -> TurnSource:
    from prompt_toolkit.history import InMemoryHistory

    from ktransformers.cli.chat.prompt_history import open_history
    from ktransformers.cli.chat.terminal import TerminalSource

    keeps = args.history is not False
    return TerminalSource(open_history(user_state_dir() / "prompts") if keeps else InMemoryHistory())


def _script(args: argparse.Namespace, first_turns: list[UserTurn]) -> tuple[View, TurnSource]:
    """How a chat without a person at both ends reads and writes. Adds --prompt to the first turns."""
    from ktransformers.cli.chat.input import DocumentSource, LineSource, NoSource, UserTurn, read_document
    from ktransformers.cli.chat.output import PlainView

    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # text is UTF-8 whatever the locale says; bad bytes must not end a chat
            stream.reconfigure(encoding="utf-8", errors="replace")
    prompt = _prompt(args)
    if prompt is not None:
        is_piped = sys.stdin is not None and not sys.stdin.isatty()
        document = read_document(sys.stdin) if is_piped else ""
        view = _terminal_view(args.markdown) if _is_terminal(sys.stdout) else PlainView(sys.stdout, sys.stderr)
        first_turns.append(UserTurn(prompt, is_literal=True, document=document))
        return view, NoSource()
    plain = PlainView(sys.stdout, sys.stderr)
    if sys.stdin is None:
        return plain, NoSource()
    # Somebody who types is answered line by line, also when the answers go to a file.
    if sys.stdin.isatty() or (args.reads_lines if args.lines is None else args.lines):
        return plain, LineSource(sys.stdin)
    return plain, DocumentSource(sys.stdin, is_needed=not first_turns)
