"""What files call the tensors of layers for multi-token prediction, and what they are called in a model of one.

safetensors   model.layers.N.*            behind the model's own: DeepSeek, GLM, Ling, Hunyuan, Step
              mtp.*, mtp.layers.K.*       Qwen, EXAONE, Mellum, Nemotron-H, MiMo (model.mtp.*)
              mtp.K.*                     DeepSeek-V4
              model.mtp_*.K.*             Ernie
GGUF          blk.N.*, blk.N.nextn.*      behind the model's own
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ktransformers.models.composite import text_config_of
from ktransformers.models.mtp_config import mtp_family, mtp_layer_types
from ktransformers.weights.gguf.file import GGUFModel
from ktransformers.weights.safetensors.file import SafetensorsModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = [
    "INPUT_NORMS",
    "OUTPUT_PROJECTION",
    "PROJECTION",
    "STREAM_PROJECTIONS",
    "MtpNames",
    "with_names",
]

INPUT_NORMS, PROJECTION, OUTPUT_PROJECTION = ("enorm", "hnorm"), "eh_proj", "post_projection"
STREAM_PROJECTIONS = ("fc_embedding", "fc_hidden")
"""Children that the decoder layer has besides its own until they are loaded: what makes its input, and hidden states of
the target's width of its output where that has another one (Gemma 4's assistants). Where hidden states are streams,
STREAM_PROJECTIONS stand for PROJECTION."""

_Part = tuple[int | None, str]
"""The decoder layer, of all that make up the layers for multi-token prediction, and a tensor's name in it; None: all of
these layers share the tensor."""

_EXPERTS = re.compile(r"\.experts\.|ffn_(gate|up|down|gate_up)_exps\.")
_BELOW_MTP = re.compile(r"(?:.*\.)?mtp\.(?P<name>.+)")
_NUMBERED = re.compile(r"(?:.*\.)?layers\.(?P<number>\d+)\.(?:transformer\.)?(?P<name>.+)")
_NUMBERED_BELOW = re.compile(r"(?P<number>\d+)\.(?P<name>.+)")
_OF_TOP = {"fc": PROJECTION, "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "final_layernorm"}
_OF_TOP |= {name: name for name in (*STREAM_PROJECTIONS, "hyper_connection_mixer")}
"""Right below `mtp.`, by what other files call them in a layer."""
_ERNIE = re.compile(r"(?:.*\.)?mtp_(?P<part>block|emb_norm|hidden_norm|linear_proj)\.(?P<number>\d+)\.(?P<name>.+)")
_ERNIE_PARTS = {"block": "", "emb_norm": "enorm.", "hidden_norm": "hnorm.", "linear_proj": f"{PROJECTION}."}

_NORM = re.compile(r"(?:final_layernorm|shared_head\.norm|nextn\.shared_head_norm|layer_output_norm)\.")
_MIXER = re.compile(r"nextn\.hc_head_")
_HEAD = re.compile(r"(?:shared_head\.(?:head|output)|nextn\.shared_head_head)\.")
_EMBEDDING = re.compile(r"(?:nextn\.)?embed_tokens\.")
_MODEL_NORM = re.compile(r"(?:model\.|backbone\.|language_model\.)+norm(_f)?\.weight|output_norm\.weight")

_OF_SECOND = re.compile(r"ffn_|exp_probs_b|post_attention_norm\.")
"""In a GGUF, where two decoder layers, of attention and of experts, are one block."""


@dataclass(frozen=True, slots=True)
class MtpNames:
    """The names of one layer for multi-token prediction in files: {stored name: name in a model of that layer}.

    has_experts: whether it has a feed-forward block of experts. has_head: whether it has a head of its own.
    """

    names: Mapping[str, str]
    has_experts: bool
    has_head: bool

    @classmethod
    def of_safetensors(cls, stored: Iterable[str], num_layers: int, config: PretrainedConfig) -> list[MtpNames]:
        """Find all such layers in a checkpoint of Hugging Face's, in their order. num_layers, config: of the model."""
        names, family = list(stored), mtp_family(text_config_of(config).model_type)

        def renamed(block: int, name: str) -> str | None:
            inner, dot, rest = name.partition(".")
            name = f"{family.renamed.get(inner, inner)}{dot}{rest}"
            if _HEAD.match(name):
                return _HEAD.sub("lm_head.", name) if family.has_head else None
            if _NORM.match(name):
                return _NORM.sub(f"model.{family.norm}.", name)
            is_mixer = family.mixer is not None and name.startswith(f"{family.mixer}.")
            return f"model.{name}" if is_mixer else f"model.layers.{block}.{name}"

        parts = {name: part for name in names if (part := _part_of(name, num_layers)) is not None}
        return cls._all(names, parts, renamed, len(mtp_layer_types(config)))

    @classmethod
    def of_gguf(cls, stored: Iterable[str], num_layers: int, config: PretrainedConfig) -> list[MtpNames]:
        """Find all such layers in a GGUF, in their order. num_layers, config: of the model."""
        names, num_blocks = list(stored), len(mtp_layer_types(config))
        family = mtp_family(text_config_of(config).model_type)

        def renamed(block: int, name: str) -> str | None:
            if _HEAD.match(name):
                return _HEAD.sub("output.", name) if family.has_head else None
            if _NORM.match(name):
                return _NORM.sub("output_norm.", name)
            if _MIXER.match(name):
                return _MIXER.sub("output_hc_", name)
            return f"blk.{block}.{name.replace('post_attention_norm.', 'attn_norm.') if block else name}"

        parts = dict[str, _Part]()
        for name in names:
            found = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
            if found is not None and int(found[1]) >= num_layers:
                is_second = num_blocks > 1 and _OF_SECOND.match(found[2]) is not None
                parts[name] = num_blocks * (int(found[1]) - num_layers) + is_second, found[2]
        return cls._all(names, parts, renamed, num_blocks)

    @classmethod
    def _all(
        cls,
        stored: Iterable[str],
        parts: Mapping[str, _Part],
        renamed: Callable[[int, str], str | None],
        num_blocks: int,
    ) -> list[MtpNames]:
        """Divide tensors into layers of so many decoder layers each. A layer counts if it can make its input, and holds
        more than what all share; without a last norm it has the model's."""
        found, model_norm = list[MtpNames](), next((name for name in stored if _MODEL_NORM.fullmatch(name)), None)
        while True:
            names, is_own = dict[str, str](), False
            for name, (number, inner) in parts.items():
                block = 0 if number is None else number - len(found) * num_blocks
                ours = renamed(block, inner) if 0 <= block < num_blocks and not _EMBEDDING.match(inner) else None
                if ours is not None:
                    names[name] = ours
                    is_own |= number is not None
            makes_input = {f".{part}." for part in (PROJECTION, STREAM_PROJECTIONS[-1], "nextn.h_proj")}
            if not is_own or not any(part in ours for ours in names.values() for part in makes_input):
                return found
            norm = renamed(0, "final_layernorm.weight")
            if model_norm is not None and norm is not None and norm not in names.values():
                names[model_norm] = norm
            heads = ("lm_head.", "output.")
            found.append(
                cls(
                    names,
                    has_experts=any(_EXPERTS.search(ours) for ours in names.values()),
                    has_head=any(ours.startswith(heads) for ours in names.values()),
                )
            )


def _part_of(name: str, num_layers: int) -> _Part | None:
    """Where a tensor of a checkpoint belongs; None: to the model itself."""
    if (ernie := _ERNIE.fullmatch(name)) is not None:
        return int(ernie["number"]), _ERNIE_PARTS[ernie["part"]] + ernie["name"]
    below = _BELOW_MTP.fullmatch(name)
    numbered = _NUMBERED.fullmatch(name if below is None else below["name"])
    if numbered is None and below is not None:
        numbered = _NUMBERED_BELOW.fullmatch(below["name"])
    if numbered is not None:
        number = int(numbered["number"]) - (num_layers if below is None else 0)
        return None if number < 0 else (number, numbered["name"])
    top, _, rest = ("" if below is None else below["name"]).partition(".")
    return (None, f"{_OF_TOP[top]}.{rest}") if top in _OF_TOP else None


_Files = TypeVar("_Files", bound=GGUFModel | SafetensorsModel)


def with_names(model: _Files, names: Mapping[str, str]) -> _Files:
    """Return a model's files with the tensors of `names` alone, {stored name: what it is called from now on}, and with
    all metadata."""
    files: list[Any] = list(model.files)
    for at, file in enumerate(files):
        stored = file.tensors.items()
        kept = {names[name]: replace(tensor, name=names[name]) for name, tensor in stored if name in names}
        files[at] = replace(file, tensors=kept)
    return type(model)(files)
