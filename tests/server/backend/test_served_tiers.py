"""Pages of balance_serve that outlive it: real processes that are killed, and conversations that go on."""

from __future__ import annotations

import json
import logging
import os
import signal
from pathlib import Path

import httpx
import pytest

from ktransformers.cli.parsing.options import engine_config
from ktransformers.cli.serve.command import server_parser
from ktransformers.cli.serve.serving import check_flags
from ktransformers.core import SamplingParams
from ktransformers.engine.api.llm import LLM
from tests.server.backend.test_balance_serve import FLAGS, child_pids, metrics, wait_until
from tests.support.servers.server_process import ServerProcess

TURNS = [f"Tell me more about number {i}. " * 12 for i in range(4)]


class Chat:
    """A conversation, which outlives the services that answer it."""

    def __init__(self) -> None:
        self.messages: list[dict[str, str]] = []

    def ask(self, process: ServerProcess, question: str) -> tuple[str, int, int]:
        """The answer, how long the prompt was, and how much of it was not computed."""
        self.messages.append({"role": "user", "content": question})
        body = {"messages": self.messages, "max_tokens": 24, "temperature": 0.8, "seed": 3}
        found = httpx.post(f"{process.url}/v1/chat/completions", json=body, timeout=60).json()
        answer = found["choices"][0]["message"]["content"]
        self.messages.append({"role": "assistant", "content": answer})
        usage = found["usage"]
        return answer, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.exhaustive
def test_a_conversation_goes_on_after_kill_9(llm: LLM, tmp_path: Path) -> None:
    flags = (*FLAGS, "--cache_lens", "4096", "--page_size", "16", "--kv_disk_path", str(tmp_path / "pages"))
    expected = list[str]()
    for question in TURNS:
        said = [text for pair in zip(TURNS, expected, strict=False) for text in pair]
        roles = ("user", "assistant") * len(TURNS)
        messages = [{"role": role, "content": text} for role, text in zip(roles, [*said, question], strict=False)]
        (output,) = llm.chat(messages, SamplingParams(temperature=0.8, seed=3, max_tokens=24))
        expected.append(output.text)
    chat = Chat()
    with ServerProcess(*flags, "--cpu_memory_size_GB", "0.1") as process:
        answers = [chat.ask(process, TURNS[0])]
        (engine,) = child_pids(process, "kt-engine")
        os.kill(engine, signal.SIGKILL)
        answers.append(chat.ask(process, TURNS[1]))
        assert answers[1][2] > answers[0][1] - 16  # the first turn came from the files
        figures = metrics(process)
        assert figures["ktransformers:engine_restarts_total"] == 1
        assert figures["ktransformers:kv_tier_disk_hits_total"] == answers[1][2]
        assert figures["ktransformers:kv_tier_read_errors_total"] == 0
        assert figures["ktransformers:kv_host_max_bytes"] > 50 << 20
        answers.append(chat.ask(process, TURNS[2]))
        full = (answers[2][1] + 20) // 16 - 1  # the pages of the last prompt, and most of its answer
        wait_until(lambda: len(list((tmp_path / "pages").glob("*.page"))) >= full)
        process.process.kill()
        process.process.wait()
    with ServerProcess(*flags) as process:
        answers.append(chat.ask(process, TURNS[3]))
        assert answers[3][2] >= answers[2][1] - 16
    assert [answer for answer, _, _ in answers] == expected
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "pages").iterdir()} == {0o600}
    assert (tmp_path / "pages").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("flags", [("--cpu_memory_size_GB", "0.5"), ("--kv_disk_path", "nowhere")])
def test_plan_counts_the_memory(flags: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    from ktransformers.cli import main

    sizes = []
    for each in ((), flags):
        assert main(["plan", FLAGS[3], "--json", *each]) == 0
        sizes.append(sum(json.loads(capsys.readouterr().out)["extra_bytes"].get("kv tiers", {}).values()))
    assert sizes == [0, (512 if flags[0] == "--cpu_memory_size_GB" else 256) << 20]
    assert not Path("nowhere").exists()


def test_backends_of_one_sequence_say_that_the_flags_are_for_others(caplog: pytest.LogCaptureFixture) -> None:
    flags = ["--backend_type", "ktransformers", "--cpu_memory_size_GB", "1", "--kv_disk_path", "nowhere"]
    args = server_parser().parse_args(flags)
    with caplog.at_level(logging.WARNING):
        check_flags(args)
    assert "--cpu_memory_size_GB has no effect: the ktransformers backend" in caplog.text
    assert "--kv_disk_path has no effect: the ktransformers backend" in caplog.text
    config = engine_config(args)
    assert (config.cpu_memory_size_GB, config.kv_disk_path) == (0.0, None)
