"""Packing the experts of models of every kind of file: the bytes that they have in memory, and what computes with them.

Oracles: what loading a layer gives; products with the blocks as the file has them; the `gguf` package.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from ktransformers.cli import main
from ktransformers.config import EngineConfig
from ktransformers.convert import pack_model as module
from ktransformers.convert.pack_model import check_packed
from ktransformers.errors import ConfigError, FormatError, UnsupportedError, WeightError
from ktransformers.kernels.cpu import MoeKernel, WorkerPool
from ktransformers.kernels.types import ActivationSpec, ExpertWeights, QuantType, RawTensor
from ktransformers.operators.linear.packed import experts_record
from ktransformers.weights.stored_experts.header import SourceIdentity, read_header
from ktransformers.weights.stored_experts.mapped import mapped_extents
from ktransformers.weights.stored_experts.places import place_beside
from ktransformers.weights.stored_experts.reading import StoredExperts
from ktransformers.weights.stored_experts.records import parts_of
from tests.support.checks.decoding import decoded
from tests.support.checks.packed_experts import in_ram, opened_experts, packed, read, stored_parts
from tests.support.gguf.converting import NoBar
from tests.support.gguf.writer import write_gguf
from tests.support.models import few_bits, fp8_models
from tests.support.models.demo import DEMO_CHECKPOINT, DEMO_GGUF
from tests.support.models.tiny_models import tiny_model, write_safetensors

Make = Callable[[Path], EngineConfig]


def _gguf(qtype: QuantType, model_type: str = "qwen3_moe", experts: str = "merged", shards: int = 0) -> Make:
    def make(folder: Path) -> EngineConfig:
        model = tiny_model(model_type, hidden=256, layers=1)
        path = write_gguf(model, folder / "m.gguf", qtype, experts=experts, shard_max_tensors=shards)
        return EngineConfig(gguf_path=path)

    return make


def _demo(folder: Path) -> EngineConfig:
    return EngineConfig(gguf_path=DEMO_GGUF)


def _bf16(cpu_quant: str | None = None, cpu_bf16: str = "bf16") -> Make:
    return lambda folder: EngineConfig(model_path=DEMO_CHECKPOINT, cpu_quant=cpu_quant, cpu_bf16=cpu_bf16)


def _floats(model_type: str) -> Make:
    def make(folder: Path) -> EngineConfig:
        return EngineConfig(model_path=write_safetensors(tiny_model(model_type, hidden=256, layers=1), folder / "m"))

    return make


def _fp8(cpu_quant: str | None = None) -> Make:
    def make(folder: Path) -> EngineConfig:
        fp8_models.write_both("qwen3_moe", folder / "fp8", folder / "bf16", layers=1)
        return EngineConfig(model_path=folder / "fp8", cpu_quant=cpu_quant)

    return make


def _few(kind: few_bits.Make, config: dict[str, object]) -> Make:
    def make(folder: Path) -> EngineConfig:
        parts = {f"experts.{e}.{part}_proj.weight": kind for e in range(8) for part in ("gate", "up", "down")}
        config["ignore"] = ["lm_head"]
        few_bits.write_both("qwen3_moe", folder / "few", folder / "wide", config, parts, layers=1)
        return EngineConfig(model_path=folder / "few")

    return make


def _gpt_oss(folder: Path) -> EngineConfig:
    parts: dict[str, few_bits.Make] = dict.fromkeys(("experts.gate_up_proj", "experts.down_proj"), few_bits.mxfp4)
    config: dict[str, object] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    few_bits.write_both("gpt_oss", folder / "few", folder / "wide", config, parts, layers=1)
    return EngineConfig(model_path=folder / "few")


_INT4: dict[str, object] = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
_NVFP4: dict[str, object] = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}

KINDS: dict[str, tuple[Make, bool]] = {
    "bundled": (_demo, True),
    "gguf of F16": (_gguf(QuantType.F16), True),
    "gguf of F32, one tensor an expert": (_gguf(QuantType.F32, experts="single"), True),
    "gguf of Q8_0, gate and up together": (_gguf(QuantType.Q8_0, experts="gate_up"), True),
    "gguf of IQ3_S in shards": (_gguf(QuantType.IQ3_S, shards=8), True),
    "gguf of IQ4_KS": (_gguf(QuantType.IQ4_KS), True),
    "gguf of MXFP4 with biases": (_gguf(QuantType.MXFP4, "gpt_oss"), True),
    "bf16": (_bf16(), True),
    "bf16 times fp32": (_bf16(cpu_bf16="fp32"), True),
    "bf16 made q4_k": (_bf16("q4_k"), False),
    "fused": (_floats("granitemoe"), True),
    "fused and transposed": (_floats("gpt_oss"), False),
    "fp8": (_fp8(), False),
    "fp8 made q8_0": (_fp8("q8_0"), False),
    "int4": (_few(few_bits.int4, _INT4), False),
    "nvfp4": (_few(few_bits.nvfp4, _NVFP4), False),
    "gpt-oss": (_gpt_oss, False),
}
"""How each is made, and whether its own files can be read in the place of a packed one."""


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_comes_back(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes as in memory, whatever pieces they are packed in."""
    monkeypatch.setattr(module, "_PIECE", 3 << 18)
    make, is_mapped = KINDS[kind]
    config, out = make(tmp_path), tmp_path / "out.kt"
    done = packed(config, out)
    opened, operators = opened_experts(config)
    stored = StoredExperts.open(out, SourceIdentity.of(opened.source, opened.files))
    assert done.num_layers == len(operators) == len(stored.header.layers)
    assert done.nbytes == out.stat().st_size
    for key, operator in operators.items():
        info = opened.source.find_experts(key, operator.layout, operator.config.cpu_quant)
        assert info is not None
        found = stored.layer(key, experts_record(info, operator.products))
        assert found is not None
        parts, wanted = stored_parts(stored.files, *found), in_ram(opened, operator)
        for name, matrices in (("gate", wanted.gate), ("up", wanted.up), ("down", wanted.down)):
            assert matrices is not None
            for got, want in zip(parts[name], matrices, strict=True):
                assert type(got) is type(want)
                assert (got.qtype, got.shape) == (want.qtype, want.shape)
                assert torch.equal(got.data, want.data)
        mapped = opened.source.mapped_experts(key, operator.layout, operator.config.cpu_quant)
        for name in ("gate", "up", "down"):
            bias = getattr(mapped.biases, name)
            assert (bias is None) == (not operator.layout.has_bias)
            assert bias is None or torch.equal(bias, getattr(wanted, f"{name}_bias"))
        assert (mapped.why_not is None) == is_mapped, mapped.why_not
    check_packed(config, out, lambda name, total: NoBar())


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", [kind for kind, (_, is_mapped) in KINDS.items() if is_mapped])
def test_experts_lie_in_the_models_own_files(kind: str, tmp_path: Path) -> None:
    """Their bytes there, dequantized by `gguf`, are the numbers of the model; multiplied, what packed ones give."""
    config = KINDS[kind][0](tmp_path)
    opened, operators = opened_experts(config)
    packed(config, tmp_path / "out.kt")
    stored = StoredExperts.open(tmp_path / "out.kt", None)
    key, operator = next(iter(operators.items()))
    experts = opened.source.mapped_experts(key, operator.layout)
    extents = mapped_extents(experts, opened.files)
    assert experts.up is not None
    assert len(extents) == operator.num_experts
    layer = stored.layer(key)
    assert layer is not None
    raw: dict[str, list[RawTensor]] = {name: [] for name in parts_of(layer[0])}
    for expert in extents:
        for extent, (name, part) in zip(expert, parts_of(layer[0]).items(), strict=True):
            data = torch.frombuffer(bytearray(read(opened.files, extent)), dtype=torch.uint8)
            raw[name].append(RawTensor(data, QuantType(part.qtype), (part.rows, part.cols)))
    for name, matrices in raw.items():
        whole = opened.source.experts(key, operator.layout)
        for matrix, wanted in zip(matrices, getattr(whole, name), strict=True):
            rows = (matrix.data.view(matrix.rows, -1).numpy(), wanted.data.view(matrix.rows, -1).numpy())
            assert (decoded(rows[0], matrix.qtype) == decoded(rows[1], matrix.qtype)).all()
    if raw["up"][0].qtype is QuantType.BF16:
        return  # packed ones are multiplied in bf16
    parts = stored_parts(stored.files, *layer)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, operator.layout.hidden_size, generator=generator)
    ids = torch.randint(0, operator.num_experts, (5, 2), generator=generator)
    with closing(WorkerPool(2)) as pool:
        results = [
            MoeKernel(ExpertWeights(w["gate"], w["up"], w["down"]), ActivationSpec(), pool).forward(
                x, ids, torch.full((5, 2), 0.5)
            )
            for w in (raw, parts)
        ]
    assert torch.equal(*results)


def test_numbers_of_a_file_are_those_of_the_model(tmp_path: Path) -> None:
    """From the weights of transformers to a record of a packed file, by `gguf` alone."""
    model = tiny_model("qwen3_moe", hidden=256, layers=1)
    config = EngineConfig(gguf_path=write_gguf(model, tmp_path / "m.gguf", QuantType.F16))
    packed(config)
    stored = StoredExperts.open(tmp_path / "m.experts.kt", None)
    found = stored.layer("model.layers.0.mlp.experts")
    assert found is not None
    fused = model.model.layers[0].mlp.experts
    inner = fused.down_proj.shape[2]
    wanted = {"gate": fused.gate_up_proj[:, :inner], "up": fused.gate_up_proj[:, inner:], "down": fused.down_proj}
    for name, matrices in stored_parts(stored.files, *found).items():
        for matrix, values in zip(matrices, wanted[name], strict=True):
            got = decoded(matrix.data.view(matrix.shape[0], -1).numpy(), QuantType.F16)
            assert torch.equal(torch.from_numpy(got), values.half().float())


def test_what_has_to_be_converted_names_the_command(tmp_path: Path) -> None:
    config = KINDS["nvfp4"][0](tmp_path)
    opened, operators = opened_experts(config)
    key, operator = next(iter(operators.items()))
    experts = opened.source.mapped_experts(key, operator.layout)
    with pytest.raises(UnsupportedError, match=r"gate is stored as .*; pack the model first: ktransformers pack MODEL"):
        mapped_extents(experts, opened.files)


def test_places() -> None:
    for files, wanted in (
        (["/m/a-Q4_K_M.gguf"], "/m/a-Q4_K_M.experts.kt"),
        (["/m/b-00001-of-00012.gguf", "/m/b-00002-of-00012.gguf"], "/m/b.experts.kt"),
        (["/m/model-00001-of-00002.safetensors", "/m/model-00002-of-00002.safetensors"], "/m/model.experts.kt"),
    ):
        assert place_beside([Path(file) for file in files]) == Path(wanted)


# What is refused.


def test_a_file_of_other_flags_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.kt"
    packed(_bf16("q4_k")(tmp_path), out)
    for other in (_bf16(), _bf16("q8_0")):
        with pytest.raises(ConfigError, match=r"gate Q4_K 256 x 256 tiles.*packed with --cpu_quant q4_k, --cpu_bf16"):
            check_packed(other(tmp_path), out, lambda name, total: NoBar())


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    """Of another shape, and of the same shape with other numbers, whose headers are equal."""
    configs = []
    for name, values in (("a", {}), ("b", {"seed": 1}), ("c", {"num_experts": 4})):
        model = tiny_model("qwen3_moe", hidden=256, layers=1, **values)
        configs.append(EngineConfig(gguf_path=write_gguf(model, tmp_path / f"{name}.gguf", QuantType.Q8_0)))
    out = tmp_path / "out.kt"
    packed(configs[0], out)
    for config, why in zip(configs[1:], ("the same tensors with other numbers", "their tensors differ"), strict=True):
        with pytest.raises(ConfigError, match=rf"holds the experts of another model \(a.gguf\): .*{why}; pack this"):
            check_packed(config, out, lambda name, total: NoBar())
    renamed = tmp_path / "renamed.gguf"
    (tmp_path / "a.gguf").rename(renamed)
    check_packed(EngineConfig(gguf_path=renamed), out, lambda name, total: NoBar())


def test_a_model_that_changes_while_it_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _gguf(QuantType.Q8_0)(tmp_path)
    whole = module._pieces

    def change(*given: object) -> object:
        yield from whole(*given)  # type: ignore[arg-type]
        os.utime(config.gguf_path or "", ns=(0, 0))

    monkeypatch.setattr(module, "_pieces", change)
    with pytest.raises(WeightError, match=r"the model was changed while it was packed; pack it again"):
        packed(config)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_model_that_is_cut_off_while_it_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _gguf(QuantType.Q8_0)(tmp_path)
    whole = module.pack_experts

    def cut(*given: object, **more: object) -> object:
        os.truncate(config.gguf_path or "", 4096)
        return whole(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "pack_experts", cut)
    with pytest.raises(WeightError, match="was changed while it was packed"):
        packed(config)
    assert not (tmp_path / "m.experts.kt").exists()


def test_what_cannot_be_packed(tmp_path: Path) -> None:
    dense = EngineConfig(model_path=write_safetensors(tiny_model("llama"), tmp_path / "dense"))
    with pytest.raises(UnsupportedError, match="llama has no routed experts"):
        packed(dense)
    config = _gguf(QuantType.Q8_0)(tmp_path)
    assert config.gguf_path is not None
    with pytest.raises(ConfigError, match="is the model itself"):
        packed(config, config.gguf_path, force=True)
    with pytest.raises(ConfigError, match="is a folder; name the file"):
        packed(config, tmp_path)
    with pytest.raises(ConfigError, match="is no folder; make it first"):
        packed(config, tmp_path / "none" / "out.kt")


# The command.


def test_the_command_packs_the_bundled_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out.kt")
    assert main(["pack", "--output", out]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{out}\n"
    assert "64 experts in 4 layers (Q4_K" in shown.err
    assert main(["pack", "--output", out]) == 2
    assert "exists; --check looks whether it is whole, --force writes it again" in capsys.readouterr().err
    assert main(["pack", "--output", out, "--force"]) == 0
    for words in (["pack", "--check", "--output", out], ["pack", out, "--check"]):
        capsys.readouterr()
        assert main(words) == 0
        assert "whole" in capsys.readouterr().err
    data = bytearray(Path(out).read_bytes())
    data[-5000] ^= 1
    Path(out).write_bytes(data)
    assert main(["pack", out, "--check"]) != 0
    assert "is damaged: expert 15 of model.layers.3.mlp.experts;" in capsys.readouterr().err


def test_flags_that_mean_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", "--check", "--force"]) == 2
    assert "leave one out" in capsys.readouterr().err
    assert main(["pack", "--check", "--output", str(tmp_path / "none.kt")]) == 2
    assert "is not there; `ktransformers pack MODEL` writes it" in capsys.readouterr().err
    out = tmp_path / "out.kt"
    packed(_demo(tmp_path), out)
    assert main(["pack", str(out)]) == 2
    assert "is packed already; name its model" in capsys.readouterr().err


def test_a_damaged_file_is_no_reason_to_stop_packing(tmp_path: Path) -> None:
    """--force writes over whatever is there."""
    out = tmp_path / "out.kt"
    out.write_bytes(b"something else")
    with pytest.raises(FormatError, match="is no file of packed experts; pack the model again"):
        check_packed(_demo(tmp_path), out, lambda name, total: NoBar())
    packed(_demo(tmp_path), out, force=True)
    assert len(read_header(out)[0].layers) == 4
