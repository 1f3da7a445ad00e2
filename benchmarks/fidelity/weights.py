"""What the CPU's products with quantized weights lose: next-token probabilities of our run of a file, beside fp32's.

The reference is `transformers` in fp32 with what the same file dequantizes to, so that the loss of rounding weights is
in neither: what is left is the arithmetic, nearly all of it activations rounded to int8. A peer computes the same file.

    model ── quantize ──> file of a type ──┬── transformers, fp32 ──> wanted
    texts ─────────────────────────────────┼── our operators ───────> KL from wanted
                                           └── the peer ────────────> KL from wanted
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.fidelity.kv import divergences, logits_of, own_text
from benchmarks.peers.base import is_missing
from benchmarks.peers.llama_logits import llama_logits
from ktransformers.bench.common.machine import describe_machine
from ktransformers.bench.common.report import Column, FigureTable, Record, Row
from ktransformers.config import CPU_ACTIVATIONS, EngineConfig
from ktransformers.engine.load.builder import Engine, build_engine
from ktransformers.engine.load.reference import build_reference_engine
from ktransformers.system.cores import usable_cores

__all__ = ["GIVEN", "Quantize", "WeightWork", "bench_weight_fidelity", "summary"]

_TINY = 1e-300  # keeps ratios of what is exact finite
GIVEN = "given"
"""Stands for the model's own GGUF file, as it is."""

Quantize = Callable[[str, Path], None]
"""Writes the model as a GGUF: (a type of `ktransformers quantize`, the file to write)."""

_COLUMNS = (
    Column("type", 9),
    Column("kl_median", 11, ".2e", "KL, median"),
    Column("kl_mean", 9, ".2e", "mean"),
    Column("kl_p99", 9, ".2e", "99 %"),
    Column("same_choice", 12, ".2%", "same choice"),
    Column("spread", 7, ".2f", "spread"),
)


@dataclass(frozen=True, slots=True)
class WeightWork:
    """config: of the model. types: what `quantize` takes, and GIVEN.

    num_tokens: of each text; num_texts: how many, at least 2. has_own_texts: the model draws them by its probabilities;
    otherwise tokens are random. has_peer: measure llama.cpp too, where it is installed.
    """

    config: EngineConfig
    types: Sequence[str]
    quantize: Quantize
    num_tokens: int
    num_texts: int = 2
    has_own_texts: bool = False
    has_peer: bool = False


def summary(off: Sequence[torch.Tensor]) -> dict[str, float]:
    """Of divergences in nats, fp64 [T] of each of at least two texts: median, mean and 99 % of all.

    spread: the larger over the smaller of the medians of two halves, every second text.
    """
    pooled, medians = torch.cat(list(off)), [float(torch.cat(list(off[first::2])).median()) for first in (0, 1)]
    return {
        "kl_median": float(pooled.median()),
        "kl_mean": float(pooled.mean()),
        "kl_p99": float(pooled.quantile(0.99)),
        "spread": max(medians) / max(min(medians), _TINY),
    }


def bench_weight_fidelity(work: WeightWork) -> Record:
    """Compare, and print a table. Returns the record: divergences in nats.

    Errors are those of `quantize`, `build_engine` and `build_reference_engine`, which needs 4 bytes a weight.
    """
    has_peer = work.has_peer and not is_missing("llama.cpp", "llama_cpp", "llama-cpp-python")
    config = replace(work.config, kv_type="fp32", use_cuda=False, cache_lens=work.num_tokens)
    engine = build_engine(config)
    try:
        texts = _texts(engine, work)
        report: Record = {"machine": describe_machine(engine.pool), "model": engine.description}
    finally:
        engine.close()
    peer = (Column("peer_kl_median", 10, ".2e", "llama.cpp"), Column("ratio", 7, ".2f", "ours, x")) if has_peer else ()
    table = FigureTable((*_COLUMNS, *peer))
    with tempfile.TemporaryDirectory(prefix="ktransformers-fidelity-") as folder:
        for name in work.types:
            file = config.gguf_path if name == GIVEN else Path(folder) / f"{name}.gguf"
            assert file is not None, "the command line asks for a GGUF"
            if name != GIVEN:
                work.quantize(name, file)
            table.add({"type": name} | _row(replace(config, gguf_path=file), texts, has_peer))
            if name != GIVEN:
                file.unlink()  # the disk holds one of them at a time
    return report | {
        "num_tokens": work.num_tokens,
        "num_texts": len(texts),
        "has_own_texts": work.has_own_texts,
        "rows": table.rows,
    }


def _texts(engine: Engine, work: WeightWork) -> list[list[int]]:
    if work.has_own_texts:
        return [own_text(engine, work.num_tokens, seed) for seed in range(1, work.num_texts + 1)]
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(0, engine.model.vocab_size, (work.num_texts, work.num_tokens), generator=generator)
    return [row.tolist() for row in drawn]


def _row(config: EngineConfig, texts: Sequence[Sequence[int]], has_peer: bool) -> Row:
    wanted = _wanted(config, texts)
    engine = build_engine(config)
    try:
        got = [logits_of(engine, text) for text in texts]
    finally:
        engine.close()
    row: Row = summary([divergences(*pair) for pair in zip(wanted, got, strict=True)])
    row["same_choice"] = _same_choice(wanted, got)
    if has_peer:
        assert config.gguf_path is not None
        theirs = llama_logits(config.gguf_path, texts, config.cpu_infer or usable_cores())
        if theirs is None:  # which llama_logits has said
            return row | {"peer_kl_median": None, "ratio": None}
        tensors = [torch.from_numpy(one) for one in theirs]
        of_peer = summary([divergences(*pair) for pair in zip(wanted, tensors, strict=True)])
        row |= {f"peer_{key}": value for key, value in of_peer.items()}
        row |= {"peer_same_choice": _same_choice(wanted, tensors)}
        row["ratio"] = row["kl_median"] / max(of_peer["kl_median"], _TINY)
    return row


def _wanted(config: EngineConfig, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """fp32 logits of the dequantized file, [T, V] of each text."""
    threads = torch.get_num_threads()
    try:
        reference = build_reference_engine(replace(config, cpu_activations=CPU_ACTIVATIONS[0]))  # it has none
        try:
            return [reference.logits(text) for text in texts]
        finally:
            reference.close()
    finally:
        torch.set_num_threads(threads)  # the reference takes all


def _same_choice(wanted: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> float:
    same = [want.argmax(-1) == have.argmax(-1) for want, have in zip(wanted, got, strict=True)]
    return float(torch.cat(same).double().mean())
