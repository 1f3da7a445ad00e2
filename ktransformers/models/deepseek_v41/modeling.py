"""Modules of DeepSeek-V4.1, as a causal LM of transformers would have them, for operators to take the places of.

    T rows, N streams of hidden states of H columns (hc_mult), `pre` weights by which streams become a block's input

    streams, pre ─ [Engram: adds n-grams to the streams] ─ attention ─ experts ─> streams, pre

What V4.1 has of V4 is transformers' own: norms, the projection by groups, rotations, router, experts. What differs:

- connections lag: the weights that a block computes of the streams collapse them for the *next* block;
- a layer attends to its own window and to entries that an earlier layer made and another one chose, see SharedEntries;
- layers with a table add what they look up for the last tokens to the streams (Engram).

The modules hold parameters and say who calls whom. Engram, attention and connections are computed by operators alone
(operators/attention/shared.py, operators/layers/lagged.py, operators/attention/engram.py), which need a step's context.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

from ktransformers.models.deepseek_v41.configuration import DeepseekV41Config
from ktransformers.models.deepseek_v41.hashing import EngramLayout

__all__ = ["DeepseekV41ForCausalLM"]


class DeepseekV41Compressor(nn.Module):
    """Makes an entry of each `compress_rate` tokens: a sum weighted by gates; of one token its projection."""

    def __init__(self, config: DeepseekV41Config, compress_rate: int):
        super().__init__()
        self.compress_rate = compress_rate
        self.kv_proj = nn.Linear(config.hidden_size, config.head_dim, bias=False)
        self.gate_proj = nn.Linear(config.hidden_size, config.head_dim, bias=False) if compress_rate > 1 else None
        self.kv_norm = v4.DeepseekV4RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.rotary_emb = v4.DeepseekV4RotaryEmbedding(config)


class DeepseekV41Indexer(nn.Module):
    """Chooses the entries that attention sees. Layers that make entries have k_proj and k_norm, too, which make what
    later indexers score.

    num_blocks, block_size: of a layer whose choice of blocks later ones choose inside; 0 blocks in others.
    """

    def __init__(self, config: DeepseekV41Config, layer_idx: int):
        super().__init__()
        self.num_heads, self.head_dim = config.index_n_heads, config.index_head_dim
        self.index_topk = config.index_topk
        is_candidate_source = layer_idx == config.candidate_source_layer_id
        self.num_blocks = config.candidate_topk_blocks if is_candidate_source else 0
        self.block_size = config.candidate_block_size
        self.q_b_proj = nn.Linear(config.q_lora_rank, self.num_heads * self.head_dim, bias=False)
        self.weights_proj = nn.Linear(config.hidden_size, self.num_heads, bias=False)
        if config.kv_source(layer_idx) == layer_idx:
            self.k_proj = nn.Linear(config.head_dim, self.head_dim, bias=False)
            self.k_norm = v4.DeepseekV4RMSNorm(self.head_dim, eps=config.rms_norm_eps)


class DeepseekV41Attention(nn.Module):
    """Attention over a window and over shared entries. kv_source: the layer that makes these; None without.

    compress_rate: tokens of an entry. has_candidates: whether its indexer chooses inside of blocks that an earlier one
    chose. num_kept: columns that other modules of the layer have in its rows of the cache.
    """

    def __init__(self, config: DeepseekV41Config, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.kv_source, index_source = config.kv_source(layer_idx), config.index_source(layer_idx)
        self.compress_rate = (config.compress_ratios or [])[layer_idx]
        self.rope_layer_type = "main" if self.kv_source is None else "compress"
        self.num_heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.sliding_window = config.sliding_window
        self.scaling = config.head_dim**-0.5
        self.has_candidates = 0 <= config.candidate_source_layer_id < layer_idx
        self.num_kept = int(layer_idx in (config.engram_layer_ids or ()))
        self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
        self.q_a_norm = v4.DeepseekV4RMSNorm(config.q_lora_rank, eps=config.rms_norm_eps)
        self.q_b_proj = nn.Linear(config.q_lora_rank, self.num_heads * self.head_dim, bias=False)
        self.kv_proj = nn.Linear(config.hidden_size, self.head_dim, bias=False)
        self.kv_norm = v4.DeepseekV4RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        columns = self.num_heads * self.head_dim // config.o_groups
        self.o_a_proj = v4.DeepseekV4GroupedLinear(columns, config.o_groups * config.o_lora_rank, config.o_groups)
        self.o_b_proj = nn.Linear(config.o_groups * config.o_lora_rank, config.hidden_size, bias=False)
        self.sinks = nn.Parameter(torch.empty(self.num_heads))
        self.compressor = self.indexer = None
        if self.kv_source == layer_idx:
            self.compressor = DeepseekV41Compressor(config, self.compress_rate)
        if self.kv_source is not None and index_source == layer_idx:
            self.indexer = DeepseekV41Indexer(config, layer_idx)


class DeepseekV41Connection(nn.Module):
    """Weights by which a block's result joins the streams, and by which the next block's input is made of them."""

    def __init__(self, config: DeepseekV41Config):
        super().__init__()
        self.hc_mult, self.hc_sinkhorn_iters = config.hc_mult, config.hc_sinkhorn_iters
        self.hc_eps, self.norm_eps = config.hc_eps, config.rms_norm_eps
        width = (2 + self.hc_mult) * self.hc_mult
        self.fn = nn.Parameter(torch.empty(width, self.hc_mult * config.hidden_size))
        self.base = nn.Parameter(torch.empty(width))
        self.scale = nn.Parameter(torch.empty(3))

    def collapse(self, streams: Tensor, pre: Tensor) -> Tensor:
        """Make a block's input [1, T, H] of streams [1, T, N, H], by weights [1, T, N] from the block before."""
        return (pre[..., None] * streams).sum(2)

    def mix(self, streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """Mix a block's result [1, T, H] with its streams, by weights [1, T, N] and [1, T, N, N] of these."""
        return post[..., None] * out[:, :, None] + comb.transpose(-1, -2) @ streams


class DeepseekV41EngramTable(nn.Module):
    """The rows of a table of n-grams, [rows, columns]: too many for memory, they stay in their file."""

    def __init__(self, rows: int, columns: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))


class DeepseekV41Engram(nn.Module):
    """Adds what is looked up for the last tokens to the streams, each by a gate of its own.

    model_folder: has the tokenizer.json by which tokens are numbered.
    """

    def __init__(self, config: DeepseekV41Config, layer_idx: int):
        super().__init__()
        self.layer_idx, self.hc_mult, self.norm_eps = layer_idx, config.hc_mult, config.rms_norm_eps
        self.layout = EngramLayout.of(config, layer_idx)
        self.pad_token_id, self.num_numbers = config.engram_pad_token_id, config.engram_compressed_vocab_size
        self.model_folder = str(config.name_or_path)
        rows = (config.engram_num_embeddings or [])[(config.engram_layer_ids or []).index(layer_idx)]
        lookups = sum(map(len, self.layout.primes))
        self.embed = DeepseekV41EngramTable(rows, config.engram_head_dim)
        width = config.hidden_size
        self.kv_proj = nn.Linear(lookups * config.engram_head_dim, (config.hc_mult + 1) * width, bias=False)
        self.q_weight = nn.Parameter(torch.empty(config.hc_mult, width))
        self.k_weight = nn.Parameter(torch.empty(config.hc_mult, width))


class DeepseekV41DecoderLayer(nn.Module):
    """A layer: streams [1, T, N, H] and pre [1, T, N] in and out, and what layers share (SharedEntries).

    continues_layers: it is no place to cut a model, which hands on more than hidden states.
    """

    continues_layers = True

    def __init__(self, config: DeepseekV41Config, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.engram = DeepseekV41Engram(config, layer_idx) if layer_idx in (config.engram_layer_ids or ()) else None
        self.self_attn = DeepseekV41Attention(config, layer_idx)
        self.mlp = v4.DeepseekV4SparseMoeBlock(config, layer_idx)
        self.attn_norm = v4.DeepseekV4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.ffn_norm = v4.DeepseekV4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attn_hc, self.ffn_hc = DeepseekV41Connection(config), DeepseekV41Connection(config)

    def forward(
        self, hidden_states: Tensor, pre: Tensor, shared: object, input_ids: Tensor, **kwargs: object
    ) -> tuple[Tensor, Tensor, object]:
        """Run the layer. input_ids: int64 [1, T]."""
        streams = hidden_states
        if self.engram is not None:
            streams = self.engram(streams, input_ids, **kwargs)
        next_pre, post, comb = self.attn_hc(streams)
        x = self.attn_norm(self.attn_hc.collapse(streams, pre))
        out, shared = self.self_attn(hidden_states=x, shared=shared, **kwargs)
        streams = self.attn_hc.mix(streams, out, post, comb)
        pre, post, comb = self.ffn_hc(streams)
        x = self.ffn_norm(self.ffn_hc.collapse(streams, next_pre))
        return self.ffn_hc.mix(streams, self.mlp(x), post, comb), pre, shared


class DeepseekV41PreTrainedModel(v4.DeepseekV4PreTrainedModel):  # type: ignore[misc]
    """Base of V4.1's models. UNREAD: what the published files hold besides."""

    config_class = DeepseekV41Config
    _no_split_modules = ("DeepseekV41DecoderLayer",)
    _can_record_outputs: object = None
    UNREAD = "layers that draft (DSpark), and what reads pictures"
    _keys_to_ignore_on_load_unexpected = (
        r"(^|\.)mtp\..*",  # layers that draft (DSpark)
        r"^(vision|aligner)\.|^image_",  # what reads pictures
        r"\.gate\.bias_vl$",  # which experts their rows go to
    )


class DeepseekV41Model(DeepseekV41PreTrainedModel):
    """Embedding, layers and last norm."""

    def __init__(self, config: DeepseekV41Config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DeepseekV41DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = v4.DeepseekV4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = v4.DeepseekV4RotaryEmbedding(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: object,
    ) -> BaseModelOutputWithPast:
        """Run the layers over int64 [1, T] ids at given positions; hidden states [1, T, H]."""
        assert input_ids is not None, "tables of n-grams are looked up by tokens"
        rows = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        angles = {
            kind: self.rotary_emb(rows, position_ids=position_ids, layer_type=kind) for kind in ("main", "compress")
        }
        streams = rows.unsqueeze(2).expand(-1, -1, self.config.hc_mult, -1).contiguous()
        pre = rows.new_zeros(*rows.shape[:2], self.config.hc_mult)
        pre[..., 0] = 1.0
        shared: object = None
        for layer in self.layers:
            streams, pre, shared = layer(streams, pre, shared, input_ids, position_embeddings=angles, **kwargs)
        last = cast(DeepseekV41DecoderLayer, self.layers[-1])
        return BaseModelOutputWithPast(last_hidden_state=self.norm(last.ffn_hc.collapse(streams, pre)))


class DeepseekV41ForCausalLM(DeepseekV41PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """DeepSeek-V4.1's language model."""

    def __init__(self, config: DeepseekV41Config):
        super().__init__(config)
        self.model = DeepseekV41Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids: Tensor | None = None, logits_to_keep: int | Tensor = 0, **kwargs: object
    ) -> CausalLMOutputWithPast:
        """Return logits [1, N, vocab_size] of the rows to keep, int64 [N], or of the last ones; 0: of all."""
        hidden_states = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(logits=self.lm_head(hidden_states[:, keep]))
