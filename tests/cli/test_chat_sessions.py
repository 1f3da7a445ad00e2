"""/save and /load with the cache, on the bundled model: after a restart a turn computes only what is new."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ktransformers.cli.chat.commands import bound_command
from ktransformers.cli.chat.input import NoSource, UserTurn
from ktransformers.cli.chat.loop import ChatLoop, ChatOptions
from ktransformers.cli.chat.output import PlainView
from ktransformers.config import EngineConfig
from ktransformers.core import GenerationStats, SamplingParams
from ktransformers.engine.api.llm import LLM
from ktransformers.engine.load.builder import build_engine
from ktransformers.engine.sequence.session_file import open_session
from tests.support.models.demo import DEMO_GGUF

PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=60)
QUESTIONS = ("What is 17 + 25?", "And minus 3?", "Who are you?")


PAGE_SIZE = 16


@dataclass
class Chat:
    loop: ChatLoop
    out: io.StringIO
    err: io.StringIO

    def say(self, *turns: str) -> str:
        """What was answered to these."""
        before = len(self.out.getvalue())
        for turn in turns:
            self.loop.handle(UserTurn(turn))
        return self.out.getvalue()[before:]

    @property
    def last(self) -> GenerationStats:
        return self.loop._answers[-1]

    @property
    def notes(self) -> list[str]:
        return self.err.getvalue().splitlines()


NewChat = Callable[..., Chat]


@pytest.fixture
def new_chat() -> Iterator[NewChat]:
    """Chats with nothing in their caches; fields of EngineConfig."""
    with ExitStack() as models:

        def made(**config: Any) -> Chat:
            values = {"gguf_path": DEMO_GGUF, "cpu_infer": 1, "cache_lens": 1024} | config
            llm = models.enter_context(LLM.from_engine(build_engine(EngineConfig(**values))))
            out, err = io.StringIO(), io.StringIO()
            options = ChatOptions(PARAMS, "Be brief.", find_command=bound_command)
            return Chat(ChatLoop(llm, PlainView(out, err), NoSource(), options), out, err)

        yield made


def whole_pages(num_tokens: int) -> int:
    """How many of a conversation's tokens are in the cache: the last one of an answer is not computed."""
    return (num_tokens - 1) // PAGE_SIZE * PAGE_SIZE


def test_the_next_turn_computes_only_what_is_new(new_chat: NewChat, tmp_path: Path) -> None:
    path, whole = tmp_path / "chat.safetensors", new_chat()
    whole.say(*QUESTIONS[:2])
    count = whole.last.prompt_len + whole.last.completion_len
    kept = whole_pages(count)
    assert whole.loop.llm.used_len == kept
    whole.say(f"/save {path}")
    assert whole.notes[-1].startswith(f"saved 5 messages, {kept} of {count} tokens in the cache, ")
    assert whole.notes[-1].endswith(f"KiB, to {path}")
    assert re.fullmatch(rf"saving \d+\.\d\d KiB to {path} \.\.\.", whole.notes[-2])
    want, stats = whole.say(QUESTIONS[2]), whole.last

    again = new_chat()
    again.say("something else", f"/load {path}")
    assert again.notes[-1] == f"loaded 5 messages and {kept} tokens of the cache from {path}"
    assert again.say(QUESTIONS[2]) == want
    assert (again.last.prompt_len, again.last.cached_len) == (stats.prompt_len, stats.cached_len)
    assert again.last.cached_len == kept
    assert again.loop.conversation.messages == whole.loop.conversation.messages


def test_load_finds_out_what_a_file_is(new_chat: NewChat, tmp_path: Path) -> None:
    chat = new_chat()
    chat.say(QUESTIONS[0], f"/save {tmp_path / 'a.safetensors'}", f"/save {tmp_path / 'a.json'}")
    messages = chat.loop.conversation.messages
    assert json.loads((tmp_path / "a.json").read_text()) == messages
    (tmp_path / "a.safetensors").rename(tmp_path / "session")
    (tmp_path / "a.json").rename(tmp_path / "text")
    for name in ("session", "text"):
        chat.say("/clear", f"/load {tmp_path / name}")
        assert chat.loop.conversation.messages == messages, name
    assert open_session(tmp_path / "session").header.messages == messages


def test_what_cannot_be_loaded_changes_nothing(new_chat: NewChat, tmp_path: Path) -> None:
    path, whole = tmp_path / "s.safetensors", new_chat()
    want = [whole.say(question) for question in QUESTIONS[:2]]
    chat = new_chat()
    assert chat.say(QUESTIONS[0]) == want[0]
    messages, num_tokens = chat.loop.conversation.messages, chat.last.prompt_len + chat.last.completion_len
    used = chat.loop.llm.used_len
    chat.say(f"/save {path}", f"/save! {tmp_path / 'missing' / 's.safetensors'}")
    assert "cannot save the session to" in chat.notes[-1]
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    chat.say(f"/load {path}")
    assert (
        chat.notes[-1]
        == f"error: the session in {path} cannot be used: its checksum is wrong: it was damaged, or changed by hand"
    )
    chat.say(f"/load {tmp_path / 'none.safetensors'}")
    assert chat.notes[-1].endswith("No such file or directory")
    assert (chat.loop.conversation.messages, chat.loop.llm.used_len) == (messages, used)
    assert chat.say(QUESTIONS[1]) == want[1]
    assert chat.last.cached_len == whole_pages(num_tokens)


def test_a_session_without_a_conversation(new_chat: NewChat, tmp_path: Path) -> None:
    chat = new_chat()
    llm = chat.loop.llm
    llm.save_session(tmp_path / "s.safetensors", llm.generate([1, 2, 3], replace(PARAMS, max_tokens=2))[0])
    chat.say(f"/load {tmp_path / 's.safetensors'}")
    assert chat.notes[-1].endswith("holds 5 tokens and no conversation")
    assert chat.loop.conversation.turns == []


def test_another_process_goes_on(new_chat: NewChat, tmp_path: Path) -> None:
    path, whole = tmp_path / "chat.safetensors", new_chat()
    whole.say(*QUESTIONS[:2], f"/save {path}")
    want = whole.say(QUESTIONS[2])
    flags = ["--lines", "--cpu_infer", "1", "--temperature", "0.8", "--seed", "3", "--max_new_tokens", "60"]
    done = subprocess.run(
        [sys.executable, "-m", "ktransformers", "chat", str(DEMO_GGUF), *flags],
        input=f"/load {path}\n{QUESTIONS[2]}\n",
        capture_output=True,
        text=True,
        env=os.environ | {"XDG_STATE_HOME": str(tmp_path)},
        timeout=120,
        check=True,
    )
    assert done.stdout == want
    assert f"({whole.last.cached_len} of them reused)" in done.stderr


def test_experts_on_the_disk_say_the_same(new_chat: NewChat, tmp_path: Path) -> None:
    """A session saved by a model with all experts in RAM is one of the same model."""
    ram, disk = new_chat(), new_chat(experts_from="disk", experts_ram=1e-6)
    assert disk.say(*QUESTIONS[:2]) == ram.say(*QUESTIONS[:2])
    assert "experts on the disk: " in disk.loop.describe_stats()
    assert "experts on the disk" not in ram.loop.describe_stats()
    ram.say(f"/save {tmp_path / 'chat.safetensors'}")
    again = new_chat(experts_from="disk", experts_ram=1e-6)
    again.say(f"/load {tmp_path / 'chat.safetensors'}")
    assert again.say(QUESTIONS[2]) == ram.say(QUESTIONS[2])
    assert again.last.cached_len > 0
