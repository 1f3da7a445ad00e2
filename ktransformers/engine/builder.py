"""From paths to a loaded engine: config, skeleton, plan, operators, weights, cache, tokenizer.

The order matters: everything that can be refused is refused before the first weight byte is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ktransformers.cache.paged import LayerShape, PagedCache
from ktransformers.cache.static import StaticCache
from ktransformers.config import EngineConfig, why_crowded
from ktransformers.core import CAPTURING, COMPILING
from ktransformers.engine.attention import settle_attention
from ktransformers.engine.card import ModelCard
from ktransformers.engine.decode import DecodeSteps, why_not_captured
from ktransformers.engine.graphs import GraphBackend
from ktransformers.engine.layout import StepLayout, install_moves, move_into, settle_buffers, settle_homes
from ktransformers.engine.opened import ModelDescription, OpenedModel, describe_model, open_model
from ktransformers.engine.paged import PagedExecutor
from ktransformers.engine.planning import Hardware, Planner
from ktransformers.engine.prefill import stream_prefill
from ktransformers.engine.rehearsal import Extent, rehearse
from ktransformers.engine.runner import ModelRunner, StaticRunner
from ktransformers.engine.self_check import check_model
from ktransformers.engine.skeleton import restore_buffers
from ktransformers.engine.threads import settle_torch_threads
from ktransformers.errors import UnsupportedError
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.triton.compiling import compiles, loading, rehearsal
from ktransformers.models.facts import ModelFacts
from ktransformers.operators.attention.rope import KRotaryEmbedding, settle_rotations
from ktransformers.operators.base import ExpertStats
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.operators.layers.cpu import fuse_layers
from ktransformers.operators.layers.gpu import stack_gpu_layers
from ktransformers.operators.layers.observed import PROBE_ROWS, LayerCall, check_calls, observe_step, probe_context
from ktransformers.optimize.apply import apply_plan, load_plan
from ktransformers.optimize.plan import Plan
from ktransformers.tokenizer import Tokenizer

__all__ = [
    "DEFAULT_CACHE_LEN",
    "Engine",
    "Hardware",
    "PagedEngine",
    "Progress",
    "build_engine",
    "build_paged_engine",
    "cache_len_of",
    "plan_model",
]

logger = logging.getLogger(__name__)

DEFAULT_CACHE_LEN = 8192
"""Tokens of the static cache when --cache_lens is not given, if the model's context is that long."""

PAGED_SHARE = 0.25
"""Of the free memory, what the pages may take when --cache_lens is not given."""

Progress = Callable[[int, int, str], None]
"""Called while loading with (bytes loaded, bytes in all, dotted name of the module).

After it, while steps on a GPU are made ready, with (kernels, kernels in all, COMPILING) and (graphs captured, graphs in
all, CAPTURING).
"""


@dataclass(slots=True)
class Engine:
    """A loaded model with what is needed to feed it. tokenizer has no vocabulary when the model's files carry none."""

    config: EngineConfig
    facts: ModelFacts
    plan: Plan
    runner: StaticRunner
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    generation_defaults: Mapping[str, Any]
    description: str
    card: ModelCard

    def close(self) -> None:
        """Stop the worker threads. The engine cannot be used afterwards."""
        self.plan.devices.close()
        self.runner.pool.close()


@dataclass(slots=True)
class PagedEngine:
    """A loaded model that runs the scheduler's steps."""

    config: EngineConfig
    plan: Plan
    executor: PagedExecutor
    cache: PagedCache
    model: ModelDescription
    pool: WorkerPool

    @property
    def description(self) -> str:
        """The model in a line."""
        return self.model.description

    def close(self) -> None:
        """Stop the worker threads. The engine cannot be used afterwards."""
        self.plan.devices.close()
        self.pool.close()


def cache_len_of(config: EngineConfig, facts: ModelFacts) -> int:
    """Tokens of a static cache: what the user says, else up to DEFAULT_CACHE_LEN; never more than the model takes."""
    context = facts.context_len
    wanted = config.cache_lens or DEFAULT_CACHE_LEN
    if context is None or wanted <= context:
        return wanted
    if config.cache_lens:
        message = "--cache_lens %d: the model takes %d tokens, prompt and answer together; the cache holds as many"
        logger.warning(message, config.cache_lens, context)
    return context


def plan_model(config: EngineConfig, opened: OpenedModel | None = None, hardware: Hardware | None = None) -> Plan:
    """What `build_engine` would do with `config`. Reads headers only. Raises the same errors, except for the fit.

    opened: the model, when it is open already; its config counts.
    """
    opened = opened or open_model(config)
    hardware = hardware or Hardware.detect(opened.config)
    num_slots = cache_len_of(opened.config, opened.facts)
    return Planner(opened, None, lambda plan, shapes: num_slots).settle(hardware)[0].plan


@contextmanager
def _new_pool(num_threads: int) -> Iterator[WorkerPool]:
    """A pool that is closed when the block fails, with nobody else's threads in its way."""
    settle_torch_threads()
    crowded = why_crowded(num_threads)
    if crowded is not None:
        logger.warning("%s", crowded)
    pool = WorkerPool(num_threads)
    try:
        yield pool
    except BaseException:
        pool.close()
        raise


def build_engine(config: EngineConfig, progress: Progress | None = None, hardware: Hardware | None = None) -> Engine:
    """Load a model. Raises ConfigError, RuleError, WeightError or CapacityError, each before it is too late.

    hardware: what to run on; this machine when None.
    """
    opened = open_model(config)
    hardware = hardware or Hardware.detect(opened.config)
    opened.config = replace(opened.config, cpu_infer=opened.config.cpu_infer or hardware.num_threads)
    with loading(), _new_pool(opened.config.cpu_infer) as pool:
        max_len = cache_len_of(opened.config, opened.facts)
        planned, hardware = Planner(opened, pool, lambda plan, shapes: max_len).settle(hardware)
        plan, shapes = planned.plan, planned.shapes
        plan.check_fits()
        model = describe_model(opened)
        _say_prefill(plan, pool)
        layout = _load(opened, plan, max_len, progress)
        _arrange_layers(opened, plan, shapes, pool, layout, max_len)
        settle_attention(plan, opened.config.attention_backend, max_len)
        stream_prefill(plan, planned.streamings, hardware.prefill_tools, pool, max_batch_size=1)
        cache, is_models_limit = StaticCache(shapes, max_len), max_len == model.context_len
        runner = StaticRunner(opened.model, cache, pool, model.vocab_size, layout, is_models_limit)
        prepare = _Decoding(opened, plan, hardware, progress, planned.chunk_size)
        runner.decode = prepare(runner, runner.cache, max_batch_size=1, num_pages=1)
    return Engine(
        config=replace(opened.config, cache_lens=max_len, chunk_size=planned.chunk_size),
        facts=opened.facts,
        plan=plan,
        runner=runner,
        tokenizer=model.tokenizer,
        eos_token_ids=model.eos_token_ids,
        generation_defaults=model.generation_defaults,
        description=model.description,
        card=model.card,
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
) -> PagedEngine:
    """Load a model for many sequences at once, which share --cache_lens tokens in pages. Errors as `build_engine`.

    expert_stats: where to count how experts are used, for a caller who wants it done more closely.
    opened: the model, when it is open already (a synthetic one, say); its config counts.
    """
    opened, expert_stats = opened or open_model(config), expert_stats or ExpertStats()
    hardware = hardware or Hardware.detect(opened.config)
    opened.config = replace(opened.config, cpu_infer=opened.config.cpu_infer or hardware.num_threads)
    with loading(), _new_pool(opened.config.cpu_infer) as pool:

        def num_slots(plan: Plan, shapes: list[LayerShape]) -> int:
            return _num_pages(opened, plan, shapes, page_size, max_batch_size) * page_size

        planned, hardware = Planner(opened, pool, num_slots, expert_stats).settle(hardware)
        plan, shapes, num_pages = planned.plan, planned.shapes, planned.num_slots // page_size
        plan.check_fits()
        model = describe_model(opened)
        _say_prefill(plan, pool)
        longest = opened.facts.longest_sequence(num_pages * page_size)
        layout = _load(opened, plan, longest, progress)
        _arrange_layers(opened, plan, shapes, pool, layout, longest)
        settle_attention(plan, opened.config.attention_backend, page_size)
        stream_prefill(plan, planned.streamings, hardware.prefill_tools, pool, max_batch_size)
        cache = PagedCache(shapes, num_pages, page_size)
        runner = ModelRunner(opened.model, pool, layout)
        prepare = _Decoding(opened, plan, hardware, progress, planned.chunk_size)
        runner.decode = prepare(runner, cache, max_batch_size=max_batch_size, num_pages=-(-longest // page_size))
    return PagedEngine(
        config=replace(opened.config, cache_lens=cache.num_slots, chunk_size=planned.chunk_size),
        plan=plan,
        executor=PagedExecutor(runner, cache, pool, model.vocab_size, lambda: expert_stats.totals(plan.devices)),
        cache=cache,
        model=model,
        pool=pool,
    )


def _say_prefill(plan: Plan, pool: WorkerPool) -> None:
    """One line when cpu_prefill bf16 is asked for and this processor cannot."""
    if not pool.has_bf16 and any(getattr(operator, "wants_bf16", False) for operator in plan.operators.values()):
        logger.warning(
            "cpu_prefill bf16: %s has no products of bf16 (AMX and AVX512-BF16 have); prefill stays exact, in int8",
            pool.isa.value,
        )


def _num_pages(opened: OpenedModel, plan: Plan, shapes: list[LayerShape], page_size: int, max_batch_size: int) -> int:
    """Pages for --cache_lens tokens; when it is 0, for max_batch_size long ones, if they fit comfortably."""
    asked = opened.config.cache_lens
    if asked:
        return -(-asked // page_size)
    num_tokens = cache_len_of(opened.config, opened.facts) * max_batch_size
    fitting = min(
        int(PAGED_SHARE * max(plan.capacity.get(place, 0) - plan.weight_bytes.get(place, 0), 0) / nbytes)
        for place, nbytes in PagedCache.size_by_place(shapes, 1).items()
    )
    chosen = max(min(num_tokens, fitting), page_size)
    if chosen < num_tokens:
        logger.info("--cache_lens: %d tokens, a quarter of the free memory; set it to have more", chosen)
    return chosen // page_size


@dataclass(frozen=True, slots=True)
class _Decoding:
    """Prepares the steps of a loaded model whose layers are on a GPU. chunk_size: most tokens of one."""

    opened: OpenedModel
    plan: Plan
    hardware: Hardware
    progress: Progress | None
    chunk_size: int

    def __call__(
        self, runner: ModelRunner, cache: PagedCache, *, max_batch_size: int, num_pages: int
    ) -> DecodeSteps | None:
        """None when layers are on the CPU."""
        layout, backend = runner.layout, None
        if layout is None:
            return None
        reason = why_not_captured(self.plan, layout)
        if reason is None and self.opened.config.use_cuda_graph is False:
            reason = "--no_use_cuda_graph"
        if reason is None:
            backend = self.hardware.make_graphs(list(dict.fromkeys(device.torch_device for device in layout.devices)))
        else:
            logger.info("decode steps run without CUDA graphs: %s", reason)
        report = self.progress or (lambda done, total, name: None)

        def steps(backend: GraphBackend | None) -> DecodeSteps:
            return DecodeSteps(
                runner.run,
                layout,
                cache,
                runner.pool,
                max_batch_size=max_batch_size,
                num_pages=num_pages,
                backend=backend,
                progress=lambda done, total: report(done, total, CAPTURING),
            )

        can_pad = all(device.is_gpu for device in layout.devices)
        with torch.inference_mode():
            if compiles():
                operators = self.plan.operators.values()
                counts = {op.layout.num_experts for op in operators if isinstance(op, KTransformersExperts)}
                top_k = self.opened.facts.top_k()
                extent = Extent(self.chunk_size, max_batch_size, num_pages, max(counts, default=0), top_k)
                decode = steps(None) if can_pad else None
                rehearse(runner, cache, decode, extent, lambda done, total: report(done, total, COMPILING))
                _forget_tables(self.plan)
            return steps(backend) if can_pad else None


def _arrange_layers(
    opened: OpenedModel, plan: Plan, shapes: list[LayerShape], pool: WorkerPool, layout: StepLayout, max_len: int
) -> None:
    """Run one step, and refuse what cannot be right; then layers in native calls, when every module is on the CPU;
    else those on a GPU in as few launches as can be. What no test covers is compared with transformers.

    max_len: most positions of a sequence. Raises UnsupportedError.
    """
    calls = _first_step(opened, plan, shapes, pool, layout, max_len)
    check_calls(opened.model, calls, max_len)
    if all(entry.placement.generate_device == "cpu" for entry in plan.entries):
        fuse_layers(opened.model, shapes, pool, calls)
        check_model(opened, plan, shapes, pool, layout, calls, max_len)
    else:
        check_model(opened, plan, shapes, pool, layout, calls, max_len)  # before stacks stand in for layers
        homes = {home.key: plan.devices[home.device] for home in plan.homes}
        stack_gpu_layers(opened.model, homes, move_into)


def _first_step(
    opened: OpenedModel, plan: Plan, shapes: list[LayerShape], pool: WorkerPool, layout: StepLayout, max_len: int
) -> list[LayerCall]:
    """What the layers are handed in a step at the last positions that there are: what depends on them shows there.

    Raises UnsupportedError when the model fails in it.
    """
    num_rows = PROBE_ROWS if layout.is_cpu else 1
    context = probe_context(shapes, pool, num_rows)
    positions = torch.arange(num_rows) + max(max_len - num_rows, 0)
    runner = ModelRunner(opened.model, pool, layout, announce=False)
    keep = torch.tensor([num_rows - 1])

    def step() -> torch.Tensor:
        return runner.step(torch.zeros_like(positions), positions, context, keep)

    try:
        if compiles() and not layout.is_cpu:
            with rehearsal():  # its kernels are compiled side by side
                step()
        return observe_step(opened.model, step)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
        logger.debug("the first step failed", exc_info=True)
        raise UnsupportedError(
            f"model type {opened.facts.model_type} does not run here: its first step fails with "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        ) from error
    finally:
        _forget_tables(plan)


def _forget_tables(plan: Plan) -> None:
    """Of rotations, which a step at the last positions filled."""
    for operator in plan.operators.values():
        if isinstance(operator, KRotaryEmbedding):
            operator.forget_table()


def _load(opened: OpenedModel, plan: Plan, max_len: int, progress: Progress | None) -> StepLayout:
    total = sum(plan.weight_bytes.values())
    modules, embedding = dict(opened.model.named_modules()), opened.model.get_input_embeddings()
    apply_plan(opened.model, plan)
    restore_buffers(opened.model)
    settle_rotations(opened.model, max_len)
    settle_homes(plan)  # before loading: what is streamed to its home is laid out for that
    if progress is None:
        load_plan(opened.model, plan, opened.source)
    else:
        load_plan(opened.model, plan, opened.source, lambda done, key: progress(done, total, key))
    settle_buffers(modules, plan)
    install_moves(modules, plan)
    for operator in plan.operators.values():
        operator.settle()
        operator.reserve(max_len)
    return StepLayout.of(plan, modules, embedding)
