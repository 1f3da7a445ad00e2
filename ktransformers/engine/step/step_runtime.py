"""Records what the code below Python tells of a step, on the CPU and on GPUs, for a Recorder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from typing_extensions import override

from ktransformers.engine.step.gpu_profile import GpuProfile
from ktransformers.engine.step.runner import ModelRunner
from ktransformers.operators.experts.block import KMoEBlock
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.operators.experts.router import KRouter
from ktransformers.operators.layers.cpu import FusedLayer
from ktransformers.operators.layers.joined import Done
from ktransformers.operators.layers.native_stack import NativeStack
from ktransformers.operators.layers.traced import layer_list
from ktransformers.profiling.messages import GpuRecord
from ktransformers.profiling.runtime import CpuProfilingRuntime, ModuleScope

__all__ = ["StepRuntime", "module_scopes"]

_SHARED = frozenset({"shared_experts", "shared_mlp", "shared_expert", "shared_expert_gate"})
_ROUTER = frozenset({"gate", "router"})
_MLP = frozenset({"mlp", "feed_forward"})


class StepRuntime(CpuProfilingRuntime):
    """The Runtime of a runner's steps, on the CPU and on GPUs."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner.pool, module_scopes(runner.model))
        self._runner = runner
        self._gpus: GpuProfile | None = None

    @override
    def start(self) -> None:
        super().start()
        self._gpus = self._runner.profile_gpus(True)

    @override
    def stop(self) -> None:
        super().stop()
        if self._gpus is not None:
            self._gpus = self._runner.profile_gpus(False)

    @override
    def begin_step(self, step_id: int, num_rows: int, keep: Sequence[int]) -> None:
        if self._gpus is not None:
            self._gpus.expect(num_rows, keep)
        super().begin_step(step_id, num_rows, keep)

    @override
    def end_step(self) -> GpuRecord | None:
        super().end_step()
        return None if self._gpus is None else self._gpus.latest


def module_scopes(model: Any) -> list[ModuleScope]:
    """Find the scopes of a loaded causal LM of `transformers`, outer modules before inner ones. Native layers know what
    they are."""
    head = getattr(model, "lm_head", None)
    scopes = [ModuleScope(head, part="lm_head")] if isinstance(head, nn.Module) else []
    for index, layer in enumerate(layer_list(model) or ()):
        scopes += _of_layer(layer, index)
    return scopes


def _of_layer(layer: nn.Module, index: int) -> Iterator[ModuleScope]:
    has_attention = has_feed_forward = False
    if isinstance(layer, NativeStack | Done):
        return
    if isinstance(layer, FusedLayer):
        has_attention, has_feed_forward = layer.attention is not None, layer.feed_forward is not None
    if has_attention and has_feed_forward:
        return
    yield ModuleScope(layer, index)
    if has_feed_forward:
        return
    for path, module in layer.named_modules():
        part = _part_of(path.rpartition(".")[2], module)
        if part is not None:
            yield ModuleScope(module, part=part)


def _part_of(name: str, module: nn.Module) -> str | None:
    if isinstance(module, KRouter) or name in _ROUTER:
        return "router"
    if name in _SHARED or isinstance(module, KMoEBlock):  # whose own part is to weigh the shared expert
        return "shared_experts"
    has_experts = any(isinstance(inner, KTransformersExperts) for inner in module.modules())
    return "mlp" if name in _MLP and not has_experts else None
