"""Cuts a skeleton over processes: some heads of each attention, some columns of each feed-forward block.

    q, k, v, gate, up    rows of the weight: each process computes its own heads and columns of them
    o, down              columns of the weight: each process's result is a summand
    routed experts       on a GPU each process has some columns of every expert; in RAM, and where those cannot be
                         divided, the driver has them all, and what the others give for them is 0
    LM head              rows of the weight: logits of some tokens, which all processes gather
    all else             every process has it whole: norms, routers' rows, the embedding, layers that are not cut

A layer that cannot be cut evenly, or is of another make, is computed whole by each process, which is as right and takes
as long as without the others. Knows modules and headers; loads nothing.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from ktransformers.engine.model.opened import OpenedModel
from ktransformers.errors import UnsupportedError
from ktransformers.kernels.triton.quant.repack import ROW_MULTIPLE
from ktransformers.models.facts import ModelFacts
from ktransformers.operators.attention.latent_spec import Gate, LatentSpec
from ktransformers.operators.experts.block import KMoEBlock
from ktransformers.operators.layers.traced import layer_list
from ktransformers.operators.partial_sums import PartialSums, Placeholder, RankGroup
from ktransformers.operators.recognize.activation import recognize_gated_mlp
from ktransformers.operators.recognize.attention import NormPlace, recognize_attention
from ktransformers.optimize.tied import tied_names
from ktransformers.weights.cut_source import LEAST_COLUMNS, CutSource, TensorSlice, column_unit, share_of
from ktransformers.weights.source import WeightSource

__all__ = ["cut_model"]

logger = logging.getLogger(__name__)

_MLP = ("gate_proj", "up_proj", "down_proj")
_SHARED = ("shared_experts", "shared_mlp", "shared_expert")
_SCORE = "shared_expert_gate"
_HEAD = "lm_head"


@dataclass(slots=True)
class _Cut:
    """What has been cut so far of one process's skeleton."""

    source: WeightSource
    rank: int
    size: int
    parts: dict[str, TensorSlice] = field(default_factory=dict)
    zeros: set[str] = field(default_factory=set)
    linears: set[str] = field(default_factory=set)
    gathered: set[str] = field(default_factory=set)
    heads: dict[int, tuple[int, int]] = field(default_factory=dict)  # by layer: of queries, of keys

    def unit(self, key: str, least: int) -> int:
        """Columns of the matrix `key` that stay together: whole blocks, and multiples of `least`."""
        info = self.source.find(f"{key}.weight")
        return least if info is None else math.lcm(column_unit(info.resident_type), least)

    def rows(self, parent: nn.Module, key: str, name: str, first: int, count: int) -> None:
        """Keep these rows of a projection of the module `key`, "" for the model."""
        linear = parent.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        for leaf in ("weight", "bias"):
            self.parts[f"{key}.{name}.{leaf}".lstrip(".")] = TensorSlice(0, first, count)
        setattr(parent, name, _linear(linear.in_features, count, linear.bias is not None))

    def columns(self, parent: nn.Module, key: str, name: str, first: int, count: int) -> None:
        """Keep these columns; the result is a share. The driver alone adds the bias."""
        linear = parent.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        self.parts[f"{key}.{name}.weight"] = TensorSlice(1, first, count)
        if self.rank and linear.bias is not None:
            self.zeros.add(f"{key}.{name}.bias")
        self.linears.add(f"{key}.{name}")
        setattr(parent, name, _linear(count, linear.out_features, linear.bias is not None))


def _linear(in_features: int, out_features: int, bias: bool) -> nn.Linear:
    with torch.device("meta"):
        return nn.Linear(in_features, out_features, bias=bias).eval()


class _SharedPart(Placeholder):
    """A worker's share of a block whose routed experts the driver has: its columns of the shared ones."""

    def __init__(self, block: nn.Module, group: RankGroup, *, has_shared: bool):
        super().__init__()
        names = [name for name in _SHARED if has_shared and _child(block, name) is not None]
        self.group, self._name = group, names[0] if names else None
        for name in (*names, *([_SCORE] if names else [])):
            child = _child(block, name)
            if child is not None:
                setattr(self, name, child)

    @override
    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        return self.group.sum_product(rows, rows.shape[1], self._share).view(hidden_states.shape)

    def _share(self, rows: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor:
        """The part of rows [T, H], as a ShareProduct."""
        if self._name is None:
            return torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        share: torch.Tensor = self.get_submodule(self._name)(rows).float()
        score = _child(self, _SCORE)
        return (share if score is None else share * torch.sigmoid(score(rows).float())).contiguous()


class _NoExperts(Placeholder):
    """A worker's share of routed experts in a block of another make: nothing."""

    def __init__(self, group: RankGroup):
        super().__init__()
        self.group = group

    @override
    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        share = torch.zeros(hidden_states.shape, dtype=torch.float32, device=hidden_states.device)
        return self.group.sum(share).to(hidden_states.dtype)


def _child(module: nn.Module, name: str) -> nn.Module | None:
    child = getattr(module, name, None)
    return child if isinstance(child, nn.Module) else None


def _linears(module: nn.Module, names: tuple[str, ...]) -> bool:
    return all(isinstance(_child(module, name), nn.Linear) for name in names)


def cut_model(opened: OpenedModel, group: RankGroup, divided: frozenset[str] = frozenset()) -> OpenedModel:
    """Return the part of `opened` that this process runs, with its shares. The skeleton is changed: it must be nobody
    else's.

    divided: for a worker, the routed experts that the driver's plan divides; the driver's plan is yet to be made.

    Raises UnsupportedError for a model in which nothing can be cut.
    """
    layers = layer_list(opened.model)
    if layers is None:
        raise UnsupportedError(f"--tensor_parallel: the layers of model type {opened.facts.model_type} are not found")
    if any(getattr(layer, "continues_layers", False) for layer in layers):
        raise UnsupportedError(
            f"--tensor_parallel: layers of model type {opened.facts.model_type} run on the CPU alone"
        )
    cut = _Cut(opened.source, group.rank, group.size)
    names = {id(module): name for name, module in opened.model.named_modules()}
    blocks: set[str] = set()
    experts: set[str] = set()
    whole: Counter[str] = Counter()
    for layer in layers:
        key = names[id(layer)]
        for name, module in list(layer.named_modules()):
            if name and "experts" not in name.split("."):
                _cut_module(cut, module, f"{key}.{name}", whole)
        for block, name in _leave_experts(cut, layer, key, group, divided):
            blocks.add(block)
            experts.add(name)
    _cut_head(cut, opened.model, whole)
    if not cut.linears:
        raise UnsupportedError(
            f"--tensor_parallel {group.size}: nothing of model type {opened.facts.model_type} can be cut in "
            f"{group.size}: {', '.join(whole) or 'its attention is of another make'}"
        )
    if whole and not group.rank:
        logger.info(
            "computed whole on each GPU: %s", ", ".join(f"{count} modules, {why}" for why, count in whole.items())
        )
    linears = frozenset(key for key in cut.linears if not any(key.startswith(f"{block}.") for block in blocks))
    source = CutSource(opened.source, cut.parts, cut.zeros, is_whole=not group.rank)
    partial_sums = PartialSums(
        group, linears, frozenset(blocks), frozenset(cut.gathered), divided if group.rank else frozenset(experts)
    )
    return replace(opened, source=source, facts=_facts(opened.facts, cut.heads), partial_sums=partial_sums)


def _facts(facts: ModelFacts, heads: dict[int, tuple[int, int]]) -> ModelFacts:
    layers = [
        replace(layer, num_heads=heads[i][0], num_kv_heads=heads[i][1]) if i in heads else layer
        for i, layer in enumerate(facts.layers)
    ]
    return replace(facts, layers=tuple(layers))


def _cut_module(cut: _Cut, module: nn.Module, key: str, whole: Counter[str]) -> None:
    """Cut it if it is of a known make. whole: counts why others are not."""
    if _linears(module, _MLP):
        why = _cut_mlp(cut, module, key)
    elif _linears(module, ("q_proj", "k_proj", "v_proj", "o_proj")):
        why = _cut_attention(cut, module, key)
    elif _child(module, "kv_b_proj") is not None and isinstance(_child(module, "o_proj"), nn.Linear):
        why = _cut_latent(cut, module, key)
    else:
        return
    if why is not None:
        whole[why] += 1


def _cut_mlp(cut: _Cut, module: nn.Module, key: str) -> str | None:
    width = int(module.get_submodule("down_proj").in_features)  # type: ignore[arg-type]
    if recognize_gated_mlp(module) is None:
        return "feed-forward blocks of another make"
    share = share_of(width, cut.unit(f"{key}.down_proj", LEAST_COLUMNS), cut.rank, cut.size)
    if share is None:
        return f"{width} columns of feed-forward blocks cannot be cut into {cut.size} of whole blocks of their type"
    for name in ("gate_proj", "up_proj"):
        cut.rows(module, key, name, *share)
    cut.columns(module, key, "down_proj", *share)
    return None


def _cut_attention(cut: _Cut, module: nn.Module, key: str) -> str | None:
    spec = recognize_attention(module)
    if spec is None or (spec.norms is not None and spec.norms.place is NormPlace.WHOLE):
        return "attention of another make"
    heads, kv_heads, size = spec.num_heads, spec.num_kv_heads, cut.size
    sizes = {name: int(module.get_submodule(name).out_features) for name in ("q_proj", "k_proj", "v_proj")}  # type: ignore[arg-type]
    value_dim = int(module.get_submodule("o_proj").in_features) // heads  # type: ignore[arg-type]
    if heads % size or (kv_heads % size and size % kv_heads):
        return f"{heads} heads of queries and {kv_heads} of keys cannot be cut in {size}"
    if heads // size * value_dim % cut.unit(f"{key}.o_proj", LEAST_COLUMNS):
        return f"{heads // size} heads of {value_dim} columns are no whole blocks of o_proj's type"
    count, kv_count = heads // size, max(kv_heads // size, 1)
    first, kv_first = cut.rank * count, cut.rank * kv_heads // size
    for name, begin, part, of in (
        ("q_proj", first, count, heads),
        ("k_proj", kv_first, kv_count, kv_heads),
        ("v_proj", kv_first, kv_count, kv_heads),
    ):
        each = sizes[name] // of
        cut.rows(module, key, name, begin * each, part * each)
    cut.columns(module, key, "o_proj", first * value_dim, count * value_dim)
    if spec.has_sinks:
        _cut_sinks(cut, module, key, first, count)
    _set_head_counts(module, heads, kv_heads, count, kv_count)
    cut.heads[int(module.layer_idx)] = count, kv_count  # type: ignore[arg-type]
    if recognize_attention(module) != replace(spec, num_heads=count, num_kv_heads=kv_count):
        raise UnsupportedError(
            f"--tensor_parallel: {key} ({type(module).__name__}) computes something else with {count} of its heads"
        )
    return None


def _cut_latent(cut: _Cut, module: nn.Module, key: str) -> str | None:
    """Latents are of all heads: each process has them whole, in its cache, too."""
    try:
        spec = LatentSpec.of(module, key)
    except UnsupportedError:
        return "attention of another make"
    if spec.gate is not Gate.NONE or spec.hands_selection:
        return "gated latent attention"
    heads, count = spec.num_heads, spec.num_heads // cut.size
    if heads % cut.size:
        return f"{heads} heads cannot be cut in {cut.size}"
    if count * spec.v_dim % cut.unit(f"{key}.o_proj", LEAST_COLUMNS):
        return f"{count} heads of {spec.v_dim} columns are no whole blocks of o_proj's type"
    first = cut.rank * count
    query = "q_b_proj" if _child(module, "q_b_proj") is not None else "q_proj"
    for name, each in ((query, spec.head_dim), ("kv_b_proj", spec.nope_dim + spec.v_dim)):
        cut.rows(module, key, name, first * each, count * each)
    for name in ("k_b_proj", "v_b_proj"):  # as some files have kv_b_proj
        cut.parts[f"{key}.{name}.weight"] = TensorSlice(0, first, count)
    cut.columns(module, key, "o_proj", first * spec.v_dim, count * spec.v_dim)
    if spec.has_sinks:
        _cut_sinks(cut, module, key, first, count)
    _set_head_counts(module, heads, heads, count, count)
    index = int(module.layer_idx)  # type: ignore[arg-type]
    cut.heads[index] = count, count
    return None


def _cut_sinks(cut: _Cut, module: nn.Module, key: str, first: int, count: int) -> None:
    cut.parts[f"{key}.sinks"] = TensorSlice(0, first, count)
    module.sinks = nn.Parameter(torch.empty(count, device="meta"), requires_grad=False)


def _set_head_counts(module: nn.Module, heads: int, kv_heads: int, count: int, kv_count: int) -> None:
    """What the module itself knows of its heads."""
    counts = {name: known for name, known in vars(module).items() if name.endswith("heads") and isinstance(known, int)}
    for name, known in counts.items():
        if not isinstance(known, bool):
            is_kv = "kv" in name or "key_value" in name
            setattr(module, name, kv_count if is_kv and known == kv_heads else count if known == heads else known)
    if isinstance(vars(module).get("num_key_value_groups"), int):
        module.num_key_value_groups = count // kv_count  # type: ignore[assignment]


def _cut_head(cut: _Cut, model: nn.Module, whole: Counter[str]) -> None:
    """Cut the LM head into as many rows for each process, if it is a plain product with a matrix of its own."""
    head = _child(model, _HEAD)
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return  # none, or its place is another one's
    count = head.out_features // cut.size
    if f"{_HEAD}.weight" in tied_names(model):
        whole["an LM head that is the embedding's table"] += 1
    elif head.out_features % (cut.size * ROW_MULTIPLE):
        whole[f"an LM head of {head.out_features} rows that cannot be cut into {cut.size} times {ROW_MULTIPLE}"] += 1
    else:
        cut.rows(model, "", _HEAD, cut.rank * count, count)
        cut.gathered.add(_HEAD)


def _leave_experts(
    cut: _Cut, layer: nn.Module, key: str, group: RankGroup, divided: frozenset[str]
) -> Iterator[tuple[str, str]]:
    """Leave routed experts that are not divided to the driver; yield what is added up, a block where it is of the usual
    make, and the key of its experts.
    """
    for name, module in list(layer.named_modules()):
        if _child(module, "experts") is None:
            continue
        block = f"{key}.{name}" if name else key
        experts, is_usual = f"{block}.experts", bool(name) and KMoEBlock.is_for(module)
        if cut.rank and experts not in divided:
            if is_usual:
                is_cut = any(linear.startswith(f"{block}.") for linear in cut.linears)
                parent, _, leaf = name.rpartition(".")
                setattr(layer.get_submodule(parent), leaf, _SharedPart(module, group, has_shared=is_cut))
            else:
                module.experts = _NoExperts(group)
        yield block if is_usual else experts, experts
