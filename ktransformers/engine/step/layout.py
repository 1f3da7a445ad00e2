"""Hidden states follow the layers over devices: what is moved where, once the plan is in the model.

A decoder layer gets its hidden states on its layer device, and everything inside hands its result back where its input
came from; so one hook per layer is all that a pipeline over several devices needs. Knows modules and devices, no
arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from ktransformers.engine.model.mtp import MtpInput
from ktransformers.errors import UnsupportedError
from ktransformers.operators.attention.indexer import KPooledIndexer
from ktransformers.operators.base import Operator
from ktransformers.operators.context import ForwardContext
from ktransformers.operators.device import Device, StepFollower, distinct
from ktransformers.operators.recognize.embedding import recognize_input_scale
from ktransformers.operators.recurrent.ngram_embedding import KPerLayerEmbedding
from ktransformers.optimize.plan import Plan

__all__ = ["StepLayout", "install_moves", "move_buffers", "move_into", "rotations_of"]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The devices that a step passes.

    entry, last: where hidden states begin and end. devices: of all layers, each once. embedding: ids to hidden states,
    and behind them what the model looks up for its layers, `width` columns together. layer_inputs: of these, layers and
    columns for each of them; (0, 0) for a model without. mtp: what makes hidden states of what the embedding gave;
    None where it gave them. ngrams: what looks up n-grams for their layers, behind all that.
    """

    entry: Device
    last: Device
    devices: tuple[Device, ...]
    embedding: nn.Module
    width: int
    layer_inputs: tuple[int, int] = (0, 0)
    mtp: MtpInput | None = None
    ngrams: tuple[KPerLayerEmbedding, ...] = ()

    @classmethod
    def of(cls, plan: Plan, modules: Mapping[str, nn.Module], embedding: nn.Module) -> StepLayout:
        """Find the devices that the layers of a planned model live on.

        modules: the model's modules by name, and embedding one of them, as they were before the plan was applied.
        """
        base: Any = next((module for module in modules.values() if _has_layer_inputs(module)), None)
        key = next(name for name, module in modules.items() if module is embedding)
        width = int(embedding.weight.shape[-1])  # type: ignore[index]
        layer_devices = [plan.devices[layer_device.device] for layer_device in plan.layer_devices] or [
            plan.devices["cpu"]
        ]
        ends = layer_devices[0], layer_devices[-1], tuple(distinct(layer_devices))
        if isinstance(embedding, MtpInput):
            return cls(*ends, embedding.source, width, mtp=embedding)
        table = _scaled(plan.operators.get(key, embedding), modules, key)
        ngrams = tuple(one for one in plan.operators.values() if isinstance(one, KPerLayerEmbedding))
        if ngrams:
            *firsts, found = accumulate((one.looked_up_dim for one in ngrams), initial=0)
            for one, first in zip(ngrams, firsts, strict=True):
                one.column = first
            return cls(*ends, table, width + found, ngrams=ngrams)
        if base is None:
            return cls(*ends, table, width)
        layers = len(base.layers), int(base.hidden_size_per_layer_input)
        return cls(*ends, _WithLayerInputs(table, base), width + layers[0] * layers[1], layers)

    @property
    def table(self) -> nn.Module:
        """The embedding alone: ids to hidden states."""
        return self.embedding.embedding if isinstance(self.embedding, _WithLayerInputs) else self.embedding

    def split(self, embedded: torch.Tensor) -> dict[str, torch.Tensor]:
        """Split what the embedding gave, [1, T, width], into arguments of the model's forward."""
        layers, columns = self.layer_inputs
        if self.mtp is not None:
            return {"inputs_embeds": self.mtp.project(embedded)}
        if self.ngrams:
            hidden = embedded.shape[-1] - sum(one.looked_up_dim for one in self.ngrams)
            return {"inputs_embeds": embedded[..., :hidden], "ple_input_ids": embedded[..., hidden:]}
        if not columns:
            return {"inputs_embeds": embedded}
        hidden = embedded.shape[-1] - layers * columns
        inputs = embedded[..., hidden:].reshape(*embedded.shape[:-1], layers, columns)
        return {"inputs_embeds": embedded[..., :hidden], "per_layer_inputs": inputs}

    def synchronize_usages(self) -> None:
        """Wait, when a step's results are here, for what other GPUs still have on the way to the host, which is
        little."""
        counted = [device for device in self.devices if device.usages]
        if len(counted) > 1:
            for device in counted:
                if device.torch_device.type == "cuda":
                    torch.cuda.synchronize(device.torch_device)

    def check_experts(self) -> None:
        """Raise EngineError when experts failed on the CPU in a step, which is over."""
        for device in self.devices:
            for service in (*device.async_cpu_experts(), *device.services, *device.followers):
                service.check()

    @property
    def has_host_work(self) -> bool:
        """Whether a step leaves more on the host than its results."""
        devices = self.devices
        return any(one.usages or one.async_cpu_experts() or one.services or one.followers for one in devices)

    def wait(self) -> None:
        """Wait until the last device is through with the step."""
        if self.last.torch_device.type == "cuda":
            torch.cuda.current_stream(self.last.torch_device).synchronize()

    def finish(self, num_rows: int) -> None:
        """Finish a step of num_rows rows, which is over. Raises EngineError when experts failed on the CPU in it."""
        self.synchronize_usages()
        self.check_experts()
        self.finished(num_rows)

    def finished(self, num_rows: int) -> None:
        """Let the followers know that a step of num_rows rows is over."""
        for follower in self.followers:
            follower.finished(num_rows)

    @property
    def followers(self) -> list[StepFollower]:
        """The followers of steps on all devices."""
        return [follower for device in self.devices for follower in device.followers]

    @property
    def is_cpu(self) -> bool:
        """Whether no layer lives on a GPU, so that nothing moves at the edges of a step."""
        return not any(device.is_gpu for device in self.devices)


class _Scaled(nn.Module):
    """Rows as a model scales them when it looks them up itself, and not when they are handed to it (Falcon-H1)."""

    def __init__(self, embedding: nn.Module, scale: float):
        super().__init__()
        self.embedding, self.scale = embedding, scale

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.embedding(ids) * self.scale
        return rows


def _scaled(table: nn.Module, modules: Mapping[str, nn.Module], key: str) -> nn.Module:
    """table: what stands for the embedding of that name. Raises UnsupportedError for a model that cannot be asked."""
    parent, _, name = key.rpartition(".")
    if not hasattr(modules.get(parent), "embedding_multiplier"):
        return table
    scale = recognize_input_scale(modules[parent], name)
    if scale is None:
        raise UnsupportedError(
            f"{parent} ({type(modules[parent]).__name__}) does something to its embeddings that is not known on a GPU; "
            "without one (CUDA_VISIBLE_DEVICES=) it does so itself"
        )
    return table if scale == 1.0 else _Scaled(table, scale)


class _WithLayerInputs(nn.Module):
    """Ids [1, T] to hidden states, and behind them what each layer gets of its own for a token (Gemma 3n)."""

    def __init__(self, embedding: nn.Module, base: Any):
        super().__init__()
        self.embedding, self._base = embedding, (base,)  # not its parent

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        (base,) = self._base
        return torch.cat((self.embedding(ids), base.get_per_layer_inputs(ids).flatten(2)), dim=-1)


def _has_layer_inputs(module: nn.Module) -> bool:
    """Whether a model's layers get something that is looked up by token, besides hidden states."""
    return hasattr(module, "get_per_layer_inputs") and bool(getattr(module, "hidden_size_per_layer_input", 0))


def install_moves(modules: Mapping[str, nn.Module], plan: Plan) -> None:
    """Add the hooks that move hidden states to the devices of the layers. modules: the model's modules by name, as they
    were before the plan was applied."""
    places = {entry.key: entry.placement.generate_device for entry in plan.entries}
    if all(place == "cpu" for place in places.values()):
        return
    layer_devices = {layer_device.key: layer_device.device for layer_device in plan.layer_devices}
    for layer_device in plan.layer_devices:
        move_into(modules[layer_device.key], plan.devices[layer_device.device])
    for key in plan.kept:
        home_key = next((name for name in _above(key) if name in layer_devices), None)
        if home_key is None or layer_devices[home_key] != places[key]:
            _visit(modules[key], plan.devices[places[key]])


def _above(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]


def move_into(layer: nn.Module, layer_device: Device) -> None:
    """Have hidden states, and what the model hands to all layers, moved to the layer's device."""

    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        context = kwargs.get("forward_context")
        if not isinstance(context, ForwardContext):
            return args, kwargs
        if args:
            args = tuple(
                layer_device.to_device(arg) if isinstance(arg, torch.Tensor) else _shared(arg, layer_device, context)
                for arg in args
            )
        moved = {name: _shared(value, layer_device, context) for name, value in kwargs.items() if name in _SHARED}
        if kwargs.get("input_ids", context) is None:  # the model was given hidden states, and the layer looks tokens up
            ids = context.on(layer_device.torch_device).token_ids
            moved["input_ids"] = None if ids is None else ids[None]
        if "hidden_states" in kwargs:
            moved["hidden_states"] = layer_device.to_device(kwargs["hidden_states"])
        return args, {**kwargs, **moved}

    layer.register_forward_pre_hook(hook, with_kwargs=True)


def rotations_of(model: nn.Module, plan: Plan) -> dict[str, nn.Module]:
    """Return what rotates positions, by the key of each operator that asks for the angles of others than the step's.

    model: with its operators in place.
    """
    keys = [key for key, operator in plan.operators.items() if isinstance(operator, KPooledIndexer)]
    rotary = next((module for name, module in model.named_modules() if name.endswith(".rotary_emb")), None)
    return {} if rotary is None else dict.fromkeys(keys, rotary)


_SHARED = frozenset({"position_ids", "position_embeddings", "cache_position"})


def _shared(value: Any, layer_device: Device, context: ForwardContext) -> Any:
    if isinstance(value, torch.Tensor):
        return context.moved(value, layer_device.torch_device)
    if isinstance(value, dict):
        return {name: _shared(part, layer_device, context) for name, part in value.items()}
    return tuple(_shared(part, layer_device, context) for part in value) if isinstance(value, tuple) else value


def _visit(module: nn.Module, device: Device) -> None:
    """A kept module away from its layer's layer_device: inputs go to its device, its results back where they came
    from.
    """

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        came_from.append(next((a.device for a in args if isinstance(a, torch.Tensor)), device.torch_device))
        return tuple(device.to_device(a) if isinstance(a, torch.Tensor) else a for a in args)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        back = came_from.pop()
        if isinstance(output, tuple):
            return tuple(part.to(back) if isinstance(part, torch.Tensor) else part for part in output)
        return output.to(back) if isinstance(output, torch.Tensor) else output

    came_from: list[torch.device] = []
    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def move_buffers(modules: Mapping[str, nn.Module], plan: Plan) -> None:
    """Move buffers that no checkpoint holds to the devices of their modules. Call when all is loaded."""
    for entry in plan.entries:
        device = plan.devices[entry.placement.generate_device]
        operator = plan.operators.get(entry.key)
        if not device.is_gpu or (isinstance(operator, Operator) and operator.KEEPS_BUFFERS):
            continue
        module = modules[entry.key]
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is not None:
                module._buffers[name] = device.move(buffer)
