"""The MoE block: router, routed experts, and shared experts that run while the routed ones are under way."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from ktransformers.errors import UnsupportedError
from ktransformers.operators.activation import sigmoid
from ktransformers.operators.base import OperatorConfig, Placement
from ktransformers.operators.device import to_input
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.operators.experts.router import KRouter
from ktransformers.operators.recognize.block import weighs_outputs
from ktransformers.operators.wrapper import WrapperOperator

__all__ = ["Addends", "KMoEBlock"]


@dataclass(frozen=True, slots=True)
class Addends:
    """Addends of a MoE block's result: routed + shared sigmoid(score), all of [T, H] but score, [T, 1]; None: not
    there.
    """

    routed: torch.Tensor
    shared: torch.Tensor | None = None
    score: torch.Tensor | None = None

    def total(self, block: KMoEBlock) -> torch.Tensor:
        """Add up the addends, on the kernels of the block's device."""
        if self.shared is None:
            return self.routed
        return self.routed + (self.shared if self.score is None else block.weigh(self.shared, self.score))

    @classmethod
    def joined(cls, blocks: Sequence[Addends]) -> Addends:
        """Return the addends of rows that were computed in blocks, in their order."""
        shared = [one.shared for one in blocks if one.shared is not None]
        score = [one.score for one in blocks if one.score is not None]
        routed = torch.cat([one.routed for one in blocks])
        return cls(routed, torch.cat(shared) if shared else None, torch.cat(score) if score else None)

    def widened(self) -> Addends:
        """Return the same in fp32, so that a total is not rounded."""
        shared, score = (None if each is None else each.float() for each in (self.shared, self.score))
        return Addends(self.routed.float(), shared, score)


class KMoEBlock(WrapperOperator):
    """MoE block of the Qwen, DeepSeek, GLM and Mixtral families: fp32 [..., H] in and out.

    Takes blocks that hold a router named `gate` and `experts`, and optionally `shared_experts` (`shared_mlp` in
    Hunyuan), or `shared_expert` with a sigmoid `shared_expert_gate`, and compute nothing else; they are asked. Other
    blocks keep their own forward, in which the experts operator does the same work.
    """

    OPS: ClassVar[dict[str, str]] = {"KMoEBlock": "experts issued before the shared experts, collected after"}

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        router: Any = getattr(module, "gate", None)
        self._group = None if config.partial_sums is None else config.partial_sums.of_block(key)
        self._asks_for_ids = router is not None and "input_ids" in inspect.signature(router.forward).parameters
        if not self.is_for(module):
            raise UnsupportedError(
                f"KMoEBlock cannot replace {key} ({type(module).__name__}): it knows blocks that weigh what experts "
                "give and add shared ones; drop this rule, KTransformersExperts works without it"
            )

    @classmethod
    @override
    def is_for(cls, module: nn.Module) -> bool:
        has_experts = all(module._modules.get(name) is not None for name in ("gate", "experts"))
        return has_experts and weighs_outputs(module) is True

    @override
    def forward(self, hidden_states: torch.Tensor, input_ids: torch.Tensor | None = None) -> torch.Tensor:
        rows = self.device.to_device(hidden_states.reshape(-1, hidden_states.shape[-1]))
        output = self.addends(rows, input_ids).total(self)
        return to_input(output, hidden_states).view(hidden_states.shape)

    def streams(self, rows: torch.Tensor) -> bool:
        """Whether the experts of a step of these rows [T, H] are copied to the block's device."""
        experts = getattr(self.inner, "experts", None)
        return self._group is None and isinstance(experts, KTransformersExperts) and experts.streams(rows)

    def addends(self, rows: torch.Tensor, token_ids: torch.Tensor | None = None) -> Addends:
        """Compute the block for rows [T, H] on its device, not yet added up, unless it is a share of a sum. token_ids:
        int64 [1, T], for routers that look tokens up.
        """
        if self._group is None:
            return self._addends(rows, token_ids)

        def share(rows: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor:
            return self._addends(rows, token_ids).widened().total(self).contiguous()

        return Addends(self._group.sum_product(rows, rows.shape[1], share))

    def _addends(self, rows: torch.Tensor, token_ids: torch.Tensor | None) -> Addends:
        block: Any = self.inner
        experts, router = block.experts, block.gate
        is_ours = isinstance(experts, KTransformersExperts)
        self.device.time_part("router")
        routed = chosen = None
        asked = (self.device.move(token_ids),) if self._asks_for_ids and token_ids is not None else ()
        if is_ours and isinstance(router, KRouter) and not asked:
            chosen = None if router.spec is None else experts.chosen(rows, router.spec.top_k)
            routed = router.route(rows, chosen)
        _, topk_weights, topk_ids = router(rows, *asked) if routed is None else routed
        if not is_ours:
            return Addends(experts(rows, topk_ids, topk_weights), *self._shared(rows))
        ticket = experts.submit(rows, topk_ids, topk_weights, is_counted=routed is not None and chosen is not None)
        shared, score = self._shared(rows)
        return Addends(experts.collect(ticket), shared, score)

    def weigh(self, shared: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
        """Multiply the shared expert's result [T, H] with the logistic function of its score [T, 1]."""
        scale = torch.sigmoid(score) if self.device.is_gpu else sigmoid(score, self.config.require_pool())
        return scale * shared

    def _shared(self, rows: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The shared experts' result [T, H] and the score [T, 1] that weighs it, where the family has them."""
        block: Any = self.inner
        if any(getattr(block, name, None) is not None for name in ("shared_experts", "shared_mlp", "shared_expert")):
            self.device.time_part("shared_experts")
        shared = getattr(block, "shared_experts", None) or getattr(block, "shared_mlp", None)
        if shared is not None:
            return shared(rows), None
        shared = getattr(block, "shared_expert", None)
        if shared is None:
            return None, None
        score = block.shared_expert_gate(rows)
        return shared(rows), score
