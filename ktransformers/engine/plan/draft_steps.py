"""What is known before a model is loaded of drafting on GPUs: whether its steps are replayed, and where it can be."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ktransformers.cache.paged import LayerShape
from ktransformers.config import EngineConfig
from ktransformers.engine.model.assistant import lenders_of
from ktransformers.engine.model.opened import OpenedModel
from ktransformers.errors import UnsupportedError

__all__ = ["check_lenders", "why_drafts_run_eagerly"]


def why_drafts_run_eagerly(config: EngineConfig, places: Collection[str]) -> str | None:
    """Return why steps with draft tokens would run without CUDA graphs, which takes longer than they save; None:
    nothing is known to speak against it, or no layer is on a GPU. places: of all layers, "cpu" or "cuda:N"."""
    if all(place == "cpu" for place in places):
        return None
    if "cpu" in places:
        return "some layers are on the CPU"
    if config.tensor_parallel > 1 or config.pipeline > 1:
        return "the model is cut over several processes"
    if config.use_cuda_graph is False:
        return "--no_use_cuda_graph"
    return None


def check_lenders(draft: OpenedModel, target: OpenedModel, shapes: Sequence[LayerShape], last: str) -> None:
    """Raise UnsupportedError where what a model that drafts attends to, of caches of the target's layers with such
    `shapes`, is not on the device of the last layer."""
    for layer in sorted(set(lenders_of(draft.facts, target.facts).values())):
        place = shapes[layer].place
        if place != last:
            raise UnsupportedError(
                f"--draft_model {target.config.draft_model} attends to keys and values of layer {layer}, on {place}, "
                f"and the last layer is on {last}: load the model on one device, or take --speculative ngram"
            )
