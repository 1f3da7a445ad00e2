"""GGUF of families with recurrent layers, written as llama.cpp's converter does: config and parameters come back.

Two of the converter's changes round: -exp(A_log), whose logarithm is off by an ulp of what it is taken of and one of
its own, and 1 + weight, whose last bit is lost.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from ktransformers.engine.model.file_layouts import note_layout
from ktransformers.engine.model.opened import config_of_model
from ktransformers.engine.model.skeleton import build_causal
from ktransformers.errors import TensorMismatchError, UnsupportedError
from ktransformers.kernels.types import QuantType
from ktransformers.models.facts import ModelFacts
from ktransformers.models.gguf.config import config_from_gguf
from ktransformers.operators.linear.tiled import TiledInput
from ktransformers.weights.gguf.file import open_gguf
from ktransformers.weights.gguf.source import GGUFSource
from tests.support.checks.source_checks import fill
from tests.support.gguf.recurrent import write_recurrent_gguf
from tests.support.models.recurrent_models import FALCON_MULTIPLIERS
from tests.support.models.recurrent_shapes import RECURRENT, recurrent_config
from tests.support.models.tiny_models import random_model

ULP = 2.0**-23
GONE = {  # what files do not hold, and what changes nothing that a model of these values computes
    *("architectures", "dtype", "transformers_version", "pad_token_id", "initializer_range", "router_aux_loss_coef"),
    *("_name_or_path", "expand", "moe_intermediate_size", "head_dim", "block_auto_adjust_ff_dim", "rms_norm_eps"),
    *("intermediate_size", "full_attn_idxs", "sliding_window", "n_routed_experts", "n_shared_experts"),
    *("moe_shared_expert_intermediate_size", "mamba_chunk_size", "chunk_size"),
}


def opened(path: Path) -> tuple[PreTrainedModel, GGUFSource]:
    """The modules that a file is loaded into (on the CPU, not filled), and its source."""
    file = open_gguf(path)
    config = config_of_model(file)
    facts = ModelFacts.of(config)
    note_layout(config, facts, file)
    model = build_causal(config, False, attn_implementation="eager", dtype=torch.float32)
    return model.eval(), GGUFSource(file, facts)


def logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits[0]


@pytest.mark.parametrize("name", RECURRENT)
def test_config_and_parameters_come_back(name: str, tmp_path: Path) -> None:
    wanted = random_model(recurrent_config(name), seed=1)
    model, source = opened(write_recurrent_gguf(wanted, tmp_path / "m.gguf"))
    want, got = wanted.config.to_dict(), model.config.to_dict()
    assert {key: value for key, value in want.items() if key not in GONE and got.get(key) != value} == {}
    read = fill(model, source)
    assert [one for one in source.stored_names() if one not in read and not source.ignorable(one)] == []
    originals = wanted.state_dict()
    if name != "qwen3_next":  # whose modules differ, see below
        assert set(model.state_dict()) == set(originals)
    for key, tensor in model.state_dict().items():
        if key not in originals:
            assert ".linear_attn.in_proj_" in key
            continue
        near = 4 * ULP if key.endswith((".A_log", "norm.weight")) else 0.0
        assert torch.allclose(tensor, originals[key], rtol=0, atol=near), key
    ids = torch.randint(3, 160, (1, 40), generator=torch.Generator().manual_seed(7))
    one, other = logits(wanted, ids), logits(model, ids)
    assert (one - other).abs().max() <= 1e-4 * one.abs().max()


def test_multipliers_of_falcon_h1_are_in_the_weights(tmp_path: Path) -> None:
    wanted = random_model(recurrent_config("falcon_h1", **FALCON_MULTIPLIERS), seed=3)
    model, source = opened(write_recurrent_gguf(wanted, tmp_path / "m.gguf"))
    fill(model, source)
    ids = torch.randint(3, 160, (1, 40), generator=torch.Generator().manual_seed(7))
    one, other = logits(wanted, ids), logits(model, ids)
    assert (one - other).abs().max() <= 1e-4 * one.abs().max()


def test_falcon_h1_without_a_head_is_refused(tmp_path: Path) -> None:
    file = open_gguf(write_recurrent_gguf(random_model(recurrent_config("falcon_h1")), tmp_path / "m.gguf"))
    shapes = {name: tensor.shape for name, tensor in file.tensors.items() if name != "output.weight"}
    with pytest.raises(UnsupportedError, match=r"falcon-h1 file without output\.weight"):
        config_from_gguf(file.metadata, shapes)


MIXED = {"attn_qkv": QuantType.Q5_K, "attn_gate": QuantType.Q4_K, "ssm_out": QuantType.Q6_K, "ssm_ba": QuantType.Q8_0}


def mixed(name: str) -> QuantType:
    """As mixtures of llama.cpp have it: no two tensors of a layer need be of one type."""
    return MIXED.get(name.split(".")[2] if name.startswith("blk.") else "", QuantType.Q8_0)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
def test_no_block_is_taken_apart(name: str, tmp_path: Path) -> None:
    """Heads of 128 values, two of which share a block of 256: what the file's blocks mean is computed with."""
    sizes = {"hidden": 256, "linear_value_head_dim": 128, "linear_num_value_heads": 4, "linear_key_head_dim": 64}
    wanted = random_model(recurrent_config(name, **sizes), seed=2)
    path = write_recurrent_gguf(wanted, tmp_path / "m.gguf", mixed)
    model, source = opened(path)
    read = fill(model, source)
    assert {one for one in source.stored_names() if one not in read and not source.ignorable(one)} == set()
    mixer = model.model.layers[0].linear_attn
    assert isinstance(mixer.out_proj, TiledInput) == (name == "qwen3_5_text")
    for layer, stored in ((mixer.in_proj_qkv, "attn_qkv"), (mixer.in_proj_z, "attn_gate")):
        key = f"model.layers.0.linear_attn.{'in_proj_qkv' if stored == 'attn_qkv' else 'in_proj_z'}.weight"
        assert source.tensor(key).qtype.name == MIXED[stored].name
        assert layer.weight.shape[0] % 128 == 0
    original = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape([int(n) for n in tensor.shape[::-1]])
        original[tensor.name] = torch.from_numpy(np.array(values, dtype=np.float32))
    rows = torch.randn(5, 512, generator=torch.Generator().manual_seed(3))
    by_file = rows.view(5, 2, 2, 128).transpose(1, 2).reshape(5, 512) if name == "qwen3_5_text" else rows
    want = by_file @ original["blk.0.ssm_out.weight"].T
    assert torch.allclose(mixer.out_proj(rows), want, rtol=0, atol=1e-5)


def test_blocks_within_a_head_are_put_in_order(tmp_path: Path) -> None:
    """Blocks of 32 do not reach from a head into another: columns are reordered while loading, the module stays."""
    wanted = random_model(recurrent_config("qwen3_5_text"), seed=4)
    model, source = opened(write_recurrent_gguf(wanted, tmp_path / "m.gguf", lambda name: QuantType.Q8_0))
    fill(model, source)
    mixer = model.model.layers[0].linear_attn
    assert not isinstance(mixer.out_proj, TiledInput)
    want = wanted.model.layers[0].linear_attn.out_proj.weight
    assert (mixer.out_proj.weight - want).abs().max() <= want.abs().max() / 127
    assert (mixer.in_proj_z.weight - wanted.model.layers[0].linear_attn.in_proj_z.weight).abs().max() <= 0.01


def test_blocks_for_multi_token_prediction_are_left_aside(tmp_path: Path) -> None:
    wanted = random_model(recurrent_config("qwen3_5_moe_text"), seed=5)
    config = wanted.config
    path = write_recurrent_gguf(wanted, tmp_path / "m.gguf")
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(tmp_path / "mtp.gguf", "qwen35moe")
    for field in reader.fields.values():
        key = field.name
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = field.contents()
        if key == "qwen35moe.block_count":
            value = config.num_hidden_layers + 1
        writer.add_key_value(key, value, field.types[0], field.types[1] if len(field.types) > 1 else None)
    writer.add_nextn_predict_layers(1)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
        if tensor.name.startswith("blk.3."):  # an attending layer's, once more
            writer.add_tensor(tensor.name.replace("blk.3.", "blk.4."), np.array(tensor.data))
    writer.add_tensor("blk.4.nextn.eh_proj.weight", np.zeros((64, 128), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model, source = opened(tmp_path / "mtp.gguf")
    assert model.config.num_hidden_layers == 4
    read = fill(model, source)
    left = [one for one in source.stored_names() if one not in read]
    assert left
    assert all(one.startswith("blk.4.") and source.ignorable(one) for one in left)


def test_a_width_of_what_nothing_rotates_is_left_aside(tmp_path: Path) -> None:
    """llama.cpp's converter of Nemotron-H divides the hidden size by the heads for it, which are of another width."""
    wanted = random_model(recurrent_config("nemotron_h", head_dim=32), seed=5)
    file = open_gguf(write_recurrent_gguf(wanted, tmp_path / "m.gguf"))
    assert file.metadata["nemotron_h_moe.rope.dimension_count"] == 16
    assert config_of_model(file).head_dim == 32


def test_heads_that_the_file_has_not_are_refused(tmp_path: Path) -> None:
    wanted = random_model(recurrent_config("qwen3_5_text"), seed=6)
    file = open_gguf(write_recurrent_gguf(wanted, tmp_path / "m.gguf"))
    facts = ModelFacts.of(recurrent_config("qwen3_5_text", linear_num_value_heads=8))
    source = GGUFSource(file, facts)
    for part in ("in_proj_z", "out_proj"):
        with pytest.raises(TensorMismatchError, match="heads"):
            source.find(f"model.layers.0.linear_attn.{part}.weight")
