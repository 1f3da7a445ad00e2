"""Makes the steps of a loaded model ready on GPUs before any is asked for: kernels compiled, decode steps captured."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ktransformers.cache.paged import PagedCache
from ktransformers.core import CAPTURING, COMPILING, Progress
from ktransformers.engine.load.warmup import WarmupShapes, warm_up
from ktransformers.engine.step.broadcast import StepBlocks
from ktransformers.engine.step.cuda_graphs import GraphBackend
from ktransformers.engine.step.decode import DecodeSteps, PaddedSteps
from ktransformers.engine.step.decode_inputs import StepSize
from ktransformers.engine.step.forward import ForwardPass
from ktransformers.engine.step.graph_sizes import choices_of
from ktransformers.engine.verify.layer_kinds import layer_kinds
from ktransformers.kernels.triton.common.compiling import compiles
from ktransformers.optimize.plan import Plan

__all__ = ["forget_positions", "prepare_decode"]

logger = logging.getLogger(__name__)


def forget_positions(plan: Plan) -> None:
    """Give back what operators hold for the positions of a step that was made up."""
    for operator in plan.operators.values():
        operator.forget()


@torch.inference_mode()
def prepare_decode(
    forward: ForwardPass,
    cache: PagedCache,
    plan: Plan,
    extent: WarmupShapes,
    backend: GraphBackend | None,
    progress: Progress | None,
    mixed: Sequence[StepSize] = (),
    blocks: StepBlocks | None = None,
) -> DecodeSteps | None:
    """Compile the kernels that steps of `extent` launch, and capture those of few rows on `backend`; None: they are not
    captured.

    mixed: sizes of steps of several rows a sequence that are padded, and captured, as decode steps are. blocks: in
    which steps come to other processes.

    Returns None when layers are on the CPU: their steps are all alike.
    """
    layout = forward.layout
    if layout is None:
        return None
    report = progress or (lambda done, total, name: None)

    def steps(backend: GraphBackend | None) -> DecodeSteps:
        return DecodeSteps(
            forward,
            cache,
            PaddedSteps(extent.max_batch_size, extent.num_pages, mixed),
            backend=backend,
            progress=lambda done, total: report(done, total, CAPTURING),
            choices=choices_of(plan),
            blocks=blocks,
        )

    can_pad = all(device.is_gpu for device in layout.devices)
    if compiles():
        decode = steps(None) if can_pad else None
        kinds = layer_kinds(forward.model, plan, cache.shapes)
        warm_up(forward, cache, decode, extent, kinds, lambda done, total: report(done, total, COMPILING))
        forget_positions(plan)
    return steps(backend) if can_pad else None
