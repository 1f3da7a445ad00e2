"""From paths to a loaded engine: config, skeleton, plan, operators, weights, cache, tokenizer.

The order matters: everything that can be refused is refused before the first weight byte is read.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch

from ktransformers.cache.paged import LayerShape, PagedCache, check_page_size
from ktransformers.config import CPU_ACTIVATIONS, EngineConfig, why_crowded
from ktransformers.core import Progress
from ktransformers.engine.damage.scan import DamageScan
from ktransformers.engine.load.loaded import Engine, LoadedModel, PagedEngine, Part
from ktransformers.engine.load.ready import forget_positions, prepare_decode
from ktransformers.engine.load.rehearsal import Extent
from ktransformers.engine.model.fingerprint import Identified, identify
from ktransformers.engine.model.opened import (
    ModelDescription,
    OpenedModel,
    describe_model,
    open_model,
)
from ktransformers.engine.model.skeleton import restore_buffers
from ktransformers.engine.model.threads import settle_torch_threads
from ktransformers.engine.parallel.pipeline.borders import check_borders
from ktransformers.engine.parallel.ranks.division import division_of, num_processes
from ktransformers.engine.parallel.ranks.leader import Leader, made_of
from ktransformers.engine.parallel.ranks.ranks import Alone, Follower, Ranks, Settled
from ktransformers.engine.plan.attention import find_flash
from ktransformers.engine.plan.cache_plan import CachePlan, OneSequence, SharedPages
from ktransformers.engine.plan.planning import Hardware, Planned, Planner
from ktransformers.engine.plan.tier_plan import open_tiers
from ktransformers.engine.sampling.constraints import mask_of
from ktransformers.engine.step.decode import DecodeSteps, why_not_captured
from ktransformers.engine.step.forward import ForwardPass
from ktransformers.engine.step.graphs import GraphBackend
from ktransformers.engine.step.hot import HotFile, HotService, open_hot
from ktransformers.engine.step.layout import (
    StepLayout,
    hand_contexts,
    install_moves,
    move_into,
    rotations_of,
    settle_buffers,
)
from ktransformers.engine.step.paged import PagedExecutor
from ktransformers.engine.step.prefill import open_prefills
from ktransformers.engine.step.runner import ModelRunner, StaticRunner
from ktransformers.engine.step.short_forward import find_short_forward
from ktransformers.engine.step.snapshots import snapshot_interval
from ktransformers.engine.step.step_runtime import StepRuntime
from ktransformers.engine.step.step_sizes import replayed_sizes
from ktransformers.engine.verify.self_check import check_model, is_checked
from ktransformers.engine.verify.stack_check import StackCheck
from ktransformers.errors import ConfigError, KTransformersError, UnsupportedError
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.triton.common.compiling import compiles, loading, rehearsal
from ktransformers.operators.attention.rope import settle_rotations
from ktransformers.operators.base import ExpertStats
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.operators.layers.cpu import fuse_layers
from ktransformers.operators.layers.gpu import stack_gpu_layers
from ktransformers.operators.layers.native_stack import stack_cpu_layers
from ktransformers.operators.layers.observed import (
    PROBE_ROWS,
    LayerCall,
    check_calls,
    failing_module,
    hand_contexts_down,
    hand_contexts_on,
    observe_step,
    probe_context,
)
from ktransformers.operators.linear.linear import KTransformersLinear
from ktransformers.operators.recurrent.base import RecurrentOperator
from ktransformers.optimize.apply import apply_plan, attach_plan, load_plan
from ktransformers.optimize.plan import Plan
from ktransformers.system.cores import describe_quota

__all__ = [
    "Engine",
    "Hardware",
    "LoadedModel",
    "PagedEngine",
    "Part",
    "build_engine",
    "build_follower",
    "build_paged_engine",
    "plan_model",
]

logger = logging.getLogger(__name__)

CacheT = TypeVar("CacheT", bound=PagedCache)


def plan_model(config: EngineConfig, opened: OpenedModel | None = None, hardware: Hardware | None = None) -> Plan:
    """What `build_engine` would do with `config`. Reads headers only. Raises the same errors, except for the fit.

    opened: the model, when it is open already; its config counts.
    """
    opened = opened or open_model(config)
    hardware = hardware or Hardware.detect(opened.config)
    if opened.config.tensor_parallel > 1:
        opened, hardware = division_of(opened.config, 0).part(opened, hardware)
    return Planner(opened, None, OneSequence()).settle(hardware)[0].plan


def build_engine(
    config: EngineConfig,
    progress: Progress | None = None,
    hardware: Hardware | None = None,
    opened: OpenedModel | None = None,
) -> Engine:
    """Load a model. Raises ConfigError, RuleError, WeightError or CapacityError, each before it is too late.

    hardware: what to run on; this machine when None. opened: the model, when it is open already; its config counts.
    """
    opened = opened or open_model(config)
    for flag in ("tensor_parallel", "pipeline"):
        if getattr(opened.config, flag) > 1:
            raise ConfigError(
                f"--{flag} {getattr(opened.config, flag)} is for many sequences at once: --backend_type balance_serve"
            )
    built = _build(opened, OneSequence(), hardware, progress)
    cache, model = built.cache, built.model
    is_models_limit = cache.max_len == model.context_len
    runner = StaticRunner(built.forward, cache, model.vocab_size, built.decode, is_models_limit)
    return Engine(
        built.config, built.plan, model, built.forward.pool, built.identified, opened.facts, runner, built.hot
    )


def build_paged_engine(
    config: EngineConfig,
    *,
    page_size: int,
    max_batch_size: int,
    progress: Progress | None = None,
    expert_stats: ExpertStats | None = None,
    opened: OpenedModel | None = None,
    hardware: Hardware | None = None,
    ranks: Ranks | None = None,
) -> PagedEngine:
    """Load a model for many sequences at once, which share --cache_lens tokens in pages. Errors as `build_engine`.

    expert_stats: where to count how experts are used, for a caller who wants to ask.
    opened: the model, when it is open already (a synthetic one, say); its config counts. ranks: with whom it is cut;
    None: as the config says.
    """
    stats = expert_stats or ExpertStats()
    opened = opened or open_model(config)
    if ranks is None:
        ranks = Leader(opened.config, made_of(opened)) if num_processes(opened.config) > 1 else Alone()
    cache_plan = SharedPages(page_size, max_batch_size, opened.facts.has_states)
    built = _build(opened, cache_plan, hardware, progress, stats, ranks)
    plan, cache, pool = built.plan, built.cache, built.forward.pool
    runner = ModelRunner(built.forward, built.decode, ranks.teller(), begins_ahead=ranks.begins_ahead)
    model = built.model
    grammars = model.tokenizer.grammars(model.vocab_size, model.eos_token_ids)
    stats.totals()
    stats.take_counts()  # what ran while loading is of no request
    executor = PagedExecutor(
        runner,
        cache,
        pool,
        model.vocab_size,
        stats.totals,
        lambda start: mask_of(grammars, start.params),
        take_counts=stats.take_counts,
        eos_token_ids=model.eos_token_ids,
    )
    executor.new_runtime, executor.take_hot = lambda: StepRuntime(runner), built.hot.take
    executor.mend_model = lambda: _mend(ranks, runner)
    executor.find_damage = DamageScan(opened.config).said
    longest = opened.facts.longest_sequence(cache.num_slots)
    interval = snapshot_interval(max(cache.num_states - max_batch_size, 0), longest)
    tiers, executor.tiers = open_tiers(opened.config, cache, built.identified) or (None, None)
    return PagedEngine(
        built.config, plan, model, pool, built.identified, executor, cache, interval, tiers, hot=built.hot, ranks=ranks
    )


def _mend(ranks: Ranks, runner: ModelRunner) -> None:
    ranks.mend()
    runner.mended()


def build_follower(opened: OpenedModel, follower: Follower, hardware: Hardware, cache_plan: SharedPages) -> Part:
    """One process's part of a model that is cut. Errors as `build_engine`."""
    built = _build(opened, cache_plan, hardware, None, None, follower)
    runner = ModelRunner(built.forward, built.decode, hand_over=follower.hand_over())
    return Part(runner, built.cache, built.forward.pool)


@dataclass(frozen=True, slots=True)
class _Built(Generic[CacheT]):
    """A model that is ready for steps. config: as everything was resolved."""

    config: EngineConfig
    plan: Plan
    model: ModelDescription
    forward: ForwardPass
    decode: DecodeSteps | None
    cache: CacheT
    identified: Identified
    hot: HotService


def _build(
    opened: OpenedModel,
    cache_plan: CachePlan[CacheT],
    hardware: Hardware | None,
    progress: Progress | None,
    stats: ExpertStats | None = None,
    ranks: Ranks | None = None,
) -> _Built[CacheT]:
    """What both kinds of engines are made of. Errors as `build_engine`; whatever was started is stopped then."""
    ranks = ranks or Alone()
    hardware = hardware or Hardware.detect(opened.config)
    quota = None if opened.config.cpu_infer else describe_quota()
    if quota is not None:
        logger.info("%s", quota)
    model = describe_model(opened)  # the whole of it
    opened, hardware = ranks.part(opened, hardware)
    config = replace(opened.config, cpu_infer=opened.config.cpu_infer or hardware.num_threads)
    opened = replace(opened, config=config)
    with loading(), ExitStack() as undo:
        undo.callback(ranks.close)
        pool = _new_pool(config.cpu_infer, config.cpu_activations)
        undo.callback(pool.close)
        planned, hardware = Planner(opened, pool, cache_plan, stats or ExpertStats()).settle(hardware)
        plan, num_slots = planned.plan, planned.num_slots
        plan.check_fits()
        undo.callback(plan.devices.close)
        ranks.begin(_settled(planned, config, cache_plan))
        model = replace(model, card=replace(model.card, gpu_bytes=plan.gpu_bytes))
        _say_products(plan, planned.shapes, pool)
        longest, page_size = opened.facts.longest_sequence(num_slots), cache_plan.page_size(num_slots)
        check_page_size(planned.shapes, num_slots, page_size)
        loaded = _Loaded(opened, planned, pool, _load(opened, plan, longest, progress), longest)
        flash = find_flash(plan, config.attention_backend, page_size, config.kv_type)
        prefill = open_prefills(plan, planned.streamings, hardware.prefill_tools, cache_plan.max_batch_size)
        hot = open_hot(plan, planned.hots, prefill, hardware.prefill_tools, cache_plan.max_batch_size)
        attach_plan(plan, longest, {**flash, **prefill, **hot.layers, **rotations_of(opened.model, plan)})
        _arrange_layers(loaded)
        cache = cache_plan.make(planned.shapes, num_slots, planned.num_states)
        identified = identify(opened, plan, cache, pool)
        hot.begin(HotFile(identified.sampled))
        forward = ForwardPass(opened.model, pool, loaded.layout)
        if loaded.layout.is_cpu and config.pipeline == 1:
            forward.short = find_short_forward(opened.model, planned.shapes, pool, longest)
        extent = _extent(loaded, cache_plan.max_batch_size, -(-longest // page_size))
        backend, is_padded = _graphs(loaded, hardware)
        rows = hardware.graph_rows if is_padded else ()
        sizes = replayed_sizes(rows, plan, loaded.layout, flash.values(), extent.most_rows, extent.max_batch_size)
        mixed, is_captured = ranks.meet(sizes, backend is not None, _place(loaded.layout))
        decode = prepare_decode(forward, cache, plan, extent, backend if is_captured else None, progress, mixed)
        ranks.captured([] if decode is None else decode.sizes)
        undo.pop_all()
    config = replace(config, cache_lens=num_slots, chunk_size=planned.chunk_size)
    return _Built(config, plan, model, forward, decode, cache, identified, hot)


def _settled(planned: Planned, config: EngineConfig, cache_plan: CachePlan[CacheT]) -> Settled:
    """What processes beside this one have to do alike."""
    config = replace(config, cache_lens=planned.num_slots, chunk_size=planned.chunk_size)
    page_size = cache_plan.page_size(planned.num_slots)
    return Settled(config, page_size, cache_plan.max_batch_size, planned.num_slots, planned.num_states)


def _place(layout: StepLayout) -> torch.device:
    """Where results are added up."""
    return layout.entry.torch_device


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A model whose weights are in memory, while it is made ready. longest: most positions of a sequence."""

    opened: OpenedModel
    planned: Planned
    pool: WorkerPool
    layout: StepLayout
    longest: int

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    @property
    def shapes(self) -> list[LayerShape]:
        return self.planned.shapes


def _new_pool(num_threads: int, cpu_activations: str) -> WorkerPool:
    """With nobody else's threads in its way."""
    settle_torch_threads()
    crowded = why_crowded(num_threads)
    if crowded is not None:
        logger.warning("%s", crowded)
    return WorkerPool(num_threads, planes=1 + CPU_ACTIVATIONS.index(cpu_activations))


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


def _load(opened: OpenedModel, plan: Plan, max_len: int, progress: Progress | None) -> StepLayout:
    total = sum(plan.weight_bytes.values())
    modules, embedding = dict(opened.model.named_modules()), opened.model.get_input_embeddings()
    restore_buffers(opened.model)
    apply_plan(opened.model, plan)
    settle_rotations(opened.model, max_len)
    if progress is None:
        load_plan(opened.model, plan, opened.source)
    else:
        load_plan(opened.model, plan, opened.source, lambda done, key: progress(done, total, key))
    settle_buffers(modules, plan)
    _hand_contexts_down(opened.model, plan)
    install_moves(modules, plan)
    hand_contexts_on(opened.model)
    hand_contexts(modules, plan)
    return StepLayout.of(plan, modules, embedding)


def _hand_contexts_down(model: torch.nn.Module, plan: Plan) -> None:
    if any(isinstance(operator, RecurrentOperator) for operator in plan.operators.values()):
        hand_contexts_down(model)


def _arrange_layers(loaded: _Loaded) -> None:
    """Run one step, and refuse what cannot be right; then layers in native calls, when every module is on the CPU;
    else those on a GPU in as few launches as can be. What no test covers is compared with transformers.

    Raises UnsupportedError.
    """
    opened, plan, shapes, pool = loaded.opened, loaded.plan, loaded.shapes, loaded.pool
    calls = _first_step(loaded)
    check_calls(opened.model, calls, loaded.longest, shapes)
    is_on_cpu = all(entry.placement.generate_device == "cpu" for entry in plan.entries)
    if opened.shares is not None:
        if is_checked(opened) and not opened.shares.group.rank:
            logger.warning("self check: a model that is cut over GPUs is not compared; load it without for that")
        homes = {home.key: plan.devices[home.device] for home in plan.homes}
        stack_gpu_layers(opened.model, homes, move_into, calls)
        _hand_contexts_down(opened.model, plan)
        return
    if is_on_cpu:
        fuse_layers(opened.model, shapes, pool, calls)
    if opened.config.pipeline == 1:
        check_model(opened, plan, shapes, pool, loaded.layout, calls, loaded.longest)
    if is_on_cpu:  # stacks stand in for layers, which the check wants to see
        stack_cpu_layers(opened.model, shapes, pool, calls)
    else:
        homes = {home.key: plan.devices[home.device] for home in plan.homes}
        stacks = StackCheck(opened.model, shapes, pool, loaded.layout, opened.facts.vocab_size)
        if is_checked(opened):
            stacks.begin()
        stack_gpu_layers(opened.model, homes, move_into, calls)
        _hand_contexts_down(opened.model, plan)  # stacks stand where layers stood
        stacks.compare()


def _first_step(loaded: _Loaded) -> list[LayerCall]:
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
        return runner.step(torch.zeros_like(positions), positions, context, keep)

    try:
        if compiles() and not layout.is_cpu:
            with rehearsal():  # its kernels are compiled side by side
                step()
        check_borders(opened.model, opened.facts.model_type, step)
        return observe_step(opened.model, step)
    except KTransformersError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
        logger.debug("the first step failed", exc_info=True)
        where = failing_module(opened.model, error)
        raise UnsupportedError(
            f"model type {opened.facts.model_type} does not run here: its first step fails "
            f"{'' if where is None else f'in {where} '}with "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        ) from error
    finally:
        forget_positions(loaded.plan)


def _extent(loaded: _Loaded, max_batch_size: int, num_pages: int) -> Extent:
    """What steps the model can meet."""
    operators = loaded.plan.operators.values()
    counts = {operator.layout.num_experts for operator in operators if isinstance(operator, KTransformersExperts)}
    top_k = loaded.opened.facts.top_k()
    return Extent(loaded.planned.chunk_size, max_batch_size, num_pages, max(counts, default=0), top_k)


def _graphs(loaded: _Loaded, hardware: Hardware) -> tuple[GraphBackend | None, bool]:
    """How steps are captured; None, with a line in the log for a model on GPUs, where they are not. And whether steps
    are padded to the sizes of graphs, as they are without graphs where only those are not wanted."""
    layout = loaded.layout
    if layout.is_cpu:
        return None, False
    reason = why_not_captured(loaded.plan, layout)
    is_padded = reason is None
    if is_padded and loaded.opened.config.use_cuda_graph is False:
        reason = "--no_use_cuda_graph"
    if reason is not None:
        logger.info("decode steps run without CUDA graphs: %s", reason)
        return None, is_padded
    return hardware.make_graphs(list(dict.fromkeys(device.torch_device for device in layout.devices))), True
