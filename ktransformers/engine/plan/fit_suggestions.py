"""Suggests what would make a model fit: flags whose effect is computed by planning again with each of them.

Nothing is offered that was not planned: what a flag saves is the difference of two plans on the devices that are short.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ktransformers.config import CPU_QUANT_TYPES, EngineConfig
from ktransformers.engine.plan.hardware import Hardware
from ktransformers.engine.plan.planned import Planned
from ktransformers.errors import KTransformersError
from ktransformers.optimize.hot_slots import HOT_EXPERTS
from ktransformers.optimize.plan import Plan
from ktransformers.optimize.streaming import STAGING

__all__ = ["FitSuggestion", "FitSuggestions", "find_fit_suggestions", "needed_bits", "shortfall"]

PlanAgain = Callable[[EngineConfig, Hardware], Planned]
"""Plans the same model with another configuration, on the hardware as it is."""

_LEAST_CACHE = 512
_CHUNKS = (2048, 1024, 512)
_KV_TYPES = {"auto": ("bf16", "int8"), "fp32": ("bf16", "int8"), "bf16": ("int8",)}
_QUANTS = tuple(name for name in ("q8_0", "q5_k", "q4_k") if name in CPU_QUANT_TYPES)


@dataclass(frozen=True, slots=True)
class FitSuggestion:
    """A flag that would save memory on the devices that are short.

    flag: as it is typed. config: the configuration with it. saves: bytes.

    is_enough: whether the model fits with this alone.
    """

    flag: str
    config: EngineConfig
    saves: int
    is_enough: bool


@dataclass(frozen=True, slots=True)
class FitSuggestions:
    """Flags that would help a model to fit. are_enough: whether it fits with all of them, `config`, together."""

    each: tuple[FitSuggestion, ...]
    config: EngineConfig
    are_enough: bool
    saves: int


def shortfall(plan: Plan) -> dict[str, int]:
    """Return {device: bytes that are missing there}; empty when the plan fits."""
    total = plan.total_bytes
    missing = {device: total[device] - plan.capacity.get(device, 0) for device in total}
    return {device: nbytes for device, nbytes in missing.items() if nbytes > 0}


def needed_bits(plan: Plan, parameters: int) -> float:
    """Return the bits a weight, in the mean, at which the weights would fit beside cache and work space; at most 0:
    never. Slots for experts would take what is left."""
    beside = [nbytes for what, nbytes in plan.extra_bytes.items() if what != HOT_EXPERTS]
    left = sum(plan.capacity.values()) - sum(sum(nbytes.values()) for nbytes in beside)
    return 8 * left / max(parameters, 1)


def find_fit_suggestions(
    planned: Planned, config: EngineConfig, hardware: Hardware, plan_again: PlanAgain
) -> FitSuggestions:
    """Find flags that help a plan which does not fit. config: what it was planned with."""
    short = tuple(shortfall(planned.plan))
    before = _missing(planned, short)
    found: list[FitSuggestion] = []
    with _quietly():
        for trials in _trials(planned, config, hardware):
            best = _best(trials, before, short, hardware, plan_again)
            if best is not None:
                found.append(best)
        joined = _joined(config, found)
        again = _planned(joined, hardware, plan_again) if found else None
    together = again if again is not None and again.plan.misfit() is None else None
    saves = 0 if again is None else before - _missing(again, short)
    return FitSuggestions(tuple(found), joined, together is not None, saves)


def _trials(planned: Planned, config: EngineConfig, hardware: Hardware) -> Iterator[list[tuple[str, EngineConfig]]]:
    """Yield, for each flag, the values to try, the mildest first."""
    slots = planned.num_slots // 2
    caches = []
    while slots >= _LEAST_CACHE:
        caches.append((f"--cache_lens {slots}", replace(config, cache_lens=slots)))
        slots //= 2
    yield caches
    kv_types = _KV_TYPES.get(config.kv_type, ())
    yield [(f"--kv_type {name}", replace(config, kv_type=name)) for name in kv_types]
    if any(planned.plan.devices[layer_device.device].is_gpu for layer_device in planned.plan.layer_devices):
        smaller = (size for size in _CHUNKS if size < planned.chunk_size)
        yield [(f"--chunk_size {size}", replace(config, chunk_size=size)) for size in smaller]
    if config.cpu_memory_size_GB:
        yield [("--cpu_memory_size_GB 0", replace(config, cpu_memory_size_GB=0.0))]
    held = config.cpu_quant
    quants = _QUANTS[_QUANTS.index(held) + 1 :] if held in _QUANTS else _QUANTS
    yield [(f"--cpu_quant {name}", replace(config, cpu_quant=name)) for name in quants]
    if config.experts_from == "ram":
        yield [("--experts_from auto", replace(config, experts_from="auto"))]
    if config.experts_ram:
        yield [("--experts_ram 0", replace(config, experts_ram=0.0))]
    if config.gpu_memory and hardware.has_gpus:
        yield [("--gpu_memory 0", replace(config, gpu_memory=0.0))]
    if config.use_cuda and hardware.has_gpus:
        yield [("--no_use_cuda", replace(config, use_cuda=False))]


def _best(
    trials: Sequence[tuple[str, EngineConfig]],
    before: int,
    short: tuple[str, ...],
    hardware: Hardware,
    plan_again: PlanAgain,
) -> FitSuggestion | None:
    """The mildest of the trials that is enough, else the last, which saves most; None when it saves nothing."""

    def tried(flag: str, config: EngineConfig) -> FitSuggestion | None:
        again = _planned(config, hardware, plan_again)
        if again is None:
            return None
        saves = before - _missing(again, short)
        return FitSuggestion(flag, config, saves, again.plan.misfit() is None) if saves > 0 else None

    last = tried(*trials[-1]) if trials else None
    if last is None or not last.is_enough:
        return last
    found = (tried(*trial) for trial in trials[:-1])
    return next((suggestion for suggestion in found if suggestion is not None and suggestion.is_enough), last)


def _planned(config: EngineConfig, hardware: Hardware, plan_again: PlanAgain) -> Planned | None:
    """None for a configuration that is refused for another reason."""
    used = hardware.without_gpus() if config.use_cuda is False and hardware.has_gpus else hardware
    try:
        return plan_again(config, used)
    except KTransformersError:
        return None


def _missing(planned: Planned, devices: tuple[str, ...]) -> int:
    """Bytes that `devices` hold beyond what they have; negative where there is room.

    What only fills what is left of a GPU does not count, experts, slots for them and what they are streamed through: it
    would hide what was saved.
    """
    plan, moved = planned.plan, planned.filling.moved
    total = sum(plan.total_bytes.get(device, 0) - plan.capacity.get(device, 0) for device in devices)
    filled = sum(entry.nbytes.get(moved[entry.key], 0) for entry in plan.entries if moved.get(entry.key) in devices)
    staging = plan.extra_bytes.get(STAGING, {})
    filled += sum(hot.nbytes for hot in planned.hots if hot.is_filling and hot.device in devices)
    return total - filled - sum(nbytes for device, nbytes in staging.items() if device in devices and device != "cpu")


def _joined(config: EngineConfig, suggestions: Iterable[FitSuggestion]) -> EngineConfig:
    """`config` with what every suggestion changes, --no_use_cuda aside, which undoes what the others are for."""
    names = ("cache_lens", "kv_type", "chunk_size", "cpu_memory_size_GB", "cpu_quant", "gpu_memory", "experts_ram")
    changed = {
        name: getattr(suggestion.config, name)
        for suggestion in suggestions
        for name in names
        if getattr(suggestion.config, name) != getattr(config, name)
    }
    return replace(config, **changed)


@contextmanager
def _quietly() -> Iterator[None]:
    """What planning logs was logged by the first plan."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
