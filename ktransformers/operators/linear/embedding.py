"""Token embedding on a table that stays in the type of the file: only the rows asked for are dequantized."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn
from typing_extensions import override

from ktransformers.core import Phase
from ktransformers.errors import UnsupportedError
from ktransformers.kernels import cpu
from ktransformers.kernels.types import RawTensor
from ktransformers.operators.base import (
    Operator,
    OperatorConfig,
    Placement,
    Requirements,
    expect_shape,
)
from ktransformers.operators.recognize.embedding import recognize_embedding
from ktransformers.operators.wrapper import DenseState
from ktransformers.weights.source import WeightSource

__all__ = ["KEmbedding"]


class KEmbedding(Operator):
    """Operator of `nn.Embedding`: int64 [...] in, [..., H] out on its device. Subclasses of nn.Embedding that do more
    than to multiply what they look up run their own forward.

    On a GPU the table is dense.
    """

    OPS: ClassVar[dict[str, str]] = {
        "KEmbeddingRows": "dequantizes the rows asked for",
        "KEmbeddingTorch": "the module's own forward on a dense table",
    }

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        if not isinstance(module, nn.Embedding):
            raise UnsupportedError(f"KEmbedding cannot replace {key}: {type(module).__name__} is not nn.Embedding")
        self.num_embeddings, self.embedding_dim = module.num_embeddings, module.embedding_dim
        self.scale = recognize_embedding(module)
        # A subclass may normalize what it looks up, so its own forward has to run.
        self.inner = module if self.scale is None or self.device.is_gpu else None
        # A placeholder without memory, on the device where ids are wanted: some models bring them to the table's.
        self.weight = torch.empty(1).expand(self.num_embeddings, self.embedding_dim)
        self._table: RawTensor | None = None

    @override
    def op(self, phase: Phase) -> str:
        return "KEmbeddingRows" if self.inner is None else "KEmbeddingTorch"

    @override
    def requirements(self, source: WeightSource) -> Requirements:
        if self.inner is not None:
            return DenseState(self.inner, self.key, self.device).requirements(source)
        needs, name = Requirements(), f"{self.key}.weight"
        needs.add(self.device.name, expect_shape(source.find(name), name, (self.num_embeddings, self.embedding_dim)))
        return needs

    @override
    def load(self, source: WeightSource) -> None:
        self.requirements(source)
        if self.inner is not None:
            DenseState(self.inner, self.key, self.device).load(source)
        else:
            self._table = self.kept(source.tensor(f"{self.key}.weight"))

    @override
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.inner is not None:
            return self.inner(self.device.move(input_ids))  # type: ignore[no-any-return]
        return self.look_up(input_ids.reshape(-1)).view(*input_ids.shape, self.embedding_dim)

    @property
    def is_in_rows(self) -> bool:
        """Whether `look_up` can be used: the table stays in the type of the file."""
        return self.inner is None

    def look_up(self, ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Look up int64 [T] on the CPU: fp32 [T, H], written to `out` if that is given."""
        assert self._table is not None, f"{self.key} is not loaded"
        rows = cpu.dequantize_rows(self._table, ids, self.config.require_pool(), out)
        if self.scale is not None and self.scale != 1.0:
            rows *= self.scale
        return rows
