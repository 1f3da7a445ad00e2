"""What a layer's experts take on a GPU, and which of them no kernel reads."""

from __future__ import annotations

import math

import pytest

from ktransformers.errors import UnsupportedError
from ktransformers.kernels.cpu import packed_nbytes
from ktransformers.kernels.types import (
    Activation,
    ActivationSpec,
    GroupType,
    OwnType,
    QuantType,
    WeightType,
    fp8_nbytes,
    row_bytes,
)
from ktransformers.operators.experts.resident import can_be_copied, gpu_experts_nbytes, why_not_on_gpu
from ktransformers.weights.source import ExpertsInfo, ExpertsLayout, TensorInfo

E, H, INNER = 4, 96, 32


def part(name: str, qtype: WeightType, rows: int, cols: int) -> TensorInfo:
    nbytes = E * fp8_nbytes(rows, cols) if isinstance(qtype, OwnType) else math.prod((E, rows)) * row_bytes(qtype, cols)
    return TensorInfo(name, (E, rows, cols), qtype.name, qtype, nbytes, (name,))


def experts(
    gate: WeightType, up: WeightType, down: WeightType, hidden: int = H, inner: int = INNER, biases: int = 0
) -> ExpertsInfo:
    parts = part("gate", gate, inner, hidden), part("up", up, inner, hidden), part("down", down, hidden, inner)
    return ExpertsInfo(*parts, (), sum(one.nbytes for one in parts) + biases)


@pytest.mark.parametrize("qtype", [QuantType.MXFP4, QuantType.Q8_0, QuantType.BF16, QuantType.F16, OwnType.F8_E4M3])
def test_bytes_are_those_of_the_file_and_of_biases(qtype: WeightType) -> None:
    """Of these types none grows when it is repacked."""
    info = experts(qtype, qtype, qtype, biases=4 * E * (2 * INNER + H))
    assert gpu_experts_nbytes("x", info) == info.nbytes
    assert can_be_copied(qtype)


@pytest.mark.parametrize("qtype", [QuantType.IQ2_XXS, QuantType.IQ3_S, QuantType.IQ1_M])
def test_types_with_a_grid_rest_as_the_cpu_has_them(qtype: WeightType) -> None:
    """A head of 32 bytes for 16 rows and 256 columns, made full to 64."""
    info = experts(qtype, qtype, qtype, hidden=512, inner=256)
    per_row = {QuantType.IQ2_XXS: 66, QuantType.IQ3_S: 110, QuantType.IQ1_M: 58}[QuantType(int(qtype))]
    assert gpu_experts_nbytes("x", info) == E * (3 * 256 * 2 * per_row + 512 // 16 * 32)
    assert can_be_copied(qtype)


@pytest.mark.parametrize("qtype", [QuantType.Q2_K, QuantType.IQ4_XS, QuantType.NVFP4, *GroupType])
def test_bytes_of_types_in_tiles(qtype: WeightType) -> None:
    """Those of the CPU's tiles of 16 rows: at most 4 % more than in the file."""
    info = experts(qtype, qtype, qtype, hidden=256, inner=256)
    assert gpu_experts_nbytes("x", info) == E * 3 * packed_nbytes(qtype, 256, 256) <= 1.04 * info.nbytes
    assert can_be_copied(qtype)


@pytest.mark.parametrize("qtype", [QuantType.F32])
def test_types_that_no_kernel_reads(qtype: WeightType) -> None:
    info = experts(qtype, qtype, qtype, hidden=256, inner=256)
    with pytest.raises(UnsupportedError, match=f"of type {qtype.name}.*--cpu_quant"):
        gpu_experts_nbytes("x", info)
    assert not can_be_copied(qtype)


def test_widths_and_mixtures_that_no_kernel_reads() -> None:
    fp8, bf16, q8 = OwnType.F8_E4M3, QuantType.BF16, QuantType.Q8_0
    with pytest.raises(UnsupportedError, match="100 columns"):
        gpu_experts_nbytes("x", experts(fp8, fp8, fp8, hidden=100))
    with pytest.raises(UnsupportedError, match="both or neither"):
        gpu_experts_nbytes("x", experts(bf16, q8, q8))
    assert gpu_experts_nbytes("x", experts(q8, QuantType.MXFP4, bf16)) > 0


def test_which_experts_run_on_a_gpu() -> None:
    with_bias = ExpertsLayout(E, H, INNER, has_bias=True)
    for kind in Activation:
        assert why_not_on_gpu(with_bias, ActivationSpec(kind)) is None
    assert why_not_on_gpu(with_bias, None) == "no kernel computes their activation"
    assert why_not_on_gpu(ExpertsLayout(E, H, INNER, has_gate=False), ActivationSpec()) == "they have no gate"
