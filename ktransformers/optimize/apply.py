"""Applies a plan: operators take the places of modules, everything is loaded in tree order, then operators are given
their runtimes. The stages of an operator's life are drawn in operators/base.py.

A replaced module stays the parent of its children: its operator holds it, so a child is replaced inside the original
parent, whether or not that parent is replaced too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from ktransformers.errors import TensorMismatchError
from ktransformers.kernels.cpu.pages import trim_heap, without_cache
from ktransformers.operators.base import Operator, OperatorRuntime, expect_shape
from ktransformers.operators.wrapper import DenseState
from ktransformers.optimize.machine import detect_machine
from ktransformers.optimize.plan import Plan, PlanEntry
from ktransformers.optimize.tied import TiedSource
from ktransformers.system.file_kinds import size_of
from ktransformers.weights.read_ahead import ReadAhead
from ktransformers.weights.source import WeightSource

__all__ = ["apply_plan", "bind_plan", "load_plan"]

logger = logging.getLogger(__name__)

_CACHE_SHARE = 0.9
"""Of RAM: what files in the system's cache and weights may take together."""


def apply_plan(model: nn.Module, plan: Plan) -> None:
    """Put the plan's operators in the places of their modules. `model` must be the one that was planned."""
    # Parents are looked up before anything moves: afterwards a key leads through operators.
    parents = {key: model.get_submodule(key.rpartition(".")[0]) for key in plan.operators}
    originals = {key: model.get_submodule(key) for key in plan.operators}
    for key, operator in plan.operators.items():
        parent_key, _, name = key.rpartition(".")
        setattr(parents[key], name, operator)
        # An operator may have taken its module's children over as its own attributes.
        around = plan.operators.get(parent_key)
        if around is not None and around._modules.get(name) is originals[key]:
            setattr(around, name, operator)


def load_plan(
    model: nn.Module,
    plan: Plan,
    source: WeightSource,
    on_progress: Callable[[int, str], None] = lambda nbytes_loaded, key: None,
) -> None:
    """Load every operator and every kept module, in tree order. Call after `apply_plan`.

    on_progress(nbytes_loaded, key) is called after each module that holds weights, with the resident bytes so far.
    Raises TensorMismatchError when a tensor is missing, ill-shaped, or still on meta when all is done.
    """
    source = TiedSource(source, plan.tied)
    nbytes_loaded = 0
    stored = {entry.key: _stored_bytes(entry, source) for entry in plan.entries}
    parts = [part for entry in plan.entries for part in stored[entry.key]]
    with without_cache(_is_tight(plan, parts)), ReadAhead(parts) as ahead:
        for entry in plan.entries:
            if entry.key in plan.operators:
                plan.operators[entry.key].fill(source)
            elif entry.key in plan.kept:
                _load_kept(plan, entry.key, source)
            ahead.advance(sum(part.numel() for part in stored[entry.key]))
            if entry.stored_names:
                nbytes_loaded += entry.total_bytes
                on_progress(nbytes_loaded, entry.key)
    trim_heap()
    left = list(_on_meta(model, "", frozenset()))
    if left:
        raise TensorMismatchError(
            f"not loaded: {left[0]} (and {len(left) - 1} more); an operator that reads a child's tensors itself must "
            "name the child in OWNED_CHILDREN"
        )


def bind_plan(plan: Plan, max_len: int, services: Mapping[str, object] | None = None) -> None:
    """Give every operator its runtime. Call after `load_plan`.

    max_len: most positions of a sequence. services: by the key of the operator that each works for (OperatorRuntime).
    """
    services = services or {}
    for key, operator in plan.operators.items():
        operator.post_load(OperatorRuntime(max_len, services.get(key)))


def _stored_bytes(entry: PlanEntry, source: WeightSource) -> list[torch.Tensor]:
    """What the entry reads from mapped files, in the order of the files, as far as is known. Of experts and tables that
    stay there, nothing to speak of."""
    if entry.stored_experts or entry.in_files:
        return []
    parts = [source.stored_bytes(name) for name in entry.stored_names]
    return sorted((part for part in parts if part is not None), key=torch.Tensor.data_ptr)


def _is_tight(plan: Plan, parts: Sequence[torch.Tensor]) -> bool:
    """Whether RAM cannot hold the files in the system's cache and the weights beside them."""
    stored, resident = sum(part.nbytes for part in parts), plan.weight_bytes.get("cpu", 0)
    total = detect_machine(gpus=dict).ram_bytes
    if stored + resident <= _CACHE_SHARE * total:
        return False
    logger.info(
        "%s of files and %s of weights are more than RAM of %s holds: what is loaded leaves the system's cache",
        *(size_of(nbytes) for nbytes in (stored, resident, total)),
    )
    return True


def _load_kept(plan: Plan, key: str, source: WeightSource) -> None:
    """Give a kept module its own parameters and persistent buffers, dense."""
    module, device = plan.kept[key], plan.devices[plan.device_of(key)]
    for name, shape in DenseState(module, key).names():
        full = f"{key}.{name}"
        tensor = _tied_parameter(plan, full)
        if tensor is None:
            expect_shape(source.find(full), full, shape)
            wanted, tensor = getattr(module, name).dtype, source.dense(full)
            tensor = device.to_device(tensor if wanted.is_floating_point else tensor.to(wanted))
        if name in module._buffers:
            module._buffers[name] = tensor
        else:
            module._parameters[name] = nn.Parameter(tensor, requires_grad=False)


def _tied_parameter(plan: Plan, name: str) -> torch.Tensor | None:
    """The loaded tensor that `name` shares with another kept module; None when it has one of its own."""
    owner_key, _, leaf = plan.tied.get(name, "").rpartition(".")
    if owner_key not in plan.kept or name.rpartition(".")[0] not in plan.shared:
        return None
    parameter = plan.kept[owner_key]._parameters[leaf]
    return None if parameter is None or parameter.is_meta else parameter.data


def _on_meta(module: nn.Module, key: str, owned: frozenset[str]) -> Iterator[str]:
    """Names of parameters and persistent buffers without data. owned: children that an operator stands in for."""
    state: dict[str, torch.Tensor | None] = dict(module._parameters)
    state.update((n, b) for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set)
    yield from (f"{key}.{name}" for name, tensor in state.items() if tensor is not None and tensor.is_meta)
    for name, child in module.named_children():
        if name in owned:
            continue
        inside = frozenset[str]()
        if isinstance(child, Operator):
            inside = child.owned_children()
        elif isinstance(module, Operator):  # the original module that the operator holds
            inside = module.owned_children()
        yield from _on_meta(child, f"{key}.{name}" if key else name, inside)
