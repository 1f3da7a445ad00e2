"""Gemma 4's assistant, as a model that drafts: layers with queries alone, which attend to its target's keys and values.

    eh_proj [embedding of token i + 1, hidden states i] ── decoder layers ── norm ── head
                                                                              └── post_projection ── hidden states i + 1

The embedding and the first hidden states are the target's; hidden states behind the target's last norm, or out of
post_projection for tokens further on. Each layer attends to what the last layer of its kind that has keys and values of
its own keeps there, up to position i, from position i + 1, for all tokens that are drafted behind it
(transformers: SinglePositionMultiTokenCandidateGenerator). The layers are those of a Gemma 4 of transformers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import override

from ktransformers.engine.model.mtp import MtpInput
from ktransformers.engine.model.mtp_names import OUTPUT_PROJECTION, PROJECTION
from ktransformers.engine.model.skeleton import build_skeleton
from ktransformers.errors import UnsupportedError
from ktransformers.models.assistant_config import GGUF_ARCH, GGUF_WIDTH
from ktransformers.models.facts import LayerFacts, ModelFacts
from ktransformers.weights.gguf.file import GGUFModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "as_gemma4",
    "assistant_gguf_names",
    "assistant_names",
    "build_assistant",
    "lenders_of",
]

_TARGET_TYPES = ("gemma4_text", "gemma4_unified_text")

_OF_ASSISTANTS = (f".{GGUF_WIDTH}", ".nextn_predict_layers")
_GGUF_RENAMED = {
    "nextn.pre_projection.weight": "blk.0.nextn.eh_proj.weight",
    "nextn.post_projection.weight": "blk.0.nextn.post_projection.weight",
}

_LAYER, _HEAD, _TABLE = "model.layers.0", "lm_head", "lm_head.table"
_RENAMED = {
    "pre_projection.": f"{_LAYER}.{PROJECTION}.",
    "post_projection.": f"{_LAYER}.{OUTPUT_PROJECTION}.",
    "masked_embedding.": f"{_HEAD}.",
}


def assistant_names(stored: Iterable[str], whole: PretrainedConfig) -> dict[str, str]:
    """Return {stored name: name in the model of `build_assistant`} of a checkpoint's tensors."""
    names, head = set(stored), _TABLE if whole.use_ordered_embeddings else _HEAD
    source = "lm_head" if "lm_head.weight" in names else "model.embed_tokens"
    renames = {f"{source}.": f"{head}.", **_RENAMED}
    found = dict[str, str]()
    for name in names:
        prefix = next((one for one in renames if name.startswith(one)), None)
        found[name] = name if prefix is None else renames[prefix] + name.removeprefix(prefix)
    return {name: renamed for name, renamed in found.items() if renamed != "model.embed_tokens.weight"}


def as_gemma4(model: GGUFModel) -> GGUFModel:
    """Return an assistant's GGUF with the metadata of a Gemma 4, of which it has the layers."""
    kept = {name: value for name, value in model.metadata.items() if not name.endswith(_OF_ASSISTANTS)}
    metadata = {name.replace(f"{GGUF_ARCH}.", "gemma4.", 1): value for name, value in kept.items()}
    metadata["general.architecture"] = "gemma4"
    return GGUFModel([replace(file, metadata=metadata) for file in model.files])


def assistant_gguf_names(stored: Iterable[str]) -> dict[str, str]:
    """Return {stored name: name in a GGUF of the model of `build_assistant`}."""
    names, table = set(stored), "token_embd.weight"
    renames = {**_GGUF_RENAMED, table: "output.weight"}
    is_apart = renames[table] in names
    return {name: renames.get(name, name) for name in names if name != table or not is_apart}


def lenders_of(assistant: ModelFacts, target: ModelFacts) -> dict[int, int]:
    """Return, for each layer of an assistant, the layer of the target whose keys and values it attends to.

    Raises UnsupportedError for a target that has none of that kind, or of other widths.
    """
    if target.model_type not in _TARGET_TYPES:
        raise UnsupportedError(
            f"an assistant of Gemma 4 drafts for Gemma 4 alone, and the model's type is {target.model_type}; take a "
            "smaller model of its family, or --speculative ngram"
        )
    own = {layer.word: index for index, layer in enumerate(target.layers) if layer.shares is None}
    found = dict[int, int]()
    for index, layer in enumerate(assistant.layers):
        lender = own.get(layer.word)
        if lender is None:
            raise UnsupportedError(
                f"the assistant's layer {index} is of type {layer.word}, of which the model has none"
            )
        ours, theirs = _kept_of(layer), _kept_of(target.layers[lender])
        if ours != theirs:
            raise UnsupportedError(
                f"the assistant's layer {index} reads {ours}, and the model's layer {lender} keeps {theirs}: it is "
                "the assistant of another Gemma 4"
            )
        found[index] = lender
    return found


def _kept_of(layer: LayerFacts) -> str:
    window = "all positions" if layer.window is None else f"a window of {layer.window}"
    return f"{layer.num_kv_heads} heads of {layer.head_dim} over {window}"


def _check_widths(whole: PretrainedConfig, own: ModelFacts, target: ModelFacts) -> None:
    clusters, chosen = whole.num_centroids, whole.centroid_intermediate_top_k
    if whole.use_ordered_embeddings and (not 0 < chosen <= clusters or own.vocab_size % clusters):
        raise UnsupportedError(
            f"by the assistant's config its head chooses {chosen} of {clusters} clusters of {own.vocab_size} tokens"
        )
    for what, ours, theirs in (
        ("hidden states of width", whole.backbone_hidden_size, target.hidden_size),
        ("a vocabulary of", own.vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            raise UnsupportedError(
                f"the assistant was made for {what} {ours}, and the model has {theirs}: it is the assistant of another "
                "Gemma 4"
            )


class OrderedHead(nn.Module):
    """A head that scores the tokens of the likeliest clusters alone: bf16 or fp32 [1, N, H] -> [1, N, V], in which all
    others are below the least of these. A cluster is as many entries of token_ordering, int64 [V], as there are for
    each centroid."""

    token_ordering: torch.Tensor

    def __init__(self, hidden_size: int, vocab_size: int, num_centroids: int, top_k: int):
        super().__init__()
        self.centroids = nn.Linear(hidden_size, num_centroids, bias=False)
        self.table = nn.Embedding(vocab_size, hidden_size)
        self.token_ordering = nn.Buffer(torch.empty(vocab_size, dtype=torch.int64))
        self._top_k = top_k

    @override
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rows = hidden_states[0]
        clusters = self.centroids(rows).topk(self._top_k, dim=-1).indices
        per_centroid = self.token_ordering.view(-1, len(self.token_ordering) // self.centroids.out_features)
        token_ids = per_centroid[clusters].flatten(1)  # [N, top_k V / centroids]
        logits = torch.bmm(self.table(token_ids).to(rows.dtype), rows[:, :, None])[:, :, 0]
        others = (logits.amin() - 1).expand(len(rows), len(self.token_ordering))
        return others.scatter(-1, token_ids, logits)[None]


def build_assistant(
    whole: PretrainedConfig, config: PretrainedConfig, facts: ModelFacts, target: ModelFacts
) -> PreTrainedModel:
    """Build the skeleton of an assistant, whose embedding is a placeholder for the target's. config: of
    `models.assistant_config`. Raises UnsupportedError for another target than its own."""
    _check_widths(whole, facts, target)
    lenders_of(facts, target)
    model: Any = build_skeleton(config)
    layer, hidden_size, width = model.model.layers[0], facts.hidden_size, target.hidden_size
    if getattr(layer.self_attn, "k_proj", None) is not None:
        raise UnsupportedError(
            "the installed transformers builds layers with keys of their own from an assistant's config; 5.24 does not"
        )
    with torch.device("meta"):
        layer.add_module(PROJECTION, nn.Linear(2 * width, hidden_size, bias=False))
        layer.add_module(OUTPUT_PROJECTION, nn.Linear(hidden_size, width, bias=False))
        if whole.use_ordered_embeddings:
            sizes = hidden_size, facts.vocab_size, whole.num_centroids, whole.centroid_intermediate_top_k
            model.lm_head = OrderedHead(*sizes)
    model.model.embed_tokens = MtpInput(layer, width, (PROJECTION, OUTPUT_PROJECTION))
    made: PreTrainedModel = model.eval()
    return made
