"""The demo model's layer for multi-token prediction (MTP) as it is trained: one dense decoder layer on padded rows.

    x[i]    = fc [norm(embedding of token i + 1), norm(h[i])]      h[i]: behind the model's last norm
    out[i]  = norm(decoder layer(x)[i])                            the model's head makes token i + 2 of it

For a token further on, what the layer gave for the place before takes the place of h. Such a chain begins at an anchor:

    depth 1   h[a]          at a          attends to    keys of depth 1 up to a
    depth 2   out of 1      at a + 1                    these, and its own
    depth 3   out of 2      at a + 2                    these, that of depth 2, and its own

This is what an engine computes that drafts several tokens, at many anchors of a text at once. It knows nothing of data,
optimizers or files.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from model import DemoModel, Layer, Shape, rms_norm, rotate
from torch import Tensor, nn

DEEPEST = 3
_NAMES = {
    "fc": "fc",
    "embedding_norm": "pre_fc_norm_embedding",
    "hidden_norm": "pre_fc_norm_hidden",
    "q": "layers.0.self_attn.q_proj",
    "k": "layers.0.self_attn.k_proj",
    "v": "layers.0.self_attn.v_proj",
    "o": "layers.0.self_attn.o_proj",
    "q_norm": "layers.0.self_attn.q_norm",
    "k_norm": "layers.0.self_attn.k_norm",
    "attention_norm": "layers.0.input_layernorm",
    "mlp_norm": "layers.0.post_attention_layernorm",
    "gate": "layers.0.mlp.gate_proj",
    "up": "layers.0.mlp.up_proj",
    "down": "layers.0.mlp.down_proj",
    "norm": "norm",
}
"""Parameters, by what a checkpoint of Qwen3-Next or Qwen3.5 calls them, behind `mtp.`."""


def hidden_states(model: DemoModel, tokens: Tensor) -> Tensor:
    """What the model has behind its last norm, `[B, T, H]`, of rows of their own `tokens [B, T]`, padded at the end."""
    rows, length = tokens.shape
    s, eps = model.shape, model.shape.rms_norm_eps
    cos, sin = model.cos[:length, None], model.sin[:length, None]
    x = F.embedding(tokens, model.embed)
    for layer in model.layers:
        normed = rms_norm(x, layer.attention_norm, eps)
        q = rms_norm(F.linear(normed, layer.q).view(rows, length, -1, s.head_dim), layer.q_norm, eps)
        k = rms_norm(F.linear(normed, layer.k).view(rows, length, -1, s.head_dim), layer.k_norm, eps)
        v = F.linear(normed, layer.v).view(rows, length, -1, s.head_dim)
        q, k, v = (part.transpose(1, 2) for part in (rotate(q, cos, sin).to(v), rotate(k, cos, sin).to(v), v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + F.linear(out.transpose(1, 2).flatten(2), layer.o)
        x = x + _experts(layer, rms_norm(x, layer.moe_norm, eps).flatten(0, 1)).view_as(x)
    return rms_norm(x, model.norm, eps)


def _experts(layer: Layer, x: Tensor) -> Tensor:
    """As `Layer.moe`, but for each expert with its own tokens alone, which on a CPU is a quarter of the work."""
    top, chosen = F.linear(x, layer.router).float().softmax(-1).topk(layer.shape.num_experts_per_tok, dim=-1)
    shares, out = top / top.sum(-1, keepdim=True), torch.zeros_like(x, dtype=torch.float32)
    for expert in range(layer.shape.num_experts):
        at, place = (chosen == expert).nonzero(as_tuple=True)
        inner = F.silu(F.linear(x[at], layer.gate[expert])) * F.linear(x[at], layer.up[expert])
        out.index_add_(0, at, F.linear(inner, layer.down[expert]).float() * shares[at, place, None])
    return out


class MtpLayer(nn.Module):
    """One decoder layer with a dense block of `intermediate_size`, and what makes its input."""

    def __init__(self, shape: Shape, model: DemoModel):
        """Start as the model's last layer that lets `h` through, so that little is left to learn."""
        super().__init__()
        self.shape, size = shape, shape.hidden_size
        inner, last = 2 * shape.moe_intermediate_size, model.layers[-1]

        def copied(parameter: Tensor) -> nn.Parameter:
            return nn.Parameter(parameter.detach().clone().float())

        self.fc = nn.Parameter(torch.cat([0.1 * torch.randn(size, size) * size**-0.5, torch.eye(size)], dim=1))
        self.embedding_norm, self.hidden_norm = nn.Parameter(torch.ones(size)), nn.Parameter(torch.ones(size))
        for name in ("q", "k", "v", "o", "q_norm", "k_norm", "attention_norm"):
            setattr(self, name, copied(getattr(last, name)))
        self.mlp_norm, self.norm = copied(last.moe_norm), copied(model.norm)
        self.gate = nn.Parameter(torch.randn(inner, size) * 0.5 * size**-0.5)
        self.up = nn.Parameter(torch.randn(inner, size) * 0.5 * size**-0.5)
        self.down = nn.Parameter(torch.zeros(size, inner))

    def matrices(self) -> list[nn.Parameter]:
        """The parameters that are multiplied with."""
        return [parameter for parameter in self.parameters() if parameter.ndim == 2]

    def forward(self, embeddings: Tensor, hidden: Tensor, anchors: Tensor, depth: int = DEEPEST) -> list[Tensor]:
        """What it gives at depths 1 .. `depth`, `[B, A, H]` each, of chains that begin at `anchors [B, A]`.

        embeddings, `hidden [B, T, H]`: of tokens 1 .. T, and `h` of tokens 0 .. T - 1.
        """
        eps, length = self.shape.rms_norm_eps, embeddings.shape[1]
        embedded = rms_norm(embeddings, self.embedding_norm, eps)
        x = F.linear(torch.cat([embedded, rms_norm(hidden, self.hidden_norm, eps)], dim=-1), self.fc)
        places, rows = torch.arange(length).expand(len(x), -1), torch.arange(len(x))[:, None]
        keys, values = self._keys(x, places)
        is_seen = (places[:, None] <= anchors[:, :, None])[:, None].repeat(1, 1, self._group, 1)
        chain, outs, x = list[tuple[Tensor, Tensor]](), list[Tensor](), x[rows, anchors]
        for step in range(depth):
            at = (anchors + step).clamp(max=length - 1)
            if step:
                normed = rms_norm(outs[-1], self.hidden_norm, eps)
                x = F.linear(torch.cat([embedded[rows, at], normed], dim=-1), self.fc)
                chain.append(self._keys(x, at))
            x = x + self._attention(x, at, keys, values, chain, is_seen)
            normed = rms_norm(x, self.mlp_norm, eps)
            x = x + F.linear(F.silu(F.linear(normed, self.gate)) * F.linear(normed, self.up), self.down)
            outs.append(rms_norm(x, self.norm, eps))
        return outs

    @property
    def _group(self) -> int:
        return self.shape.num_attention_heads // self.shape.num_key_value_heads

    def _keys(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of `x [B, N, H]` at `places [B, N]`, `[B, kv heads, N, head_dim]` each."""
        s, normed = self.shape, rms_norm(x, self.attention_norm, self.shape.rms_norm_eps)
        k = F.linear(normed, self.k).unflatten(-1, (-1, s.head_dim))
        v = F.linear(normed, self.v).unflatten(-1, (-1, s.head_dim))
        k = rotate(rms_norm(k, self.k_norm, s.rms_norm_eps), *self._rotation(places)).to(v)
        return k.transpose(1, 2), v.transpose(1, 2)

    def _attention(
        self,
        x: Tensor,
        places: Tensor,
        keys: Tensor,
        values: Tensor,
        chain: list[tuple[Tensor, Tensor]],
        is_seen: Tensor,
    ) -> Tensor:
        """Attention of `x [B, A, H]` to the keys of depth 1 that `is_seen [B, 1, group * A, T]`, and to those of its
        own chain, of which each has one at every depth."""
        s, count = self.shape, x.shape[1]
        normed = rms_norm(x, self.attention_norm, s.rms_norm_eps)
        q = F.linear(normed, self.q).unflatten(-1, (-1, s.head_dim))
        q = rotate(rms_norm(q, self.q_norm, s.rms_norm_eps), *self._rotation(places)).to(keys) * s.head_dim**-0.5
        q = q.unflatten(2, (-1, self._group)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, kv heads, group * A, head_dim]
        scores = [(q @ keys.mT).masked_fill(~is_seen, -torch.inf)]
        scores += [(q * k.repeat(1, 1, self._group, 1)).sum(-1, keepdim=True) for k, _ in chain]
        weights = torch.cat(scores, dim=-1).float().softmax(-1).to(values)
        out = weights[..., : keys.shape[2]] @ values
        for step, (_, v) in enumerate(chain):
            out = out + weights[..., keys.shape[2] + step, None] * v.repeat(1, 1, self._group, 1)
        out = out.unflatten(2, (self._group, count)).permute(0, 3, 1, 2, 4).flatten(2)
        return F.linear(out, self.o)

    def _rotation(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, `[B, N, 1, head_dim / 2]`."""
        half = torch.arange(0, self.shape.head_dim, 2).float() / self.shape.head_dim
        angles = (places[..., None] * self.shape.rope_theta**-half)[:, :, None]
        return angles.cos(), angles.sin()

    @torch.no_grad()
    def hf_state(self) -> dict[str, Tensor]:
        """The weights under the names of a checkpoint, BF16."""
        state = {f"mtp.{name}.weight": getattr(self, own).detach() for own, name in _NAMES.items()}
        return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in state.items()}

    @torch.no_grad()
    def load_hf_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of `hf_state`."""
        for own, name in _NAMES.items():
            getattr(self, own).copy_(state[f"mtp.{name}.weight"])
