"""Makes the tensors of a GGUF from the parameters of a model of `transformers`: what `weights/gguf/source.py` undoes.

Names, and what changes, are those by which such files are read (`weights/gguf/names.py`); here the changes are
undone the other way round. Knows no metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from ktransformers.convert.tensors import Matrix, OutTensor
from ktransformers.errors import UnsupportedError
from ktransformers.kernels.types import ExpertWeights, OwnType, QuantType, RawTensor
from ktransformers.models.facts import ModelFacts
from ktransformers.models.registry import routed_experts
from ktransformers.operators.experts.routed import read_layout
from ktransformers.weights.gguf.names import Change, GGUFNames, Stored
from ktransformers.weights.gguf.recurrent_forms import Form
from ktransformers.weights.mapped_file import typed_view
from ktransformers.weights.quantize.transcode import dequantize
from ktransformers.weights.source import ExpertsLayout, WeightSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["WantedNames", "hf_tensors"]

_DTYPES = {QuantType.F32: torch.float32, QuantType.F16: torch.float16, QuantType.BF16: torch.bfloat16}


class WantedNames:
    """Stand-in for the names of a file that is not written yet: all that are spelled right.

    Of the forms that files have for the same thing this wants llama.cpp's present one: the two halves of kv_b.
    """

    def __contains__(self, name: object) -> bool:
        text = str(name)
        base, _, suffix = text.rpartition(".")
        is_whole = base.endswith((".attn_kv_b", ".attn_qkv"))
        return suffix in ("weight", "bias", "scale") and not is_whole and not base.endswith((".weight", ".bias"))


@dataclass(frozen=True, slots=True)
class _Part:
    """What a parameter becomes: a tensor's name and shape, and how its numbers are made of the parameter's."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[torch.Tensor], torch.Tensor] | None = None


def hf_tensors(model: PreTrainedModel, facts: ModelFacts, source: WeightSource, arch: str) -> list[OutTensor]:
    """Return the tensors of a model on meta whose weights are in `source`, as a GGUF of architecture `arch` has them.

    Raises UnsupportedError for a parameter that the architecture has no place for, TensorMismatchError for one that is
    missing.
    """
    names = GGUFNames(arch, facts, WantedNames())
    experts = routed_experts(model)
    layouts = {key: read_layout(model.get_submodule(key), key) for key in experts}

    @lru_cache(maxsize=1)  # the tensors of one layer are read one after the other
    def loaded(key: str) -> ExpertWeights:
        return source.experts(key, layouts[key])

    out: list[OutTensor] = []
    written: set[str] = set()
    for name in model.state_dict():
        key = name.rpartition(".")[0]
        if key in experts:
            if key not in written:
                written.add(key)
                out += _expert_tensors(source, names, key, layouts[key], loaded)
        elif not (facts.is_tied and name == "lm_head.weight"):
            out += _parameter(source, names, facts, name)
    return out


def _parameter(source: WeightSource, names: GGUFNames, facts: ModelFacts, name: str) -> Iterator[OutTensor]:
    stored = names.find(name)
    if stored is None or stored.form is not Form.AS_STORED or stored.rows is not None or stored.columns is not None:
        raise UnsupportedError(f"{name} has no place in a GGUF file that this program writes")
    info = source.find(name)
    if info is None:
        source.dense(name)  # raises, with what to do
        raise UnsupportedError(f"{name} is in no file")
    for part in _parts(stored, info.shape, facts):
        yield OutTensor(part.name, part.shape, info.stored_type, _opener(source, name, part))


def _opener(source: WeightSource, name: str, part: _Part) -> Callable[[], Sequence[Matrix]]:
    def matrices() -> Sequence[Matrix]:
        info = source.find(name)
        assert info is not None  # it was, when the file was laid out
        if info.is_fp8 and part.make is None:
            return [source.fp8(name)]
        # FP8 that is read as BF16 would be rounded twice.
        values = source.dense(name) if "F8" in info.stored_type else _values(source.tensor(name))
        made = values if part.make is None else part.make(values)
        cols = part.shape[-1]
        rows = part.shape[-2] if len(part.shape) > 1 else 1
        return list(made.reshape(-1, rows, cols))

    return matrices


def _values(raw: RawTensor) -> torch.Tensor:
    """A tensor's numbers, of floats without a copy."""
    if raw.qtype not in _DTYPES:
        return dequantize(raw, "a matrix of safetensors")
    return typed_view(raw.data, _DTYPES[raw.qtype]).reshape(raw.shape)


def _parts(stored: Stored, shape: tuple[int, ...], facts: ModelFacts) -> list[_Part]:
    """What the parameter of `shape` becomes. Dimensions of size 1 are dropped, as llama.cpp's converter does."""
    name = stored.names[0]
    squeezed = tuple(size for size in shape if size != 1) or (1,)
    if stored.change is Change.NONE:
        return [_Part(name, squeezed)]
    if stored.change is Change.UNPERMUTE_ROWS:
        return [_Part(name, squeezed, lambda values: _permuted(values, stored.heads))]
    if stored.change is Change.SUBTRACT_ONE:
        return [_Part(name, squeezed, lambda values: values.float() + 1)]
    if stored.change is Change.TRANSPOSE:
        return [_Part(name, squeezed[::-1], lambda values: values.T)]
    if stored.change is Change.KV_B_FROM_PARTS:
        return _split_kv_b(stored, facts)
    if stored.change is Change.CONCAT_ROWS:
        half = shape[0] // len(stored.names)
        return [_Part(one, (half, *shape[1:]), _rows(at * half, half)) for at, one in enumerate(stored.names)]
    raise UnsupportedError(f"{name} is computed from a parameter in a way that this program does not write")


def _rows(start: int, count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda values: values[start : start + count]


def _permuted(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from two halves that rotate together to neighbours that do."""
    rest = values.shape[1:]
    return values.reshape(heads, 2, -1, *rest).transpose(1, 2).reshape(values.shape)


def _split_kv_b(stored: Stored, facts: ModelFacts) -> list[_Part]:
    latent = facts.latent
    assert latent is not None  # kv_b_proj is a module of latent attention
    heads, nope, width, rank = stored.heads, latent.nope_dim, latent.v_dim, latent.rank

    def by_head(values: torch.Tensor) -> torch.Tensor:
        return values.reshape(heads, nope + width, rank)

    return [
        _Part(stored.names[0], (heads, rank, nope), lambda values: by_head(values)[:, :nope].transpose(1, 2)),
        _Part(stored.names[1], (heads, width, rank), lambda values: by_head(values)[:, nope:]),
    ]


def _expert_tensors(
    source: WeightSource,
    names: GGUFNames,
    key: str,
    layout: ExpertsLayout,
    loaded: Callable[[str], ExpertWeights],
) -> Iterator[OutTensor]:
    """One tensor for each projection of all experts, and their biases. loaded: the weights of a module's experts."""
    info = source.find_experts(key, layout)
    if info is None:
        source.experts(key, layout)  # raises, with what to do
        raise UnsupportedError(f"{key} is in no file")
    block = names.block(key)

    def opener(part: str) -> Callable[[], Sequence[Matrix]]:
        return lambda: [_expert(weight) for weight in getattr(loaded(key), part)]

    def bias(part: str) -> Callable[[], Sequence[Matrix]]:
        return lambda: [getattr(loaded(key), f"{part}_bias")]

    count, inner, hidden = layout.num_experts, layout.intermediate_size, layout.hidden_size
    parts = [part for part in ("gate", "up", "down") if getattr(info, part) is not None]
    for part in parts if layout.has_bias else ():
        width = hidden if part == "down" else inner
        yield OutTensor(f"{block}ffn_{part}_exps.bias", (count, width), "F32", bias(part))
    for part in parts:
        one = getattr(info, part)
        yield OutTensor(f"{block}ffn_{part}_exps.weight", one.shape, one.stored_type, opener(part))


def _expert(weight: object) -> Matrix:
    if isinstance(weight, RawTensor) and weight.qtype in _DTYPES:
        return _values(weight)
    assert isinstance(weight, RawTensor) or getattr(weight, "qtype", None) is OwnType.F8_E4M3
    return weight  # type: ignore[return-value]
