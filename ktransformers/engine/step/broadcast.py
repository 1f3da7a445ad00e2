"""Who else hears of a step before it runs: the other processes of a model that is cut."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ktransformers.operators.context import ForwardContext

__all__ = ["StepBroadcast"]

StepBroadcast = Callable[[torch.Tensor, torch.Tensor, ForwardContext, torch.Tensor, bool], None]
"""Called with token_ids, positions, context and keep as ModelRunner.reduced_step has them, and whether it is padded."""
