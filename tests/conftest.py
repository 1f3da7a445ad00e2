"""Triton interprets its kernels where there is no GPU: decided when a kernel is defined, so set before any import."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
