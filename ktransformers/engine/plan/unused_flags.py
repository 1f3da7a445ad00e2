"""Flags that a plan has no use for, each one line of the log. Knows plans; decides nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from ktransformers.config import SPECULATIVE_TOKENS, EngineConfig
from ktransformers.operators.attention.gqa import KAttention
from ktransformers.operators.attention.mla import KMLAAttention
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.optimize.plan import Plan
from ktransformers.weights.source import WeightSource

__all__ = ["report_unused"]

logger = logging.getLogger(__name__)


def report_unused(config: EngineConfig, plan: Plan, source: WeightSource) -> None:
    """Log a warning for each flag about weights, attention and drafts that changes nothing in this plan; source: of its
    weights."""
    for flag, reason in _unused(config, plan, source):
        logger.warning("%s has no effect: %s", flag, reason)


def _unused(config: EngineConfig, plan: Plan, source: WeightSource) -> Iterator[tuple[str, str]]:
    attention = [op for op in plan.operators.values() if isinstance(op, KMLAAttention | KAttention)]
    if config.sparse_attention == "off" and not any(op.can_be_sparse for op in attention):
        yield "--sparse_attention off", "the model attends to all positions anyway"
    if config.experts_ram and not plan.stored_experts:
        yield "--experts_ram", "no experts are read from the disk (--experts_from disk)"
    if config.speculative == "off" and config.speculative_tokens != SPECULATIVE_TOKENS:
        yield "--speculative_tokens", "--speculative off drafts nothing"
    experts = [op for op in plan.operators.values() if isinstance(op, KTransformersExperts)]
    if config.cpu_quant is not None and not any(op.is_quantized(source) for op in experts):
        yield "--cpu_quant", "no experts are stored as F32, F16, BF16 or FP8"
