"""Builds a loaded engine from paths: config, skeleton, plan, operators, weights, cache, tokenizer.

The order matters: everything that can be refused is refused before the first weight byte is read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from ktransformers.cache.paged import Lenders
from ktransformers.config import EngineConfig
from ktransformers.core import Progress
from ktransformers.engine.damage.scan import DamageScan
from ktransformers.engine.drafting.draft_model import DraftModelForward
from ktransformers.engine.drafting.drafter import DraftForward, DraftLimits, ModelDrafter
from ktransformers.engine.drafting.dspark import DsparkForward
from ktransformers.engine.drafting.mtp import MtpForward
from ktransformers.engine.drafting.mtp_layers import MtpLayers
from ktransformers.engine.load.loaded import Engine, LoadedModel, LoadedPart
from ktransformers.engine.load.stages import (
    CapturedModel,
    LoadedWeights,
    OpenedPart,
    arrange_model,
    capture_steps,
    load_weights,
    open_part,
    plan_part,
)
from ktransformers.engine.media.encoder import TowerEncoder
from ktransformers.engine.media.family import PictureFamily
from ktransformers.engine.media.features import PictureEncoder
from ktransformers.engine.media.towers import load_tower
from ktransformers.engine.model.assistant import lenders_of
from ktransformers.engine.model.dspark import DsparkInput
from ktransformers.engine.model.hot_file import HotFile
from ktransformers.engine.model.mtp import MtpInput
from ktransformers.engine.model.opened import OpenedModel, open_model
from ktransformers.engine.parallel.ranks.driver import Driver, made_of
from ktransformers.engine.parallel.ranks.parallel_strategy import num_processes, parallel_strategy
from ktransformers.engine.parallel.ranks.ranks import Alone, Ranks, Worker
from ktransformers.engine.plan.cache_plan import CachePlan
from ktransformers.engine.plan.hardware import Hardware
from ktransformers.engine.plan.planned import PlannedDraft
from ktransformers.engine.plan.planning import Planner
from ktransformers.engine.plan.tier_plan import open_tiers
from ktransformers.engine.sampling.constraints import mask_of
from ktransformers.engine.step.executor import PagedExecutor
from ktransformers.engine.step.executor_parts import ExecutorParts
from ktransformers.engine.step.hot import StepExperts
from ktransformers.engine.step.runner import ModelRunner
from ktransformers.engine.step.step_runtime import StepRuntime
from ktransformers.errors import UnsupportedError, WeightError
from ktransformers.kernels.cpu.expert_store import ReadError
from ktransformers.kernels.triton.common.compiling import loading
from ktransformers.operators.base import ExpertStats
from ktransformers.operators.expert_files import ExpertFiles
from ktransformers.operators.partial_sums import PassThrough
from ktransformers.optimize.plan import Plan

__all__ = [
    "Engine",
    "Hardware",
    "LoadedModel",
    "LoadedPart",
    "build_engine",
    "build_worker",
    "plan_model",
]

logger = logging.getLogger(__name__)

_LEAST_INTERVAL = 256
"""Tokens between snapshots inside of a prompt, at least."""


def plan_model(config: EngineConfig, opened: OpenedModel | None = None, hardware: Hardware | None = None) -> Plan:
    """Plan what `build_engine` would do with `config`. Reads headers, and a page of some tensors where
    something was learned of the experts of models. Raises the same errors, except for the fit.

    opened: the model, when it is open already; its config counts.
    """
    opened = opened or open_model(config)
    hardware = hardware or Hardware.detect(opened.config)
    if opened.config.tensor_parallel > 1:
        opened, hardware = parallel_strategy(opened.config, 0).shard(opened, hardware)
    return Planner(opened, None, CachePlan.of(opened)).plan(hardware)[0].plan


def build_engine(
    config: EngineConfig,
    progress: Progress | None = None,
    hardware: Hardware | None = None,
    opened: OpenedModel | None = None,
    *,
    page_size: int = 0,
    max_batch_size: int = 1,
    expert_stats: ExpertStats | None = None,
    ranks: Ranks | None = None,
) -> Engine:
    """Load a model for up to max_batch_size sequences at once, which share --cache_lens tokens in pages.

    Raises ConfigError, RuleError, WeightError or CapacityError, each before it is too late.

    hardware: what to run on; this machine when None. opened: the model, when it is open already (a synthetic one, say);
    its config counts. page_size: tokens of a page, 0: as many as suit the model. expert_stats: where to count how
    experts are used, for a caller who wants to ask. ranks: with whom it is cut; None: as the config says.
    """
    stats = expert_stats or ExpertStats()
    opened = opened or open_model(config)
    if ranks is None:
        ranks = Driver(opened.config, made_of(opened)) if num_processes(opened.config) > 1 else Alone()
    cache_plan = CachePlan.of(opened, max_batch_size, page_size)
    built = _build(open_part(opened, hardware, ranks), cache_plan, progress, stats)
    cache, identified, hot, planned = built.cache, built.arranged.identified, built.loaded.hot, built.planned
    drafter, drafts = (None, []) if planned.draft is None else _load_drafter(planned.draft, built, progress)
    runner = ModelRunner(built.forward, built.decode, ranks.step_broadcast(), begins_ahead=ranks.begins_ahead)
    grammars = built.model.tokenizer.grammars(built.model.vocab_size, built.model.eos_token_ids)
    experts, tower = StepExperts(stats, hot, _read_experts([built, *drafts])), _load_tower(built)
    tiers, tiered_cache = open_tiers(opened.config, cache, identified) or (None, None)
    parts = ExecutorParts(
        experts,
        mask_of=lambda start: mask_of(grammars, start.params),
        eos_token_ids=built.model.eos_token_ids,
        drafter=drafter,
        pictures=tower,
        tiers=tiered_cache,
        find_damage=DamageScan(opened.config).said,
        recover=lambda: _recover(ranks, runner),
        new_runtime=lambda: StepRuntime(runner),
    )
    longest = opened.facts.longest_sequence(cache.num_slots)
    return Engine(
        config=built.config,
        plan=built.plan,
        model=built.model,
        pool=built.forward.pool,
        identified=identified,
        facts=opened.facts,
        executor=PagedExecutor(runner, cache, built.forward.pool, built.model.vocab_size, parts),
        cache=cache,
        max_batch_size=max_batch_size,
        snapshot_interval=_snapshot_interval(max(cache.num_states - max_batch_size, 0), longest),
        tiers=tiers,
        hot=hot,
        expert_files=planned.expert_files,
        ranks=ranks,
        why_drafts_eager=built.why_drafts_eager,
        drafts_in_block=planned.draft is not None and planned.draft.opened.dspark is not None,
    )


def _snapshot_interval(snapshots: int, longest: int) -> int:
    """Tokens between snapshots of states inside of a prompt, so that the longest one takes half of them; 0: none."""
    return max(-(-longest // max(snapshots // 2, 1)), _LEAST_INTERVAL) if snapshots else 0


def _read_experts(models: Sequence[CapturedModel]) -> list[ExpertFiles]:
    """Begin to fill the slots of experts in files; return these files. models: the target, and what drafts for it."""
    found = list[ExpertFiles]()
    for one in models:
        files = one.planned.expert_files
        if files is not None and files.owner is None:
            learned = HotFile(one.arranged.identified.sampled.digests)
            files.fill(learned.read(), learned.add, one.loaded.hot.has_slot())
            found.append(files)
    return found


def _load_tower(built: CapturedModel) -> PictureEncoder | None:
    """Load the tower for pictures where it is planned; None where none come, or they cannot be run as transformers runs
    them. Raises WeightError; the model is closed then."""
    folder, tower = built.config.picture_folder, built.planned.tower
    if tower is None or folder is None:
        return None
    try:
        family = PictureFamily.of(tower.opened.model.config)  # asked before its weights are read
    except UnsupportedError as error:
        logger.warning("no pictures: %s", error)
        return None
    with ExitStack() as undo:
        undo.callback(built.forward.pool.close)
        undo.callback(built.plan.devices.close)
        encoder = TowerEncoder(load_tower(tower.opened, tower.place), family, folder, built.forward.pool)
        undo.pop_all()
    return encoder


def _load_drafter(
    draft: PlannedDraft, target: CapturedModel, progress: Progress | None
) -> tuple[ModelDrafter, list[CapturedModel]]:
    """Load the model that drafts where it is planned, with the target's threads, and with a cache of its pages. Returns
    it as it was captured, too: one, or one for each layer for multi-token prediction.

    Errors as `build_engine`; the target is closed then.
    """
    pool, forwards, models = target.forward.pool, list[DraftForward](), list[CapturedModel]()
    planned: PlannedDraft | None = draft
    with ExitStack() as undo:
        undo.callback(pool.close)
        undo.callback(target.plan.devices.close)
        while planned is not None:
            forward, model = _load_draft(planned, target, progress, len(forwards))
            forwards.append(forward)
            models.append(model)
            planned = model.planned.draft
        undo.pop_all()
    made, several = forwards[0], [forward for forward in forwards if isinstance(forward, MtpForward)]
    if len(several) > 1:
        rows, batch = min(one.limits.max_rows for one in several), draft.cache_plan.max_batch_size
        share = rows if batch * len(several) <= rows else max(rows // len(several), 1)
        made = MtpLayers(several, replace(several[0].limits, max_rows=share))
        logger.info("%d layers for multi-token prediction make a draft token each", len(several))
    keeps_prefixes = target.config.prefix_cache and not made.is_fixed
    return ModelDrafter(made, pool, keeps_prefixes=keeps_prefixes), models


def _load_draft(
    draft: PlannedDraft, target: CapturedModel, progress: Progress | None, number: int
) -> tuple[DraftForward, CapturedModel]:
    """Load one model that drafts, the number'th. Returns it, with the plan of the one that drafts the token behind its
    own."""
    entry = draft.opened.model.get_input_embeddings()
    if isinstance(entry, MtpInput):
        entry.take_source(target.forward.embedding)
    part = open_part(draft.opened, draft.hardware_now(), Alone())
    built = _build(part, draft.cache_plan, progress, target=target, expert_files=draft.planned.expert_files)
    target.plan.devices.close_with_this(built.plan.devices)
    logger.info("draft tokens come from %s", built.model.description)
    runner = ModelRunner(built.forward, built.decode)
    longest = draft.opened.facts.longest_sequence(target.cache.num_slots)
    limits = DraftLimits(built.config.chunk_size, longest, target.model.vocab_size)
    if isinstance(entry, DsparkInput):
        passes, num_pages = (built.forward, target.forward), target.cache.num_pages
        return DsparkForward(runner, built.cache, limits, entry, *passes, num_pages), built
    if isinstance(entry, MtpInput):
        passes, is_fixed = (built.forward, target.forward), draft.opened.facts.is_borrowing
        made = MtpForward(runner, built.cache, limits, entry, *passes, is_fixed=is_fixed, number=number)
        return made, built
    if target.planned.tower is not None:
        logger.info("the model that drafts sees no pictures: behind one, fewer of its tokens are right")
    return DraftModelForward(runner, built.cache, limits), built


def _lenders(draft: OpenedModel, target: CapturedModel) -> Lenders | None:
    """The layers of the target whose keys and values a draft model attends to; None for one that has its own."""
    if not draft.facts.is_borrowing:
        return None
    return Lenders(target.cache, lenders_of(draft.facts, target.loaded.opened.facts))


def _take_head(loaded: LoadedWeights, target: CapturedModel) -> str | None:
    """Give a model without a head of its own, a layer for multi-token prediction, the target's. Returns why its steps
    cannot be captured then; None where they can."""
    model, layout = loaded.opened.model, loaded.layout
    if not isinstance(getattr(model, "lm_head", None), PassThrough):
        return None
    model.add_module("lm_head", target.forward.model.lm_head)
    place = target.plan.device_of("lm_head")
    if layout.is_cpu or place == layout.last.name:
        return None
    return f"lm_head is on {place}"


def _recover(ranks: Ranks, runner: ModelRunner) -> None:
    ranks.recover()
    runner.recovered()


def build_worker(opened: OpenedModel, worker: Worker, hardware: Hardware, cache_plan: CachePlan) -> LoadedPart:
    """Load one process's part of a model that is cut. Errors as `build_engine`."""
    built = _build(open_part(opened, hardware, worker), cache_plan, None)
    runner = ModelRunner(built.forward, built.decode, send_output=worker.send_output())
    return LoadedPart(runner, built.cache, built.forward.pool)


@contextmanager
def _reads_of_weights() -> Iterator[None]:
    """A file of experts that cannot be read is a WeightError while loading."""
    try:
        yield
    except ReadError as error:
        raise WeightError(str(error)) from error


def _build(
    part: OpenedPart,
    cache_plan: CachePlan,
    progress: Progress | None,
    stats: ExpertStats | None = None,
    target: CapturedModel | None = None,
    expert_files: ExpertFiles | None = None,
) -> CapturedModel:
    """What engines and their parts are made of. target: the model that it drafts for, whose threads it takes, and whose
    head in the place of one that it lacks. expert_files: see `plan_part`. Errors as `build_engine`; whatever was
    started is stopped then."""
    with loading(), ExitStack() as undo, _reads_of_weights():
        shared = None if target is None else target.forward.pool
        planned = plan_part(part, cache_plan, stats or ExpertStats(), undo, shared, expert_files)
        loaded = load_weights(planned, progress)
        why_eager = None if target is None else _take_head(loaded, target)
        arranged = arrange_model(loaded, None if target is None else _lenders(part.opened, target))
        captured = capture_steps(arranged, progress, why_eager)
        undo.pop_all()
    return captured
