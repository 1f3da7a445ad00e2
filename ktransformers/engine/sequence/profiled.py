"""Describes a loaded model and its machine, for profiles."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ktransformers import __version__
from ktransformers.config import EngineConfig
from ktransformers.engine.model.card import ModelCard
from ktransformers.hub.locate import title_of
from ktransformers.optimize.machine_speed import GpuSpeed, SpeedFile
from ktransformers.profiling.messages import ProfileMeta
from ktransformers.system.cpu_names import cpu_name

if TYPE_CHECKING:
    from ktransformers.engine.load.builder import Engine

__all__ = [
    "card_meta",
    "model_meta",
]

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks)\.(\d+)\.")


def model_meta(engine: Engine, backend: str) -> ProfileMeta:
    """Describe a loaded model and where it runs, for a profile."""
    from ktransformers.operators.experts.routed import KTransformersExperts  # late: it imports every kernel

    card = engine.model.card
    expert_bytes, on_gpu = [0] * card.num_layers, [0] * card.num_layers
    types: set[str] = set()
    for entry in engine.plan.entries:
        operator, found = engine.plan.operators.get(entry.key), _LAYER.search(entry.key)
        if not isinstance(operator, KTransformersExperts) or found is None or int(found.group(1)) >= card.num_layers:
            continue
        layer = int(found.group(1))
        expert_bytes[layer] = (entry.total_bytes + entry.stored_experts) // operator.num_experts
        on_gpu[layer] = operator.num_experts if operator.device.is_gpu else 0
        types.update(entry.quant_types)
    model = _model(card, engine.config, engine.model.architecture)
    model |= {"expert_bytes": expert_bytes, "types": {"experts": sorted(types)}}
    gpus = [name for name in engine.plan.weight_bytes if name != "cpu"]
    machine = _machine(engine.pool.num_threads, engine.pool.isa.value, gpus)
    return ProfileMeta(
        backend=backend, version=__version__, model=model, placement={"experts_on_gpu": on_gpu}, machine=machine
    )


def card_meta(card: ModelCard, config: EngineConfig, backend: str) -> ProfileMeta:
    """Describe a model that runs without our operators, for a profile."""
    placement = {"experts_on_gpu": [0] * card.num_layers}
    machine = _machine(config.cpu_infer or None, None, [])
    return ProfileMeta(
        backend=backend, version=__version__, model=_model(card, config, None), placement=placement, machine=machine
    )


def _model(card: ModelCard, config: EngineConfig, architecture: str | None) -> dict[str, Any]:
    path = config.gguf_path or config.model_path
    return {
        "name": card.family if path is None else title_of(path),
        "architecture": architecture or card.family,
        "num_layers": card.num_layers,
        "num_experts": card.num_experts,
        "top_k": card.num_used_experts,
        "expert_bytes": [0] * card.num_layers,
        "types": {"files": card.quantization},
    }


def _machine(num_threads: int | None, isa: str | None, gpus: Sequence[str]) -> dict[str, Any]:
    """GB/s as doctor measured them on this machine; null where it did not. gpus: names of devices."""
    speed = SpeedFile().read()
    known = {} if speed is None else speed.gpus
    return {
        "cpu": cpu_name(),
        "num_threads": num_threads,
        "isa": isa,
        "memory_gbps": None if speed is None else round(speed.cpu.best_read / 1e9, 1),
        "gpus": [_gpu(name, known.get(name)) for name in gpus],
    }


def _gpu(device: str, speed: GpuSpeed | None) -> dict[str, Any]:
    if speed is None:
        return {"name": device, "memory_gbps": None}
    return {"name": speed.name, "memory_gbps": round(speed.read / 1e9, 1)}
