"""Decoder layers one after the other in one native call. Knows parts of layers, not models.

Rows are fp32 [T, H] on the CPU and change in place, to what the parts called one by one make of them
(csrc/ops/layer/layer_stack.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ktransformers.kernels.cpu.base import WorkerPool, check_tensor
from ktransformers.kernels.cpu.latent import LatentLayer
from ktransformers.kernels.cpu.layer import (
    AttentionLayer,
    AttentionStep,
    LayerKv,
    MlpLayer,
    MoeLayer,
    RecurrentLayer,
)
from ktransformers.kernels.cpu.recurrent import native_step
from ktransformers.kernels.extension import extension
from ktransformers.kernels.types import StateStep
from ktransformers.kernels.untraced import untraced

__all__ = ["NativeLayerStack"]

_NO_STATES = (0, 0, 0, 0, 0, 0, 0)
_NO_ROWS = (0, 0, 0, 0, 0, 0)


class NativeLayerStack:
    """Decoder layers that run in one native call. layers: (attention or delta net, feed-forward) of each. `bind` before
    the first step.

    Raises ValueError for layers that do not fit together.
    """

    def __init__(self, layers: Sequence[tuple[AttentionLayer | LatentLayer | RecurrentLayer, MoeLayer | MlpLayer]]):
        self._mixers, self._kept = [mixer for mixer, _ in layers], tuple(layers)
        sizes = {part.hidden_size for layer in layers for part in layer}
        rotated = {mixer.rotary_dims for mixer in self._mixers if isinstance(mixer, AttentionLayer | LatentLayer)}
        if len(sizes) != 1 or len(rotated) > 1:
            raise ValueError(f"layers of {sorted(sizes)} columns with {sorted(rotated)} rotated ones are no stack")
        self.hidden_size, self.rotary_dims = sizes.pop(), rotated.pop() if rotated else 0
        self._num_states = 0
        self._stack = extension.LayerStack([(mixer.block, feed_forward.block) for mixer, feed_forward in layers])

    def bind(self, memories: Sequence[LayerKv | tuple[Tensor, Tensor]]) -> None:
        """Bind what each layer keeps: its cache, or the states (conv, recurrent) of a delta net, see RecurrentLayer.

        Their owner keeps them alive while steps run. Raises TypeError or ValueError for tensors that do not fit.
        """
        natives = []
        for mixer, memory in zip(self._mixers, memories, strict=True):
            if isinstance(mixer, AttentionLayer | LatentLayer) and isinstance(memory, LayerKv):
                natives.append(mixer.native_cache(memory))
            elif isinstance(mixer, RecurrentLayer) and isinstance(memory, tuple):
                mixer.check_states(*memory)
                self._num_states = memory[0].shape[0]
                natives.append((0, memory[0].data_ptr(), memory[1].data_ptr(), 0, 0, self._num_states, False))
            else:
                raise TypeError(f"{type(mixer).__name__} cannot keep a {type(memory).__name__}")
        self._stack.bind(natives)

    @untraced
    def forward(
        self, x: Tensor, step: AttentionStep | None, states: StateStep | None, pool: WorkerPool, buffers: Any
    ) -> None:
        """Run a step's rows x through all layers, in place. step: None where no layer attends. states: None where no
        layer has one.

        Raises IndexError or ValueError for slots outside of the memories.
        """
        check_tensor("x", x, (None, self.hidden_size), torch.float32)
        rows, sizes = _NO_ROWS, (x.shape[0], 0, 0, 0, 0)
        if step is not None:
            if (step.rows, step.rotary_dims) != (x.shape[0], self.rotary_dims):
                raise ValueError(f"the step must have angles [{x.shape[0]}, {self.rotary_dims}]")
            rows, sizes = step.addresses, step.sizes
        native = _NO_STATES if states is None else native_step(states, x.shape[0], self._num_states)
        self._stack.forward(pool.handle, buffers, x.data_ptr(), rows, sizes, native)
