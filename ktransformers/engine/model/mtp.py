"""A model's own layer for multi-token prediction (MTP), as a model of one decoder layer.

DeepSeek-V3 (arXiv 2412.19437, 2.2) calls it so, GLM-4.5, Qwen3-Next, Qwen3.5 and MiMo-V2 have the like:

    eh_proj [enorm(embedding of token i + 1), hnorm(hidden states i)] ── decoder layer ── norm ── the model's own head

hidden states: those behind the model's last norm, or behind this layer's own, for tokens further on. The decoder layer,
its norm and the rotation are those of the family's class of transformers, so that rules replace them as in any layer.
Files keep the tensors behind the model's own, or under names of their own; here they are told apart, and renamed to
what a model of one layer calls them. Where there are several such layers, the first one is taken for all tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from typing_extensions import override

from ktransformers.engine.model.skeleton import build_skeleton
from ktransformers.errors import UnsupportedError
from ktransformers.operators.device import Device
from ktransformers.operators.partial_sums import PassThrough, Placeholder
from ktransformers.weights.gguf.file import GGUFModel
from ktransformers.weights.safetensors.file import SafetensorsModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "INPUT_NORMS",
    "LAYER",
    "OUTPUT_PROJECTION",
    "PROJECTION",
    "MtpInput",
    "MtpNames",
    "build_mtp",
    "renamed_gguf",
    "renamed_tensors",
]

LAYER = "model.layers.0"
INPUT_NORMS, PROJECTION, OUTPUT_PROJECTION = ("enorm", "hnorm"), "eh_proj", "post_projection"
"""Children that the first decoder layer has besides its own until they are loaded: what makes its input, and hidden
states of the target's width of its output where that has another one."""

_EXPERTS = re.compile(r"\.experts\.|ffn_(gate|up|down|gate_up)_exps\.")

_OWN_PREFIX = re.compile(r"(?:.*\.)?mtp\.(?P<name>.+)")
_OF_TOP = {
    "fc": f"{LAYER}.{PROJECTION}",
    "pre_fc_norm_embedding": f"{LAYER}.enorm",
    "pre_fc_norm_hidden": f"{LAYER}.hnorm",
    "norm": "model.norm",
    "layers.0.final_layernorm": "model.norm",
    "layers.0.shared_head.norm": "model.norm",
}
"""Names below `mtp.` that are not the decoder layer's, by what the skeleton calls them."""

_SHARED = re.compile(r"(embed_tokens|shared_head\.head|nextn\.embed_tokens|nextn\.shared_head_head)\..*")
"""Copies of the model's own embedding and head."""


@dataclass(frozen=True, slots=True)
class MtpNames:
    """What files call the tensors of a layer for multi-token prediction: {stored name: name in a model of one layer}.

    has_experts: whether its feed-forward block is one of experts.
    """

    names: Mapping[str, str]
    has_experts: bool

    @classmethod
    def of_safetensors(cls, stored: Iterable[str], num_layers: int) -> MtpNames | None:
        """Find them in a checkpoint of Hugging Face's; None where there are none. num_layers: the model's own."""
        found: dict[str, str] = {}
        behind = re.compile(rf"(?:.*\.)?layers\.{num_layers}\.(?P<name>.+)")
        for name in stored:
            own, later = _OWN_PREFIX.fullmatch(name), behind.fullmatch(name)
            if own is not None:
                renamed = _below_mtp(own["name"])
            elif later is not None:
                renamed = _in_layer(later["name"])
            else:
                continue
            if renamed is not None:
                found[name] = renamed
        return cls._complete(found, f"{LAYER}.{PROJECTION}.")

    @classmethod
    def of_gguf(cls, stored: Iterable[str], num_layers: int) -> MtpNames | None:
        """Find them in a GGUF; None where there are none. num_layers: the model's own."""
        prefix, norm, found = f"blk.{num_layers}.", "nextn.shared_head_norm", dict[str, str]()
        names = list(stored)
        for name in names:
            inner = name.removeprefix(prefix)
            if inner == name or _SHARED.fullmatch(inner):
                continue
            is_norm = inner.startswith(f"{norm}.")
            found[name] = inner.replace(norm, "output_norm") if is_norm else f"blk.0.{inner}"
        if found and "output_norm.weight" not in found.values() and "output_norm.weight" in names:
            found["output_norm.weight"] = "output_norm.weight"  # it has none of its own
        return cls._complete(found, "blk.0.nextn.eh_proj.")

    @classmethod
    def _complete(cls, names: dict[str, str], projection: str) -> MtpNames | None:
        if not any(name.startswith(projection) for name in names.values()):
            return None
        return cls(names, any(_EXPERTS.search(name) for name in names.values()))


def _below_mtp(name: str) -> str | None:
    for prefix, renamed in _OF_TOP.items():
        if name.startswith(f"{prefix}."):
            return renamed + name.removeprefix(prefix)
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    return None if layer is None or layer[1] != "0" else _in_layer(layer[2])


def _in_layer(name: str) -> str | None:
    if _SHARED.fullmatch(name):
        return None
    if name.startswith("shared_head.norm."):
        return "model.norm." + name.removeprefix("shared_head.norm.")
    return f"{LAYER}.{name}"


class MtpInput(Placeholder):
    """The placeholder for the embedding: makes the decoder layer's input of tokens, which the model's own embedding
    looks up, and of the hidden states that were given for them.

    The embedding takes int64 [...] ids on the CPU and gives [..., H]; `take_source` says which it is. While no hidden
    states were given, as in the steps in which a loaded model is looked at, rows that follow from their number are
    taken. Steps that are replayed read hidden states from memory of their own, see `reserve`.
    """

    def __init__(self, layer: nn.Module, hidden_size: int, parts: Sequence[str] = (*INPUT_NORMS, PROJECTION)):
        """hidden_size: of the target. layer: has what projects the rows as children, by these names, until
        `take_parts`."""
        super().__init__()
        self.weight = torch.empty(1, hidden_size, device="meta")  # whose width others ask for
        self._layer, self._source = (layer,), tuple[nn.Module, ...]()  # not its children
        self._parts = tuple(parts)
        self._num_reserved = 0
        self._reserved: torch.Tensor | None = None  # [num_reserved, H]
        self._latest: torch.Tensor | None = None  # of a step of more rows

    @property
    def source(self) -> nn.Module:
        """The model's own embedding."""
        (source,) = self._source
        return source

    def take_source(self, embedding: nn.Module) -> None:
        """Look tokens up in `embedding` from now on."""
        self._source = (embedding,)

    def take_parts(self) -> None:
        """Make what projects the rows, placed and loaded as the layer's, children of this module: the layer is then one
        of the usual arrangement."""
        (layer,) = self._layer
        for name in self._parts:
            self.add_module(name, layer.get_submodule(name))
            delattr(layer, name)

    def reserve(self, num_rows: int, device: Device) -> None:
        """Keep hidden states of steps of up to num_rows rows at one place of `device`, before any of them is
        captured."""
        self._num_reserved, shape = num_rows, (num_rows, self.weight.shape[-1])
        self._reserved = torch.zeros(shape, dtype=device.dtype, device=device.torch_device)

    def give(self, hidden_states: Sequence[torch.Tensor]) -> None:
        """Give the next step its hidden states, [n, H] of one sequence after the other, where the layer is."""
        num_rows = sum(part.shape[0] for part in hidden_states)
        if self._reserved is None or num_rows > self._num_reserved:
            self._latest = torch.cat(list(hidden_states)) if len(hidden_states) > 1 else hidden_states[0]
        elif len(hidden_states) > 1:
            torch.cat(list(hidden_states), out=self._reserved[:num_rows])
        else:
            self._reserved[:num_rows].copy_(hidden_states[0])

    def returned(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return what stands for the target's hidden states [N, H] behind rows of the layer's own output."""
        if OUTPUT_PROJECTION not in self._parts:
            return hidden_states
        projected: torch.Tensor = getattr(self, OUTPUT_PROJECTION)(hidden_states[None])[0]
        return projected

    def project(self, embedded: torch.Tensor) -> torch.Tensor:
        """Return the decoder layer's input, [1, T, H], of the tokens' embeddings [1, T, H]."""
        num_rows, width = embedded.shape[1:]
        given = self._reserved if num_rows <= self._num_reserved else self._latest
        if given is None or given.shape[0] < num_rows:
            made = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(0))
            given = made.to(embedded.device, embedded.dtype)
        hidden_states = given[None, :num_rows]
        normed = [embedded, hidden_states]
        if INPUT_NORMS[0] in self._parts:
            normed = [getattr(self, name)(part) for name, part in zip(INPUT_NORMS, normed, strict=True)]
        projected: torch.Tensor = getattr(self, PROJECTION)(torch.cat(normed, dim=-1))
        return projected

    @override
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.project(self.source(input_ids).to("cpu", torch.float32))


def build_mtp(config: PretrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    """Build the skeleton of a model of one layer, whose embedding and head are placeholders. Raises
    UnsupportedError."""
    model: Any = build_skeleton(config, trust_remote_code)
    try:
        base, layer, norm = model.model, model.model.layers[0], model.model.norm
        eps = config.rms_norm_eps
    except (AttributeError, IndexError) as error:
        raise UnsupportedError(
            f"model type {config.model_type} is not built like those whose layers for multi-token prediction are "
            "known; take --speculative ngram, or --draft_model"
        ) from error
    size = config.hidden_size
    with torch.device("meta"):
        for name in INPUT_NORMS:
            layer.add_module(name, type(norm)(size, eps=eps))
        layer.add_module(PROJECTION, nn.Linear(2 * size, size, bias=False))
    base.embed_tokens, model.lm_head = MtpInput(layer, size), PassThrough()  # the head is the target's own
    return model.eval()


_File = TypeVar("_File", bound=Any)


def _renamed(file: _File, names: Mapping[str, str]) -> _File:
    tensors = {names[name]: replace(tensor, name=names[name]) for name, tensor in file.tensors.items() if name in names}
    return replace(file, tensors=tensors)


def renamed_tensors(model: SafetensorsModel, names: Mapping[str, str]) -> SafetensorsModel:
    """Return the tensors of `names` alone, called as it says."""
    return SafetensorsModel([_renamed(file, names) for file in model.files])


def renamed_gguf(model: GGUFModel, names: Mapping[str, str]) -> GGUFModel:
    """Return the tensors of `names` alone, called as it says, with all metadata."""
    return GGUFModel([_renamed(file, names) for file in model.files])
