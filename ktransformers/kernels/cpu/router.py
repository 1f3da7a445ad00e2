"""Top-k router: from a router's logits to expert ids and weights. Knows numbers, not experts.

Families differ in a few switches, all of them here: how logits become scores (`Scoring`); a bias that moves the choice
and not the weight (DeepSeek-V3, arXiv 2412.19437); experts in groups of which the best few may be chosen from; weights
that sum to 1; a scaling factor. Between equal scores the lower index wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ktransformers.kernels.cpu.base import WorkerPool, check_tensor
from ktransformers.kernels.extension import extension
from ktransformers.kernels.untraced import untraced

if TYPE_CHECKING:
    from ktransformers._native import RouterSpec as NativeSpec

__all__ = ["RouterSpec", "Scoring", "route"]

_SCORINGS = extension.scoring_kinds()


class Scoring(IntEnum):
    """Function that makes scores of a row's logits: a softmax over all experts, or a sigmoid of each logit."""

    SOFTMAX = _SCORINGS["SOFTMAX"]
    SIGMOID = _SCORINGS["SIGMOID"]


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How the routers of a family choose and weigh experts. Raises ValueError for numbers that do not fit together.

    num_groups consecutive groups of experts, of which topk_groups may be chosen from; a group is as good as its best
    expert (group_score "max", deepseek_v2) or its best two together ("top2", deepseek_v3).
    renormalize: weights are divided by their sum. scaling: factor of all weights.
    """

    top_k: int
    scoring: Scoring = Scoring.SOFTMAX
    num_groups: int = 1
    topk_groups: int = 1
    group_score: Literal["max", "top2"] = "top2"
    renormalize: bool = True
    scaling: float = 1.0

    def __post_init__(self) -> None:
        if self.top_k < 1 or not 1 <= self.topk_groups <= self.num_groups:
            raise ValueError(f"top_k {self.top_k} and topk_groups {self.topk_groups} of {self.num_groups} do not fit")
        if not isinstance(self.scoring, Scoring) or self.group_score not in ("max", "top2"):
            raise ValueError(
                f"scoring must be a Scoring and group_score 'max' or 'top2', got {self.scoring!r} and "
                f"{self.group_score!r}"
            )

    @property
    def native(self) -> NativeSpec:
        """Return the spec as the extension takes it."""
        return extension.RouterSpec(
            top_k=self.top_k,
            scoring=int(self.scoring),
            num_groups=self.num_groups,
            topk_groups=self.topk_groups,
            is_top2=self.group_score == "top2",
            is_renormalized=self.renormalize,
            scaling=float(self.scaling),
        )

    def check(self, num_experts: int) -> None:
        """Raise ValueError when the spec does not fit so many experts."""
        per_group = num_experts // self.num_groups
        if num_experts % self.num_groups or self.top_k > per_group * self.topk_groups:
            raise ValueError(
                f"{self.top_k} of {num_experts} experts cannot be chosen from {self.topk_groups} of "
                f"{self.num_groups} groups"
            )


@untraced
def route(logits: Tensor, spec: RouterSpec, pool: WorkerPool, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose experts: (ids int64 [T, K], weights fp32 [T, K]) from logits fp32 [T, E] on the CPU; bias fp32 [E] or
    None.

    The same bits for all tiers, thread counts and numbers of rows. Raises ValueError when the spec does not fit E.
    """
    check_tensor("logits", logits, (None, None))
    tokens, experts = logits.shape
    spec.check(experts)
    if bias is not None:
        check_tensor("bias", bias, (experts,))
    ids = torch.empty(tokens, spec.top_k, dtype=torch.int64)
    weights = torch.empty(tokens, spec.top_k)
    address = 0 if bias is None else bias.data_ptr()
    extension.route(
        pool.handle, spec.native, logits.data_ptr(), address, tokens, experts, ids.data_ptr(), weights.data_ptr()
    )
    return ids, weights
