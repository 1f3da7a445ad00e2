"""Files of architectures that the `gguf` package does not know, and of some that it does: each is its model.

Against `transformers` in fp32, from the file alone. The prompt is longer than every window and top-k.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from ktransformers.config import EngineConfig
from ktransformers.engine.model.opened import config_of_model
from ktransformers.errors import KTransformersError
from ktransformers.kernels.types import QuantType
from ktransformers.models.facts import ModelFacts
from ktransformers.models.gguf.config import config_from_gguf
from ktransformers.weights.gguf.extra_names import NEWER, NewerNames
from ktransformers.weights.gguf.file import GGUFModel, open_gguf
from ktransformers.weights.gguf.source import GGUFSource
from tests.docs.named import ROOT
from tests.models.gguf.test_gguf_architectures import check_hostile
from tests.support.engines.one_sequence import static_engine
from tests.support.gguf.newer import write_newer
from tests.support.gguf.newer_metadata import METADATA
from tests.support.gguf.newer_models import CASES, newer_model
from tests.support.gguf.writer import ARCH_OF
from tests.support.models.agreement import TOLERANCE, logits_of, prompt


def check_engine(model: PreTrainedModel, path: Path) -> None:
    ids = prompt(model.config.vocab_size, 60)
    engine = static_engine(EngineConfig(gguf_path=path, cache_lens=80, cpu_infer=1))
    want, got = logits_of(model, ids), engine.runner.forward(ids, 0, range(len(ids)))
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


def shapes_of(opened: GGUFModel) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in opened.tensors.items()}


@pytest.mark.parametrize("name", CASES)
def test_an_engine_of_the_file_agrees(name: str, tmp_path: Path) -> None:
    model = newer_model(name)
    path = write_newer(model, tmp_path / "m.gguf", CASES[name][0])
    opened = open_gguf(path)
    config = config_of_model(opened)
    assert config.model_type == model.config.model_type
    assert ModelFacts.of(config).layers == ModelFacts.of(model.config).layers
    check_engine(model, path)


@pytest.mark.every(4)
@pytest.mark.parametrize("name", CASES)
def test_no_value_of_a_key_is_taken_amiss(name: str, tmp_path: Path) -> None:
    check_hostile(open_gguf(write_newer(newer_model(name), tmp_path / "m.gguf", CASES[name][0])))


@pytest.mark.parametrize("name", ["granite_swa", "mellum"])
def test_fused_queries_and_keys_are_put_in_order(name: str, tmp_path: Path) -> None:
    """llama.cpp's --fuse-qkv joins what is permuted already."""
    model = newer_model(name)
    check_engine(model, write_newer(model, tmp_path / "m.gguf", CASES[name][0], fused_qkv=True))


@pytest.mark.parametrize("qtype", [QuantType.Q8_0, QuantType.BF16])
def test_experts_of_gate_and_up_stay_in_their_type(qtype: QuantType, tmp_path: Path) -> None:
    opened = open_gguf(
        write_newer(newer_model("granite_swa with experts"), tmp_path / "m.gguf", "granite_swa", qtype=qtype)
    )
    source = GGUFSource(opened, ModelFacts.of(config_of_model(opened)))
    assert opened.tensors["blk.0.ffn_gate_up_exps.weight"].qtype is qtype
    assert source.find("model.layers.0.shared_mlp.input_linear.weight") is not None


def test_parts_of_several_types_are_joined(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Mixtures choose a type for each tensor, and modules have gates and ups in one; said once, not for each layer."""
    model = newer_model("minimax-m3")
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith("gate_up_proj.weight"):
                weight.copy_(weight.half())
    path = write_newer(model, tmp_path / "m.gguf", "minimax-m3", halves=("ffn_up.weight", "ffn_up_shexp.weight"))
    opened = open_gguf(path)
    source = GGUFSource(opened, ModelFacts.of(config_of_model(opened)))
    mixed = [one for one in map(source.find, model.state_dict()) if one and one.stored_type == "F32+F16"]
    assert len(mixed) == model.config.num_hidden_layers
    for info in mixed:
        raw = source.tensor(info.name)
        assert (info.resident_type, info.nbytes) == (QuantType.F32, raw.nbytes)
        assert torch.equal(raw.data.view(torch.float32).view(raw.shape), model.get_parameter(info.name))
    said = [record.getMessage() for record in caplog.records if "of different types" in record.getMessage()]
    assert said == [
        f"model.layers.N.mlp.{part}.weight is joined of tensors of different types (F32, F16) and held as F32"
        for part in ("gate_up_proj", "shared_experts.gate_up_proj")
    ]
    check_engine(model, path)


REFUSED: list[tuple[str, dict[str, object], str]] = [
    ("laguna", {"expert_weights_norm": False}, "does not normalize"),
    ("laguna", {"expert_gating_func": 1}, "no known model"),
    ("laguna", {"attention.head_count": np.array([4, 8, 8, 8, 3])}, "neither one a head nor one an element"),
    ("mellum", {"expert_gating_func": 2}, "no known model"),
    ("hy_v3", {"expert_feed_forward_length": 33}, "not as wide as the routed"),
    ("minimax-m3", {"attention.indexer.block_size": None}, "lacks minimax-m3.attention.indexer.block_size"),
    ("bailingmoe3", {"kda.safe_gate": False}, "no lower bound"),
    ("bailingmoe3", {"swiglu_clamp_exp": [1.0] * 4}, "swiglu_clamp_exp"),
    ("step35", {"attention.head_count": np.array([4, 8, 4, 4])}, "do not follow its windows"),
    ("step35", {"swiglu_clamp_exp": [1.0, float("nan"), 1.0, 1.0]}, "4 numbers are needed"),
    ("glm5-next", {"swiglu_clamp_exp": [1.0, 2.0, 1.0, 1.0]}, "do not clamp at one value"),
    ("hy_v4", {"attention.indexer.types": None}, "without indexers"),
    ("hy_v4", {"swiglu_clamp_exp": None}, "do not clamp at one value"),
    ("cohere2moe", {"logit_scale": None}, "lacks cohere2moe.logit_scale"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_no_known_model_is_refused(name: str, change: dict[str, object], message: str, tmp_path: Path) -> None:
    arch = CASES[name][0]
    opened = open_gguf(write_newer(newer_model(name), tmp_path / "m.gguf", arch))
    metadata = opened.metadata | {f"{arch}.{key}": value for key, value in change.items()}
    said = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(KTransformersError, match=message):
        config_from_gguf(said, shapes_of(opened), {"rope_freqs.weight": [1.0] * 16})


def test_dense_layers_are_counted_by_tensors(tmp_path: Path) -> None:
    """A file that does not say leading_dense_block_count, as of Solar Open, has as many as it has."""
    opened = open_gguf(write_newer(newer_model("deepseek32"), tmp_path / "m.gguf", "deepseek32"))
    metadata = {key: value for key, value in opened.metadata.items() if not key.endswith("leading_dense_block_count")}
    wanted = config_of_model(opened)
    assert config_from_gguf(metadata, shapes_of(opened)).mlp_layer_types == wanted.mlp_layer_types


def test_growth_of_mistral4_is_read(tmp_path: Path) -> None:
    opened = open_gguf(write_newer(newer_model("mistral4"), tmp_path / "m.gguf", "mistral4"))
    config = config_from_gguf({**opened.metadata, "mistral4.attention.temperature_scale": 0.5}, shapes_of(opened))
    assert config.rope_parameters["llama_4_scaling_beta"] == 0.5


def test_the_readme_denies_no_family_its_files() -> None:
    rows = re.findall(r"^\| ([^|]+) \| no \| yes \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    denied = {name for row in rows for name in re.findall(r"\w+", row)}
    assert "longcat_flash" in denied
    assert denied & {*ARCH_OF, *(model_type for _, model_type, _ in CASES.values())} == set()


def test_every_newer_architecture_is_written() -> None:
    assert set(NEWER) - {"deepseek4", "qwen4exp"} <= set(METADATA)  # these have modules of tests of their own


def test_names_of_other_modules_are_none() -> None:
    names = NewerNames("laguna", ())
    assert names.get_name("model.layers.3.self_attn.q_proj.weight", (".weight",)) == "blk.3.attn_q.weight"
    assert names.get_name("model.layers.3.self_attn.sinks") == "blk.3.attn_sinks"
    assert names.get_name("model.layers.3.mixer.weight", (".weight",)) is None
    assert names.get_name("score.weight", (".weight",)) is None
