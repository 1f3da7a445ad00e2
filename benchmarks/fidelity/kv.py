"""What keys and values in fewer bits change: next-token probabilities beside those of an fp32 cache, on a text that the
model wrote itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.sequence import SequenceRunner
from ktransformers.bench.common.machine import describe_machine
from ktransformers.bench.common.report import Column, FigureTable, Record
from ktransformers.cache.paged import PagedCache
from ktransformers.config import ATTENTION_PRODUCTS, EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.load.builder import Engine, build_engine
from ktransformers.engine.model.opened import OpenedModel, open_model, open_synthetic
from ktransformers.engine.sampling.sampler import RequestSampler, sample_batch
from ktransformers.models.synthetic_shapes import find_shape

__all__ = ["FidelityWork", "bench_fidelity", "divergences", "logits_of", "own_text"]

_CHUNK = 256
_FIRST_TOKENS = 8
"""Random ones that the text begins with, so that any tokenizer and random weights will do."""

_COLUMNS = (
    Column("kv_type", 13),
    Column("bytes_per_token", 12, ",d", "bytes/token"),
    Column("kl_mean", 10, ".2e", "KL, mean"),
    Column("kl_max", 10, ".2e", "KL, most"),
    Column("same_choice", 12, ".2%", "same choice"),
)


@dataclass(frozen=True, slots=True)
class FidelityWork:
    """config: of the model, which is computed with each of kv_types; its fp32 reference is on the CPU. Its
    attention_products are those of the types that keep codes, and on the CPU of bf16.

    num_tokens: of the text. synthetic: random weights in this shape, `layers` of its layers, instead of a model's.
    """

    config: EngineConfig
    kv_types: Sequence[str]
    num_tokens: int
    synthetic: str | None = None
    layers: int | None = None


def divergences(want: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence of each row of logits [T, V] from those that are wanted, in nats: fp64 [T]."""
    found = []
    for first in range(0, len(want), 64):
        p, q = (torch.log_softmax(rows[first : first + 64].double(), dim=-1) for rows in (want, got))
        found.append((p.exp() * (p - q)).sum(-1))
    return torch.cat(found)


def bench_fidelity(work: FidelityWork) -> Record:
    """Compare, and print a table. Returns the record: divergences in nats of num_tokens rows."""
    config = replace(work.config, attention_products=ATTENTION_PRODUCTS[0], cache_lens=work.num_tokens)
    exact = replace(config, kv_type="fp32", use_cuda=False)
    engine = _built(work, exact)
    try:
        text = own_text(engine, work.num_tokens)
        want = logits_of(engine, text)
        report: Record = {"machine": describe_machine(engine.pool), "model": engine.description}
    finally:
        engine.close()
    table = FigureTable(_COLUMNS)
    for kv_type in work.kv_types:
        has_products = kv_type in ("int8", "fp8") or (kv_type == "bf16" and not work.config.use_cuda)
        products = work.config.attention_products if has_products else ATTENTION_PRODUCTS[0]
        name = kv_type if products == ATTENTION_PRODUCTS[0] else f"{kv_type} products"
        engine = _built(work, replace(config, kv_type=kv_type, attention_products=products))
        try:
            got = logits_of(engine, text)
            nbytes = PagedCache.size(engine.cache.shapes, 1)
        finally:
            engine.close()
        off = divergences(want, got)
        same = (want.argmax(-1) == got.argmax(-1)).double().mean()
        values = {"kl_mean": float(off.mean()), "kl_max": float(off.max()), "same_choice": float(same)}
        table.add({"kv_type": name, "bytes_per_token": nbytes, **values})
    return report | {"num_tokens": len(text), "rows": table.rows}


def _built(work: FidelityWork, config: EngineConfig) -> Engine:
    opened: OpenedModel = (
        open_model(config)
        if work.synthetic is None
        else open_synthetic(config, find_shape(work.synthetic).config(work.layers))
    )
    return build_engine(config, opened=opened)


def own_text(engine: Engine, num_tokens: int, seed: int = 1) -> list[int]:
    """Tokens that the model draws by its probabilities, behind a few random ones."""
    generator, vocab_size = torch.Generator().manual_seed(seed), engine.model.vocab_size
    text: list[int] = torch.randint(0, vocab_size, (_FIRST_TOKENS,), generator=generator).tolist()
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=num_tokens - _FIRST_TOKENS, ignore_eos=True)
    runner, sampler = SequenceRunner.of(engine), RequestSampler(params, text, vocab_size)
    sampler.begin()
    logits = runner.forward(text, 0, [len(text) - 1])
    while len(text) < num_tokens:
        (sampled,) = sample_batch(logits, [sampler], [len(text)])
        sampler.commit(sampled.token_id)
        sampler.begin()
        text.append(sampled.token_id)
        if len(text) < num_tokens:
            logits = runner.forward(text[-1:], len(text) - 1, [0])
    return text


def logits_of(engine: Engine, text: Sequence[int]) -> torch.Tensor:
    """What follows each token of a text, fp32 [T, V]."""
    found, runner = [], SequenceRunner.of(engine)
    for start in range(0, len(text), _CHUNK):
        chunk = text[start : start + _CHUNK]
        found.append(runner.forward(chunk, start, range(len(chunk))).cpu())
    return torch.cat(found)
