"""FP8 matrices on a GPU: joined ones compute what each does, a model in FP8 what the same numbers in BF16 do."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from ktransformers.kernels.types import Fp8Matrix
from ktransformers.operators.linear.fp8 import Fp8GpuMatrix, can_join_fp8, fp8_gpu_nbytes, join_fp8, takes_fp8
from ktransformers.operators.linear.linear import KTransformersLinear
from tests.support.agreement import prompt
from tests.support.fake_gpus import fake_hardware
from tests.support.fp8_models import to_fp8, write_both
from tests.support.gpu_engines import gpu_engine

pytest.importorskip("triton")


def matrix(rows: int, cols: int, seed: int) -> Fp8GpuMatrix:
    codes, scales, _ = to_fp8(torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)))
    return Fp8GpuMatrix.of(Fp8Matrix(codes.view(torch.uint8), scales), None, fake_hardware().devices["cuda:0"])


@pytest.mark.parametrize("tokens", [2, 20])
def test_joined_matrices_compute_what_each_does(tokens: int) -> None:
    parts = [matrix(256, 160, 0), matrix(128, 160, 1), matrix(40, 160, 2)]
    device = parts[0].device
    bias = torch.randn(424, generator=torch.Generator().manual_seed(3)).to(device.torch_device)
    assert can_join_fp8(parts)
    whole = join_fp8(parts, bias)
    assert whole.weight.data.numel() == sum(part.weight.data.numel() for part in parts)
    x = device.take(torch.randn(tokens, 160, generator=torch.Generator().manual_seed(4)))
    each = torch.cat([part(x, torch.float32) for part in parts], dim=1) + bias
    # A bias is added to fp32 sums, in another order perhaps where columns are split.
    assert torch.allclose(whole(x, torch.float32), each, rtol=1e-5, atol=1e-4)


def test_what_cannot_be_joined() -> None:
    assert not can_join_fp8([matrix(130, 64, 0), matrix(128, 64, 1)])  # rows in no multiple of 8
    assert not can_join_fp8([matrix(136, 64, 0), matrix(128, 64, 1)])  # a block of scales would lie across both
    assert not can_join_fp8([matrix(128, 64, 0), matrix(128, 96, 1)])
    assert can_join_fp8([matrix(128, 64, 0), matrix(136, 64, 1)])


def test_shapes_that_no_kernel_takes() -> None:
    assert takes_fp8(130, 64)
    assert not takes_fp8(128, 100)
    assert not takes_fp8(1 << 16, 1 << 15)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_moe"])
def test_a_model_in_fp8(model_type: str, tmp_path: Path) -> None:
    """Rows above a few are multiplied with weights rounded to fp16, 2^-11 each, as tests/engine/test_gpu.py bounds."""
    _, vocab_size = write_both(model_type, tmp_path / "fp8", tmp_path / "bf16", hidden=128)
    ids, logits = prompt(vocab_size), []
    for name in ("fp8", "bf16"):
        with closing(gpu_engine(tmp_path / name, use_cuda_graph=False)) as engine:
            logits.append(engine.runner.forward(ids, 0, range(len(ids))).clone())
            entries = [entry for entry in engine.plan.entries if "F8_E4M3" in entry.quant_types]
            linears = [
                one for one in (engine.plan.operators[e.key] for e in entries) if isinstance(one, KTransformersLinear)
            ]
            assert bool(linears) == (name == "fp8")
            held = {e.key: e.nbytes["cuda:0"] for e in entries if "cuda:0" in e.nbytes}
            assert all(held[one.key] == fp8_gpu_nbytes(one.out_features, one.in_features) for one in linears)
    errors = (logits[0] - logits[1]).norm(dim=-1) / logits[1].norm(dim=-1)
    # A row whose router nearly ties may take another expert and differ by more.
    assert errors.median() <= 1e-2
    assert (errors > 1e-2).sum() <= 2
