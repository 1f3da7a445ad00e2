"""Chooses how far apart the states of recurrent layers are kept inside of a prompt. Pure."""

from __future__ import annotations

__all__ = ["LEAST_INTERVAL", "snapshot_interval"]

LEAST_INTERVAL = 256
"""Tokens between snapshots inside of a prompt, at least."""


def snapshot_interval(snapshots: int, longest: int) -> int:
    """Choose the tokens between snapshots inside of a prompt, so that the longest one takes half of them; 0: there are
    none."""
    return max(-(-longest // max(snapshots // 2, 1)), LEAST_INTERVAL) if snapshots else 0
