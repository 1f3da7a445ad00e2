"""A loaded model is looked at in one step, checked, and its layers are put together for the steps to come."""

from __future__ import annotations

import logging
from typing import Protocol

import torch

from ktransformers.cache.paged import LayerShape
from ktransformers.engine.load.graphs import forget_positions
from ktransformers.engine.model.opened import OpenedModel
from ktransformers.engine.parallel.pipeline.stage_io_check import check_stage_io
from ktransformers.engine.step.context import ForwardBatch
from ktransformers.engine.step.forward import ForwardPass
from ktransformers.engine.step.layout import StepLayout, move_into
from ktransformers.engine.step.runner import ModelRunner
from ktransformers.engine.verify.checked_model import CheckedModel
from ktransformers.engine.verify.self_check import check_model, is_checked
from ktransformers.engine.verify.stack_check import StackCheck
from ktransformers.errors import MODULE_FAILURES, KTransformersError, UnsupportedError, named_reason
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.cpu.expert_store import ReadError
from ktransformers.kernels.triton.common.compiling import compiles, warmup
from ktransformers.operators.expert_files import ExpertFiles, probed
from ktransformers.operators.layers.cpu import fuse_layers
from ktransformers.operators.layers.gpu import stack_gpu_layers, takes_blocks
from ktransformers.operators.layers.native_stack import stack_cpu_layers
from ktransformers.operators.layers.traced import (
    PROBE_ROWS,
    LayerCall,
    check_calls,
    failing_module,
    pass_context_to_layers,
    probe_context,
    trace_step,
)
from ktransformers.operators.recurrent.base import RecurrentOperator
from ktransformers.optimize.plan import Plan

logger = logging.getLogger(__name__)

__all__ = ["Arrangeable", "arrange_layers", "pass_context_to_recurrent"]


class Arrangeable(Protocol):
    """A model whose weights are in memory: what `stages.LoadedWeights` is. longest: most positions of a sequence."""

    @property
    def opened(self) -> OpenedModel: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def shapes(self) -> list[LayerShape]: ...
    @property
    def pool(self) -> WorkerPool: ...
    @property
    def layout(self) -> StepLayout: ...
    @property
    def longest(self) -> int: ...
    @property
    def expert_files(self) -> ExpertFiles | None: ...


def pass_context_to_recurrent(model: torch.nn.Module, plan: Plan) -> None:
    """Let the modules around recurrent operators pass the step's context on; nothing for a model without any."""
    if any(isinstance(operator, RecurrentOperator) for operator in plan.operators.values()):
        pass_context_to_layers(model)


def arrange_layers(loaded: Arrangeable) -> bool:
    """Run one step, refuse what cannot be right, and join layers: in native calls when every module is on the CPU, else
    those on a GPU in as few launches as can be. What no test covers is compared with transformers.

    Experts in files are probed, except where steps are compared with transformers. Returns whether all layers take a
    step in blocks (ForwardContext.blocks). Raises UnsupportedError.
    """
    opened, plan, shapes, pool = loaded.opened, loaded.plan, loaded.shapes, loaded.pool
    calls = _first_step(loaded)
    check_calls(opened.model, calls, loaded.longest, shapes)
    is_on_cpu = all(entry.placement.generate_device == "cpu" for entry in plan.entries)
    if opened.partial_sums is not None:
        if is_checked(opened) and not opened.partial_sums.group.rank:
            logger.warning("self check: a model that is cut over GPUs is not compared; load it without for that")
        layer_devices = {layer_device.key: plan.devices[layer_device.device] for layer_device in plan.layer_devices}
        stack_gpu_layers(opened.model, layer_devices, move_into, calls)
        pass_context_to_recurrent(opened.model, plan)
        return False
    checked = CheckedModel(opened.model, shapes, pool, loaded.layout)
    if is_on_cpu:
        fuse_layers(opened.model, shapes, pool, calls)
    if opened.config.pipeline == 1:
        with probed(loaded.expert_files, is_on=not is_checked(opened)):  # transformers' modules have all experts
            check_model(opened, plan, checked, calls, loaded.longest)
    if is_on_cpu:  # stacks stand in for layers, which the check wants to see
        stack_cpu_layers(opened.model, shapes, pool, calls)
    else:
        layer_devices = {layer_device.key: plan.devices[layer_device.device] for layer_device in plan.layer_devices}
        stacks = StackCheck(checked, opened.facts.vocab_size)
        if is_checked(opened):
            stacks.begin()
        stack_gpu_layers(opened.model, layer_devices, move_into, calls)
        pass_context_to_recurrent(opened.model, plan)  # stacks stand where layers stood
        stacks.compare()
    return takes_blocks(opened.model, calls)


def _first_step(loaded: Arrangeable) -> list[LayerCall]:
    """What the layers are handed in a step at the last positions that there are: what depends on them shows there.

    Raises UnsupportedError when the model fails in it.
    """
    opened, pool, layout = loaded.opened, loaded.pool, loaded.layout
    num_rows = PROBE_ROWS if layout.is_cpu else 1
    context = probe_context(loaded.shapes, pool, num_rows)
    positions = torch.arange(num_rows) + max(loaded.longest - num_rows, 0)
    runner = ModelRunner(ForwardPass(opened.model, pool, layout, announce=False))
    keep = torch.tensor([num_rows - 1])

    def step() -> torch.Tensor:
        return runner.step(ForwardBatch(torch.zeros_like(positions), positions, context, keep))

    try:
        if compiles() and not layout.is_cpu:
            with warmup():  # its kernels are compiled side by side
                step()
        check_stage_io(opened.model, opened.facts.model_type, step)
        return trace_step(opened.model, step)
    except (KTransformersError, ReadError):
        raise
    except MODULE_FAILURES as error:
        logger.debug("the first step failed", exc_info=True)
        where = failing_module(opened.model, error)
        raise UnsupportedError(
            f"model type {opened.facts.model_type} does not run here: its first step fails "
            f"{'' if where is None else f'in {where} '}with {named_reason(error)}"
        ) from error
    finally:
        forget_positions(loaded.plan)
