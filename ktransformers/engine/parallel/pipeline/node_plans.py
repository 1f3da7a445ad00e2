"""Plans a model over nodes before anything is loaded: what the planner makes of each stage on its node.

A plan of the whole model says what layers cost; nodes.py cuts by that, and each stage is planned as its engine would.
What such a plan has besides layers (workspaces, tables) is not known before: where a stage turns out too large for its
node, it is cut again with what it had more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ktransformers.cache.paged import PagedCache
from ktransformers.config import EngineConfig
from ktransformers.core import format_bytes
from ktransformers.engine.model.opened import OpenedModel
from ktransformers.engine.parallel.pipeline.link import StageLink
from ktransformers.engine.parallel.pipeline.nodes import LayerCost, Node, best_split, stage_cost
from ktransformers.engine.parallel.pipeline.stages import cut_stage, joined_layers
from ktransformers.engine.plan.cache_plan import CachePlan
from ktransformers.engine.plan.dry_run import on_one_thread
from ktransformers.engine.plan.hardware import Hardware
from ktransformers.engine.plan.planned import Planned
from ktransformers.engine.plan.planning import Planner
from ktransformers.errors import CapacityError
from ktransformers.models.facts import ModelFacts
from ktransformers.operators.device import Device, Devices
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.optimize.decode_bound import is_embedding, layer_of
from ktransformers.optimize.machine import Machine

__all__ = ["NodePlan", "StagePlan", "plan_nodes"]

_TRIES = 8
_PLENTY = 1 << 50


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The plan of one stage on its node. first, end: layers. ram, vram: bytes that are planned there. seconds: to read
    what a token needs of them."""

    node: Node
    first: int
    end: int
    ram: int
    vram: int
    seconds: float


@dataclass(frozen=True, slots=True)
class NodePlan:
    """The stages of a model that fit its nodes, in order."""

    stages: tuple[StagePlan, ...]

    @property
    def layers(self) -> str:
        """Number of layers of each stage, as --pipeline_layers takes them."""
        return ",".join(str(stage.end - stage.first) for stage in self.stages)

    @property
    def tokens_per_s(self) -> tuple[float, float]:
        """Tokens a second at most: of one sequence, which passes the stages in turn, and of as many sequences as there
        are stages."""
        seconds = [stage.seconds for stage in self.stages]
        return 1 / sum(seconds), 1 / max(seconds)


def plan_nodes(reopen: Callable[[EngineConfig], OpenedModel], config: EngineConfig, nodes: Sequence[Node]) -> NodePlan:
    """Find the best cut of a model over `nodes`. reopen: opens the model, headers only; a stage's skeleton is nobody
    else's.

    Raises CapacityError when none fits, ConfigError for more nodes than layers.
    """
    with on_one_thread():
        config = replace(config, use_cuda=None)
        whole = reopen(config)
        joined = joined_layers(whole)
        costs, first, last = _costs(_planned(whole, Node(_PLENTY)), whole.facts)
        besides = [(0, 0)] * len(nodes)
        for _ in range(_TRIES):
            bounds = best_split(costs, nodes, first, last, besides, joined)
            if bounds is None:
                raise CapacityError(_why_none(costs, nodes, first, last))
            layers = ",".join(str(end - begin) for begin, end in bounds)
            made = [
                _stage(reopen, replace(config, pipeline=len(nodes), pipeline_layers=layers), stage, node)
                for stage, node in enumerate(nodes)
            ]
            pairs = list(zip(made, nodes, strict=True))
            over = [(max(ram - node.ram, 0), max(vram - node.vram, 0)) for (ram, vram), node in pairs]
            if not any(map(any, over)):
                return NodePlan(
                    tuple(
                        StagePlan(node, begin, end, ram, vram, _seconds(costs, begin, end, last, node))
                        for ((ram, vram), node), (begin, end) in zip(pairs, bounds, strict=True)
                    )
                )
            besides = [(a + c, b + d) for (a, b), (c, d) in zip(besides, over, strict=True)]
    raise CapacityError(_why_none(costs, nodes, first, last))


def _planned(opened: OpenedModel, node: Node) -> Planned:
    opened = replace(opened, config=replace(opened.config, experts_from="ram"))  # else anything fits
    return Planner(opened, None, CachePlan.of(opened)).plan(_hardware(node))[0]


def _hardware(node: Node) -> Hardware:
    """A machine like the node. Its GPU is never asked for anything."""
    gpus = {"cuda:0": node.vram} if node.vram else {}
    machine = Machine(node.ram, node.ram, {"cpu": node.ram, **gpus})
    devices = Devices(lambda name: Device(name, torch.device("cpu"), torch.bfloat16, True))
    return Hardware(machine, devices, prefill_tools=lambda device: None)


def _stage(
    reopen: Callable[[EngineConfig], OpenedModel], config: EngineConfig, stage: int, node: Node
) -> tuple[int, int]:
    """Bytes in RAM and on the GPU."""
    part = cut_stage(reopen(config), StageLink(stage, config.pipeline))
    total = _planned(part, node).plan.total_bytes
    return total.get("cpu", 0), total.get("cuda:0", 0)


def _costs(planned: Planned, facts: ModelFacts) -> tuple[list[LayerCost], int, LayerCost]:
    """Of each layer; bytes of the embedding; of what comes behind the layers."""
    plan, costs = planned.plan, [LayerCost(0) for _ in planned.plan.layer_devices]
    first, last = 0, LayerCost(0)
    for entry in plan.entries:
        layer, operator, size = layer_of(entry), plan.operators.get(entry.key), entry.total_bytes
        if isinstance(operator, KTransformersExperts):
            assert facts.experts is not None
            part = LayerCost(0, size, 0.0, size * facts.experts.top_k[layer] / operator.num_experts)
        else:
            part = LayerCost(size, 0, float(size), 0.0)
        if layer >= 0:
            costs[layer] = costs[layer].plus(part)
        elif is_embedding(entry):
            first += size
        else:
            last = last.plus(part)
    for i, shape in enumerate(planned.shapes):
        costs[i] = costs[i].plus(LayerCost(sum(PagedCache.size_by_place([shape], planned.num_slots).values())))
    return costs, first, last


def _seconds(costs: Sequence[LayerCost], begin: int, end: int, last: LayerCost, node: Node) -> float:
    cost = last if end == len(costs) else LayerCost(0)
    for each in costs[begin:end]:
        cost = cost.plus(each)
    return stage_cost(cost, node).seconds


def _why_none(costs: Sequence[LayerCost], nodes: Sequence[Node], first: int, last: LayerCost) -> str:
    """Which nodes could hold how much, and how much there is."""
    total = first + last.dense + last.experts + sum(cost.dense + cost.experts for cost in costs)
    have = sum(node.ram + node.vram for node in nodes)
    largest = max(cost.dense + cost.experts for cost in costs)
    text = f"no cut fits: the model and its cache are {format_bytes(total)}, the nodes have {format_bytes(have)}"
    small = [i + 1 for i, node in enumerate(nodes) if node.ram + node.vram < largest]
    if small:
        which = ", ".join(map(str, small))
        text += f"; node {which} cannot hold the largest layer ({format_bytes(largest)})"
    return f"{text}; use more memory, a smaller quantization (--cpu_quant) or a shorter cache (--cache_lens)"
