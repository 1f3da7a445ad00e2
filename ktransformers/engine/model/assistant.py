"""Gemma 4's assistant, as a model that drafts: layers with queries alone, which attend to its target's keys and values.

    eh_proj [embedding of token i + 1, hidden states i] ── decoder layers ── norm ── head
                                                                              └── post_projection ── hidden states i + 1

The embedding and the first hidden states are the target's; hidden states behind the target's last norm, or out of
post_projection for tokens further on. Each layer attends to what the last layer of its kind that has keys and values of
its own keeps there, up to position i, from position i + 1, for all tokens that are drafted behind it
(transformers: SinglePositionMultiTokenCandidateGenerator). The layers are those of a Gemma 4 of transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import override

from ktransformers.engine.model.mtp import LAYER, OUTPUT_PROJECTION, PROJECTION, MtpInput
from ktransformers.engine.model.skeleton import build_skeleton
from ktransformers.errors import FormatError, UnsupportedError
from ktransformers.models.composite import text_config_of
from ktransformers.models.facts import LayerFacts, ModelFacts
from ktransformers.weights.gguf.file import GGUFModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "GGUF_ARCH",
    "as_gemma4",
    "assistant_config",
    "assistant_gguf_names",
    "assistant_names",
    "build_assistant",
    "config_of_assistant",
    "is_assistant",
    "lenders_of",
]

_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
_TARGET_TYPES = ("gemma4_text", "gemma4_unified_text")

GGUF_ARCH = "gemma4-assistant"
"""What llama.cpp's converter calls it. Its files leave the clusters of tokens out, and score all of them."""

_WIDTH, _BLOCKS = "embedding_length_out", "nextn_predict_layers"
_GGUF_RENAMED = {
    "nextn.pre_projection.weight": "blk.0.nextn.eh_proj.weight",
    "nextn.post_projection.weight": "blk.0.nextn.post_projection.weight",
}

_HEAD, _TABLE = "lm_head", "lm_head.table"
_RENAMED = {
    "pre_projection.": f"{LAYER}.{PROJECTION}.",
    "post_projection.": f"{LAYER}.{OUTPUT_PROJECTION}.",
    "masked_embedding.": f"{_HEAD}.",
}


def is_assistant(config: PretrainedConfig) -> bool:
    """Whether it is the config of a Gemma 4 assistant."""
    return config.model_type in _TYPES


def assistant_config(whole: PretrainedConfig) -> PretrainedConfig:
    """Return the config of an assistant's decoder, whose head is not bounded."""
    made = copy.deepcopy(text_config_of(whole))
    made.tie_word_embeddings, made.final_logit_softcapping = False, None
    return made


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
    kept = {name: value for name, value in model.metadata.items() if not name.endswith((_WIDTH, _BLOCKS))}
    metadata = {name.replace(f"{GGUF_ARCH}.", "gemma4.", 1): value for name, value in kept.items()}
    metadata["general.architecture"] = "gemma4"
    return GGUFModel([replace(file, metadata=metadata) for file in model.files])


def config_of_assistant(model: GGUFModel, text: PretrainedConfig) -> PretrainedConfig:
    """Return the config of an assistant's GGUF. text: of its decoder. Raises FormatError."""
    from transformers import CONFIG_MAPPING

    width = model.metadata.get(f"{GGUF_ARCH}.{_WIDTH}")
    if not isinstance(width, int) or width < 1:
        raise FormatError(f"the GGUF file's {GGUF_ARCH}.{_WIDTH} is {width!r:.40}, not the width of its target")
    text.vocab_size_per_layer_input = 0
    try:
        made: PretrainedConfig = CONFIG_MAPPING[_TYPES[0]](text_config=text, backbone_hidden_size=width)
    except Exception as error:  # whatever a config class does with values that do not fit each other
        raise FormatError(f"the GGUF file's metadata make no valid assistant: {error!s:.200}") from error
    return made


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
    `assistant_config`. Raises UnsupportedError for another target than its own."""
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
