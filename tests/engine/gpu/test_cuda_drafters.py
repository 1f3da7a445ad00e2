"""Drafters on a real GPU: their steps are replayed, what they draft is right, and no answer depends on it.

Which token is drawn may depend on the rows beside it where two are nearly as likely; see test_cuda.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_layers import MtpModel

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.drafting.drafter import ModelDrafter
from ktransformers.engine.load.builder import Engine, Hardware, build_engine, plan_model
from ktransformers.engine.step.cuda_graphs import CudaGraphs
from ktransformers.engine.step.drafts import DraftRequest
from ktransformers.kernels.types import QuantType
from ktransformers.operators.device import cuda_memory
from ktransformers.optimize.machine import detect_machine
from tests.support.engines.drafter_steps import DrafterSteps, draft_in_every_step, runner_of
from tests.support.engines.mtp_engines import Oracle
from tests.support.engines.paged_loop import Answer, PagedLoop, scheduler_config
from tests.support.gguf.deepseek4_mtp import tiny_deepseek4_mtp, write_deepseek4_mtp
from tests.support.gguf.qwen4_mtp import tiny_qwen4_mtp, write_qwen4_mtp
from tests.support.gguf.writer import write_gguf
from tests.support.models.assistant_models import TARGETS, tiny_assistant, write_assistant
from tests.support.models.mtp_families import FAMILIES, tiny_family, write_family
from tests.support.models.mtp_models import tiny_mtp, write_mtp
from tests.support.models.tiny_models import VOCAB_SIZE, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BATCH, NUM_DRAFTS = 2, 3
NEAR = 0.15
"""Of logits in bf16: tokens that are nearer to each other than that may be drawn one for the other."""
GREEDY: dict[str, object] = {"temperature": 0.0}
SEEDED: list[dict[str, object]] = [{"temperature": 0.8, "top_k": 20, "seed": seed} for seed in range(5)]
PARAMS = [GREEDY, *SEEDED, GREEDY, {"temperature": 0.7, "repetition_penalty": 1.3, "seed": 6}]


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktransformers.optimize.machine.cuda_memory", cuda_memory)  # which tests hide else
    draft_in_every_step(monkeypatch)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number: how often a graph was replayed."""
    count, launch = [0], CudaGraphs.launch

    def counted(self: CudaGraphs, *work: Any, **how: bool) -> None:
        count[0] += 1
        launch(self, *work, **how)

    monkeypatch.setattr(CudaGraphs, "launch", counted)
    return count


def config_of(path: Path, **changes: object) -> EngineConfig:
    values: dict[str, object] = {"cpu_infer": 2, "cache_lens": 512, "chunk_size": 64, "self_check": False}
    paths = {"gguf_path" if path.suffix == ".gguf" else "model_path": path}
    return EngineConfig(**(values | paths | {"speculative_tokens": NUM_DRAFTS} | changes))  # type: ignore[arg-type]


@contextmanager
def engine_of(config: EngineConfig, hardware: Hardware | None = None) -> Iterator[Engine]:
    print(f"loading {config.drafter}", flush=True)
    with closing(build_engine(config, hardware=hardware, page_size=16, max_batch_size=BATCH)) as engine:
        print("loaded", flush=True)
        yield engine


def answers_of(engine: Engine, max_drafts: int = NUM_DRAFTS) -> tuple[list[Answer], int, int]:
    """Answers, draft tokens, and how many were accepted. Without draft tokens answers have log probabilities."""
    engine.executor.reset()
    changes = {"num_states": engine.cache.num_states, "max_batch_size": BATCH, "chunk_size": 64}
    config = scheduler_config(engine, **changes, max_drafts=max_drafts, drafter=engine.drafter)
    loop, rng = PagedLoop(config, lambda: engine.executor), random.Random(1)
    for one in PARAMS:
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(5, 90))]
        more = {} if max_drafts else {"logprobs": 2}
        loop.add(prompt, SamplingParams(max_tokens=24, ignore_eos=True, **one, **more))  # type: ignore[arg-type]
    loop.drain()
    torch.cuda.synchronize()
    stats = loop.scheduler.stats()
    print(f"{stats.num_accepted} of {stats.num_drafted} draft tokens accepted", flush=True)
    return list(loop.answers.values()), stats.num_drafted, stats.num_accepted


def check_same(plain: list[Answer], drafted: list[Answer]) -> None:
    """A greedy answer goes another way at a near tie alone, and at most half of all do."""
    num_same = 0
    for params, one, other in zip(PARAMS, plain, drafted, strict=True):
        assert len(one.token_ids) == len(other.token_ids)
        pairs = zip(one.token_ids, other.token_ids, strict=True)
        at = next((i for i, (wanted, got) in enumerate(pairs) if wanted != got), None)
        num_same += at is None
        if at is None or params is not GREEDY:
            continue
        logprobs = one.logprobs[at]
        assert logprobs is not None
        (_, best), (_, second) = logprobs.top[:2]
        assert best - second < NEAR, f"token {at}"
    print(f"{num_same} of {len(plain)} answers are the same to their end", flush=True)
    assert num_same >= len(plain) // 2


def check_replayed(steps: DrafterSteps) -> None:
    few = [replayed for rows, replayed, _ in steps.seen if rows <= BATCH * (1 + NUM_DRAFTS)]
    print(f"{sum(few)} of {len(few)} steps of a drafter with few rows were replayed", flush=True)
    assert len(few) > 20
    assert all(few)
    print(f"{steps.num_held} of {len(steps.seen)} were launched before their tokens were known", flush=True)
    assert steps.num_held > 10


@pytest.mark.parametrize("model_type", ["glm4_moe", "deepseek_v3", "qwen3_next"])
def test_mtp(model_type: str, tmp_path: Path, replays: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """With experts in RAM, whose work is enqueued in the stream: of the target's layers and of the drafter's."""
    check_replayed_drafts(config_of(write_mtp(tiny_mtp(model_type), tmp_path), speculative="mtp"), replays, monkeypatch)


@pytest.mark.skipif(not hasattr(MtpModel, "forward_layer"), reason="transformers 5.24 has these layers' names")
@pytest.mark.parametrize("name", ["deepseek_v4", "qwen4_exp"])
def test_mtp_of_streams(name: str, tmp_path: Path, replays: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """And with n-grams (Qwen4), whose last tokens are those of draft tokens that were accepted."""
    check_replayed_drafts(_written(name, tmp_path)[1], replays, monkeypatch)


@pytest.mark.skipif(not hasattr(MtpModel, "forward_layer"), reason="transformers 5.24 or later has assistants")
@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("name", TARGETS)
def test_assistant(
    name: str, is_ordered: bool, tmp_path: Path, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, assistant = write_assistant(tiny_assistant(name, is_ordered=is_ordered), tmp_path)
    check_replayed_drafts(config_of(folder, draft_model=assistant), replays, monkeypatch)


def check_replayed_drafts(config: EngineConfig, replays: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(config) as engine:
        layout = runner_of(engine)._pass.layout
        assert layout is not None
        assert layout.last.torch_device.type == "cuda"
        plain, _, _ = answers_of(engine, 0)
        steps = DrafterSteps(engine, lambda: replays[0], monkeypatch)
        drafted, num_drafted, _ = answers_of(engine)
        again, _, _ = answers_of(engine)
    assert num_drafted > 100
    check_replayed(steps)
    check_same(plain, drafted)
    check_same(plain, again)


def _written(name: str, folder: Path) -> tuple[Oracle, EngineConfig]:
    """An oracle by its name, and how an engine loads what it is an oracle of."""
    if name == "qwen4_exp":
        streamed = tiny_qwen4_mtp()
        return streamed, config_of(write_qwen4_mtp(streamed, folder), speculative="mtp")
    if name == "deepseek_v4":
        compressed = tiny_deepseek4_mtp()
        return compressed, config_of(write_deepseek4_mtp(compressed, folder), speculative="mtp")
    if name in TARGETS:
        pair = tiny_assistant(name)
        path, assistant = write_assistant(pair, folder)
        return pair, config_of(path, draft_model=assistant)
    if name in FAMILIES:
        family = tiny_family(name)
        return family, config_of(write_family(family, folder), speculative="mtp")
    tiny = tiny_mtp(name)
    return tiny, config_of(write_mtp(tiny, folder), speculative="mtp")


@pytest.mark.skipif(not hasattr(MtpModel, "forward_layer"), reason="transformers 5.24 or later is the oracle")
@pytest.mark.parametrize(
    "name",
    ["glm4_moe", "mimo_v2_flash", "step3p7", "nemotron_h", "ernie4_5_moe", "qwen4_exp", "deepseek_v4", *TARGETS],
)
def test_drafts_are_those_of_the_oracle(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft tokens of each step, up to the first one where the oracle prefers none clearly."""
    (tiny, config), seen = _written(name, tmp_path), list[tuple[int, list[int]]]()
    draft = ModelDrafter.draft

    def watched(drafter: ModelDrafter, requests: list[DraftRequest]) -> list[list[int]]:
        found = draft(drafter, requests)
        seen.extend((request.position, tokens) for request, tokens in zip(requests, found, strict=True))
        return found

    monkeypatch.setattr(ModelDrafter, "draft", watched)
    with engine_of(config) as engine:
        limits = engine.scheduler_config
        plan = scheduler_config(engine, chunk_size=64, max_drafts=limits.max_drafts, drafter=limits.drafter)
        loop, prompt = PagedLoop(plan, lambda: engine.executor), list(range(3, 60))
        name = loop.add(prompt, SamplingParams(max_tokens=40, ignore_eos=True, **GREEDY))  # type: ignore[arg-type]
        loop.drain()
        known = [*prompt, *loop.answers[name].token_ids]
    compared = right = 0
    for position, tokens in seen:
        for token_id, logits in zip(tokens, tiny.drafts(known[: position + 1], len(tokens)), strict=True):
            best, second = logits.topk(2).values.tolist()
            if best - second <= 0.25 * float(logits.std()):
                break
            compared, right = compared + 1, right + (token_id == int(logits.argmax()))
            if token_id != int(logits.argmax()):
                break
    print(f"{right} of {compared} clear draft tokens are right, of {len(seen)}", flush=True)
    assert compared > 5
    assert right >= 0.9 * compared


@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_a_draft_model_that_is_the_model(
    where: str, tmp_path: Path, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is hardly ever wrong: a row of several is computed in other kernels than one alone, in bf16, so that draws
    near a border, some per cent of those of random weights, fall to the other side. where: experts of both."""
    model = tiny_model("qwen3_moe", seed=3, hidden=256)
    path = write_gguf(model, tmp_path / "model.gguf", QuantType.Q8_0, QuantType.Q8_0)
    config, hardware = config_of(path, draft_model=path), None
    if where == "cpu":
        roomy = plan_model(config)
        experts = [entry for entry in roomy.entries if entry.operator == "KTransformersExperts"]
        of_layers = [entry.nbytes.get("cuda:0", 0) for entry in experts]
        assert min(of_layers) > 0
        # What a GPU of less memory than one more layer's experts would take has:
        least = roomy.total_bytes["cuda:0"] - 2 * sum(of_layers) + min(of_layers) - 1
        hardware = Hardware(detect_machine(gpus=lambda: dict.fromkeys(list(cuda_memory())[:1], least)))
    with engine_of(config, hardware) as engine:
        modules = [one for one in runner_of(engine).model.modules() if type(one).__name__ == "KTransformersExperts"]
        assert {module.device.name for module in modules} == {"cpu" if where == "cpu" else "cuda:0"}
        plain, _, _ = answers_of(engine, 0)
        steps = DrafterSteps(engine, lambda: replays[0], monkeypatch)
        drafted, num_drafted, num_accepted = answers_of(engine)
    check_replayed(steps)
    check_same(plain, drafted)
    assert num_drafted > 90
    assert num_accepted >= 0.9 * num_drafted
