"""A tiny DeepSeek-V4 with a DSpark head, in the names of the published checkpoint.

The oracle is written here in torch, from the formulas of DeepSeek's own inference code, on the tensors of the file; the
hidden states that it takes are those of transformers' model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch.nn import functional
from transformers import PreTrainedModel

from tests.support.models.fp8_models import published_matrix, published_tensors, save_published
from tests.support.models.tiny_models import VOCAB_SIZE, tiny_model, write_safetensors

__all__ = ["BLOCK_SIZE", "TARGET_LAYERS", "TinyDspark", "tiny_dspark", "write_dspark"]

BLOCK_SIZE, RANK, NOISE_ID, NUM_LAYERS = 5, 32, VOCAB_SIZE - 1, 3
_LAST = f"mtp.{NUM_LAYERS - 1}."
TARGET_LAYERS = [1, 2, 3]
_KINDS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"]


@dataclass
class TinyDspark:
    """main: the model. layers: a model of the head's decoder layers, its mixer and its norm. stored: all of the head's
    tensors by their published names, fp32."""

    main: PreTrainedModel
    layers: PreTrainedModel
    stored: dict[str, torch.Tensor]

    @torch.no_grad()
    def hidden_states(self, token_ids: list[int]) -> torch.Tensor:
        """What the head takes of each token, [T, layers H]: the mean of the streams behind each of the layers."""
        base: Any = self.main.model
        seen = dict[int, torch.Tensor]()
        hooks = [
            base.layers[number].register_forward_hook(lambda module, args, out, n=number: seen.update({n: out[0]}))
            for number in TARGET_LAYERS
        ]
        base(torch.tensor([token_ids]))
        for hook in hooks:
            hook.remove()
        return torch.cat([seen[number].mean(1) for number in TARGET_LAYERS], dim=-1)

    @torch.no_grad()
    def drafts(self, token_ids: list[int], count: int) -> list[torch.Tensor]:
        """Logits [V] of the tokens behind a sequence whose last one the main model has sampled and not computed, each
        behind the likeliest one before."""
        base: Any = self.main.model
        stored, last = self.stored, _LAST
        hidden = self.hidden_states(token_ids[:-1])
        context = self._norm(hidden @ stored["mtp.0.main_proj.weight"].T, stored["mtp.0.main_norm.weight"])
        ids = torch.tensor([token_ids[-1]] + [NOISE_ID] * (BLOCK_SIZE - 1))
        streams = base.embed_tokens(ids)[:, None].repeat(1, int(self.main.config.hc_mult), 1)
        for number in range(NUM_LAYERS):
            streams = self._layer(f"mtp.{number}.", streams, context)
        mixes, scale, bias = self._mixes(last + "hc_head_", streams)
        pre = torch.sigmoid(mixes * scale + bias) + self.main.config.hc_eps
        logits = self.main.lm_head(self._norm((pre[..., None] * streams).sum(1), stored[last + "norm.weight"]))
        found, before = list[torch.Tensor](), token_ids[-1]
        for i in range(count):
            more = stored[last + "markov_head.markov_w1.weight"][before]
            found.append(logits[i] + stored[last + "markov_head.markov_w2.weight"] @ more)
            before = int(found[-1].argmax())
        return found

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | float = 1.0) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.main.config.rms_norm_eps) * weight

    def _mixes(self, name: str, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        stored = self.stored
        return self._norm(streams.flatten(1)) @ stored[f"{name}fn"].T, stored[f"{name}scale"], stored[f"{name}base"]

    def _connected(self, name: str, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A block's input [T, H], and how its result [T, N] and the streams [T, N, N] become new streams."""
        config, count = self.main.config, streams.shape[1]
        mixes, scale, bias = self._mixes(name, streams)
        scales = torch.cat([scale[:1].repeat(count), scale[1:2].repeat(count), scale[2:].repeat(count**2)])
        pre, post, comb = (mixes * scales + bias).split([count, count, count**2], dim=-1)
        comb = comb.view(-1, count, count).softmax(-1) + config.hc_eps
        for turn in range(2 * config.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(-1 if turn % 2 else -2, keepdim=True) + config.hc_eps)
        collapsed = ((torch.sigmoid(pre) + config.hc_eps)[..., None] * streams).sum(1)
        return collapsed, 2 * torch.sigmoid(post), comb

    def _layer(self, name: str, streams: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        stored = self.stored
        for part, block in (("attn", self._attention), ("ffn", self._experts)):
            x, post, comb = self._connected(f"{name}hc_{part}_", streams)
            made = block(f"{name}{part}.", self._norm(x, stored[f"{name}{part}_norm.weight"]), context)
            streams = post[..., None] * made[:, None] + torch.einsum("tij,tih->tjh", comb, streams)
        return streams

    def _turned(self, x: torch.Tensor, positions: torch.Tensor, sign: int = 1) -> torch.Tensor:
        """[T, ..., D]: neighbours of the last columns are a complex number each, which is turned."""
        width = int(self.main.config.qk_rope_head_dim)
        exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
        angles = sign * positions.double()[:, None] * float(self.main.config.rope_theta) ** -exponents
        turns = torch.polar(torch.ones_like(angles), angles).view(len(x), *[1] * (x.dim() - 2), -1)
        pairs = torch.view_as_complex(x[..., -width:].double().unflatten(-1, (-1, 2)).contiguous())
        return torch.cat([x[..., :-width], torch.view_as_real(pairs * turns).flatten(-2).float()], dim=-1)

    def _attention(self, name: str, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Rows see the window in front of the block, whose keys are made of `context`, and all of the block."""
        stored, config = self.stored, self.main.config
        heads, known, window = int(config.num_attention_heads), len(context), int(config.sliding_window)
        here = known + torch.arange(len(x))
        q = self._norm(x @ stored[f"{name}wq_a.weight"].T, stored[f"{name}q_norm.weight"])
        q = self._turned(self._norm((q @ stored[f"{name}wq_b.weight"].T).view(len(x), heads, -1)), here)
        keys = self._norm(torch.cat([context, x]) @ stored[f"{name}wkv.weight"].T, stored[f"{name}kv_norm.weight"])
        keys = self._turned(keys, torch.arange(known + len(x)))[max(known - window, 0) :]
        scores = torch.einsum("thd,sd->ths", q, keys) * q.shape[-1] ** -0.5
        sinks = stored[f"{name}attn_sink"].expand(len(x), -1)[..., None]
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        out = self._turned(torch.einsum("ths,sd->thd", weights, keys), here, -1)
        groups = int(config.o_groups)
        narrow = stored[f"{name}wo_a.weight"].view(groups, int(config.o_lora_rank), -1)
        out = torch.einsum("tgd,grd->tgr", out.reshape(len(x), groups, -1), narrow)
        return out.flatten(1) @ stored[f"{name}wo_b.weight"].T

    def _experts(self, name: str, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        stored, config = self.stored, self.main.config
        scores = functional.softplus(x @ stored[f"{name}gate.weight"].T).sqrt()
        chosen = (scores + stored[f"{name}gate.bias"]).topk(int(config.num_experts_per_tok)).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * config.routed_scaling_factor
        out = self._mlp(f"{name}shared_experts.", x)
        for row, (ids, shares) in enumerate(zip(chosen.tolist(), weights, strict=True)):
            for expert, share in zip(ids, shares, strict=True):
                out[row] += share * self._mlp(f"{name}experts.{expert}.", x[row])
        return out

    def _mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        stored, limit = self.stored, float(self.main.config.swiglu_limit)
        gate = (x @ stored[f"{name}w1.weight"].T).clamp(max=limit)
        up = (x @ stored[f"{name}w3.weight"].T).clamp(-limit, limit)
        return (functional.silu(gate) * up) @ stored[f"{name}w2.weight"].T


def tiny_dspark(hidden: int = 64) -> TinyDspark:
    """A model of every kind of layer and its head, of random weights."""
    values: dict[str, Any] = {"hidden": hidden}
    main = tiny_model("deepseek_v4", 5, layers=len(_KINDS), layer_types=_KINDS, **values)
    own = {"layer_types": _KINDS[:1] * NUM_LAYERS, "mlp_layer_types": ["moe"] * NUM_LAYERS}
    layers = tiny_model("deepseek_v4", 11, layers=NUM_LAYERS, **values, **own)
    return TinyDspark(main, layers, _of_layers(layers, None) | _beside_layers(hidden))


def _of_layers(layers: PreTrainedModel, block: tuple[int, int] | None) -> dict[str, torch.Tensor]:
    """The tensors of a head whose decoder layers, mixer and norm are those of a model."""
    found = dict[str, torch.Tensor]()
    for name, tensor in published_tensors(layers, block).items():
        if name not in ("embed.weight", "head.weight"):
            is_inside = name.startswith("layers.")
            found[f"mtp.{name.removeprefix('layers.')}" if is_inside else f"{_LAST}{name}"] = tensor
    return found


def _beside_layers(size: int) -> dict[str, torch.Tensor]:
    generator, width = torch.Generator().manual_seed(7), len(TARGET_LAYERS) * size

    def random(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    return {
        "mtp.0.main_proj.weight": random(size, width, scale=width**-0.5),
        "mtp.0.main_norm.weight": 1 + random(size, scale=0.1),
        f"{_LAST}markov_head.markov_w1.weight": random(VOCAB_SIZE, RANK, scale=1.0),
        f"{_LAST}markov_head.markov_w2.weight": random(VOCAB_SIZE, RANK, scale=RANK**-0.5),
        f"{_LAST}confidence_head.proj.weight": random(1, size + RANK, scale=0.1),
    }


def write_dspark(tiny: TinyDspark, folder: Path, block: tuple[int, int] | None = None) -> Path:
    """Write both as one checkpoint. block: of scales, in FP8 and FP4, whose numbers both get; None: in fp32."""
    write_safetensors(tiny.main, folder)
    path = folder / "config.json"
    numbers = {"block_size": BLOCK_SIZE, "noise_token_id": NOISE_ID, "target_layer_ids": TARGET_LAYERS}
    told = {f"dspark_{name}": value for name, value in {**numbers, "markov_rank": RANK}.items()}
    path.write_text(json.dumps(json.loads(path.read_text()) | told))
    stored = published_tensors(tiny.main, block)
    if block is None:
        safetensors.torch.save_file(stored | tiny.stored, folder / "model.safetensors", {"format": "pt"})
        return folder
    coded, name = _of_layers(tiny.layers, block), "mtp.0.main_proj.weight"
    coded |= published_matrix(name, tiny.stored[name], block)
    tiny.stored |= _of_layers(tiny.layers, None)
    save_published(stored | tiny.stored | coded, folder, block)
    return folder
