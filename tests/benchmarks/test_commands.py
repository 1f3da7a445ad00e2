"""Benchmarks on the smallest work that they take, in this process; servers are a fake one."""

from __future__ import annotations

import copy
import json
import re
import runpy
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import sampling, scheduler, slow_core, soak, speculative
from benchmarks.fidelity import __main__ as fidelity
from benchmarks.fidelity.kv import divergences
from benchmarks.known_answers import KnownAnswers
from ktransformers.engine.drafting.drafter import DraftOutput, LogitsRequest, Piece
from ktransformers.engine.drafting.mtp import MtpForward
from ktransformers.kernels.cpu import limits
from ktransformers.models.synthetic_shapes import PublishedShape, small_config
from tests.support.engines import drafter_steps
from tests.support.models.demo import DEMO_CHECKPOINT
from tests.support.servers.fake_speed_server import FakeServerProcess, http_server

ROOT = Path(__file__).resolve().parents[2]
MAINS = {
    "fidelity": fidelity.main,
    "sampling": sampling.main,
    "slow_core": slow_core.main,
    "scheduler": scheduler.main,
    "soak": soak.main,
    "speculative": speculative.main,
}


@pytest.fixture(autouse=True)
def quick_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for what the machine can do at best."""
    read, peak = limits.read_bandwidth, limits.int8_peak
    monkeypatch.setattr(limits, "read_bandwidth", partial(read, nbytes=1 << 20, repeats=1))
    monkeypatch.setattr(limits, "int8_peak", partial(peak, repeats=1))


def run(capsys: pytest.CaptureFixture[str], name: str, *args: str, code: int = 0) -> tuple[str, dict[str, Any]]:
    """Text and record of one run of a benchmark."""
    assert MAINS[name](args) == code
    text, _, last = capsys.readouterr().out.rstrip("\n").rpartition("\n")
    record: dict[str, Any] = json.loads(last)
    assert record["bench"] == name
    assert record["machine"]["cpu"]
    return text, record


@pytest.fixture
def equal_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """See there: most drafts are run."""
    drafter_steps.equal_steps(monkeypatch)


@pytest.mark.usefixtures("equal_steps")
def test_speculative(capsys: pytest.CaptureFixture[str]) -> None:
    text, record = run(capsys, "speculative", "--repeats", "1", "--streams", "1", "--max_new_tokens", "150")
    code, drawn, noise, _ = record["rows"]
    assert [row["prompts"] for row in record["rows"]] == ["code", "text", "noise", "chat"]
    assert {row["drafter"] for row in record["rows"]} == {"ngram"}
    assert record["model"] == "demo-Q4_K_M.gguf"  # where it lies is the machine's business
    assert code["bound"] > 3
    assert 0 < code["accepted"] <= code["drafted"]
    assert code["off_ms"] > 0 < code["ms"]
    assert drawn["bound"] >= 1.0 <= noise["bound"]
    assert "x faster" in text


@pytest.mark.usefixtures("equal_steps")
def test_speculative_with_both_drafters(capsys: pytest.CaptureFixture[str]) -> None:
    work = ("--repeats", "1", "--streams", "1", "--max_new_tokens", "60", "--drafter", "ngram,mtp")
    _, record = run(capsys, "speculative", "--model_path", str(DEMO_CHECKPOINT), *work)
    kinds = [(row["prompts"], row["drafter"]) for row in record["rows"]]
    assert kinds == [(kind, name) for kind in ("code", "text", "noise", "chat") for name in ("ngram", "mtp")]
    assert all(row["off_ms"] > 0 < row["ms"] for row in record["rows"])


@pytest.mark.usefixtures("equal_steps")
def test_speculative_of_random_weights(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--synthetic", "qwen3-30b-a3b", "--layers", "1", "--accept", "1,0", "--max_new_tokens", "24")
    _, record = run(capsys, "speculative", "--repeats", "1", "--streams", "2", *shape)
    right, wrong = record["rows"]
    assert [row["prompts"] for row in record["rows"]] == ["1", "0"]
    assert right["accepted"] == right["drafted"] > 24
    assert right["bound"] > 3
    assert wrong["accepted"] == 0 < wrong["drafted"]
    assert right["other"] == wrong["other"] == 0
    assert record["work"]["synthetic"] == "qwen3-30b-a3b"


@pytest.mark.usefixtures("equal_steps")
def test_speculative_of_a_random_mtp_layer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps are run, whatever they find, and draft tokens are as right as asked."""
    small, steps, run_step = small_config("qwen3.6-35b-a3b", 1), list[int](), MtpForward.run

    def watched(
        forward: MtpForward,
        pieces: Sequence[Piece],
        requests: Sequence[LogitsRequest],
        behind: Sequence[int] = (),
        depth: int = 0,
    ) -> DraftOutput:
        steps.append(len(pieces))
        return run_step(forward, pieces, requests, behind, depth)

    monkeypatch.setattr(PublishedShape, "config", lambda shape, layers: copy.deepcopy(small))
    monkeypatch.setattr(MtpForward, "run", watched)
    shape = ("--synthetic", "qwen3.6-35b-a3b", "--layers", "1", "--accept", "1,0", "--max_new_tokens", "24")
    _, record = run(capsys, "speculative", "--repeats", "1", "--streams", "2", "--drafter", "ngram,mtp", *shape)
    kinds = [(row["prompts"], row["drafter"]) for row in record["rows"]]
    assert kinds == [(accept, name) for accept in ("1", "0") for name in ("ngram", "mtp")]
    _, right, copied, wrong = record["rows"]
    assert copied["draft_ms"] < right["draft_ms"]
    assert right["accepted"] == right["drafted"] > 24
    assert wrong["accepted"] == 0 < wrong["drafted"]
    assert len(steps) > 10
    assert max(steps) == 2


def test_only_shapes_with_an_mtp_layer_draft_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert speculative.main(["--synthetic", "qwen3-32b", "--drafter", "mtp"]) == 2
    names = "deepseek-v3, deepseek-v4-flash, qwen3.6-"
    assert f"qwen3-32b has no layer for multi-token prediction; {names}" in capsys.readouterr().err


def test_drafts_are_right_as_often_as_asked() -> None:
    known = KnownAnswers(1000, 0.8, 10, 2000)
    pairs = list(zip(known.tokens(3), known.drafts(3), strict=True))
    assert all(token == draft for token, draft in pairs[:10])
    assert 0.77 < sum(token == draft for token, draft in pairs[10:]) / 2000 < 0.83
    assert known.drafts(3) == known.drafts(3) != known.drafts(4)


def test_fidelity(capsys: pytest.CaptureFixture[str]) -> None:
    text, record = run(capsys, "fidelity", "--kv_types", "fp32,bf16,int8", "--tokens", "40", "--threads", "1")
    exact, *rounded = record["rows"]
    assert exact == {"kv_type": "fp32", "bytes_per_token": 4096, "kl_mean": 0.0, "kl_max": 0.0, "same_choice": 1.0}
    assert [(row["kv_type"], row["bytes_per_token"]) for row in rounded] == [("bf16", 2048), ("int8", 1088)]
    assert all(0 < row["kl_mean"] <= row["kl_max"] < 0.1 for row in rounded)
    assert record["num_tokens"] == 40
    assert "KL, mean" in text
    products = ("--kv_types", "bf16", "--attention_products", "kv", "--tokens", "40", "--threads", "1")
    _, record = run(capsys, "fidelity", *products)
    (row,) = record["rows"]
    assert row["kv_type"] == "bf16 products"
    assert 0 < row["kl_mean"] <= row["kl_max"] < 0.1


def test_divergences_are_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(1)
    want, got = (torch.randn(70, 30, generator=generator) for _ in range(2))
    logs = [torch.log_softmax(rows.double(), dim=-1) for rows in (want, got)]
    oracle = torch.nn.functional.kl_div(logs[1], logs[0], reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(divergences(want, got), oracle)


def test_slow_core(capsys: pytest.CaptureFixture[str]) -> None:
    _, record = run(capsys, "slow_core", "--seconds", "0", "--rows", "2", "--threads", "2")
    assert [(row["kernel"], row["times"]) for row in record["rows"]] == [
        (kernel, times) for kernel in ("experts", "matrix", "attention") for times in (2, 4, 8)
    ]
    # The sum of speeds of a thread and of one half as fast is 3/4 of two; with equal shares, 1/2.
    assert record["rows"][0]["equal_ms"] == pytest.approx(1.5 * record["rows"][0]["bound_ms"])


def test_sampling(capsys: pytest.CaptureFixture[str]) -> None:
    _, record = run(capsys, "sampling", "--seconds", "0", "--vocab", "64")
    assert len({(row["logits"], row["case"], row["rows"]) for row in record["rows"]}) == 2 * 6 * 2
    rate = record["machine"]["read_bandwidth_gb_s"]
    assert all(row["bound_ms"] == pytest.approx(row["rows"] * 256 / rate / 1e6) for row in record["rows"])


def test_scheduler(capsys: pytest.CaptureFixture[str]) -> None:
    text, record = run(capsys, "scheduler", "--sequences", "3", "--steps", "9")
    loads = [(row["load"], row["page_size"]) for row in record["rows"]]
    assert loads == [("decode", 16), ("mixed", 16), ("decode", 256), ("mixed", 256)]
    assert "3 sequences, 9 steps" in text


@pytest.mark.parametrize("failing", [False, True])
def test_soak(failing: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    held = {role: {"rss_kib": 2048, "fds": 7} for role in ("api", "scheduler", "engine")}
    with http_server(failing=failing) as (client, _):
        server = FakeServerProcess(client)
        monkeypatch.setattr(soak, "ServerProcess", server.started)
        monkeypatch.setattr(soak, "usage", lambda pid: held)
        args = ["--seconds", "0.2", "--streams", "2", "--kill_every", "0.1"]
        text, record = run(capsys, "soak", *args, code=int(failing))
    assert server.is_closed
    assert server.flags[-2:] == ["--max_engine_restarts", "1000"]
    assert record["is_failed"] is failing
    assert (record["failed"] > 0) is failing
    assert (record["finished"] + record["left"] > 0) is not failing
    assert ("failed: POST /v1/completions: 500 no more memory" in text) is failing
    assert record["early"] == record["late"] == record["idle"] == held
    assert "2.0 MiB    7 fds" in text


def test_the_script_that_users_know(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = str(ROOT / "benchmarks" / "test_speed.py")
    with http_server() as (client, bodies):
        host, port = client.host.split(":")
        words = ["--host", host, "--port", port, "--concurrent", "2", "--prompt-lens", "12", "--max_tokens", "3"]
        monkeypatch.setattr(sys, "argv", [script, *words])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(script, run_name="__main__")
    assert end.value.code == 0
    assert len(bodies) == 2
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["runs"][0]["prompt_tokens"] == 24


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("sampling", ["--vocab", "0"], "--vocab must be at least 1"),
        ("slow_core", ["--threads", "1"], "--threads must be at least 2"),
        ("scheduler", ["--steps", "1"], "--steps must be at least 2"),
        ("soak", ["--seconds", "nan"], "--seconds must be at least 0"),
    ],
)
def test_wrong_arguments_are_one_line(
    name: str, args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert MAINS[name](args) == 2
    assert message in capsys.readouterr().err


def runnable() -> set[str]:
    """Names behind `python -m benchmarks.`: modules with a main, and packages with `__main__.py`."""
    root = ROOT / "benchmarks"
    modules = {path for path in root.rglob("*.py") if "peers" not in path.parts and path.name != "test_speed.py"}
    mains = {path for path in modules if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")}
    return {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__main__") for path in mains}


def test_docs_name_the_benchmarks_that_there_are() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages if page.name != "CHANGELOG.md")
    named = set(re.findall(r"python -m benchmarks\.([a-z_]+(?:\.[a-z_]+)?)", text))
    page = (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
    there = runnable()
    assert named <= there
    unnamed = {name for name in there if f"`{name}`" not in page and f"python -m benchmarks.{name}" not in page}
    assert unnamed == {"readme", "disk.ours"}  # the latter is a child of `disk`
