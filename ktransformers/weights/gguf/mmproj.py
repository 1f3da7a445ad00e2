"""A tower's weights in llama.cpp's projector file (mmproj-*.gguf), by the names that transformers has for them.

One table for all towers: a block's modules by the last parts of their names, what is outside of blocks likewise. What
the converter does beside renaming is undone here: Conv3d over two frames split in two, patches with their channels
first, rows of queries and keys in the order of another rotary embedding, 1 added to Gemma's norm, some dimensions of
size 1 dropped or added.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from ktransformers.errors import TensorMismatchError
from ktransformers.kernels.types import QuantType
from ktransformers.system.file_kinds import is_projector, projector_rank
from ktransformers.weights.gguf.file import GGUFFile, GGUFModel, MetadataValue, beside
from ktransformers.weights.ollama.towers import has_tower, projector_metadata, projector_name
from ktransformers.weights.quantize.transcode import dequantize
from ktransformers.weights.source import TensorInfo

__all__ = ["MmprojSource", "mmproj_beside", "mmproj_inside"]

_IN_BLOCKS: Mapping[str, tuple[str, ...]] = {
    "ln1": ("norm1", "layer_norm1", "input_layernorm", "attention_norm", "layernorm_before"),
    "ln2": ("norm2", "layer_norm2", "post_attention_layernorm", "ffn_norm", "layernorm_after"),
    "attn_qkv": ("qkv",),
    "attn_q": ("q_proj",),
    "attn_k": ("k_proj",),
    "attn_v": ("v_proj",),
    "attn_q_norm": ("q_norm",),
    "attn_k_norm": ("k_norm",),
    "attn_out": ("proj", "out_proj", "o_proj", "projection_layer"),
    "ffn_up": ("fc1", "linear_fc1", "up_proj"),
    "ffn_gate": ("gate_proj",),
    "ffn_down": ("fc2", "linear_fc2", "down_proj"),
    "ls1": ("lambda_1",),
    "ls2": ("lambda_2",),
}
_OWN_IN_BLOCKS: Mapping[str, Mapping[str, str]] = {
    "gemma4v": {
        "post_attention_layernorm": "attn_post_norm",
        "pre_feedforward_layernorm": "ln2",
        "post_feedforward_layernorm": "ffn_post_norm",
    },
}
"""Of a type of projector: names that mean something else there."""

_CHANNELS_LAST = ("gemma4v", "lfm2")
"""Types of projectors whose patches have row, column and channel in transformers; files have the channel first."""

_OUTSIDE: tuple[tuple[str, str], ...] = (
    (
        r"patch_embed\.proj|patch_embedding(\.linear)?|patch_conv|patch_embeddings\.projection|embeddings\.proj"
        r"|patch_embedder\.input_proj",
        "v.patch_embd",
    ),
    (r"pos_embed|position_embeddings?|positional_embedding_vlm|position_embedding_table", "v.position_embd"),
    (r"cls_token|class_embedding", "v.class_embd"),
    (r"ln_pre|layernorm_pre|pre_layrnorm", "v.pre_ln"),
    (r"post_conv_layernorm", "v.norm_embd"),
    (r"merger\.(ln_q|norm)|post_layernorm|layernorm_post|final_layernorm", "v.post_ln"),
    (r"merger\.mlp\.0|merger\.linear_fc1", "mm.0"),
    (r"merger\.mlp\.2|merger\.linear_fc2", "mm.2"),
    (r"vision_adapter\.mlp\.fc1", "mm.model.mlp.1"),
    (r"vision_adapter\.mlp\.fc2", "mm.model.mlp.2"),
    (r"patch_merger\.merging_layer|visual\.downsample", "mm.patch_merger"),
    (r"merger\.proj|modality_projection\.proj", "mm.model.fc"),
    (r"merger\.post_projection_norm", "mm.post_norm"),
    (r"merger\.gate_proj", "mm.gate"),
    (r"merger\.up_proj", "mm.up"),
    (r"merger\.down_proj", "mm.down"),
    (r"vision_tower\.std_bias", "v.std_bias"),
    (r"vision_tower\.std_scale", "v.std_scale"),
    (r"mm_soft_emb_norm", "mm.soft_emb_norm"),
    (r"mm_input_projection|embed_vision\.embedding_projection", "mm.input_projection"),
    (r"multi_modal_projector\.norm|mm_projector\.pre_norm", "mm.input_norm"),
    (r"mm_projector\.in_proj", "mm.1"),
    (r"mm_projector\.out_proj", "mm.2"),
)
_PROJECTORS: Mapping[str, Mapping[str, str]] = {
    "internvl": {"layer_norm": "mm.model.mlp.0", "linear_1": "mm.model.mlp.1", "linear_2": "mm.model.mlp.3"},
    "llama4": {"linear_1": "mm.model.fc"},
    "pixtral": {"linear_1": "mm.1", "linear_2": "mm.2"},
    "minimax_m3": {
        "linear_1": "mm.1",
        "linear_2": "mm.2",
        "merge_linear_1": "mm.merger.fc1",
        "merge_linear_2": "mm.merger.fc2",
    },
    "lfm2": {"layer_norm": "mm.input_norm", "linear_1": "mm.1", "linear_2": "mm.2"},
}
"""Of multi_modal_projector: names that mean something else from projector to projector."""

_BLOCK = re.compile(
    r".*\.(?:blocks|layers?)\.(?P<number>\d{1,9})\.(?:.*\.)?(?P<module>(?!linear\.)\w+)(?:\.linear)?"
    r"\.(?P<kind>weight|bias|(?:in|out)put_(?:min|max))"
)
_SCALE = re.compile(r".*\.layer\.(?P<number>\d{1,9})\.(?P<module>lambda_[12])")
_DEEPSTACK = re.compile(
    r".*\.deepstack_merger_list\.(?P<number>\d{1,9})\.(?:linear_)?(?P<module>norm|fc1|fc2)\.(?P<kind>weight|bias)"
)
_THIRDS = {"q_proj": 0, "k_proj": 1, "v_proj": 2}


def mmproj_beside(path: Path) -> Path | None:
    """Return the projector file beside a GGUF, of several the one that is closest to what towers are published in; None
    where there is none."""
    return beside(path, is_projector, projector_rank)


def mmproj_inside(model: GGUFModel) -> GGUFModel | None:
    """Return the tower that a model's own file holds, as Ollama writes it, as a projector file; None where it holds
    none. Raises UnsupportedError, FormatError, see weights/ollama/towers.py."""
    if not has_tower(model.tensors):
        return None
    architecture, metadata = model.architecture, model.metadata
    shapes = {name: tuple(tensor.shape) for name, tensor in model.tensors.items()}
    said = {**metadata, **projector_metadata(architecture, metadata, shapes)}
    files = list[GGUFFile]()
    for file in model.files:
        names = {name: projector_name(architecture, name, metadata) for name in file.tensors}
        own = {ours: replace(file.tensors[name], name=ours) for name, ours in names.items() if ours is not None}
        files.append(replace(file, metadata=cast(Mapping[str, MetadataValue], said), tensors=own))
    return GGUFModel(files)


class MmprojSource:
    """The tensors of a projector file, dequantized.

    projector: its type, as the file names it. shapes: of the tower's tensors by their names in transformers. heads: of
    attention. deepstack: blocks behind which features are taken.
    """

    def __init__(
        self,
        model: GGUFModel,
        projector: str,
        shapes: Mapping[str, Sequence[int]],
        heads: int,
        deepstack: Sequence[int] = (),
    ):
        self._model, self._projector, self._heads, self._deepstack = model, projector, heads, deepstack
        self._is_ollamas = model.metadata.get("general.architecture") != "clip"
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}

    def find(self, name: str) -> TensorInfo | None:
        """Return facts about the tensor that transformers calls `name`, or None when the file does not hold it."""
        stored = self._stored(name)
        if not stored:
            return None
        tensors = [self._model.tensors[each] for each in stored]
        count, wanted = sum(math.prod(tensor.shape) for tensor in tensors), self._shapes[name]
        if self._is_third(name, stored):
            count //= 3
        shape = wanted if count == math.prod(wanted) else tuple(tensors[0].shape)
        qtype = tensors[0].qtype
        resident = qtype if qtype in (QuantType.F16, QuantType.BF16) else QuantType.F32
        return TensorInfo(name, shape, qtype.name, resident, sum(each.nbytes for each in tensors), stored)

    def dense(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor as a new one of its logical shape. Raises TensorMismatchError when it is missing, or of
        another size."""
        stored, shape = self._stored(name), self._shapes[name]
        if not stored:
            raise TensorMismatchError(f"{self._model.files[0].path} holds no tensor for {name!r}")
        parts = [dequantize(self._model.raw(each), each) for each in stored]
        if self._is_third(name, stored):
            parts = [parts[0].chunk(3)[_THIRDS[_module(name)]]]
        is_of_frames = len(shape) == 5 and len(parts) == 2
        values = torch.stack(parts, 2) if is_of_frames else torch.cat(parts)
        if values.numel() != math.prod(shape):
            raise TensorMismatchError(f"tensor {stored[0]!r} has shape {tuple(values.shape)}, not {shape} as {name}")
        values = values.reshape(shape)
        if stored[0].startswith("mm.soft_emb_norm"):
            values = values - 1.0
        if stored[0] == "v.patch_embd.weight" and self._projector in _CHANNELS_LAST:
            side = math.isqrt(shape[1] // 3)
            values = values.reshape(-1, 3, side, side).permute(0, 2, 3, 1).reshape(shape)
        if name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
            values = self._unpermuted(values)
        return values.to(dtype).contiguous()

    def _unpermuted(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of queries or keys, or their biases, one rotated half of each head behind the other."""
        if self._projector == "kimik25":  # pairs of one axis behind those of the other
            pairs = rows.reshape(self._heads, 2, -1, 2, *rows.shape[1:]).transpose(1, 2)
            return pairs.reshape(self._heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
        if self._projector == "minimax_m3":
            order = _by_halves(len(rows) // self._heads)
            return rows.reshape(self._heads, -1, *rows.shape[1:])[:, order.argsort()].reshape(rows.shape)
        if self._projector == "pixtral" and not self._is_ollamas:
            return rows.reshape(self._heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
        return rows

    def _stored(self, name: str) -> tuple[str, ...]:
        """The names in the file of what a tensor is made of; none where it is not there."""
        for names in self._candidates(name):
            if all(each in self._model.tensors for each in names):
                return names
        return ()

    def _candidates(self, name: str) -> Iterator[tuple[str, ...]]:
        deep, block, scale = _DEEPSTACK.fullmatch(name), _BLOCK.fullmatch(name), _SCALE.fullmatch(name)
        if deep is not None:
            if int(deep["number"]) < len(self._deepstack):
                yield (f"v.deepstack.{self._deepstack[int(deep['number'])]}.{deep['module']}.{deep['kind']}",)
        elif scale is not None:
            ours = f"v.blk.{scale['number']}.{_of_block(scale['module'])}"
            yield from ((f"{ours}.weight",), (ours,))
        elif block is not None:
            yield from self._of_block(name, block)
        else:
            yield from self._outside(name)

    def _of_block(self, name: str, block: re.Match[str]) -> Iterator[tuple[str, ...]]:
        prefix, kind, module = f"v.blk.{block['number']}.", block["kind"], block["module"]
        part = _OWN_IN_BLOCKS.get(self._projector, {}).get(module) or _of_block(module)
        if part in ("ffn_up", "ffn_down") and f"{prefix}ffn_gate.{kind}" not in self._model.tensors:
            up, width = self._shape(f"{prefix}ffn_up.weight"), self._shape(f"{prefix}attn_out.weight")[:1]
            if up[:1] == width != up[1:]:  # older converters wrote them under each other's names
                part = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}[part]
        yield (f"{prefix}{part}.{kind}",)
        if part == "ln2":  # as the converter of Llama 4 writes it, where one name has two meanings
            yield (f"{prefix}attn_post_norm.{kind}",)
        if part == "attn_qkv":
            yield tuple(f"{prefix}attn_{each}.{kind}" for each in "qkv")
        if _module(name) in _THIRDS:
            yield (f"{prefix}attn_qkv.{kind}",)

    def _shape(self, stored: str) -> tuple[int, ...]:
        info = self._model.info(stored)
        return () if info is None else tuple(info.shape)

    def _outside(self, name: str) -> Iterator[tuple[str, ...]]:
        module, _, kind = name.rpartition(".")
        if kind not in ("weight", "bias"):  # a parameter by itself
            module, kind = name.removesuffix("_weight"), "weight"
        last = module.rpartition("multi_modal_projector.")[2]
        ours = _PROJECTORS.get(self._projector, {}).get(last)
        for pattern, found in _OUTSIDE:
            if ours is None and re.search(rf"(?:^|\.)(?:{pattern})$", module):
                ours = found
        if ours is None:
            return
        if len(self._shapes[name]) == 5:
            yield (f"{ours}.{kind}", f"{ours}.{kind}.1")
        yield (f"{ours}.{kind}",)
        if kind == "weight":
            yield (ours,)

    @staticmethod
    def _is_third(name: str, stored: Sequence[str]) -> bool:
        """Whether a parameter is a third of what is stored, for queries, keys and values."""
        return _module(name) in _THIRDS and ".attn_qkv." in stored[0]


def _by_halves(head: int) -> torch.Tensor:
    """Return the order in which the converter writes rows of a head of MiniMax-M3 (int64 [head]): of each axis of three
    the two rotated halves together, where transformers has the first halves of all axes and then the second ones."""
    half = (head // 2) * 2 // 3 // 2
    axes = [range(start + at * half, start + (at + 1) * half) for at in range(3) for start in (0, 3 * half)]
    return torch.tensor([*(row for rows in axes for row in rows), *range(6 * half, head)])


def _module(name: str) -> str:
    return name.rpartition(".")[0].rpartition(".")[2]


def _of_block(module: str) -> str:
    return next((ours for ours, theirs in _IN_BLOCKS.items() if module in theirs), module)
