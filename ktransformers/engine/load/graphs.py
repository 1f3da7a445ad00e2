"""Chooses how steps of a loaded model are captured as CUDA graphs: by what, in which sizes, and why not."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

from ktransformers.config import EngineConfig
from ktransformers.engine.load.warmup import WarmupShapes
from ktransformers.engine.plan.draft_steps import why_drafts_run_eagerly
from ktransformers.engine.plan.hardware import Hardware
from ktransformers.engine.step.cuda_graphs import GraphBackend
from ktransformers.engine.step.decode import DecodeSteps, why_not_captured
from ktransformers.engine.step.decode_inputs import StepSize, draft_sizes
from ktransformers.engine.step.graph_sizes import replayed_drafts, replayed_sizes
from ktransformers.engine.step.layout import StepLayout
from ktransformers.operators.attention.flash import FlashLayer
from ktransformers.optimize.plan import Plan

__all__ = ["StepGraphs", "choose_graphs"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """How steps are captured, before they are.

    backend: None: they are not. sizes: those of steps of several rows a sequence that are padded. why_drafts_eager: why
    steps with draft tokens run without graphs on GPUs, so that --speculative auto has none; None: they have graphs, or
    nothing is on a GPU.
    """

    backend: GraphBackend | None
    sizes: tuple[StepSize, ...] = ()
    why_drafts_eager: str | None = None

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
