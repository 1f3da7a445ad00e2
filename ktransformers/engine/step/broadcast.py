"""The type of the function that sends a step to the other processes of a model before it runs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ktransformers.operators.context import ForwardContext

__all__ = ["StepBroadcast"]

StepBroadcast = Callable[[torch.Tensor, torch.Tensor, ForwardContext, torch.Tensor, bool], None]
"""Called with token_ids, positions, context and keep as ModelRunner.reduced_step has them, and whether it is padded."""
