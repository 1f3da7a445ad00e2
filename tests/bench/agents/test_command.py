"""`ktransformers bench agents`: its flags, its record, servers that run or are started; once with our real server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ktransformers.bench.agents import bench, host
from ktransformers.bench.common.machine import describe_machine
from ktransformers.bench.servers.client import Client
from ktransformers.cli import main
from ktransformers.config import EngineConfig, bundled_model
from tests.bench.agents.fake_server import AgentsHandler
from tests.support.servers.fake_speed_server import http_server

DEMO = bundled_model("it comes with the package")
TINY = ["--shape", "agents=2,shared=6,own=4,answer=3,turns=2,growth=2", "--seed", "1"]


def fields(kinds: str | list[str], *names: str) -> dict[str, Any]:
    """Fields of these JSON types."""
    return {name: {"type": kinds} for name in names}


ROW = {
    **fields("string", "server", "wave", "group"),
    **fields("integer", "turn", "requests", "errors", "prompt_tokens", "output_tokens"),
    **fields("number", "seconds"),
    **fields(["integer", "null"], "cached_tokens"),
    **fields(["number", "null"], "first_median_s", "first_max_s", "gap_median_ms", "gap_p99_ms", "gap_max_ms"),
    **fields(["number", "null"], "prompt_tokens_per_s", "output_tokens_per_s"),
}
GROUP = {
    **fields("string", "name"),
    **fields("integer", "agents", "shared", "own", "answer", "turns", "growth", "after_tokens"),
    **fields("number", "after_seconds"),
}
SERVER = {
    **fields("string", "name"),
    "flags": {"type": "array", "items": {"type": "string"}},
    **fields(["string", "null"], "model", "error"),
}


def closed(properties: dict[str, Any]) -> dict[str, Any]:
    """All of these and no others."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def listed(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


SCHEMA = closed(
    {
        "bench": {"const": "agents"},
        "machine": {"type": "object", "required": ["cpu", "cores"]},
        "servers": listed(closed(SERVER)),
        "seed": {"type": "integer"},
        "vocab": {"type": ["integer", "null"]},
        "prompts": {"enum": ["ids", "text"]},
        "scale": {"type": "number"},
        "waves": listed(closed({"name": {"type": "string"}, "groups": listed(closed(GROUP))})),
        "rows": listed(closed(ROW)),
        "errors": {"type": "integer"},
        "is_failed": {"type": "boolean"},
    }
)


@pytest.fixture
def quick_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the child process that describes the machine."""
    monkeypatch.setattr(bench, "describe_host", lambda: {"cpu": "a CPU", "cores": 3, "gpus": [{"name": "G"}] * 2})


def run(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> tuple[str, dict[str, Any]]:
    """Text and record of one run; the record is checked."""
    assert main(["bench", "agents", *args]) == code
    text, _, last = capsys.readouterr().out.rstrip("\n").rpartition("\n")
    record: dict[str, Any] = json.loads(last)
    jsonschema.validate(record, SCHEMA)
    return text, record


@pytest.mark.usefixtures("quick_host")
def test_servers_that_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = tmp_path / "agents.jsonl"
    output.write_text("{}\n")
    with http_server(handler=AgentsHandler) as (one, bodies), http_server(handler=AgentsHandler) as (two, others):
        urls = [f"http://{client.host}" for client in (one, two)]
        text, record = run(capsys, "--url", urls[0], "--url", f"{urls[1]}/v1", *TINY, "--output", str(output))
    assert "a CPU, 3 cores, 2 x G" in text
    assert record["servers"][1] == {"name": f"{urls[1]}/v1", "flags": [], "model": "demo", "error": None}
    assert [(row["wave"], row["turn"], row["requests"]) for row in record["rows"]] == [
        ("warm_up", 1, 1),
        ("shape1", 1, 2),
        ("shape1", 2, 2),
    ] * 2
    assert [row["prompt_tokens"] for row in record["rows"][:3]] == [300, 20, 24]
    assert sorted(map(json.dumps, bodies)) == sorted(map(json.dumps, others))  # the same prompts for both
    assert (record["vocab"], record["seed"], record["errors"], record["is_failed"]) == (32_000, 1, 0, False)
    assert max(max(body["prompt"]) for body in bodies) < 32_000
    assert [json.loads(line) for line in output.read_text().splitlines()] == [{}, record]
    assert text.count("shape1 2.") == 2


@pytest.mark.usefixtures("quick_host")
def test_text_and_names(capsys: pytest.CaptureFixture[str]) -> None:
    with http_server(handler=AgentsHandler) as (client, bodies):
        args = ["--url", client.host, *TINY, "--text", "--model_name", "mine"]
        _, record = run(capsys, *args)
    assert all(isinstance(body["prompt"], str) and body["model"] == "mine" for body in bodies)
    assert (record["prompts"], record["vocab"]) == ("text", None)


@pytest.mark.usefixtures("quick_host")
def test_errors_are_shown_and_fail_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    class Refusing(AgentsHandler):
        refused_len = 10

    with http_server(handler=Refusing) as (client, _):
        text, record = run(capsys, "--url", client.host, *TINY, code=1)
    assert [row["errors"] for row in record["rows"]] == [0, 2, 0]
    assert (record["errors"], record["is_failed"]) == (2, True)
    assert text.count("failed: POST /v1/completions: 400 the prompt is too long") == 1  # two alike


@pytest.mark.usefixtures("quick_host")
def test_prompts_differ_per_run(capsys: pytest.CaptureFixture[str]) -> None:
    """A server that keeps what it computed would else find the prompts of the run before."""
    with http_server(handler=AgentsHandler) as (client, _):
        seeds = [run(capsys, "--url", client.host, "--waves", "warm_up")[1]["seed"] for _ in range(3)]
    assert len(set(seeds)) == 3


class FakeServer:
    """In the place of our server."""

    def __init__(self, client: Client) -> None:
        self.client, self.flags, self.is_closed = client, list[str](), False

    def started(self, flags: Sequence[str]) -> FakeServer:
        self.flags = list(flags)
        return self

    def close(self) -> None:
        self.is_closed = True


STARTED = ["--slots", "2", "--threads", "1", "--server_flags", "--chunk_size 64 --model_name 'a b'"]


@pytest.mark.usefixtures("quick_host")
def test_ours_and_then_the_peer(
    program: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with http_server(handler=AgentsHandler) as (client, _):
        server = FakeServer(client)
        monkeypatch.setattr(bench, "ServerProcess", server.started)
        peer = ["--peer", "llama.cpp", "--llama_server", str(program), "--n_cpu_moe", "3", "--peer_flags", "-ub 2048"]
        text, record = run(capsys, str(DEMO), *TINY, *STARTED, *peer)
    demo = str(DEMO)
    assert server.is_closed
    # A slot has room for the warm-up, the longest request here: 300 + 16 + 8 in steps of 256.
    ours = [demo, "--max_batch_size", "2", "--cache_lens", "1024", "--cpu_infer", "1", "--chunk_size", "64"]
    ours += ["--model_name", "a b"]
    theirs = ["-m", demo, "-np", "2", "-c", "1024", "-t", "1", "-ngl", "999", "--n-cpu-moe", "3", "-ub", "2048"]
    assert server.flags == ours
    assert Path(f"{program}.words").read_text().splitlines()[4:] == theirs
    assert [(one["name"], one["flags"]) for one in record["servers"]] == [
        ("ktransformers", ours),
        ("llama.cpp", theirs),
    ]
    assert [row["server"] for row in record["rows"]] == ["ktransformers"] * 3 + ["llama.cpp"] * 3
    assert record["vocab"] == 2560  # the bundled model's
    assert "llama.cpp -m" in text


@pytest.mark.usefixtures("quick_host")
def test_a_peer_that_does_not_start_leaves_our_figures(
    program: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with http_server(handler=AgentsHandler) as (client, _):
        monkeypatch.setattr(bench, "ServerProcess", FakeServer(client).started)
        peer = ["--peer", "llama.cpp", "--llama_server", str(program), "--peer_flags=--fail"]
        text, record = run(capsys, *TINY, *peer, code=1)
    assert [row["server"] for row in record["rows"]] == ["ktransformers"] * 3
    assert record["servers"][1]["error"] == "llama-server did not start:\nerror: unable to load model\n"
    assert "failed: llama-server did not start" in text
    assert (record["errors"], record["is_failed"]) == (0, True)


@pytest.mark.usefixtures("quick_host")
def test_a_first_server_that_cannot_be_asked_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with http_server() as (client, _):
        host_and_port = client.host
    assert main(["bench", "agents", "--url", host_and_port]) == 1
    assert "GET /v1/models: ConnectionRefusedError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--url", "u", "x.gguf"], "MODEL is for a server that is started, --url for one that runs"),
        (["--url", "u", "--slots", "8"], "--slots is for a server that is started"),
        (["--url", "u", "--peer", "llama.cpp"], "--peer is for a server that is started"),
        (["--api_key", "k"], "--api_key is for a server that runs; name it with --url"),
        (["--timeout", "5"], "--timeout is for a server that runs"),
        (["--n_cpu_moe", "5"], "--n_cpu_moe is for a peer; add --peer llama.cpp"),
        (["--peer", "llama.cpp", "--llama_server", "/no/such"], "--llama_server /no/such is no program"),
        (["--text", "--vocab", "9"], "--vocab bounds token ids"),
        (["--waves", "colder"], "--waves colder is not one of warm_up, cold"),
        (["--shape", "agents=x"], "--shape agents=x: agents must be a number"),
        (["--scale", "0"], "--scale must be at least 0.0001"),
        (["--scale", "nan"], "--scale must be at least 0.0001"),
        (["--vocab", "1"], "--vocab must be at least 2"),
        (["--slots", "0"], "--slots must be at least 1"),
        (["--context", "0"], "--context must be at least 1"),
        (["--output", "/no/such/folder/file"], "/no/such/folder is no folder"),
        (["--server_flags", "--port 5"], "--server_flags cannot set --port; start the server yourself"),
        (["--server_flags", "'open"], '--server_flags "\'open": No closing quotation'),
        (["/no/such/model"], "/no/such/model"),
    ],
)
def test_wrong_arguments_are_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "agents", *args]) == 2
    assert message in capsys.readouterr().err


def test_flags_that_serve_does_not_know_are_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "agents", "--server_flags", "--no_such_flag 5"])
    assert "unknown argument --no_such_flag" in capsys.readouterr().err


def test_the_vocabulary_of_a_model(tmp_path: Path) -> None:
    for path in (DEMO, DEMO.parent):
        assert bench.vocab_size(EngineConfig(gguf_path=path)) == 2560
    config = EngineConfig(model_path=tmp_path)
    assert bench.vocab_size(config) is None
    for facts, size in (({"vocab_size": 77}, 77), ({"text_config": {"vocab_size": 78}}, 78), ({}, None)):
        (tmp_path / "config.json").write_text(json.dumps(facts))
        assert bench.vocab_size(config) == size


def test_the_machine_is_described_by_a_child() -> None:
    described = host.describe_host()
    assert described == json.loads(json.dumps(describe_machine()))


def test_a_machine_that_cannot_be_described_has_a_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host, "spawn_code", lambda module: [sys.executable, "-c", "raise SystemExit('no device')"])
    assert set(host.describe_host()) == {"cpu", "cores"}
    assert [record.getMessage() for record in caplog.records] == [
        "the machine is described by its CPU alone: no device"
    ]


@pytest.mark.slow
def test_our_server_under_the_whole_load() -> None:
    command = [sys.executable, "-m", "ktransformers", "bench", "agents", "--scale", "0.01", "--threads", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    jsonschema.validate(record, SCHEMA)
    rows = {(row["wave"], row["group"], row["turn"]): row for row in record["rows"]}
    assert len(rows) == 11
    assert {row["errors"] for row in rows.values()} == {0}
    assert [rows["own", "", 1][key] for key in ("requests", "prompt_tokens", "output_tokens")] == [8, 8 * 82, 8 * 64]
    assert rows["many", "", 1]["output_tokens"] == 32 * 32
    assert rows["beside", "stream", 1]["output_tokens"] == 300
    assert rows["own", "", 1]["cached_tokens"] == 0
    assert rows["shared", "", 2]["cached_tokens"] == 8 * 64  # a page of the first turn each
