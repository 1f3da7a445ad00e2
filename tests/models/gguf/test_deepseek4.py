"""DeepSeek-V4 from a GGUF file as llama.cpp's converter writes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from ktransformers.config import EngineConfig
from ktransformers.engine.model.opened import config_of_model
from ktransformers.errors import FormatError, KTransformersError, UnsupportedError
from ktransformers.kernels.types import QuantType
from ktransformers.models.facts import ModelFacts
from ktransformers.models.gguf.config import config_from_gguf
from ktransformers.weights.gguf.file import open_gguf
from ktransformers.weights.gguf.source import GGUFSource
from tests.models.gguf.test_gguf_architectures import check_hostile
from tests.support.engines.one_sequence import static_engine
from tests.support.gguf.deepseek4 import DEEPSEEK4_RATES, DEEPSEEK4_YARN, write_deepseek4_gguf
from tests.support.models.agreement import INT8_TOLERANCE, TOLERANCE, dequantized, logits_of, prompt
from tests.support.models.tiny_models import tiny_model

LENGTH = 300  # two entries of 128 tokens, more of 4 than the indexer chooses
KINDS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]


def model_of(hidden: int) -> PreTrainedModel:
    return tiny_model(
        "deepseek_v4",
        seed=5,
        layers=3,
        hidden=hidden,
        compress_rates=dict(DEEPSEEK4_RATES),
        layer_types=list(KINDS),
        rope_parameters=dict(DEEPSEEK4_YARN),
    )


def forward(path: Path, length: int) -> torch.Tensor:
    engine = static_engine(EngineConfig(gguf_path=path, cache_lens=length, cpu_infer=1))
    try:
        return engine.runner.forward(prompt(engine.runner.vocab_size, length), 0, range(length))
    finally:
        engine.close()


def test_f32_agrees_with_transformers(tmp_path: Path) -> None:
    model = model_of(64)
    want = logits_of(model, prompt(model.config.vocab_size, LENGTH))
    got = forward(write_deepseek4_gguf(model, tmp_path / "model.gguf"), LENGTH)
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


def test_mxfp4_experts_beside_q8_0(tmp_path: Path) -> None:
    """As the published FP4 is converted; the median row, since a router that nearly ties may take another expert."""
    model = model_of(256)
    got = forward(write_deepseek4_gguf(model, tmp_path / "model.gguf", QuantType.MXFP4, QuantType.Q8_0), LENGTH)
    twin = dequantized(model, QuantType.MXFP4, QuantType.Q8_0)
    small = {name: one for name, one in model.named_parameters() if "_hc." in name or "hc_head" in name}
    small |= {name: one for name, one in model.named_parameters() if name.endswith("position_bias")}
    with torch.no_grad():
        for name, one in twin.named_parameters():
            if name in small:
                one.copy_(small[name])
    want = logits_of(twin, prompt(model.config.vocab_size, LENGTH))
    errors = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert errors.median() <= INT8_TOLERANCE


def test_the_config_comes_back(tmp_path: Path) -> None:
    model = model_of(64)
    opened = open_gguf(write_deepseek4_gguf(model, tmp_path / "model.gguf"))
    config = config_of_model(opened)
    assert config is not None
    wanted = model.config.to_dict()
    for name in ("architectures", "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"):
        wanted.pop(name, None)
    got = config.to_dict()
    assert {name: got[name] for name in wanted} == wanted
    assert ModelFacts.of(config).num_layers == 3


@pytest.mark.parametrize(
    ("changed", "error", "what"),
    [
        ({"expert_gating_func": 2}, UnsupportedError, r"expert_gating_func 2"),
        ({"expert_weights_norm": False}, UnsupportedError, r"does not normalize"),
        ({"rope__scaling__type": None}, UnsupportedError, r"without rope\.scaling\.type yarn"),
        ({"attention__compress_ratios": [0, 4, 2]}, FormatError, r"compress_ratios is \[0, 4, 2\]"),
        ({"attention__compress_ratios": [0, 4]}, FormatError, r"3 counts are needed"),
        ({"swiglu_clamp_shexp": 7.0}, UnsupportedError, r"swiglu_clamp_shexp of a deepseek4 file say \[7\.0, 10\.0\]"),
        ({"swiglu_clamp_exp": [10.0, 10.0]}, FormatError, r"3 numbers are needed"),
        ({"swiglu_clamp_exp": float("nan")}, FormatError, r"a finite number is needed"),
        ({"swiglu_clamp_exp": 0.0}, UnsupportedError, r"say \[0\.0\]"),
        ({"hyper_connection__count": None}, FormatError, r"lacks deepseek4\.hyper_connection\.count"),
    ],
)
def test_what_no_known_model_says(
    changed: dict[str, object], error: type[KTransformersError], what: str, tmp_path: Path
) -> None:
    opened = open_gguf(write_deepseek4_gguf(model_of(64), tmp_path / "model.gguf", **changed))
    with pytest.raises(error, match=what):
        config_from_gguf(opened.metadata, {name: one.shape for name, one in opened.tensors.items()})


def test_no_value_of_a_key_is_taken_amiss(tmp_path: Path) -> None:
    check_hostile(open_gguf(write_deepseek4_gguf(model_of(64), tmp_path / "model.gguf")))


def test_experts_of_each_token_are_whole_numbers(tmp_path: Path) -> None:
    model = model_of(64)
    opened = open_gguf(write_deepseek4_gguf(model, tmp_path / "model.gguf"))
    source = GGUFSource(opened, ModelFacts.of(model.config))
    name = "model.layers.0.mlp.gate.tid2eid"
    wanted = model.state_dict()[name].float()
    assert torch.equal(source.dense(name), wanted)
    info, raw = source.find(name), source.tensor(name)
    assert info is not None
    assert (info.resident_type, info.shape, info.nbytes) == (QuantType.F32, tuple(wanted.shape), raw.nbytes)
    assert torch.equal(raw.data.view(torch.float32).view(raw.shape), wanted)
