"""Parts of routed experts: side by side they are the whole, and only the first one has what is added once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ktransformers.kernels.types import ExpertWeight, ExpertWeights, Fp8Matrix, OwnType, QuantType, RawTensor
from ktransformers.weights.cut_source import share_of, tensor_nbytes
from ktransformers.weights.expert_parts import ExpertColumns
from ktransformers.weights.quantize.transcode import dequantize
from ktransformers.weights.quantize.write import quantize
from ktransformers.weights.source import ExpertsInfo, TensorInfo

EXPERTS, HIDDEN = 3, 256
FP8 = OwnType.F8_E4M3


def fact(name: str, qtype: QuantType | OwnType, *shape: int) -> TensorInfo:
    shape = (EXPERTS, *shape)
    return TensorInfo(name, shape, qtype.name, qtype, EXPERTS * tensor_nbytes(qtype, shape[1:]), (name,))


def info_of(qtype: QuantType | OwnType, inner: int, biases: int = 0) -> ExpertsInfo:
    gate, up = (fact(name, qtype, inner, HIDDEN) for name in ("gate", "up"))
    down = fact("down", qtype, HIDDEN, inner)
    return ExpertsInfo(gate, up, down, ("all",), gate.nbytes + up.nbytes + down.nbytes + biases)


def matrices(rows: int, cols: int, qtype: QuantType | OwnType, seed: int) -> list[ExpertWeight]:
    made: list[ExpertWeight] = []
    for expert in range(EXPERTS):
        generator = np.random.default_rng(100 * seed + expert)
        values = generator.standard_normal((rows, cols), dtype=np.float32)
        if isinstance(qtype, QuantType):
            made.append(RawTensor(torch.from_numpy(quantize(values, qtype)).flatten(), qtype, (rows, cols)))
        else:
            codes = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8)
            made.append(Fp8Matrix(codes, torch.rand(-(-rows // 128), -(-cols // 128))))
    return made


def dense(weight: ExpertWeight) -> torch.Tensor:
    if isinstance(weight, Fp8Matrix):
        scales = weight.scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        rows, cols = weight.shape
        return weight.values.view(torch.float8_e4m3fn).float() * scales[:rows, :cols]
    assert isinstance(weight, RawTensor)
    return dequantize(weight, "expert", torch.float32)


@pytest.mark.parametrize(
    ("qtype", "inner", "size", "counts"),
    [
        (QuantType.Q8_0, 64, 2, [32, 32]),
        (QuantType.Q8_0, 160, 2, [96, 64]),  # five blocks: the driver, by which memory is planned, has more
        (QuantType.Q4_K, 768, 2, [512, 256]),
        (QuantType.Q4_K, 1024, 4, [256, 256, 256, 256]),
        (QuantType.BF16, 96, 3, [32, 32, 32]),
        (FP8, 512, 2, [256, 256]),
    ],
)
def test_parts_side_by_side_are_the_whole(qtype: QuantType | OwnType, inner: int, size: int, counts: list[int]) -> None:
    gate, up = matrices(inner, HIDDEN, qtype, 1), matrices(inner, HIDDEN, qtype, 2)
    biases = [torch.randn(EXPERTS, width) for width in (inner, inner, HIDDEN)]
    whole = ExpertWeights(gate, up, matrices(HIDDEN, inner, qtype, 3), *biases)
    info = info_of(qtype, inner, biases=100)
    columns = [ExpertColumns.of(info, rank, size) for rank in range(size)]
    assert [None if one is None else one.count for one in columns] == counts
    parts = [one.weights(whole) for one in columns if one is not None]
    for name, dim in (("gate", 0), ("up", 0), ("down", 1)):
        for expert in range(EXPERTS):
            together = torch.cat([dense(getattr(part, name)[expert]) for part in parts], dim)
            assert torch.equal(together, dense(getattr(whole, name)[expert])), name
    for name in ("gate_bias", "up_bias"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts], 1), getattr(whole, name))
    down_biases = [part.down_bias for part in parts]
    assert down_biases[0] is not None
    assert torch.equal(down_biases[0], biases[2])
    assert not any(bias is None or bias.any() for bias in down_biases[1:])
    for one, part in zip(columns, parts, strict=True):
        assert one is not None
        found = one.info(info)
        facts = (found.gate, found.up, found.down)
        assert [tuple(fact.shape[1:]) for fact in facts if fact] == [
            tuple(weights[0].shape) for weights in (part.gate, part.up, part.down) if weights
        ]
        assert found.nbytes == sum(fact.nbytes for fact in facts if fact) + 100


@pytest.mark.parametrize(
    ("qtype", "inner", "size"),
    [
        (QuantType.Q8_0, 64, 1),
        (QuantType.Q8_0, 64, 3),
        (QuantType.Q4_K, 256, 2),
        (FP8, 192, 2),
        (QuantType.BF16, 48, 2),
    ],
)
def test_what_cannot_be_divided(qtype: QuantType | OwnType, inner: int, size: int) -> None:
    assert ExpertColumns.of(info_of(qtype, inner), 0, size) is None


@pytest.mark.parametrize(
    ("count", "unit", "want"),
    [(160, 32, [(0, 96), (96, 64)]), (64, 32, [(0, 32), (32, 32)]), (32, 32, None), (80, 32, None)],
)
def test_the_first_processes_have_the_larger_shares(count: int, unit: int, want: list[tuple[int, int]] | None) -> None:
    """By hand: five units are three and two."""
    shares = [share_of(count, unit, rank, 2) for rank in range(2)]
    assert shares == (want or [None, None])
