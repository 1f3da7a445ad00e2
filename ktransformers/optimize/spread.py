"""Spreads layers over several GPUs, when no rule file of the user's says where they go.

Consecutive layers share a GPU, so that hidden states cross as often as there are GPUs. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["spread_layers"]


def spread_layers(num_layers: int, free: Mapping[str, int]) -> dict[int, str]:
    """Return {first layer: device}, as a transfer_map has it: each device gets layers in proportion to its free bytes.

    free: in the order in which layers pass through the devices. Those too small for a layer get none.
    """
    total, before, starts = sum(free.values()), 0, dict[int, str]()
    for device, nbytes in free.items():
        first = round(num_layers * before / max(total, 1))
        before += nbytes
        if round(num_layers * before / max(total, 1)) > first:
            starts[first] = device
    return starts
