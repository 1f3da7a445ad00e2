"""Pages of backends that outlive them: real processes that are killed, and conversations that go on."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from ktransformers.cli.parsing.options import engine_config
from ktransformers.cli.serve.command import server_parser
from ktransformers.cli.serve.serving import backend_maker, check_flags
from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.api.llm import LLM
from ktransformers.errors import ConfigError
from ktransformers.server.backend.base import GenerationRequest
from ktransformers.server.backend.interfaces.ktransformers import KTransformersInterface
from tests.server.backend.test_balance_serve import FLAGS, child_pids, metrics, wait_until
from tests.support.models.demo import DEMO_GGUF
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


@pytest.mark.parametrize("backend", ["ktransformers", "transformers"])
def test_flags_that_have_an_effect_with_a_backend(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    flags = ["--cpu_memory_size_GB", "1", "--kv_disk_path", "nowhere", "--kv_disk_size_GB", "2", "--no_prefix_cache"]
    args = server_parser().parse_args(["--backend_type", backend, *flags, "--page_size", "32"])
    with caplog.at_level(logging.WARNING):
        check_flags(args)
    assert f"--page_size has no effect: the {backend} backend computes one request at a time" in caplog.text
    assert "prefix_cache" not in caplog.text
    config = engine_config(args)
    assert not config.prefix_cache
    if backend == "ktransformers":
        assert caplog.text.count("has no effect") == 1
        assert (config.cpu_memory_size_GB, config.kv_disk_path, config.kv_disk_size_GB) == (1.0, Path("nowhere"), 2.0)
    else:
        for flag in ("cpu_memory_size_GB", "kv_disk_path", "kv_disk_size_GB"):
            assert f"--{flag} has no effect: the transformers backend keeps no pages below its cache" in caplog.text
        assert (config.cpu_memory_size_GB, config.kv_disk_path) == (0.0, None)


def test_a_quota_without_a_folder_is_refused_where_there_are_tiers() -> None:
    for backend in ("balance_serve", "ktransformers"):
        with pytest.raises(ConfigError, match="name that folder, too"):
            check_flags(server_parser().parse_args(["--backend_type", backend, "--kv_disk_size_GB", "2"]))


@pytest.mark.parametrize("backend", ["balance_serve", "ktransformers"])
def test_a_folder_that_cannot_be_used_is_an_error_before_anything_is_loaded(backend: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    args = server_parser().parse_args(["--backend_type", backend, "--kv_disk_path", str(tmp_path / "file")])
    with pytest.raises(ConfigError, match="file"):
        backend_maker(args, engine_config(args))


def test_pages_of_one_sequence_at_a_time_outlive_its_backend(tmp_path: Path) -> None:
    """Two prompts that throw each other out of the cache come back from host memory, and from files in the next one."""
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12)
    config = EngineConfig(gguf_path=DEMO_GGUF, cpu_infer=1, cache_lens=128, self_check=False)
    config = replace(config, cpu_memory_size_GB=0.05, kv_disk_path=tmp_path / "pages")
    prompts = [tuple(range(first, first + 100)) for first in (5, 105)]

    async def answers(config: EngineConfig, order: list[int]) -> tuple[list[list[int | None]], list[int]]:
        backend = KTransformersInterface(config)
        await backend.start()
        try:
            found, cached_lens = list[list[int | None]](), list[int]()
            for number, which in enumerate(order):
                asked = GenerationRequest(request_id=f"r{number}", prompt_ids=prompts[which], params=params)
                events = [event async for event in backend.inference(asked)]
                found.append([event.token_id for event in events])
                cached_lens.append(events[-1].stats.cached_len)
            return found, cached_lens
        finally:
            await backend.close()

    first, cached_lens = asyncio.run(answers(config, [0, 1, 0]))
    assert cached_lens == [0, 0, 96]
    assert first[2] == first[0]
    assert len(list((tmp_path / "pages").glob("*.page"))) >= 12
    second, cached_lens = asyncio.run(answers(replace(config, cpu_memory_size_GB=0.0), [1, 0]))
    assert cached_lens == [96, 96]
    assert second == [first[1], first[0]]
    plain, cached_lens = asyncio.run(answers(replace(config, kv_disk_path=None, prefix_cache=False), [0, 1, 0]))
    assert (plain, cached_lens) == (first, [0, 0, 0])
