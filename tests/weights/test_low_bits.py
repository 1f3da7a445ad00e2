"""Safetensors of few bits as their libraries write them: every weight, its type and its bytes, bit for bit.

Oracles: compressed-tensors itself, transformers' decoder of gpt-oss, else the published formula, written out here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf.quants
import pytest
import safetensors.torch
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ktransformers.errors import TensorMismatchError, UnsupportedError
from ktransformers.kernels.types import GroupType, RawTensor, row_bytes
from ktransformers.kernels.types import QuantType as T
from ktransformers.models.facts import ModelFacts
from ktransformers.weights.conversion.checkpoint_names import Origin
from ktransformers.weights.safetensors.file import open_safetensors
from ktransformers.weights.safetensors.source import SafetensorsSource
from ktransformers.weights.source import ExpertsLayout
from tests.support.models.group_blocks import dequantized
from tests.support.models.tiny_models import tiny_model

ROWS, COLS = 40, 256
NAME = "model.layers.0.self_attn.q_proj"
State = dict[str, torch.Tensor]


def values_of(raw: RawTensor) -> torch.Tensor:
    if isinstance(raw.qtype, GroupType):
        return dequantized(raw)
    rows = raw.data.numpy().reshape(raw.rows, -1)
    return torch.from_numpy(gguf.quants.dequantize(rows, raw.qtype).copy()).reshape(raw.shape)


def source_of(
    folder: Path, stored: State, config: dict[str, object] | None, model_type: str = "llama"
) -> SafetensorsSource:
    safetensors.torch.save_file(
        {name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors"
    )
    model_config = tiny_model(model_type).config
    if config is not None:
        model_config.quantization_config = config
    return SafetensorsSource(open_safetensors(folder), ModelFacts.of(model_config))


def check_linear(source: SafetensorsSource, wanted: torch.Tensor, resident: str, used: set[str]) -> RawTensor:
    """The matrix NAME is `wanted` in every way of reading it, of the type `resident`, made of `used` and no more."""
    name = f"{NAME}.weight"
    info = source.find(name)
    assert info is not None
    qtype = GroupType[resident] if resident in GroupType.__members__ else T[resident]
    assert (info.resident_type, info.shape, set(info.stored_names)) == (qtype, tuple(wanted.shape), used)
    raw = source.tensor(name)
    assert (raw.qtype, raw.shape, raw.nbytes) == (qtype, info.shape, info.nbytes)
    assert info.nbytes == wanted.shape[0] * row_bytes(qtype, wanted.shape[1])
    assert torch.equal(values_of(raw), wanted)
    if qtype is not T.F16:  # which rounds
        assert torch.equal(source.dense(name), wanted)
    assert {one for one in source.stored_names() if one not in used and not source.ignorable(one)} == set()
    return raw


# -- compressed-tensors

_FORMATS = {
    "pack-quantized": {"num_bits": 4, "type": "int"},
    "int-quantized": {"num_bits": 8, "type": "int"},
    "float-quantized": {"num_bits": 8, "type": "float"},
}


def compressed(weight: torch.Tensor, kind: str, dtype: torch.dtype, **options: object) -> tuple[State, torch.Tensor]:
    """What the library stores of a weight, and what it reads from that, in fp32."""
    args = QuantizationArgs(**{**_FORMATS[kind], **options})
    wide, columns = weight.to(dtype), weight.shape[1]
    if args.strategy == "tensor":
        low, high = wide.min().view(1), wide.max().view(1)
    elif args.strategy == "block":
        rows, cols = args.block_structure
        blocks = wide.unfold(0, rows, rows).unfold(1, cols, cols).flatten(2)
        low, high = blocks.amin(2), blocks.amax(2)
    else:
        grouped = wide.view(weight.shape[0], -1, args.group_size or columns)
        low, high = grouped.amin(2), grouped.amax(2)
    scale, zero = calculate_qparams(low, high, args)
    state = {"weight": wide, "weight_scale": scale.to(dtype), "weight_zero_point": zero}
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(kind)
    stored = compressor.compress(dict(state), scheme)
    # Its dequantization rounds to the type of the scales: in fp32 it rounds as often as the kernels.
    exact = {**stored, "weight_scale": stored["weight_scale"].float()}
    return stored, compressor.decompress(exact, scheme)["weight"].float()


CASES = [
    ("pack-quantized", torch.bfloat16, {"strategy": "group", "group_size": 32}, "I4_32_BF16"),  # Kimi-K2.5
    ("pack-quantized", torch.float16, {"strategy": "group", "group_size": 32}, "Q4_0"),
    ("pack-quantized", torch.float16, {"strategy": "group", "group_size": 128}, "Q4_0"),
    ("pack-quantized", torch.bfloat16, {"strategy": "group", "group_size": 128}, "I4_128_BF16"),
    ("pack-quantized", torch.float32, {"strategy": "channel"}, "I4_128_F32"),
    ("pack-quantized", torch.bfloat16, {"strategy": "group", "group_size": 32, "symmetric": False}, "I4_32_BF16_Z"),
    ("pack-quantized", torch.float16, {"strategy": "channel", "symmetric": False}, "I4_128_F16_Z"),
    ("pack-quantized", torch.bfloat16, {"num_bits": 8, "strategy": "group", "group_size": 128}, "I8_128_BF16"),
    ("pack-quantized", torch.float16, {"num_bits": 8, "strategy": "group", "group_size": 32}, "Q8_0"),
    ("pack-quantized", torch.float32, {"num_bits": 8, "strategy": "channel", "symmetric": False}, "I8_128_F32_Z"),
    ("pack-quantized", torch.bfloat16, {"strategy": "group", "group_size": 16}, "F32"),
    ("int-quantized", torch.bfloat16, {"strategy": "channel"}, "I8_128_BF16"),
    ("int-quantized", torch.float16, {"strategy": "channel"}, "Q8_0"),
    ("int-quantized", torch.float32, {"strategy": "channel", "symmetric": False}, "I8_128_F32_Z"),
    ("int-quantized", torch.float32, {"strategy": "tensor"}, "I8_128_F32"),
    ("float-quantized", torch.bfloat16, {"strategy": "channel"}, "F8_128_BF16"),
    ("float-quantized", torch.float32, {"strategy": "channel"}, "F8_128_F32"),
    ("float-quantized", torch.float32, {"strategy": "group", "group_size": 128}, "F8_128_F32"),
    ("float-quantized", torch.bfloat16, {"strategy": "group", "group_size": 32}, "F8_32_BF16"),
]


@pytest.mark.parametrize(("kind", "dtype", "options", "resident"), CASES)
def test_compressed_tensors(
    kind: str, dtype: torch.dtype, options: dict[str, object], resident: str, tmp_path: Path
) -> None:
    weight = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(0)) * 0.05
    stored, wanted = compressed(weight, kind, dtype, **options)
    stored = {f"{NAME}.{name}": tensor for name, tensor in stored.items()}
    config: dict[str, object] = {"quant_method": "compressed-tensors", "format": kind}
    if options.get("group_size") == 32:  # the other half of the cases finds out from the files
        config["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": {**_FORMATS[kind], **options}}}
    check_linear(source_of(tmp_path, stored, config), wanted, resident, set(stored))


@pytest.mark.parametrize(
    ("dtype", "resident"), [(torch.float16, T.F16), (torch.bfloat16, T.BF16), (torch.float32, T.F32)]
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_whose_groups_are_in_any_order(
    dtype: torch.dtype, resident: T, symmetric: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """actorder: the library quantizes columns in another order; codes lie in the model's, g_idx says the groups."""
    generator = torch.Generator().manual_seed(2)
    weight, order = torch.randn(ROWS, COLS, generator=generator) * 0.05, torch.randperm(COLS, generator=generator)
    options = {"strategy": "group", "group_size": 32, "symmetric": symmetric}
    stored, in_order = compressed(weight[:, order], "pack-quantized", dtype, **options)
    back = order.argsort()
    codes = unpack_from_int32(stored["weight_packed"], 4, torch.Size((ROWS, COLS)))[:, back]
    stored["weight_packed"] = pack_to_int32(codes.contiguous(), 4)
    stored["weight_g_idx"] = (torch.arange(COLS) // 32)[back].int()
    stored = {f"{NAME}.{name}": tensor for name, tensor in stored.items()}
    source = source_of(tmp_path, stored, {"quant_method": "compressed-tensors", "format": "pack-quantized"})
    assert "1 of 1 matrices of few bits are held in floats" in caplog.text
    wanted = in_order[:, back].to(dtype).float()  # which the library multiplies with
    found = source.find(f"{NAME}.weight")
    assert found is not None
    assert (found.resident_type, set(found.stored_names)) == (resident, set(stored))
    assert torch.equal(values_of(source.tensor(f"{NAME}.weight")), wanted)


def test_an_index_that_was_not_filled_in(tmp_path: Path) -> None:
    """All of it -1, as some writers leave it: columns are in order."""
    weight = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(2)) * 0.05
    stored, wanted = compressed(weight, "pack-quantized", torch.bfloat16, strategy="group", group_size=32)
    stored["weight_g_idx"] = torch.full((COLS,), -1).int()
    stored = {f"{NAME}.{name}": tensor for name, tensor in stored.items()}
    source = source_of(tmp_path, stored, {"quant_method": "compressed-tensors"})
    check_linear(source, wanted, "I4_32_BF16", set(stored))


def test_compressed_tensors_of_several_groups(tmp_path: Path) -> None:
    """Experts of 4 bits, attention in FP8 by blocks, and what is ignored: each as it is stored."""
    generator = torch.Generator().manual_seed(1)
    key, layout = "model.layers.0.mlp.experts", ExpertsLayout(2, 256, 128)
    stored, wanted = State(), State()

    def put(name: str, rows: int, cols: int, kind: str, dtype: torch.dtype, **options: object) -> None:
        weight = torch.randn(rows, cols, generator=generator) * 0.05
        made, wanted[name] = compressed(weight, kind, dtype, **options)
        stored.update({f"{name}.{part}": tensor for part, tensor in made.items()})

    for e in range(2):
        for part, shape in (("gate", (128, 256)), ("up", (128, 256)), ("down", (256, 128))):
            put(f"{key}.{e}.{part}_proj", *shape, "pack-quantized", torch.bfloat16, strategy="group", group_size=32)
    put(NAME, 256, 256, "float-quantized", torch.bfloat16, strategy="block", block_structure=[128, 128])
    stored["lm_head.weight"] = torch.randn(8, 256, generator=generator).bfloat16()
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    config = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "ignore": ["lm_head", "re:.*shared_experts.*"],
        "config_groups": {"group_0": {"targets": ["re:.*attn.*"], "weights": weights}},
    }
    source = source_of(tmp_path, stored, config, "qwen3_moe")
    info, experts = source.find_experts(key, layout), source.experts(key, layout)
    assert info is not None
    kimi = GroupType["I4_32_BF16"]
    assert {part.resident_type for part in (info.gate, info.up, info.down)} == {kimi}
    assert info.up.stored_type == kimi.name
    assert info.nbytes == 3 * 2 * 128 * 256 // 32 * 18  # the bytes of codes and scales in the file
    for part in ("gate", "up", "down"):
        for e, raw in enumerate(getattr(experts, part)):
            assert torch.equal(values_of(raw), wanted[f"{key}.{e}.{part}_proj"])
    found = source.find(f"{NAME}.weight")
    assert found is not None
    assert found.is_fp8
    assert torch.equal(source.dense(f"{NAME}.weight"), wanted[NAME])
    assert torch.equal(source.dense("lm_head.weight"), stored["lm_head.weight"].float())
    used = {*info.stored_names, *found.stored_names, "lm_head.weight"}
    assert used == set(source.stored_names())
    assert "6 I4_32_BF16" in source.describe()


# -- MXFP4 of gpt-oss


def test_gpt_oss(tmp_path: Path) -> None:
    """Every byte of codes under every exponent, against transformers' own decoder."""
    experts, inner, hidden = 2, 96, 128
    generator = torch.Generator().manual_seed(2)
    key = "model.layers.0.mlp.experts"
    stored = {
        f"{key}.{name}_blocks": torch.randint(0, 256, (experts, rows, cols // 32, 16), generator=generator).byte()
        for name, rows, cols in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner))
    }
    for name in ("gate_up_proj", "down_proj"):
        shape = stored[f"{key}.{name}_blocks"].shape[:3]
        stored[f"{key}.{name}_scales"] = torch.randint(100, 150, shape, generator=generator).byte()
    stored[f"{key}.gate_up_proj_bias"] = torch.randn(experts, 2 * inner, generator=generator).bfloat16()
    stored[f"{key}.down_proj_bias"] = torch.randn(experts, hidden, generator=generator).bfloat16()
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    source = source_of(tmp_path, stored, config, "gpt_oss")
    layout = ExpertsLayout(experts, hidden, inner, has_bias=True, is_transposed=True, is_concatenated=False)
    info, weights = source.find_experts(key, layout), source.experts(key, layout)
    assert info is not None
    whole = {
        name: convert_moe_packed_tensors(stored[f"{key}.{name}_blocks"], stored[f"{key}.{name}_scales"]).mT.float()
        for name in ("gate_up_proj", "down_proj")
    }
    wanted = {"gate": whole["gate_up_proj"][:, 0::2], "up": whole["gate_up_proj"][:, 1::2], "down": whole["down_proj"]}
    for part, values in wanted.items():
        assert getattr(info, part).resident_type is T.MXFP4
        assert torch.equal(torch.stack([values_of(raw) for raw in getattr(weights, part)]), values)
    assert torch.equal(weights.up_bias, stored[f"{key}.gate_up_proj_bias"][:, 1::2].float())
    assert (
        info.nbytes
        == sum(t.numel() for name, t in stored.items() if t.dtype == torch.uint8) + 4 * (2 * inner + hidden) * experts
    )
    assert set(info.stored_names) == set(source.stored_names())


# -- formats whose formula is written out here


def _pairs(codes: torch.Tensor) -> torch.Tensor:
    return (codes[:, 0::2] | codes[:, 1::2] << 4).byte()


_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def _e2m1(codes: torch.Tensor) -> torch.Tensor:
    return _E2M1[codes.long() & 7] * torch.where(codes >= 8, -1.0, 1.0)


@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv"])
def test_mxfp8(suffix: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randn(ROWS, COLS, generator=generator).to(torch.float8_e4m3fn)
    exponents = torch.randint(100, 140, (ROWS, COLS // 32), generator=generator).byte()
    stored = {f"{NAME}.weight": codes, f"{NAME}.weight{suffix}": exponents}
    source = source_of(tmp_path, stored, {"quant_method": "mxfp8"})
    scales = torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    raw = check_linear(source, codes.float() * scales, "MXFP8", set(stored))
    assert raw.nbytes == codes.numel() + exponents.numel()


def test_mxfp8_whose_scales_are_called_otherwise(tmp_path: Path) -> None:
    stored = {f"{NAME}.weight": torch.zeros(ROWS, COLS).to(torch.float8_e4m3fn)}
    stored[f"{NAME}.weight_exponents"] = torch.zeros(ROWS, COLS // 32).byte()
    with pytest.raises(TensorMismatchError, match=r"neither '.*weight_scale_inv' nor '.*weight_scale' beside it"):
        source_of(tmp_path, stored, {"quant_method": "mxfp8"})


@pytest.mark.parametrize("library", ["modelopt", "compressed-tensors"])
def test_nvfp4(library: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 16, (ROWS, COLS), generator=generator).byte()
    scales = (torch.rand(ROWS, COLS // 16, generator=generator) * 400).to(torch.float8_e4m3fn)
    number = torch.tensor(0.5**11)  # of which the inverse is exact
    parts = {"weight": _pairs(codes), "weight_scale": scales, "weight_scale_2": number, "input_scale": torch.ones(())}
    if library == "compressed-tensors":
        parts = {"weight_packed": _pairs(codes), "weight_scale": scales, "weight_global_scale": (1 / number).view(1)}
        parts["input_global_scale"] = torch.ones(1)
    stored = {f"{NAME}.{name}": tensor for name, tensor in parts.items()}
    source = source_of(
        tmp_path, stored, {"quant_method": library, "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}
    )
    wanted = _e2m1(codes) * (scales.float() * number).repeat_interleave(16, 1)
    check_linear(source, wanted, "NVFP4_F32", {name for name in stored if "input" not in name})


def test_mxfp4_of_compressed_tensors(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 16, (ROWS, COLS), generator=generator).byte()
    exponents = torch.randint(100, 140, (ROWS, COLS // 32), generator=generator).byte()
    stored = {f"{NAME}.weight_packed": _pairs(codes), f"{NAME}.weight_scale": exponents}
    source = source_of(tmp_path, stored, {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"})
    scales = torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    check_linear(source, _e2m1(codes) * scales, "MXFP4", set(stored))


@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8", "modelopt"])
def test_fp8_with_one_scale_or_one_per_row(method: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(6)
    codes = torch.randn(ROWS, COLS, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(ROWS, 1, generator=generator) if method == "fbgemm_fp8" else torch.tensor(0.3)
    stored = {f"{NAME}.weight": codes, f"{NAME}.weight_scale": scale, f"{NAME}.input_scale": torch.ones(())}
    if method == "fbgemm_fp8":
        del stored[f"{NAME}.input_scale"]
        stored[f"{NAME}.input_scale_ub"] = torch.tensor([1200.0])
    source = source_of(tmp_path, stored, {"quant_method": method, "modules_to_not_convert": ["lm_head"]})
    wanted, used = codes.float() * scale, {f"{NAME}.weight", f"{NAME}.weight_scale"}
    if method == "fbgemm_fp8":
        check_linear(source, wanted, "F8_128_F32", used)
        return
    info = source.find(f"{NAME}.weight")
    assert info is not None
    assert info.is_fp8
    assert torch.equal(source.dense(f"{NAME}.weight"), wanted)
    assert set(info.stored_names) == used


# -- GPTQ and AWQ


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[n, columns] -> int32 [n, columns * bits / 32], the first in the lowest bits."""
    per_word = 32 // bits
    shifts = torch.arange(0, 32, bits)
    wide = (codes.long().view(codes.shape[0], -1, per_word) << shifts).sum(-1)
    return torch.where(wide >= 1 << 31, wide - (1 << 32), wide).int()


GPTQ = [
    (4, 128, True, False, "gptq", "Q4_0"),
    (8, 128, True, False, "gptq", "Q8_0"),
    (4, 32, False, False, "gptq", "I4_32_F16_Z"),
    (4, 128, False, False, "gptq_v2", "I4_128_F16_Z"),
    (8, 128, False, False, "gptq", "I8_128_F16_Z"),
    (4, 64, True, True, "gptq", "F16"),
    (8, 128, False, True, "gptq_v2", "F16"),
]


@pytest.mark.parametrize(("bits", "group", "is_symmetric", "is_shuffled", "version", "resident"), GPTQ)
def test_gptq(
    bits: int,
    group: int,
    is_symmetric: bool,
    is_shuffled: bool,
    version: str,
    resident: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    generator = torch.Generator().manual_seed(7)
    top, half = 1 << bits, 1 << (bits - 1)
    codes = torch.randint(0, top, (COLS, ROWS), generator=generator)  # transposed, as the library has them
    scales = (torch.rand(COLS // group, ROWS, generator=generator) * 0.01).half()
    zeros = torch.full(scales.shape, half)
    if not is_symmetric:  # the first version stores one less
        zeros = torch.randint(1 if version == "gptq" else 0, top, scales.shape, generator=generator)
    index = torch.arange(COLS) // group
    if is_shuffled:
        index = index[torch.randperm(COLS, generator=generator)]
    stored = {
        "qweight": _words(codes.T.contiguous(), bits).T,
        "qzeros": _words(zeros - int(version == "gptq"), bits),
        "scales": scales,
        "g_idx": index.int(),
    }
    stored = {f"{NAME}.{name}": tensor for name, tensor in stored.items()}
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": is_symmetric}
    config |= {"desc_act": is_shuffled, "checkpoint_format": version}
    if not is_symmetric:  # as where the config has an exception for this module
        config["bits"] = 12 - bits
    source = source_of(tmp_path, stored, config)
    assert ("1 of 1 matrices of few bits are held in floats" in caplog.text) == is_shuffled
    wanted = (scales.float()[index] * (codes - zeros[index]).float()).T
    if is_shuffled:  # the product that the library multiplies with is of the type of its scales
        wanted = wanted.half().float()
        assert torch.equal((scales[index] * (codes - zeros[index]).half()).T.float(), wanted)
    check_linear(source, wanted, resident, set(stored))


def test_an_index_that_leads_nowhere(tmp_path: Path) -> None:
    parts = {"qweight": torch.zeros(COLS // 8, ROWS).int(), "scales": torch.ones(2, ROWS).half()}
    parts["g_idx"] = torch.arange(COLS).flip(0).int()
    stored = {f"{NAME}.{name}": tensor for name, tensor in parts.items()}
    source = source_of(tmp_path, stored, {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True})
    with pytest.raises(TensorMismatchError, match="below 2 for each of 256"):
        source.tensor(f"{NAME}.weight")


def test_gptq_that_says_sym_and_is_not(tmp_path: Path) -> None:
    zeros = _words(torch.full((2, ROWS), 6), 4)
    parts = {"qweight": torch.zeros(COLS // 8, ROWS).int(), "qzeros": zeros, "scales": torch.ones(2, ROWS).half()}
    stored = {f"{NAME}.{name}": tensor for name, tensor in parts.items()}
    source = source_of(tmp_path, stored, {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True})
    with pytest.raises(TensorMismatchError, match="zero points"):
        source.tensor(f"{NAME}.weight")


def test_awq(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(8)
    codes = torch.randint(0, 16, (COLS, ROWS), generator=generator)
    scales = (torch.rand(COLS // 128, ROWS, generator=generator) * 0.01).half()
    zeros = torch.randint(0, 16, scales.shape, generator=generator)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # AutoAWQ's order_map: what is in each nibble of a word

    def packed(values: torch.Tensor) -> torch.Tensor:
        return _words(values.view(values.shape[0], -1, 8)[..., order].flatten(1), 4)

    parts = {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales}
    stored = {f"{NAME}.{name}": tensor for name, tensor in parts.items()}
    config = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    source = source_of(tmp_path, stored, config)
    index = torch.arange(COLS) // 128
    check_linear(source, (scales.float()[index] * (codes - zeros[index]).float()).T, "I4_128_F16_Z", set(stored))


@pytest.mark.parametrize(("group", "resident"), [(128, "I4_128_F16_Z"), (32, "I4_32_F16_Z"), (-1, "I4_128_F16_Z")])
def test_awq_packed_for_gemv(group: int, resident: str, tmp_path: Path) -> None:
    """Rows of words in order; scales and zero points fill whole words, so there are more than groups."""
    generator = torch.Generator().manual_seed(8)
    size = group if group > 0 else COLS
    groups, stored_groups = COLS // size, max(8, {32: 32}.get(size, 8))
    codes = torch.randint(0, 16, (ROWS, COLS), generator=generator)
    scales, zeros = torch.zeros(ROWS, stored_groups).half(), torch.zeros(ROWS, stored_groups).long()
    scales[:, :groups] = (torch.rand(ROWS, groups, generator=generator) * 0.01).half()
    zeros[:, :groups] = torch.randint(0, 16, (ROWS, groups), generator=generator)
    stored = {f"{NAME}.qweight": _words(codes, 4), f"{NAME}.qzeros": _words(zeros, 4), f"{NAME}.scales": scales}
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemv"}
    index = torch.arange(COLS) // size
    wanted = scales.float()[:, index] * (codes - zeros[:, index]).float()
    check_linear(source_of(tmp_path, stored, config), wanted, resident, set(stored))
    stored[f"{NAME}.scales"] = scales[:, :-1]
    (tmp_path / "bad").mkdir()
    with pytest.raises(TensorMismatchError, match=f"for {groups} groups"):
        source_of(tmp_path / "bad", stored, config)


def test_a_part_of_a_matrix_is_held_in_f32(tmp_path: Path) -> None:
    weight = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(9)) * 0.05
    made, wanted = compressed(weight, "pack-quantized", torch.bfloat16, strategy="group", group_size=32)
    stored = {f"{NAME}.{name}": tensor for name, tensor in made.items()}
    source = source_of(tmp_path, stored, {"quant_method": "compressed-tensors"})
    source._names.converted["a.weight"] = Origin(("Chunk",), (f"{NAME}.weight",), 1, 2, (0,))
    info = source.find("a.weight")
    assert info is not None
    assert (info.resident_type, info.shape, info.nbytes) == (T.F32, (ROWS // 2, COLS), ROWS // 2 * COLS * 4)
    assert torch.equal(values_of(source.tensor("a.weight")), wanted[ROWS // 2 :])
    assert set(info.stored_names) == set(stored)


# -- what is refused


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"quant_method": "quip"}, "'quip' are not supported"),
    ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": {}}}}, "rotates activations"),
    ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "marlin.*checkpoint_format is gptq"),
    ({"quant_method": "awq", "version": "gemv_fast"}, "gemv_fast.*version is gemm"),
    ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "W4A16_AWQ scales activations"),
]


@pytest.mark.parametrize(("config", "what"), REFUSED)
def test_what_is_refused_says_what_to_do(config: dict[str, object], what: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=f"{what}.*use the model's BF16 or FP8 safetensors, or a GGUF of it"):
        source_of(tmp_path, {"a.weight": torch.ones(2, 2)}, config)


def _changed(name: str, change: Callable[[torch.Tensor], torch.Tensor] | None) -> Callable[[State], None]:
    def change_it(stored: State) -> None:
        key = f"{NAME}.{name}"
        if change is None:
            del stored[key]
        else:
            stored[key] = change(stored[key])

    return change_it


@pytest.mark.parametrize(
    ("damage", "error", "what"),
    [
        (_changed("weight_scale", None), TensorMismatchError, "weight_scale' beside it"),
        (_changed("weight_shape", lambda t: t + 1), TensorMismatchError, r"weight_shape' says \[41, 257\]"),
        (_changed("weight_packed", lambda t: t[None]), TensorMismatchError, "has codes"),
        (_changed("weight_scale", lambda t: t[:, :3]), TensorMismatchError, "3 groups of scales for 256 columns"),
        (_changed("weight_packed", lambda t: t[:, :24]), UnsupportedError, "neither 4 nor 8 bits"),
        (_changed("weight_scale", lambda t: t.long()), UnsupportedError, "I64"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    damage: Callable[[State], None], error: type[Exception], what: str, tmp_path: Path
) -> None:
    weight = torch.randn(ROWS, COLS)
    made, _ = compressed(weight, "pack-quantized", torch.bfloat16, strategy="group", group_size=32)
    stored = {f"{NAME}.{name}": tensor for name, tensor in made.items()}
    damage(stored)
    with pytest.raises(error, match=what):
        source_of(tmp_path, stored, {"quant_method": "compressed-tensors"})
