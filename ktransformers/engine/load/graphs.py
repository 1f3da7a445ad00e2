"""Chooses how steps of a loaded model are captured as CUDA graphs, by what, in which sizes, and why not; then has their
kernels compiled and captures them, before any step is asked for."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from ktransformers.cache.paged import PagedCache
from ktransformers.config import EngineConfig
from ktransformers.core import CAPTURING, COMPILING, Progress
from ktransformers.engine.load.warmup import WarmupShapes, warm_up
from ktransformers.engine.plan.draft_steps import why_drafts_run_eagerly
from ktransformers.engine.plan.hardware import Hardware
from ktransformers.engine.step.broadcast import StepBlocks
from ktransformers.engine.step.cuda_graphs import GraphBackend
from ktransformers.engine.step.decode import DecodeSteps, PaddedSteps, why_not_captured
from ktransformers.engine.step.decode_inputs import StepSize, draft_sizes
from ktransformers.engine.step.forward import ForwardPass
from ktransformers.engine.step.graph_sizes import choices_of, replayed_drafts, replayed_sizes
from ktransformers.engine.step.layout import StepLayout
from ktransformers.engine.verify.layer_kinds import layer_kinds
from ktransformers.kernels.triton.common.compiling import compiles
from ktransformers.operators.attention.flash import FlashLayer
from ktransformers.optimize.plan import Plan

__all__ = ["StepGraphs", "choose_graphs", "forget_positions"]

logger = logging.getLogger(__name__)


def forget_positions(plan: Plan) -> None:
    """Give back what operators hold for the positions of a step that was made up."""
    for operator in plan.operators.values():
        operator.forget()


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """How steps are captured, before they are.

    backend: None: they are not. sizes: those of steps of several rows a sequence that are padded, and captured, as
    decode steps are. why_drafts_eager: why steps with draft tokens run without graphs on GPUs, so that --speculative
    auto has none; None: they have graphs, or nothing is on a GPU. blocks: in which steps come to other processes.
    """

    backend: GraphBackend | None
    sizes: Sequence[StepSize] = ()
    why_drafts_eager: str | None = None
    blocks: StepBlocks | None = None

    @torch.inference_mode()
    def prepare(
        self, forward: ForwardPass, cache: PagedCache, plan: Plan, extent: WarmupShapes, progress: Progress | None
    ) -> DecodeSteps | None:
        """Compile the kernels that steps of `extent` launch, and capture those of few rows.

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
                PaddedSteps(extent.max_batch_size, extent.num_pages, self.sizes),
                backend=backend,
                progress=lambda done, total: report(done, total, CAPTURING),
                choices=choices_of(plan),
                blocks=self.blocks,
            )

        can_pad = all(device.is_gpu for device in layout.devices)
        if compiles():
            decode = steps(None) if can_pad else None
            kinds = layer_kinds(forward.model, plan, cache.shapes)
            warm_up(forward, cache, decode, extent, kinds, lambda done, total: report(done, total, COMPILING))
            forget_positions(plan)
        return steps(self.backend) if can_pad else None

    def why_drafts_are_eager(self, decode: DecodeSteps | None) -> str | None:
        """Return `why_drafts_eager` once steps are captured. decode: those that are."""
        if decode is None or self.why_drafts_eager is not None:
            return self.why_drafts_eager
        most_kept = max((size.kept for size in decode.sizes), default=0)
        return None if most_kept > 1 else "no step of several rows with all logits could be captured"


def choose_graphs(
    config: EngineConfig,
    plan: Plan,
    layout: StepLayout,
    flash: Collection[FlashLayer],
    hardware: Hardware,
    extent: WarmupShapes,
    why_eager: str | None = None,
) -> StepGraphs:
    """Choose the graphs of steps of `extent`. Logs one line for a model on GPUs that has none. why_eager: why it can
    have none, by what is not in the plan.

    Steps are padded to the sizes of graphs without graphs too, where these could be and are not wanted.
    """
    if layout.is_cpu:
        has_gpus = any(entry.placement.generate_device != "cpu" for entry in plan.entries)
        return StepGraphs(None, (), "parts of the model are on a GPU, but no layer" if has_gpus else None)
    reason = why_eager or why_not_captured(plan, layout)
    if reason is not None:
        logger.info("decode steps run without CUDA graphs: %s", reason)
        return StepGraphs(None, (), reason)
    why_drafts_eager = why_drafts_run_eagerly(config, {place.device for place in plan.layer_devices})
    most_rows, batch = extent.most_rows, extent.max_batch_size
    max_drafts = config.max_drafts(why_drafts_eager)
    drafts = draft_sizes(hardware.draft_rows, max_drafts, most_rows, batch) if max_drafts else ()
    sizes = replayed_sizes(hardware.graph_rows, plan, layout, flash, most_rows, batch)
    sizes += replayed_drafts(drafts, plan, layout)
    if config.use_cuda_graph is False:
        logger.info("decode steps run without CUDA graphs: --no_use_cuda_graph")
        return StepGraphs(None, sizes, why_drafts_eager)
    devices = list(dict.fromkeys(device.torch_device for device in layout.devices))
    return StepGraphs(hardware.make_graphs(devices), sizes, why_drafts_eager)
