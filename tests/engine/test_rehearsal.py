"""Before a model is ready, all kernels that its steps launch have been met: steps of a server meet no other.

The GPU is made up (tests/support/fake_gpus.py) and compiles nothing; what counts is which variants of the kernels there
are, as Triton tells them apart.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.core import COMPILING
from ktransformers.engine import builder, ready
from ktransformers.engine import prefill as prefill_module
from ktransformers.engine.builder import Hardware, PagedEngine, build_engine, build_paged_engine
from ktransformers.engine.rehearsal import Extent, row_counts
from ktransformers.kernels.triton.compiling import Compiled, rehearsal, watch_launches
from ktransformers.kernels.types import QuantType
from ktransformers.models.registry import RULES_DIR
from ktransformers.operators.base import ExpertStats
from ktransformers.operators.experts.split import CpuRate, PrefillRates
from ktransformers.operators.experts.streamed import ExpertPrefill
from ktransformers.scheduler.records import StepPlan
from tests.support.agreement import prompt
from tests.support.fake_gpus import fake_hardware
from tests.support.gguf_writer import write_gguf
from tests.support.gpu_engines import Gpu, logits_in_steps, sequence_start, step_row
from tests.support.tiny_models import tiny_model, write_safetensors

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")

PAGE, CHUNK, BATCH, PAGES = 32, 300, 5, 16


@pytest.fixture
def rehearsals(monkeypatch: pytest.MonkeyPatch) -> list[Compiled]:
    """What was rehearsed while loading."""
    found: list[Compiled] = []
    real = ready.rehearse
    for module in (builder, ready):
        monkeypatch.setattr(module, "compiles", lambda: True)
    monkeypatch.setattr(ready, "rehearse", lambda *args: found.append(real(*args)))
    return found


def new_paged(path: Path, hardware: Hardware | None = None, **settings: Any) -> PagedEngine:
    """Without graphs: a captured step would be run again here, which a GPU does without launching anything anew."""
    where = {"model_path": path} if path.is_dir() else {"gguf_path": path}
    config = EngineConfig(cache_lens=PAGE * PAGES, cpu_infer=1, chunk_size=CHUNK, use_cuda_graph=False)
    hardware, stats = hardware or fake_hardware(), settings.pop("expert_stats", None)
    return build_paged_engine(
        replace(config, **where, **settings),
        page_size=PAGE,
        max_batch_size=BATCH,
        hardware=hardware,
        expert_stats=stats,
    )


def server_steps(vocab_size: int, count: int, seed: int, most: int) -> Iterator[StepPlan]:
    """Steps of one to BATCH sequences, at most `most` tokens in all, each at any place of its sequence."""
    rng = random.Random(seed)
    for number in range(count):
        num_seqs = rng.randint(1, BATCH)
        counts = [1] * num_seqs
        if rng.random() < 0.8:  # some of them read their prompts
            for i in range(rng.randint(1, num_seqs)):
                counts[i] = rng.choice([1, 2, 3, 5, 16, 17, 31, 40, 63, 64, 65, 100, 129, 256, most])
        while sum(counts) > most:
            counts[counts.index(max(counts))] = max(1, max(counts) - (sum(counts) - most))
        starts, rows = [], []
        for i, tokens in enumerate(counts):
            pages = rng.randint(-(-tokens // PAGE), PAGES)
            table = rng.sample(range(PAGES), pages)  # of others too: only launches count
            run_id, start = number * BATCH + i, rng.randint(0, pages * PAGE - tokens)
            ids = [rng.randrange(vocab_size) for _ in range(start + tokens)]
            starts.append(sequence_start(run_id, ids))
            rows.append(step_row(run_id, ids[start:], start, table))
        ended = [run_id for run_id in range((number - 1) * BATCH, number * BATCH) if number]
        yield StepPlan(step_id=number + 1, ended=ended, starts=starts, rows=rows)


def unknown(met: set[tuple[Any, ...]], known: set[tuple[Any, ...]]) -> list[str]:
    """Variants that were not known, in words: the kernel, and how it differs from the most alike of them."""
    lines = []
    for one in met - known:
        alike = [set(one) - set(other) for other in known if other[0] == one[0]]
        lines.append(f"{one[0]}: {sorted(map(str, min(alike, key=len, default=one)))}")
    return sorted(lines)


def check_no_other(paged: PagedEngine, known: Compiled, num_steps: int) -> None:
    """Steps that are computed, and many whose launches are only looked at."""
    met, vocab_size = set[tuple[Any, ...]](), paged.model.vocab_size
    assert known.variants
    with watch_launches(met.add):
        for plan in server_steps(vocab_size, num_steps, seed=3, most=20):
            paged.executor.execute(plan)
    with rehearsal() as more:
        for plan in server_steps(vocab_size, 40, seed=5, most=CHUNK):
            paged.executor.execute(plan)
    assert len(more.variants) > 4
    assert unknown(met | more.variants, known.variants) == []


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_server_meets_no_other_kernel(model_type: str, tmp_path: Path, rehearsals: list[Compiled]) -> None:
    write_safetensors(tiny_model(model_type, seed=1), tmp_path)
    paged = new_paged(tmp_path)
    assert len(rehearsals) == 1
    check_no_other(paged, rehearsals[0], num_steps=3)


def test_quantized_weights_on_the_gpu(tmp_path: Path, rehearsals: list[Compiled]) -> None:
    model = tiny_model("qwen3_moe", seed=3, hidden=256, layers=1)
    path = write_gguf(model, tmp_path / "m.gguf", QuantType.Q4_K, QuantType.Q4_K)
    paged = new_paged(path, fake_hardware(dtype=torch.bfloat16))
    check_no_other(paged, rehearsals[0], num_steps=0)
    names = {variant[0] for variant in rehearsals[0].variants}
    assert {"_vector_kernel", "_tile_kernel", "_gate_up_vector", "_gate_up_tile"} <= names


def test_experts_that_are_streamed(tmp_path: Path, rehearsals: list[Compiled], monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, in steps of more rows than decode steps have: the CPU is said to be slow."""
    slow = CpuRate((1,), (100.0,))

    def calibrate(prefill: ExpertPrefill, *args: object) -> None:
        prefill.rates, prefill.threshold = PrefillRates(1e-3, 0.0, slow, slow), prefill.least_rows

    monkeypatch.setattr(prefill_module, "calibrate", calibrate)
    write_safetensors(tiny_model("qwen3_moe", seed=1, layers=1), tmp_path)
    rules, gpu = RULES_DIR / "default-moe.yaml", Gpu()
    paged = new_paged(tmp_path, gpu.hardware(), optimize_config_path=rules, cpu_quant="q8_0")
    copied = gpu.copies.num_copies
    check_no_other(paged, rehearsals[0], num_steps=3)
    assert gpu.copies.num_copies > copied
    assert {"_gate_up_tile", "_down_tile", "_place_kernel", "_sum_kernel"} <= {one[0] for one in rehearsals[0].variants}


def test_a_rehearsal_changes_nothing(
    tmp_path: Path, rehearsals: list[Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither logits nor the statistics of experts; and progress is told of."""
    model = tiny_model("qwen3_moe", seed=1)
    write_safetensors(model, tmp_path)
    ids, config = prompt(model.config.vocab_size), EngineConfig(model_path=tmp_path, cache_lens=64, cpu_infer=1)
    seen: list[tuple[int, int, str]] = []
    engine = build_engine(config, lambda *args: seen.append(args), fake_hardware())
    assert [name for _, _, name in seen].count(COMPILING) >= 1
    got = logits_in_steps(engine, ids)
    stats = ExpertStats()
    new_paged(tmp_path, expert_stats=stats)
    assert len(rehearsals) == 2
    for module in (builder, ready):
        monkeypatch.setattr(module, "compiles", lambda: False)
    assert torch.equal(logits_in_steps(build_engine(config, hardware=fake_hardware()), ids), got)
    plain = ExpertStats()
    new_paged(tmp_path, expert_stats=plain)
    assert len(rehearsals) == 2
    assert stats.totals() == plain.totals() != (0, 0, 0)


def test_row_counts_reach_every_choice() -> None:
    """Of 128 experts and 8 for each token: blocks of 16, 32, 64 and 128, sorted in two ways."""
    counts = row_counts(Extent(4096, 16, 8, num_experts=128, top_k=8), least=17)
    assert counts[0] == 17
    assert counts[-1] == 4096
    for low, high in ((17, 192), (193, 384), (385, 1024), (1025, 1536), (1537, 4096)):
        assert any(low <= rows <= high for rows in counts)
    assert row_counts(Extent(512, 1, 1), least=2)[:4] == [2, 3, 4, 8]
