"""Qwen3.8-Flash-Next as it is published in few bits, against the same numbers in BF16: experts in FP8 (Qwen's own) or
NVFP4 (modelopt), one matrix for each, and the table of n-grams in FP8 with one scale for all of its parts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ktransformers.config import EngineConfig
from ktransformers.errors import TensorMismatchError
from tests.support.engines.one_sequence import StaticEngine, static_engine
from tests.support.models.agreement import INT8_TOLERANCE
from tests.support.models.fp8_models import to_fp8
from tests.support.models.pooled_models import pooled_model
from tests.support.models.tiny_models import VOCAB_SIZE, write_safetensors

State = dict[str, torch.Tensor]
Quantized = tuple[State, torch.Tensor]
_EXPERT = re.compile(r"(.*\.mlp\.experts\.\d+\.\w+_proj)\.weight")
_SHARD = ".ngram_embedding.shard_"
_SCALE = 2.0**-6
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def fp8(name: str, weight: torch.Tensor) -> Quantized:
    codes, scales, values = to_fp8(weight)
    return {f"{name}.weight": codes, f"{name}.weight_scale_inv": scales}, values


def nvfp4(name: str, weight: torch.Tensor) -> Quantized:
    """Groups of 16 columns with a scale in FP8, and one scale in FP32 for all."""
    rows, cols = weight.shape
    number = torch.tensor(2.0**-8)
    groups = weight.view(rows, cols // 16, 16)
    scales = (groups.abs().amax(-1) / 6 / number).to(torch.float8_e4m3fn)
    wide = (scales.float() * number)[..., None]
    codes = (groups.abs() / wide)[..., None].sub(_E2M1).abs().argmin(-1)
    values = (_E2M1[codes] * groups.sign() * wide).view(rows, cols)
    codes = (codes + 8 * (groups < 0)).view(rows, cols).to(torch.uint8)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    stored = {"weight": packed, "weight_scale": scales, "weight_scale_2": number, "input_scale": torch.ones(())}
    return {f"{name}.{part}": tensor for part, tensor in stored.items()}, values


CONFIGS: dict[Callable[[str, torch.Tensor], Quantized], dict[str, object]] = {
    fp8: {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
        "modules_to_convert": ["ple.ple_embedding.ngram_embedding"],
    },
    nvfp4: {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.ple.*", "*.self_attn.*"]},
}


def write_both(make: Callable[[str, torch.Tensor], Quantized], few: Path, wide: Path, **values: object) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "ple_embed_dim": 256, **values}
    model = pooled_model("qwen4_exp_text", seed=4, **sizes)
    for folder in (few, wide):
        write_safetensors(model, folder)
    in_few, in_wide = State(), State()
    for name, tensor in load_file(few / "model.safetensors").items():
        in_few[name], in_wide[name] = tensor, tensor
        found = _EXPERT.fullmatch(name)
        if _SHARD in name:
            in_few[name] = (tensor / _SCALE).to(torch.float8_e4m3fn)
            in_wide[name] = in_few[name].float() * _SCALE
            scale = f"{name.partition('.shard_')[0]}.weight_scale"
            in_few[scale] = torch.tensor([_SCALE], dtype=torch.bfloat16)
        elif found is not None:
            del in_few[name]
            stored, in_wide[name] = make(found[1], tensor)
            in_few |= stored
    save_file(in_few, few / "model.safetensors", {"format": "pt"})
    save_file(in_wide, wide / "model.safetensors", {"format": "pt"})
    said = json.loads((few / "config.json").read_text()) | {"quantization_config": CONFIGS[make]}
    (few / "config.json").write_text(json.dumps(said))


def engine_of(folder: Path) -> StaticEngine:
    return static_engine(EngineConfig(model_path=folder, cache_lens=64, cpu_infer=1))


@pytest.mark.parametrize(("make", "kind"), [(fp8, "F8_E4M3"), (nvfp4, "NVFP4")])
def test_logits_are_those_of_the_same_numbers(
    make: Callable[[str, torch.Tensor], Quantized], kind: str, tmp_path: Path
) -> None:
    write_both(make, tmp_path / "few", tmp_path / "wide")
    ids = torch.randint(3, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    with closing(engine_of(tmp_path / "wide")) as engine:
        want = engine.runner.forward(ids, 0, range(40)).clone()
    with closing(engine_of(tmp_path / "few")) as engine:
        got = engine.runner.forward(ids, 0, range(40)).clone()
        entries = {entry.key: entry for entry in engine.plan.entries}
        parts = [
            engine.runner.forward(ids[at : at + 7], at, range(len(ids[at : at + 7]))).clone() for at in range(0, 40, 7)
        ]
    assert torch.equal(torch.cat(parts), got)
    errors = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert errors.median() <= INT8_TOLERANCE
    assert (errors > INT8_TOLERANCE).sum() <= 2  # a row whose router nearly ties may take another expert
    types = {one for key, entry in entries.items() if key.endswith(".experts") for one in entry.quant_types}
    assert {one.partition(">")[0].split("_")[0] for one in types} == {kind.split("_")[0]}
    table = entries["model.layers.0.ple"]
    assert table.nbytes["cpu"] < 64 << 10  # the convolution; the table is where its file is mapped
    assert table.looked_up == {"cpu": 0}


def test_a_table_without_its_scale_is_refused(tmp_path: Path) -> None:
    write_both(fp8, tmp_path / "few", tmp_path / "wide")
    path = tmp_path / "few" / "model.safetensors"
    stored = {
        name: tensor for name, tensor in load_file(path).items() if not name.endswith("ngram_embedding.weight_scale")
    }
    save_file(stored, path, {"format": "pt"})
    with pytest.raises(TensorMismatchError, match=r"the table of model\.layers\.0\.ple is FP8, and its one scale"):
        engine_of(tmp_path / "few")
