"""DeepSeek-V4.1 in plain torch, fp32, one sequence at a time, without caches: the oracle of this family.

Written from the published description and the tensors of the published files, whose names it uses. It shares nothing
with the product, not even how tokens are numbered: for each layer all of the sequence is computed, with masks for what
rows do not see.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from torch.nn import functional

from tests.support.models.fp8_models import published_matrix, to_fp4, to_fp8

MODEL_TYPE = "deepseek_v41"
VOCAB_SIZE = 96
_NUM_WORDS = 90  # embeddings may have more rows than there are tokens
_WORDS = ["the", "cat", "sat", "on", "an", "mat", "dog", "runs", "far", "away", "in", "rain"]
PADDING = 2
_NEVER = float("-inf")


def text_config(**changes: Any) -> dict[str, Any]:
    """Every feature of the family: windows alone, both sizes of entries, shared entries and choices, blocks of
    candidates that matter, two tables, rotations with and without YaRN. changes: other values of some fields."""
    values = {
        "model_type": "deepseek_v41_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 32,
        "o_lora_rank": 32,
        "o_groups": 2,
        "hidden_act": "silu",
        "swiglu_limit": 1.5,
        "rms_norm_eps": 1e-20,
        "max_position_embeddings": 256,
        "rope_theta": 10000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 64,
        },
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 8,
        "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 0, 0],
        "compress_rope_theta": 160000,
        "kv_source_layer_ids": [2, 4],
        "index_source_layer_ids": [2, 4, 6],
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": 5,
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 3,
        "candidate_block_size": 4,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 5,
        "hc_eps": 1e-06,
        "engram_layer_ids": [1, 4],
        "engram_num_embeddings": [_rows(101, 0), _rows(101, 1)],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 101,
        "engram_n_heads": 2,
        "engram_head_dim": 64,
        "engram_pad_token_id": PADDING,
        "engram_compressed_vocab_size": len(set(numbers_of_tokens())),
        "num_nextn_predict_layers": 2,
    }
    return values | changes


def published_config(text: dict[str, Any] | None = None) -> dict[str, Any]:
    """A config.json of the published form. text: the language model's part."""
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": 95,
        "text_config": text or text_config(),
        "vision_config": {"model_type": "deepseek_v41_vision", "num_hidden_layers": 1, "hidden_size": 32},
    }


def words() -> list[str]:
    """Words of the tokenizer, by id: some are spelt alike but for case and accents."""
    found = [*_WORDS, *(word.upper() for word in _WORDS), *(word.title() for word in _WORDS), "\u00e9", "E", "e"]
    return [*found, *(f"w{i}" for i in range(_NUM_WORDS - len(found)))]


def numbers_of_tokens() -> list[int]:
    """The number of each id among tokens that read alike, here by lower case without the one accent that there is; ids
    without a token count as padding."""
    known: dict[str, int] = {}
    found = [known.setdefault(word.lower().replace("\u00e9", "e"), len(known)) for word in words()]
    return found + [found[PADDING]] * (VOCAB_SIZE - len(found))


def _primes(first: int, used: list[int], count: int) -> list[int]:
    number = first
    found: list[int] = []
    while len(found) < count:
        if number not in used and all(number % divisor for divisor in range(2, number)):
            found.append(number)
            used.append(number)
        number += 1
    return found


def table_sizes(first: int, place: int, sizes: int = 3, heads: int = 2) -> list[list[int]]:
    """The primes of the hashes of the place-th table, by size of n-gram."""
    used: list[int] = []
    return [[_primes(first, used, heads) for _ in range(sizes)] for _ in range(place + 1)][place]


def _rows(first: int, place: int) -> int:
    return sum(map(sum, table_sizes(first, place)))


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer.json of `words`."""
    Tokenizer(WordLevel({word: i for i, word in enumerate(words())}, unk_token="w0")).save(
        str(folder / "tokenizer.json")
    )


# Tensors.


def published_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of the language model, by their published names, without scales."""
    c = config
    hidden, inner = c["hidden_size"], c["moe_intermediate_size"]
    found: dict[str, tuple[int, ...]] = {
        "embed.weight": (c["vocab_size"], hidden),
        "head.weight": (c["vocab_size"], hidden),
        "norm.weight": (hidden,),
    }
    for layer in range(c["num_hidden_layers"]):
        key = f"layers.{layer}"
        found |= {f"{key}.{part}_norm.weight": (hidden,) for part in ("attn", "ffn")}
        for part in ("attn", "ffn"):
            width = (2 + c["hc_mult"]) * c["hc_mult"]
            found |= {f"{key}.hc_{part}_fn": (width, c["hc_mult"] * hidden), f"{key}.hc_{part}_base": (width,)}
            found[f"{key}.hc_{part}_scale"] = (3,)
        found |= _attention_shapes(f"{key}.attn", c, layer)
        found |= {f"{key}.ffn.gate.weight": (c["n_routed_experts"], hidden)}
        found |= {f"{key}.ffn.gate.{name}": (c["n_routed_experts"],) for name in ("bias", "bias_vl")}
        for expert in (*(f"experts.{i}" for i in range(c["n_routed_experts"])), "shared_experts"):
            found |= {f"{key}.ffn.{expert}.w{i}.weight": (inner, hidden) for i in (1, 3)}
            found[f"{key}.ffn.{expert}.w2.weight"] = (hidden, inner)
        if layer in c["engram_layer_ids"]:
            rows = c["engram_num_embeddings"][c["engram_layer_ids"].index(layer)]
            columns = (c["engram_max_ngram_size"] - 1) * c["engram_n_heads"] * c["engram_head_dim"]
            found[f"{key}.engram.embed.weight"] = (rows, c["engram_head_dim"])
            found[f"{key}.engram.wkv.weight"] = ((c["hc_mult"] + 1) * hidden, columns)
            found |= {f"{key}.engram.{name}_weight": (c["hc_mult"], hidden) for name in "qk"}
    return found


def _attention_shapes(key: str, c: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    hidden, dim, heads = c["hidden_size"], c["head_dim"], c["num_attention_heads"]
    found: dict[str, tuple[int, ...]] = {
        f"{key}.wq_a.weight": (c["q_lora_rank"], hidden),
        f"{key}.q_norm.weight": (c["q_lora_rank"],),
        f"{key}.wq_b.weight": (heads * dim, c["q_lora_rank"]),
        f"{key}.wkv.weight": (dim, hidden),
        f"{key}.kv_norm.weight": (dim,),
        f"{key}.wo_a.weight": (c["o_groups"] * c["o_lora_rank"], heads * dim // c["o_groups"]),
        f"{key}.wo_b.weight": (hidden, c["o_groups"] * c["o_lora_rank"]),
        f"{key}.attn_sink": (heads,),
    }
    if layer in c["kv_source_layer_ids"]:
        names = ("wkv", "wgate") if c["compress_ratios"][layer] > 1 else ("wkv",)
        found |= {f"{key}.compressor.{name}.weight": (dim, hidden) for name in names}
        found[f"{key}.compressor.norm.weight"] = (dim,)
        found[f"{key}.indexer.wk.weight"] = (c["index_head_dim"], dim)
        found[f"{key}.indexer.k_norm.weight"] = (c["index_head_dim"],)
    if layer in c["index_source_layer_ids"]:
        found[f"{key}.indexer.wq_b.weight"] = (c["index_n_heads"] * c["index_head_dim"], c["q_lora_rank"])
        found[f"{key}.indexer.weights_proj.weight"] = (c["index_n_heads"], hidden)
    return found


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Normal weights of a standard deviation of 1 / sqrt(fan in), norms near 1, biases and sinks small."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in published_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name or name.endswith(("q_weight", "k_weight")):
            found[name] = 1 + 0.1 * noise
        elif name.endswith("_scale"):
            found[name] = 0.5 + 0.1 * noise
        elif len(shape) == 1:
            found[name] = 0.1 * noise
        else:
            found[name] = noise if name.endswith(("embed.weight",)) else noise * shape[-1] ** -0.5
    return found


_IN_FP8 = (".wq_a.", ".wq_b.", ".attn.wkv.", ".wo_a.", ".wo_b.", ".shared_experts.", ".engram.wkv.")


def write_published(folder: Path, tensors: dict[str, Tensor], text: dict[str, Any], *, quantized: bool) -> None:
    """Write config, tokenizer and tensors as published, those of drafts and pictures with them.

    quantized: as in the published files, FP8 by 32 x 32 and FP4; `tensors` get the numbers that these stand for.
    """
    config, stored = published_config(text), {}
    for name, tensor in tensors.items():
        stored |= _quantized(name, tensor) if quantized else {name: tensor.clone()}
    if quantized:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        }
    for name in ("mtp.0.norm.weight", "vision.pre_norm.weight", "aligner.w1.weight", "image_newline"):
        stored[name] = torch.ones(4)
    safetensors.torch.save_file(stored, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)


def _quantized(name: str, tensor: Tensor) -> dict[str, Tensor]:
    if ".ffn.experts." in name:
        codes, scales, values = to_fp4(tensor)
        tensor.copy_(values)
        return {name: codes, name.replace(".weight", ".scale"): scales}
    if name.endswith("engram.embed.weight"):
        groups = tensor.view(-1, 32)
        made = [to_fp8(group[None], (1, 32)) for group in groups]
        tensor.copy_(torch.cat([values for _, _, values in made]).view(tensor.shape))
        exponents = torch.tensor([int(torch.log2(scales)) + 127 for _, scales, _ in made], dtype=torch.uint8)
        codes = torch.cat([codes.view(torch.uint8) for codes, _, _ in made]).view(tensor.shape)
        return {
            name: codes.view(torch.float8_e4m3fn),
            name.replace(".weight", ".scale"): exponents.view(len(tensor), -1).view(torch.float8_e8m0fnu),
        }
    if any(part in name for part in _IN_FP8):
        return published_matrix(name, tensor, (32, 32))
    rounded = tensor if name.endswith(("_fn", "_base", "_scale", "_sink", "bias")) else tensor.bfloat16()
    tensor.copy_(rounded.float())
    return {name: rounded.clone()}


# The model.


@dataclass
class _Shared:
    """What layers hand on: entries and their keys, what rows choose of them, and among what they may."""

    entries: Tensor | None = None
    index_keys: Tensor | None = None
    chosen: Tensor | None = None
    candidates: Tensor | None = None


class Oracle:
    """Logits of a sequence. tensors: by published names."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor]):
        self.c, self.w = config, tensors

    def logits(self, ids: list[int]) -> Tensor:
        """fp32 [T, vocab]."""
        c, tokens = self.c, torch.tensor(ids)
        streams = self.w["embed.weight"][tokens][:, None].repeat(1, c["hc_mult"], 1)
        pre = torch.zeros(len(ids), c["hc_mult"])
        pre[:, 0] = 1
        shared = _Shared()
        for layer in range(c["num_hidden_layers"]):
            key = f"layers.{layer}"
            if layer in c["engram_layer_ids"]:
                streams = self._engram(layer, streams, ids)
            next_pre, post, comb = self._mixes(streams, f"{key}.hc_attn")
            x = self._norm((pre[..., None] * streams).sum(1), f"{key}.attn_norm")
            streams = _joined(self._attention(layer, x, shared), streams, post, comb)
            pre, post, comb = self._mixes(streams, f"{key}.hc_ffn")
            x = self._norm((next_pre[..., None] * streams).sum(1), f"{key}.ffn_norm")
            streams = _joined(self._experts(f"{key}.ffn", x), streams, post, comb)
        return self._norm((pre[..., None] * streams).sum(1), "norm") @ self.w["head.weight"].T

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[f"{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return _rms(x, self.c["rms_norm_eps"]) * self.w[f"{name}.weight"]

    def _mixes(self, streams: Tensor, key: str) -> tuple[Tensor, Tensor, Tensor]:
        num, eps = self.c["hc_mult"], self.c["hc_eps"]
        mixed = _rms(streams.flatten(1), self.c["rms_norm_eps"]) @ self.w[f"{key}_fn"].T
        base, scale = self.w[f"{key}_base"], self.w[f"{key}_scale"]
        pre = torch.sigmoid(mixed[:, :num] * scale[0] + base[:num]) + eps
        post = 2 * torch.sigmoid(mixed[:, num : 2 * num] * scale[1] + base[num : 2 * num])
        comb = (mixed[:, 2 * num :] * scale[2] + base[2 * num :]).view(-1, num, num).softmax(-1) + eps
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        for _ in range(self.c["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(2, keepdim=True) + eps)
            comb = comb / (comb.sum(1, keepdim=True) + eps)
        return pre, post, comb

    def _rotated(self, x: Tensor, positions: Tensor, layer: int, sign: float = 1.0) -> Tensor:
        """x [T, ..., D], the last columns of which are rotated in pairs."""
        c, dim = self.c, self.c["qk_rope_head_dim"]
        is_scaled = bool(c["compress_ratios"][layer])
        base = c["compress_rope_theta"] if is_scaled else c["rope_theta"]
        angles = torch.tensor([base ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)
        if is_scaled:
            angles = _yarn(angles, base, dim, c["rope_scaling"])
        turned = positions[:, None].double() * angles
        unit = torch.polar(torch.ones_like(turned), sign * turned)
        pairs = torch.view_as_complex(x[..., -dim:].double().reshape(*x.shape[:-1], -1, 2))
        unit = unit.view(len(positions), *[1] * (x.dim() - 2), -1)
        return torch.cat((x[..., :-dim], torch.view_as_real(pairs * unit).flatten(-2).float()), dim=-1)

    def _attention(self, layer: int, x: Tensor, shared: _Shared) -> Tensor:
        c, key = self.c, f"layers.{layer}.attn"
        positions, dim = torch.arange(len(x)), c["head_dim"]
        residual = self._norm(self._linear(x, f"{key}.wq_a"), f"{key}.q_norm")
        query = self._rotated(self._linear(residual, f"{key}.wq_b").view(len(x), -1, dim), positions, layer)
        keys = self._rotated(self._norm(self._linear(x, f"{key}.wkv"), f"{key}.kv_norm"), positions, layer)
        back = positions[:, None] - positions
        sees = (back >= 0) & (back < c["sliding_window"])
        if c["compress_ratios"][layer]:
            self._choose(layer, x, residual, shared)
            assert shared.entries is not None
            assert shared.chosen is not None
            keys, sees = torch.cat((keys, shared.entries)), torch.cat((sees, shared.chosen), dim=1)
        scores = torch.einsum("thd,kd->thk", query, keys) / math.sqrt(dim)
        scores = scores.masked_fill(~sees[:, None], _NEVER)
        sinks = self.w[f"{key}.attn_sink"][None, :, None].expand(len(x), -1, 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
        out = self._rotated(torch.einsum("thk,kd->thd", weights, keys), positions, layer, sign=-1.0)
        groups = out.reshape(len(x), c["o_groups"], -1)
        by_group = self.w[f"{key}.wo_a.weight"].view(c["o_groups"], c["o_lora_rank"], -1)
        return self._linear(torch.einsum("tgd,grd->tgr", groups, by_group).flatten(1), f"{key}.wo_b")

    def _choose(self, layer: int, x: Tensor, residual: Tensor, shared: _Shared) -> None:
        c, key, rate = self.c, f"layers.{layer}.attn", self.c["compress_ratios"][layer]
        positions = torch.arange(len(x))
        if layer in c["kv_source_layer_ids"]:
            count = len(x) // rate
            values = self._linear(x[: count * rate], f"{key}.compressor.wkv")
            if rate > 1:
                gates = self._linear(x[: count * rate], f"{key}.compressor.wgate").view(count, rate, -1)
                values = (values.view(count, rate, -1) * gates.softmax(1)).sum(1)
            latent = self._norm(values, f"{key}.compressor.norm")
            first = torch.arange(count) * rate
            shared.entries = self._rotated(latent, first, layer)
            index_keys = self._norm(self._linear(latent, f"{key}.indexer.wk"), f"{key}.indexer.k_norm")
            shared.index_keys = self._rotated(index_keys, first, layer)
        if layer not in c["index_source_layer_ids"]:
            return
        assert shared.index_keys is not None
        heads = self._linear(residual, f"{key}.indexer.wq_b").view(len(x), c["index_n_heads"], -1)
        query = self._rotated(heads, positions, layer)
        weights = self._linear(x, f"{key}.indexer.weights_proj") * c["index_n_heads"] ** -0.5
        products = torch.einsum("thd,kd->thk", query, shared.index_keys) * c["index_head_dim"] ** -0.5
        scores = (products.relu() * weights[..., None]).sum(1)
        visible = torch.arange(len(shared.index_keys)) < ((positions + 1) // rate)[:, None]
        scores = scores.masked_fill(~visible, _NEVER)
        if layer == c["candidate_source_layer_id"]:
            shared.candidates = self._candidates(scores, (positions + 1) // rate)
        elif shared.candidates is not None and layer > c["candidate_source_layer_id"]:
            scores = scores.masked_fill(~shared.candidates, _NEVER)
        shared.chosen = torch.zeros_like(visible)
        for row, of_row in enumerate(scores):
            count = min(c["index_topk"], int((of_row > _NEVER).sum()))
            shared.chosen[row, of_row.topk(count).indices] = True

    def _candidates(self, scores: Tensor, lens: Tensor) -> Tensor:
        size, most = self.c["candidate_block_size"], self.c["candidate_topk_blocks"]
        kept = torch.zeros_like(scores, dtype=torch.bool)
        for row, length in enumerate(lens.tolist()):
            blocks = [scores[row, at : min(at + size, length)].max().item() for at in range(0, length, size)]
            newest = len(blocks) - 1
            best = sorted(range(newest), key=lambda block: -blocks[block])[: most - 1]
            for block in (*best, newest) if blocks else ():
                kept[row, block * size : min((block + 1) * size, length)] = True
        return kept

    def _experts(self, key: str, x: Tensor) -> Tensor:
        c = self.c
        scores = functional.softplus(self._linear(x, f"{key}.gate")).sqrt()
        out = self._swiglu(f"{key}.shared_experts", x)
        for row, (of_row, biased) in enumerate(zip(scores, scores + self.w[f"{key}.gate.bias"], strict=True)):
            best = biased.topk(c["num_experts_per_tok"]).indices
            weights = of_row[best] / (of_row[best].sum() + 1e-20) * c["routed_scaling_factor"]
            for expert, weight in zip(best.tolist(), weights, strict=True):
                out[row] += weight * self._swiglu(f"{key}.experts.{expert}", x[row])
        return out

    def _swiglu(self, key: str, x: Tensor) -> Tensor:
        limit = self.c["swiglu_limit"]
        gate = self._linear(x, f"{key}.w1").clamp(max=limit)
        up = self._linear(x, f"{key}.w3").clamp(-limit, limit)
        return self._linear(functional.silu(gate) * up, f"{key}.w2")

    def _engram(self, layer: int, streams: Tensor, ids: list[int]) -> Tensor:
        c, key = self.c, f"layers.{layer}.engram"
        rows = self._hashed(layer, ids)
        parts = self._linear(self.w[f"{key}.embed.weight"][rows].flatten(1), f"{key}.wkv")
        parts = parts.view(len(ids), c["hc_mult"] + 1, -1)
        query = _rms(streams, c["rms_norm_eps"]) * self.w[f"{key}.q_weight"]
        keys = _rms(parts[:, :-1], c["rms_norm_eps"]) * self.w[f"{key}.k_weight"]
        score = (query * keys).sum(-1) / math.sqrt(c["hidden_size"])
        gate = torch.sigmoid(score.abs().clamp_min(1e-6).sqrt().copysign(score))
        return streams + gate[..., None] * parts[:, -1:]

    def _hashed(self, layer: int, ids: list[int]) -> Tensor:
        """Rows of the table for each token, in Python's whole numbers."""
        c, numbers = self.c, numbers_of_tokens()
        most, size = (1 << 63) - 1, c["engram_max_ngram_size"]
        drawn = np.random.default_rng(10007 * layer).integers(0, most // len(set(numbers)) // 2, size, np.int64)
        factors = [2 * int(one) + 1 for one in drawn]
        sizes = table_sizes(c["engram_vocab_size"], c["engram_layer_ids"].index(layer))
        found = []
        for place in range(len(ids)):
            tokens = [numbers[ids[place - j] if place >= j else c["engram_pad_token_id"]] for j in range(size)]
            of_row, first = [], 0
            for n, primes in enumerate(sizes, 2):
                mixed = 0
                for token, factor in zip(tokens[:n], factors, strict=False):
                    mixed ^= token * factor
                for prime in primes:
                    of_row.append(first + mixed % prime)
                    first += prime
            found.append(of_row)
        return torch.tensor(found)


def _rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _joined(out: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return post[..., None] * out[:, None] + torch.einsum("tjk,tjd->tkd", comb, streams)


def _yarn(angles: Tensor, base: float, dim: int, scaling: dict[str, Any]) -> Tensor:
    """Slow angles are divided by the factor, fast ones kept, and those between mixed."""

    def place(turns: float) -> float:
        return (
            dim * math.log(scaling["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(base))
        )

    low, high = max(math.floor(place(scaling["beta_fast"])), 0), min(math.ceil(place(scaling["beta_slow"])), dim - 1)
    ramp = ((torch.arange(dim // 2).double() - low) / max(high - low, 0.001)).clamp(0, 1)
    return angles / scaling["factor"] * ramp + angles * (1 - ramp)
