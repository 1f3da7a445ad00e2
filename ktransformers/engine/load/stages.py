"""Stages that bring an opened model to one that is ready for steps: each takes what the one before it made.

    OpenedPart ──> PlannedPart ──> LoadedWeights ──> ArrangedModel ──> CapturedModel
    what this       where all of    bytes are in      one step ran,     sizes of steps are
    process has     it goes; it     memory, in        layers are put    known and captured,
    of the model    fits            final form        together, a       with all processes
                                                      cache is there    of the model

Everything that can be refused is refused in the first two. Where processes meet (`Ranks`) is said in the stages.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ktransformers.cache.paged import LayerShape, Lenders, PagedCache, check_page_size
from ktransformers.config import CPU_ACTIVATIONS, EngineConfig, why_crowded
from ktransformers.core import Progress
from ktransformers.engine.load.arrange import arrange_layers, pass_context_to_recurrent
from ktransformers.engine.load.graphs import choose_graphs
from ktransformers.engine.load.warmup import WarmupShapes
from ktransformers.engine.model.fingerprint import Identified, identify
from ktransformers.engine.model.hot_file import HotFile
from ktransformers.engine.model.mtp import MtpInput
from ktransformers.engine.model.opened import ModelDescription, OpenedModel, describe_model
from ktransformers.engine.model.skeleton import restore_buffers
from ktransformers.engine.model.threads import limit_torch_threads, measure_slow_threads
from ktransformers.engine.parallel.ranks.ranks import Ranks, ResolvedPlan
from ktransformers.engine.plan.attention import find_flash
from ktransformers.engine.plan.cache_plan import CachePlan
from ktransformers.engine.plan.hardware import Hardware
from ktransformers.engine.plan.planned import Planned, PlannedDraft
from ktransformers.engine.plan.planning import Planner
from ktransformers.engine.step.decode import DecodeSteps
from ktransformers.engine.step.expert_streaming import open_prefills
from ktransformers.engine.step.forward import ForwardPass
from ktransformers.engine.step.fused_decode import find_fused_decode
from ktransformers.engine.step.hidden import LastHiddenHook, LayersHiddenHook
from ktransformers.engine.step.hot import HotService, open_hot
from ktransformers.engine.step.layout import (
    StepLayout,
    install_moves,
    move_buffers,
    rotations_of,
)
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.models.mtp_config import mtp_family
from ktransformers.operators.attention.flash import FlashLayer
from ktransformers.operators.attention.rope import resolve_rotations
from ktransformers.operators.base import ExpertStats
from ktransformers.operators.expert_files import ExpertFiles, probed
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.operators.layers.traced import pass_context, pass_context_to_attention
from ktransformers.operators.linear.linear import KTransformersLinear
from ktransformers.operators.recurrent.base import RecurrentOperator
from ktransformers.optimize.apply import apply_plan, bind_plan, load_plan
from ktransformers.optimize.expert_slots import EXPERT_SLOTS
from ktransformers.optimize.plan import Plan
from ktransformers.system.cores import describe_quota

__all__ = [
    "ArrangedModel",
    "CapturedModel",
    "LoadedWeights",
    "OpenedPart",
    "PlannedPart",
    "arrange_model",
    "capture_steps",
    "load_weights",
    "open_part",
    "optimize_and_load_gguf",
    "plan_part",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenedPart:
    """A process's opened part of a model, and the hardware that it runs on. model: the description of the whole of
    it."""

    opened: OpenedModel
    model: ModelDescription
    hardware: Hardware
    ranks: Ranks

    @property
    def config(self) -> EngineConfig:
        return self.opened.config


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """A part whose modules all have a place, in which they fit. longest: most positions of a sequence."""

    part: OpenedPart
    cache_plan: CachePlan
    planned: Planned
    pool: WorkerPool
    longest: int

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    @property
    def page_size(self) -> int:
        return self.cache_plan.page_size(self.planned.shapes)


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """A part whose weights are in memory, with what GPUs serve its operators with. flash: who attends by FlashInfer."""

    planned_part: PlannedPart
    layout: StepLayout
    flash: Mapping[str, FlashLayer]
    hot: HotService

    @property
    def opened(self) -> OpenedModel:
        return self.planned_part.part.opened

    @property
    def plan(self) -> Plan:
        return self.planned_part.plan

    @property
    def shapes(self) -> list[LayerShape]:
        return self.planned_part.planned.shapes

    @property
    def pool(self) -> WorkerPool:
        return self.planned_part.pool

    @property
    def longest(self) -> int:
        return self.planned_part.longest

    @property
    def expert_files(self) -> ExpertFiles | None:
        return self.planned_part.planned.expert_files

    def hidden_hook(self) -> LastHiddenHook | None:
        """Return what keeps hidden states, where the model drafts from them, or one drafts from its own."""
        opened, draft = self.opened, self.opened.draft
        if draft is not None and draft.dspark is not None:
            return LayersHiddenHook(opened.model, draft.dspark.target_layers)
        is_taken = draft is not None and isinstance(draft.model.get_input_embeddings(), MtpInput)
        if opened.dspark is not None or not (self.layout.mtp is not None or is_taken):
            return None
        module, is_behind = mtp_family(opened.facts.model_type).hidden_states_at
        return LastHiddenHook(opened.model, module, is_normed=is_behind)


@dataclass(frozen=True, slots=True)
class ArrangedModel:
    """A model whose layers stand as steps run them, with its cache and its identity."""

    loaded: LoadedWeights
    cache: PagedCache
    identified: Identified
    forward: ForwardPass


@dataclass(frozen=True, slots=True)
class CapturedModel:
    """A model that is ready for steps. config: as everything was resolved. why_drafts_eager: see StepGraphs."""

    arranged: ArrangedModel
    config: EngineConfig
    decode: DecodeSteps | None
    why_drafts_eager: str | None = None

    @property
    def loaded(self) -> LoadedWeights:
        return self.arranged.loaded

    @property
    def planned(self) -> Planned:
        return self.loaded.planned_part.planned

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    @property
    def model(self) -> ModelDescription:
        """The description of the whole model, of which this process may have a part."""
        return self.loaded.planned_part.part.model

    @property
    def forward(self) -> ForwardPass:
        return self.arranged.forward

    @property
    def cache(self) -> PagedCache:
        return self.arranged.cache


def open_part(opened: OpenedModel, hardware: Hardware | None, ranks: Ranks) -> OpenedPart:
    """Open the part of a model that falls to this process. hardware: this machine when None. Errors as
    `build_engine`."""
    hardware = hardware or Hardware.detect(opened.config)
    quota = None if opened.config.cpu_infer else describe_quota()
    if quota is not None:
        logger.info("%s", quota)
    model = describe_model(opened)  # the whole of it
    opened, hardware = ranks.shard(opened, hardware)
    config = replace(opened.config, cpu_infer=opened.config.cpu_infer or hardware.num_threads)
    return OpenedPart(replace(opened, config=config), model, hardware, ranks)


def plan_part(
    part: OpenedPart,
    cache_plan: CachePlan,
    stats: ExpertStats,
    undo: ExitStack,
    shared: WorkerPool | None = None,
    expert_files: ExpertFiles | None = None,
) -> PlannedPart:
    """Plan where all of a part goes. undo: gets what has to be closed when a later stage fails. shared: the threads of
    the model that it drafts for, with which it computes; None: it drafts for none, and has its own. expert_files: what
    the experts of one that drafts are read from, as was planned with its target. Raises
    CapacityError when it does not fit, and what planning raises."""
    config, opened = part.config, part.opened
    undo.callback(part.ranks.close)
    pool = shared or _new_pool(config.cpu_infer, config.cpu_activations)
    if shared is None:
        undo.callback(pool.close)
    planner = Planner(opened, pool, cache_plan, stats, is_draft=shared is not None, expert_files=expert_files)
    planned, hardware = planner.plan(part.hardware)
    plan, num_slots = planned.plan, planned.num_slots
    plan.check_fits()
    undo.callback(plan.devices.close)
    part.ranks.begin(_resolved(planned, opened, cache_plan))
    model = replace(part.model, card=replace(part.model.card, gpu_bytes=plan.gpu_bytes))
    _say_products(plan, planned.shapes, pool)
    longest = opened.facts.longest_sequence(num_slots)
    check_page_size(planned.shapes, num_slots, cache_plan.page_size(planned.shapes))
    return PlannedPart(replace(part, model=model, hardware=hardware), cache_plan, planned, pool, longest)


def load_weights(planned_part: PlannedPart, progress: Progress | None) -> LoadedWeights:
    """Read the weights into final form, and attach what serves operators on GPUs. Raises WeightError, CapacityError."""
    part, planned, plan = planned_part.part, planned_part.planned, planned_part.plan
    tools, batch = part.hardware.prefill_tools, planned_part.cache_plan.max_batch_size
    files = planned.expert_files
    if files is not None and files.owner is None:
        plan.devices.close_behind(files.close)
        files.begin(planned_part.pool, plan.extra_bytes[EXPERT_SLOTS]["cpu"])
    layout = optimize_and_load_gguf(part.opened, plan, planned_part.longest, progress)
    flash = find_flash(plan, part.config.attention_backend, planned_part.page_size, part.config.kv_type)
    if files is not None and files.owner is None:
        for draft in [] if planned.draft is None else planned.draft.chain:
            _add_experts(draft, files)
        files.open(max(part.opened.facts.top_k(), 1))
    slots = {key: count for hot in planned.hots for key, count in hot.slots.items()}
    prefill = open_prefills(plan, planned.streamings, tools, batch, slots)
    hot = open_hot(plan, planned.hots, prefill, tools, batch)
    rotations = rotations_of(part.opened.model, plan)
    bind_plan(plan, planned_part.longest, {**flash, **prefill, **hot.layers, **rotations})
    return LoadedWeights(planned_part, layout, flash, hot)


def _add_experts(draft: PlannedDraft, files: ExpertFiles) -> None:
    """Add a layer for multi-token prediction to its model's store, which takes none once it is open."""
    own, plan = draft.planned.expert_files, draft.planned.plan
    if own is None or own.owner is not files:
        return
    for entry in plan.entries:
        operator = plan.operators.get(entry.key)
        if entry.stored_experts and isinstance(operator, KTransformersExperts):
            layer = operator.paths[0].layer
            own.add(layer.number, layer.records(draft.opened.source))


def arrange_model(loaded: LoadedWeights, lenders: Lenders | None = None) -> ArrangedModel:
    """Run one step, refuse what cannot be right, put layers together, and make the cache. lenders: of what layers
    attend to that have no keys and values of their own. Raises UnsupportedError."""
    planned_part, opened, pool = loaded.planned_part, loaded.opened, loaded.pool
    with probed(loaded.expert_files):
        takes_blocks = arrange_layers(loaded)
    if not takes_blocks:
        loaded.hot.refuse_long_steps("not all layers of this model take a step in blocks")
    if loaded.flash:
        loaded.hot.refuse_long_steps("FlashInfer plans whole steps; --attention_backend triton does without")
    planned = planned_part.planned
    cache = planned_part.cache_plan.make(planned.shapes, planned.num_slots, planned.num_states, lenders)
    identified = identify(opened, loaded.plan, cache, pool)
    loaded.hot.begin(HotFile(identified.sampled.digests))
    forward = ForwardPass(opened.model, pool, loaded.layout)
    forward.block_rows = planned.chunk_size if loaded.hot.long_steps.rows else 0
    if loaded.layout.is_cpu and opened.config.pipeline == 1:
        with probed(loaded.expert_files):
            forward.short = find_fused_decode(opened.model, planned.shapes, pool, loaded.longest)
    forward.last_hidden = loaded.hidden_hook()
    return ArrangedModel(loaded, cache, identified, forward)


def capture_steps(arranged: ArrangedModel, progress: Progress | None, why_eager: str | None = None) -> CapturedModel:
    """Compile and capture the steps that will be replayed, alike in all processes of the model. why_eager: why none can
    be; None: nothing is known. Raises EngineError."""
    loaded, planned_part = arranged.loaded, arranged.loaded.planned_part
    part, planned, plan = planned_part.part, planned_part.planned, planned_part.plan
    num_pages = -(-loaded.longest // planned_part.page_size)
    extent = _extent(loaded, planned_part.cache_plan.max_batch_size, num_pages)
    if loaded.opened.partial_sums is not None:
        loaded.opened.partial_sums.group.reserve(extent.most_rows, loaded.opened.facts.hidden_size)
    graphs = choose_graphs(part.config, plan, loaded.layout, loaded.flash.values(), part.hardware, extent, why_eager)
    device = loaded.layout.entry.torch_device
    mixed, is_captured = part.ranks.rendezvous(graphs.sizes, graphs.backend is not None, device)
    graphs = replace(
        graphs, backend=graphs.backend if is_captured else None, sizes=mixed, blocks=part.ranks.step_blocks
    )
    last_hidden = arranged.forward.last_hidden
    if last_hidden is not None and not loaded.layout.is_cpu:
        last_hidden.replayed_rows = 2 * extent.max_batch_size + max((size.rows for size in mixed), default=8)
        if loaded.layout.mtp is not None:
            loaded.layout.mtp.reserve(last_hidden.replayed_rows, loaded.layout.entry)
    with probed(loaded.expert_files):
        decode = graphs.prepare(arranged.forward, arranged.cache, plan, extent, progress)
    part.ranks.captured([] if decode is None else decode.sizes)
    config = replace(part.config, cache_lens=planned.num_slots, chunk_size=planned.chunk_size)
    return CapturedModel(arranged, config, decode, graphs.why_drafts_are_eager(decode))


def _resolved(planned: Planned, opened: OpenedModel, cache_plan: CachePlan) -> ResolvedPlan:
    """Return what processes beside this one have to do alike."""
    experts = {key: op for key, op in planned.plan.operators.items() if isinstance(op, KTransformersExperts)}
    divided = tuple(key for key, operator in experts.items() if operator.is_divided(opened.source))
    config = replace(opened.config, cache_lens=planned.num_slots, chunk_size=planned.chunk_size)
    page_size = cache_plan.page_size(planned.shapes)
    slots, states = planned.num_slots, planned.num_states
    return ResolvedPlan(config, page_size, cache_plan.max_batch_size, slots, states, divided)


def _new_pool(num_threads: int, cpu_activations: str) -> WorkerPool:
    """With nobody else's threads in its way."""
    limit_torch_threads()
    crowded = why_crowded(num_threads)
    if crowded is not None:
        logger.warning("%s", crowded)
    pool = WorkerPool(num_threads, planes=1 + CPU_ACTIVATIONS.index(cpu_activations))
    measure_slow_threads(pool)
    return pool


def _say_products(plan: Plan, shapes: Sequence[LayerShape], pool: WorkerPool) -> None:
    """One line each for cpu_prefill bf16 and attention with products of bf16 where this processor cannot."""
    if not pool.has_bf16 and any(shape.bf16_products for shape in shapes):
        logger.warning(
            "--attention_products kv: %s has no products of bf16 (AVX512-BF16 has); attention makes the same numbers "
            "of products in fp32, which saves no time",
            pool.isa.value,
        )
    found = (op for op in plan.operators.values() if isinstance(op, KTransformersExperts | KTransformersLinear))
    if not pool.has_bf16 and any(operator.products.wants_bf16 for operator in found):
        logger.warning(
            "cpu_prefill bf16: %s has no products of bf16 (AMX and AVX512-BF16 have); prefill stays exact, in int8",
            pool.isa.value,
        )


def optimize_and_load_gguf(opened: OpenedModel, plan: Plan, max_len: int, progress: Progress | None) -> StepLayout:
    """Replace modules of a model on the meta device by operators, as its rules say, and load its weights into them.

    opened: the model, with weights in GGUF or safetensors. plan: what its rule file makes of each module. max_len: most
    positions of a sequence. progress: called with (bytes done, bytes in all, module). Returns how a step goes through
    the modules. Raises WeightError or TensorMismatchError.
    """
    total = sum(plan.weight_bytes.values())
    modules, embedding = dict(opened.model.named_modules()), opened.model.get_input_embeddings()
    restore_buffers(opened.model)
    apply_plan(opened.model, plan)
    resolve_rotations(opened.model, max_len)
    if progress is None:
        load_plan(opened.model, plan, opened.source)
    else:
        load_plan(opened.model, plan, opened.source, lambda done, key: progress(done, total, key))
    move_buffers(modules, plan)
    pass_context_to_recurrent(opened.model, plan)
    install_moves(modules, plan)
    pass_context_to_attention(opened.model)
    for key, operator in plan.operators.items():
        if isinstance(operator, RecurrentOperator):
            pass_context(modules[key.rpartition(".")[0]], [operator])
    if isinstance(embedding, MtpInput):
        embedding.take_parts()
    return StepLayout.of(plan, modules, embedding)


def _extent(loaded: LoadedWeights, max_batch_size: int, num_pages: int) -> WarmupShapes:
    """What steps the model can meet."""
    operators = loaded.plan.operators.values()
    counts = {operator.layout.num_experts for operator in operators if isinstance(operator, KTransformersExperts)}
    top_k = loaded.opened.facts.top_k()
    return WarmupShapes(
        loaded.planned_part.planned.chunk_size, max_batch_size, num_pages, max(counts, default=0), top_k
    )
