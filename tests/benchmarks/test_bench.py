"""benchmarks.kernels and benchmarks.model: flags, figures, and the protocol with peers, with a fake child for them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from benchmarks import model
from benchmarks.kernels import __main__ as kernels_command
from benchmarks.kernels import measure as kernels
from benchmarks.model import Figure, best_of
from benchmarks.peers import llama
from benchmarks.peers.base import PeerProcess, is_missing
from benchmarks.peers.llama_library import library_folder
from benchmarks.peers.work import ModelWork
from ktransformers.bench.servers.weights import Weights, weights_of
from ktransformers.config import DEMO_MODEL_PATH
from ktransformers.kernels import cpu
from ktransformers.kernels.cpu import base, limits
from ktransformers.kernels.types import QuantType
from ktransformers.weights.gguf.file import open_gguf

TINY = ["--threads", "1", "--experts", "4", "--top_k", "2", "--hidden", "256", "--width", "256", "--layers", "1"]
TINY += ["--seconds", "0.001", "--tokens", "1,3"]

FAKE_CHILD = """
import sys
from benchmarks.peers.base import answer_questions

def answer(words):
    print("a line that the peer's library prints")
    if words == ["q8_0", "3"]:
        return None
    if words[0] == "die":
        sys.exit(3)
    return 1000.0 * int(words[1])

answer_questions(answer)
"""


@pytest.fixture(autouse=True)
def quick_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for what the machine can do at best."""
    read, peak = limits.read_bandwidth, limits.int8_peak
    monkeypatch.setattr(limits, "read_bandwidth", partial(read, nbytes=1 << 20, repeats=1))
    monkeypatch.setattr(limits, "int8_peak", partial(peak, repeats=1))
    monkeypatch.setattr(limits, "bf16_peak", partial(limits.bf16_peak, repeats=1))


def fake_peer(folder: Path, name: str = "llama.cpp") -> PeerProcess:
    script = folder / "child.py"
    root = str(Path(kernels.__file__).parents[2])
    script.write_text(f"import sys\nsys.path.insert(0, {root!r})\n{FAKE_CHILD}")
    return PeerProcess(name, [sys.executable, str(script)])


def last_json(out: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return record


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--types", "q3_x"], "--types q3_x is not one of"),
        (["--tokens", "1,x"], "--tokens must be positive numbers"),
        (["--tokens", "0"], "--tokens must be positive numbers"),
        (["--experts", "4", "--top_k", "5"], "--experts_per_token 5 is more than --experts 4"),
        (["--hidden", "100"], "multiples of 256"),
        (["--layers", "0"], "--layers must be at least 1"),
        (["--types", "q9"], "--types q9 is not one of"),
        (["--tokens", "99999999999"], "--tokens must be at most"),
        (["--threads", "5000"], "--threads 5000 is far beyond this machine's"),
    ],
)
def test_wrong_arguments_are_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels_command.main([*flags]) == 2
    assert message in capsys.readouterr().err


def test_more_weights_than_memory_are_refused_before_measuring(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--experts", "4096", "--hidden", "65536", "--width", "65536", "--layers", "64"]
    assert kernels_command.main(flags) == 1
    assert "these weights take at least" in capsys.readouterr().err


def test_json_alone_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels_command.main([*TINY, "--types", "q8_0", "--json"]) == 0
    out, err = capsys.readouterr()
    assert [row["tokens"] for row in json.loads(out)["rows"]] == [1, 3]
    assert "us" in err


def test_an_unknown_peer_is_wrong_usage() -> None:
    with pytest.raises(SystemExit, match="2"):
        kernels_command.main(["--peer", "nobody"])


def test_kernels_without_a_peer(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels_command.main([*TINY, "--types", "q4_k_m,bf16"]) == 0
    record = last_json(capsys.readouterr().out)
    rows = record["rows"]
    assert [(row["type"], row["tokens"]) for row in rows] == [("q4_k_m", 1), ("q4_k_m", 3), ("bf16", 1), ("bf16", 3)]
    assert all(row["us"] > 0 and row["peer_us"] == {} for row in rows)
    assert rows[0]["touched_experts"] == 2  # one token, top-2
    assert record["machine"]["threads"] == 1
    assert record["machine"]["read_bandwidth_gb_s"] > 0


def test_kernels_in_bf16(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cpu, base):
        monkeypatch.setattr(module, "active_isa", lambda: cpu.Isa.AVX512_BF16_EMULATED)
    assert kernels_command.main([*TINY, "--types", "q4_k_m,bf16", "--cpu_prefill", "bf16"]) == 0
    record = last_json(capsys.readouterr().out)
    assert all(row["bf16_us"] > 0 for row in record["rows"])
    assert record["machine"]["bf16_peak_tflop_s"] > 0
    quantized, unquantized = record["errors"]["q4_k_m"], record["errors"]["bf16"]
    assert 0 < quantized["bf16"] < quantized["int8"] < 0.05
    assert 0 < unquantized["bf16"] == unquantized["int8"] < 0.01  # one way only
    monkeypatch.undo()
    monkeypatch.setenv("KTRANSFORMERS_ISA", "scalar")
    assert kernels_command.main([*TINY, "--types", "q8_0", "--cpu_prefill", "bf16"]) == 0
    out = capsys.readouterr().out
    assert "scalar has no products of bf16: both ways are the exact one" in out
    assert last_json(out)["machine"]["bf16_peak_tflop_s"] == 0
    errors = last_json(out)["errors"]["q8_0"]
    assert errors["int8"] == errors["bf16"] > 0


def test_kernels_with_peers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[dict[str, int], int, float]] = []

    def start(shape: dict[str, int], threads: int, seconds: float) -> PeerProcess:
        started.append((shape, threads, seconds))
        return fake_peer(tmp_path)

    peers = {"llama.cpp": ("json", "json", start), "kt-kernel": ("no_such_package", "no-such-package", start)}
    monkeypatch.setattr(kernels, "_PEERS", peers)
    flags = ["--types", "q8_0", "--peer", "llama.cpp", "--peer", "kt-kernel"]
    assert kernels_command.main([*TINY, *flags]) == 0
    out = capsys.readouterr().out
    assert "peer kt-kernel is not installed (pip install no-such-package)" in out
    assert started == [({"experts": 4, "top_k": 2, "hidden": 256, "width": 256, "layers": 1}, 1, 0.001)]
    assert [row["peer_us"] for row in last_json(out)["rows"]] == [{"llama.cpp": 1000.0}, {"llama.cpp": None}]


def test_a_peer_is_stopped_between_questions(tmp_path: Path) -> None:
    peer = fake_peer(tmp_path)
    try:
        for tokens in (1, 4):
            assert peer.ask(f"q8_0 {tokens}") == 1000.0 * tokens
            state = os.waitid(os.P_PID, peer._child.pid, os.WSTOPPED | os.WNOWAIT)  # waits until it is
            assert state is not None
            assert state.si_code == os.CLD_STOPPED
        assert peer.ask("q8_0 3") is None
    finally:
        peer.close()


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel to end the child with its parent")
def test_a_stopped_peer_ends_with_its_parent(tmp_path: Path) -> None:
    """The pipe's end of file comes when the last process that holds its other end is gone."""
    root = str(Path(kernels.__file__).parents[2])
    child = tmp_path / "child.py"
    child.write_text(f"import sys\nsys.path.insert(0, {root!r})\n{FAKE_CHILD}")
    parent = f"""
import os, signal, sys
sys.path.insert(0, {root!r})
from benchmarks.peers.base import PeerProcess
PeerProcess("a peer", [sys.executable, {str(child)!r}])
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", parent], stderr=subprocess.PIPE, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert done.stderr == b""


def test_a_peer_that_dies_has_no_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peer = fake_peer(tmp_path, "a peer")
    assert peer.ask("die 1") is None
    assert peer.ask("q8_0 1") is None
    peer.close()
    assert capsys.readouterr().out == "peer a peer ended early: measured without it from here on\n"


def test_a_peer_that_does_not_start_has_no_figures(capsys: pytest.CaptureFixture[str]) -> None:
    peer = PeerProcess("a peer", [sys.executable, "-c", "raise SystemExit(1)"])
    assert peer.ask("q8_0 1") is None
    peer.close()
    assert "ended early" in capsys.readouterr().out


def test_installed_peers_are_not_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert not is_missing("one", "json", "json")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kind", [2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23, 30, 34, 35, 39, 40])
def test_random_blocks_are_finite_weights(kind: int) -> None:
    """The gguf package tells block sizes and what the blocks mean."""
    qtype = QuantType(kind)
    block, nbytes = gguf.GGML_QUANT_SIZES[qtype]
    data = llama.random_blocks(kind, 4 * 512, block, nbytes, np.random.default_rng(0))
    values = gguf.dequantize(data.reshape(4, -1), qtype)
    assert values.shape == (4, 512)
    assert np.isfinite(values).all()
    assert 0 < np.abs(values).max() < 10


@pytest.mark.skipif(library_folder() is None, reason="llama-cpp-python is not installed")
@pytest.mark.parametrize("name", ["q4_k_m", "q8_0", "mxfp4", "bf16"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_the_graph_of_llama_cpp_computes_the_experts(name: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Close to fp32 over dequantized weights: a wrong operand would be off by more than the result itself."""
    shape = {"experts": 8, "top_k": 3, "hidden": 512, "width": 256, "layers": 2}
    kept: list[tuple[int, npt.NDArray[np.uint8]]] = []
    original = llama.random_blocks

    def keep(kind: int, *args: Any) -> npt.NDArray[np.uint8]:
        kept.append((kind, original(kind, *args)))
        return kept[-1][1]

    monkeypatch.setattr(llama, "random_blocks", keep)
    folder = library_folder()
    assert folder is not None
    ggml, rng = llama.Ggml(folder, threads=1), np.random.default_rng(1)
    rows = rng.standard_normal((tokens, 512), dtype=np.float32)
    with llama.LlamaExperts(ggml, shape, 0.0).graph(name, tokens) as graph:
        ids = [rng.random((tokens, 8)).argsort(-1)[:, :3].astype(np.int32) for _ in range(2)]
        weights = [rng.random((tokens, 3), dtype=np.float32) for _ in range(2)]
        ggml.set(graph.rows, rows)
        for layer in range(2):
            ggml.set(graph.ids[layer], ids[layer])
            ggml.set(graph.weights[layer], weights[layer])
        assert graph.compute() > 0
        for layer in range(2):
            wanted = experts_in_fp32(rows, ids[layer], weights[layer], kept[3 * layer : 3 * layer + 3])
            assert np.linalg.norm(graph.output(layer) - wanted) < 0.05 * np.linalg.norm(wanted)


def experts_in_fp32(
    rows: npt.NDArray[np.float32],
    ids: npt.NDArray[np.int32],
    weights: npt.NDArray[np.float32],
    blocks: list[tuple[int, npt.NDArray[np.uint8]]],
) -> npt.NDArray[np.float32]:
    """Token by token: the sum of weight * down(silu(gate) * up)."""
    gate, up, down = (
        gguf.dequantize(data.reshape(8, size, -1), QuantType(kind))
        for (kind, data), size in zip(blocks, (256, 256, 512), strict=True)
    )
    out = np.zeros_like(rows)
    for token, row in enumerate(rows):
        for expert, weight in zip(ids[token], weights[token], strict=True):
            gated = gate[expert] @ row
            out[token] += weight * (down[expert] @ (gated / (1 + np.exp(-gated)) * (up[expert] @ row)))
    return out


DEMO = next(iter(sorted(DEMO_MODEL_PATH.glob("*.gguf"))))
TINY_MODEL = ["--threads", "1", "--prefill", "5,70", "--batches", "1,3", "--steps", "7", "--context", "4"]
TINY_MODEL += ["--repeats", "4"]  # of 4 layers: enough calls for the experts of every figure to be counted


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prefill", "none"], "--prefill must be positive numbers"),
        (["--batches", "1,0"], "--batches must be positive numbers"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--context", "-1"], "--context must be at least 1"),
        (["--model_path", "."], "name the GGUF file too"),
        (["no-such-file.gguf"], "no-such-file.gguf"),
    ],
)
def test_wrong_arguments_of_model_are_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert model.main([*flags]) == 2
    assert message in capsys.readouterr().err


def test_model_without_a_peer(capsys: pytest.CaptureFixture[str]) -> None:
    assert model.main([*TINY_MODEL]) == 0
    record = last_json(capsys.readouterr().out)
    rows = record["rows"]
    sizes = [("prefill", 5), ("prefill", 70), ("decode", 1), ("decode", 3)]
    assert [(row["phase"], row["size"]) for row in rows] == sizes
    assert rows[2]["touched_experts"] == 4  # one token, top-4 of 16
    for (phase, size), row in zip(sizes, rows, strict=True):
        assert row["tokens_s"] > 0
        assert 4 <= row["touched_experts"] <= min(4 * size, 16), phase
        read = record["weights"]["dense"] + 4 * row["touched_experts"] * record["weights"]["expert"]
        assert row["bound_tokens_s"] == pytest.approx(size * record["machine"]["read_bandwidth_gb_s"] * 1e9 / read)


def test_model_with_a_peer(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[Path, int, int, ModelWork]] = []

    def start(path: Path, threads: int, vocab_size: int, work: ModelWork) -> PeerProcess:
        started.append((path, threads, vocab_size, work))
        return fake_peer(tmp_path)

    monkeypatch.setattr(model, "_PEERS", {"llama.cpp": ("json", "json", start)})
    assert model.main([str(DEMO), *TINY_MODEL, "--peer", "llama.cpp"]) == 0
    work = ModelWork(prefill=[5, 70], batches=[1, 3], steps=7, context=4, repeats=4)
    assert started == [(DEMO, 1, 2560, work)]
    rows = last_json(capsys.readouterr().out)["rows"]
    assert [row["peer_tokens_s"]["llama.cpp"] for row in rows] == [5000.0, 70000.0, 1000.0, 3000.0]


def test_a_missing_peer_of_model_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "_PEERS", {"llama.cpp": ("no_such_package", "no-such", None)})
    assert model.main([*TINY_MODEL, "--prefill", "5", "--batches", "1", "--peer", "llama.cpp"]) == 0
    out = capsys.readouterr().out
    assert "peer llama.cpp is not installed (pip install no-such): measured without it" in out
    assert all(row["peer_tokens_s"] == {} for row in last_json(out)["rows"])


@pytest.mark.skipif(library_folder() is None, reason="llama-cpp-python is not installed")
def test_model_beside_llama_cpp(capsys: pytest.CaptureFixture[str]) -> None:
    assert model.main([*TINY_MODEL, "--peer", "llama.cpp"]) == 0
    assert all(row["peer_tokens_s"]["llama.cpp"] > 0 for row in last_json(capsys.readouterr().out)["rows"])


def test_the_bytes_of_a_step_are_those_of_the_file() -> None:
    """With all 16 experts touched, a step reads every tensor but the embedding table."""
    reader = gguf.GGUFReader(DEMO)
    everything = sum(int(tensor.n_bytes) for tensor in reader.tensors)
    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    is_tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    weights = weights_of(open_gguf(DEMO))
    assert weights.per_step(16) == everything - (0 if is_tied else int(embedding.n_bytes))
    assert (weights.expert_layers, weights.vocab_size) == (4, 2560)


def test_the_bound_of_a_dense_model_needs_no_experts() -> None:
    figure = Figure(num_tokens=8, num_steps=2, seconds=4.0, num_samples=0, num_touched=0)
    assert figure.rate == 2.0
    assert figure.bound(Weights(dense=100, expert=0, expert_layers=0, vocab_size=9), 1000.0) == 8 * 1000 / (2 * 100)
    assert figure.bound(Weights(dense=100, expert=5, expert_layers=3, vocab_size=9), 1000.0) is None


def test_the_best_round_keeps_every_count() -> None:
    rounds = [Figure(8, 2, 4.0, 1, 5), Figure(8, 2, 3.0, 0, 0), Figure(8, 2, 5.0, 3, 11)]
    assert best_of(rounds) == Figure(8, 2, 3.0, 4, 16)
    assert best_of(rounds).touched == 4.0
    assert rounds[1].touched is None


def test_the_library_of_llama_cpp_is_loaded_before_numpy() -> None:
    """By a child of its own: what starts it must not have numpy among its imports."""
    code = "import sys, benchmarks.peers.llama_library; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
