"""Facts of a model, read once from its Hugging Face config: layers, heads, windows, experts, lengths, ends.

The only module that knows under which names families say these things, and the one place where missing, absurd or
wrongly typed values are refused, by the name of their field. Knows no files and no modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from ktransformers.errors import ConfigError, UnsupportedError
from ktransformers.models.config_fields import ConfigFields, absurd, token_ids

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = [
    "DeltaFacts",
    "ExpertFacts",
    "LatentFacts",
    "LayerFacts",
    "LayerKind",
    "ModelFacts",
    "Quantization",
]

MAX_LAYERS = 1 << 16
MAX_POSITIONS = 1 << 40

_NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_TOP_K = (
    *("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_top_k", "moe_k"),
    "top_k_experts",
)
_EXPERT_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size")
_OF_EXPERTS = "ffn_config"  # where some configs keep a config of their own for experts
_SHARED_WIDTH = (
    *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"),
    "share_expert_dim",
)
_BY_MODALITY = "ernie4_5_vl_moe_text"  # has experts for text and experts for images, and says the width of both
_NUM_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_LAYER_WORDS = ("layer_types", "layers_block_type")
_IS_MOE = ("is_moe", "enable_moe_block")  # of families that count experts in dense models too
_CONFIG_MODULES = ("transformers.", "ktransformers.models.")
_EXTENDED_BY_FACTOR = ("linear", "dynamic")
_UNKNOWN_FIELDS = {  # of Kimi-K3, whose text config calls itself kimi_linear
    "attn_res_block_size": "residuals across blocks of layers",
    "routed_expert_hidden_size": "experts in a narrower space",
}


class LayerKind(StrEnum):
    """Kinds of layers: how a layer brings positions together, and so what it keeps of them.

    Not closed: a family with something new adds a member, the words for it to `_KINDS`, and a cache. OTHER is what is
    not known here; `LayerFacts.word` says how the config calls it.
    """

    FULL = "full_attention"
    SLIDING = "sliding_attention"
    CHUNKED = "chunked_attention"
    LATENT = "latent_attention"  # keys and values out of one vector for all heads (DeepSeek's MLA)
    COMPRESSED = "compressed_attention"  # older tokens as entries, each of several (DeepSeek-V4)
    RECURRENT = "recurrent"  # a state of one size, however long the sequence
    HYBRID = "hybrid"  # full attention, and a state beside it
    ROWWISE = "rowwise"  # it works row by row, and keeps nothing
    OTHER = "other"


_KINDS = {
    "full_attention": LayerKind.FULL,
    "attention": LayerKind.FULL,
    "indexed_attention": LayerKind.FULL,  # to positions that an indexer chooses: its operator's affair
    "deepseek_sparse_attention": LayerKind.FULL,  # the same, by its name in transformers 5.17
    "minimax_m3_sparse": LayerKind.FULL,  # the same, in blocks
    "sliding_attention": LayerKind.SLIDING,
    "chunked_attention": LayerKind.CHUNKED,
    "compressed_sparse_attention": LayerKind.COMPRESSED,
    "heavily_compressed_attention": LayerKind.COMPRESSED,
    "linear_attention": LayerKind.RECURRENT,
    "recurrent": LayerKind.RECURRENT,  # by its name in transformers 5.17
    "mamba": LayerKind.RECURRENT,
    "conv": LayerKind.RECURRENT,
    "hybrid": LayerKind.HYBRID,
    "hybrid_sliding": LayerKind.HYBRID,  # within a window
    "moe": LayerKind.ROWWISE,
    "mlp": LayerKind.ROWWISE,
}


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """Facts of a decoder layer. word: what the config calls its kind. window: most positions it looks back, None for
    all.

    head_dim, v_head_dim: of a key and of a value, as the attention function gets them.
    shares: the earlier layer whose keys and values it attends to, None for its own.
    is_borrowing: it attends to those of another model, for which it drafts.
    """

    kind: LayerKind
    word: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None
    has_experts: bool = False
    shares: int | None = None
    is_borrowing: bool = False


@dataclass(frozen=True, slots=True)
class LatentFacts:
    """Facts of attention over latents. rank, q_rank: of the latent and of the query's, None for queries projected at
    once.

    Where layers differ these are the largest of each; LayerFacts have what single layers have. A head has nope_dim
    elements without rotation and rope_dim with, rotated by neighbours where is_interleaved.
    """

    rank: int
    q_rank: int | None
    nope_dim: int
    rope_dim: int
    v_dim: int
    is_interleaved: bool


@dataclass(frozen=True, slots=True)
class ExpertFacts:
    """Facts of routed experts. top_k: how many a token takes, by layer; 0 where the config does not say.

    shared_intermediate_size: of the experts that every token takes, all together; 0 without.
    """

    num_experts: int
    top_k: tuple[int, ...]
    intermediate_size: int
    shared_intermediate_size: int = 0

    @property
    def max_top_k(self) -> int:
        """Experts of a token in the layer that takes most."""
        return max(self.top_k)


@dataclass(frozen=True, slots=True)
class DeltaFacts:
    """Facts of Gated DeltaNet layers: heads of keys, each of which several heads of values share, and their dims."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Quantization:
    """Facts of quantized safetensors, as the config has them. block: (rows, columns) that share a scale. fields: all it
    says.
    """

    method: str | None
    block: tuple[int, int] | None = None
    fields: Mapping[str, object] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a causal language model, by its config alone.

    architecture: the class in its config.json. is_of_transformers: whether that config is a class of transformers, or
    of this package where transformers has none.
    composite_type: the model_type of a config for images and text whose language model this is; None for no such.
    intermediate_size: of the widest dense layer, 0 when the config does not say.
    num_prediction_layers: for multi-token prediction, stored behind the model's own layers.
    context_len: most tokens of one sequence that the model was made for; None when the config does not say.
    eos_token_ids: those that the config names. num_streams: of hidden states between layers (hyper-connections).
    first_layer: the number in the model of the first of `layers`, of a stage of a pipeline; 0 for the whole model.
    """

    model_type: str
    architecture: str | None
    is_of_transformers: bool
    vocab_size: int
    num_extra_ids: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerFacts, ...]
    num_prediction_layers: int = 0
    latent: LatentFacts | None = None
    experts: ExpertFacts | None = None
    is_tied: bool = False
    context_len: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    quantization: Quantization | None = None
    composite_type: str | None = None
    delta: DeltaFacts | None = None
    num_streams: int = 1
    first_layer: int = 0

    @classmethod
    def of(cls, hf_config: PretrainedConfig) -> ModelFacts:
        """Return the facts in a config, of its text model where it has several.

        Raises ConfigError, which names the field, and UnsupportedError for what is no decoder of one config.
        """
        config, whole = ConfigFields(hf_config.get_text_config(decoder=True)), ConfigFields(hf_config)
        is_composite = config.of is not hf_config
        _check_supported(config)
        num_layers = config.number("num_hidden_layers", most=MAX_LAYERS)
        latent, experts = _latent(config, num_layers), _experts(config, num_layers)
        architectures = config.raw("architectures") or whole.raw("architectures")
        return cls(
            model_type=str(config.raw("model_type")),
            architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else None,
            is_of_transformers=type(config.of).__module__.startswith(_CONFIG_MODULES),
            vocab_size=config.number("vocab_size"),
            num_extra_ids=config.find("additional_vocab_size") or 0,
            hidden_size=config.number("hidden_size"),
            intermediate_size=max(config.numbers(num_layers, "intermediate_size") or (0,)),
            layers=_layers(config, num_layers, latent, experts),
            num_prediction_layers=config.find("num_nextn_predict_layers") or 0,
            latent=latent,
            experts=experts,
            is_tied=bool(config.raw("tie_word_embeddings")),
            context_len=_context_len(config),
            eos_token_ids=token_ids(
                whole.raw("eos_token_id") if config.raw("eos_token_id") is None else config.raw("eos_token_id")
            ),
            quantization=_quantization(config) or _quantization(whole),
            composite_type=str(whole.raw("model_type")) if is_composite else None,
            delta=_delta(config),
            num_streams=config.find("hc_mult") or 1,
        )

    @property
    def num_layers(self) -> int:
        """Number of decoder layers, without those of multi-token prediction."""
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        """Heads of the layer that has most."""
        return max(layer.num_heads for layer in self.layers)

    def top_k(self, layer: int | None = None) -> int:
        """Return the experts of a token in the layer of that number, or in the one that takes most; 0 when the config
        does not say.
        """
        if self.experts is None:
            return 0
        if layer is None:
            return self.experts.max_top_k
        place = layer - self.first_layer
        return self.experts.top_k[place] if 0 <= place < self.num_layers else 0

    @property
    def has_states(self) -> bool:
        """Whether layers keep a state of each sequence, beside keys and values or instead."""
        return any(layer.kind in (LayerKind.RECURRENT, LayerKind.HYBRID) for layer in self.layers)

    @property
    def is_borrowing(self) -> bool:
        """Whether its layers attend to keys and values of another model, for which it drafts."""
        return any(layer.is_borrowing for layer in self.layers)

    def longest_sequence(self, num_slots: int) -> int:
        """Return the most positions of one sequence: all slots of the cache, or what the model was made for."""
        return min(self.context_len or num_slots, num_slots)


def _check_supported(config: ConfigFields) -> None:
    model_type = config.raw("model_type")
    if config.raw("is_heterogeneous") and any(getattr(layer, "skip", None) for layer in config.of.per_layer_config):
        raise UnsupportedError(
            f"model type {model_type} has layers without some of their parts, which is not supported"
        )
    if config.raw("rel_extent"):
        raise UnsupportedError(
            f"model type {model_type} adds to attention's scores what it has learned of distances (rel_extent), which "
            "no kernel does"
        )
    for name, what in _UNKNOWN_FIELDS.items():
        if config.raw(name):
            raise UnsupportedError(f"model type {model_type} has {what} ({name}), which is not supported")
    loops = config.find("n_recurrent_loops") or 1
    if loops > 1:
        raise UnsupportedError(
            f"model type {model_type} runs some of its layers {loops} times for each token (n_recurrent_loops), each "
            "time with keys and values of their own; layers that run once are supported"
        )
    if config.raw("is_encoder_decoder"):
        raise UnsupportedError(f"model type {model_type} is an encoder-decoder, only decoders are supported")


# -- layers


def _layers(
    config: ConfigFields, num_layers: int, latent: LatentFacts | None, experts: ExpertFacts | None
) -> tuple[LayerFacts, ...]:
    heads = config.numbers(num_layers, "num_attention_heads_per_layer", "num_attention_heads")
    if heads is None:  # of a family without attention
        heads = (0,) * num_layers
    elif not any(heads):
        raise absurd("num_attention_heads", 0)
    one = (1,) * num_layers if config.raw("multi_query") is True else None  # GPT-BigCode: all heads share one
    kv_heads = one or config.numbers(num_layers, "num_key_value_heads") or heads
    none = (0,) * num_layers
    given, values = config.numbers(num_layers, "head_dim") or none, config.numbers(num_layers, "v_head_dim") or none
    hidden, windows = config.number("hidden_size"), config.numbers(num_layers, "sliding_window", most=MAX_POSITIONS)
    if windows is None or config.raw("use_sliding_window") is False:
        windows = none
    chunks = config.numbers(num_layers, "attention_chunk_size", most=MAX_POSITIONS) or none
    words = config.words(num_layers, *_LAYER_WORDS)
    if words is None:
        words = tuple("sliding_attention" if window else "full_attention" for window in windows)
    sparse = _with_experts(config, num_layers) if experts is not None else (False,) * num_layers
    nope, rope = (config.numbers(num_layers, f"qk_{part}_head_dim") or none for part in ("nope", "rope"))
    layers = []
    for index, word in enumerate(words):
        kind = _KINDS.get(word, LayerKind.OTHER)
        bounds = {"hybrid_sliding": windows[index], LayerKind.SLIDING: windows[index], LayerKind.CHUNKED: chunks[index]}
        looks_back = bounds.get(word) or bounds.get(kind) or None
        num_heads, num_kv_heads = heads[index], kv_heads[index] or heads[index]
        head_dim = given[index] or hidden // max(num_heads, 1)
        v_head_dim = values[index] or head_dim
        if latent is not None and kind not in (LayerKind.RECURRENT, LayerKind.ROWWISE):
            kind = LayerKind.LATENT if kind in (LayerKind.FULL, LayerKind.SLIDING) else kind
            num_kv_heads, head_dim, v_head_dim = num_heads, nope[index] + rope[index], values[index]
        layers.append(LayerFacts(kind, word, num_heads, num_kv_heads, head_dim, v_head_dim, looks_back, sparse[index]))
    return _with_shares(config, layers)


def _with_shares(config: ConfigFields, layers: list[LayerFacts]) -> tuple[LayerFacts, ...]:
    """The last layers may attend to what the last layer of their kind before them has cached, all of them to another
    model's."""
    first = len(layers) - (config.find("num_kv_shared_layers") or 0)
    if first <= 0:
        return tuple(replace(layer, is_borrowing=True) for layer in layers)
    last = {layer.word: index for index, layer in enumerate(layers[:first])}
    return tuple(
        layer if index < first else replace(layer, shares=last.get(layer.word)) for index, layer in enumerate(layers)
    )


def _latent(config: ConfigFields, num_layers: int) -> LatentFacts | None:
    def largest(name: str) -> int:
        return max(config.numbers(num_layers, name) or (0,))

    rank = largest("kv_lora_rank")
    if not rank:
        return None
    return LatentFacts(
        rank=rank,
        q_rank=largest("q_lora_rank") or None,
        nope_dim=largest("qk_nope_head_dim") or config.number("qk_nope_head_dim"),
        rope_dim=largest("qk_rope_head_dim"),  # none rotates in some families
        v_dim=largest("v_head_dim") or config.number("v_head_dim"),
        is_interleaved=bool(getattr(config.of, "rope_interleave", True)),
    )


def _delta(config: ConfigFields) -> DeltaFacts | None:
    if config.first(("linear_num_value_heads",)) is None:
        return None
    return DeltaFacts(
        key_heads=config.number("linear_num_key_heads"),
        value_heads=config.number("linear_num_value_heads"),
        key_dim=config.number("linear_key_head_dim"),
        value_dim=config.number("linear_value_head_dim"),
    )


# -- experts


def _experts(config: ConfigFields, num_layers: int) -> ExpertFacts | None:
    config = config.part(_OF_EXPERTS)
    counts = config.numbers(num_layers, *_NUM_EXPERTS)
    num_experts = max(counts or (0,))
    if num_experts <= 1 or any(config.raw(name) is False for name in _IS_MOE):
        return None
    blocks = config.words(num_layers, *_LAYER_WORDS) or ()
    if "mlp" in blocks and "moe" not in blocks:  # counts experts in dense models too
        return None
    for name in _TOP_K:
        chosen = config.numbers(num_layers, name)
        if chosen is not None and not all(0 < one <= num_experts for one in chosen):
            said = config.raw(name)
            raise ConfigError(f"the model's config says {name} {said!r:.60}, but there are {num_experts} experts")
    widths = config.numbers(1 if config.raw("model_type") == _BY_MODALITY else num_layers, *_EXPERT_WIDTH)
    width = max(widths or (0,))
    shared = config.numbers(num_layers, *_SHARED_WIDTH)
    if shared is None:
        shared = tuple(width * count for count in config.numbers(num_layers, *_NUM_SHARED) or (0,))
    top_k = config.numbers(num_layers, *_TOP_K) or (0,) * num_layers
    return ExpertFacts(num_experts, top_k, width, max(shared))


def _with_experts(config: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Which layers route tokens to experts, where not all of them do."""
    blocks = config.words(num_layers, *_LAYER_WORDS) or ()
    if "moe" in blocks:  # of a family in which a layer is either a mixer, or experts, or an MLP
        return tuple(word == "moe" for word in blocks)
    words = config.words(num_layers, "mlp_layer_types")
    if words is not None:
        return tuple(word != "dense" for word in words)
    listed, dense = config.raw("moe_layers"), config.raw("mlp_only_layers")
    if isinstance(listed, list):
        return tuple(index in listed for index in range(num_layers))
    dense = dense if isinstance(dense, list) else []
    first = config.find("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index") or 0
    end = config.raw("moe_layer_end_index")
    last = end if isinstance(end, int) and end >= 0 else num_layers - 1
    step = config.find("decoder_sparse_step", "moe_layer_interval", "expert_layer_period") or 1
    offset = config.find("expert_layer_offset")
    offset = step - 1 if offset is None else offset
    return tuple(
        first <= index <= last and index not in dense and index % step == offset for index in range(num_layers)
    )


# -- the rest


def _context_len(config: ConfigFields) -> int | None:
    """max_position_embeddings, or more where RoPE is scaled: some configs count the scaling in it, others do not."""
    positions = config.find("max_position_embeddings", most=MAX_POSITIONS) or 0
    rope = config.raw("rope_parameters")
    rope = rope if isinstance(rope, dict) else {}
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    original = original if isinstance(original, int | float) else 0
    if positions and isinstance(factor, int | float):
        largest = max(positions, original)
        if not 0 < factor * largest <= MAX_POSITIONS:
            raise ConfigError(f"the model's config scales RoPE by {factor!r:.60}, which no model does")
        if rope.get("rope_type") == "yarn" and original:
            positions = max(positions, int(original * factor))
        elif rope.get("rope_type") in _EXTENDED_BY_FACTOR and not original:
            positions = int(positions * factor)
    return positions or None


def _quantization(config: ConfigFields) -> Quantization | None:
    said = config.raw("quantization_config")
    if not said:
        return None
    if not isinstance(said, dict) and not hasattr(said, "quant_method"):
        raise ConfigError(f"the model's config says quantization_config {said!r:.60}; an object is needed")
    values = said if isinstance(said, dict) else vars(said)
    method, block = values.get("quant_method"), values.get("weight_block_size")
    if block and not (isinstance(block, list | tuple) and len(block) == 2 and all(type(one) is int for one in block)):
        raise ConfigError(f"the model's config says weight_block_size {block!r:.60}; two numbers are needed")
    name = None if method is None else str(getattr(method, "value", method))
    return Quantization(name, (block[0], block[1]) if block else None, dict(values))
