"""llama.cpp's server as a peer: its command line, and a program in its place that loads, answers, or fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ktransformers.bench.agents.llama_server import (
    LlamaServer,
    LlamaServerWork,
    find_llama_server,
    llama_server_flags,
)
from ktransformers.errors import ConfigError, EngineError

WORK = LlamaServerWork("llama-server", Path("/m/model.gguf"), slots=8, context=69632)


def test_flags() -> None:
    plain = ["-m", "/m/model.gguf", "-np", "8", "-c", "69632"]
    assert llama_server_flags(WORK) == plain
    work = replace(WORK, threads=15, n_cpu_moe=20, more=["-ub", "2048"])
    assert llama_server_flags(work) == [*plain, "-t", "15", "-ngl", "999", "--n-cpu-moe", "20", "-ub", "2048"]
    assert llama_server_flags(replace(WORK, n_cpu_moe=0))[-4:] == ["-ngl", "999", "--n-cpu-moe", "0"]


def test_a_server_is_asked_once_it_has_loaded(program: Path) -> None:
    server = LlamaServer(replace(WORK, program=str(program)))
    try:
        assert server.client.json("GET", "/v1/models") == {"data": [{"id": "demo"}]}
    finally:
        server.close()
    words = Path(f"{program}.words").read_text().splitlines()
    assert words[:3] == ["--host", "127.0.0.1", "--port"]
    assert words[4:] == llama_server_flags(WORK)


def test_a_server_that_does_not_start_says_why(program: Path) -> None:
    with pytest.raises(EngineError, match="llama-server did not start:\nerror: unable to load model"):
        LlamaServer(replace(WORK, program=str(program), more=["--fail"]))


def test_where_the_program_is(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_llama_server(program) == str(program)
    monkeypatch.setenv("PATH", str(program.parent))
    assert find_llama_server(None) == str(program)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"no llama-server on the PATH; build llama\.cpp"):
        find_llama_server(None)
    program.chmod(0o644)
    with pytest.raises(ConfigError, match="is no program"):
        find_llama_server(program)
