"""Triton runs kernels in its interpreter where there is no GPU: decided when a kernel is defined, so set before that."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
