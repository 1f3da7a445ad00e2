"""Base of all operators that choose the positions which attention sees, and what becomes of them when it is off."""

from __future__ import annotations

import functools
import logging

from torch import nn
from typing_extensions import override

from ktransformers.operators.base import OperatorConfig, Placement, Requirements
from ktransformers.operators.wrapper import WrapperOperator
from ktransformers.weights.source import WeightSource

__all__ = ["SparseIndexer", "log_dense"]

logger = logging.getLogger(__name__)


@functools.cache
def log_dense() -> None:
    """Warn that the model attends to all positions: once, not for every layer."""
    logger.warning(
        "--sparse_attention off: the model attends to all positions, where it was trained to choose some; answers "
        "differ in sequences longer than what it chooses (index_topk in its config)"
    )


class SparseIndexer(WrapperOperator):
    """Stands in for an indexer; its projections and norms are operators of their own.

    is_used: False with --sparse_attention off, which reads none of its tensors. index_dim: of its keys in the cache.
    index_pool: positions that it chooses together, which have to lie in one page of the cache.
    """

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        self.is_used = config.sparse_attention != "off"
        self.index_dim, self.index_pool = 0, 1
        if not self.is_used:
            log_dense()

    @override
    def owned_children(self) -> frozenset[str]:
        return frozenset() if self.is_used else frozenset(name for name, _ in self.inner.named_children())

    @override
    def requirements(self, source: WeightSource) -> Requirements:
        """Require nothing but the stored names of its tensors when the indexer is not used."""
        if self.is_used:
            return super().requirements(source)
        needs = Requirements()
        for name, _ in self.inner.named_parameters():
            info = source.find(f"{self.key}.{name}")
            needs.stored_names.update(() if info is None else info.stored_names)
        return needs

    @override
    def load(self, source: WeightSource) -> None:
        if self.is_used:
            super().load(source)
            return
        for name in self.inner._parameters:  # its own, which would be missed
            self.inner._parameters[name] = None
