"""The MoE block: router, routed experts, and shared experts that run while the routed ones are under way."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from ktransformers.errors import UnsupportedError
from ktransformers.operators.activation import sigmoid
from ktransformers.operators.base import OperatorConfig, Placement
from ktransformers.operators.device import give_back
from ktransformers.operators.experts import KTransformersExperts
from ktransformers.operators.wrapper import WrapperOperator

__all__ = ["KMoEBlock"]


class KMoEBlock(WrapperOperator):
    """MoE block of the Qwen, DeepSeek, GLM and Mixtral families: fp32 [..., H] in and out.

    Takes blocks that hold `gate` and `experts`, and optionally `shared_experts`, or `shared_expert` with a sigmoid
    `shared_expert_gate`, and nothing else that computes. Other blocks keep their own forward: leave this rule out
    for them, the experts operator alone does the same work.
    """

    OPS: ClassVar[dict[str, str]] = {"KMoEBlock": "experts issued before the shared experts, collected after"}
    PARTS: ClassVar[frozenset[str]] = frozenset(
        {"gate", "experts", "shared_experts", "shared_expert", "shared_expert_gate"}
    )

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        parts = {name for name, child in module.named_children() if child is not None}
        has_own_state = any(True for _ in module.parameters(recurse=False))
        if not {"gate", "experts"} <= parts <= self.PARTS or has_own_state:
            raise UnsupportedError(
                f"KMoEBlock cannot replace {key} ({type(module).__name__}): it knows blocks made of "
                f"{', '.join(sorted(self.PARTS))}; drop this rule, KTransformersExperts works without it"
            )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        block: Any = self.inner
        rows = self.device.take(hidden_states.reshape(-1, hidden_states.shape[-1]))
        _, topk_weights, topk_ids = block.gate(rows)
        experts = block.experts
        if not isinstance(experts, KTransformersExperts):
            routed, shared = experts(rows, topk_ids, topk_weights), self._shared(rows)
        else:
            ticket = experts.submit(rows, topk_ids, topk_weights)
            shared = self._shared(rows)
            routed = experts.collect(ticket)
        output: torch.Tensor = routed if shared is None else routed + shared
        return give_back(output, hidden_states).view(hidden_states.shape)

    def _shared(self, rows: torch.Tensor) -> torch.Tensor | None:
        block: Any = self.inner
        shared = getattr(block, "shared_experts", None)
        if shared is not None:
            output: torch.Tensor = shared(rows)
            return output
        shared = getattr(block, "shared_expert", None)
        if shared is None:
            return None
        score = block.shared_expert_gate(rows)
        scale = torch.sigmoid(score) if self.device.is_gpu else sigmoid(score, self.config.require_pool())
        weighted: torch.Tensor = scale * shared(rows)
        return weighted
