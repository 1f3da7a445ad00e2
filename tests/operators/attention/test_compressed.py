"""Attention over compressed keys: what it replaces, and what it keeps. Its results are tested with the models'."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from ktransformers.config import EngineConfig
from ktransformers.core import Phase
from ktransformers.errors import UnsupportedError
from ktransformers.models.facts import LayerKind, ModelFacts
from ktransformers.operators.attention.compressed import KCompressedAttention, turned
from ktransformers.operators.attention.compressed_gpu import angles_of
from ktransformers.operators.base import OperatorConfig, Placement
from tests.support.engines.fake_operators import meta_model
from tests.support.engines.one_sequence import static_engine
from tests.support.models.tiny_models import tiny_config, tiny_model, write_safetensors


def operator(model_type: str, layer: int, placement: Placement | None = None, **values: object) -> KCompressedAttention:
    model = meta_model(model_type, layers=3, **values)
    config = OperatorConfig(ModelFacts.of(model.config))
    key = f"model.layers.{layer}.self_attn"
    return KCompressedAttention(model.get_submodule(key), key, config, placement)


def test_kinds_of_layers() -> None:
    layers = ModelFacts.of(tiny_config("deepseek_v4", layers=3)).layers
    assert [one.kind for one in layers] == [LayerKind.COMPRESSED, LayerKind.COMPRESSED, LayerKind.SLIDING]


def test_the_cache_holds_what_a_token_leaves_behind() -> None:
    """head_dim 16, index_head_dim 16: key, entry, two series of C and Z, and the same for the indexer."""
    assert operator("deepseek_v4", 0).cached_dim == 16 + 16 + 2 * 2 * 16 + 16 + 2 * 2 * 16
    assert operator("deepseek_v4", 1).cached_dim == 16 + 16 + 2 * 16
    assert operator("deepseek_v4", 2).cached_dim == 16


def test_other_attention_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"cannot replace model\.layers\.0\.self_attn \(LlamaAttention\)"):
        operator("llama", 0)


def test_heads_that_a_gpu_does_not_take_are_refused() -> None:
    there = Placement.on("cuda:0")
    assert operator("deepseek_v4", 0, there).op(Phase.PREFILL) == "KCompressedTriton"
    with pytest.raises(UnsupportedError, match=r"needs heads of a power of two of columns, got 24; place it on cpu"):
        operator("deepseek_v4", 0, there, head_dim=24)


class Turned(nn.Module):
    """Angles of a fixed frequency, or not."""

    def __init__(self, power: float):
        super().__init__()
        self.compress_inv_freq, self.compress_attention_scaling, self.power = torch.tensor([0.5, 0.1]), 1.5, power

    def forward(self, x: torch.Tensor, positions: torch.Tensor, layer_type: str) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[..., None].float() ** self.power * self.compress_inv_freq
        return angles.cos() * 1.5, angles.sin() * 1.5


def test_angles_of_entries_are_those_of_frequencies() -> None:
    frequencies, factor = angles_of(Turned(1.0), "compress", "here")
    assert (frequencies.tolist(), factor) == (torch.tensor([0.5, 0.1]).tolist(), 1.5)
    for module, kind in ((Turned(1.5), "compress"), (Turned(1.0), "main")):
        with pytest.raises(UnsupportedError, match="here: its angles are not those of fixed frequencies"):
            angles_of(module, kind, "here")


def test_turning_back_undoes_turning() -> None:
    x, angles = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(0)), torch.arange(20.0).view(5, 4)
    there = turned(x, angles.cos(), angles.sin())
    assert torch.equal(there[..., :8], x[..., :8])
    torch.testing.assert_close(turned(there, angles.cos(), -angles.sin()), x)


def test_rules_that_leave_compressed_attention_in_place_are_refused(tmp_path: Path) -> None:
    write_safetensors(tiny_model("deepseek_v4", layers=3), tmp_path)
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        """
- match: {name: "[.]experts$"}
  replace: {class: ktransformers.operators.experts.KTransformersExperts}
  recursive: false
"""
    )
    with pytest.raises(UnsupportedError, match=r"layers\.0\.self_attn has to be a KCompressedAttention"):
        static_engine(EngineConfig(model_path=tmp_path, optimize_config_path=rules, cache_lens=64, cpu_infer=1))


def test_numbers_that_a_float_does_not_hold_are_refused(tmp_path: Path) -> None:
    write_safetensors(tiny_model("deepseek_v4", layers=3), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    (name,) = (name for name in tensors if name.endswith("tid2eid"))
    tensors[name][0, 0] = (1 << 24) + 1
    safetensors.torch.save_file(tensors, file)
    with pytest.raises(UnsupportedError, match=r"tid2eid' holds numbers beyond 16777216"):
        static_engine(EngineConfig(model_path=tmp_path, cache_lens=64, cpu_infer=1))
