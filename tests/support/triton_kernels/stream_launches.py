"""Launches of the kernels of several residual streams, for compile_launches.py."""

import torch

from ktransformers.kernels.triton.attention.gated_streams import collapse_streams, norm_streams, scaled_silu
from ktransformers.kernels.triton.attention.hyper import collapse
from ktransformers.kernels.types import HyperSpec


def call_hyper(tokens, streams=4, width=4096):
    spec = HyperSpec(streams, 20, 1e-6, 1e-6)
    x = torch.zeros(tokens, streams, width, dtype=torch.bfloat16)
    collapse(x, torch.zeros(spec.width, streams * width), torch.zeros(spec.width), torch.zeros(3), spec)


def call_gated_streams(tokens, streams=4, width=2560, narrow=320):
    x = torch.zeros(tokens, streams * width, dtype=torch.bfloat16)
    normed = norm_streams(x, torch.zeros(streams * width), 1e-6, streams)
    scaled_silu(x[:, :narrow].contiguous(), 1 / streams)
    for inject in (x[:, :streams].contiguous(), None):
        collapse_streams(normed, x, inject, streams)
