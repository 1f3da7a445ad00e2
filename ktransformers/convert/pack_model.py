"""The whole of `ktransformers pack`: the experts of a model, as the CPU's kernels take them, in a file beside it.

open_model ── plan on the CPU ── experts of each layer, packed a piece at a time ── stored_experts.write ──> OUT
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from pathlib import Path

from ktransformers.config import MAX_DRAFTS, EngineConfig
from ktransformers.convert.progress import Advances
from ktransformers.engine.load.builder import plan_model
from ktransformers.engine.model.opened import OpenedModel, open_model
from ktransformers.errors import ConfigError, TensorMismatchError, UnsupportedError, WeightError
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.cpu.pages import trim_heap, without_cache
from ktransformers.kernels.types import ExpertWeights
from ktransformers.operators.expert_files import packed_key
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.operators.linear.packed import experts_record, pack_experts
from ktransformers.system.cores import usable_cores
from ktransformers.weights.digests.states import states_of
from ktransformers.weights.source import WeightSource
from ktransformers.weights.stored_experts.header import SourceIdentity
from ktransformers.weights.stored_experts.places import place_beside
from ktransformers.weights.stored_experts.reading import StoredExperts
from ktransformers.weights.stored_experts.records import parts_of
from ktransformers.weights.stored_experts.writing import ExpertsLayer, write

__all__ = ["Packed", "check_packed", "pack_model"]

logger = logging.getLogger(__name__)

_PIECE = 64 << 20
"""Bytes of records that are packed and written together: enough for all threads."""


MakeProgress = Callable[[str, int], AbstractContextManager[Advances]]
"""Of (name of the file, bytes of all records)."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed file that was written, or checked. types: bytes of matrices by type. of_model: whether it was compared
    with the model's files.
    """

    path: Path
    nbytes: int
    num_layers: int
    num_records: int
    types: Counter[str]
    seconds: float
    of_model: bool = True


def pack_model(config: EngineConfig, output: Path | None, progress: MakeProgress, *, force: bool = False) -> Packed:
    """Write the packed experts of a model to `output`, or beside its files.

    force: whether the file may be there already. Raises ConfigError, WeightError, RuleError, or CapacityError when the
    disk is full.
    """
    start = time.monotonic()
    opened, layers = _planned(config)
    path = _place(opened, output)
    if path.exists() and not force:
        raise ConfigError(f"{path} exists; --check looks whether it is whole, --force writes it again")
    identity, options = SourceIdentity.of(opened.source, opened.files), _options(opened.config)
    by_key, wanted = {one.layer.key: one for one in layers}, [one.layer for one in layers]
    with (
        closing(WorkerPool(config.cpu_infer or usable_cores())) as pool,
        without_cache(),
        progress(path.name, sum(layer.nbytes for layer in wanted)) as shown,
    ):

        def pieces(layer: ExpertsLayer) -> Iterator[ExpertWeights]:
            return _pieces(opened, by_key[layer.key], pool)

        write(path, identity, options, wanted, pieces, shown.advance, lambda: _check_unchanged(opened))
    return _packed(StoredExperts.open(path, identity), start)


def check_packed(model: Path | EngineConfig, output: Path | None, progress: MakeProgress) -> Packed:
    """Compare all checksums of a packed file, and its header with the model it is beside.

    model: the packed file itself, which is compared with no model then. Raises FormatError for what is damaged,
    ConfigError for the file of another model, or of other flags.
    """
    start = time.monotonic()
    if isinstance(model, Path):
        stored = StoredExperts.open(model, None)
    else:
        opened, layers = _planned(model)
        path = _place(opened, output)
        if not path.exists():
            raise ConfigError(f"{path} is not there; `ktransformers pack MODEL` writes it")
        stored = StoredExperts.open(path, SourceIdentity.of(opened.source, opened.files))
        for layer in (one.layer for one in layers):
            if stored.layer(layer.key, layer.record) is None:
                raise ConfigError(f"{path} lacks the experts of {layer.key}; pack the model again with --force")
    with progress(stored.path.name, stored.nbytes) as shown:
        stored.verify(shown.advance)
    return _packed(stored, start, of_model=not isinstance(model, Path))


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer whose experts are packed: where they come from, what they are in memory, and in the file."""

    source: WeightSource
    operator: KTransformersExperts
    layer: ExpertsLayer


def _planned(config: EngineConfig) -> tuple[OpenedModel, list[_Layer]]:
    """The opened model, and the layers whose experts the CPU's kernels compute: all, whatever GPUs there are, and those
    for multi-token prediction."""
    opened = _opened(replace(config, use_cuda=False, picture_folder=None, experts_from="ram"))
    layers, draft, index = list(_layers(opened)), opened.draft, 0
    while draft is not None:
        try:
            layers += _layers(draft, index)
        except (TensorMismatchError, UnsupportedError) as error:
            logger.warning("the layer for multi-token prediction is left out: %s", error)
            break
        draft, index = draft.draft, index + 1
    if not layers:
        raise UnsupportedError(f"{opened.facts.model_type} has no routed experts that could be packed")
    return opened, layers


def _opened(config: EngineConfig) -> OpenedModel:
    """With all its layers for multi-token prediction, where it has any."""
    try:
        return open_model(replace(config, speculative="mtp", speculative_tokens=MAX_DRAFTS))
    except UnsupportedError as error:
        logger.debug("without layers for multi-token prediction: %s", error)
        return open_model(config)


def _layers(opened: OpenedModel, index: int = -1) -> Iterator[_Layer]:
    """Those of a model, or of its layer `index` for multi-token prediction."""
    for key, operator in plan_model(opened.config, replace(opened, draft=None)).operators.items():
        if not isinstance(operator, KTransformersExperts):
            continue
        if operator.activation is None:
            logger.warning("%s is left out: no kernel computes its experts, which stay in RAM", key)
            continue
        layer = operator.paths[0].layer
        record = experts_record(layer.find(opened.source), operator.products)
        named = packed_key(key, index)
        yield _Layer(opened.source, operator, ExpertsLayer(named, layer.number, operator.num_experts, record))


def _place(opened: OpenedModel, output: Path | None) -> Path:
    """Raises ConfigError for a place where no file can be, or that is one of the model's own."""
    path = place_beside(opened.files) if output is None else output
    if path.is_dir():
        raise ConfigError(f"--output {path} is a folder; name the file to write")
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is no folder; make it first")
    if path.exists() and any(path.samefile(file) for file in opened.files):
        raise ConfigError(f"--output {path} is the model itself; write to another file")
    return path


def _options(config: EngineConfig) -> dict[str, str]:
    """What decides how experts are packed, by the names of the flags."""
    quant = {} if config.cpu_quant is None else {"cpu_quant": config.cpu_quant}
    return {**quant, "cpu_bf16": config.cpu_bf16}


def _check_unchanged(opened: OpenedModel) -> None:
    if states_of(Path(state.path) for state in opened.states) != opened.states:
        raise WeightError(f"{opened.files[0].parent}: the model was changed while it was packed; pack it again")


def _pieces(opened: OpenedModel, one: _Layer, pool: WorkerPool) -> Iterator[ExpertWeights]:
    """The packed experts of a layer, some at a time."""
    operator, layer = one.operator, one.layer
    experts = one.source.experts(operator.key, operator.layout, operator.config.cpu_quant)
    step = max(_PIECE // layer.record.nbytes, 1)
    for first in range(0, layer.num_experts, step):
        few = slice(first, first + step)
        gate = None if experts.gate is None else experts.gate[few]
        try:  # pinned: copied out of the file where they are not packed
            yield pack_experts(
                ExpertWeights(gate, experts.up[few], experts.down[few]), pool, operator.products, is_pinned=True
            )
        except RuntimeError as error:  # of native code, for a file that cannot be read
            _check_unchanged(opened)
            raise WeightError(f"{layer.key} cannot be packed: {error}") from error
    del experts
    trim_heap()


def _packed(stored: StoredExperts, start: float, *, of_model: bool = True) -> Packed:
    types: Counter[str] = Counter()
    for layer in stored.header.layers:
        for part in parts_of(layer.record()).values():
            types[part.qtype.name] += layer.num_experts * part.nbytes
    records = sum(layer.num_experts for layer in stored.header.layers)
    nbytes, seconds = stored.path.stat().st_size, time.monotonic() - start
    return Packed(stored.path, nbytes, len(stored.header.layers), records, types, seconds, of_model)
