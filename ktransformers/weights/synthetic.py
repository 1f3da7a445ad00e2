"""Random weights made in memory when they are asked for, as a WeightSource: to measure speed without a model's files.

Blocks are those of llama.cpp's Q4_K_M mixture as it is usually measured: matrices Q4_K, the LM head and the experts'
down projections Q6_K, the split latent up-projections Q8_0, routers and vectors F32. Rows that blocks of 256 cannot
hold are Q8_0, or F32 when blocks of 32 cannot either. Gpt-oss and DeepSeek-V4 are as published: experts MXFP4, other
matrices of as many bits (Q8_0). Tables of each token's experts hold any of them, F32;
tables of n-grams are IQ4_NL.

Every matrix has zero mean, and embeddings are large beside what layers add to them. Otherwise the hidden states of all
tokens would collapse to one direction, all tokens would choose the same experts, and batched figures would be a lie.
A tensor follows from its name alone: neither threads nor the order of loading change it.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ktransformers.errors import TensorMismatchError
from ktransformers.kernels.types import ExpertWeights, Fp8Matrix, QuantType, RawTensor, block_size, row_bytes, type_size
from ktransformers.models.facts import ModelFacts
from ktransformers.models.registry import family_of
from ktransformers.system.cores import usable_cores
from ktransformers.weights.quantize.transcode import dequantize
from ktransformers.weights.source import ExpertBiases, ExpertsInfo, ExpertsLayout, MappedExperts, TensorInfo

__all__ = ["ROUTINGS", "SyntheticSource", "random_blocks", "skewed_gain"]

ROUTINGS = ("even", "skewed")
"""How tokens choose experts: all about equally often, or a quarter of each layer's for SKEWED_SHARE of the picks."""

SKEWED_SHARE = 0.7

EMBEDDING_GAIN = 1000.0
"""Embeddings have a standard deviation of about 1, other matrices of about 0.02."""

_CHUNK = 4 << 20  # bytes that one thread makes at a time
_ROUTER = re.compile(r"(?:gate|router)(?:\.wg)?\.weight$")
_NGRAMS = re.compile(r"\.ngram_embedding\.weight$")  # as published files have it
_CONVOLUTION = re.compile(r"\.conv(?:1d|\.conv)\.weight$")  # short ones, of recurrent layers
_DECAYS = ".A_log"
_TABLE = ".tid2eid"
_KV_B = ".self_attn.kv_b_proj.weight"

# Of one block: bytes where its fp16 scale begins, and what the scale is about.
_SCALES = {
    QuantType.Q4_K: (0, 1e-4),
    QuantType.Q6_K: (208, 2e-5),
    QuantType.Q8_0: (0, 2e-4),
    QuantType.IQ4_NL: (0, 2.5e-4),
}

_MXFP4_EXPONENT = 119  # or one more: times numbers in -6 .. 6 with a root mean square of 2.9


@dataclass(frozen=True, slots=True)
class _Mixture:
    """Types of matrices, of the LM head, and of experts' gate and up and their down projections."""

    matrices: QuantType
    head: QuantType
    first: QuantType
    down: QuantType


_Q4_K_M = _Mixture(QuantType.Q4_K, QuantType.Q6_K, QuantType.Q4_K, QuantType.Q6_K)
_MIXTURES = {"MXFP4": _Mixture(QuantType.Q8_0, QuantType.Q8_0, QuantType.MXFP4, QuantType.MXFP4)}

_U8 = npt.NDArray[np.uint8]


def random_blocks(out: _U8, qtype: QuantType, seed: Sequence[int], gain: float = 1.0) -> None:
    """Fill uint8 [n] with random blocks of Q4_K, Q6_K, Q8_0, IQ4_NL or MXFP4 whose weights have zero mean.

    Their standard deviation is about 0.015 (Q8_0), 0.017 (Q4_K, IQ4_NL), 0.018 (MXFP4) or 0.027 (Q6_K), times gain (for
    MXFP4 the next power of two). n must be a multiple of the block's bytes. The same seed gives the same bytes.
    """
    generator = np.random.Generator(np.random.SFC64(list(seed)))
    words = generator.integers(0, 2**64 - 1, size=-(-out.size // 8), dtype=np.uint64, endpoint=True)
    out[:] = words.view(np.uint8)[: out.size]
    blocks = out.reshape(-1, type_size(qtype))
    if qtype is QuantType.MXFP4:
        blocks[:, 0] = _MXFP4_EXPONENT + round(math.log2(gain)) + (blocks[:, 0] & 1)
        return
    at, scale = _SCALES[qtype]
    sign = np.where(blocks[:, at] & 1, np.float32(1), np.float32(-1))
    scales = (sign * np.float32(scale * gain) * _about_one(generator, len(blocks))).astype(np.float16)
    blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    if qtype is QuantType.Q4_K:
        # weight = d * scale * q - dmin * min with q in 0 .. 15: min == scale and dmin == 7.5 d center it. Of the 12
        # bytes of 6-bit numbers, 0 - 3 and 4 - 7 hold the first four scales and mins and, in their upper bits, parts of
        # the others, whose lower bits are in 8 - 11.
        blocks[:, 2:4] = (scales * np.float16(7.5)).view(np.uint8).reshape(-1, 2)
        blocks[:, 8:12] = blocks[:, 4:8]
        blocks[:, 12:16] = (blocks[:, 12:16] & 15) * 17


def _about_one(generator: np.random.Generator, count: int) -> npt.NDArray[np.float32]:
    values: npt.NDArray[np.float32] = 1 + np.float32(0.1) * generator.standard_normal(count, dtype=np.float32)
    return values


def _held_as(wanted: QuantType, cols: int) -> QuantType:
    """`wanted` if rows of `cols` weights can be that type, else the next type that they can be."""
    fits = (qtype for qtype in (wanted, QuantType.Q8_0) if cols % block_size(qtype) == 0)
    return next(fits, QuantType.F32)


def skewed_gain(num_experts: int, top_k: int) -> float:
    """Return how much longer a router's rows are for a quarter of the experts, which then have SKEWED_SHARE of the
    picks.

    Logits of random rows are normal: longer rows spread them, and the top_k largest are more often theirs.
    """
    generator = np.random.Generator(np.random.SFC64(0))
    logits = generator.standard_normal((1024, num_experts), dtype=np.float32)
    num_hot, gains = max(num_experts // 4, 1), np.ones(num_experts, np.float32)
    least, most = 1.0, 16.0
    for _ in range(20):
        gains[:num_hot] = middle = (least * most) ** 0.5
        chosen = np.argpartition(-logits * gains, min(top_k, num_experts - 1), axis=1)[:, :top_k]
        least, most = (middle, most) if (chosen < num_hot).mean() < SKEWED_SHARE else (least, middle)
    return float((least * most) ** 0.5)


class SyntheticSource:
    """WeightSource over nothing but names and shapes.

    shapes: of every parameter and persistent buffer of the module tree, by Hugging Face name; experts' fused parameters
    may be among them and are not looked at. facts: the model's, for the split form of latent attention's kv_b_proj.
    routing: of ROUTINGS; routers that choose among groups, or by a bias, are skewed less. stands_for_files: only plans
    are made of it, in which tables of n-grams are in mapped files, as those of the published model are.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        facts: ModelFacts,
        routing: str = ROUTINGS[0],
        *,
        stands_for_files: bool = False,
    ):
        self.stands_for_files = stands_for_files
        self._top_k, self._num_experts = facts.top_k() or 1, 0 if facts.experts is None else facts.experts.num_experts
        self.routing, self._is_skewed = routing, routing != ROUTINGS[0]
        self._shapes = {name: tuple(shape) for name, shape in shapes.items() if ".experts." not in name}
        self._model_type = facts.model_type
        self._mixture = _MIXTURES.get(family_of(facts.model_type).expert_type or "", _Q4_K_M)
        for name in [name for name in self._shapes if name.endswith(_KV_B)]:
            prefix, heads, latent = name.removesuffix(_KV_B), facts.num_heads, facts.latent
            assert latent is not None  # kv_b_proj is a module of latent attention
            self._shapes[f"{prefix}.self_attn.k_b_proj.weight"] = (heads, latent.rank, latent.nope_dim)
            self._shapes[f"{prefix}.self_attn.v_b_proj.weight"] = (heads, latent.v_dim, latent.rank)

    def describe(self) -> str:
        """Return a line for the console about the made weights."""
        names = dict.fromkeys(kind.name for kind in (self._mixture.first, self._mixture.down, self._mixture.matrices))
        return f"random weights in the shape of {self._model_type}, {' and '.join(names)}"

    def stored_names(self) -> Sequence[str]:
        """Return the name of every tensor there is, experts excepted."""
        return tuple(self._shapes)

    def ignorable(self, stored_name: str) -> bool:
        """Whether a tensor may be left unread: latent attention reads one form of kv_b_proj of two."""
        return stored_name.endswith((_KV_B, ".k_b_proj.weight", ".v_b_proj.weight"))

    def stored_bytes(self, stored_name: str) -> torch.Tensor | None:
        """Return None: there are no files. Of a table that a plan has in files: bytes on `meta`."""
        if not (self.stands_for_files and _NGRAMS.search(stored_name)):
            return None
        return torch.empty(self._found(stored_name).nbytes, dtype=torch.uint8, device="meta")

    def find(self, name: str) -> TensorInfo | None:
        """Return facts about the tensor that HF calls `name`, or None for a name that the model does not have."""
        shape = self._shapes.get(name)
        return None if shape is None else _info(name, shape, self._type(name, shape))

    def tensor(self, name: str) -> RawTensor:
        """Return a tensor in its block type. Raises TensorMismatchError for a name that the model does not have."""
        info = self._found(name)
        if name.endswith(_TABLE):
            return RawTensor.from_tensor(self._table(name, info.shape))
        if info.resident_type is QuantType.F32:
            values = _floats(name, info.shape)
            if self._is_skewed and _ROUTER.search(name) and len(info.shape) == 2:
                generator = np.random.Generator(np.random.SFC64(zlib.crc32(name.encode()) + 1))
                hot = torch.from_numpy(generator.permutation(info.shape[0])[: max(info.shape[0] // 4, 1)])
                values[hot] *= skewed_gain(info.shape[0], self._top_k)
            return RawTensor.from_tensor(values)
        data = torch.empty(info.nbytes, dtype=torch.uint8)
        _fill(name, data, info.resident_type, EMBEDDING_GAIN if name.endswith("embed_tokens.weight") else 1.0)
        return RawTensor(data, info.resident_type, info.shape)

    def fp8(self, name: str) -> Fp8Matrix:
        """Raise TensorMismatchError: no synthetic weights are FP8."""
        raise TensorMismatchError(f"{name!r} is not FP8: random weights are quantized in blocks")

    def dense(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the values of `tensor(name)`, as a new tensor."""
        return dequantize(self.tensor(name), name, dtype)

    def find_experts(self, key: str, layout: ExpertsLayout, quantize_to: QuantType | None = None) -> ExpertsInfo | None:
        """Return facts about the experts of module `key`. They are quantized already: quantize_to changes nothing."""
        count, hidden, inner = layout.num_experts, layout.hidden_size, layout.intermediate_size
        first = _held_as(self._mixture.first, hidden)
        shapes = dict.fromkeys(("gate", "up") if layout.has_gate else ("up",), (count, inner, hidden))
        infos = {part: _info(f"{key}.{part}", shape, first) for part, shape in shapes.items()}
        infos["down"] = _info(f"{key}.down", (count, hidden, inner), _held_as(self._mixture.down, inner))
        biases = infos.values() if layout.has_bias else ()
        return ExpertsInfo.of(infos, {_bias_name(part): part.shape[:2] for part in biases})

    def experts(self, key: str, layout: ExpertsLayout, quantize_to: QuantType | None = None) -> ExpertWeights:
        """Return the experts of module `key`, each with numbers and memory of its own."""
        info = self.find_experts(key, layout, quantize_to)
        assert info is not None
        gate = None if info.gate is None else _expert_matrices(info.gate)
        return ExpertWeights(gate, _expert_matrices(info.up), _expert_matrices(info.down), *_biases(info, layout))

    def mapped_experts(self, key: str, layout: ExpertsLayout, quantize_to: QuantType | None = None) -> MappedExperts:
        """Return the biases of module `key`, and that its matrices are in no file."""
        info = self.find_experts(key, layout, quantize_to)
        assert info is not None
        return MappedExperts(None, None, None, _biases(info, layout), "random weights are in no file")

    def _found(self, name: str) -> TensorInfo:
        info = self.find(name)
        if info is None:
            raise TensorMismatchError(f"the model has no tensor {name!r}: no random weights can be made for it")
        return info

    def _table(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Different experts for each token, fp32 [tokens, top_k]."""
        generator = np.random.Generator(np.random.SFC64(zlib.crc32(name.encode())))
        first = generator.integers(0, self._num_experts, (shape[0], 1))
        step = generator.integers(1, max(self._num_experts // shape[1], 2), (shape[0], 1))
        return torch.from_numpy(((first + step * np.arange(shape[1])) % self._num_experts).astype(np.float32))

    def _type(self, name: str, shape: tuple[int, ...]) -> QuantType:
        if len(shape) < 2 or name.endswith((_DECAYS, _TABLE)) or _ROUTER.search(name) or _CONVOLUTION.search(name):
            return QuantType.F32
        if _NGRAMS.search(name):
            return _held_as(QuantType.IQ4_NL, shape[-1])
        if len(shape) == 3:
            return _held_as(QuantType.Q8_0, shape[-1])
        return _held_as(self._mixture.head if name == "lm_head.weight" else self._mixture.matrices, shape[-1])


def _info(name: str, shape: tuple[int, ...], qtype: QuantType) -> TensorInfo:
    nbytes = math.prod(shape[:-1]) * row_bytes(qtype, shape[-1])
    return TensorInfo(name, shape, qtype.name, qtype, nbytes, (name,))


def _bias_name(part: TensorInfo) -> str:
    return f"{part.name}.bias"


def _floats(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Norms are 1, biases close to 0; matrices are like the quantized ones; what convolutions sum keeps its size."""
    if "norm" in name and name.endswith("weight"):
        return torch.ones(shape)
    generator = np.random.Generator(np.random.SFC64(zlib.crc32(name.encode())))
    spread = 0.001 if name.endswith("bias") else EMBEDDING_GAIN * 0.0168 if "embed_tokens" in name else 0.02
    if _CONVOLUTION.search(name):
        spread = shape[-1] ** -0.5
    return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32) * np.float32(spread))


def _biases(info: ExpertsInfo, layout: ExpertsLayout) -> ExpertBiases:
    if not layout.has_bias:
        return ExpertBiases()
    parts = (info.gate, info.up, info.down)
    return ExpertBiases(*(None if part is None else _floats(_bias_name(part), part.shape[:2]) for part in parts))


def _expert_matrices(info: TensorInfo) -> list[RawTensor]:
    """E matrices [rows, cols] side by side in one new buffer."""
    if info.resident_type is QuantType.F32:
        return [RawTensor.from_tensor(part) for part in _floats(info.name, info.shape)]
    whole = RawTensor(torch.empty(info.nbytes, dtype=torch.uint8), info.resident_type, info.shape)
    _fill(info.name, whole.data, info.resident_type)
    return [whole.select(expert) for expert in range(info.shape[0])]


def _fill(name: str, data: torch.Tensor, qtype: QuantType, gain: float = 1.0) -> None:
    """Random blocks for all of `data`, by all cores: numpy lets go of the GIL."""
    seed, step = zlib.crc32(name.encode()), _CHUNK // type_size(qtype) * type_size(qtype)
    out: _U8 = data.numpy()

    def fill(start: int) -> None:
        random_blocks(out[start : start + step], qtype, (seed, start // step), gain)

    with ThreadPoolExecutor(max_workers=usable_cores()) as pool:
        list(pool.map(fill, range(0, out.size, step)))
