"""Models cut over processes: parts make up the whole, and the results are transformers', whatever is cut."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import Engine, build_engine
from ktransformers.engine.model.opened import open_model
from ktransformers.engine.parallel.ranks.driver import Driver
from ktransformers.engine.parallel.ranks.messages import Begin, Start
from ktransformers.engine.parallel.ranks.parallel_strategy import TensorParallelStrategy
from ktransformers.engine.parallel.ranks.ranks import ResolvedPlan, Worker
from ktransformers.engine.parallel.tensor_parallel.cut import cut_model
from ktransformers.engine.parallel.tensor_parallel.group import TensorGroup
from ktransformers.engine.step.context import ForwardBatch, paged_context
from ktransformers.errors import CapacityError, ConfigError, EngineError, KTransformersError, UnsupportedError
from ktransformers.kernels.types import QuantType
from ktransformers.operators.experts.paths.resident import ResidentPath
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.scheduler.records import StepPlan
from ktransformers.system.shared_blocks import SharedBlocks
from ktransformers.weights.cut_source import CutSource, TensorSlice
from tests.support.engines.cut_models import HARDWARE
from tests.support.engines.fake_gpus import FakeGraphs, fake_hardware
from tests.support.engines.gpu_engines import sequence_start, step_row
from tests.support.gguf.writer import write_gguf
from tests.support.models.demo import DEMO_GGUF
from tests.support.models.recurrent_models import recurrent_model
from tests.support.models.tiny_models import tiny_model, write_safetensors

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="one GPU is not enough for NCCL"
)

# fp32 sums over half as many terms, then one addition more: the rounding of a few products, of some hundred terms.
TOLERANCE = 1e-5
IDS = [3 + 7 * i % 90 for i in range(19)]


def cut_engine(path: Path, size: int = 2, **settings: object) -> Engine:
    config = EngineConfig(
        model_path=path, cache_lens=96, cpu_infer=1, tensor_parallel=size, self_check=False, **settings
    )  # type: ignore[arg-type]
    hardware = fake_hardware(graphs=FakeGraphs())
    ranks = Driver(config, None, HARDWARE)
    return build_engine(config, page_size=8, max_batch_size=4, hardware=hardware, ranks=ranks)


def logits(engine: Engine, ids: list[int], start: int, slots: tuple[int, int]) -> torch.Tensor:
    """Of `ids` at positions from `start` on, in pages 0 .. 3."""
    row = step_row(1, ids, start, [0, 1, 2, 3], read_slot=slots[0], write_slot=slots[1])
    positions, context = paged_context(engine.cache, engine.pool, [row], [np.arange(4, dtype=np.int32)])
    batch = ForwardBatch(torch.tensor(ids), positions, context, torch.arange(len(ids)))
    return engine.executor.runner.step(batch).clone()  # type: ignore[attr-defined]


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("model_type", "size"),
    [
        ("qwen3_moe", 2),
        ("deepseek_v3", 2),
        *(
            pytest.param(name, size, marks=pytest.mark.exhaustive)
            for name, size in (
                ("llama", 2),
                ("gpt_oss", 2),
                ("qwen2_moe", 2),
                ("glm4_moe", 2),
                ("mixtral", 2),
                ("gemma2", 2),
                ("qwen3_next", 2),
            )
        ),
    ],
)
def test_logits_are_those_of_transformers(model_type: str, size: int, tmp_path: Path) -> None:
    """A prompt in two chunks, then steps of one row, which are padded to graphs."""
    model = recurrent_model(model_type) if model_type == "qwen3_next" else tiny_model(model_type, seed=1)
    write_safetensors(model, tmp_path)
    with torch.no_grad():
        want = model(torch.tensor([IDS])).logits[0]
    with closing(cut_engine(tmp_path, size)) as engine:
        got = [logits(engine, IDS[:9], 0, (-1, 0)), logits(engine, IDS[9:16], 9, (0, 0))]
        got += [logits(engine, [token], at, (0, 0)) for at, token in enumerate(IDS[16:], 16)]
        assert (torch.cat(got) - want).abs().max() <= TOLERANCE * want.abs().max()


def test_each_process_computes_logits_of_its_tokens(tmp_path: Path) -> None:
    """A head of 256 tokens, cut into halves; one that is the embedding's table, or is of an odd number, stays whole."""
    for name, vocab, tied, rows in (("own", 256, False, 128), ("tied", 256, True, 256), ("odd", 100, False, 100)):
        model = tiny_model("llama", seed=1, vocab_size=vocab, tie_word_embeddings=tied)
        (tmp_path / name).mkdir()
        write_safetensors(model, tmp_path / name)
        for rank in range(2):
            cut = cut_model(open_model(EngineConfig(model_path=tmp_path / name)), TensorGroup(rank, 2))
            assert cut.partial_sums is not None
            assert (cut.partial_sums.of_head("lm_head") is not None) == (rows < vocab)
            assert tuple(cut.model.lm_head.weight.shape) == (rows, model.config.hidden_size)
            want = model.lm_head.weight.data[rank * rows % vocab :][:rows]
            if not tied:
                assert torch.equal(cut.source.dense("lm_head.weight"), want)


@pytest.mark.exhaustive  # two engines in Triton's interpreter
def test_experts_on_gpus_are_divided(tmp_path: Path) -> None:
    """Logits are those of one process with all columns, of which there are three blocks: the driver has two."""
    model = tiny_model("qwen3_moe", seed=3, layers=1, num_experts=4, num_experts_per_tok=2)
    path = write_gguf(model, tmp_path / "model.gguf", QuantType.Q8_0, QuantType.Q8_0, kv_b="whole")
    config = EngineConfig(gguf_path=path, cache_lens=96, cpu_infer=1, self_check=False, use_cuda_graph=False)
    with closing(build_engine(config, page_size=8, max_batch_size=1, hardware=fake_hardware())) as engine:
        want = [logits(engine, IDS[:2], 0, (-1, 0)), logits(engine, [5], 2, (0, 0))]
        whole = engine.plan.weight_bytes["cuda:0"]
    config = replace(config, tensor_parallel=2)
    ranks = Driver(config, None, HARDWARE)
    with closing(build_engine(config, page_size=8, max_batch_size=1, hardware=fake_hardware(), ranks=ranks)) as engine:
        experts = [op for op in engine.plan.operators.values() if isinstance(op, KTransformersExperts)]
        assert ranks._resolved is not None
        assert sorted(ranks._resolved.divided) == sorted(op.key for op in experts)
        paths = [op.path(ResidentPath) for op in experts]
        assert all(path is not None and path.experts is not None for path in paths)
        inner = {path.experts.matrices.up.rows for path in paths if path is not None and path.experts is not None}
        assert (experts[0].layout.intermediate_size, inner) == (96, {64})
        assert engine.plan.weight_bytes["cuda:0"] < 0.8 * whole
        got = [logits(engine, IDS[:2], 0, (-1, 0)), logits(engine, [5], 2, (0, 0))]
    for one, other in zip(got, want, strict=True):  # activations are fp16 before products here
        assert (one - other).abs().max() <= 4e-3 * other.abs().max()


def test_decode_steps_come_through_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between steps that come as messages, in their order; logits are those of one process, to the rounding of sums."""
    write_safetensors(tiny_model("qwen3_moe", seed=1), tmp_path)
    config = EngineConfig(model_path=tmp_path, cache_lens=96, cpu_infer=1, self_check=False)
    with closing(build_engine(config, page_size=8, max_batch_size=4, hardware=fake_hardware())) as engine:
        want = [logits(engine, IDS[:9], 0, (-1, 0)), *(logits(engine, [token], 9, (0, 0)) for token in range(5))]
    with closing(cut_engine(tmp_path)) as engine:
        ranks, messages = engine.ranks, list[bytes]()
        assert isinstance(ranks, Driver)
        assert ranks.step_blocks is not None
        send = ranks._workers.send
        monkeypatch.setattr(ranks._workers, "send", lambda data: messages.append(data) or send(data))
        for _ in range(2):
            with engine.executor.runner.hook.watch():  # steps that nobody replays
                got = [logits(engine, IDS[:9], 0, (-1, 0))]
            got += [logits(engine, [token], 9, (0, 0)) for token in range(5)]
            for one, other in zip(got, want, strict=True):
                assert (one - other).abs().max() <= TOLERANCE * other.abs().max()
        assert len(messages) == 2


def test_a_worker_that_cannot_open_the_memory_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where /proc is hidden: its error is the engine's, before anybody waits."""
    write_safetensors(tiny_model("llama", seed=1), tmp_path)
    monkeypatch.setattr(SharedBlocks, "path", str(tmp_path / "hidden"))
    with pytest.raises(EngineError, match=r"GPU 1: the memory of steps cannot be opened at .*hidden: No such file"):
        cut_engine(tmp_path)


def test_steps_are_messages_where_no_memory_is_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama", seed=1)
    write_safetensors(model, tmp_path)
    with torch.no_grad():
        want = model(torch.tensor([IDS[:9]])).logits[0]
    monkeypatch.delattr("os.memfd_create")
    with closing(cut_engine(tmp_path)) as engine:
        assert isinstance(engine.ranks, Driver)
        assert engine.ranks.step_blocks is None
        got = [logits(engine, IDS[:8], 0, (-1, 0)), logits(engine, IDS[8:9], 8, (0, 0))]
        assert (torch.cat(got) - want).abs().max() <= TOLERANCE * want.abs().max()
    assert "steps are sent as messages: no memory can be shared" in caplog.text


def test_a_worker_without_room_for_its_part_of_experts() -> None:
    """It would have them whole, on its CPU, and add them to those that the driver's GPU has a part of."""
    config, said = EngineConfig(gguf_path=DEMO_GGUF, tensor_parallel=2), list[object]()
    start = Start(1, "GPU 1", config, 8, 4, 0, HARDWARE, "error", divided=("a.experts", "b.experts"))
    worker = Worker(start, lambda: Begin("", [], False), said.append)
    worker.begin(ResolvedPlan(config, 8, 4, 96, 0, ("b.experts", "a.experts")))
    with pytest.raises(CapacityError, match="GPU 1 has no room for its part of the routed experts of 1 layers"):
        worker.begin(ResolvedPlan(config, 8, 4, 96, 0, ("b.experts",)))


def test_sequences_share_steps(tmp_path: Path) -> None:
    """Three of them in a prefill step and in decode steps: greedy tokens are those of transformers."""
    model = tiny_model("qwen3_moe", seed=1)
    write_safetensors(model, tmp_path)
    prompts = [IDS[:length] for length in (5, 9, 3)]
    tables = [list(range(4 * i, 4 * i + 4)) for i in range(3)]
    with closing(cut_engine(tmp_path)) as engine:
        shares = 4 * engine.config.chunk_size * model.config.hidden_size
        assert engine.plan.extra_bytes["sums over gpus"] == {"cuda:0": shares}
        starts = [sequence_start(i, ids) for i, ids in enumerate(prompts)]
        rows = [step_row(i, ids, 0, tables[i]) for i, ids in enumerate(prompts)]
        answers: list[list[int]] = [[] for _ in prompts]
        for step in range(4):
            plan = StepPlan(step_id=step, ended=[], starts=[] if step else starts, rows=rows)
            for i, result in enumerate(engine.executor.execute(plan).results):
                assert result.token_id is not None
                answers[i].append(result.token_id)
            ends = [len(ids) + step for ids in prompts]
            rows = [step_row(i, answers[i][-1:], end, tables[i]) for i, end in enumerate(ends)]
    for ids, answer in zip(prompts, answers, strict=True):
        want = model.generate(torch.tensor([ids]), max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
        assert answer == want[0, len(ids) :].tolist()


def test_parts_make_up_the_whole() -> None:
    """Every stored byte of a cut matrix is in one part: rows one after another, columns side by side."""
    config = EngineConfig(gguf_path=DEMO_GGUF)
    opened = [open_model(config) for _ in range(3)]
    cut = [cut_model(one, TensorGroup(rank, 2)) for rank, one in enumerate(opened[:2])]
    whole = opened[2]
    names = [name for name, _ in whole.model.named_parameters() if ".experts." not in name]
    num_cut = 0
    for name in names:
        parts = [dict(one.model.named_parameters()).get(name) for one in cut]
        if any(part is None for part in parts):
            assert ".mlp." in name  # a router, which the driver has
            continue
        shape = tuple(whole.model.get_parameter(name).shape)
        found = [one.source.find(name) for one in cut]
        assert [info and tuple(info.shape) for info in found] == [
            tuple(part.shape) for part in parts if part is not None
        ]
        tensors = [one.source.dense(name) for one in cut]
        raw = [one.source.tensor(name) for one in cut]
        assert [one.nbytes for one in raw] == [info.nbytes for info in found if info is not None]
        dim = next((dim for dim in range(len(shape)) if tensors[0].shape[dim] != shape[dim]), None)
        num_cut += dim is not None
        together = tensors[0] if dim is None else torch.cat(tensors, dim)
        assert torch.equal(together, whole.source.dense(name))
        for one, tensor in zip(raw, tensors, strict=True):
            assert one.shape == tensor.shape
    assert num_cut >= 4 * 4  # q, k, v and o of each layer at least


def test_the_bias_of_a_sum_is_added_once() -> None:
    source = open_model(EngineConfig(gguf_path=DEMO_GGUF)).source
    name = "model.norm.weight"
    driver, other = CutSource(source, {}), CutSource(source, {}, [name])
    assert torch.equal(driver.dense(name), source.dense(name))
    assert not other.dense(name).any()
    assert not other.tensor(name).data.any()


def test_blocks_are_not_cut_apart() -> None:
    source = open_model(EngineConfig(gguf_path=DEMO_GGUF)).source
    name = "model.layers.0.self_attn.o_proj.weight"
    with pytest.raises(KTransformersError, match="is cut within blocks of"):
        CutSource(source, {name: TensorSlice(1, 8, 40)}).tensor(name)


def test_what_cannot_be_cut_is_said(tmp_path: Path) -> None:
    model = tiny_model("llama", seed=1)  # of 4 heads, and columns of 3 times 32
    write_safetensors(model, tmp_path)
    with pytest.raises(UnsupportedError, match="--tensor_parallel 5: nothing of model type llama can be cut in 5"):
        cut_model(open_model(EngineConfig(model_path=tmp_path)), TensorGroup(0, 5))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tensor_parallel": 0}, "--tensor_parallel must be a number from 1 to 16, got 0"),
        ({"tensor_parallel": 2, "use_cuda": False}, "--no_use_cuda wants none"),
        ({"tensor_parallel": 2, "cpu_memory_size_GB": 1.0}, "leave --kv_disk_path and --cpu_memory_size_GB out"),
    ],
)
def test_settings_that_contradict_it(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig(gguf_path=DEMO_GGUF, **settings).resolved()  # type: ignore[arg-type]


@pytest.mark.parametrize(("threads", "size", "wanted"), [(31, 2, 4), (6, 2, 3), (1, 2, 1), (8, 4, 2)])
def test_workers_look_tokens_up_with_some_threads(threads: int, size: int, wanted: int) -> None:
    config = EngineConfig(gguf_path=DEMO_GGUF, tensor_parallel=size, cpu_infer=threads)
    assert TensorParallelStrategy(1, size).config_of_others(config).cpu_infer == wanted


def test_who_cannot_have_it() -> None:
    config = EngineConfig(gguf_path=DEMO_GGUF, tensor_parallel=2)
    with pytest.raises(ConfigError, match="for several GPUs, and there is none"):
        build_engine(config, page_size=8, max_batch_size=1, hardware=fake_hardware().without_gpus())


@pytest.mark.exhaustive
def test_another_process_that_cannot_load(tmp_path: Path) -> None:
    """Its error is the engine's, and nobody is left."""
    write_safetensors(tiny_model("qwen3_moe", seed=1), tmp_path)
    config = EngineConfig(model_path=tmp_path, cache_lens=96, cpu_infer=1, tensor_parallel=2)
    ranks = Driver(config, None, "tests.support.engines.cut_models:detect_little")
    with pytest.raises(CapacityError, match="GPU 1: the model does not fit"):
        build_engine(config, page_size=8, max_batch_size=4, hardware=fake_hardware(), ranks=ranks)
    assert [child.process.poll() is not None for child in ranks._workers.workers] == [True]


@pytest.mark.exhaustive
def test_another_process_that_dies(tmp_path: Path) -> None:
    """The driver's process is to end, for it would wait for ever; a step in which it fails is the last one."""
    write_safetensors(tiny_model("qwen3_moe", seed=1), tmp_path)
    told, has_died = [], threading.Event()

    def on_death(message: str) -> None:
        told.append(message)
        has_died.set()

    config = EngineConfig(model_path=tmp_path, cache_lens=96, cpu_infer=1, tensor_parallel=2)
    ranks = Driver(config, None, HARDWARE, on_death)
    engine = build_engine(config, page_size=8, max_batch_size=4, hardware=fake_hardware(), ranks=ranks)
    with closing(engine):
        (child,) = ranks._workers.workers
        child.process.kill()
        assert has_died.wait(60)
        assert told == ["the process of GPU 1 has ended with -9"]
        with pytest.raises((EngineError, RuntimeError)):  # the pipe's, or gloo's
            logits(engine, IDS[:5], 0, (-1, 0))
        with pytest.raises(EngineError, match="a step has failed in one of several processes"):
            logits(engine, IDS[:5], 0, (-1, 0))
