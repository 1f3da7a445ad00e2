"""A chat on a model without weights, a process for tests: `python -m tests.support.servers.fake_chat [flags]`.

The model answers every prompt with what stands in REPLIES for its last user turn, or repeats that turn.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ktransformers.cli import build_parser, guarded
from ktransformers.cli.chat.command import local_chat_parser, run
from tests.support.engines.fake_runner import scripted_engine

ENDLESS = "endless"

Chat = Callable[..., tuple[str, str]]
"""The fixture `chat`: what standard input has and the flags, then `code`; standard output and error."""


def reply(prompt: str) -> str:
    turns = re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", prompt, re.DOTALL)
    if turns[-1] == ENDLESS:
        return "on and on " * 1000
    if turns[-1] == "long":
        return "word " * 150 + "the end"
    if prompt.rstrip().endswith("<think>"):
        return "it is easy</think>\n\n" + turns[-1]
    if turns[-1] == "think":
        return "<think>\nlet me see\n</think>\n\nthought"
    if turns[-1] == "count":
        return f"{len(turns)} turns"
    if turns[-1] == "system":
        return "".join(re.findall(r"<\|im_start\|>system\n(.*?)<\|im_end\|>", prompt, re.DOTALL)) or "none"
    return f"you said {turns[-1]}"


def main(argv: list[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    # with a command in front: `ktransformers chat`
    args = (
        build_parser().parse_args(given) if given[:1] in (["chat"], ["run"]) else local_chat_parser().parse_args(given)
    )
    args.gguf_path = Path(__file__)  # any path: nothing is loaded

    def build(config: Any, progress: Any) -> Any:
        return scripted_engine(reply, config.cache_lens or 4096, max_new_tokens=config.max_new_tokens)

    return guarded(lambda: run(args, build))


if __name__ == "__main__":
    sys.exit(main())
