"""Plans where the tower for pictures goes, and what it takes: on a GPU whole where that costs experts nothing, with
weights streamed from RAM where there is room for its work, else on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from ktransformers.config import EngineConfig
from ktransformers.engine.media.encoder import FEATURE_BYTES
from ktransformers.engine.media.towers import TowerPlace, blocks_of
from ktransformers.engine.model.tower import OpenedTower
from ktransformers.operators.device import CPU, Device
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.optimize.plan import Plan

__all__ = ["PICTURES", "PLANNED_PIXELS", "TOWER", "PlannedTower", "with_tower"]

TOWER, PICTURES = "tower", "pictures"
"""Lines of the plan: weights, and what one picture and the kept results need."""

PLANNED_PIXELS = 2048 * 2048
"""Of the largest picture that work space is planned for."""

_STREAMED_BLOCKS = 3  # the one that runs, the next one, and what another list of blocks fetched ahead


@dataclass(frozen=True, slots=True)
class PlannedTower:
    """A tower, where it computes, and the lines of the plan that say what it takes, {what: {device: bytes}}."""

    opened: OpenedTower
    place: TowerPlace
    nbytes: Mapping[str, Mapping[str, int]]


def with_tower(plan: Plan, opened: OpenedTower | None, config: EngineConfig) -> tuple[Plan, PlannedTower | None]:
    """Return `plan`, which experts do not fill yet, with the tower beside what it holds, and where that goes."""
    if opened is None:
        return plan, None
    tower = _placed(opened, plan, config)
    return replace(plan, extra_bytes={**plan.extra_bytes, **tower.nbytes}), tower


def _placed(opened: OpenedTower, plan: Plan, config: EngineConfig) -> PlannedTower:
    total, needs = plan.total_bytes, _Needs.of(opened.model)
    left = {name: free - total[name] for name, free in plan.capacity.items() if name != "cpu"}
    if left and config.tower_device != "cpu":
        name = max(left, key=lambda gpu: left[gpu])
        device = plan.devices[name]
        weights, work = opened.nbytes(device.dtype), needs.work(device, is_streamed=False)
        streamed = needs.work(device, is_streamed=True)
        if weights + work + _experts_on_cpu(plan) <= left[name]:
            return PlannedTower(opened, TowerPlace(device), _lines({name: weights}, {name: work}))
        if config.tower_device == "cuda" or streamed <= left[name]:
            place = TowerPlace(device, is_streamed=True)
            return PlannedTower(opened, place, _lines({"cpu": weights}, {name: streamed}))
    return PlannedTower(
        opened, TowerPlace(), _lines({"cpu": opened.nbytes()}, {"cpu": needs.work(CPU, is_streamed=True)})
    )


@dataclass(frozen=True, slots=True)
class _Needs:
    """Elements that a tower computes with: parameters outside of blocks, those of its largest one, and activations."""

    rest: int
    block: int
    activations: int

    @classmethod
    def of(cls, model: nn.Module) -> _Needs:
        blocks = blocks_of(model)
        sizes = [_size(block.parameters()) for block in blocks]
        linears = [module for block in blocks for module in block.modules() if isinstance(module, nn.Linear)]
        width = max((linear.in_features + linear.out_features for linear in linears), default=0)
        rows = PLANNED_PIXELS // _patch_pixels(model)
        return cls(_size(model.parameters()) - sum(sizes), max(sizes, default=0), 2 * rows * width)

    def work(self, device: Device, *, is_streamed: bool) -> int:
        """Bytes of activations, and of the parameters that come to the device, or are widened there, as they are
        computed with."""
        copied = self.rest + _STREAMED_BLOCKS * self.block if is_streamed else 0
        return (copied + self.activations) * device.dtype.itemsize


def _size(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _patch_pixels(model: nn.Module) -> int:
    """Pixels of a patch, which is a row in the tower."""
    patch = getattr(getattr(getattr(model, "config", None), "vision_config", None), "patch_size", 14)
    sides = patch if isinstance(patch, list | tuple) else (patch, patch)
    return max(int(sides[0]) * int(sides[1]), 1)


def _experts_on_cpu(plan: Plan) -> int:
    """Bytes of routed experts that would go to what is left of GPUs."""
    entries = (entry for entry in plan.entries if isinstance(plan.operators.get(entry.key), KTransformersExperts))
    return sum(entry.nbytes.get("cpu", 0) + entry.stored_experts for entry in entries)


def _lines(weights: Mapping[str, int], work: Mapping[str, int]) -> dict[str, dict[str, int]]:
    kept = {"cpu": FEATURE_BYTES}
    return {TOWER: dict(weights), PICTURES: {name: work.get(name, 0) + kept.get(name, 0) for name in {**work, **kept}}}
