"""Tiny random models of Gemma 4 with an assistant that drafts for them, and what transformers says that it drafts."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import CONFIG_MAPPING, DynamicCache, PretrainedConfig, PreTrainedModel

from tests.support.gguf.writer import write_gguf
from tests.support.models.attention_families import CASES, COMMON, config_of
from tests.support.models.tiny_models import VOCAB_SIZE, WINDOW, random_model, write_safetensors

__all__ = ["TARGETS", "TinyAssistant", "tiny_assistant", "write_assistant", "write_assistant_gguf"]

TARGETS = ("gemma4", "gemma4-shared", "gemma4-moe", "gemma4-unified")
KINDS = ("sliding_attention", "full_attention")


@dataclass
class TinyAssistant:
    """main: the target. assistant: its own. Both are in fp32."""

    main: PreTrainedModel
    assistant: Any

    @torch.no_grad()
    def drafts(self, token_ids: list[int], count: int) -> list[torch.Tensor]:
        """Logits [V] of the next tokens but one, ..., each behind the likeliest one before: of a sequence whose last
        token the target has sampled and not computed. Layers with a window get what a step of one token leaves of it:
        as many keys as the window has."""
        base: Any = self.main.base_model
        cache = DynamicCache(config=self.main.config)
        if token_ids[:-2]:
            base(torch.tensor([token_ids[:-2]]), cache=cache, use_cache=True)
        output = base(torch.tensor([token_ids[-2:-1]]), cache=cache, use_cache=True, return_shared_kv_states=True)
        kept = {kind: output.shared_kv_states[kind] for kind in KINDS}
        hidden, token, found = output.last_hidden_state, torch.tensor([token_ids[-1:]]), list[torch.Tensor]()
        positions = torch.tensor([[len(token_ids) - 1]])
        for _ in range(count):
            inputs = torch.cat([base.get_input_embeddings()(token), hidden], dim=-1)
            made = self.assistant(inputs_embeds=inputs, position_ids=positions, shared_kv_states=kept)
            found.append(made.logits[0, -1])
            hidden, token = made.last_hidden_state, made.logits[:, -1].argmax(-1)[:, None]
        return found


def _unified() -> PretrainedConfig:
    own = {name: value for name, value in CASES["gemma4"][1].items() if "per_layer" not in name}
    config: PretrainedConfig = CONFIG_MAPPING["gemma4_unified_text"](**COMMON, **own, num_hidden_layers=5)
    return config


def tiny_assistant(
    name: str,
    seed: int = 0,
    *,
    is_ordered: bool = False,
    clusters: int = 20,
    backbone: int = 0,
    **values: object,
) -> TinyAssistant:
    """One of TARGETS with an assistant of three layers. is_ordered: that this scores tokens by clusters, of so many.
    backbone: the width that it wants of hidden states, 0: the target's. values: of its decoder's config."""
    family = "gemma4_unified" if name == "gemma4-unified" else "gemma4"
    main = random_model(_unified() if family == "gemma4_unified" else config_of(name), seed)
    theirs: Any = main.config
    sliding, full = (theirs.per_layer_config[theirs.layer_types.index(kind)] for kind in KINDS)
    text = CONFIG_MAPPING[f"{family}_text"](
        **{
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "layer_types": [KINDS[0], *KINDS],
            "num_attention_heads": theirs.num_attention_heads,
            "num_key_value_heads": sliding.num_key_value_heads,
            "num_global_key_value_heads": full.num_key_value_heads if theirs.attention_k_eq_v else None,
            "attention_k_eq_v": theirs.attention_k_eq_v,
            "head_dim": sliding.head_dim,
            "global_head_dim": full.head_dim,
            "sliding_window": WINDOW,
            "vocab_size": VOCAB_SIZE,
            "vocab_size_per_layer_input": 0,
            "hidden_size_per_layer_input": 0,
            "max_position_embeddings": 512,
            "rope_parameters": theirs.rope_parameters,
            "num_kv_shared_layers": 3,
        }
        | values
    )
    whole: Any = CONFIG_MAPPING[f"{family}_assistant"](
        text_config=text,
        backbone_hidden_size=backbone or theirs.hidden_size,
        use_ordered_embeddings=is_ordered,
        num_centroids=clusters,
        centroid_intermediate_top_k=6,
    )
    assistant: Any = random_model(whole, seed + 1)
    if is_ordered:
        order = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
        assistant.masked_embedding.token_ordering.copy_(order)
    return TinyAssistant(main, assistant)


def write_assistant(tiny: TinyAssistant, folder: Path) -> tuple[Path, Path]:
    """Write both as checkpoints: the target's folder and the assistant's."""
    return write_safetensors(tiny.main, folder / "target"), write_safetensors(tiny.assistant, folder / "assistant")


def write_assistant_gguf(tiny: TinyAssistant, path: Path) -> Path:
    """Write an assistant as llama.cpp's converter does, which leaves its clusters out."""
    text: Any = random_model(copy.deepcopy(tiny.assistant.config.text_config))
    text.model.load_state_dict(tiny.assistant.model.state_dict())
    plain = gguf.GGUFReader(write_gguf(text, path.with_suffix(".plain.gguf"), arch="gemma4"))
    writer = gguf.GGUFWriter(path, "gemma4-assistant")
    for field in plain.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value: Any = field.contents()
        kind = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(field.name.replace("gemma4.", f"{writer.arch}.", 1), value, field.types[0], kind)
    writer.add_uint32(f"{writer.arch}.embedding_length_out", tiny.assistant.config.backbone_hidden_size)
    writer.add_nextn_predict_layers(tiny.assistant.config.text_config.num_hidden_layers)
    for tensor in plain.tensors:
        if tensor.name != "output.weight":
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    for name in ("pre_projection", "post_projection"):
        writer.add_tensor(f"nextn.{name}.weight", getattr(tiny.assistant, name).weight.detach().numpy().copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
