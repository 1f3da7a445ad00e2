"""Steps with draft tokens on (made-up) GPUs: replayed, padded, and the answers are those without draft tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.known_answers import KnownDrafter
from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.api.batch_loop import BatchLoop
from ktransformers.engine.api.llm import LLM
from ktransformers.engine.load.builder import Engine, build_engine, plan_model
from ktransformers.engine.sampling.logits_request import BEST_TOKEN, StepLogits
from ktransformers.engine.step.executor import PagedExecutor
from ktransformers.engine.step.graph_sizes import DRAFT_ROWS
from ktransformers.engine.step.logits_fetch import LogitsFetch
from ktransformers.kernels.transfer.async_cpu_experts import AsyncCpuExperts
from ktransformers.scheduler.drafting import planner
from ktransformers.scheduler.drafting.acceptance import AcceptanceRates
from ktransformers.scheduler.drafting.prompt_lookup import MAX_MATCH
from ktransformers.scheduler.records import StepPlan, StepResult
from tests.support.engines.drafter_steps import equal_steps
from tests.support.engines.fake_gpus import FakeGraphs, fake_hardware
from tests.support.engines.gpu_engines import sequence_start, step_row
from tests.support.engines.known_drafts import KnownDrafts, answers_of
from tests.support.engines.paged_loop import PagedLoop, scheduler_config
from tests.support.models.latent_models import latent_model
from tests.support.models.recurrent_models import recurrent_model
from tests.support.models.tiny_models import VOCAB_SIZE, tiny_model, write_safetensors

pytest.importorskip("triton")

PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=6, repetition_penalty=1.3, max_tokens=10, ignore_eos=True),
]


def drafting_engine(path: Path, graphs: FakeGraphs, batch: int = 1, **settings: object) -> Engine:
    config = EngineConfig(model_path=path, cache_lens=256, cpu_infer=1, self_check=False, speculative_tokens=4)
    config = replace(config, **settings)  # type: ignore[arg-type]
    return build_engine(
        config, page_size=16, max_batch_size=batch, hardware=fake_hardware(graphs=graphs, draft_rows=DRAFT_ROWS)
    )


class Replays:
    """Whether each step with draft tokens, or decodes alone, was replayed: (its rows of tokens, replayed)."""

    def __init__(self, graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch):
        self.drafted, self.decoded = list[tuple[int, bool]](), list[tuple[int, bool]]()
        execute = PagedExecutor.execute

        def watched(executor: PagedExecutor, plan: StepPlan) -> StepResult:
            before = graphs.replays
            result = execute(executor, plan)
            done = plan.num_tokens, graphs.replays > before
            if any(row.num_drafts for row in plan.rows):
                self.drafted.append(done)
            elif all(row.num_tokens == 1 for row in plan.rows):
                self.decoded.append(done)
            return result

        monkeypatch.setattr(PagedExecutor, "execute", watched)


def compare(engine: Engine, graphs: FakeGraphs, batch: int, monkeypatch: pytest.MonkeyPatch) -> Replays:
    """Answer with draft tokens and without; every step is replayed."""
    config = scheduler_config(engine, num_states=engine.cache.num_states, chunk_size=64, max_batch_size=batch)
    assert engine.max_drafts == 4
    plain = answers_of(PagedLoop(config, lambda: engine.executor), PARAMS, VOCAB_SIZE)
    engine.executor.reset()
    loop = PagedLoop(replace(config, max_drafts=4), lambda: engine.executor)
    known = {f"r{i}": one.token_ids for i, one in enumerate(plain)}
    loop.scheduler._drafts = KnownDrafts(loop.config, known, random.Random(3))
    seen = Replays(graphs, monkeypatch)
    drafted = answers_of(loop, PARAMS, VOCAB_SIZE)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert loop.scheduler.stats().num_accepted > 4
    assert all(is_replayed for _, is_replayed in seen.drafted + seen.decoded)
    return seen


def model_of(model_type: str) -> PreTrainedModel:
    """With as few layers as have all kinds."""
    if model_type == "qwen3_next":
        return recurrent_model(model_type, num_hidden_layers=1, layer_types=["linear_attention"])
    if model_type == "deepseek_v32":
        return latent_model(model_type)
    return tiny_model(model_type, seed=1, layers=1)


@pytest.mark.parametrize(
    ("model_type", "batch"),
    [
        ("qwen3_moe", 1),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ("qwen3_moe", 2),
                ("deepseek_v3", 1),
                ("deepseek_v32", 1),
                ("deepseek_v4", 1),
                ("qwen3_next", 1),
                ("qwen3_next", 2),
            )
        ),
    ],
)
def test_steps_with_draft_tokens_are_replayed(
    model_type: str, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With experts on the CPU, in the order of the stream; of latent, sparse and compressed attention, and with states,
    one of which is kept for each draft token."""
    graphs = FakeGraphs()
    with closing(drafting_engine(write_safetensors(model_of(model_type), tmp_path), graphs, batch)) as engine:
        seen = compare(engine, graphs, batch, monkeypatch)
    assert max(rows for rows, _ in seen.drafted) > 2 + batch
    assert sorted(graphs.captured) == ([1, 2, 3, 4, 5] if batch == 1 else [1, 2, 3, 4, 6, 8, 10])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"use_cuda_graph": False}, "--no_use_cuda_graph"),
        ({"cpu_prefill": "bf16"}, "--cpu_prefill bf16 rounds steps of many rows in another way"),
    ],
)
def test_where_they_have_no_graphs_nothing_is_drafted_by_itself(
    settings: dict[str, object], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, graphs = write_safetensors(model_of("qwen3_next"), tmp_path), FakeGraphs()
    with caplog.at_level("INFO"), closing(drafting_engine(path, graphs, **settings)) as engine:
        assert (engine.max_drafts, engine.scheduler_config.max_drafts) == (0, 0)
    assert reason in next(text for text in caplog.messages if text.startswith("no draft tokens: "))


def test_states_for_draft_tokens_are_planned_where_there_are_graphs(tmp_path: Path) -> None:
    """And none where nothing is drafted."""
    path = write_safetensors(model_of("qwen3_next"), tmp_path)
    config = EngineConfig(model_path=path, cache_lens=64, cpu_infer=1, self_check=False, speculative_tokens=3)
    sizes = [
        plan_model(replace(config, **more), hardware=fake_hardware()).extra_bytes["states"]["cuda:0"]  # type: ignore[arg-type]
        for more in ({}, {"speculative": "off"}, {"use_cuda_graph": False})
    ]
    assert sizes[1] == sizes[2]
    one, rest = divmod(sizes[0] - sizes[1], 3)
    assert rest == 0
    assert sizes[1] % one == 0


def test_a_step_with_draft_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of all rows come at once, of greedy ones the best tokens alone; and the CPU's experts, which the graph
    sets off, compute those rows and no padding."""
    path, graphs = write_safetensors(model_of("qwen3_moe"), tmp_path), FakeGraphs()
    fetched, expected = list[tuple[int, ...]](), list[int]()
    requested, set_rows = LogitsFetch.requested, AsyncCpuExperts.set_rows

    def noted(self: AsyncCpuExperts, num_tokens: int) -> None:
        expected.append(num_tokens)
        set_rows(self, num_tokens)

    def watched(
        self: LogitsFetch, logits: Tensor, requests: Sequence[int], meanwhile: Callable[[], None]
    ) -> StepLogits:
        fetched.append((len(logits), *requests))
        return requested(self, logits, requests, meanwhile)

    with closing(drafting_engine(path, graphs, speculative_tokens=5)) as engine:
        monkeypatch.setattr(LogitsFetch, "requested", watched)
        monkeypatch.setattr(AsyncCpuExperts, "set_rows", noted)
        start = sequence_start(0, [5, 6, 7])
        rows = [step_row(0, [5, 6, 7], 0, [0])]
        first = engine.executor.execute(StepPlan(step_id=1, ended=[], starts=[start], rows=rows))
        token = first.results[0].token_id
        assert token is not None
        row = msgspec.structs.replace(step_row(0, [token, 1, 2, 3, 4], 3, [], first_page=1), num_drafts=4)
        engine.executor.execute(StepPlan(step_id=2, ended=[], starts=[], rows=[row]))
    assert graphs.captured == [6, 4, 3, 2, 1]
    assert fetched == [(1, BEST_TOKEN), (5, *[BEST_TOKEN] * 5)]
    assert (graphs.replays, expected) == (2, [3, 5])


def answered(path: Path, params: SamplingParams, prompt: list[int], **settings: object) -> tuple[list[int], int]:
    """The tokens of an answer, and how many of them were draft tokens. Steps are planned ahead."""
    config = EngineConfig(model_path=path, cache_lens=64, cpu_infer=1, self_check=False, **settings)  # type: ignore[arg-type]
    llm = LLM.from_loop(
        BatchLoop(lambda report: build_engine(config, report, hardware=fake_hardware(draft_rows=DRAFT_ROWS)))
    )
    with llm:
        (output,) = llm.generate([prompt], params)
    return list(output.token_ids), output.stats.num_accepted


def test_answers_of_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps in front of those with draft tokens are waited for, others are not."""
    path, prompt = write_safetensors(model_of("qwen3_moe"), tmp_path), [5, 9, 11]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    want, num_accepted = answered(path, params, prompt, speculative="off")
    assert num_accepted == 0
    rates = AcceptanceRates(MAX_MATCH)
    equal_steps(monkeypatch)
    monkeypatch.setattr(planner, "PromptLookup", lambda ids, *args: KnownDrafter(ids, rates, [*prompt, *want]))
    got, num_accepted = answered(path, params, prompt, speculative_tokens=2)
    assert got == want
    assert num_accepted >= 4
