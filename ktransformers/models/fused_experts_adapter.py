"""Replaces experts modules of a form of their own by the form that all other families have in transformers.

    DBRX     experts.mlp.w1, v1, w2 [E I, H], one expert below another --> gate_up_proj [E, 2 I, H], down_proj [E, H, I]
    JetMoE   a block of input_linear, output_linear and a router that sorts rows --> the same, in a block of GraniteMoE

Skeleton and twin are changed alike; where the numbers lie in safetensors is in weights/conversion/checkpoint_names.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

__all__ = ["adapt_fused_experts"]


def adapt_fused_experts(model: PreTrainedModel) -> None:
    """Replace experts modules known to be of another form in `model`, just built on meta."""
    for parent in list(model.modules()):
        experts: Any = parent._modules.get("experts")
        inner = getattr(experts, "mlp", None)
        if all(name in getattr(inner, "_parameters", ()) for name in ("w1", "v1", "w2")):
            parent.experts = _below_one_another(experts, model.config)
        block: Any = parent._modules.get("mlp")
        if {"input_linear", "output_linear", "router"} <= getattr(block, "_modules", {}).keys():
            parent.mlp = _with_bias(block, model.config)


def _below_one_another(experts: Any, config: Any) -> nn.Module:
    """The experts of DBRX, which gives them rows by sequence."""
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralExperts

    class RowsOfSequences(MixtralExperts):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            """hidden_states [B, T, H], ids and weights [B T, K]; returns [B, T, H]."""
            rows = hidden_states.reshape(-1, hidden_states.shape[-1])
            output: torch.Tensor = super().forward(rows, ids, weights)
            return output.view(hidden_states.shape)

    shape = MixtralConfig(
        hidden_size=experts.hidden_size,
        intermediate_size=experts.ffn_hidden_size,
        num_local_experts=experts.num_experts,
    )
    shape._experts_implementation = config._experts_implementation
    found = RowsOfSequences(shape)
    found.act_fn = experts.mlp.activation_fn
    return found


def _with_bias(block: Any, config: Any) -> nn.Module:
    """JetMoE's block: GraniteMoE's, whose result has a bias [H] added."""
    import torch
    from torch import nn
    from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeConfig, GraniteMoeMoE

    class BlockWithBias(GraniteMoeMoE):  # type: ignore[misc]
        def forward(self, layer_input: torch.Tensor) -> torch.Tensor:
            """[B, T, H] in and out."""
            output: torch.Tensor = super().forward(layer_input) + self.bias
            return output

    shape = GraniteMoeConfig(
        hidden_size=block.input_size,
        intermediate_size=block.hidden_size,
        num_local_experts=block.router.num_experts,
        num_experts_per_tok=block.router.top_k,
    )
    shape._experts_implementation = config._experts_implementation
    found = BlockWithBias(shape)
    found.bias = nn.Parameter(torch.empty(block.input_size))
    found.experts.act_fn = block.activation
    return found
