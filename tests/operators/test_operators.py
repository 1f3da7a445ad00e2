"""Single operators against the module that they replace, and what they refuse."""

from __future__ import annotations

from collections.abc import Iterator

import gguf
import numpy as np
import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation

from ktransformers.core import Phase
from ktransformers.errors import TensorMismatchError, UnsupportedError
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.types import Activation, ActivationSpec, QuantType, RawTensor
from ktransformers.operators.activation import KActivation
from ktransformers.operators.attention.latent_weights import split_up_projections
from ktransformers.operators.attention.mla import KMLAAttention, rotate
from ktransformers.operators.attention.rope import KRotaryEmbedding
from ktransformers.operators.base import OperatorConfig
from ktransformers.operators.experts.block import KMoEBlock
from ktransformers.operators.experts.routed import KTransformersExperts, read_layout
from ktransformers.operators.experts.router import KRouter
from ktransformers.operators.experts.single import KExpertLinear
from ktransformers.operators.layers.model import KModel
from ktransformers.operators.linear.embedding import KEmbedding
from ktransformers.operators.linear.linear import KTransformersLinear
from ktransformers.operators.linear.mlp import KMLP
from ktransformers.operators.norm import KRMSNorm
from ktransformers.operators.recognize.activation import recognize_expert_activation
from tests.support.checks.dict_source import DictSource
from tests.support.models.family_models import family_model
from tests.support.models.tiny_models import tiny_model


@pytest.fixture
def config() -> Iterator[OperatorConfig]:
    pool = WorkerPool(1)
    yield OperatorConfig(None, pool)
    pool.close()


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def loaded(operator: object, module: nn.Module, key: str) -> object:
    operator.load(DictSource({f"{key}.{k}": v for k, v in module.state_dict().items()}))  # type: ignore[attr-defined]
    return operator


def test_linear_with_bias(config: OperatorConfig) -> None:
    module = nn.Linear(70, 33)
    operator = loaded(KTransformersLinear(module, "x", config), module, "x")
    x = rows(2, 5, 70)
    # 70 products of relative error 2^-24, in two orders
    torch.testing.assert_close(operator(x), module(x), rtol=1e-5, atol=1e-5)


def test_linear_refuses_other_modules_and_wrong_shapes(config: OperatorConfig) -> None:
    with pytest.raises(UnsupportedError, match=r"plain nn\.Linear"):
        KTransformersLinear(nn.LayerNorm(8), "x", config)
    operator = KTransformersLinear(nn.Linear(8, 4), "x", config)
    with pytest.raises(TensorMismatchError, match=r"x\.weight has shape \(4, 9\), .* \(4, 8\)"):
        operator.requirements(DictSource({"x.weight": torch.zeros(4, 9), "x.bias": torch.zeros(4)}))
    with pytest.raises(TensorMismatchError, match=r"x\.bias is missing"):
        operator.requirements(DictSource({"x.weight": torch.zeros(4, 8)}))


def test_embedding_rows_and_scaled_subclass(config: OperatorConfig) -> None:
    class Scaled(nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 3

    ids = torch.tensor([[3, 0, 9]])
    for module, op in ((nn.Embedding(10, 6), "KEmbeddingRows"), (Scaled(10, 6), "KEmbeddingTorch")):
        want = module(ids)
        operator = loaded(KEmbedding(module, "e", config), module, "e")
        assert operator.op(Phase.GENERATE) == op
        assert torch.equal(operator(ids), want)


def test_rms_norm_is_told_from_its_lookalikes(config: OperatorConfig) -> None:
    class OffsetNorm(nn.Module):  # Gemma's
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(rows(16)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)

    cases = (
        (nn.RMSNorm(16, eps=1e-5), "KRMSNormNative"),
        (nn.LayerNorm(16), "KNormTorch"),
        (OffsetNorm(), "KRMSNormNative"),
    )
    for module, op in cases:
        x = rows(7, 16, seed=1)
        want = module(x)
        operator = loaded(KRMSNorm(module, "n", config), module, "n")
        assert operator.op(Phase.PREFILL) == op
        torch.testing.assert_close(operator(x), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "sigmoid"])
def test_activation_modules_are_recognized(name: str, config: OperatorConfig) -> None:
    module = ACT2FN[name]
    operator = KActivation(module, "a", config)
    assert operator.op(Phase.GENERATE) == "KActivationNative"
    x = rows(3, 37) * 5
    torch.testing.assert_close(operator(x), module(x), rtol=1e-5, atol=1e-6)
    # the result of an element does not depend on its place
    assert torch.equal(operator(x[1:2]), operator(x)[1:2])


def test_unknown_activation_keeps_its_forward(config: OperatorConfig) -> None:
    operator = KActivation(nn.Mish(), "a", config)
    assert operator.op(Phase.GENERATE) == "KActivationTorch"
    x = rows(4)
    assert torch.equal(operator(x), nn.functional.mish(x))


@use_experts_implementation
class OddExperts(nn.Module):
    """Experts whose activation no kernel computes."""

    def __init__(self, config: object):
        super().__init__()
        self.num_experts = 3
        self.gate_up_proj = nn.Parameter(rows(3, 2 * 8, 16))
        self.down_proj = nn.Parameter(rows(3, 16, 8, seed=1))
        self.act_fn = nn.Mish()

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros_like(hidden_states)
        for t in range(hidden_states.shape[0]):
            for k in range(top_k_index.shape[1]):
                gate, up = (self.gate_up_proj[top_k_index[t, k]] @ hidden_states[t]).chunk(2)
                acted = self.down_proj[top_k_index[t, k]] @ (self.act_fn(gate) * up)
                out[t] += top_k_weights[t, k] * acted
        return out


class EagerConfig:
    _experts_implementation = "eager"


def test_experts_without_a_kernel_run_on_torch(config: OperatorConfig, caplog: pytest.LogCaptureFixture) -> None:
    module = OddExperts(EagerConfig())
    layout = read_layout(module, "m.experts")
    assert recognize_expert_activation(module, layout) is None
    operator = KTransformersExperts(module, "m.experts", config)
    assert operator.op(Phase.GENERATE) == "KExpertsTorch"
    assert "KExpertsTorch" in caplog.text
    loaded(operator, module, "m.experts")
    x, ids, weights = rows(5, 16), torch.tensor([[0, 2], [1, 1], [2, 0], [0, 1], [2, 2]]), rows(5, 2, seed=4)
    torch.testing.assert_close(operator(x, ids, weights), module(x, ids, weights), rtol=1e-4, atol=1e-4)


def test_gpt_oss_layout_and_activation_are_found() -> None:
    model = tiny_model("gpt_oss", seed=0)
    experts = model.get_submodule("model.layers.0.mlp.experts")
    layout = read_layout(experts, "x")
    assert (layout.is_transposed, layout.is_concatenated, layout.has_bias) == (True, False, True)
    spec = recognize_expert_activation(experts, layout)
    assert spec is not None
    assert spec.kind is Activation.SWIGLU_OAI


def test_clamped_experts_of_deepseek_v4_are_found() -> None:
    experts = tiny_model("deepseek_v4").get_submodule("model.layers.0.mlp.experts")
    spec = recognize_expert_activation(experts, read_layout(experts, "x"))
    assert spec == ActivationSpec(Activation.SWIGLU_CLAMPED, limit=10.0)


def test_experts_refuse_what_is_not_experts(config: OperatorConfig) -> None:
    with pytest.raises(UnsupportedError, match="3-D"):
        KTransformersExperts(nn.Linear(4, 4), "x", config)


class Single(nn.Module):
    """One matrix for each of three experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(rows(3 * 8, 16).view(3, 8, 16))


def test_experts_of_single_matrices_take_rows_by_expert(config: OperatorConfig) -> None:
    module, x = Single(), rows(5, 16, seed=7)
    want = torch.cat([x[:2] @ module.weight[0].T, x[2:] @ module.weight[2].T])
    operator = loaded(KExpertLinear(module, "m", config), module, "m")
    got = operator(x, [2, 0, 3])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(operator(x[3:4], [0, 0, 1]), got[3:4])
    with pytest.raises(UnsupportedError, match="holds other things than one weight"):
        KExpertLinear(nn.Linear(4, 4), "x", config)


def test_norms_are_norms_alone() -> None:
    model = family_model("dbrx")
    found = [key for key, module in model.named_modules() if key.endswith("norm") and not KRMSNorm.is_for(module)]
    assert found == [f"transformer.blocks.{index}.norm_attn_norm" for index in range(4)]
    assert KRMSNorm.is_for(tiny_model("mixtral").get_submodule("model.norm"))


def test_router_rows_do_not_depend_on_their_company(config: OperatorConfig) -> None:
    model = tiny_model("deepseek_v3", seed=0)
    gate = model.get_submodule("model.layers.1.mlp.gate")
    operator = loaded(KRouter(gate, "g", config), gate, "g")
    x = rows(29, gate.weight.shape[1])
    whole = operator(x)
    for i in range(29):
        for part, one in zip(whole, operator(x[i : i + 1]), strict=True):
            assert torch.equal(part[i : i + 1], one)


def test_moe_block_refuses_blocks_of_another_make(config: OperatorConfig) -> None:
    with pytest.raises(UnsupportedError, match="drop this rule"):
        KMoEBlock(nn.Sequential(nn.Linear(2, 2)), "x", config)


def test_mlp_fuses_the_common_form_only(config: OperatorConfig) -> None:
    model = tiny_model("llama", seed=0)
    mlp = model.get_submodule("model.layers.0.mlp")
    operator = KMLP(mlp, "m", config)
    assert operator.op(Phase.GENERATE) == "KMLPNative"
    x = rows(3, mlp.gate_proj.in_features)
    torch.testing.assert_close(operator(x), mlp(x), rtol=1e-5, atol=1e-6)
    assert KMLP(nn.Sequential(nn.Linear(2, 2)), "m", config).op(Phase.GENERATE) == "KMLPTorch"


def test_rotary_table_equals_the_module(config: OperatorConfig) -> None:
    for family in ("llama", "deepseek_v2", "deepseek_v3"):
        module = tiny_model(family, seed=0).get_submodule("model.rotary_emb")
        operator = KRotaryEmbedding(module, "r", config)
        assert operator.op(Phase.GENERATE) == "KRotaryTable"
        x, positions = rows(1, 3, 64), torch.tensor([[0, 17, 4999]])
        got, want = operator(x, positions), module(x, positions)
        for a, b in zip(
            got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,), strict=True
        ):
            # cos and sin of the same angles, computed at another place of a longer vector: at most an ulp apart
            torch.testing.assert_close(a, b, rtol=0, atol=1.2e-7 * 2)


def test_rotary_tables_by_kind_of_layer(config: OperatorConfig) -> None:
    module = tiny_model("mellum", seed=0).get_submodule("model.rotary_emb")
    operator = KRotaryEmbedding(module, "r", config)
    assert operator.has_table
    x, positions = rows(1, 3, 64), torch.tensor([[0, 17, 4999]])
    found = []
    for kind in ("sliding_attention", "full_attention"):
        got, want = operator(x, positions, kind), module(x, positions, kind)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1.2e-7 * 2)  # as above
        found.append(got[0])
    assert not torch.equal(*found)


def test_model_checks_its_transfer_map(config: OperatorConfig) -> None:
    with pytest.raises(UnsupportedError, match="transfer_map"):
        KModel(nn.Linear(1, 1), "model", config, transfer_map={"ten": "cuda:1"})  # type: ignore[dict-item]


def test_rotation_keeps_dot_products() -> None:
    q, k = rows(4, 2, 8), rows(4, 2, 8, seed=1)
    angle = rows(4, 4, seed=2)
    for is_interleaved in (True, False):
        a, b = (rotate(x, angle.cos(), angle.sin(), is_interleaved) for x in (q, k))
        torch.testing.assert_close((a * b).sum(-1), (q * k).sum(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("qtype", [QuantType.Q8_0, QuantType.BF16, QuantType.F32])
def test_mla_splits_a_merged_projection(qtype: QuantType, config: OperatorConfig) -> None:
    """Old GGUF files hold kv_b as one matrix: v_b keeps its blocks, k_b is transposed."""
    inner = tiny_model("deepseek_v2", seed=0).get_submodule("model.layers.0.self_attn")
    operator = KMLAAttention(inner, "a", config)
    heads, nope, v_dim, rank = operator.num_heads, operator.nope_dim, operator.v_dim, operator.rank
    values = rows(heads * (nope + v_dim), rank).numpy()
    packed = gguf.quants.quantize(values, qtype)
    merged = RawTensor(torch.from_numpy(packed.view(np.uint8).reshape(-1).copy()), qtype, values.shape)
    k_b, v_b = split_up_projections(merged, operator.spec, config.require_pool())
    exact = gguf.quants.dequantize(packed, qtype).reshape(heads, nope + v_dim, rank)
    got_k = gguf.quants.dequantize(k_b.data.numpy().reshape(heads * rank, -1).view(np.uint8), k_b.qtype)
    got_v = gguf.quants.dequantize(v_b.data.numpy().reshape(heads * v_dim, -1).view(np.uint8), v_b.qtype)
    assert np.array_equal(got_k.reshape(heads, rank, nope), exact[:, :nope].transpose(0, 2, 1))
    assert np.array_equal(got_v.reshape(heads, v_dim, rank), exact[:, nope:])
