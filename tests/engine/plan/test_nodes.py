"""Layers over nodes: the best cut by numbers alone, and by what the planner makes of a model."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path

import pytest

from ktransformers.cli import main
from ktransformers.config import EngineConfig
from ktransformers.engine.model.opened import OpenedModel, open_model, open_synthetic
from ktransformers.engine.parallel.pipeline.node_plans import NodePlan, plan_nodes
from ktransformers.engine.parallel.pipeline.nodes import GIB, LayerCost, Node, best_split, parse_nodes, stage_cost
from ktransformers.errors import CapacityError, ConfigError
from ktransformers.models.synthetic_shapes import find_shape
from tests.support.models.demo import DEMO_GGUF


def slowest(costs: list[LayerCost], nodes: list[Node], first: int, last: LayerCost, cut: tuple[int, ...]) -> float:
    """Seconds of the slowest stage; infinite where one does not fit."""
    found = 0.0
    for stage, (begin, end) in enumerate(itertools.pairwise((0, *cut, len(costs)))):
        cost = last if end == len(costs) else LayerCost(0)
        for each in costs[begin:end]:
            cost = cost.plus(each)
        made = stage_cost(cost, nodes[stage], first if begin == 0 else 0)
        found = max(found, math.inf if made.missing else made.seconds)
    return found


def test_the_cut_is_the_best_there_is() -> None:
    draw = random.Random(7)
    num_none = 0
    for _ in range(400):
        costs = [LayerCost(draw.randint(1, 9), draw.randint(0, 20), draw.random(), draw.random()) for _ in range(6)]
        nodes = [
            Node(draw.randint(5, 60), draw.choice((0, draw.randint(3, 40))), draw.uniform(1, 3), draw.uniform(5, 30))
            for _ in range(draw.randint(1, 4))
        ]
        first, last = draw.randint(0, 5), LayerCost(draw.randint(0, 5), 0, draw.random())
        joined = {i for i in range(1, len(costs)) if draw.random() < 0.2}
        cuts = itertools.combinations([i for i in range(1, len(costs)) if i not in joined], len(nodes) - 1)
        best = min((slowest(costs, nodes, first, last, cut) for cut in cuts), default=math.inf)
        got = best_split(costs, nodes, first, last, joined=joined)
        num_none += got is None
        assert (got is None) == math.isinf(best)
        if got is not None:
            assert (got[0][0], got[-1][1]) == (0, len(costs))
            assert not joined & {begin for begin, _ in got}
            assert slowest(costs, nodes, first, last, tuple(begin for begin, _ in got[1:])) == best
    assert 40 < num_none < 360


def test_what_a_stage_takes() -> None:
    """By hand: 6 of 8 bytes of experts fit behind 4 dense ones; on the CPU all is read from RAM."""
    cost = LayerCost(4, 8, 4.0, 2.0)
    made = stage_cost(cost, Node(10, 10, 1.0, 10.0), in_ram=1)
    assert (made.ram, made.vram, made.missing) == (3, 10, 0)
    assert made.seconds == pytest.approx((4 + 2 * 6 / 8) / 10 + 2 * 2 / 8)
    made = stage_cost(cost, Node(10, 0, 2.0, 10.0), in_ram=1)
    assert (made.ram, made.vram, made.seconds, made.missing) == (13, 0, 3.0, 3)
    assert stage_cost(cost, Node(10, 3, 1.0, 10.0)).missing == 1  # what is dense has to be on the GPU


def test_more_nodes_than_layers() -> None:
    with pytest.raises(ConfigError, match="3 nodes for 2 layers: each stage needs one"):
        best_split([LayerCost(1)] * 2, [Node(9)] * 3)


def test_nodes_as_they_are_written() -> None:
    assert parse_nodes("ram=64,vram=24;ram=0.5,gbs=90,vram_gbs=2000") == [
        Node(64 * GIB, 24 * GIB),
        Node(GIB // 2, 0, 90e9, 2000e9),
    ]
    for text in ("", "vram=2", "ram=0", "ram=-1", "ram=nan", "ram=x", "ram", "cpu=3", "ram=1,,"):
        with pytest.raises(ConfigError, match=r"^--nodes: .* an example: --nodes"):
            parse_nodes(text)
    with pytest.raises(ConfigError, match="65 nodes; a pipeline has at most 64 stages"):
        parse_nodes("ram=1 " * 65)


def planned(text: str, **settings: object) -> NodePlan:
    shape = find_shape("qwen3-30b-a3b")

    def reopen(config: EngineConfig) -> OpenedModel:
        return open_synthetic(config, shape.config())

    return plan_nodes(reopen, EngineConfig(**settings), parse_nodes(text))  # type: ignore[arg-type]


@pytest.mark.exhaustive
def test_a_model_over_uneven_nodes() -> None:
    """48 layers of 0.38 GB: what is planned fits, a larger node has more of them, and a faster one."""
    found = planned("ram=14 ram=4 ram=14,gbs=100")
    assert sum(map(int, found.layers.split(","))) == 48
    for stage in found.stages:
        assert 0 < stage.ram <= stage.node.ram
        assert stage.vram == 0
    assert found.stages[1].end - found.stages[1].first < found.stages[0].end - found.stages[0].first
    assert found.stages[2].end - found.stages[2].first > found.stages[0].end - found.stages[0].first
    with_gpu = planned("ram=14,vram=8 ram=14")
    assert 0 < with_gpu.stages[0].vram <= 8 * GIB
    assert with_gpu.stages[0].end > 24
    with pytest.raises(CapacityError, match=r"no cut fits: the model and its cache are 2\d\.\d\d G.*use more memory"):
        planned("ram=8 ram=8")
    with pytest.raises(CapacityError, match="node 2 cannot hold the largest layer"):
        planned("ram=64 ram=0.1")


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(DEMO_GGUF), "--nodes", "ram=1 ram=1", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["pipeline_layers"] == "2,2"
    assert [stage["layers"] for stage in made["stages"]] == [[0, 2], [2, 4]]
    assert main(["plan", str(DEMO_GGUF), "--nodes", "ram=1 ram=1,vram=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("fits over 2 nodes; at most ")
    assert lines[-1].endswith(f"serve {DEMO_GGUF} --pipeline_layers 1,3")  # the GPU reads faster
    assert all(len(line) <= 80 for line in lines[:-1])
    assert main(["plan", str(DEMO_GGUF), "--nodes", "ram=0.001 ram=1"]) == 1
    assert "node 1 cannot hold the largest layer" in capsys.readouterr().err


def test_the_bundled_models_stages_are_planned_as_they_are_loaded() -> None:
    """Its plan on one node is the whole model's."""
    one = plan_nodes(open_model, EngineConfig(gguf_path=Path(DEMO_GGUF)), parse_nodes("ram=1"))
    two = plan_nodes(open_model, EngineConfig(gguf_path=Path(DEMO_GGUF)), parse_nodes("ram=1 ram=1"))
    assert (one.layers, two.layers) == ("4", "2,2")
    assert one.stages[0].ram <= sum(stage.ram for stage in two.stages) < 1.3 * one.stages[0].ram
