"""The MoE block of Llama 4: an expert sees a token times its weight, so the weight acts before the activation."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from ktransformers.errors import UnsupportedError
from ktransformers.operators.activation import sigmoid
from ktransformers.operators.base import OperatorConfig, Placement
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.operators.recognize.block import scales_inputs
from ktransformers.operators.wrapper import WrapperOperator

__all__ = ["KScaledMoEBlock"]


class KScaledMoEBlock(WrapperOperator):
    """MoE block that sums experts(x sigmoid(score)) over a token's experts and adds a shared expert.

    [..., H] in; ([T, H], router_logits [T, E]) out, as the block of `transformers`. Each of a token's experts takes a
    launch of its own, because inputs differ; the published models have one.
    """

    OPS: ClassVar[dict[str, str]] = {"KScaledMoEBlock": "experts on scaled rows, issued before the shared expert"}
    PARTS: ClassVar[frozenset[str]] = frozenset({"router", "experts", "shared_expert"})

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        if not scales_inputs(module):
            raise UnsupportedError(
                f"KScaledMoEBlock cannot replace {key} ({type(module).__name__}): it knows blocks whose experts see "
                "rows times the logistic function of their scores; drop this rule for others"
            )
        self._top_k = int(getattr(module, "top_k"))  # noqa: B009 - of a module that was recognized

    @override
    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        block: Any = self.inner
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        self.device.time_part("router")
        _, logits = block.router(rows)
        scores, ids = logits.topk(self._top_k, dim=-1)
        scores = (
            torch.sigmoid(scores) if self.device.is_gpu else sigmoid(scores.contiguous(), self.config.require_pool())
        )
        experts = block.experts
        shared: torch.Tensor | None = None
        for rank in range(self._top_k):
            taken = rows * scores[:, rank : rank + 1].to(rows.dtype)
            chosen, ones = ids[:, rank : rank + 1].contiguous(), torch.ones_like(scores[:, :1])
            if isinstance(experts, KTransformersExperts):
                ticket = experts.submit(taken, chosen, ones)
                shared = self._shared(rows) if shared is None else shared
                routed = experts.collect(ticket)
            else:
                shared = self._shared(rows) if shared is None else shared
                routed = experts(taken, chosen, ones)
            shared = shared + routed
        assert shared is not None
        return shared, logits

    def _shared(self, rows: torch.Tensor) -> torch.Tensor:
        self.device.time_part("shared_experts")
        block: Any = self.inner
        output: torch.Tensor = block.shared_expert(rows)
        return output
