"""Chooses which layers go to which node of a pipeline. Pure: numbers of bytes and rates, no models.

A stage is some neighbouring layers, in the order of the nodes. What it holds besides routed experts goes to the node's
GPU, if there is one; experts fill what is left of that, and RAM. Of all cuts in which no stage is larger than its node
the one is taken whose slowest stage reads what a token needs in the least time: found by going over all stages and
all places where one may end.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache

from ktransformers.config import MAX_STAGES
from ktransformers.errors import ConfigError

__all__ = ["RAM_RATE", "VRAM_RATE", "LayerCost", "Node", "StageCost", "best_split", "parse_nodes", "stage_cost"]

GIB = 1 << 30
RAM_RATE, VRAM_RATE = 50.0, 1000.0
"""GB/s that are assumed where nobody says."""

_KEYS = ("ram", "vram", "gbs", "vram_gbs")
_EXAMPLE = '--nodes "ram=64,vram=24 ram=128,gbs=200"'


@dataclass(frozen=True, slots=True)
class Node:
    """A machine for one stage of a pipeline. ram, vram: bytes that are free. ram_rate, vram_rate: bytes a second that
    are read."""

    ram: int
    vram: int = 0
    ram_rate: float = RAM_RATE * 1e9
    vram_rate: float = VRAM_RATE * 1e9

    def __str__(self) -> str:
        """In GiB."""
        parts = [f"{self.ram / GIB:g} GiB of RAM"]
        if self.vram:
            parts.append(f"{self.vram / GIB:g} GiB of VRAM")
        return " and ".join(parts)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Bytes that layers hold, and that a token reads of them. dense: held besides routed experts, keys and values
    included; read_dense, read_experts: of them a token reads so many."""

    dense: int
    experts: int = 0
    read_dense: float = 0.0
    read_experts: float = 0.0

    def plus(self, other: LayerCost) -> LayerCost:
        """Return the cost of both together."""
        return LayerCost(
            self.dense + other.dense,
            self.experts + other.experts,
            self.read_dense + other.read_dense,
            self.read_experts + other.read_experts,
        )


@dataclass(frozen=True, slots=True)
class StageCost:
    """The cost of a stage on its node. ram, vram: bytes there. seconds: for what a token reads. missing: bytes that the
    node lacks, 0 where it fits."""

    ram: int
    vram: int
    seconds: float
    missing: int


def parse_nodes(text: str) -> list[Node]:
    """Parse nodes, such as "ram=64,vram=24,gbs=90,vram_gbs=1000 ram=32": GiB and GB/s, a node each, in order. Raises
    ConfigError."""
    nodes = []
    for part in re.split(r"[;\s]+", text.strip()):
        values = {}
        for each in part.split(","):
            key, _, value = each.partition("=")
            try:
                values[key] = float(value)
            except ValueError:
                values[key] = math.nan
            if key not in _KEYS or not 0 < values[key] < math.inf:
                raise ConfigError(f"--nodes: {each!r:.40} is none of {', '.join(_KEYS)}=NUMBER; an example: {_EXAMPLE}")
        if "ram" not in values:
            raise ConfigError(
                f"--nodes: {part!r:.40} does not say how much ram there is, in GiB; an example: {_EXAMPLE}"
            )
        rates = values.get("gbs", RAM_RATE) * 1e9, values.get("vram_gbs", VRAM_RATE) * 1e9
        nodes.append(Node(int(values["ram"] * GIB), int(values.get("vram", 0) * GIB), *rates))
    if len(nodes) > MAX_STAGES:
        raise ConfigError(f"--nodes: {len(nodes)} nodes; a pipeline has at most {MAX_STAGES} stages")
    return nodes


def stage_cost(cost: LayerCost, node: Node, in_ram: int = 0, on_gpu: int = 0) -> StageCost:
    """Return the cost of a stage whose layers cost `cost` together. in_ram, on_gpu: bytes besides, on_gpu only where
    there is one."""
    if not node.vram:
        ram = cost.dense + cost.experts + in_ram
        seconds = (cost.read_dense + cost.read_experts) / node.ram_rate
        return StageCost(ram, 0, seconds, max(ram - node.ram, 0))
    held = cost.dense + on_gpu
    inside = min(max(node.vram - held, 0), cost.experts)
    share = inside / cost.experts if cost.experts else 0.0
    ram, vram = cost.experts - inside + in_ram, held + inside
    seconds = (cost.read_dense + share * cost.read_experts) / node.vram_rate
    seconds += (1 - share) * cost.read_experts / node.ram_rate
    return StageCost(ram, vram, seconds, max(ram - node.ram, 0) + max(vram - node.vram, 0))


def best_split(
    costs: Sequence[LayerCost],
    nodes: Sequence[Node],
    first: int = 0,
    last: LayerCost = LayerCost(0),
    besides: Sequence[tuple[int, int]] = (),
    joined: Collection[int] = (),
) -> list[tuple[int, int]] | None:
    """Return the first layer and the end of each stage; None where no cut fits.

    first: bytes that the first stage has in RAM besides, of the embedding; last: what the last one has besides.
    besides: what else each has, in RAM and on a GPU. joined: layers that no stage can begin with.
    Raises ConfigError for more nodes than layers.
    """
    count = len(nodes)
    if not 1 <= count <= len(costs):
        raise ConfigError(f"{count} nodes for {len(costs)} layers: each stage needs one")
    sums = [LayerCost(0)]
    for cost in costs:
        sums.append(sums[-1].plus(cost))

    def seconds(stage: int, begin: int, end: int) -> float:
        a, b = sums[begin], sums[end]
        cost = LayerCost(
            b.dense - a.dense, b.experts - a.experts, b.read_dense - a.read_dense, b.read_experts - a.read_experts
        )
        in_ram, on_gpu = besides[stage] if besides else (0, 0)
        if stage == count - 1:
            cost = cost.plus(last)
        found = stage_cost(cost, nodes[stage], in_ram + (first if stage == 0 else 0), on_gpu)
        return math.inf if found.missing else found.seconds

    @cache
    def best(stages: int, end: int) -> tuple[float, int]:
        """Return (the slowest of the first `stages`, where the last of them begins), for the layers before end."""
        if stages == 1:
            return seconds(0, 0, end), 0
        begins = (begin for begin in range(stages - 1, end) if begin not in joined)
        parts = ((max(best(stages - 1, begin)[0], seconds(stages - 1, begin, end)), begin) for begin in begins)
        return min(parts, default=(math.inf, 0))

    if math.isinf(best(count, len(costs))[0]):
        return None
    bounds, end = [], len(costs)
    for stages in range(count, 0, -1):
        begin = best(stages, end)[1]
        bounds.append((begin, end))
        end = begin
    return bounds[::-1]
