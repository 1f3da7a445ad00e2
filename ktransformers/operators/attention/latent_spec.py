"""Numbers and flags of a module of latent attention beside its projections, read from the module itself.

Families differ in little: how they rotate, what they multiply queries and latents with, and whether heads are gated.
Knows no family by name; what it reads wrongly differs from transformers' result, which loading finds out
(engine/verify/self_check.py) for families that no test covers.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from ktransformers.errors import UnsupportedError
from ktransformers.operators.recognize.temperature import QueryTemperature

__all__ = ["Gate", "LatentSpec", "masks_positions"]

_NEEDED = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_heads", "scaling")


class Gate(Enum):
    """Factors of the heads' results: sigmoids of the columns of a projection, whose name is the value."""

    NONE = ""
    HEADS = "g_proj"
    """A column for each head."""
    ELEMENTS = "gate_proj"
    """A column for each element of each head."""
    JOINT = "q_gate_proj"
    """The same; the projection makes queries too, of the compressed query with its norm and without."""

    @classmethod
    def of(cls, module: nn.Module, key: str) -> Gate:
        """Read the gate of an attention module. Raises UnsupportedError for one of another shape, and for several."""
        sized: Any = module
        num_heads, width = int(sized.num_heads), int(sized.num_heads) * int(sized.v_head_dim)
        made = {gate: getattr(module, gate.value) for gate in cls if getattr(module, gate.value, None) is not None}
        if cls.HEADS in made and getattr(made[cls.HEADS], "out_features", None) != num_heads:
            raise UnsupportedError(f"{key}: its gate has not one column for each of {num_heads} heads")
        if cls.ELEMENTS in made and getattr(made[cls.ELEMENTS], "out_features", None) != width:
            del made[cls.ELEMENTS]  # a projection of something else
        if len(made) > 1:
            names = " and ".join(gate.value for gate in made)
            raise UnsupportedError(f"{key}: its heads have several gates, {names}; one is supported")
        return next(iter(made), cls.NONE)


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Numbers and flags of latent attention. rank, nope_dim, rope_dim, v_dim: of the latent, and of a head's key
    without and with rotation and its value.

    scale: of scores, the module's scale of its queries included. latent_scale: of latents, behind their norm.
    has_rotation: False where the rope_dim columns stay as they are. rotates_halves: they are always paired with those
    half a head away; else as the config says. gate: what the heads' results are multiplied with. has_sinks: a score of
    each head that takes part in softmax, and brings no value. window: most positions that a row sees, 0 for all.
    has_rope_norm: whether the shared key is normalized before it is rotated, by k_rope_only_layernorm. temperature: how
    queries grow with their positions. hands_selection: whether the module gives and takes what its indexer chose.
    """

    rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    num_heads: int
    scale: float
    latent_scale: float = 1.0
    has_rotation: bool = True
    rotates_halves: bool = False
    gate: Gate = Gate.NONE
    has_sinks: bool = False
    has_rope_norm: bool = False
    window: int = 0
    temperature: QueryTemperature | None = None
    hands_selection: bool = False

    @classmethod
    def of(cls, module: nn.Module, key: str) -> LatentSpec:
        """Read the spec of an attention module of transformers. Raises UnsupportedError for one that is no latent
        attention.
        """
        missing = [name for name in _NEEDED if getattr(module, name, None) is None]
        if missing:
            raise UnsupportedError(f"KMLAAttention cannot replace {key} ({type(module).__name__}): no {missing[0]}")
        any_module: Any = module
        takes = inspect.signature(module.forward).parameters
        return cls(
            rank=int(any_module.kv_lora_rank),
            nope_dim=int(any_module.qk_nope_head_dim),
            rope_dim=int(any_module.qk_rope_head_dim),
            v_dim=int(any_module.v_head_dim),
            num_heads=int(any_module.num_heads),
            scale=float(any_module.scaling) * _lora_scale(module, "q"),
            latent_scale=_lora_scale(module, "kv"),
            has_rotation="position_embeddings" in takes,
            rotates_halves=_rotates_halves(module),
            gate=Gate.of(module, key),
            has_sinks=isinstance(getattr(module, "sinks", None), nn.Parameter),
            has_rope_norm=getattr(module, "k_rope_only_layernorm", None) is not None,
            window=int(getattr(module, "sliding_window", None) or 0),
            temperature=_temperature(module) if "position_ids" in takes else None,
            hands_selection="prev_topk_indices" in takes,
        )

    @property
    def head_dim(self) -> int:
        """Columns of a query head before absorption."""
        return self.nope_dim + self.rope_dim


def _lora_scale(module: nn.Module, of: str) -> float:
    """What compressed queries or latents are multiplied with. It changes no indexer's choice: all scores grow alike."""
    return float(getattr(module, f"mla_scale_{of}_lora", getattr(module, f"{of}_lora_scale", 1.0)))


def _rotates_halves(module: nn.Module) -> bool:
    """By the function that its forward asks for: there are two in transformers, and some modules know both.

    What families call apply_rotary_pos_emb may turn neighbours all the same: a quarter turn of one column says so.
    """
    forward = inspect.unwrap(type(module).forward)
    names = forward.__code__.co_names
    if "apply_rotary_pos_emb" not in names or "apply_rotary_pos_emb_interleave" in names:
        return False
    turn = forward.__globals__["apply_rotary_pos_emb"]
    column, none = torch.eye(4)[0].view(1, 1, 1, 4), torch.zeros(1, 1, 4)
    return int(turn(column, column, none, none + 1)[0].abs().argmax()) == 2


def _temperature(module: nn.Module) -> QueryTemperature | None:
    rope = getattr(getattr(module, "config", None), "rope_parameters", None)
    if not isinstance(rope, Mapping) or not rope.get("llama_4_scaling_beta"):
        return None
    return QueryTemperature(float(rope["llama_4_scaling_beta"]), int(rope["original_max_position_embeddings"]))


def masks_positions(mask: torch.Tensor | None) -> bool:
    """Return whether a mask says more than which rows [1, T] are padding, of which a step has none."""
    return mask is not None and not (mask.dim() == 2 and mask.dtype is torch.bool)
