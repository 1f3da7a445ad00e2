"""Says whether steps with draft tokens are replayed on GPUs, as far as that is known before a model is loaded."""

from __future__ import annotations

from collections.abc import Collection

from ktransformers.config import EngineConfig

__all__ = ["why_drafts_run_eagerly"]


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
