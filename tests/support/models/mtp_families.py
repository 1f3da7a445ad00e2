"""Tiny models of further families with layers for multi-token prediction, in the names of published checkpoints. The
oracle is written here, of torch and of models of transformers that are one such layer each."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn
from transformers import PreTrainedModel

from tests.support.models.attention_families import config_of
from tests.support.models.composites import COMPOSITES, tiny_composite
from tests.support.models.latent_models import LATENT_TYPES, latent_model
from tests.support.models.mtp_models import write_prediction_gguf
from tests.support.models.recurrent_models import recurrent_model
from tests.support.models.tiny_models import random_model, tiny_model, write_safetensors

__all__ = ["FAMILIES", "GGUF_FAMILIES", "PlainMtp", "tiny_family", "write_family", "write_family_gguf"]

FULL, SLIDING = "full_attention", "sliding_attention"
_BEHIND = {part: "model.layers.{behind}." + part for part in ("enorm", "hnorm", "eh_proj")}
_IN_MTP = {part: "mtp.layers.{number}." + part for part in ("enorm", "hnorm", "eh_proj")}


@dataclass(frozen=True)
class Family:
    """names: of parts ("inner" is any tensor of a decoder layer), by which {number} counts decoder layers of
    all such layers, {behind} goes on behind the model's own. values: of a layer's config besides the model's.
    norm: its last one's name in the family's class. count: of layers, each of which makes one draft token."""

    names: Mapping[str, str]
    values: Mapping[str, Any] = field(default_factory=dict)
    norm: str = "norm"
    count: int = 1
    takes_normed: bool = True
    has_head: bool = False
    has_norm: bool = True
    renamed: Mapping[str, str] = field(default_factory=dict)


_USUAL = {"inner": "model.layers.{behind}.{name}", **_BEHIND}
_SHARED_HEAD = {**_USUAL, "norm": "model.layers.{behind}.shared_head.norm"}
_FINAL_NORM = {**_USUAL, "norm": "model.layers.{behind}.final_layernorm"}
_TOP = {"enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "eh_proj": "mtp.fc"}
_QWEN = {"inner": "mtp.layers.{number}.{name}", "norm": "mtp.norm", **_TOP}
_SPARSE = {"mlp_layer_types": ["sparse"], "layer_types": [FULL]}
_INDEXED = {"mlp_layer_types": ["sparse"], "layer_types": ["indexed_attention"], "indexer_types": ["full"]}

FAMILIES: dict[str, Family] = {
    "bailing_hybrid": Family(_FINAL_NORM, _SPARSE),
    "deepseek_v32": Family(_SHARED_HEAD, _INDEXED),
    "ernie4_5_moe": Family(
        {
            "inner": "model.mtp_block.{number}.{name}",
            "enorm": "model.mtp_emb_norm.{number}",
            "hnorm": "model.mtp_hidden_norm.{number}",
            "eh_proj": "model.mtp_linear_proj.{number}",
        },
        {"moe_layer_start_index": 1, "moe_layer_end_index": 0},
        has_norm=False,
    ),
    "exaone4_5": Family(_QWEN, {"layer_types": [SLIDING]}),
    "exaone_moe": Family(_QWEN, {"layer_types": [SLIDING], "mlp_layer_types": ["dense"]}),
    "glm4_moe_lite": Family(_SHARED_HEAD, {"mlp_layer_types": ["sparse"]}),
    "glm_moe_dsa": Family(_SHARED_HEAD, _INDEXED),
    "hy_v3": Family(_FINAL_NORM, {"mlp_layer_types": ["sparse"], "first_k_dense_replace": 0}),
    "mellum": Family(_QWEN, {"layer_types": [SLIDING], "mlp_layer_types": ["sparse"]}),
    "mimo_v2_flash": Family(
        {
            "inner": "model.mtp.layers.{number}.{name}",
            "norm": "model.mtp.layers.{number}.final_layernorm",
            **{part: f"model.{name}" for part, name in _IN_MTP.items()},
        },
        {"layer_types": [SLIDING], "mlp_layer_types": ["dense"]},
        count=3,
        renamed={"post_attention_layernorm": "pre_mlp_layernorm"},
    ),
    "nemotron_h": Family(
        {"inner": "mtp.layers.{number}.{name}", "norm": "mtp.layers.{last}.final_layernorm", **_IN_MTP},
        {"layer_types": [FULL, "moe"]},
        norm="norm_f",
    ),
    "qwen3_5_moe": Family(_QWEN, {"layer_types": [FULL]}),
    "step3p7": Family(
        {
            **_USUAL,
            "norm": "model.layers.{behind}.transformer.shared_head.norm",
            "head": "model.layers.{behind}.transformer.shared_head.output",
        },
        {"layer_types": [SLIDING], "mlp_layer_types": ["dense"]},
        count=3,
        takes_normed=False,
        has_head=True,
    ),
}


GGUF_FAMILIES = (
    *("bailing_hybrid", "deepseek_v32", "exaone_moe", "glm_moe_dsa", "hy_v3", "mimo_v2_flash", "nemotron_h"),
)
"""Those that llama.cpp's converter knows, as far as their GGUFs are opened."""


def _main(model_type: str) -> PreTrainedModel:
    if model_type in COMPOSITES:
        return tiny_composite(model_type)
    if model_type == "nemotron_h":  # as published, without layers that are only an MLP
        kinds = ["linear_attention", "moe", "full_attention", "moe", "linear_attention"]
        return recurrent_model(model_type, layers_block_type=kinds)
    if model_type == "bailing_hybrid":
        return recurrent_model(model_type)
    if model_type in LATENT_TYPES:
        indexers = {"indexer_types": ["full"] * 4} if model_type == "glm_moe_dsa" else {}
        return latent_model(model_type, first_k_dense_replace=1, **indexers)  # as mlp_layer_types there has it
    if model_type in ("mimo_v2_flash", "hy_v3"):
        return random_model(config_of(model_type))
    return tiny_model(model_type)


def _decoder(model: Any) -> Any:
    """The text model below the head."""
    return getattr(model.base_model, "language_model", model.base_model)


def _layer(main: PreTrainedModel, family: Family, seed: int) -> PreTrainedModel:
    if hasattr(main.config, "text_config"):
        return tiny_composite(main.config.model_type, seed, num_hidden_layers=1, **family.values)
    config: Any = copy.deepcopy(main.config)
    for name, value in family.values.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    config.num_hidden_layers = len(family.values["layer_types"]) if "layer_types" in family.values else 1
    return random_model(config, seed)


class _Joined(nn.Module):
    """One layer: norms, joins and projects embeddings and hidden states, then runs its decoder layers."""

    def __init__(self, model: PreTrainedModel, family: Family, generator: torch.Generator):
        super().__init__()
        self.model, self._norm = model, getattr(_decoder(model), family.norm)
        size = _decoder(model).config.hidden_size
        self.enorm, self.hnorm = copy.deepcopy(self._norm), copy.deepcopy(self._norm)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        with torch.no_grad():
            for norm in (self.enorm, self.hnorm):
                norm.weight.copy_(1 + 0.1 * torch.randn(size, generator=generator))
            self.eh_proj.weight.copy_(torch.randn((size, 2 * size), generator=generator) * (2 * size) ** -0.5)

    def forward(
        self, embeddings: torch.Tensor, hidden_states: torch.Tensor, positions: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, T, H] each, and rotary positions, None: 0 to T - 1 -> hidden states behind and in front of the last
        norm."""
        seen: list[torch.Tensor] = []
        hook = self._norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        joined = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden_states)], dim=-1))
        normed = _decoder(self.model)(inputs_embeds=joined, position_ids=positions).last_hidden_state
        hook.remove()
        return normed, seen[0]


@dataclass
class PlainMtp:
    """main: the model. layers: for multi-token prediction. All are in fp32."""

    family: Family
    main: PreTrainedModel
    layers: list[_Joined]

    def head(self, number: int) -> Any:
        return (self.layers[number].model if self.family.has_head else self.main).lm_head

    def run_main(self, token_ids: list[int]) -> None:
        """Run the model, up to its last norm at least."""
        _decoder(self.main)(torch.tensor([token_ids]))

    def embedded(self, token_ids: list[int], start: int) -> torch.Tensor:
        """What stands for tokens from position `start` on, [1, T, H]."""
        found: torch.Tensor = _decoder(self.main).get_input_embeddings()(torch.tensor([token_ids]))
        return found

    def positions(self, count: int) -> torch.Tensor | None:
        """The first rotary positions, as transformers takes them; None: 0 to count - 1."""
        return None

    @torch.no_grad()
    def drafts(self, token_ids: list[int], count: int) -> list[torch.Tensor]:
        """Logits [V] of the next tokens but one, ..., each behind the likeliest one before: of a sequence whose last
        token the main model has sampled and not computed. Layer k takes, at position i, the token k + 1 behind it, and
        what the layer before it made there; behind the last layer, that one goes on alone."""
        decoder, last = _decoder(self.main), len(self.layers) - 1
        states: list[torch.Tensor] = []
        norm = getattr(decoder, self.family.norm)
        hook = norm.register_forward_pre_hook(lambda module, args: states.append(args[0]))
        kept: list[torch.Tensor] = []
        hooks = hook, norm.register_forward_hook(lambda module, args, output: kept.append(output))
        self.run_main(token_ids[:-1])
        for one in hooks:
            one.remove()
        hidden, known, found = kept[0] if self.family.takes_normed else states[0], list(token_ids[1:]), []
        for depth in range(count):
            number = min(depth, last)
            embedded = self.embedded(known[number:], 1 + number)
            normed, unnormed = self.layers[number](embedded, hidden, self.positions(len(known) - number))
            found.append(self.head(number)(normed[0, -1]))
            known.append(int(found[-1].argmax()))
            behind = normed if self.family.takes_normed else unnormed
            hidden = behind if depth < last else torch.cat([hidden, behind[:, -1:]], dim=1)
        return found


def tiny_family(model_type: str, seed: int = 0, count: int | None = None) -> PlainMtp:
    """A tiny model of one of FAMILIES with such layers. count: fewer than the family has."""
    family, main = FAMILIES[model_type], _main(model_type)
    generator = torch.Generator().manual_seed(seed + 2)
    numbers = range(family.count if count is None else count)
    layers = [_Joined(_layer(main, family, seed + 10 + number), family, generator).eval() for number in numbers]
    if not family.has_norm:
        for layer in layers:
            layer._norm.load_state_dict(getattr(_decoder(main), family.norm).state_dict())
    return PlainMtp(family, main, layers)


def write_family(tiny: PlainMtp, folder: Path) -> Path:
    """Write all as one checkpoint, in the family's names."""
    write_safetensors(tiny.main, folder)
    config_file = folder / "config.json"
    values = json.loads(config_file.read_text())
    text: Any = values.get("text_config", values)
    text["num_nextn_predict_layers"] = len(tiny.layers)
    if tiny.family.has_head:
        text["mtp_layer_types"] = tiny.family.values["layer_types"] * len(tiny.layers)
        text["mtp_mlp_layer_types"] = tiny.family.values["mlp_layer_types"] * len(tiny.layers)
    config_file.write_text(json.dumps(values))
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    for number, layer in enumerate(tiny.layers):
        stored |= _stored(tiny, layer, number, folder / f"layer{number}")
    safetensors.torch.save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_family_gguf(tiny: PlainMtp, path: Path) -> Path:
    """Write all as one GGUF, as llama.cpp's converter does."""
    norm = "layer_output_norm" if "final_layernorm" in tiny.family.names["norm"] else "nextn.shared_head_norm"
    if tiny.family.norm == "norm_f" or tiny.main.config.model_type == "hy_v3":
        norm = "nextn.shared_head_norm"
    return write_prediction_gguf(tiny.main, [(layer.model, layer) for layer in tiny.layers], path, norm)


def _stored(tiny: PlainMtp, layer: _Joined, number: int, folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of one layer, by their names in the file."""
    main, own = _decoder(tiny.main).config, _decoder(layer.model).config
    per, found = own.num_hidden_layers, dict[str, torch.Tensor]()

    def named(part: str, block: int = 0, name: str = "") -> str:
        index = number * per + block
        places = {"number": index, "behind": main.num_hidden_layers + index, "last": number * per + per - 1}
        return tiny.family.names[part].format(name=name, **places)

    write_safetensors(layer.model, folder)
    for name, tensor in safetensors.torch.load_file(folder / "model.safetensors").items():
        inner = re.fullmatch(r"(?:model|backbone|language_model|\.)*layers\.(\d+)\.(.+)", name)
        if inner is not None:
            first, _, rest = inner[2].partition(".")
            found[named("inner", int(inner[1]), f"{tiny.family.renamed.get(first, first)}.{rest}")] = tensor
        elif re.fullmatch(rf"(?:model|backbone|language_model|\.)*{tiny.family.norm}\.weight", name):
            if tiny.family.has_norm:
                found[f"{named('norm')}.weight"] = tensor
        elif name == "lm_head.weight" and tiny.family.has_head:
            found[f"{named('head')}.weight"] = tensor
    for part in ("enorm", "hnorm", "eh_proj"):
        found[f"{named(part)}.weight"] = getattr(layer, part).weight.detach().clone()
    return found
