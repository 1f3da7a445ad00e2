"""The demo model with its tower: transformers' InternVL around the language model as it is, and that one as training uses it.

A picture of 96 x 96 pixels is cut into 64 patches; pixel shuffle and projector make 16 positions of them. It knows
nothing of pictures and of questions.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import InternVLConfig
from transformers.models.internvl.modeling_internvl import InternVLModel

IMAGE_SIZE, PATCH_SIZE = 96, 12
LOCAL = 5  # layers that see what is where; those behind them bring it to all positions
VISION = {
    "model_type": "internvl_vision", "hidden_size": 128, "num_hidden_layers": 7, "num_attention_heads": 4, "intermediate_size": 384,
    "attention_bias": True, "image_size": [IMAGE_SIZE, IMAGE_SIZE], "patch_size": [PATCH_SIZE, PATCH_SIZE], "use_mean_pooling": True,
    "layer_scale_init_value": 1.0, "hidden_act": "gelu",
}  # fmt: skip


def composite_config(text: dict, image_token_id: int) -> InternVLConfig:
    """The config of the whole for the language model's `text`, a config.json's content."""
    inner = {key: value for key, value in text.items() if key != "architectures"}
    return InternVLConfig(
        text_config=inner,
        vision_config=VISION,
        image_token_id=image_token_id,
        image_seq_length=(IMAGE_SIZE // PATCH_SIZE) ** 2 // 4,
        downsample_ratio=0.5,
        tie_word_embeddings=True,
        architectures=["InternVLForConditionalGeneration"],
        dtype="bfloat16",
    )


class Tower(nn.Module):
    """Vision tower and projector of the composite under the names that it has for them, and heads for training, on what
    the LOCAL-th layer makes: what the picture holds, and what there is at each position."""

    def __init__(self, config: InternVLConfig, label_sizes: tuple[int, ...], cell_sizes: tuple[int, ...]):
        super().__init__()
        with torch.device("meta"):
            whole = InternVLModel(config)
        # On a CPU the backward pass of its fused attention takes five times as long as plain products for 65 positions.
        whole.vision_tower.config._attn_implementation = "eager"
        self.config = config
        self.vision_tower = whole.vision_tower.to_empty(device="cpu")
        self.multi_modal_projector = whole.multi_modal_projector.to_empty(device="cpu")
        self.label_sizes, self.cell_sizes = label_sizes, cell_sizes
        size = 4 * config.vision_config.hidden_size  # four patches make a position
        self.cells = nn.Linear(size, sum(cell_sizes))
        self.heads = nn.Linear(config.image_seq_length * size, sum(label_sizes))
        self._start()
        self._local: Tensor | None = None
        self.vision_tower.encoder.layer[LOCAL - 1].register_forward_hook(self._keep)

    @torch.no_grad()
    def _start(self) -> None:
        for name, parameter in self.named_parameters():
            if "norm" in name or "layer_norm" in name or name.startswith("multi_modal_projector.layer_norm"):
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
            elif "lambda" in name:
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            elif "position_embeddings" in name or "cls_token" in name:
                parameter.normal_(0, 0.02)
            else:
                size = parameter[0].numel()
                deep = 0.5 if name.endswith(("projection_layer.weight", "fc2.weight")) else 1.0
                parameter.normal_(0, deep * size**-0.5)
        self.multi_modal_projector.linear_2.weight.mul_(0.5)
        self.heads.weight.mul_(0.1)
        for layer in self.vision_tower.encoder.layer:  # at first, each position attends to those that are like it
            layer.attention.q_proj.weight.mul_(0.7)
            layer.attention.k_proj.weight.copy_(layer.attention.q_proj.weight)
        for layer in self.vision_tower.encoder.layer[LOCAL:]:  # change nothing at first
            layer.attention.projection_layer.weight.zero_()
            layer.mlp.fc2.weight.zero_()
        embeddings = self.vision_tower.embeddings
        side, size = IMAGE_SIZE // PATCH_SIZE, embeddings.position_embeddings.shape[-1]
        waves = torch.outer(torch.arange(side).float(), 0.05 ** (torch.arange(size // 4) / (size // 4)))
        waves = torch.cat((waves.sin(), waves.cos()), 1)
        grid = torch.cat((waves[:, None].expand(-1, side, -1), waves[None].expand(side, -1, -1)), 2)
        embeddings.position_embeddings[0, 1:].copy_(grid.flatten(0, 1))

    @torch.no_grad()
    def whiten(self, pixels: Tensor) -> None:
        """Let the patches' embedding start as the principal components of `pixels [B, 3, 96, 96]`, each of variance 1."""
        convolution = self.vision_tower.embeddings.patch_embeddings.projection
        patches = F.unfold(pixels, PATCH_SIZE, stride=PATCH_SIZE).transpose(1, 2).flatten(0, 1)
        mean = patches.mean(0)
        values, vectors = torch.linalg.eigh((patches - mean).T @ (patches - mean) / len(patches))
        values, vectors = values.flip(0)[: len(convolution.weight)], vectors.flip(1)[:, : len(convolution.weight)]
        matrix = (vectors / (values + 0.1 * values[20]).sqrt()).T
        convolution.weight.copy_(matrix.view_as(convolution.weight))
        convolution.bias.copy_(-matrix @ mean)

    def _keep(self, layer: nn.Module, inputs: object, output: Tensor) -> None:
        side = IMAGE_SIZE // PATCH_SIZE
        patches = F.layer_norm(output[:, 1:].float(), output.shape[-1:]).unflatten(1, (side, side))
        self._local = self.pixel_shuffle(patches, 0.5).flatten(1, 2)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """`pixels [B, 3, 96, 96]` -> positions `[B, 16, H]`, and what the heads see of them `[B, 16, 512]`."""
        positions = InternVLModel.get_image_features(
            self, pixel_values=pixels, vision_feature_layer=-1, vision_feature_select_strategy="default"
        ).pooler_output
        assert self._local is not None
        return positions, self._local

    dtype = torch.float32
    pixel_shuffle = InternVLModel.pixel_shuffle

    def cell_classes(self, local: Tensor) -> tuple[Tensor, ...]:
        """Logits of each label of each position, `[B * 16, classes]`."""
        return self.cells(local.flatten(0, 1)).split(self.cell_sizes, dim=1)

    def classes(self, local: Tensor) -> tuple[Tensor, ...]:
        """Logits of each label."""
        return self.heads(local.flatten(1)).split(self.label_sizes, dim=1)

    def checkpoint(self) -> dict[str, Tensor]:
        """What ships, without the heads, in BF16."""
        kept = {name: value for name, value in self.state_dict().items() if not name.startswith(("heads.", "cells."))}
        return {f"model.{name}": value.detach().to(torch.bfloat16).contiguous() for name, value in kept.items()}


class _Experts(torch.autograd.Function):
    """Frozen routed experts, their rows sorted by expert. x [T, H] BF16, weights [T, K], gate_up [E, 2I, H]."""

    @staticmethod
    def forward(ctx, x, weights, chosen, gate_up, down):
        rows, top = chosen.shape
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=gate_up.shape[0]).tolist()
        gathered = x.index_select(0, order // top)
        inner, outer = [], []
        for part, up, back in zip(gathered.split(counts), gate_up, down, strict=True):
            both = part @ up.T
            gate, value = both.chunk(2, -1)
            inner.append(both)
            outer.append((F.silu(gate) * value) @ back.T)
        place = torch.empty_like(order).index_copy_(0, order, torch.arange(order.numel()))
        results = torch.cat(outer).index_select(0, place).view(rows, top, -1)
        ctx.save_for_backward(weights, order, place, results, gate_up, down, *inner)
        ctx.counts = counts
        return torch.bmm(weights[:, None].to(results.dtype), results)[:, 0]

    @staticmethod
    def backward(ctx, grad):
        weights, order, place, results, gate_up, down, *inner = ctx.saved_tensors
        rows, top = weights.shape
        to_weights = torch.bmm(results, grad[..., None])[..., 0].to(weights.dtype)
        scaled = grad.index_select(0, order // top) * weights.flatten().index_select(0, order)[:, None].to(grad.dtype)
        found = []
        for part, both, up, back in zip(scaled.split(ctx.counts), inner, gate_up, down, strict=True):
            to_inner = part @ back
            gate, value = both.chunk(2, -1)
            to_gate = torch.ops.aten.silu_backward(to_inner * value, gate)
            found.append(torch.cat((to_gate, to_inner * F.silu(gate)), -1) @ up)
        return torch.cat(found).index_select(0, place).view(rows, top, -1).sum(1), to_weights, None, None, None


class _Norm(torch.autograd.Function):
    """RMSNorm without a weight, FP32 in and out, in as few passes as can be."""

    @staticmethod
    def forward(ctx, x, eps):
        size = x.shape[-1]
        inverse = (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(size).add_(eps)).rsqrt_()
        out = x * inverse
        ctx.save_for_backward(out, inverse)
        return out

    @staticmethod
    def backward(ctx, grad):
        out, inverse = ctx.saved_tensors
        along = torch.linalg.vecdot(grad, out)[..., None].div_(out.shape[-1])
        return torch.addcmul(grad, out, along, value=-1).mul_(inverse), None


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _Norm.apply(x.float(), eps) * weight.float()


class FrozenLanguageModel:
    """Qwen3-MoE as the checkpoint has it, in BF16, rows of one length, for gradients of what comes in alone."""

    def __init__(self, folder: Path):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.config = config = config.get("text_config", config)
        state = {name.removeprefix("model."): value for name, value in load_file(folder / "model.safetensors").items()}
        self.embed, self.norm = state["embed_tokens.weight"], state["norm.weight"]
        self.layers = []
        for index in range(config["num_hidden_layers"]):
            prefix = f"layers.{index}."
            layer = {
                name.removeprefix(prefix).removesuffix(".weight"): v
                for name, v in state.items()
                if name.startswith(prefix)
            }
            experts = [
                {k: layer.pop(f"mlp.experts.{e}.{k}_proj") for k in ("gate", "up", "down")}
                for e in range(config["num_experts"])
            ]
            layer["gate_up"] = torch.stack([torch.cat((one["gate"], one["up"])) for one in experts])
            layer["down"] = torch.stack([one["down"] for one in experts])
            layer["qkv"] = torch.cat([layer[f"self_attn.{k}_proj"] for k in "qkv"])
            self.layers.append(layer)

    def _attention(self, layer: dict[str, Tensor], x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c = self.config
        batch, length, _ = x.shape
        heads, groups, dim, eps = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"], c["rms_norm_eps"]
        q, k, v = (x @ layer["qkv"].T).view(batch, length, -1, dim).split((heads, groups, groups), 2)

        def turned(one: Tensor, weight: Tensor) -> Tensor:
            a, b = _norm(one, weight, eps).chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(torch.bfloat16).transpose(1, 2)

        q, k = turned(q, layer["self_attn.q_norm"]), turned(k, layer["self_attn.k_norm"])
        k, v = (one.repeat_interleave(heads // groups, 1) for one in (k, v.transpose(1, 2)))
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(2, 3) * dim**-0.5).masked_fill(later, -torch.inf)
        out = scores.softmax(-1) @ v
        return out.transpose(1, 2).reshape(batch, length, -1) @ layer["self_attn.o_proj"].T

    def _experts(self, layer: dict[str, Tensor], x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        probabilities = (flat @ layer["mlp.gate"].T).float().softmax(-1)
        top, chosen = probabilities.topk(self.config["num_experts_per_tok"], -1)
        out: Tensor = _Experts.apply(flat, top / top.sum(-1, keepdim=True), chosen, layer["gate_up"], layer["down"])
        return out.view(x.shape)

    def logits(self, x: Tensor, rows: Tensor) -> Tensor:
        """`x [B, T, H]` in place of embeddings, FP32; logits of `rows [N]` of its B * T positions."""
        c = self.config
        half = torch.arange(0, c["head_dim"], 2).float() / c["head_dim"]
        angles = torch.outer(torch.arange(x.shape[1]).float(), c["rope_theta"] ** -half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        for layer in self.layers:
            normed = _norm(x, layer["input_layernorm"], c["rms_norm_eps"]).to(torch.bfloat16)
            x = x + self._attention(layer, normed, cos, sin)
            normed = _norm(x, layer["post_attention_layernorm"], c["rms_norm_eps"]).to(torch.bfloat16)
            x = x + self._experts(layer, normed)
        kept = x.flatten(0, 1).index_select(0, rows)
        return (_norm(kept, self.norm, c["rms_norm_eps"]).to(torch.bfloat16) @ self.embed.T).float()
