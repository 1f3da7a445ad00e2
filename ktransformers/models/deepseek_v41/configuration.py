"""Config of DeepSeek-V4.1, read from the published config.json or from a flat one.

The published file keeps the language model's fields in `text_config`, and those of a vision encoder beside it, which is
not built here: this config is the language model's, flat.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from huggingface_hub.dataclasses import strict
from transformers import DeepseekV4Config

__all__ = ["DeepseekV41Config"]

_TEXT, _OTHERS = "text_config", ("vision_config", "model_type")
_OF_FILE = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "quantization_config", "architectures")


@strict
class DeepseekV41Config(DeepseekV4Config):  # type: ignore[misc]
    """Fields of DeepSeek-V4's config, and what V4.1 adds.

    compress_ratios: for each layer, the tokens of an entry of the stream that it reads; 0: it reads none.
    kv_source_layer_ids: layers that make entries, which those behind them read up to the next one.
    index_source_layer_ids: layers that choose entries, likewise. candidate_source_layer_id: the one behind whose choice
    of blocks (candidate_topk_blocks of candidate_block_size entries) later ones choose inside.
    engram_*: of the tables of n-grams, with engram_num_embeddings rows in the layers engram_layer_ids.
    """

    model_type = "deepseek_v41"

    rms_norm_eps: float = 1.0e-20
    compress_ratios: list[int] | None = None
    kv_source_layer_ids: list[int] | None = None
    index_source_layer_ids: list[int] | None = None
    candidate_source_layer_id: int = -1
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 8
    engram_layer_ids: list[int] | None = None
    engram_num_embeddings: list[int] | None = None
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 16000000
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 99092

    default_num_hash_layers: ClassVar[int] = 0

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, object], **kwargs: object) -> object:
        """Return the config of a config.json as published, or of a flat one."""
        values = dict(config_dict)
        text = values.pop(_TEXT, None)
        if isinstance(text, Mapping):
            named = {name: values[name] for name in _OF_FILE if name in values}
            values = {**{name: value for name, value in text.items() if name not in _OTHERS}, **named}
        return super().from_dict(values, **kwargs)

    def __post_init__(self, **kwargs: object) -> None:
        if kwargs.pop("gate_temp", 1.0) != 1.0:
            raise ValueError("gate_temp divides the router's logits, which is supported for 1 alone")
        for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids", "engram_num_embeddings"):
            setattr(self, name, list(getattr(self, name) or ()))
        count = self.num_hidden_layers
        self.compress_ratios = list(self.compress_ratios or [0] * count)[:count]
        if len(self.compress_ratios) != count or any(ratio < 0 for ratio in self.compress_ratios):
            raise ValueError(f"compress_ratios {self.compress_ratios} are not of {count} layers")
        self.layer_types = [
            "compressed_sparse_attention" if ratio else "sliding_attention" for ratio in self.compress_ratios
        ]
        self.mlp_layer_types = ["moe"] * count
        super().__post_init__(**kwargs)
        self._check_sources()

    def kv_source(self, layer: int) -> int | None:
        """Return the layer whose entries a layer reads; None where it reads none."""
        return self._last(self.kv_source_layer_ids, layer)

    def index_source(self, layer: int) -> int | None:
        """Return the layer whose choice of entries a layer reads; None where it reads none."""
        return self._last(self.index_source_layer_ids, layer)

    def _last(self, sources: list[int] | None, layer: int) -> int | None:
        assert self.compress_ratios is not None, "it is set when the config is made"
        if not self.compress_ratios[layer]:
            return None
        return max((source for source in sources or () if source <= layer), default=None)

    def _check_sources(self) -> None:
        ratios = self.compress_ratios or []
        for layer, ratio in enumerate(ratios):
            source, index = self.kv_source(layer), self.index_source(layer)
            if not ratio:
                if layer in (self.kv_source_layer_ids or ()) or layer in (self.index_source_layer_ids or ()):
                    raise ValueError(f"layer {layer} is a source of entries and has compress_ratios 0")
            elif source is None or index is None or ratios[source] != ratio or index < source:
                raise ValueError(
                    f"layer {layer} reads entries of {ratio} tokens, and no layer up to it makes and chooses such "
                    "(kv_source_layer_ids, index_source_layer_ids)"
                )
        alone = set(self.kv_source_layer_ids or ()) - set(self.index_source_layer_ids or ())
        if alone:
            raise ValueError(f"layers {sorted(alone)} make entries (kv_source_layer_ids) and no keys to choose them by")
        if self.candidate_source_layer_id >= 0:
            fewest = (self.candidate_topk_blocks - 1) * self.candidate_block_size + 1
            if fewest < self.index_topk:
                raise ValueError(f"candidate_topk_blocks leaves {fewest} entries of which index_topk are chosen")
        if len(self.engram_layer_ids or ()) != len(self.engram_num_embeddings or ()):
            raise ValueError("engram_num_embeddings has not a number for each of engram_layer_ids")
