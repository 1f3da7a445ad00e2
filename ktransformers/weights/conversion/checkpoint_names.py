"""Maps names in a safetensors checkpoint to the module tree, by `transformers`' own conversion tables.

Published checkpoints often keep the names of an older model class: `transformers` says in data, per model type, which
names to rename and which tensors to merge or split. This module reads those tables; it moves no bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, Transpose, WeightConverter, WeightRenaming, rename_source_key
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from ktransformers.models.composite import VISION_EXPERTS, num_heads_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["CheckpointNames", "Origin"]

_EXPERT = re.compile(
    r"(?P<key>.*\.experts)\.(?P<index>\d{1,9})\.(?P<part>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight"
)
_BY_MODALITY = ("ErnieFuseAndSplitTextVisionExperts",)
_PARTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}

_DEEPSEEK_V41 = (
    *((r"^embed\.", "embed_tokens."), (r"^head\.", "lm_head."), (r"\.attn\.", ".self_attn."), (r"\.ffn\.", ".mlp.")),
    *((rf"\.hc_{part}_{name}$", f".{part}_hc.{name}") for part in ("attn", "ffn") for name in ("fn", "base", "scale")),
    *((r"\.attn_sink$", ".sinks"), (r"\.compressor\.norm\.", ".compressor.kv_norm."), (r"\.q_norm\.", ".q_a_norm.")),
    *((rf"\.w{name}\.", f".{name}_proj.") for name in ("q_a", "q_b", "kv", "k", "o_a", "o_b")),
    *((r"\.wgate\.", ".gate_proj."), (r"\.gate\.bias$", ".gate.e_score_correction_bias")),
    *(
        (rf"\.shared_experts\.w{i}\.", f".shared_experts.{part}_proj.")
        for i, part in enumerate(("gate", "down", "up"), 1)
    ),
)
"""Names of published tensors, and those of the modules in models/deepseek_v41."""

_LANGUAGE = re.compile(r"(?:model\.)?(?:language|text)_model\.(?:(lm_head\.|backbone\.)|(?:model\.)?)")
_TEXT = re.compile(r"(?:model\.(?:layers|embed_tokens|norm)|lm_head)\.")


@dataclass(frozen=True, slots=True)
class Origin:
    """Stored tensors and operations by which a conversion makes a parameter.

    operations: class names in `transformers.core_model_loading`, in order; none for a mere renaming. dims: of each.
    "TransposeIfNeeded" is a Transpose for tensors that have not the parameter's shape already. Of PermuteForRope, dims
    has the number of heads instead; 0: it is not known.
    sources: stored names in the order in which they are merged.
    index, count: which of how many targets this parameter is, where one tensor is split. targets: all of them.
    """

    operations: tuple[str, ...]
    sources: tuple[str, ...]
    index: int = 0
    count: int = 1
    dims: tuple[int, ...] = ()
    targets: tuple[str, ...] = ()

    @property
    def dim(self) -> int:
        """Dimension along which the last operation works."""
        return self.dims[-1] if self.dims else 0


class CheckpointNames:
    """Names of one model's parameters, whose files hold the tensors `stored`.

    composite_type: of the model for images and text whose language model this is; None for a model of text alone.
    parameters: of the model, some of which may be of experts for pictures; else those are of others.

    plain: parameter name -> stored name. experts: (module, "gate" | "up" | "down") -> expert number -> stored name,
    for checkpoints with one matrix per expert. converted: parameter name -> how it is made, for everything else.
    others: stored names of a composite's other models.
    """

    def __init__(
        self,
        model_type: str,
        stored: Iterable[str],
        composite_type: str | None = None,
        parameters: Iterable[str] = (),
    ):
        if composite_type is None:
            tables = [_Table.of_type(model_type, model_type_to_module_name(model_type))]
        else:
            tables = [_Table.of_type(composite_type), _Table.of_type(model_type)]
        self._has_vision_experts = any(f".{VISION_EXPERTS}." in name for name in parameters)
        self._read(tables, stored, composite_type is not None)

    @classmethod
    def of_model(cls, model: PreTrainedModel, stored: Iterable[str]) -> CheckpointNames:
        """Return the names of all parameters of `model` by its own tables and those of the models inside of it."""
        names = cls.__new__(cls)
        names._has_vision_experts = False
        names._read([_Table(get_model_conversion_mapping(model))], stored, is_composite=False, config=model.config)
        return names

    def _read(self, tables: Sequence[_Table], stored: Iterable[str], is_composite: bool, config: object = None) -> None:
        converters = [converter for table in tables for converter in table.converters]
        self.plain: dict[str, str] = {}
        self.experts: dict[tuple[str, str], dict[int, str]] = {}
        self.converted: dict[str, Origin] = {}
        self.others: set[str] = set()
        merged: dict[str, tuple[Any, dict[str, list[str]]]] = {}
        self._stored, self._config = dict.fromkeys(stored), config
        for name in self._stored:
            renamed = _renamed(name, tables, is_composite)
            if renamed is None:
                self.others.add(name)
                continue
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
        if any(_operations(converter) == _BY_MODALITY for converter in converters):
            self._split_by_modality()

    def _split_by_modality(self) -> None:
        """Of a layer's experts, numbered through, those for text come first; those for images are as many."""
        for (key, part), matrices in list(self.experts.items()):
            count, block = -(-len(matrices) // 2), key.removesuffix("experts")
            images = {index - count: name for index, name in matrices.items() if index >= count}
            text = {index: name for index, name in matrices.items() if index < count}
            self.experts[f"{block}text_moe.experts", part] = text
            if self._has_vision_experts:
                self.experts[f"{block}{VISION_EXPERTS}.experts", part] = images
            else:
                self.others.update(images.values())
            del self.experts[key, part]
        if self._has_vision_experts:
            return
        for name in [name for name in self.converted if f".{VISION_EXPERTS}." in name]:
            origin = self.converted.pop(name)
            if origin.count == 1:
                self.others.update(origin.sources)

    def find(self, name: str) -> Origin | None:
        """Return how the parameter `name` is made, with or without the base model's prefix; None when it is not
        stored.
        """
        for candidate in (name, name.removeprefix("model.")):
            if candidate in self.plain:
                return Origin((), (self.plain[candidate],))
            if candidate in self.converted:
                return self.converted[candidate]
        if name in self._stored:  # a renaming for older names is too wide and meets the name of today
            return Origin((), (name,))
        return None

    def _add_converted(self, target: str, converter: Any, sources: dict[str, list[str]]) -> None:
        """`target` holds the converter's first target pattern; a split makes further names from the others."""
        ordered = tuple(name for p in converter.source_patterns for name in sorted(sources.get(p, ()), key=_natural))
        patterns = converter.target_patterns
        names = tuple(target.replace(patterns[0], pattern, 1) for pattern in patterns)
        for index, name in enumerate(names):
            used = [operation for operation in converter.operations if _is_for(operation, name)]
            dims = tuple(_dim(operation, self._config) for operation in used)
            operations = tuple(map(_operation, used))
            self.converted[name] = Origin(operations, ordered, index, len(names), dims, names)


class _Table:
    """What transformers has to say about names."""

    def __init__(self, transforms: Iterable[WeightRenaming | WeightConverter]):
        transforms = list(transforms)
        self.renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        self.converters = [one for one in transforms if not isinstance(one, WeightRenaming)]

    @classmethod
    def of_type(cls, model_type: str, other_type: str | None = None) -> _Table:
        """Return the entry of one model type, or if that is nothing, of the other one: text models are published
        alone, too, in the names of the models for images and text that they are of."""
        classes = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
        own = (names.get(model_type) for names in classes)
        kinds = (*own, model_type, MODEL_MAPPING_NAMES.get(model_type), other_type)  # a class's own come first
        found = (get_checkpoint_conversion_mapping(kind) for kind in kinds if kind is not None)
        transforms: list[Any] = next((mapping for mapping in found if mapping is not None), [])
        return cls([*transforms, *_own_names(model_type)])

    def apply(self, name: str) -> str:
        renamed: str = rename_source_key(name, self.renamings, [])[0]
        return renamed


def _own_names(model_type: str) -> list[WeightRenaming | WeightConverter]:
    """For families whose experts modules are of another form here than in transformers
    (models/fused_experts_adapter.py), or whose modules are of this package.
    """
    if model_type == "dbrx":
        parts = ["experts.mlp.w1", "experts.mlp.v1"]
        return [
            WeightConverter(parts, "experts.gate_up_proj", operations=[Concatenate(dim=1)]),
            WeightConverter("experts.mlp.w2", "experts.down_proj", operations=[Transpose(1, 2)]),
        ]
    if model_type == "deepseek_v41":
        return [WeightRenaming(pattern, target) for pattern, target in _DEEPSEEK_V41]
    if model_type == "jetmoe":
        return [
            WeightRenaming("mlp.input_linear.weight", "mlp.experts.gate_up_proj"),
            WeightRenaming("mlp.output_linear.weight", "mlp.experts.down_proj"),
            WeightRenaming("mlp.router.layer.weight", "mlp.router.weight"),
        ]
    return []


def _renamed(name: str, tables: Sequence[_Table], is_composite: bool) -> str | None:
    """The name in the module tree of the language model; None for a tensor of another model in a composite."""
    renamed = tables[0].apply(name)
    language = _LANGUAGE.match(renamed)
    if is_composite and language is None and not _TEXT.match(renamed):
        return None
    if language is not None and (is_composite or not _LANGUAGE.match(name)):
        renamed = (language[1] or "model.") + renamed[language.end() :]
    return tables[1].apply(renamed) if is_composite else renamed


def _natural(name: str) -> list[tuple[int, str]]:
    """A key to sort names by that has shard 2 before shard 10, as transformers merges them."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,9})", name)]


def _operations(converter: Any) -> tuple[str, ...]:
    """Names of its operations' classes; those of which an argument makes another operation go by names of their own."""
    return tuple(_operation(one) for one in converter.operations)


def _is_for(operation: object, target: str) -> bool:
    """Whether an operation changes what becomes `target`: some leave a part of what is split as it is."""
    only = getattr(operation, "permute_layer_names", None)
    return only is None or any(name in target for name in only)


def _dim(operation: object, config: object) -> int:
    if type(operation).__name__ != "PermuteForRope":
        return int(getattr(operation, "dim", 0))
    return num_heads_of(getattr(config, getattr(operation, "subconfig_key", None) or "", config))


def _operation(operation: Any) -> str:
    name = type(operation).__name__
    if getattr(operation, "check_dims", False):
        return "TransposeIfNeeded"
    return f"Inverse{name}" if getattr(operation, "inverse", False) else name
