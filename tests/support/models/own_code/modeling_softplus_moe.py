"""A family by its own code: Mixtral with a router that no kernel computes, and attention without a layer's number."""

from torch.nn import functional
from transformers import MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from .configuration_softplus_moe import SoftplusMoeConfig


class SoftplusRouter(MixtralTopKRouter):
    def forward(self, hidden_states):
        logits = functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        weights, ids = functional.softplus(logits).topk(self.top_k, dim=-1)
        return logits, weights / weights.sum(-1, keepdim=True), ids


class SoftplusMoeForCausalLM(MixtralForCausalLM):
    config_class = SoftplusMoeConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.gate = SoftplusRouter(config)
            layer.self_attn.layer_idx = None
        self.post_init()
