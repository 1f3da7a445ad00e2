"""Decode steps of a model on GPUs: the same padded inputs, pages and kernels whether they are replayed or not.

So that graphs change speed and nothing else: which kernels run, and in how many parts attention sums, depends on the
shapes of a step's inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ktransformers.cache.paged import PagedCache
from ktransformers.core import Phase
from ktransformers.engine.decode_inputs import DecodeInputs, StaticInputs, decode_batch_sizes
from ktransformers.engine.forward import ForwardPass, StepInputs
from ktransformers.engine.graphs import DecodeGraphs, GraphBackend, StepMarks
from ktransformers.engine.layout import StepLayout
from ktransformers.operators.context import ForwardContext
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.optimize.plan import Plan

__all__ = ["MAX_GRAPH_ROWS", "DecodeSteps", "why_not_captured"]

logger = logging.getLogger(__name__)

MAX_GRAPH_ROWS = 256
"""Largest batch that is captured: above, launching kernels one by one costs little beside running them."""


def why_not_captured(plan: Plan, layout: StepLayout) -> str | None:
    """Why a step cannot be one CUDA graph, or None when nothing is known to speak against it."""
    on_cpu = sum(not plan.devices[home.device].is_gpu for home in plan.homes)
    if on_cpu:
        return f"{on_cpu} of {len(plan.homes)} layers are on the CPU"
    homes = {device.name for device in layout.devices}
    for entry in plan.entries:
        place, operator = entry.placement.generate_device, plan.operators.get(entry.key)
        is_inside = entry.placement.home is not None or entry.key.endswith("lm_head")
        if place in homes or not is_inside or not entry.total_bytes:
            continue
        if not isinstance(operator, KTransformersExperts):
            return f"{entry.key} is on {place}"
        if operator.activation is None:
            return f"{entry.key} runs as KExpertsTorch"
    return None


class DecodeSteps:
    """Steps of up to max_batch_size rows of a model whose layers are on GPUs.

    num_pages: of the longest sequence. backend: None runs steps without capturing them.
    """

    def __init__(
        self,
        forward: ForwardPass,
        cache: PagedCache,
        *,
        max_batch_size: int,
        num_pages: int,
        backend: GraphBackend | None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        layout = forward.layout
        assert layout is not None, "steps on the CPU are not padded"
        self._forward, self._layout, self._cache = forward, layout, cache
        device = layout.entry.torch_device
        self.max_rows = min(max_batch_size, MAX_GRAPH_ROWS)
        self._keep = torch.arange(self.max_rows, device=layout.last.torch_device)
        self._host: Tensor | None = None
        self._cuda: Any = torch.cuda  # parts of it have no types
        # A thread that spins for the GPU would take a core from the experts.
        self._done = self._cuda.Event(blocking=True) if device.type == "cuda" else None
        self._graphs = DecodeGraphs(
            self._run,
            decode_batch_sizes(self.max_rows),
            lambda size: StaticInputs(
                size, num_pages, device, layout.width, layout.entry.dtype, has_states=cache.states is not None
            ),
            backend,
            lambda: [stream for place in layout.devices for stream in place.expert_streams()],
            progress,
        )

    def time_steps(self, marks: StepMarks | None) -> None:
        """See DecodeGraphs.time_steps."""
        self._graphs.time_steps(marks)

    def _run(self, inputs: DecodeInputs) -> Tensor:
        context = ForwardContext(
            cache=self._cache,
            pool=self._forward.pool,
            phase=Phase.GENERATE,
            page_size=self._cache.page_size,
            slot_mapping=inputs.slot_mapping,
            seq_ids=inputs.seq_ids,
            kv_lens=inputs.kv_lens,
            block_table=inputs.block_table,
            states=inputs.states,
            token_ids=inputs.token_ids,
        ).replicated(device.torch_device for device in self._layout.devices)
        keep = self._keep[: inputs.num_rows]
        entry = self._layout.entry
        hidden = entry.take(inputs.hidden_states)
        logits = self._forward.run(StepInputs(hidden[None], inputs.positions[None], keep, context))
        return entry.move(logits.float())

    def step(
        self,
        token_ids: Tensor,
        positions: Tensor,
        context: ForwardContext,
        keep: Tensor,
        launched: Callable[[int], None] = lambda num_rows: None,
    ) -> Tensor:
        """A step of T rows, at most max_rows, all on the CPU. launched: called with T before its end is waited for.

        Returns fp32 logits [N, vocab_size] of the rows in `keep` on the CPU, valid until the next step.
        """
        hidden_states = self._layout.embedding(token_ids[None])[0]
        inputs = DecodeInputs(
            hidden_states,
            positions,
            context.slot_mapping,
            context.seq_ids,
            context.kv_lens,
            context.block_table,
            context.states,
            token_ids,
        )
        on_device = self._graphs.step(inputs)
        launched(len(token_ids))
        logits = self._to_host(on_device)
        return logits if len(keep) == len(logits) else logits[keep]

    def _to_host(self, logits: Tensor) -> Tensor:
        if self._done is None:
            return logits
        if self._host is None:
            self._host = torch.empty(self.max_rows, logits.shape[1], dtype=torch.float32, pin_memory=True)
        host = self._host[: len(logits)]
        host.copy_(logits, non_blocking=True)
        self._done.record(self._cuda.current_stream(logits.device))
        self._done.synchronize()
        return host
