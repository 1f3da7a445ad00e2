"""A model's figures, as interfaces show them: family, sizes, quantization. Reads headers only."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import gguf
from torch import nn

from ktransformers.errors import WeightError
from ktransformers.models.facts import ModelFacts
from ktransformers.weights.gguf.file import GGUFModel

__all__ = ["ModelCard", "card_of"]


_FORK_FILE_TYPES = {
    **dict(enumerate(("Q6_0", "IQ1_BN", "IQ2_BN", "IQ2_K", "IQ3_K", "IQ4_K", "IQ5_K", "IQ6_K"), 135)),
    **dict(enumerate(("IQ4_KS", "IQ3_KL", "IQ2_KS", "IQ4_KSS", "Q8_KV", "IQ5_KS"), 145)),
    **dict(enumerate(("IQ2_KT", "IQ3_KT", "IQ4_KT", "IQ3_KS", "IQ2_KL", "IQ1_KT"), 151)),
}
"""Values of `general.file_type` beyond the `gguf` package's: those of ik_llama.cpp's llama.h."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model's figures, as interfaces show them. family: the architecture's short name. format: of the files.
    num_bytes: of the weights in them.

    num_parameters: of the model, whatever its files store them as. quantization: the file's own word, else the type of
    most of its bytes; empty when unknown. digest: 64 hexadecimal digits that change when the files do. modified:
    seconds since 1970, of the newest file. gpu_bytes: what is planned for GPUs (weights, cache, work space); 0 before
    it is loaded. pooling_type: what a GGUF says of embeddings; None: nothing. has_head: whether it generates text. The
    rest are counts; 0 for what the model has not, or does not say.
    """

    family: str = ""
    format: str = ""
    num_parameters: int = 0
    num_bytes: int = 0
    quantization: str = ""
    digest: str = "0" * 64
    modified: float = 0.0
    gpu_bytes: int = 0
    pooling_type: object = None
    num_layers: int = 0
    hidden_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    num_experts: int = 0
    num_used_experts: int = 0
    has_head: bool = True


class Described(Protocol):
    """An opened model, as far as its card tells of it. stored: bytes by type."""

    @property
    def facts(self) -> ModelFacts: ...
    @property
    def gguf(self) -> GGUFModel | None: ...
    @property
    def files(self) -> Sequence[Path]: ...
    @property
    def model(self) -> nn.Module: ...
    @property
    def stored(self) -> Mapping[str, int]: ...
    @property
    def has_head(self) -> bool: ...


def card_of(opened: Described) -> ModelCard:
    """Return the card of a model whose files are open."""
    facts, model = opened.facts, opened.gguf
    digest, modified = _prints(opened.files)
    return ModelCard(
        family=facts.model_type if model is None else model.architecture,
        format="safetensors" if model is None else "gguf",
        num_parameters=sum(parameter.numel() for parameter in opened.model.parameters()),
        num_bytes=sum(opened.stored.values()),
        quantization=_named(opened) or max(opened.stored, key=opened.stored.__getitem__, default=""),
        digest=digest,
        modified=modified,
        pooling_type=None if model is None else model.metadata.get(f"{model.architecture}.pooling_type"),
        num_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        num_heads=facts.num_heads,
        num_kv_heads=max((layer.num_kv_heads for layer in facts.layers), default=0),
        num_experts=0 if facts.experts is None else facts.experts.num_experts,
        num_used_experts=facts.top_k(),
        has_head=opened.has_head,
    )


def _named(opened: Described) -> str:
    """What the files call their quantization."""
    if opened.gguf is None:
        said = opened.facts.quantization
        return (said.method or "").upper() if said is not None else ""
    number = opened.gguf.metadata.get("general.file_type")
    try:
        return str(gguf.LlamaFileType(number).name).removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:  # a number of a fork's or a newer writer, or none
        return _FORK_FILE_TYPES.get(number, "") if isinstance(number, int) else ""


def _prints(files: Sequence[Path]) -> tuple[str, float]:
    """Names, sizes and times stand for the contents, which would take minutes to read."""
    digest, modified = hashlib.sha256(), 0.0
    for path in files:
        try:
            stat = path.stat()
        except OSError as error:
            raise WeightError(f"{path} cannot be looked at: {error}") from error
        digest.update(f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode("utf-8", "surrogateescape"))
        modified = max(modified, stat.st_mtime)
    return digest.hexdigest(), modified
