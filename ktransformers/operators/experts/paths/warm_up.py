"""The stand-in for all paths of a layer in a warm-up, which launches and computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from typing_extensions import override

from ktransformers.operators.experts.paths.base import ExpertPath, ExpertStep, LayerExperts

__all__ = ["WarmUpPath"]


@dataclass(eq=False, repr=False)
class WarmUpPath(ExpertPath[None]):
    """Makes the launches of every path that takes a step: the one in front may take it in another step only. The result
    is zeros.
    """

    NAME: ClassVar[str] = "warm-up"
    paths: Sequence[ExpertPath[Any]] = ()

    @classmethod
    @override
    def is_for(cls, layer: LayerExperts) -> bool:
        return True

    @override
    def takes(self, step: ExpertStep) -> bool:
        return True

    @override
    def submit(self, step: ExpertStep) -> None:
        for path in self.paths:
            if path.takes(step):
                path.warm_up(step)

    @override
    def collect(self, issued: None, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(like)
