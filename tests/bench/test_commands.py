"""Every `bench` command on the smallest work that it takes, in this process; servers are a fake one."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ktransformers.bench.common.report import Column, FigureTable
from ktransformers.bench.loading.files import FileFormat, FileShape, write_files
from ktransformers.bench.servers import serving
from ktransformers.bench.servers.client import RequestError
from ktransformers.bench.servers.process import ServerProcess
from ktransformers.cli import main
from ktransformers.cli.bench.moved import MOVED
from ktransformers.errors import EngineError
from ktransformers.kernels.cpu import limits
from tests.support.servers.fake_speed_server import FakeServerProcess, http_server

ROOT = Path(__file__).resolve().parents[2]
TINY_FILE = FileShape(layers=1, hidden=256, experts=8, width=256, heads=2, vocab=512, kv_heads=1)


@pytest.fixture(autouse=True)
def quick_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for what the machine can do at best."""
    read, peak = limits.read_bandwidth, limits.int8_peak
    monkeypatch.setattr(limits, "read_bandwidth", partial(read, nbytes=1 << 20, repeats=1))
    monkeypatch.setattr(limits, "int8_peak", partial(peak, repeats=1))


def bench(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> tuple[str, dict[str, Any]]:
    """Text and record of one run."""
    assert main(["bench", *args]) == code
    text, _, last = capsys.readouterr().out.rstrip("\n").rpartition("\n")
    record: dict[str, Any] = json.loads(last)
    assert record["bench"] == args[0]
    assert record["machine"]["cpu"]
    return text, record


def test_a_table_shows_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    table = FigureTable([Column("a", 5, ".1f", "first"), Column("b", 4), Column("c", 3, ".0%")])
    table.add({"a": 1.25, "b": None, "hidden": [1]}, c=0.5)
    table.add({"a": 10, "b": "x"})
    assert capsys.readouterr().out == "first    b   c\n  1.2    - 50%\n 10.0    x   -\n"
    assert table.rows == [{"a": 1.25, "b": None, "hidden": [1]}, {"a": 10, "b": "x"}]


def test_operations(capsys: pytest.CaptureFixture[str]) -> None:
    _, record = bench(capsys, "operations", "--seconds", "0", "--size", "256")
    kinds = {row["op"].split()[0] for row in record["rows"]}
    assert kinds == {"linear", "attention", "delta_scan", "rms_norm"}
    assert all(row["speedup"] == pytest.approx(row["torch_us"] / row["us"]) for row in record["rows"])
    rates = {row["op"]: row["gflop_s"] * row["us"] * 1e3 for row in record["rows"] if row["gflop_s"] is not None}
    assert {name.split()[0] for name in rates} == {"attention"}
    # Two products of 128 dimensions for each of 32 heads and 64 * 65 / 2 pairs of positions.
    assert rates["attention gqa T=64 ctx=64"] == pytest.approx(4 * 128 * 32 * 64 * 65 / 2)
    assert rates["attention gqa_bf16 T=64 ctx=64"] == pytest.approx(4 * 128 * 32 * 64 * 65 / 2)
    _, record = bench(capsys, "operations", "--seconds", "0", "--size", "256", "--only", "rms_norm", "--threads", "2")
    assert [row["op"] for row in record["rows"]] == ["rms_norm T=1", "rms_norm T=256"]
    assert record["machine"]["threads"] == 2


@pytest.mark.every(3)
@pytest.mark.parametrize(("kind", "cache"), [("gguf", "both"), ("bf16", "warm"), ("fp8", "warm")])
def test_load(kind: FileFormat, cache: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_files(tmp_path, TINY_FILE, kind)
    text, record = bench(capsys, "load", str(path), "--threads", "1", "--runs", "1", "--cache", cache)
    files = [path] if path.is_file() else path.glob("*.safetensors")
    assert record["file_gb"] == sum(file.stat().st_size for file in files) / 1e9
    states = ["warm", "cold"] if cache == "both" else [cache]
    assert [(run["cache"], run["run"]) for run in record["runs"]] == [(state, 1) for state in states]
    for run in record["runs"]:
        phases = run["phases"]
        assert run["seconds"] == pytest.approx(sum(phases.values()))
        assert min(phases["read"], phases["pack"]) > 0
        assert phases["upload"] == phases["transcode"] == 0
        assert run["peak_gb"] >= run["stays_gb"]
    assert set(record["limits_gb_per_s"]) - {"disk"} == {"cache", "fresh", "copy"}
    assert ("disk" in record["limits_gb_per_s"]) == ("cold" in states)
    assert path.name in text


def test_serving(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with http_server() as (client, bodies):
        server = FakeServerProcess(client)
        monkeypatch.setattr(serving, "ServerProcess", server.started)
        args = ["--concurrency", "1,3", "--prompt_len", "5", "--max_tokens", "6", "--rounds", "2", "--threads", "1"]
        _, record = bench(capsys, "serving", *args)
    assert server.is_closed
    assert server.flags[1:] == SERVER_FLAGS
    assert [(run["concurrency"], run["tokens"]) for run in record["runs"]] == [(1, 12), (3, 36)]
    assert [body["max_tokens"] for body in bodies] == [8] + 8 * [6]
    assert {len(body["prompt"]) for body in bodies} == {5}
    bytes_per_step = record["weights"]["dense"] + 4 * record["weights"]["expert_layers"] * record["weights"]["expert"]
    rate = record["machine"]["read_bandwidth_gb_s"] * 1e9
    assert record["runs"][1]["bound_tokens_per_s"] == pytest.approx(3 * rate / bytes_per_step)


SERVER_FLAGS = ["--backend_type", "balance_serve", "--cpu_infer", "1", "--max_batch_size", "3"]
SERVER_FLAGS += ["--cache_lens", str(3 * (5 + 6 + 128))]


def test_speed(capsys: pytest.CaptureFixture[str]) -> None:
    with http_server() as (client, bodies):
        url = f"http://{client.host}/v1"
        args = ["--url", url, "--concurrent", "2", "--prompt_lens", "9", "20", "--max_tokens", "5", "--seed", "1"]
        text, record = bench(capsys, "speed", *args)
        assert [(run["prompt_len"], run["prompt_tokens"]) for run in record["runs"]] == [(9, 18), (20, 40)]
        assert len({body["messages"][1]["content"] for body in bodies}) == 4
        assert all(body["return_speed"] and body["model"] == "demo" for body in bodies)
        run = record["runs"][0]
        assert (run["prefill_tokens_per_s_mean"], run["decode_tokens_per_s_mean"]) == (9 / 0.5, 4 / 2.0)
        assert "demo behind {'version': '1'}" in text
        _, record = bench(capsys, "speed", "--url", url, "--conversation", "--max_tokens", "2", "--model", "other")
        assert bodies[-1]["model"] == "other"
        assert len(bodies[-1]["messages"]) == 2 * 8 - 1
        assert record["runs"][0]["requests"] == 8
        assert main(["bench", "speed", "--url", url, "--prompt_lens", "4"]) == 1
        assert "the chat template alone takes 4" in capsys.readouterr().err


def test_requests_that_fail_are_said_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    with http_server(failing=True) as (client, _):
        text, record = bench(capsys, "speed", "--url", client.host, "--prompt_lens", "9", code=1)
    assert "failed: POST /v1/chat/completions: 500 no more memory" in text
    assert record["runs"][0]["failed"] == 1
    assert main(["bench", "speed", "--url", client.host]) == 1
    assert "GET /v1/models: ConnectionRefusedError" in capsys.readouterr().err


def test_prompts_of_the_speed_script_differ_per_run(capsys: pytest.CaptureFixture[str]) -> None:
    """A server that keeps what it computed would else find the prompts of the run before."""
    with http_server() as (client, _):
        runs = [bench(capsys, "speed", "--url", client.host, "--prompt_lens", "9")[1]["seed"] for _ in range(3)]
    assert len(set(runs)) == 3


def test_a_stream_that_breaks_off_is_an_error() -> None:
    with http_server() as (client, _):
        events = client.events("/v1/completions", {"max_tokens": 3})
        assert len(list(events)) == 3
        with pytest.raises(RequestError, match="without"):
            list(client.events("/tokenize", {"messages": []}))


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(EngineError, match=r"(?s)did not start:.*no_such_flag"):
        ServerProcess(["--no_such_flag"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["operations", "--only", "linear,sine"], "--only sine is not one of linear, attention, delta_scan, rms_norm"),
        (["operations", "--size", "300"], "--size must be a multiple of 256"),
        (["load", "--runs", "0"], "--runs must be at least 1"),
        (["load", "/no/such/model"], "/no/such/model"),
        (["serving", "--concurrency", "0"], "--concurrency must be positive numbers"),
        (["serving", "--max_tokens", "0"], "--max_tokens must be at least 1"),
        (["speed", "--concurrent", "0"], "--concurrent must be at least 1"),
        (["speed", "--prompt_lens", "8", "0"], "--prompt_lens must be at least 1"),
    ],
)
def test_wrong_arguments_are_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *args]) == 2
    assert message in capsys.readouterr().err


def test_a_command_that_moved_says_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Each is a module of benchmarks that can be run; the line has nothing else."""
    assert len(MOVED) == 13
    for name, line in MOVED.items():
        with pytest.raises(SystemExit, match="2"):
            main(["bench", name, "--threads", "3"])
        out, err = capsys.readouterr()
        assert (out, err) == ("", f"error: {line} (see ktransformers bench --help)\n")
        path = ROOT / re.search(r"-m (benchmarks\.\S+)`", line)[1].replace(".", "/")  # type: ignore[index]
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


def test_a_peer_of_offline_moved(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "offline", "--peer", "llama.cpp"]) == 2
    assert "`python -m benchmarks.offline` in a clone" in capsys.readouterr().err
