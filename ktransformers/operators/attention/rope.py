"""Rotary position embedding (Su et al. 2021): cosines and sines looked up in a table instead of computed per step."""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from ktransformers.core import Phase
from ktransformers.errors import UnsupportedError
from ktransformers.operators.base import OperatorConfig, OperatorRuntime, Placement
from ktransformers.operators.exact import NativeMathMode
from ktransformers.operators.wrapper import WrapperOperator

__all__ = ["KRotaryEmbedding", "ResolvedRotation", "resolve_rotations"]

logger = logging.getLogger(__name__)

STATIC_ROPE_TYPES = frozenset({"default", "linear", "yarn", "llama3", "proportional"})
"""RoPE types whose angles depend on the position alone; others ("dynamic", "longrope") look at the step's longest."""

TABLE_STEP = 4096  # positions by which the table grows

_ASKED_AT = 4093
"""A position at which all columns are others than at 0, those of slow angles too."""


class ResolvedRotation(nn.Module):
    """A rotary embedding whose angles depend on the longest position of a step, called as if each step had `longest`.

    Otherwise a row would depend on its neighbours and on the size of chunks, and keys that are cached could not be used
    with queries of a longer sequence. vLLM chooses once for a model's longest sequence too.
    """

    def __init__(self, inner: nn.Module, longest: int):
        super().__init__()
        self.inner, self.longest = inner, longest

    @override
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        last = position_ids.new_full((*position_ids.shape[:-1], 1), self.longest)
        angles = self.inner(x, torch.cat((position_ids, last), dim=-1), *args, **kwargs)
        if isinstance(angles, tuple):
            return tuple(part[..., :-1, :] for part in angles)
        return angles[..., :-1, :]


def _depends_on_sequence(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(isinstance(kind, str) and kind not in STATIC_ROPE_TYPES for kind in kinds)


def resolve_rotations(model: nn.Module, max_len: int) -> int:
    """Make angles depend on the position alone, for sequences of up to `max_len`; returns how many modules that
    concerns.

    Those that an operator stands in for are its own affair.
    """
    found = [
        (parent, name)
        for parent in list(model.modules())
        if not isinstance(parent, ResolvedRotation | KRotaryEmbedding)
        for name, child in parent.named_children()
        if _depends_on_sequence(child) and not isinstance(child, WrapperOperator)
    ]
    for parent, name in found:
        _log_resolved(str(getattr(parent.get_submodule(name), "rope_type", None)), max_len)
        setattr(parent, name, ResolvedRotation(parent.get_submodule(name), max_len - 1))
    return len(found)


@functools.cache
def _log_resolved(kind: str, max_len: int) -> None:
    """Once for all modules."""
    logger.info("RoPE of type %s: every step has the factors of %d positions (--cache_lens)", kind, max_len)


def _last(positions: torch.Tensor) -> int:
    """The largest position; -1 without any."""
    count = positions.numel()
    if count == 1:  # of a token of a chat; to look for the largest takes ten times as long
        return int(positions.item())
    return int(positions.max()) if count else -1


def _table_rows(needed: int) -> int:
    return (needed + TABLE_STEP - 1) // TABLE_STEP * TABLE_STEP


class KRotaryEmbedding(WrapperOperator):
    """A rotary embedding module of `transformers`: (x, position_ids [1, T]) in; what the module returns, out.

    The table is filled by the module itself, so every scaling it does is kept: one row per position of (cos, sin)
    [positions, D] or, for DeepSeek-V2, of complex [positions, D / 2]. A module that turns kinds of layers by other
    angles (layer_type) has a table for each. Positions may be time, height and width, [3, 1, T] (M-RoPE): each column
    of what the module returns is then of one of them, which is found by asking it.
    """

    KEEPS_BUFFERS: ClassVar[bool] = True  # the table is filled on the CPU
    OPS: ClassVar[dict[str, str]] = {
        "KRotaryTable": "looked up in a table that the module filled",
        "KRotaryTorch": "the module's own forward (angles depend on more than the position)",
    }

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        parameters, kinds = list(inspect.signature(module.forward).parameters), getattr(module, "rope_type", None)
        self._kinds = tuple(kinds) if isinstance(kinds, dict) else (None,)
        wanted = ["x", "position_ids", *(["layer_type"] if isinstance(kinds, dict) else [])]
        self._is_plain = parameters == wanted
        self._is_static = isinstance(kinds, str | dict) and not _depends_on_sequence(module)
        self.layer_types = [kind for kind in self._kinds if kind is not None]  # LFM3 asks its module which it knows
        self._tables: dict[str | None, tuple[torch.Tensor, ...]] = {}  # by kind of layer, where they differ
        self._axes: torch.Tensor | None = None  # int64 [D]: which of three positions a column is of, once asked

    @property
    def has_table(self) -> bool:
        """Whether the embedding's angles depend on the position alone."""
        return self._is_plain and (self._is_static or isinstance(self.inner, ResolvedRotation))

    @override
    def op(self, phase: Phase) -> str:
        return "KRotaryTable" if self._is_plain else "KRotaryTorch"

    @override
    def bind(self, runtime: OperatorRuntime) -> None:
        if _depends_on_sequence(self.inner):
            _log_resolved(str(getattr(self.inner, "rope_type", None)), runtime.max_len)
            self.inner = ResolvedRotation(self.inner, runtime.max_len - 1)
        if self.device.is_gpu:  # in a step, asking for the largest position would stop the GPU
            self._grow(torch.empty(1, 1, 1), runtime.max_len)

    def table_nbytes(self, max_len: int) -> int:
        """Return the bytes that `bind` will take on the operator's GPU: cosines and sines, fp32, of every position."""
        names = ["inv_freq" if kind is None else f"{kind}_inv_freq" for kind in self._kinds]
        found = [getattr(self.inner, name, None) for name in names]
        if not self.device.is_gpu or not self._is_plain:
            return 0
        columns = sum(2 * frequencies.shape[-1] for frequencies in found if isinstance(frequencies, torch.Tensor))
        return _table_rows(max_len) * columns * 2 * 4

    def forget(self) -> None:
        """Free the table's memory; the next step fills it as far as it needs."""
        if not self.device.is_gpu:
            self._tables = {}

    def _grow(self, x: torch.Tensor, needed: int) -> None:
        if not self.has_table:
            return
        size = _table_rows(needed)
        if isinstance(self.inner, ResolvedRotation):  # a position beyond would become the longest of the step
            size = self.inner.longest + 1
        positions = torch.arange(size, device=x.device)[None]
        if hasattr(self.inner, "mrope_section"):  # not all versions of transformers take one position for the three
            positions = positions.expand(3, 1, -1)
        for kind in self._kinds:
            rows = self._angles(x[:1, :1], positions, **({} if kind is None else {"layer_type": kind}))
            parts = rows if isinstance(rows, tuple) else (rows,)
            self._tables[kind] = tuple(self.device.move(part[0]) for part in parts)

    @override
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None, **kwargs: Any) -> Any:
        is_known = self.has_table and layer_type in self._kinds and not kwargs
        if not is_known or (x.dtype is not torch.float32 and not self.device.is_gpu):
            asked = kwargs if layer_type is None else {**kwargs, "layer_type": layer_type}
            return self._inner_forward(x, position_ids, **asked)
        if position_ids.dim() == 3 and position_ids.stride(0) == 0:  # one position, expanded by the model: text
            position_ids = position_ids[0]
        if not self.device.is_gpu:
            needed = _last(position_ids) + 1
            if not self._tables or self._tables[layer_type][0].shape[0] < needed:
                self._grow(x, needed)
        at = self.device.move(position_ids)
        if at.dim() == 3:
            axes = self._probed_axes()
            at = at[axes].movedim(0, -1).contiguous()  # of each column
            parts = tuple(part[at, torch.arange(len(axes), device=at.device)] for part in self._tables[layer_type])
        else:
            parts = tuple(part[at] for part in self._tables[layer_type])
        parts = tuple(part.to(position_ids.device) for part in parts)
        return parts if len(parts) > 1 else parts[0]

    def _probed_axes(self) -> torch.Tensor:
        """Which of three positions each column of the module's angles is of: the one that changes it. Raises
        UnsupportedError where several do, or the module takes one position alone."""
        if self._axes is None:
            at = torch.zeros(3, 1, 4, dtype=torch.int64)
            at[[0, 1, 2], 0, [0, 1, 2]] = _ASKED_AT
            angles = self._angles(torch.empty(1, 1, 1), at)
            parts = torch.stack(angles if isinstance(angles, tuple) else (angles,))
            changed = (parts[..., :3, :] != parts[..., 3:, :]).flatten(0, -3).any(0)  # [3, D]
            if parts.dim() != 4 or parts.shape[1] != 1 or bool((changed.sum(0) > 1).any()):
                raise UnsupportedError(f"{self.key} ({type(self.inner).__name__}) mixes time, height and width")
            self._axes = self.device.move(changed.int().argmax(0))
        return self._axes

    def _inner_forward(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, on the CPU where its buffers are. Angles of one step are few."""
        angles = self._angles(x[:, :1].to("cpu", torch.float32), position_ids.cpu(), *args, **kwargs)
        if isinstance(angles, tuple):
            return tuple(part.to(position_ids.device) for part in angles)
        return angles.to(position_ids.device)

    def _angles(self, *args: Any, **kwargs: Any) -> Any:
        """What the module computes; on the CPU a position's angles do not depend on how many are computed at once."""
        if self.config.pool is None or args[0].device.type != "cpu":
            return self.inner(*args, **kwargs)
        with NativeMathMode(self.config.pool):
            return self.inner(*args, **kwargs)
