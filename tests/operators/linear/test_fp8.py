"""FP8 matrices on a GPU: joined ones compute what each does, a model in FP8 what the same numbers in BF16 do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.types import Fp8Matrix, fp8_nbytes
from ktransformers.operators.base import OperatorConfig, Placement
from ktransformers.operators.linear.joined import JoinedLinears
from ktransformers.operators.linear.linear import KTransformersLinear
from ktransformers.operators.linear.matrix import gpu_matrix, takes_fp8
from tests.support.engines.fake_gpus import fake_hardware
from tests.support.engines.gpu_engines import gpu_engine
from tests.support.models.agreement import prompt
from tests.support.models.fp8_models import to_fp8, write_both

pytest.importorskip("triton")

MakeLayer = Callable[[int, int, int], KTransformersLinear]


@pytest.fixture
def layer() -> Iterator[MakeLayer]:
    """A linear operator on the GPU with random FP8 weights [rows, cols] of a seed."""
    with closing(WorkerPool(1)) as pool:
        config = OperatorConfig(None, pool, devices=fake_hardware().devices)

        def made(rows: int, cols: int, seed: int) -> KTransformersLinear:
            module = torch.nn.Linear(cols, rows, bias=False, device="meta")
            operator = KTransformersLinear(module, "part", config, Placement(generate_device="cuda:0"))
            codes, scales, _ = to_fp8(torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)))
            weight = Fp8Matrix(codes.view(torch.uint8), scales)
            bias = torch.randn(rows, generator=torch.Generator().manual_seed(seed))
            operator._matrix = gpu_matrix(weight, bias, operator.device, pool, is_dense_wanted=False)
            return operator

        yield made


@pytest.mark.parametrize("tokens", [2, 20])
def test_joined_matrices_compute_what_each_does(layer: MakeLayer, tokens: int) -> None:
    parts = [layer(256, 160, 0), layer(128, 160, 1), layer(40, 160, 2)]
    x = parts[0].device.to_device(torch.randn(tokens, 160, generator=torch.Generator().manual_seed(4)))
    each = [part(x).clone() for part in parts]
    joined = JoinedLinears(parts)
    assert joined.num_products == 1
    # A bias is added to fp32 sums, in another order perhaps where columns are split; results are fp16.
    for got, want in zip(joined(x), each, strict=True):
        assert torch.allclose(got, want, rtol=2**-10, atol=1e-4)


def test_what_cannot_be_joined(layer: MakeLayer) -> None:
    assert JoinedLinears([layer(130, 64, 0), layer(128, 64, 1)]).num_products == 2  # rows in no multiple of 8
    assert JoinedLinears([layer(136, 64, 0), layer(128, 64, 1)]).num_products == 2  # scales would lie across both
    assert JoinedLinears([layer(128, 64, 0), layer(128, 96, 1)]).num_products == 2
    assert JoinedLinears([layer(128, 64, 0), layer(136, 64, 1)]).num_products == 1


def test_shapes_that_no_kernel_takes() -> None:
    assert takes_fp8(130, 64)
    assert not takes_fp8(128, 100)
    assert not takes_fp8(1 << 16, 1 << 15)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", [pytest.param("deepseek_v3", marks=pytest.mark.exhaustive), "qwen3_moe"])
def test_a_model_in_fp8(model_type: str, tmp_path: Path) -> None:
    """Rows above a few are multiplied with weights rounded to fp16, 2^-11 each, as test_gpu.py bounds."""
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
            assert all(held[one.key] == fp8_nbytes(one.out_features, one.in_features) for one in linears)
    errors = (logits[0] - logits[1]).norm(dim=-1) / logits[1].norm(dim=-1)
    # A row whose router nearly ties may take another expert and differ by more.
    assert errors.median() <= 1e-2
    assert (errors > 1e-2).sum() <= 2
