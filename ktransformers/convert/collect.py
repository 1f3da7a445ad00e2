"""Collects activation statistics of a model over a text: how large the activations are that each column is multiplied
with.

The model is computed by transformers' own modules in fp32 from the numbers in its files
(`engine/verify/reference_module.py`), layer by layer, so that one that does not fit into memory in fp32 can be watched
as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ktransformers.config import EngineConfig
from ktransformers.convert.hf_tensors import WantedNames
from ktransformers.convert.imatrix import Imatrix, Statistics
from ktransformers.engine.load.builder import plan_model
from ktransformers.engine.model.opened import OpenedModel, describe_model, open_model
from ktransformers.engine.verify.reference_module import StoredWeights, build_reference_model
from ktransformers.errors import ConfigError
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.models.gguf.of_config import hf_metadata
from ktransformers.models.registry import routed_experts
from ktransformers.operators.attention.rope import resolve_rotations
from ktransformers.optimize.tied import TiedSource
from ktransformers.system.cores import usable_cores
from ktransformers.weights.gguf.names import Change, GGUFNames

__all__ = ["Collector", "chunks_of", "collect"]

logger = logging.getLogger(__name__)

_HEADS = ("lm_head.weight", "model.embed_tokens.weight")  # see one row of each chunk: not worth the product
_BATCH = 8  # chunks that are computed together: weights are read once for them


@dataclass(frozen=True, slots=True)
class _Target:
    """A tensor of the file that a parameter is, or is part of. matrices: how many it has, 1 for a matrix."""

    name: str
    matrices: int = 1


class Collector:
    """Collector of squares of activations, by tensor."""

    def __init__(self, opened: OpenedModel):
        self._opened = opened
        stored = WantedNames() if opened.gguf is None else opened.gguf.tensors
        arch = hf_metadata(opened.hf_config)[0] if opened.gguf is None else opened.gguf.architecture
        self._names = GGUFNames(arch, opened.facts, stored)
        self._stored = stored
        self._experts = routed_experts(opened.model)
        self._targets: dict[str, list[_Target]] = {}
        self.tensors: dict[str, Statistics] = {}

    def observe(self, name: str, expert: int | None, x: torch.Tensor) -> None:
        """Add the squares of activations, fp32 [..., cols], with which a parameter, or one of its experts, is
        multiplied.
        """
        if name not in self._targets:
            self._targets[name] = self._find(name)
        targets = self._targets[name]
        if not targets:
            return
        rows = x.reshape(-1, x.shape[-1])
        sums = rows.square().sum(dim=0, dtype=torch.float64).numpy()
        for target in targets:
            if expert is not None and target.matrices == 1:  # one tensor for each expert
                self._add(target.name.format(expert=expert), 1, slice(None), sums, len(rows))
            else:
                at = slice(None) if expert is None else slice(expert, expert + 1)
                self._add(target.name, target.matrices, at, sums, len(rows))

    def _add(
        self, name: str, matrices: int, at: slice, sums: np.ndarray[tuple[int, ...], np.dtype[np.float64]], count: int
    ) -> None:
        found = self.tensors.get(name)
        if found is None:
            found = self.tensors[name] = Statistics(np.zeros((matrices, len(sums))), np.zeros(matrices))
        found.sums[at] += sums
        found.counts[at] += count

    def _find(self, name: str) -> list[_Target]:
        """The tensors whose columns are multiplied with the parameter's input; none for what is never quantized."""
        key, _, part = name.rpartition(".")
        if key in self._experts:
            return self._find_experts(key, part)
        if name in _HEADS:
            return []
        stored = self._names.find(name)
        if stored is None or stored.columns is not None or stored.change is Change.TRANSPOSE:
            return []
        if stored.change is Change.KV_B_FROM_PARTS:  # k_b is multiplied with queries, which do not show here
            return [_Target(stored.names[1], stored.heads)]
        return [_Target(one) for one in stored.names if one.endswith(".weight")]

    def _find_experts(self, key: str, part: str) -> list[_Target]:
        block, count = self._names.block(key), self._experts[key]
        kinds = {"gate_up_proj": ("gate", "up"), "up_proj": ("up",), "down_proj": ("down",)}.get(part, ())
        found = []
        for kind in kinds:
            if self._opened.gguf is None or f"{block}ffn_{kind}_exps.weight" in self._stored:
                found.append(_Target(f"{block}ffn_{kind}_exps.weight", count))
            elif f"{block}ffn_gate_up_exps.weight" in self._stored and kind == "up":
                found.append(_Target(f"{block}ffn_gate_up_exps.weight", count))
            elif f"{block}ffn_{kind}.0.weight" in self._stored:
                found.append(_Target(f"{block}ffn_{kind}.{{expert}}.weight"))
        return found


def chunks_of(ids: Sequence[int], size: int, most: int, first: int | None) -> list[list[int]]:
    """Cut ids into pieces of `size` tokens, at most `most` (0: all); each begins with `first` when that is a token.

    Raises ConfigError for a text that does not fill one.
    """
    if len(ids) < size:
        raise ConfigError(f"the text has {len(ids)} tokens, not enough for a chunk of {size}; take a longer one")
    count = len(ids) // size
    pieces = [list(ids[index * size : (index + 1) * size]) for index in range(min(count, most or count))]
    return [piece if first is None else [first, *piece[1:]] for piece in pieces]


@torch.inference_mode()
def collect(
    config: EngineConfig, text: Path, out: Path, *, chunk_size: int, most_chunks: int, shown: Callable[[int, int], None]
) -> Iterator[Imatrix]:
    """Yield the statistics of a model over the text in a file, after every few chunks: all so far.

    shown: told how many chunks are done, of how many. Raises ConfigError, WeightError or UnsupportedError.
    """
    opened = open_model(config)
    tokenizer = describe_model(opened).tokenizer
    if not tokenizer.has_vocabulary:
        raise ConfigError("the model has no tokenizer; copy tokenizer.json to its folder")
    ids = tokenizer.encode(text.read_text(encoding="utf-8"))
    first = tokenizer.bos_token_id if ids[:1] == [tokenizer.bos_token_id] else None
    chunks = chunks_of(ids, chunk_size, most_chunks, first)
    plan = plan_model(config, opened)
    reference = build_reference_model(opened.hf_config, config.trust_remote_code)
    resolve_rotations(reference, chunk_size)
    pool = WorkerPool(config.cpu_infer or usable_cores())
    collector = Collector(opened)
    weights = StoredWeights(reference, TiedSource(opened.source, plan.tied), plan, pool)
    weights.observe = collector.observe
    for start in range(0, len(chunks), _BATCH):
        batch = torch.tensor(chunks[start : start + _BATCH])
        with weights:
            reference(input_ids=batch, use_cache=False, logits_to_keep=1)
        done = start + len(batch)
        shown(done, len(chunks))
        yield Imatrix(out, collector.tensors, done, chunk_size, [text.name])
