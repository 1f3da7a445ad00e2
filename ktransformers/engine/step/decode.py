"""Steps of few rows on GPUs: the same padded inputs, pages and kernels whether they are replayed or not.

So that graphs change speed and nothing else: which kernels run, and in how many parts attention sums, depends on the
shapes of a step's inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ktransformers.cache.paged import PagedCache
from ktransformers.core import Phase
from ktransformers.engine.sampling.logits_request import StepLogits
from ktransformers.engine.step.broadcast import SharedStep, StepBlocks
from ktransformers.engine.step.context import PREFILL_ROWS, ForwardBatch
from ktransformers.engine.step.cuda_graph_runner import CUDAGraphRunner, StepTimers
from ktransformers.engine.step.cuda_graphs import GraphBackend
from ktransformers.engine.step.decode_inputs import (
    DecodeInputs,
    InputMemory,
    StaticInputs,
    StepSize,
    decode_batch_sizes,
    shared_nbytes,
)
from ktransformers.engine.step.forward import ForwardPass, StepInputs, batched_positions, shown_tokens
from ktransformers.engine.step.layout import StepLayout
from ktransformers.engine.step.logits_fetch import LogitsFetch
from ktransformers.engine.step.lookup import STAGED_ROWS
from ktransformers.operators.attention.latent_materialization import MaterializationPolicy, StepRuns
from ktransformers.operators.context import ForwardContext
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.operators.usage import KEPT_ROWS
from ktransformers.optimize.plan import Plan
from ktransformers.system.cores import usable_cores

__all__ = ["MAX_GRAPH_ROWS", "DecodeSteps", "PaddedSteps", "why_not_captured"]

logger = logging.getLogger(__name__)

MAX_GRAPH_ROWS = 256
"""Largest batch that is captured: above, launching kernels one by one costs little beside running them."""


def why_not_captured(plan: Plan, layout: StepLayout) -> str | None:
    """Return why a step cannot be one CUDA graph, or None when nothing is known to speak against it."""
    on_cpu = sum(not plan.devices[layer_device.device].is_gpu for layer_device in plan.layer_devices)
    if on_cpu:
        return f"{on_cpu} of {len(plan.layer_devices)} layers are on the CPU"
    layer_devices = {device.name for device in layout.devices}
    for entry in plan.entries:
        place, operator = entry.placement.generate_device, plan.operators.get(entry.key)
        is_inside = entry.placement.layer_device is not None or entry.key.endswith("lm_head")
        if place in layer_devices or not is_inside or not entry.total_bytes:
            continue
        if not isinstance(operator, KTransformersExperts):
            return f"{entry.key} is on {place}"
        if operator.activation is None:
            return f"{entry.key} runs as KExpertsTorch"
    return None


@dataclass(frozen=True, slots=True)
class PaddedSteps:
    """Which steps are padded: those of up to max_batch_size rows, and others of the sizes in `mixed`. num_pages: of the
    longest sequence."""

    max_batch_size: int
    num_pages: int
    mixed: Sequence[StepSize] = ()


class DecodeSteps:
    """Runs padded steps of a model whose layers are on GPUs. Steps with draft tokens run as decode steps of as many
    rows do.

    backend: None runs steps without capturing them. choices: which sequences latent
    attention expands, for which steps with prompts, of more rows than decode steps, are left to others. blocks: shared
    with other processes of the model, which run the same steps.
    """

    def __init__(
        self,
        forward: ForwardPass,
        cache: PagedCache,
        padded: PaddedSteps,
        *,
        backend: GraphBackend | None,
        progress: Callable[[int, int], None] | None = None,
        choices: Sequence[MaterializationPolicy] = (),
        blocks: StepBlocks | None = None,
    ) -> None:
        layout = forward.layout
        assert layout is not None, "steps on the CPU are not padded"
        assert forward.lookup is not None, "it is there where the layout is"
        self._lookup = forward.lookup
        self._held: ForwardContext | None = None  # of the step that is held
        self._forward, self._layout, self._cache, self._choices = forward, layout, cache, choices
        device = layout.entry.torch_device
        self.max_rows, self.mixed = min(padded.max_batch_size, MAX_GRAPH_ROWS), tuple(padded.mixed)
        self._most_kept = max([self.max_rows, *(size.kept for size in self.mixed)])
        self._released: Tensor | None = None  # logits of a step that was launched before its turn
        self._has_lookup_here = False
        self._logits: Tensor | None = None  # of the last step, fp32 [most_kept, V]: what each graph writes to
        self._fetch: LogitsFetch | None = None
        batch_sizes = decode_batch_sizes(self.max_rows)
        num_pages, has_states = padded.num_pages, cache.states is not None
        sizes = [*(StepSize(rows, rows) for rows in batch_sizes), *self.mixed]
        shared = shared_nbytes(sizes, num_pages, layout.width, layout.entry.dtype, has_states=has_states)
        memory = InputMemory(device, blocks, shared)
        self._graphs = CUDAGraphRunner(
            self._run,
            batch_sizes,
            lambda size: StaticInputs(size, num_pages, memory, layout.width, layout.entry.dtype, has_states=has_states),
            backend,
            lambda: [stream for place in layout.devices for stream in place.async_cpu_experts()],
            progress,
            self.mixed,
        )

    @property
    def sizes(self) -> list[StepSize]:
        """Sizes of the graphs, or of the steps that are padded; the largest first."""
        decode = [StepSize(rows, rows) for rows in self._graphs.batch_sizes]
        return sorted({*decode, *self._graphs.mixed_sizes}, reverse=True)

    def time_steps(self, marks: StepTimers | None) -> None:
        """Time the steps that are due, see CUDAGraphRunner.time_steps. The experts of a step are kept for up to
        KEPT_ROWS rows."""
        self._graphs.time_steps(marks, KEPT_ROWS)

    def takes(self, batch: ForwardBatch) -> bool:
        """Whether `step` is to run a step."""
        context, rows, num_kept = batch.context, len(batch), len(batch.keep)
        axes, layers, pictures = 1, tuple[int, ...](), context.pictures
        if pictures is not None:
            if pictures.is_planned or any(part.shape[-1] != self._layout.width for part in pictures.by_layer.values()):
                return False
            axes, layers = batch.positions.numel() // rows, tuple(pictures.by_layer)
        elif rows <= self.max_rows:
            return True
        if self._graphs.size_of(rows, num_kept, *context.block_table.shape, axes=axes, layers=layers) is None:
            return False
        return num_kept == rows or not StepRuns.is_materialized(context, self._choices)

    def is_shared(self, batch: ForwardBatch) -> bool:
        """Whether `step` can give other processes a step through memory that they share."""
        rows, table = len(batch), batch.context.block_table
        if self._layout.ngrams or batch.context.pictures is not None:
            return False  # each process keeps the last tokens of its sequences, and what pictures show, itself
        return rows < STAGED_ROWS and self._graphs.is_shared(rows, len(batch.keep), *table.shape)

    def _run(self, inputs: DecodeInputs) -> Tensor:
        """Logits fp32 [N, V] on the first device, valid until the next run."""
        size = StepSize(inputs.num_rows, inputs.block_table.shape[0], inputs.num_kept)
        has_prompts = size.kind == "other" and size in self.mixed
        context = ForwardContext(
            cache=self._cache,
            pool=self._forward.pool,
            phase=Phase.PREFILL if has_prompts and inputs.num_rows > PREFILL_ROWS else Phase.GENERATE,
            page_size=self._cache.page_size,
            slot_mapping=inputs.slot_mapping,
            seq_ids=inputs.seq_ids,
            kv_lens=inputs.kv_lens,
            block_table=inputs.block_table,
            states=inputs.states,
            token_ids=inputs.token_ids,
            pictures=inputs.pictures,
            turned=inputs.positions if any(shape.index_pool > 1 for shape in self._cache.shapes) else None,
            is_replayable=True,
        ).replicated(device.torch_device for device in self._layout.devices)
        entry, last = self._layout.entry, self._layout.last
        assert inputs.keep is not None, "steps say which rows are kept"
        hidden, keep = entry.to_device(inputs.hidden_states), last.move(inputs.keep)
        logits = self._forward.run(StepInputs(hidden[None], batched_positions(inputs.positions), keep, context))
        return self._kept(logits)

    def _kept(self, logits: Tensor) -> Tensor:
        """Copied to where all steps leave theirs, so that graphs need no memory of their own for them."""
        count = len(logits)
        if count > self._most_kept:  # prompts whose tokens are scored: of steps that fit no graph
            return self._layout.entry.move(logits.float())
        if self._logits is None:
            where = self._layout.entry.torch_device
            self._logits = torch.empty(self._most_kept, logits.shape[1], dtype=torch.float32, device=where)
            # A thread that spins for the GPU would take a core from experts on the CPU. Where one is left it may: to
            # sleep and to be woken costs a twelfth of a step of 3 ms.
            has_experts = any(device.async_cpu_experts() for device in self._layout.devices)
            spins = usable_cores() > (self._forward.pool.num_threads if has_experts else 1)
            self._fetch = LogitsFetch(self._most_kept, logits.shape[1], where, spins)
        return self._logits[:count].copy_(logits)

    def step(
        self,
        batch: ForwardBatch,
        needs: Sequence[int] | None = None,
        launched: Callable[[int], None] = lambda num_rows: None,
        meanwhile: Callable[[], None] = lambda: None,
        *,
        is_shared: bool = False,
    ) -> StepLogits:
        """Run a step of T rows that `takes` takes. launched: called with T once it was launched.
        meanwhile: called when all is launched that its results take, before these are waited for. is_shared: whether
        other processes get it through shared memory; raises EngineError when one is gone.

        Returns fp32 logits [N, vocab_size] of the rows in `keep` on the CPU, or what `needs` says of each of them
        (engine.sampling.logits_request), valid until the next step.
        """
        on_device, self._released = self._released, None
        if on_device is None:
            on_device = self.launch(batch, is_shared=is_shared)
        launched(len(batch))
        if self._fetch is None or len(on_device) > self._most_kept:
            whole = on_device.to("cpu")
            meanwhile()
            return whole
        if needs is None:
            return self._fetch.whole(on_device, meanwhile)
        return self._fetch.requested(on_device, needs, meanwhile)

    def launch_held(self, batch: ForwardBatch) -> bool:
        """Launch the step behind the one under way, held until `release` brings its tokens: see
        CUDAGraphRunner.launch_held. `step` is called for it after that."""
        rows = len(batch)
        if rows >= STAGED_ROWS or batch.context.pictures is not None:
            return False
        if not self._has_lookup_here or self._fetch is None or not self.takes(batch):
            return False
        unknown = torch.empty(rows, self._layout.width, device="meta")
        self._held = batch.context
        return self._graphs.launch_held(_inputs_of(unknown, batch))

    def release(self, token_ids: Tensor) -> None:
        """Let the step go on that was launched held, with its tokens."""
        held, self._held = self._held, None
        assert held is not None, "no step is held"
        self._released = self._graphs.release(token_ids, lambda ids: self._lookup.on_host(ids, held))

    def drop_released(self) -> None:
        """Forget a step that was released and will not be asked for."""
        self._released = None

    def follow(self, step: SharedStep) -> None:
        """Run a step that another process has published. Returns once nothing reads its slot."""
        self._graphs.follow(StepSize(step.rows, step.seqs, step.kept), step.slot, step.num_tokens)

    def launch(self, batch: ForwardBatch, *, is_shared: bool = False) -> Tensor:
        """Launch a step as `step` does, but do not wait for its end: logits on the first device, valid until the next
        step."""
        token_ids = shown_tokens(batch)
        if len(batch) < STAGED_ROWS:  # copied with the other inputs
            hidden_states = self._lookup.on_host(token_ids, batch.context)
            self._has_lookup_here = hidden_states.device.type == "cpu"
        else:
            hidden_states = self._lookup(token_ids, batch.context)
        hidden_states = self._forward.shown(hidden_states, batch.context)
        return self._graphs.forward(_inputs_of(hidden_states, batch), is_shared=is_shared)


def _inputs_of(hidden_states: Tensor, batch: ForwardBatch) -> DecodeInputs:
    context = batch.context
    return DecodeInputs(
        hidden_states,
        batch.positions,
        context.slot_mapping,
        context.seq_ids,
        context.kv_lens,
        context.block_table,
        context.states,
        batch.token_ids,
        batch.keep,
        context.pictures,
    )
