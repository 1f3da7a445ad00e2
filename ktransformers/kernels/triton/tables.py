"""What kernels look codes up in: one tensor per device, made when it is first asked for.

Every kernel that reads weights takes its address beside `one`; readers of types without tables never touch it. The
first call of a kernel compiles it, outside of a graph's capture, and makes the tensor then.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

__all__ = ["tables"]


@cache
def tables(device: torch.device) -> Tensor:
    """uint8, on the device: the tables of all types, at the offsets that their readers know."""
    return torch.zeros(16, dtype=torch.uint8, device=device)
