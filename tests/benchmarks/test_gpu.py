"""benchmarks.gpu: what is measured, in Triton's interpreter on tiny shapes; the clock is made up."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from benchmarks.gpu import attention, latent, linear, prefill, rows
from benchmarks.gpu import hand_over as hand_over_command
from ktransformers.bench.gpu import attention_case, hand_over
from ktransformers.bench.gpu.device import Gpu
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.cpu.router import RouterSpec
from ktransformers.kernels.types import QuantType
from ktransformers.operators.attention.latent_materialization import LatentDims

pytest.importorskip("triton")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")

SHAPE = hand_over.ExpertsShape(
    experts=4, top_k=2, hidden=256, width=256, types=(QuantType.Q4_K, QuantType.Q6_K), copies=1
)


class InterpretedGpu(Gpu):
    """The interpreter, in which every call takes two microseconds."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.device = torch.device("cpu")

    def facts(self) -> dict[str, Any]:
        return {"gpus": [{"name": "made up"}], "copy_gb_s": 100.0, "matmul_tflop_s": 10.0}

    def copies(self, nbytes: int) -> int:
        return 2

    def median_us(self, call: Callable[[], object], repeats: int = 7, warm_ups: int = 2) -> float:
        call()
        return 2.0

    def graph_us(self, calls: Sequence[Callable[[], object]], repeats: int = 15) -> float:
        for call in calls:
            call()
        return 2.0


class MadeUpGpu(InterpretedGpu):
    """Where nothing is called."""

    def graph_us(self, calls: Sequence[Callable[[], object]], repeats: int = 15) -> float:
        return 2.0


@interpreted
@pytest.mark.parametrize(
    ("model", "step", "tokens_seen", "nbytes"),
    [
        (attention.AttentionModel("gqa", 4, 2, 32, 32), attention.StepShape(2, 1, 70), 140, 2 * 140 * 2 * 64),
        (attention.AttentionModel("gqa", 4, 2, 32, 32), attention.StepShape(1, 3, 3), 6, 2 * 3 * 2 * 64),
        (
            attention.AttentionModel("window", 4, 2, 32, 32, window=8, has_sinks=True),
            attention.StepShape(1, 1, 70),
            8,
            2 * 8 * 2 * 64,
        ),
        (
            attention.AttentionModel("codes", 4, 2, 32, 32, kv_type="int8"),
            attention.StepShape(2, 1, 70),
            140,
            140 * 2 * (64 + 8),
        ),
        (
            attention.AttentionModel("latents", 4, 1, 40, 32, is_latent=True, kv_type="fp8"),
            attention.StepShape(1, 1, 70),
            70,
            70 * (40 + 8),
        ),
        (
            attention.AttentionModel("products", 4, 2, 32, 32, kv_type="int8", quantized_attention=True),
            attention.StepShape(1, 20, 20),
            210,
            20 * 2 * (64 + 8),
        ),
    ],
)
def test_attention(
    model: attention.AttentionModel,
    step: attention.StepShape,
    tokens_seen: int,
    nbytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The oracle is the measurement's own fp32 torch; a wrong slot or window would be off by the result itself."""
    monkeypatch.setattr(attention_case, "MAX_LEN", 128)
    figure = attention.attention_figure(InterpretedGpu(), model, step, is_checked=True)
    assert figure["error"] < 0.02
    assert figure["gb_per_s"] == pytest.approx(nbytes / 2.0 / 1e3)
    columns = model.dim + model.dim_v
    assert figure["tflop_per_s"] == pytest.approx(2 * 4 * columns * tokens_seen / 2.0 / 1e6)
    assert (figure["torch_us"] is None) is (bool(model.window) or model.kv_type != "bf16")


def test_products_of_codes_stand_beside_what_they_replace() -> None:
    compared = [model.shown for model in attention.compared_models()]
    kinds = ["", " int8", " int8 products", " fp8", " fp8 products"]
    assert compared == [name + kind for name in ("qwen3-30b-a3b", "heads of 64") for kind in kinds]
    sizes = {(step.rows, step.length) for step in attention.PRODUCT_STEPS}
    assert sizes == {(rows, size) for rows in (512, 2048, 4096) for size in (2048, 8192, 32768)} - {(4096, 2048)}


@interpreted
def test_rows() -> None:
    gpu = InterpretedGpu()
    figures = [
        rows.norm_figure(gpu, 2, 64),
        rows.silu_figure(gpu, 2, 64),
        rows.rope_figure(gpu, 2, (4, 2), 64),
        rows.latent_figure(gpu, 2, 4),
        rows.router_figure(gpu, 2, 16, RouterSpec(4)),
    ]
    assert [figure["rows"] for figure in figures] == 5 * [2]
    assert all(figure["error"] < 0.02 for figure in figures if "error" in figure)
    assert figures[0]["gb_per_s"] == pytest.approx(8 * 2 * 64 / 2.0 / 1e3)


@interpreted
def test_sorting_rows_by_expert(capsys: pytest.CaptureFixture[str]) -> None:
    record = linear.bench_gpu_linear(["align"], [1, 3], InterpretedGpu())
    assert [(row["kernel"], row["tokens"], row["us"]) for row in record["rows"]] == [
        ("align", 1, 2.0),
        ("align", 3, 2.0),
    ]
    assert record["rows"][1]["of_copy"] == pytest.approx(3 * 8 * 4 / 2.0 / 1e3 / 100)
    assert capsys.readouterr().out.startswith("made up: copies 100 GB/s, matrix products 10 TFLOP/s\n")


def test_what_products_read_and_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not run: the interpreter takes minutes for quantized products."""
    monkeypatch.setattr(linear, "_LINEARS", (("tiny", 64, 256, (QuantType.Q8_0,)),))
    monkeypatch.setattr(linear, "_MOES", (("tiny", 4, 2, 256, 256, QuantType.Q8_0, QuantType.Q8_0),))
    one, three = linear.linear_works(InterpretedGpu(), [1, 3])
    assert (one.flops, three.flops) == (2 * 64 * 256, 3 * 2 * 64 * 256)
    assert one.nbytes == three.nbytes == 64 * 256 // 32 * 34
    assert len(one.calls) == 2
    one, many = linear.moe_works(InterpretedGpu(), [1, 64])
    assert (one.distinct_experts, many.distinct_experts) == (2, 4)
    assert many.flops == 6 * 64 * 2 * 256 * 256
    assert many.nbytes == 2 * one.nbytes == 4 * 3 * 256 * 256 // 32 * 34


def test_types_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are those of each type where it rests on a GPU; times are made up, so all are as fast as Q4_K."""
    monkeypatch.setattr(linear, "_LINEARS", (("tiny", 64, 256, ()),))
    monkeypatch.setattr(linear, "_MOES", (("tiny", 4, 2, 256, 256, QuantType.Q8_0, QuantType.Q8_0),))
    types = [QuantType.Q4_K, QuantType.IQ2_XXS]
    found = linear.bench_gpu_linear(["types"], [1], MadeUpGpu(), types)["rows"]
    assert [(row["kernel"], row["type"]) for row in found] == [
        ("linear", "Q4_K"), ("moe", "Q4_K"), ("linear", "IQ2_XXS"), ("moe", "IQ2_XXS"),
    ]  # fmt: skip
    assert [row["gb_per_s"] * 2e3 for row in found] == [pytest.approx(x) for x in (
        64 * 148, 2 * 3 * 256 * 148, 4 * (64 + 1024), 2 * 3 * 16 * (64 + 1024),
    )]  # fmt: skip
    assert {row["of_q4_k"] for row in found} == {1.0}
    assert {row["tokens_per_s"] for row in found} == {5e5}
    assert QuantType.Q4_K is linear.COMPARED_TYPES[0]


@interpreted
def test_latent() -> None:
    """Errors are not looked at: the interpreter's dot products of bf16 are no such thing."""
    dims = LatentDims(2, rank=512, nope=128, rope=64, v_dim=128)
    record = latent.bench_gpu_latent(dims, [(5, 70)], InterpretedGpu())
    (row,) = record["rows"]
    pairs = 5 * 70 - 10
    assert row["absorbed_bound_us"] == pytest.approx(2 * pairs * (2 * 512 + 64) / (10 / 2e-6))


def test_hand_over_measures_experts() -> None:
    pool = WorkerPool(1)
    try:
        kernel = hand_over.make_kernel(SHAPE, pool)
        out = kernel.forward(torch.randn(3, 256), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2))
    finally:
        pool.close()
    assert out.isfinite().all()
    assert out.abs().max() > 0


MAINS = {
    "attention": attention.main,
    "latent": latent.main,
    "linear": linear.main,
    "prefill": prefill.main,
    "hand_over": hand_over_command.main,
}


@pytest.mark.parametrize("kind", MAINS)
def test_without_a_gpu_it_is_refused(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert MAINS[kind]([]) == 2
    assert capsys.readouterr().err == "error: this measures a GPU: there is no CUDA device\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["latent", "--only", "5"], "--only must be ROWS,POSITIONS"),
        (["latent", "--only", "5,4"], "no more rows than positions"),
        (["linear", "--only", "moe,sine"], "--only sine is not one of linear, fp8, moe, types, align, repack"),
        (["linear", "--types", "iq2_xxs,iq9"], "--types IQ9 is not one of Q4_K, "),
        (["prefill", "--shapes", "llama"], "--shapes llama is not one of qwen3-30b, deepseek-v3"),
        (["hand_over", "--layers", "0"], "--layers must be at least 1"),
    ],
)
def test_wrong_arguments_are_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert MAINS[args[0]](args[1:]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize(
    "args",
    [
        ["attention", "--only", "qwen2-57b"],
        ["attention", "--only", "rows"],
        ["latent", "--only", "64,512"],
        ["linear", "--only", "fp8,types,align,repack", "--types", "q4_k,iq2_xxs,iq3_s", "--tokens", "1"],
        ["prefill", "--shapes", "qwen3-30b", "--tokens", "64", "--milliseconds", "0"],
        ["hand_over", "--shapes", "empty", "--tokens", "1", "--layers", "4", "--checks", "4"],
    ],
)
def test_on_a_gpu(args: list[str]) -> None:
    """In a process of its own: torch's generators stay unusable after a capture that failed, as other tests have it."""
    command = [sys.executable, "-m", f"benchmarks.gpu.{args[0]}", *args[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["bench"] == f"gpu_{args[0]}"
    assert all(math.isfinite(value) for row in record["rows"] for value in row.values() if isinstance(value, float))
