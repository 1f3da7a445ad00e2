"""Models that are divided, on one real GPU: stages that share it, and sums by NCCL in captured steps.

Between two stages hidden states are fp32, which every bf16 is exactly: the bits are those of one process.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.api.llm import LLM
from ktransformers.engine.load.builder import Engine, build_engine
from ktransformers.engine.parallel.ranks.driver import Driver
from ktransformers.engine.parallel.tensor_parallel.collectives import GroupCollectives
from ktransformers.engine.step.decode import DecodeSteps
from ktransformers.errors import StageLostError
from ktransformers.kernels.types import QuantType
from ktransformers.operators.device import cuda_memory
from tests.support.engines.gpu_engines import EXPERTS_ON_CPU, EXPERTS_ON_GPU, rules_of
from tests.support.engines.stage_engines import logits_in_steps
from tests.support.gguf.writer import write_gguf
from tests.support.models.demo import DEMO_GGUF
from tests.support.models.recurrent_models import RECURRENT_TYPES, recurrent_model
from tests.support.models.tiny_models import tiny_model, write_safetensors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests see none, see conftest; processes of their own see what there is."""
    monkeypatch.setattr("ktransformers.optimize.machine.cuda_memory", cuda_memory)


def cuda_engine(config: EngineConfig, ranks: Driver | None = None) -> Engine:
    config = replace(config, cache_lens=96, cpu_infer=2, self_check=False)
    engine = build_engine(config, page_size=8, max_batch_size=4, ranks=ranks)
    assert any(layer_device.device.startswith("cuda") for layer_device in engine.plan.layer_devices)
    return engine


@pytest.mark.every(256)
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(
    "model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss", "gemma2", "llama", "deepseek_v4", "qwen3_next", "jamba"]
)
def test_stages_compute_what_one_process_does(model_type: str, graphs: bool, tmp_path: Path) -> None:
    model = recurrent_model(model_type) if model_type in RECURRENT_TYPES else tiny_model(model_type, seed=1)
    write_safetensors(model, tmp_path)
    config = EngineConfig(model_path=tmp_path, use_cuda_graph=graphs)
    with closing(cuda_engine(config)) as engine:
        want = logits_in_steps(engine)
    with closing(cuda_engine(replace(config, pipeline=2))) as engine:
        for _ in range(2):
            assert torch.equal(logits_in_steps(engine), want)


@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_stages_of_quantized_models(model_type: str, where: str, tmp_path: Path) -> None:
    """With routed experts on the CPU, behind copies that are captured, and on the GPU."""
    model, kind = tiny_model(model_type, seed=3, hidden=256), QuantType.Q4_K
    path = write_gguf(model, tmp_path / "model.gguf", kind, kind, kv_b="whole")
    rules = rules_of(model_type, tmp_path, EXPERTS_ON_CPU, EXPERTS_ON_CPU if where == "cpu" else EXPERTS_ON_GPU)
    config = EngineConfig(gguf_path=path, optimize_config_path=rules, hot_experts="off")
    with closing(cuda_engine(config)) as engine:
        want = logits_in_steps(engine)
    with closing(cuda_engine(replace(config, pipeline=2))) as engine:
        assert torch.equal(logits_in_steps(engine), want)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages have the first GPU together, wherever there are more: those with GPUs of their own hand over by NCCL."""
    first = dict(list(cuda_memory().items())[:1])
    monkeypatch.setattr("ktransformers.optimize.machine.cuda_memory", lambda: first)


@pytest.mark.usefixtures("one_gpu")
def test_a_stage_that_dies_is_replaced(tmp_path: Path) -> None:
    write_safetensors(tiny_model("qwen3_moe", seed=1, num_hidden_layers=3), tmp_path)
    config = EngineConfig(model_path=tmp_path)
    with closing(cuda_engine(config)) as engine:
        want = logits_in_steps(engine)
    config = replace(config, pipeline=3)
    ranks = Driver(config)
    with closing(cuda_engine(config, ranks)) as engine:
        assert torch.equal(logits_in_steps(engine), want)
        for lost in (0, 1):
            process = ranks._workers.workers[lost].process  # type: ignore[attr-defined]
            process.kill()
            process.wait()
            with pytest.raises(StageLostError):
                logits_in_steps(engine)
            engine.executor.recover()
            assert torch.equal(logits_in_steps(engine), want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_stage_that_dies_behind_nccl_ends_its_engine(tmp_path: Path) -> None:
    """NCCL cannot be told to forget one of its processes: whoever watches the engine starts all of it again."""
    write_safetensors(tiny_model("qwen3_moe", seed=1), tmp_path)
    config = EngineConfig(model_path=tmp_path, pipeline=2)
    ended: SimpleQueue[str] = SimpleQueue()
    ranks = Driver(config, on_death=ended.put)
    with closing(cuda_engine(config, ranks)) as engine:
        logits_in_steps(engine)
        ranks._workers.workers[0].process.kill()  # type: ignore[attr-defined]
        assert "stage 1" in ended.get(timeout=60)


def test_answers_of_the_bundled_model() -> None:
    """With seeds, in steps of several sequences; without draft tokens, which stages have none of: on a GPU a sequence's
    numbers depend on the rows beside it.
    """
    prompts = ["Once upon a time", "What is 17 + 25?", "Reverse the word: kernel"]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True)
    answers = []
    for num_stages in (1, 2):
        with LLM(DEMO_GGUF, cache_lens=512, cpu_infer=1, pipeline=num_stages, speculative="off") as llm:
            answers.append([output.token_ids for output in llm.generate(prompts, params)])
    assert answers[0] == answers[1]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("graphs", [True, False])
def test_steps_in_shared_memory_are_those_of_messages(
    graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, one after another, from memory that is pinned."""
    write_safetensors(tiny_model("qwen3_moe", seed=1), tmp_path)
    config = EngineConfig(model_path=tmp_path, use_cuda_graph=graphs, tensor_parallel=2)
    ranks = Driver(config)
    with closing(cuda_engine(config, ranks)) as engine:
        assert ranks.step_blocks is not None
        assert len(ranks.step_blocks._pinned) == 2
        got = [logits_in_steps(engine) for _ in range(3)]
        with monkeypatch.context() as patch:
            patch.setattr(DecodeSteps, "is_shared", lambda steps, context, num_kept: False)
            want = logits_in_steps(engine)
        got.append(logits_in_steps(engine))
    assert all(torch.equal(one, want) for one in got)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_sums_by_nccl_change_nothing_where_one_process_has_all(
    model_type: str, graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's kernels in captured steps, beside its own threads: nothing of them keeps a graph from being captured.

    What is summed is rounded elsewhere (a shared expert's part, for one), so the oracle is the same division of the
    model whose sums are left out: of one process's part they are that part.
    """
    write_safetensors(tiny_model(model_type, seed=1), tmp_path)
    config = EngineConfig(model_path=tmp_path, use_cuda_graph=graphs)
    with monkeypatch.context() as patch:
        patch.setattr(GroupCollectives, "add", lambda sums, share, out: out is share or out.copy_(share))
        with closing(cuda_engine(config, Driver(config))) as engine:
            want = logits_in_steps(engine)
    with closing(cuda_engine(config, Driver(config))) as engine:
        for _ in range(2):
            assert torch.equal(logits_in_steps(engine), want)
