"""Before a model is ready, all kernels that its steps launch have been met: steps of a server meet no other.

The GPU is made up (fake_gpus.py) and compiles nothing; what counts is which variants of the kernels there
are, as Triton tells them apart.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from ktransformers.config import EngineConfig
from ktransformers.core import COMPILING
from ktransformers.engine.load import arrange, graphs
from ktransformers.engine.load.builder import Engine, Hardware, build_engine
from ktransformers.engine.load.warmup import WarmupShapes, row_counts
from ktransformers.engine.parallel.ranks.driver import Driver
from ktransformers.engine.step import expert_streaming as prefill_module
from ktransformers.engine.step.forward import ForwardPass
from ktransformers.engine.verify.layer_kinds import one_of_each
from ktransformers.kernels.triton.common.compiling import Compiled, warmup, watch_launches
from ktransformers.kernels.types import QuantType
from ktransformers.operators.base import ExpertStats
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.operators.experts.split import CpuRate, PrefillRates
from ktransformers.operators.experts.streamed import ExpertPrefill
from ktransformers.scheduler.records import StepPlan
from ktransformers.system.shipped_rules import shipped_path
from tests.support.engines.cut_models import HARDWARE
from tests.support.engines.fake_gpus import fake_hardware
from tests.support.engines.gpu_engines import Gpu, logits_in_steps, sequence_start, step_row
from tests.support.engines.one_sequence import static_engine
from tests.support.gguf.writer import write_gguf
from tests.support.models.agreement import prompt
from tests.support.models.attention_families import config_of
from tests.support.models.recurrent_models import recurrent_model
from tests.support.models.tiny_models import random_model, tiny_model, write_safetensors

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")

PAGE, CHUNK, BATCH, PAGES = 32, 300, 5, 16


@dataclass
class Rehearsed:
    """What was rehearsed while loading, with how many launches; the kinds of the decoder layers, and those that ran."""

    found: Compiled
    num_launches: int
    kinds: list[int]
    run: list[int]


@pytest.fixture
def rehearsals(monkeypatch: pytest.MonkeyPatch) -> list[Rehearsed]:
    rehearsed: list[Rehearsed] = []
    real = graphs.warm_up

    def warm_up(forward: ForwardPass, *args: Any) -> Compiled:
        launches: list[tuple[Any, ...]] = []
        (kinds,) = (arg for arg in args if isinstance(arg, list))
        with watch_launches(launches.append, launches=False):
            found = real(forward, *args)
        model: Any = forward.model
        with one_of_each(model, kinds) as run:
            rehearsed.append(Rehearsed(found, len(launches), kinds, list(run)))
        return found

    for module in (arrange, graphs):
        monkeypatch.setattr(module, "compiles", lambda: True)
    monkeypatch.setattr(graphs, "warm_up", warm_up)
    return rehearsed


def new_paged(path: Path, hardware: Hardware | None = None, **settings: Any) -> Engine:
    """Without graphs: a captured step would be run again here, which a GPU does without launching anything anew."""
    where = {"model_path": path} if path.is_dir() else {"gguf_path": path}
    config = EngineConfig(cache_lens=PAGE * PAGES, cpu_infer=1, chunk_size=CHUNK, use_cuda_graph=False)
    hardware, stats = hardware or fake_hardware(), settings.pop("expert_stats", None)
    ranks = settings.pop("ranks", None)
    return build_engine(
        replace(config, **where, **settings),
        page_size=PAGE,
        max_batch_size=BATCH,
        hardware=hardware,
        expert_stats=stats,
        ranks=ranks,
    )


def server_steps(vocab_size: int, count: int, seed: int, most: int, has_states: bool = False) -> Iterator[StepPlan]:
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
            starts.append(sequence_start(run_id, ids, top_k=rng.choice([0, 0, 5, 16]) if number % 2 else 0))
            slots = {"read_slot": i if start else -1, "write_slot": i} if has_states else {}
            rows.append(step_row(run_id, ids[start:], start, table, **slots))
        ended = [run_id for run_id in range((number - 1) * BATCH, number * BATCH) if number]
        yield StepPlan(step_id=number + 1, ended=ended, starts=starts, rows=rows)


def unknown(met: set[tuple[Any, ...]], known: set[tuple[Any, ...]]) -> list[str]:
    """Variants that were not known, in words: the kernel, and how it differs from the most alike of them."""
    lines = []
    for one in met - known:
        alike = [set(one) - set(other) for other in known if other[0] == one[0]]
        lines.append(f"{one[0]}: {sorted(map(str, min(alike, key=len, default=one)))}")
    return sorted(lines)


def check_no_other(paged: Engine, known: Compiled, num_steps: int) -> None:
    """Steps that are computed, and many whose launches are only looked at."""
    met, vocab_size, has_states = set[tuple[Any, ...]](), paged.model.vocab_size, paged.cache.states is not None
    assert known.variants
    with watch_launches(met.add):
        for plan in server_steps(vocab_size, num_steps, 3, 20, has_states):
            paged.executor.execute(plan)
    with warmup() as more:
        for plan in server_steps(vocab_size, 40, 5, CHUNK, has_states):
            paged.executor.execute(plan)
    assert len(more.variants) > 4
    assert unknown(met | more.variants, known.variants) == []


@pytest.mark.exhaustive
def test_quantized_weights_on_the_gpu(tmp_path: Path, rehearsals: list[Rehearsed]) -> None:
    model = tiny_model("qwen3_moe", seed=3, hidden=256, layers=1)
    path = write_gguf(model, tmp_path / "m.gguf", QuantType.Q4_K, QuantType.Q4_K)
    paged = new_paged(path, fake_hardware(dtype=torch.bfloat16))
    check_no_other(paged, rehearsals[0].found, num_steps=0)
    names = {variant[0] for variant in rehearsals[0].found.variants}
    assert {"_gemv_kernel", "_tile_kernel", "_gate_up_gemv", "_gate_up_tile"} <= names


@pytest.fixture
def streaming(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts on the CPU are streamed in steps of more rows than decode steps have: the CPU is said to be slow."""
    slow = CpuRate((1,), (100.0,))

    def calibrate(prefill: ExpertPrefill, *args: object) -> None:
        prefill.rates, prefill.threshold = PrefillRates(1e-3, 0.0, slow, slow), prefill.least_rows

    monkeypatch.setattr(prefill_module, "calibrate", calibrate)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("streaming")
def test_experts_that_are_streamed(tmp_path: Path, rehearsals: list[Rehearsed]) -> None:
    write_safetensors(tiny_model("qwen3_moe", seed=1, layers=3), tmp_path)
    rules, gpu = shipped_path("default-moe.yaml"), Gpu()
    paged = new_paged(tmp_path, gpu.hardware(), optimize_config_path=rules, cpu_quant="q8_0")
    copied = gpu.copies.num_copies
    check_no_other(paged, rehearsals[0].found, num_steps=1)
    assert gpu.copies.num_copies > copied
    names = {variant[0] for variant in rehearsals[0].found.variants}
    assert {"_gate_up_tile", "_down_tile", "_place_kernel", "_sum_kernel"} <= names
    assert (rehearsals[0].kinds, rehearsals[0].run) == ([0, 0, 0], [0, 1])


S, F = "sliding_attention", "full_attention"


def of_kinds(name: str) -> PreTrainedModel:
    """A model with several layers of each kind."""
    if name == "qwen3_next":
        return recurrent_model(name, num_hidden_layers=4, layer_types=["linear_attention", F] * 2)
    if name == "gemma4-shared":
        return random_model(
            config_of(name, num_hidden_layers=8, layer_types=[S, F] * 4, num_kv_shared_layers=4), seed=1
        )
    if name == "gemma4-moe":
        return random_model(config_of(name, num_hidden_layers=4, layer_types=[S, F] * 2), seed=1)
    return tiny_model(name, seed=1, layers=4)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("name", "experts_on_cpu", "kinds", "run"),
    [
        pytest.param("qwen3_moe", True, [0] * 4, [0, 1], marks=pytest.mark.exhaustive),
        pytest.param("qwen3_moe", False, [0] * 4, [0, 1], marks=pytest.mark.exhaustive),
        ("deepseek_v2", True, [0, 1, 1, 1], [0, 1, 2]),
        ("qwen3_next", False, [0, 1] * 2, [0, 1, 2]),
        pytest.param("gpt_oss", True, [0, 1] * 2, [0, 1, 2], marks=pytest.mark.exhaustive),
        ("gemma4-shared", False, [0, 1, 2, 3, 4, 5, 4, 5], [0, 1, 2, 3, 4, 5, 6]),
        # The last layer of each attention is one that later ones could share (store_full_length_kv).
        pytest.param("gemma4-moe", False, [0, 1, 2, 3], [0, 1, 2, 3], marks=pytest.mark.exhaustive),
    ],
)
def test_one_layer_of_each_kind_stands_for_all(
    name: str, experts_on_cpu: bool, kinds: list[int], run: list[int], tmp_path: Path, rehearsals: list[Rehearsed]
) -> None:
    """Layers of other kinds have other windows, head sizes, caches or feed-forwards."""
    write_safetensors(of_kinds(name).bfloat16(), tmp_path)
    where = {"optimize_config_path": shipped_path("default-moe.yaml")} if experts_on_cpu else {}
    paged = new_paged(tmp_path, self_check=False, **where)
    experts = [op for op in paged.plan.operators.values() if isinstance(op, KTransformersExperts)]
    assert {op.device.name for op in experts} <= {"cpu" if experts_on_cpu else "cuda:0"}
    (rehearsed,) = rehearsals
    assert (rehearsed.kinds, rehearsed.run) == (kinds, run)
    check_no_other(paged, rehearsed.found, num_steps=int(experts_on_cpu))  # of others the interpreter takes long


def test_products_of_codes(tmp_path: Path, rehearsals: list[Rehearsed]) -> None:
    write_safetensors(tiny_model("qwen3_moe", seed=1).bfloat16(), tmp_path)
    paged = new_paged(tmp_path, self_check=False, kv_type="int8", attention_products="kv")
    (rehearsed,) = rehearsals
    prefills = [dict(one[1:]) for one in rehearsed.found.variants if one[0] == "prefill_kernel"]
    assert {one["QUANTIZED_ATTENTION"] for one in prefills} == {True}
    check_no_other(paged, rehearsed.found, num_steps=0)


def test_more_layers_of_a_kind_are_no_more_work(tmp_path: Path, rehearsals: list[Rehearsed]) -> None:
    for layers in (3, 5):
        write_safetensors(tiny_model("qwen3_moe", seed=1, layers=layers), tmp_path / str(layers))
        new_paged(tmp_path / str(layers))
    assert rehearsals[0].num_launches == rehearsals[1].num_launches > 0


@pytest.mark.exhaustive
def test_a_rehearsal_changes_nothing(
    tmp_path: Path, rehearsals: list[Rehearsed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither logits nor the statistics of experts; and progress is told of."""
    model = tiny_model("qwen3_moe", seed=1)
    write_safetensors(model, tmp_path)
    ids, config = prompt(model.config.vocab_size), EngineConfig(model_path=tmp_path, cache_lens=64, cpu_infer=1)
    seen: list[tuple[int, int, str]] = []
    engine = static_engine(config, lambda *args: seen.append(args), fake_hardware())
    assert [name for _, _, name in seen].count(COMPILING) >= 1
    got = logits_in_steps(engine, ids)
    stats = ExpertStats()
    new_paged(tmp_path, expert_stats=stats)
    assert len(rehearsals) == 2
    for module in (arrange, graphs):
        monkeypatch.setattr(module, "compiles", lambda: False)
    assert torch.equal(logits_in_steps(static_engine(config, hardware=fake_hardware()), ids), got)
    plain = ExpertStats()
    new_paged(tmp_path, expert_stats=plain)
    assert len(rehearsals) == 2
    assert stats.totals() == plain.totals() != (0, 0, 0)


def test_row_counts_reach_every_choice() -> None:
    """Of 128 experts and 8 for each token: blocks of 16, 32, 64 and 128, sorted in two ways."""
    counts = row_counts(WarmupShapes(4096, 16, 8, num_experts=128, top_k=8), least=17)
    assert counts[0] == 17
    assert counts[-1] == 4096
    for low, high in ((17, 192), (193, 384), (385, 1024), (1025, 1536), (1537, 4096)):
        assert any(low <= rows <= high for rows in counts)
    assert row_counts(WarmupShapes(512, 1, 1), least=2)[:4] == [2, 3, 4, 8]


@pytest.mark.exhaustive
def test_a_stage_waits_for_no_other_in_a_rehearsal(rehearsals: list[Rehearsed], tmp_path: Path) -> None:
    """All have met by then, and the one before knows of no step."""
    write_safetensors(tiny_model("qwen3_moe", seed=1), tmp_path)
    config = EngineConfig(model_path=tmp_path, pipeline=2)
    paged = new_paged(tmp_path, pipeline=2, ranks=Driver(config, None, HARDWARE))
    paged.executor.execute(
        StepPlan(step_id=1, ended=[], starts=[sequence_start(0, [1, 2, 3])], rows=[step_row(0, [1, 2], 0, [0])])
    )
    paged.close()
    (rehearsed,) = rehearsals
    assert rehearsed.num_launches
