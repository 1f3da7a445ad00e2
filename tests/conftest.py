"""Before anything imports Triton: without a GPU its kernels run in its interpreter, which is chosen at import."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
