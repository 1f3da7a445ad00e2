"""What must not change when an engine is replaced.

How many deaths are too many, and how long to wait, is `system/restart_policy.py`'s.
"""

from __future__ import annotations

from dataclasses import replace

from ktransformers.config import EngineConfig
from ktransformers.server.balance.messages import EngineFacts

__all__ = ["pinned", "shortfall"]


def pinned(config: EngineConfig, facts: EngineFacts) -> EngineConfig:
    """Return the configuration in which an engine loads as the one with these facts did, whatever memory is free now.

    Where it does not fit any more it says so, instead of becoming a smaller one or one without GPUs.
    """
    return replace(
        config,
        cache_lens=facts.scheduler.total_len,
        chunk_size=facts.scheduler.chunk_size,
        use_cuda=facts.uses_gpus if config.use_cuda is None else config.use_cuda,
    )


def shortfall(first: EngineFacts, now: EngineFacts) -> str | None:
    """Return why an engine with the facts `now` cannot go on with the plans made for the `first` one; None when it
    can.
    """
    for name in ("num_pages", "chunk_size", "num_states"):
        had, has = getattr(first.scheduler, name), getattr(now.scheduler, name)
        if has < had:
            return f"{name} is {has}, and the scheduler counts on {had}"
    for name in ("page_size", "vocab_size", "eos_token_ids", "max_model_len", "tiers"):
        had, has = getattr(first.scheduler, name), getattr(now.scheduler, name)
        if has != had:
            return f"{name} is {has}, and was {had}"
    return None
