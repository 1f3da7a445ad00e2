"""benchmarks.disk: routers, model files, control groups, and a run of ours in one."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from benchmarks.disk import __main__ as command
from benchmarks.disk import model_file
from benchmarks.disk.control_group import ControlGroup
from benchmarks.disk.counters import Use, drop_cache
from benchmarks.disk.loop_device import LoopDevice
from benchmarks.disk.model_file import ModelFile, routing_of, write_model
from benchmarks.disk.options import disk_parser, disk_work
from benchmarks.disk.routing import CONSTANT, router_rows, zipf_frequencies
from benchmarks.peers.llama_library import library_folder
from ktransformers.bench.offline.runs import DecodeCase, OfflineRuns, counts_in
from ktransformers.config import DEMO_MODEL_PATH, EngineConfig
from ktransformers.engine.load.builder import build_engine
from ktransformers.errors import UnsupportedError
from ktransformers.kernels.cpu import limits
from ktransformers.kernels.types import QuantType
from ktransformers.models import synthetic_shapes
from ktransformers.weights.gguf.file import open_gguf
from tests.support.models.tiny_models import made_shape, tiny_config

EXPERTS, TOP_K, LAYERS, HIDDEN, VOCAB = 32, 4, 2, 256, 4096
MIB = 1 << 20


def tiny(layers: int) -> Any:
    return tiny_config(
        "qwen3_moe", hidden=HIDDEN, layers=layers, num_experts=EXPERTS, num_experts_per_tok=TOP_K, vocab_size=VOCAB
    )


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shape of these tests among those that are known; nobody waits for the machine's limits."""
    monkeypatch.setitem(synthetic_shapes.SHAPES, "tiny", made_shape("tiny", LAYERS, tiny))
    read, peak = limits.read_bandwidth, limits.int8_peak
    monkeypatch.setattr(limits, "read_bandwidth", partial(read, nbytes=1 << 20, repeats=1))
    monkeypatch.setattr(limits, "int8_peak", partial(peak, repeats=1))
    monkeypatch.setattr(command, "DISK_SECONDS", 0.01)


@pytest.fixture
def group() -> Callable[[int], ControlGroup]:
    """ControlGroup, where the system lets us make one."""
    try:
        with ControlGroup(64 * MIB):
            pass
    except UnsupportedError as error:
        pytest.skip(str(error))
    return ControlGroup


def tensors(path: Path) -> dict[str, str]:
    """A digest of every tensor's bytes, as the `gguf` package reads them."""
    return {one.name: hashlib.sha256(one.data.tobytes()).hexdigest() for one in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (32, 4), (8, 2)])
def test_experts_are_chosen_by_zipfs_law(num_experts: int, top_k: int) -> None:
    wanted = zipf_frequencies(num_experts, top_k)
    assert wanted.sum() == pytest.approx(top_k)
    assert wanted[: num_experts // 4].sum() == pytest.approx(0.7 * top_k)
    inner = wanted[wanted < 0.949]
    at = np.arange(num_experts - len(inner), num_experts) + 1.0
    slopes = np.diff(np.log(inner)) / np.diff(np.log(at))
    assert slopes == pytest.approx(slopes[0])  # a line of log over log, below what is capped

    generator = np.random.default_rng(3)
    hidden = generator.standard_normal((20_000, HIDDEN), dtype=np.float32)
    hidden[:, 0] = CONSTANT
    for routing, least in (("skewed", 0.68), ("even", 0.25)):
        logits = hidden @ router_rows((num_experts, HIDDEN), top_k, routing, seed=5).T
        counts = np.bincount(np.argsort(-logits, axis=1)[:, :top_k].ravel(), minlength=num_experts)
        found = np.sort(counts)[::-1] / len(hidden)
        assert least <= found[: num_experts // 4].sum() / top_k <= least + 0.12
        if routing == "skewed":
            assert found == pytest.approx(wanted, rel=0.25, abs=0.012)


def test_routers_that_there_are_not() -> None:
    for routing, top_k in (("other", 2), ("even", 0), ("even", 8)):
        with pytest.raises(ValueError, match="routing"):
            router_rows((8, 64), top_k, routing, seed=0)


@pytest.mark.parametrize("qtype", [QuantType.Q8_0, QuantType.Q4_K])
def test_a_file_gets_other_routers_in_place(qtype: QuantType, tmp_path: Path) -> None:
    """The engine's own counts say what tokens choose."""
    path, before = tmp_path / "model.gguf", dict[str, str]()
    for routing, least, most in (("even", 0.25, 0.45), ("skewed", 0.65, 0.8), ("even", 0.25, 0.45)):
        write_model(ModelFile(path, tiny(LAYERS), qtype, routing))
        assert path.stat().st_size % 4096 == 0
        assert routing_of(open_gguf(path)) == routing
        found = tensors(path)
        routers = {name for name in found if name.endswith("ffn_gate_inp.weight")}
        assert {name for name, digest in before.items() if found[name] != digest} == (routers if before else set())
        assert len({digest for name, digest in found.items() if "_exps" in name}) == 3 * LAYERS  # each of its own
        before = found
        engine = build_engine(EngineConfig(gguf_path=path, cache_lens=512, cpu_infer=1), page_size=64, max_batch_size=1)
        try:
            runs = OfflineRuns(engine, seconds=0.0)
            figure = runs.decode(1, DecodeCase(steps=256, prompt_len=4))
            share = runs.quarter_share()
            layers = {layer for layer, _, _ in counts_in(b"".join(runs._picks))}
        finally:
            engine.close()
        assert figure.distinct_experts == TOP_K
        assert len(layers) == LAYERS
        assert share is not None
        assert least <= share <= most


def test_the_file_is_written_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.gguf"
    assert model_file.main([str(path), "--shape", "tiny", "--layers", "1", "--experts", "q4_k"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    reader = gguf.GGUFReader(path)
    experts = [one for one in reader.tensors if "_exps" in one.name]
    assert {QuantType(one.tensor_type) for one in experts} == {QuantType.Q4_K}
    assert record["expert_bytes"] == sum(one.n_bytes for one in experts)
    assert record["nbytes"] == path.stat().st_size
    assert routing_of(open_gguf(DEMO_MODEL_PATH / "demo-Q4_K_M.gguf")) is None
    assert model_file.main([str(tmp_path / "other.gguf"), "--shape", "tiny", "--layers", "9"]) == 2


@pytest.mark.parametrize(
    ("files", "settings"),
    [
        ({"v1/memory.limit_in_bytes": ""}, {"memory.limit_in_bytes": "4096", "memory.memsw.limit_in_bytes": "4096"}),
        ({"v2/cgroup.subtree_control": "cpu"}, {"memory.max": "4096", "memory.swap.max": "0"}),
    ],
)
def test_a_group_of_either_version(files: dict[str, str], settings: dict[str, str], tmp_path: Path) -> None:
    """In folders that stand for the hierarchies."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    group = ControlGroup(4096, tmp_path / "v1", tmp_path / "v2")
    assert {one.name: one.read_text() for one in group.folder.iterdir()} == settings
    if "v2/cgroup.subtree_control" in files:
        assert (tmp_path / "v2/cgroup.subtree_control").read_text() == "+memory"
        (group.folder / "memory.peak").write_text("77\n")
        (group.folder / "memory.events").write_text("low 0\noom_kill 3\n")
        (group.folder / "memory.stat").write_text("anon 5\nfile 6\n")
        assert (group.peak(), group.oom_kills(), group.anonymous()) == (77, 3, 5)
    with pytest.raises(UnsupportedError, match="run as root"):
        ControlGroup(4096, tmp_path / "neither", tmp_path / "none")


def test_a_group_limits_a_program(group: Callable[[int], ControlGroup]) -> None:
    hold = "import os; held = bytearray(os.urandom(1)) * (%d << 20); print(len(held))"
    with group(64 * MIB) as small:
        fits = subprocess.run(small.command(sys.executable, "-c", hold % 8), capture_output=True, text=True)
        assert fits.stdout == f"{8 * MIB}\n"
        assert 8 * MIB <= small.peak() <= 64 * MIB
        assert small.oom_kills() == 0
        beyond = subprocess.run(small.command(sys.executable, "-c", hold % 256), capture_output=True)
        assert beyond.returncode == -9
        assert small.oom_kills() == 1
        folder = small.folder
    assert not folder.exists()


def test_what_a_process_reads_is_counted(tmp_path: Path) -> None:
    """Also what it reads through a map."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(4 * MIB))
    drop_cache(path)
    before = Use.of(os.getpid())
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert len(bytes(mapped)) == 4 * MIB
    used = Use.of(os.getpid()).since(before)
    if used.bytes_read == 0:
        pytest.skip("these files are on no disk")
    assert used.bytes_read >= 4 * MIB
    assert Use(0, 1.0, 2.0, {"1": 3.0, "2": 5.0}).since(Use(0, 0.0, 0.0, {"1": 0.5})).queued(seconds=10.0) == 0.5
    assert Use(0, 1.0, 4.0).others(seconds=1.0) == 3.0 / (os.cpu_count() or 1)


def test_a_device_with_a_files_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(MIB))
    try:
        with LoopDevice(path, 64) as device:
            assert device.path.read_bytes() == path.read_bytes()
            assert int(Path(f"/sys/block/{device.path.name}/queue/read_ahead_kb").read_text()) == 64
    except UnsupportedError as error:
        pytest.skip(str(error))
    attached = subprocess.run(["losetup", "--associated", str(path)], capture_output=True, text=True, check=True)
    assert attached.stdout == ""
    path.write_bytes(bytes(MIB + 1))
    with pytest.raises(UnsupportedError, match="does not end with a sector"):
        LoopDevice(path, 64)


def test_the_questions_are_the_same_for_all(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    flags = [str(path), "--rounds", "4", "--tokens", "5", "--prefill", "9", "--limits", "1,2"]
    given = disk_work(disk_parser(lambda args: 0).parse_args(flags))
    assert list(given.limits) == [1 << 30, 2 << 30]
    assert [(str(one), one.state, one.num_tokens) for one in command.questions(given)] == [
        ("decode 1", "cold", 6),
        ("decode 1", "later", 6),
        ("decode 1", "later", 6),
        ("decode 1", "warm", 6),
        ("prefill 9", "warm", 9),
    ]


@pytest.mark.slow
def test_ours_in_a_group(
    group: Callable[[int], ControlGroup], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.gguf"
    write_model(ModelFile(path, tiny(LAYERS), QuantType.Q8_0))
    flags = ["--limits", "2", "--only", "ours", "--tokens", "3", "--rounds", "2", "--prefill", "5", "--cpu_infer", "1"]
    assert command.main([str(path), *flags]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["phase"], row["state"]) for row in record["rows"]] == [
        ("load", "cold"),
        ("decode", "cold"),
        ("decode", "warm"),
        ("prefill", "warm"),
    ]
    for row in record["rows"]:
        assert 0 < row["anonymous_gb"] <= row["peak_gb"] <= 2 * 1.08
        assert row["oom_kills"] == 0
    assert all(row["tokens_s"] > 0 for row in record["rows"][1:])
    assert record["expert_bytes_per_token"] == LAYERS * TOP_K * 3 * HIDDEN * HIDDEN // 32 * 34
    assert not record["is_failed"]


@pytest.mark.slow
@pytest.mark.skipif(library_folder() is None, reason="llama-cpp-python is not installed")
@pytest.mark.parametrize("read_ahead", ["0", "64"])
def test_both_in_groups(
    read_ahead: str, group: Callable[[int], ControlGroup], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.gguf"
    write_model(ModelFile(path, tiny(LAYERS), QuantType.Q8_0))
    flags = ["--limits", "2", "--tokens", "3", "--rounds", "1", "--prefill", "5", "--read_ahead", read_ahead]
    assert command.main([str(path), *flags]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["program"], row["phase"]) for row in record["rows"]] == [
        (program, phase) for program in ("llama.cpp", "ours") for phase in ("load", "decode", "prefill")
    ]
    assert [(one["phase"], one["state"]) for one in record["ratios"]] == [("decode", "cold"), ("prefill", "warm")]
    (loaded, *_) = record["rows"]
    assert loaded["anonymous_gb"] < path.stat().st_size / 1e9 + 0.1  # nothing was copied out of the map


def test_nothing_is_measured_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 2
    assert "benchmarks.disk.model_file writes one" in capsys.readouterr().err


def test_ratios_are_of_the_same_kind() -> None:
    rows = [
        {"limit_gib": 8, "program": program, "phase": phase, "state": "warm", "tokens_s": rate}
        for program, phase, rate in (
            ("llama.cpp", "decode", 2.0),
            ("llama.cpp", "prefill", None),
            ("ours", "decode", 5.0),
            ("ours", "prefill", 7.0),
        )
    ]
    assert command._ratios(rows) == [{"limit_gib": 8, "phase": "decode", "state": "warm", "ratio": 2.5}]
