"""Makes the Hugging Face config of a model from a GGUF file's metadata, so that the file alone is enough to run it.

The keys are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, as llama.cpp's converter writes them.
Only architectures whose every field was compared with the original config are accepted; for others the user passes
`--model_path`, a folder with the original config.json. Knows no tensor's values except llama 3's frequency factors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ktransformers.errors import FormatError, UnsupportedError
from ktransformers.models.gguf.families import FAMILIES
from ktransformers.models.gguf.fields import GGUFFamily, check_router
from ktransformers.models.gguf.keys import check_unread
from ktransformers.models.gguf.metadata import Metadata, Values
from ktransformers.models.gguf.refused import check_architecture
from ktransformers.models.gguf.rope import rope_parameters

__all__ = ["FACTOR_TENSORS", "GGUF_CONFIG_ARCHITECTURES", "config_from_gguf"]

FACTOR_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors of factors that divide rotary frequencies: their values are part of a config."""

GGUF_CONFIG_ARCHITECTURES: tuple[str, ...] = tuple(FAMILIES)
"""Architectures for which `--gguf_path` alone is enough."""


def config_from_gguf(
    metadata: Mapping[str, object],
    tensor_shapes: Mapping[str, tuple[int, ...]],
    factors: Mapping[str, Sequence[float]] | None = None,
) -> PretrainedConfig:
    """Return the config that `metadata` and `tensor_shapes` (torch order, by stored name) describe.

    factors: the values of those FACTOR_TENSORS that the file has. Raises FormatError for values that are missing,
    absurd or contradict the tensors, UnsupportedError for architectures and features that are not known here.
    """
    gguf = Metadata(metadata, tensor_shapes, factors)
    check_architecture(gguf.arch, FAMILIES)
    if (kind := metadata.get("general.type", "model")) != "model":
        raise UnsupportedError(
            f"the GGUF file's general.type is {kind!r:.40}: it holds no model; give the model's file"
        )
    family = FAMILIES[gguf.arch]
    common = _common(gguf, family)  # first: it holds the number of layers against the tensors
    check_router(gguf, family)
    model_type, specific = family.config(gguf)
    values: Values = {**common, **specific}
    if "rope_parameters" not in values:
        values["rope_parameters"] = rope_parameters(gguf)
    check_unread(gguf)
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:  # not in it: the language model of one that reads images
        values["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    try:
        config: PretrainedConfig = CONFIG_MAPPING[model_type](**values)
    except Exception as error:  # whatever a config class does with values that do not fit each other
        reason = " ".join(str(error).split())
        scaling = [key for key in ("type", "factor") if gguf.raw(f"rope.scaling.{key}") is not None]
        said = f" (the file says rope.scaling.{' and '.join(scaling)})" if scaling else ""
        raise FormatError(f"the GGUF file's metadata make no valid {model_type} config{said}: {reason:.200}") from error
    return config


_DRAFTING = re.compile(r"blk\.(\d{1,9})\.nextn\.")


def _common(gguf: Metadata, family: GGUFFamily) -> Values:
    embedding = gguf.shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise FormatError(
            "the GGUF file has no token_embd.weight; it holds no language model, or its first shard is missing"
        )
    layers = gguf.layers
    blocks = {int(match[1]) for name in gguf.shapes if (match := re.match(r"blk\.(\d{1,9})\.", name))}
    if blocks and 0 not in blocks and any(_DRAFTING.match(name) for name in gguf.shapes):
        raise UnsupportedError(
            f"its layers, from {min(blocks)} on, are for multi-token prediction alone: they draft for a GGUF of the "
            "model that lies beside it, with --speculative mtp"
        )
    if not 0 < layers <= len(blocks) or not set(range(layers)) <= blocks:
        raise FormatError(f"the metadata say {layers} layers, but the file has tensors of {len(blocks)}")
    drafting = next((name for name in gguf.shapes if (match := _DRAFTING.match(name)) and int(match[1]) < layers), None)
    if drafting is not None:
        raise FormatError(
            f"{drafting} is of a layer for multi-token prediction, and the metadata say that it is one of the model's "
            f"own {layers}; {gguf.arch}.nextn_predict_layers is wrong or missing"
        )
    hidden = gguf.int("embedding_length")
    if hidden != embedding[1]:
        raise FormatError(f"{gguf.arch}.embedding_length is {hidden}, but token_embd.weight is {embedding[1]} wide")
    values: Values = {
        "vocab_size": embedding[0],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "tie_word_embeddings": "output.weight" not in gguf.shapes,
        **_token_ids(gguf.metadata, embedding[0]),
    }
    if family.is_attention_free:
        return values
    heads = max(gguf.ints("attention.head_count")) if family.differs_by_layer else gguf.int("attention.head_count")
    values |= {"num_attention_heads": heads, "max_position_embeddings": gguf.int("context_length")}
    if (prediction := gguf.find_int("nextn_predict_layers")) is not None:
        values["num_nextn_predict_layers"] = prediction
    if not family.has_layer_norm:
        usual = 1e-6 if gguf.arch == "gemma3" else None  # Ollama's converter does not write it
        if gguf.arch in ("nemotron_h", "nemotron_h_moe"):  # whose config has one name for it, most often the other
            usual = gguf.find_float("attention.layer_norm_epsilon")
        values["rms_norm_eps"] = gguf.float("attention.layer_norm_rms_epsilon", usual)
    if family.differs_by_layer:
        return values
    values["num_key_value_heads"] = gguf.find_some("attention.head_count_kv") or heads
    if (inner := gguf.find_some("feed_forward_length")) is not None:
        values["intermediate_size"] = inner
    return values


def _token_ids(metadata: Mapping[str, object], vocab_size: int) -> Values:
    ids: dict[str, int] = {}
    for kind in ("bos", "eos", "eot", "padding"):
        value = metadata.get(f"tokenizer.ggml.{kind}_token_id")
        if value is None:
            continue
        if type(value) is not int or not 0 <= value < vocab_size:
            raise FormatError(f"tokenizer.ggml.{kind}_token_id is {value!r:.40}, not a token of {vocab_size}")
        ids[kind] = value
    ends = list(dict.fromkeys(ids[kind] for kind in ("eos", "eot") if kind in ids))
    return {
        "bos_token_id": ids.get("bos"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": ids.get("padding"),
    }
