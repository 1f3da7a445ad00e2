"""Loads the engine of a process of balance_serve. Importing this module is most of what starting one takes."""

from __future__ import annotations

from dataclasses import replace

from ktransformers.core import Progress
from ktransformers.engine.load.builder import Hardware, build_engine
from ktransformers.engine.sequence.profiled import model_meta
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.optimize.plan import Plan
from ktransformers.server.balance.engine_process import LoadedEngine
from ktransformers.server.balance.messages import EngineFacts, EngineOptions

__all__ = ["load_engine"]


def load_engine(options: EngineOptions, progress: Progress) -> LoadedEngine:
    """Load the engine of these options. Raises the KTransformersError that the user has to see."""
    hardware = Hardware.detect(options.config)
    engine = build_engine(
        options.config,
        page_size=options.page_size,
        max_batch_size=options.max_batch_size,
        progress=progress,
        hardware=replace(hardware, machine=hardware.machine.beside(options.spare_bytes), is_served=True),
    )
    experts = _experts_on_cpu(engine.plan)
    facts = EngineFacts(
        scheduler=replace(engine.scheduler_config, num_stages=engine.config.pipeline),
        uses_gpus=engine.uses_gpus,
        num_experts=max((count for count, _ in experts), default=0),
        expert_bytes=sum(nbytes / count for count, nbytes in experts),
        gpu_bytes=engine.model.card.gpu_bytes,
        has_tower=engine.pictures is not None,
        profiled=model_meta(engine, "balance_serve"),
        digest=engine.identified.sampled.digest,
        weights=engine.identified.weights.states,
    )
    return facts, engine.executor


def _experts_on_cpu(plan: Plan) -> list[tuple[int, int]]:
    """(experts, bytes of them all) of each layer that has them there."""
    sizes = [(entry.key, entry.nbytes.get("cpu", 0) + entry.stored_experts) for entry in plan.entries]
    found = ((plan.operators.get(key), nbytes) for key, nbytes in sizes)
    return [(made.num_experts, nbytes) for made, nbytes in found if isinstance(made, KTransformersExperts) and nbytes]
