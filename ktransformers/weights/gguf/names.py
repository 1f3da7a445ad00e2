"""Maps Hugging Face module names to the tensors of a GGUF file. Knows names and row orders, reads no bytes.

Names come from the `gguf` package's own maps, and from extra_names.py. How llama.cpp's converter changes a tensor on
its way in is said by the architecture's record (models/gguf/fields.py) and by a handful of rules here. A file of any
other architecture is refused, because a changed tensor would load without a complaint and compute garbage.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from enum import Enum, auto

import gguf

from ktransformers.errors import UnsupportedError
from ktransformers.models.facts import ModelFacts
from ktransformers.models.gguf.families import FAMILIES
from ktransformers.models.gguf.refused import check_architecture
from ktransformers.weights.gguf.extra_names import (
    BY_ENDING,
    CONVOLUTION,
    IN_PARTS,
    NEWER,
    NewerNames,
    converted_name,
)
from ktransformers.weights.gguf.recurrent_forms import (
    Form,
    ba_rows,
    form_of,
    tiled_rows,
    value_columns,
)

__all__ = [
    "Change",
    "GGUFNames",
    "Stored",
    "ignorable_gguf",
    "is_of_other_parts",
    "is_table",
]


class Change(Enum):
    """Changes of a file's tensors that make them what the module tree expects."""

    NONE = auto()
    UNPERMUTE_ROWS = auto()  # rows of each head alternate between the two rotary halves; put the halves back
    SUBTRACT_ONE = auto()  # the file holds 1 + weight
    CONCAT_ROWS = auto()  # one tensor per part, all of one width
    TRANSPOSE = auto()  # the module has [in, out]
    KV_B_FROM_PARTS = auto()  # (k_b [H, R, nope], v_b [H, V, R]) -> [H * (nope + V), R]
    LOG_OF_NEGATIVE = auto()  # the file holds -exp(values)
    LOG = auto()  # the file holds exp(values)
    WHOLE_NUMBERS = auto()  # int32, which F32 holds exactly


@dataclass(frozen=True, slots=True)
class Stored:
    """Tensors of a file of which one parameter is made. heads: for UNPERMUTE_ROWS and KV_B_FROM_PARTS.

    rows: the file's row for each of the parameter's; None: in order. columns: the same for runs of `run` columns, of
    which some may be left out.
    """

    names: tuple[str, ...]
    change: Change = Change.NONE
    heads: int = 0
    rows: tuple[int, ...] | None = None
    columns: tuple[int, ...] | None = None
    run: int = 0
    form: Form = Form.AS_STORED


_ARCH_IDS = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_SUFFIXES = (".weight", ".bias")
_QKV = re.compile(r"\.self_attn\.([qkv])_proj(\.weight|\.bias)$")

_IGNORABLE = (
    re.compile(r"rope_freqs\.weight"),  # llama 3's frequency factors: config_from_gguf turns them into rope parameters
    re.compile(r"rope_factors_(long|short)\.weight"),  # longrope's factors: part of the config
    re.compile(r"blk\.\d+\.nextn\..*"),  # multi-token prediction head: drafts tokens, is no part of the model's answer
    re.compile(r"blk\.\d+\.attn_rot_embd(\..*)?"),  # rotary frequencies of very old files: computed from the config
)


_OTHER_PARTS = re.compile(r"(v|a|mm|mtp|resampler)\..*")


def is_of_other_parts(name: str) -> bool:
    """Whether a tensor belongs to a part for images or sound, or that drafts, which Ollama keeps in the same file."""
    return _OTHER_PARTS.fullmatch(name) is not None


def is_table(stored: str) -> bool:
    """Whether a tensor of a file holds whole numbers: the experts of each token."""
    return stored.endswith(".ffn_gate_tid2eid.weight")


def ignorable_gguf(name: str, stored: Container[str], num_layers: int) -> bool:
    """Whether a tensor that no module asked for may be left over without an error.

    stored: all names of the file. num_layers: the model's layers; blocks beyond them belong to multi-token prediction.
    """
    if is_of_other_parts(name) or any(pattern.fullmatch(name) for pattern in _IGNORABLE):
        return True
    block = re.match(r"blk\.(\d+)\.", name)
    if block is None:
        return False
    if int(block[1]) >= num_layers:
        return True
    # Some converters write kv_b both whole and split; the split halves are what is read then.
    return name == f"{block[0]}attn_kv_b.weight" and f"{block[0]}attn_k_b.weight" in stored


class GGUFNames:
    """Names of one model: `arch` is the file's `general.architecture`, `facts` are the model's."""

    def __init__(self, arch: str, facts: ModelFacts, stored: Container[str]):
        check_architecture(arch, FAMILIES)
        if arch not in _ARCH_IDS and arch not in NEWER:
            raise UnsupportedError(f"the installed gguf package does not know architecture {arch!r}; update it")
        self._arch, self._family = arch, FAMILIES[arch]
        self._stored = stored
        self._facts = facts
        self._map: NewerNames | gguf.TensorNameMap = (
            NewerNames(arch, stored) if arch in NEWER else gguf.get_tensor_name_map(_ARCH_IDS[arch], facts.num_layers)
        )

    def find(self, name: str) -> Stored | None:
        """Return the tensors that HF's parameter or buffer `name` is made of, or None when the file has none."""
        if name.endswith(_IN_FILES_ORDER):  # a module that takes its inputs as the file's columns are
            direct = self._direct(name.replace(".linear.", "."))
            return None if direct is None else Stored((direct,))
        direct = self._direct(name)
        if direct is not None:
            return self._changed(name, direct)
        if name.endswith("self_attn.kv_b_proj.weight"):
            parts = tuple(self._direct(name.replace("kv_b_proj", part)) for part in ("k_b_proj", "v_b_proj"))
            if parts[0] is not None and parts[1] is not None:
                return Stored((parts[0], parts[1]), Change.KV_B_FROM_PARTS, self._facts.num_heads)
        joined = self._joined(name)
        if joined is not None:
            return joined
        part = _QKV.search(name)
        if part is not None:
            return self._part_of_qkv(name, part[1], part[2])
        if name == "lm_head.weight" and self._facts.is_tied:
            return self.find("model.embed_tokens.weight")
        return None

    def _joined(self, name: str) -> Stored | None:
        """What modules keep in one parameter, or in several, and files do not."""
        block = self.block(name)
        for ending, choices in IN_PARTS.items():
            for tails in choices if name.endswith(ending) else ():
                names = tuple(f"{block}{tail}.weight" for tail in tails)
                if all(part in self._stored for part in names):
                    form = Form.CONVOLUTION if ending == CONVOLUTION else Form.AS_STORED
                    return Stored(names, Change.CONCAT_ROWS, form=form)
        if name.endswith("shared_mlp.output_linear.weight") and f"{block}ffn_down.weight" in self._stored:
            return Stored((f"{block}ffn_down.weight",))
        if name.endswith(_EH_HALVES) and f"{block}nextn.eh_proj.weight" in self._stored:
            half = int(name.endswith(_EH_HALVES[1]))
            return Stored((f"{block}nextn.eh_proj.weight",), columns=(half,), run=self._facts.hidden_size)
        split = _BA.search(name)
        if split is not None and self._facts.delta is not None and f"{block}ssm_ba.weight" in self._stored:
            return Stored((f"{block}ssm_ba.weight",), rows=ba_rows(self._facts.delta, split[1]))
        return None

    def _part_of_qkv(self, name: str, part: str, suffix: str) -> Stored | None:
        """Queries, keys and values, which some files keep in one tensor, in this order."""
        stored = f"{self.block(name)}attn_qkv{suffix}"
        if stored not in self._stored:
            return None
        layer = self._facts.layers[int(_LAYER.findall(name)[0])]
        counts = {
            "q": layer.num_heads * layer.head_dim,
            "k": layer.num_kv_heads * layer.head_dim,
            "v": layer.num_kv_heads * layer.v_head_dim,
        }
        first, count = sum(counts[before] for before in "qkv"[: "qkv".index(part)]), counts[part]
        rows = range(first, first + count)
        if self._family.permuted_qk and part in "qk":  # each before they were joined
            half = layer.head_dim // 2
            heads = range(0, count, layer.head_dim)
            return Stored(
                (stored,), rows=tuple(rows[at + 2 * i + odd] for at in heads for odd in (0, 1) for i in range(half))
            )
        return Stored((stored,), rows=tuple(rows))

    def block(self, name: str) -> str | None:
        """Return the prefix ("blk.3.") of the layer that a module or parameter belongs to."""
        match = _LAYER.search(name)
        return None if match is None else f"blk.{match[1]}."

    def _direct(self, name: str) -> str | None:
        block = self.block(name)
        for ending, tail in BY_ENDING.items():
            if block is not None and name.endswith(ending):
                tails = (tail, tail.removesuffix(".bias"))  # hy_v3's correction has no suffix
                return next((block + one for one in tails if block + one in self._stored), None)
        mapped = self._map.get_name(converted_name(name), try_suffixes=_SUFFIXES)
        # Parameters without a suffix of their own (attention sinks) are stored as ".weight".
        for candidate in (mapped, f"{mapped}.weight"):
            if mapped is not None and candidate in self._stored:
                return str(candidate)
        return None

    def _changed(self, name: str, stored: str) -> Stored:
        if self._family.permuted_qk and name.endswith(_PERMUTED):
            layer = self._facts.layers[int(_LAYER.findall(name)[0])]
            heads = layer.num_kv_heads if ".k_proj." in name else layer.num_heads
            return Stored((stored,), Change.UNPERMUTE_ROWS, heads)
        if self._family.qkv_by_part and ".query_key_value." in name:
            return Stored((stored,), rows=self._rows_by_head(name))
        if self._family.is_conv1d and name.endswith(_CONV1D):
            return Stored((stored,), Change.TRANSPOSE)
        if self._family.norm_plus_one and _NORM.search(name) and not name.endswith(".linear_attn.norm.weight"):
            return Stored((stored,), Change.SUBTRACT_ONE)
        if is_table(stored):
            return Stored((stored,), Change.WHOLE_NUMBERS)
        change = Change.NONE
        if name.endswith(".A_log"):
            change = Change.LOG if self._family.positive_decay else Change.LOG_OF_NEGATIVE
        form, delta = form_of(name, self._arch), self._facts.delta
        if not self._family.tiled_values or delta is None:
            return Stored((stored,), change, form=form)
        columns = value_columns(name, delta)
        return Stored((stored,), change, 0, tiled_rows(name, delta), columns, delta.value_dim, form)

    def _rows_by_head(self, name: str) -> tuple[int, ...]:
        """Of queries, keys and values that the file has one after the other."""
        layer = self._facts.layers[int(_LAYER.findall(name)[0])]
        heads, size = layer.num_heads, layer.head_dim
        return tuple(
            part * heads * size + head * size + i for head in range(heads) for part in range(3) for i in range(size)
        )


_CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
_PERMUTED = tuple(
    f".{mixer}.{proj}.{kind}"
    for mixer in ("self_attn", "mixer")
    for proj in ("q_proj", "k_proj")
    for kind in ("weight", "bias")
)
_NORM = re.compile(r"norm\.weight$|\.ple\.norm_(?:key|query|conv)\.weight$")
_EH_HALVES = (".fc_embedding.weight", ".fc_hidden.weight")
"""Of multi-token prediction: the first columns of one tensor, and the last."""
_IN_FILES_ORDER = ".linear_attn.out_proj.linear.weight"
_BA = re.compile(r"\.linear_attn\.in_proj_([ab])\.weight$")
