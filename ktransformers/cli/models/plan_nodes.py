"""`ktransformers plan --nodes`: a model over several machines, on one screen or as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from ktransformers.errors import ConfigError

if TYPE_CHECKING:
    from ktransformers.config import EngineConfig
    from ktransformers.engine.parallel.pipeline.node_plans import NodePlan, StagePlan

__all__ = ["nodes_command"]


def nodes_command(config: EngineConfig, synthetic: str | None, text: str, *, as_json: bool) -> int:
    """Print on which nodes the layers go; return 0.

    Raises CapacityError when they fit nowhere, ConfigError for what is no node.
    """
    from ktransformers.cli.models.plan import open_planned
    from ktransformers.engine.parallel.pipeline.node_plans import plan_nodes
    from ktransformers.engine.parallel.pipeline.nodes import parse_nodes

    if config.stage_hosts or config.pipeline_layers or config.pipeline > 1 or config.tensor_parallel > 1:
        raise ConfigError("--nodes finds how to divide the model: leave --pipeline, --pipeline_layers and the like out")
    nodes = parse_nodes(text)
    found = plan_nodes(lambda asked: open_planned(replace(asked), synthetic), config, nodes)
    print(json.dumps(_json(found), indent=2) if as_json else "\n".join(_screen(found, config)))
    return 0


def _json(found: NodePlan) -> dict[str, object]:
    one, many = found.tokens_per_s
    return {
        "pipeline_layers": found.layers,
        "tokens_per_s": {"one_sequence": one, "as_many_as_stages": many},
        "stages": [
            {
                "layers": [stage.first, stage.end],
                "bytes": {"ram": stage.ram, "vram": stage.vram},
                "free": {"ram": stage.node.ram - stage.ram, "vram": stage.node.vram - stage.vram},
                "seconds_per_token": stage.seconds,
            }
            for stage in found.stages
        ],
    }


def _screen(found: NodePlan, config: EngineConfig) -> list[str]:
    one, many = found.tokens_per_s
    count = len(found.stages)
    lines = [
        f"fits over {count} nodes; at most {one:.0f} tokens/s of one sequence,",
        f"{many:.0f} of {count} or more together, by what the stages read of memory:",
        "",
        "stage  layers       RAM                    VRAM                   reads in",
        *(_line(number, stage) for number, stage in enumerate(found.stages, 1)),
        "",
        "The last stage serves, the others run `ktransformers stage`, or Ray places them:",
    ]
    path = config.gguf_path or config.model_path
    lines.append(f"ktransformers serve {path or 'MODEL'} --pipeline_layers {found.layers}")
    return lines


def _line(number: int, stage: StagePlan) -> str:
    from ktransformers.cli.models.plan_screen import shown_size

    layers = f"{stage.first}-{stage.end - 1} ({stage.end - stage.first})"
    ram = f"{shown_size(stage.ram)} of {shown_size(stage.node.ram)}"
    vram = f"{shown_size(stage.vram)} of {shown_size(stage.node.vram)}" if stage.node.vram else "-"
    return f"{number:>5}  {layers:<11}  {ram:<21}  {vram:<21}  {stage.seconds * 1e3:.2f} ms"
