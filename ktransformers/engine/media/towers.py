"""A loaded tower: where its parameters are kept, and where and in what they are computed with.

    kept                                 computed with
    CPU, in the type of the files        CPU, in fp32: block by block, widened while it runs
    GPU, in its type                     there
    RAM, in the GPU's type               GPU: the block that runs, and the next one, which is being copied

All three are one thing: parameters that are swapped in before a module runs, and out behind it. Where they are kept as
they are computed with, that costs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from ktransformers.engine.model.skeleton import restore_buffers
from ktransformers.engine.model.tower import OpenedTower
from ktransformers.operators.device import CPU, Device

__all__ = ["Tower", "TowerPlace", "blocks_of", "load_tower"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TowerPlace:
    """Where a tower computes. is_streamed: whether its parameters stay in RAM, and come to that device in turn."""

    device: Device = CPU
    is_streamed: bool = False

    def __str__(self) -> str:
        return f"{self.device.name}{', with weights from RAM' if self.is_streamed else ''}"


@dataclass(frozen=True, slots=True)
class Tower:
    """A tower with its weights. model: the composite without its language model. place: where it computes."""

    model: PreTrainedModel
    place: TowerPlace
    rest: Swapped

    @contextmanager
    def running(self) -> Iterator[None]:
        """Have the parameters in place that are in no block; blocks see to their own."""
        self.rest.fetch()
        with self.rest:
            yield


class Swapped:
    """Parameters of a module, kept in one place and computed with in another.

    Fetched ahead, they are copied to a GPU beside what runs there.
    """

    def __init__(self, module: nn.Module, device: Device, without: Collection[nn.Module] = ()):
        outside = {id(inner) for block in without for inner in block.modules()}
        self._kept = [
            (inner, name, parameter)
            for inner in module.modules()
            if id(inner) not in outside
            for name, parameter in inner._parameters.items()
            if parameter is not None
        ]
        self._device, self._dtype = device.torch_device, device.dtype
        self._copies: list[nn.Parameter] = []
        self._copied: torch.cuda.Event | None = None
        self._depth = 0

    def fetch(self, stream: torch.cuda.Stream | None = None) -> None:
        """Begin to copy the parameters, unless they are there. stream: beside what runs; None: in its order."""
        if self._copies or not self._kept:
            return
        with torch.cuda.stream(stream):
            self._copies = [
                nn.Parameter(parameter.to(self._device, self._dtype, non_blocking=True), requires_grad=False)
                for _, _, parameter in self._kept
            ]
            if stream is not None:
                self._copied = stream.record_event()

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self.fetch()
        if self._copied is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(self._copied)
            for copy in self._copies:
                copy.data.record_stream(current)
        for (module, name, _), copy in zip(self._kept, self._copies, strict=True):
            module._parameters[name] = copy

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        for module, name, parameter in self._kept:
            module._parameters[name] = parameter
        self._copies, self._copied = [], None


class _Blocks:
    """Hooks that swap the parameters of blocks in as they run, one after the other. ahead: blocks that are fetched
    before their turn."""

    def __init__(self, blocks: Sequence[nn.Module], device: Device, ahead: int):
        self._swapped = [Swapped(block, device) for block in blocks]
        self._ahead = ahead
        is_cuda = ahead > 0 and device.torch_device.type == "cuda"
        self._stream = (
            torch.cuda.Stream(device.torch_device) if is_cuda else None  # type: ignore[no-untyped-call]
        )
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda module, inputs, index=index: self._enter(index))
            block.register_forward_hook(
                lambda module, inputs, output, index=index: self._leave(index), always_call=True
            )

    def _enter(self, index: int) -> None:
        self._swapped[index].__enter__()
        for each in self._swapped[index + 1 : index + 1 + self._ahead]:
            each.fetch(self._stream)

    def _leave(self, index: int) -> None:
        self._swapped[index].__exit__()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a tower in their order: the modules in its lists, and not those inside of them."""
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            found += [block for block in child if any(True for _ in block.parameters())]
        else:
            found += blocks_of(child)
    return found


def load_tower(opened: OpenedTower, place: TowerPlace) -> Tower:
    """Read a tower's weights, and keep them where `place` says. Raises WeightError.

    The model of `opened` becomes the one that computes.
    """
    model, device = opened.model, place.device
    restore_buffers(model)
    kept_on = torch.device("cpu") if place.is_streamed else device.torch_device
    is_pinned = place.is_streamed and device.torch_device.type == "cuda"
    for name in model.state_dict():
        owner_name, _, leaf = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        is_parameter = owner._parameters.get(leaf) is not None
        dtype = device.dtype if device.is_gpu or not is_parameter else opened.dtype_of(name)
        tensor = opened.source.dense(name, dtype).to(kept_on)
        if is_parameter:
            tensor = tensor.pin_memory() if is_pinned else tensor
            owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        else:
            owner._buffers[leaf] = tensor
    for module in model.modules():
        for leaf, buffer in module._buffers.items():
            module._buffers[leaf] = None if buffer is None else buffer.to(device.torch_device)
    blocks = blocks_of(model)
    _Blocks(blocks, device, ahead=1 if place.is_streamed else 0)
    logger.info("pictures are computed on %s: a tower of %d blocks", place, len(blocks))
    return Tower(model, place, Swapped(model, device, without=blocks))
