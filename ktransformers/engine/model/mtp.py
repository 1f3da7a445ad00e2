"""A model's own layer for multi-token prediction (MTP), as a model of one decoder layer.

DeepSeek-V3 (arXiv 2412.19437, 2.2) calls it so, GLM-4.5, Qwen3-Next, Qwen3.5 and MiMo-V2 have the like:

    eh_proj [enorm(embedding of token i + 1), hnorm(hidden states i)] ── decoder layer ── norm ── the model's own head

Where hidden states are streams, they are those in front of what brings them together: Qwen4, as vLLM has it, and
DeepSeek-V4, as its own inference code has it, where a norm stands behind the mixer and hnorm is of each stream alone:

    fc_embedding enorm(embedding) + fc_hidden hnorm(streams), for each ── decoder layer ── mixer ── the model's own head

hidden states: those behind the model's last norm, or behind this layer's own, for tokens further on. The decoder layer,
its norm and the rotation are those of the family's class of transformers, so that rules replace them as in any layer.
Tensors have the names that a model of one layer has (mtp_names.py); what differs by family is in models/mtp_config.py.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import override

from ktransformers.engine.model.mtp_names import INPUT_NORMS, OUTPUT_PROJECTION, PROJECTION, STREAM_PROJECTIONS
from ktransformers.engine.model.skeleton import build_skeleton
from ktransformers.errors import UnsupportedError
from ktransformers.models.mtp_config import MtpFamily, mtp_family
from ktransformers.operators.device import Device
from ktransformers.operators.partial_sums import PassThrough, Placeholder

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["MtpInput", "build_mtp"]


class MtpInput(Placeholder):
    """The placeholder for the embedding: makes the decoder layer's input of tokens, which the model's own embedding
    looks up, and of the hidden states that were given for them.

    The embedding takes int64 [...] ids on the CPU and gives [..., H]; `take_source` says which it is. While no hidden
    states were given, as in the steps in which a loaded model is looked at, rows that follow from their number are
    taken. Steps that are replayed read hidden states from memory of their own, see `reserve`.
    """

    def __init__(
        self,
        layer: nn.Module,
        hidden_size: int,
        parts: Sequence[str] = (*INPUT_NORMS, PROJECTION),
        streams: int = 1,
        *,
        are_normed_apart: bool = False,
    ):
        """hidden_size: of the target. layer: has what projects the rows as children, by these names, until
        `take_parts`. streams: hidden states are so many side by side; are_normed_apart: each by a norm of its width."""
        super().__init__()
        self._streams, self._normed = streams, streams if are_normed_apart else 1
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
        self._num_reserved, shape = num_rows, (num_rows, self._streams * self.weight.shape[-1])
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
        """Return the decoder layer's input, [1, T, H], of the tokens' embeddings [1, T, H]; [1, T, streams H] where
        hidden states are streams."""
        num_rows, width = embedded.shape[1], self._streams * embedded.shape[2]
        given = self._reserved if num_rows <= self._num_reserved else self._latest
        if given is None or given.shape[0] < num_rows:
            made = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(0))
            given = made.to(embedded.device, embedded.dtype)
        hidden_states = given[None, :num_rows]
        normed = [embedded, hidden_states.reshape(1, num_rows * self._normed, -1)]
        if INPUT_NORMS[0] in self._parts:
            normed = [getattr(self, name)(part) for name, part in zip(INPUT_NORMS, normed, strict=True)]
        if STREAM_PROJECTIONS[0] in self._parts:
            return self._streamed(*normed)
        projected: torch.Tensor = getattr(self, PROJECTION)(torch.cat(normed, dim=-1))
        return projected

    def _streamed(self, embedded: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """The embedding beside each stream, both projected: [1, T, streams H] of what norms made of them."""
        of_embedding, of_stream = (getattr(self, name) for name in STREAM_PROJECTIONS)
        streams = of_stream(hidden_states.reshape(1, -1, embedded.shape[-1])).view(1, embedded.shape[1], -1)
        made: torch.Tensor = streams + of_embedding(embedded).repeat(1, 1, self._streams)
        return made

    @override
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.project(self.source(input_ids).to("cpu", torch.float32))


def _streamed_input(base: Any, layer: Any, family: MtpFamily, eps: float) -> MtpInput:
    """The placeholder for the embedding of a layer whose hidden states are streams, with its parts in `layer`: a
    projection for the embedding and one for each stream, and norms. Where the class has a last norm, that of hidden
    states is one like it, of each stream; elsewhere it is over all streams, as the layer's norms of them are."""
    assert family.streams is not None, "hidden states are streams"
    size, last = base.config.hidden_size, getattr(base, family.norm, None)
    streams = int(getattr(base.config, family.streams))
    norm = type(layer.self_attn.q_norm if last is None else last)
    with torch.device("meta"):
        for name, width in zip(INPUT_NORMS, (size, size if last is not None else streams * size), strict=True):
            layer.add_module(name, norm(width, eps=eps))
        for name in STREAM_PROJECTIONS:
            layer.add_module(name, nn.Linear(size, size, bias=False))
    base.config = copy.copy(base.config)  # by which the model's forward makes streams of embeddings: these are made
    setattr(base.config, family.streams, 1)
    if last is not None:  # whose layers have streams in a dimension of their own
        layer.register_forward_pre_hook(lambda _, args: (args[0].view(*args[0].shape[:2], streams, size), *args[1:]))
    return MtpInput(layer, size, (*INPUT_NORMS, *STREAM_PROJECTIONS), streams, are_normed_apart=last is not None)


def build_mtp(config: PretrainedConfig, trust_remote_code: bool, *, has_head: bool = False) -> PreTrainedModel:
    """Build the skeleton of a model that is one such layer, whose embedding is a placeholder, and its head unless it
    has one of its own. Raises UnsupportedError."""
    model: Any = build_skeleton(config, trust_remote_code)
    base, family = model.base_model, mtp_family(config.model_type)
    layers, norm = getattr(base, "layers", None), getattr(base, family.mixer or family.norm, None)
    eps = getattr(config, "rms_norm_eps", None) or getattr(config, "layer_norm_epsilon", None)
    if not layers or norm is None or eps is None or not hasattr(model, "lm_head"):
        raise UnsupportedError(
            f"model type {config.model_type} is not built like those whose layers for multi-token prediction are "
            "known; take --speculative ngram, or --draft_model"
        )
    layer, size = layers[0], config.hidden_size
    if family.streams is not None:
        entry = _streamed_input(base, layer, family, eps)
    else:
        with torch.device("meta"):
            for name in INPUT_NORMS:
                layer.add_module(name, type(norm)(size, eps=eps))
            layer.add_module(PROJECTION, nn.Linear(2 * size, size, bias=False))
        entry = MtpInput(layer, size)
    model.set_input_embeddings(entry)
    if not has_head:
        model.lm_head = PassThrough()  # it is the target's own
    built: PreTrainedModel = model.eval()
    return built
