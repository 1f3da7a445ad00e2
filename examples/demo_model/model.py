"""The demo model as it is trained: Qwen3-MoE mathematics on packed rows, with every expert computed densely.

At this size one large matrix product over all experts, masked by the routing weights, beats gathering tokens per
expert on a GPU. Parameter names and results are those of `Qwen3MoeForCausalLM` (a test holds the logits equal).
It knows nothing of data, optimizers or files.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the model. Row lengths are multiples of 256, as K-quants require."""

    vocab_size: int = 2560
    hidden_size: int = 256
    moe_intermediate_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    num_experts: int = 16
    num_experts_per_tok: int = 4
    max_position_embeddings: int = 4096
    rope_theta: float = 100000.0
    rms_norm_eps: float = 1e-6

    def hf_config(self, eos_token_id: int, pad_token_id: int) -> dict:
        """The content of config.json."""
        sizes = asdict(self)
        theta = sizes.pop("rope_theta")
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            **sizes,
            "rope_theta": theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "intermediate_size": 2 * self.moe_intermediate_size,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "router_aux_loss_coef": 0.001,
            "output_router_logits": False,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": eos_token_id,
            "pad_token_id": pad_token_id,
            "dtype": "bfloat16",
        }


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype) * weight.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on `x [T, heads, head_dim]` with `cos`, `sin [T, 1, head_dim / 2]`."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_len: int) -> Tensor:
    """Causal attention inside each document of a packed row: `q, k, v [T, heads, head_dim]`, `cu_seqlens [N + 1]`."""
    if q.is_cuda:
        return torch.ops.aten._flash_attention_forward(
            q, k, v, cu_seqlens, cu_seqlens, max_len, max_len, 0.0, True, False
        )[0]
    rows = torch.arange(q.shape[0])
    document = torch.searchsorted(cu_seqlens[1:].contiguous(), rows, right=True)
    mask = (document[:, None] == document[None, :]) & (rows[:, None] >= rows[None, :])
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1)


class Layer(nn.Module):
    """One decoder layer: pre-norm attention with q/k norms, then the MoE block."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = s = shape
        wide, narrow = s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim

        def matrix(*size: int, zero: bool = False) -> nn.Parameter:
            return nn.Parameter(torch.zeros(size) if zero else torch.randn(size) * 0.5 * size[-1] ** -0.5)

        self.q = matrix(wide, s.hidden_size)
        self.k = matrix(narrow, s.hidden_size)
        self.v = matrix(narrow, s.hidden_size)
        self.o = matrix(s.hidden_size, wide, zero=True)
        self.q_norm = nn.Parameter(torch.ones(s.head_dim))
        self.k_norm = nn.Parameter(torch.ones(s.head_dim))
        self.attention_norm = nn.Parameter(torch.ones(s.hidden_size))
        self.moe_norm = nn.Parameter(torch.ones(s.hidden_size))
        self.router = matrix(s.num_experts, s.hidden_size)
        self.gate = matrix(s.num_experts, s.moe_intermediate_size, s.hidden_size)
        self.up = matrix(s.num_experts, s.moe_intermediate_size, s.hidden_size)
        self.down = matrix(s.num_experts, s.hidden_size, s.moe_intermediate_size, zero=True)

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor) -> Tensor:
        s, rows = self.shape, x.shape[0]
        q = rms_norm(F.linear(x, self.q).view(rows, -1, s.head_dim), self.q_norm, s.rms_norm_eps)
        k = rms_norm(F.linear(x, self.k).view(rows, -1, s.head_dim), self.k_norm, s.rms_norm_eps)
        v = F.linear(x, self.v).view(rows, -1, s.head_dim)
        group = s.num_attention_heads // s.num_key_value_heads
        k, v = (t.repeat_interleave(group, dim=1) for t in (rotate(k, cos, sin), v))
        out = packed_attention(rotate(q, cos, sin), k, v, cu_seqlens, s.max_position_embeddings)
        return F.linear(out.reshape(rows, -1), self.o)

    def moe(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The block's output and its load-balancing loss (Switch Transformers, eq. 4, over all chosen experts)."""
        s, rows = self.shape, x.shape[0]
        logits = F.linear(x, self.router)
        probabilities = logits.float().softmax(-1)
        top, chosen = probabilities.topk(s.num_experts_per_tok, dim=-1)
        weights = torch.zeros_like(probabilities).scatter(1, chosen, top / top.sum(-1, keepdim=True))
        gate = F.linear(x, self.gate.flatten(0, 1)).view(rows, s.num_experts, -1)
        up = F.linear(x, self.up.flatten(0, 1)).view(rows, s.num_experts, -1)
        hidden = F.silu(gate) * up * weights[:, :, None].to(x.dtype)
        out = F.linear(hidden.flatten(1), self.down.permute(1, 0, 2).flatten(1))
        share = (weights > 0).float().mean(0)
        return out, s.num_experts * (share * probabilities.mean(0)).sum()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        eps = self.shape.rms_norm_eps
        x = x + self.attention(rms_norm(x, self.attention_norm, eps), cos, sin, cu_seqlens)
        out, balance = self.moe(rms_norm(x, self.moe_norm, eps))
        return x + out, balance


class DemoModel(nn.Module):
    """Packed rows in, logits out."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.embed = nn.Parameter(torch.randn(shape.vocab_size, shape.hidden_size) * 0.02)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden_size))
        half = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        angles = torch.outer(torch.arange(shape.max_position_embeddings).float(), shape.rope_theta**-half)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """`tokens, positions [T]`, `cu_seqlens [docs + 1]` int32 -> logits `[T, V]` and the mean balance loss."""
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        x = F.embedding(tokens, self.embed)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.bfloat16)
        balance = x.new_zeros((), dtype=torch.float32)
        for layer in self.layers:
            x, extra = layer(x, cos, sin, cu_seqlens)
            balance = balance + extra
        logits = F.linear(rms_norm(x, self.norm, self.shape.rms_norm_eps), self.embed)
        return logits, balance / len(self.layers)

    @torch.no_grad()
    def hf_state(self) -> dict[str, Tensor]:
        """The weights under the names of a Qwen3-MoE checkpoint (one tensor per expert), BF16, on the CPU."""
        out = {"model.embed_tokens.weight": self.embed, "model.norm.weight": self.norm}
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            for name in ("q", "k", "v", "o"):
                out[f"{prefix}self_attn.{name}_proj.weight"] = getattr(layer, name)
            for name in ("q_norm", "k_norm"):
                out[f"{prefix}self_attn.{name}.weight"] = getattr(layer, name)
            out[f"{prefix}input_layernorm.weight"] = layer.attention_norm
            out[f"{prefix}post_attention_layernorm.weight"] = layer.moe_norm
            out[f"{prefix}mlp.gate.weight"] = layer.router
            for expert in range(self.shape.num_experts):
                for name in ("gate", "up", "down"):
                    out[f"{prefix}mlp.experts.{expert}.{name}_proj.weight"] = getattr(layer, name)[expert]
        return {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in out.items()}

    @torch.no_grad()
    def load_hf_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of `hf_state`."""
        self.embed.copy_(state["model.embed_tokens.weight"])
        self.norm.copy_(state["model.norm.weight"])
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            for name in ("q", "k", "v", "o"):
                getattr(layer, name).copy_(state[f"{prefix}self_attn.{name}_proj.weight"])
            for name in ("q_norm", "k_norm"):
                getattr(layer, name).copy_(state[f"{prefix}self_attn.{name}.weight"])
            layer.attention_norm.copy_(state[f"{prefix}input_layernorm.weight"])
            layer.moe_norm.copy_(state[f"{prefix}post_attention_layernorm.weight"])
            layer.router.copy_(state[f"{prefix}mlp.gate.weight"])
            for expert in range(self.shape.num_experts):
                for name in ("gate", "up", "down"):
                    getattr(layer, name)[expert].copy_(state[f"{prefix}mlp.experts.{expert}.{name}_proj.weight"])


@torch.no_grad()
def fake_quant_q4(weight: Tensor) -> Tensor:
    """`weight [..., 256 n]` rounded as Q4_K stores it: 4-bit values, 6-bit scales and minima per 32, two fp16 per 256.

    Plain min/max scales (no search), so training against it is a little harder than the exported file.
    """
    blocks = weight.reshape(-1, 8, 32)
    low = blocks.amin(-1).clamp(max=0.0)
    high = blocks.amax(-1).clamp(min=0.0)
    scale, minimum = (high - low) / 15, -low

    def six_bits(value: Tensor) -> Tensor:
        unit = (value.amax(-1, keepdim=True) / 63).half().float().clamp(min=1e-8)
        return (value / unit).round().clamp(0, 63) * unit

    scale, minimum = six_bits(scale)[..., None], six_bits(minimum)[..., None]
    levels = ((blocks + minimum) / scale.clamp(min=1e-8)).round().clamp(0, 15)
    return (levels * scale - minimum).reshape(weight.shape)
