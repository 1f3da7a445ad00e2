"""The whole command with what its engine shares with the server: pages below the cache, and stages."""

from __future__ import annotations

import functools
import io
import json
import re
import shutil
import sys
import threading
from pathlib import Path

import pytest

from ktransformers.cli import main
from ktransformers.engine.load.builder import Hardware
from ktransformers.engine.parallel.ranks.agent import StageAgent, read_secret
from ktransformers.engine.parallel.ranks.driver import Driver
from tests.support.engines.cut_models import HARDWARE
from tests.support.engines.fake_gpus import FakeGraphs, fake_hardware
from tests.support.models.demo import DEMO_CHECKPOINT, DEMO_GGUF
from tests.support.models.tiny_models import tiny_model, write_safetensors

QUESTIONS = ("What is 17 + 25?", "And minus 3?", "Who are you?")
FLAGS = ("--lines", "--cpu_infer", "1", "--temperature", "0", "--max_new_tokens", "60", "--no_use_cuda")


def chat(*lines: str, flags: tuple[str, ...] = (), model: Path = DEMO_GGUF) -> tuple[list[str], str]:
    """The answers, and what stands on standard error."""
    text = "".join(f"{line}\n" for line in lines).encode()
    streams = [io.TextIOWrapper(io.BytesIO(content), encoding="utf-8") for content in (text, b"", b"")]
    with pytest.MonkeyPatch.context() as patch:
        for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
            patch.setattr(sys, name, stream)
        code = main(["chat", str(model), *FLAGS, *flags])
        streams[1].flush()
        streams[2].flush()
    out, err = (stream.buffer.getvalue().decode() for stream in streams[1:])  # type: ignore[attr-defined]
    assert code == 0, err
    return out.splitlines(), err


@functools.cache
def alone() -> tuple[str, ...]:
    """Within a test: what the command does to the log is undone behind each."""
    answers, _ = chat(*QUESTIONS)
    assert "42" in answers[0]
    return tuple(answers)


@pytest.fixture
def wanted() -> list[str]:
    return list(alone())


def reused(err: str) -> list[int]:
    """Of each answer's prompt, the tokens that were not computed."""
    return [int(found) for found in re.findall(r"prompt eval: \d+ tokens(?: \((\d+) of them reused\))?", err) if found]


def test_stages_answer_as_one_process_does(wanted: list[str], tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    answers, err = chat(*QUESTIONS[:2], f"/save {path}", QUESTIONS[2], flags=("--pipeline", "2"))
    assert answers == wanted
    assert len(reused(err)) == 2


def test_stages_on_other_machines_answer_as_one_process_does(wanted: list[str], tmp_path: Path) -> None:
    """One after another: the agent starts a process for each driver, and ends it with the chat."""
    key = tmp_path / "stage.key"
    key.write_bytes(b"0123456789abcdef")
    key.chmod(0o600)
    agent = StageAgent("127.0.0.1", 0, read_secret(key))
    thread = threading.Thread(target=agent.serve)
    thread.start()
    try:
        for _ in range(2):
            flags = ("--stage_hosts", f"127.0.0.1:{agent.port}", "--stage_key_file", str(key))
            assert chat(*QUESTIONS, flags=flags)[0] == wanted
    finally:
        agent.close()
        thread.join()


def test_gpus_answer_as_one_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """GPUs that are made up, a process each, with a model of random weights and the bundled one's tokens."""
    vocab_size = json.loads((DEMO_CHECKPOINT / "config.json").read_text())["vocab_size"]
    write_safetensors(tiny_model("llama", seed=1, vocab_size=vocab_size), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO_CHECKPOINT / name, tmp_path)
    monkeypatch.setattr(Hardware, "detect", lambda config: fake_hardware(graphs=FakeGraphs()))
    monkeypatch.setattr("ktransformers.engine.load.builder.Driver", functools.partial(Driver, hardware=HARDWARE))
    flags = ("--use_cuda", "--max_new_tokens", "6", "--cache_lens", "128", "--no_self_check")
    one, two = (
        chat(*QUESTIONS[:2], model=tmp_path, flags=(*flags, *more))[0] for more in ((), ("--tensor_parallel", "2"))
    )
    assert one == two
    assert all(one)


def test_a_conversation_is_found_below_the_cache(wanted: list[str], tmp_path: Path) -> None:
    """Another one has used the cache of 256 tokens meanwhile; then all of the first goes into one file."""
    folder, path, small = tmp_path / "pages", tmp_path / "s.safetensors", ("--cache_lens", "256")
    tiers = (*small, "--cpu_memory_size_GB", "0.01", "--kv_disk_path", str(folder), "--kv_disk_size_GB", "1")
    folder.mkdir(mode=0o700)
    text = tmp_path / "text"
    other = ["/save! " + str(text), "/clear", "word " * 60, "/clear", f"/load {text}"]
    answers, err = chat(*QUESTIONS[:2], *other, QUESTIONS[2], f"/save {path}", flags=tiers)
    assert [answers[0], answers[1], answers[-1]] == wanted
    assert list(folder.glob("*.page"))
    in_file, tokens = map(int, re.findall(r"saved 6 messages, (\d+) of (\d+) tokens in the cache", err)[0])
    assert in_file == (tokens - 1) // 16 * 16
    # Another engine finds them in the folder, and in the session's file.
    for lines, flags in (((f"/load {text}", QUESTIONS[2]), tiers), ((f"/load {path}", "/regen"), small)):
        again, err = chat(*lines, flags=flags)
        assert again == wanted[2:]
        assert reused(err)[0] > 16


def test_tiers_that_contradict(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for flags, says in (
        (["--kv_disk_size_GB", "1"], "--kv_disk_size_GB bounds the files in --kv_disk_path; name that folder, too"),
        (["--pipeline", "2", "--cpu_memory_size_GB", "1"], "--pipeline keeps pages in the cache alone"),
        (["--cpu_memory_size_GB", "0.000001"], "--cpu_memory_size_GB: .* are too little for this model"),
    ):
        assert main(["chat", str(DEMO_GGUF), "--no_use_cuda", *flags, "-p", "x"]) == 2
        assert re.search(says, capsys.readouterr().err)
