"""From the names in a safetensors checkpoint to the module tree, by `transformers`' own conversion tables.

Published checkpoints often keep the names of an older model class: `transformers` says in data, per model type, which
names to rename and which tensors to merge or split. This module reads those tables; it moves no bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

__all__ = ["CheckpointNames", "Origin"]

_EXPERT = re.compile(
    r"(?P<key>.*\.experts)\.(?P<index>\d{1,9})\.(?P<part>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight"
)
_PARTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


@dataclass(frozen=True, slots=True)
class Origin:
    """How a parameter is made by a conversion.

    operations: class names in `transformers.core_model_loading`, in order; none for a mere renaming. dim: of the last.
    sources: stored names in the order in which they are merged.
    index, count: which of how many targets this parameter is, where one tensor is split.
    """

    operations: tuple[str, ...]
    sources: tuple[str, ...]
    index: int
    count: int
    dim: int


class CheckpointNames:
    """The names of one model, whose files hold the tensors `stored`.

    plain: parameter name -> stored name. experts: (module, "gate" | "up" | "down") -> expert number -> stored name,
    for checkpoints with one matrix per expert. converted: parameter name -> how it is made, for everything else.
    """

    def __init__(self, model_type: str, stored: Iterable[str]):
        kinds = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type), model_type)  # a class's own come first
        found = (get_checkpoint_conversion_mapping(kind) for kind in kinds if kind is not None)
        transforms: list[Any] = next((mapping for mapping in found if mapping is not None), [])
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        converters = [t for t in transforms if not isinstance(t, WeightRenaming)]
        self.plain: dict[str, str] = {}
        self.experts: dict[tuple[str, str], dict[int, str]] = {}
        self.converted: dict[str, Origin] = {}
        merged: dict[str, tuple[Any, dict[str, list[str]]]] = {}
        self._stored = dict.fromkeys(stored)
        for name in self._stored:
            renamed, _ = rename_source_key(name, renamings, [])
            expert = _EXPERT.fullmatch(renamed)
            if expert is not None:
                matrices = self.experts.setdefault((expert["key"], _PARTS[expert["part"]]), {})
                matrices[int(expert["index"])] = name
                continue
            for converter in converters:
                target, pattern = converter.rename_source_key(renamed)
                if pattern is not None:
                    merged.setdefault(target, (converter, {}))[1].setdefault(pattern, []).append(name)
                    break
            else:
                self.plain[renamed] = name
        for target, (converter, sources) in merged.items():
            self._add_converted(target, converter, sources)

    def find(self, name: str) -> Origin | None:
        """How the parameter `name` is made, with or without the base model's prefix; None when it is not stored."""
        for candidate in (name, name.removeprefix("model.")):
            if candidate in self.plain:
                return Origin((), (self.plain[candidate],), 0, 1, 0)
            if candidate in self.converted:
                return self.converted[candidate]
        if name in self._stored:  # a renaming for older names is too wide and meets the name of today
            return Origin((), (name,), 0, 1, 0)
        return None

    def _add_converted(self, target: str, converter: Any, sources: dict[str, list[str]]) -> None:
        """`target` holds the converter's first target pattern; a split makes further names from the others."""
        ordered = tuple(name for p in converter.source_patterns for name in sources.get(p, ()))
        operations = tuple(type(operation).__name__ for operation in converter.operations)
        patterns = converter.target_patterns
        dim = int(getattr(converter.operations[-1], "dim", 0))
        for index, pattern in enumerate(patterns):
            name = target.replace(patterns[0], pattern, 1)
            self.converted[name] = Origin(operations, ordered, index, len(patterns), dim)
