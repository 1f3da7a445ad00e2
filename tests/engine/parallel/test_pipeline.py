"""Models whose layers are in several processes: the same bits as in one."""

from __future__ import annotations

import itertools
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.api.llm import LLM
from ktransformers.engine.load.builder import build_engine, build_worker
from ktransformers.engine.model.opened import open_model
from ktransformers.engine.parallel.pipeline.link import StageLink, gpu_number, joined_stages
from ktransformers.engine.parallel.pipeline.stages import cut_stage, joined_layers, stage_bounds
from ktransformers.engine.parallel.ranks.driver import Driver
from ktransformers.engine.parallel.ranks.messages import Begin, Captured, Start
from ktransformers.engine.parallel.ranks.ranks import Worker
from ktransformers.engine.plan.cache_plan import CachePlan
from ktransformers.engine.step.context import ForwardBatch, paged_context
from ktransformers.errors import ConfigError, StageLostError, UnsupportedError
from ktransformers.operators.layers.native_stack import NativeStack
from tests.support.engines.cut_models import BF16, HARDWARE, detect_bf16
from tests.support.engines.fake_gpus import FakeGraphs, fake_hardware
from tests.support.engines.gpu_engines import step_row
from tests.support.engines.paged_loop import PagedLoop, scheduler_config
from tests.support.engines.stage_engines import IDS, engine_of, logits_in_steps
from tests.support.models.demo import DEMO_GGUF
from tests.support.models.family_models import family_model
from tests.support.models.latent_models import latent_model
from tests.support.models.recurrent_models import RECURRENT_TYPES, recurrent_model
from tests.support.models.tiny_models import tiny_model, write_safetensors

PERIODIC = ("gpt_oss", "gemma2", "gemma3_text", "deepseek_v4")  # each of their two layers is of a kind of its own


def exhaustive(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.exhaustive)


@pytest.mark.every(12)
@pytest.mark.parametrize(
    ("model_type", "num_stages"),
    [
        ("qwen3_moe", 2),
        exhaustive("qwen3_moe", 3),
        ("deepseek_v4", 2),
        ("deepseek_v3", 3),
        *(exhaustive(name, 2) for name in ("llama", "gpt_oss", "gemma2", "gemma3_text", "granitemoe", "glm4_moe")),
    ],
)
def test_stages_compute_what_one_process_does(model_type: str, num_stages: int, tmp_path: Path) -> None:
    more = {} if model_type in PERIODIC else {"num_hidden_layers": num_stages + 1}
    write_safetensors(tiny_model(model_type, seed=1, **more), tmp_path)
    with closing(engine_of(tmp_path, 1)) as engine:
        want = logits_in_steps(engine)
    with closing(engine_of(tmp_path, num_stages)) as engine:
        assert torch.equal(logits_in_steps(engine), want)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", ["qwen3_moe", exhaustive("qwen3_next"), exhaustive("deepseek_v4")])
def test_stages_on_gpus(model_type: str, tmp_path: Path) -> None:
    """Interpreted kernels sum by numpy's BLAS, in an order that depends on its threads, which are a process's own: some
    hundred terms of fp32 in each of a dozen products."""
    model = recurrent_model(model_type) if model_type in RECURRENT_TYPES else tiny_model(model_type, seed=1)
    write_safetensors(model, tmp_path)
    with closing(engine_of(tmp_path, 1, on_gpu=True)) as engine:
        want = logits_in_steps(engine)
    with closing(engine_of(tmp_path, 2, on_gpu=True)) as engine:
        assert (logits_in_steps(engine) - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "model_type",
    [
        "qwen3_moe",
        *map(exhaustive, ("deepseek_v3", "deepseek_v4", "gemma2", "gpt_oss", "jamba", "llama", "qwen3_next")),
    ],
)
def test_borders_of_stages_whose_gpus_compute_in_bf16(model_type: str, tmp_path: Path) -> None:
    """Hidden states come in fp32 there. Interpreted kernels multiply bits of bf16: what they compute means nothing."""
    pytest.importorskip("triton")
    model = recurrent_model(model_type) if model_type in RECURRENT_TYPES else tiny_model(model_type, seed=1)
    write_safetensors(model, tmp_path)
    config = EngineConfig(model_path=tmp_path, cache_lens=96, cpu_infer=1, pipeline=2, self_check=False)
    ranks, hardware = Driver(config, None, BF16), detect_bf16(config)
    build_engine(config, page_size=8, max_batch_size=4, ranks=ranks, hardware=hardware).close()


@pytest.mark.exhaustive
def test_stages_replay_their_steps_and_give_hidden_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two stages, its neighbour's ears in place of gloo; against transformers' hidden states."""
    model = tiny_model("qwen3_moe", seed=1)
    write_safetensors(model, tmp_path)
    with torch.no_grad():
        want = model(torch.tensor([IDS]), output_hidden_states=True).hidden_states[1]
    given: list[torch.Tensor] = []
    monkeypatch.setattr(StageLink, "rendezvous", lambda *args: None)
    monkeypatch.setattr(distributed, "send", lambda rows, to, group: given.append(rows.clone()))
    config = EngineConfig(model_path=tmp_path, cache_lens=96, cpu_infer=1, pipeline=2, self_check=False)
    graphs, said = FakeGraphs(), list[Any]()
    worker = Worker(Start(1, "stage 1", config, 8, 4, 0, HARDWARE, "error"), lambda: Begin("", [], False), said.append)
    hardware = fake_hardware(graphs=graphs, graph_rows=(16,))
    part = build_worker(open_model(config), worker, hardware, CachePlan(4, 8))
    for at, replays in (((0, 9), 1), ((9, 16), 2), ((16, 17), 3), ((17, 18), 4), ((18, 19), 5)):
        ids, table = IDS[slice(*at)], [np.arange(4, dtype=np.int32)]
        row = step_row(1, ids, at[0], [0, 1, 2, 3], read_slot=-1, write_slot=0)
        positions, context = paged_context(part.cache, part.pool, [row], table)
        batch = ForwardBatch(torch.tensor(ids), positions, context, torch.tensor([len(ids) - 1]))
        part.runner.follow(batch, is_padded=False)
        assert graphs.replays == replays
        assert given[-1].shape == (1, len(ids), want.shape[-1])
    worker.close()
    assert (torch.cat(given, 1) - want).abs().max() <= 1e-4 * want.abs().max()
    assert said[-1] == Captured([(16, 4, 4), (4, 4, 4), (2, 2, 2), (1, 1, 1)])


@pytest.mark.exhaustive
def test_steps_that_no_pipe_holds(tmp_path: Path) -> None:
    """A step of 3,000 tokens is told in 100 kB, a pipe takes 64: the driver tells of the second one while the first
    stage waits to hand the first one over."""
    write_safetensors(tiny_model("llama", seed=1, max_position_embeddings=4096), tmp_path)
    ids = [3 + 7 * i % 90 for i in range(3000)]
    table = list(range(375))
    with closing(engine_of(tmp_path, 2, cache_lens=8192)) as engine:
        runner: Any = engine.executor.runner  # type: ignore[attr-defined]
        row = step_row(1, ids, 0, table, read_slot=-1, write_slot=0)
        positions, context = paged_context(engine.cache, engine.pool, [row], [np.array(table, dtype=np.int32)])
        batch = ForwardBatch(torch.tensor(ids), positions, context, torch.tensor([len(ids) - 1]))
        runner.begin(batch)
        runner.begin(batch)
        assert torch.equal(runner.step(batch).clone(), runner.step(batch))


def test_bounds_are_the_best_there_are() -> None:
    draw = random.Random(5)
    for _ in range(200):
        costs = [draw.randint(1, 9) for _ in range(draw.randint(1, 8))]
        joined = {i for i in range(1, len(costs)) if draw.random() < 0.3}
        size = draw.randint(1, len(costs) - len(joined))
        bounds = stage_bounds(costs, size, joined)
        assert not joined & {first for first, _ in bounds}
        assert [first for first, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
        assert bounds[-1][1] == len(costs)
        assert all(first < end for first, end in bounds)
        cuts = itertools.combinations([i for i in range(1, len(costs)) if i not in joined], size - 1)
        every = ([0, *cut, len(costs)] for cut in cuts)
        best = min(max(sum(costs[a:b]) for a, b in itertools.pairwise(cut)) for cut in every)
        assert max(sum(costs[a:b]) for a, b in bounds) == best


def test_between_which_stages_nccl_is() -> None:
    """Both on GPUs, and on different ones."""
    assert gpu_number(torch.device("cpu")) == 0
    for numbers, joined in (([0, 0, 0], []), ([5, 6, 7], [0, 1]), ([5, 5, 7], [1]), ([5, 0, 7], []), ([0, 6, 7], [1])):
        assert joined_stages(numbers) == joined


def test_more_stages_than_layers(tmp_path: Path) -> None:
    write_safetensors(tiny_model("llama", seed=1), tmp_path)
    with pytest.raises(ConfigError, match="--pipeline 5: the model has 2 layers, and each stage needs one"):
        engine_of(tmp_path, 5)


@pytest.mark.exhaustive
def test_layers_as_they_are_given(tmp_path: Path) -> None:
    write_safetensors(tiny_model("llama", seed=1, num_hidden_layers=4), tmp_path)
    with closing(engine_of(tmp_path, 1)) as engine:
        want = logits_in_steps(engine)
    with closing(engine_of(tmp_path, 2, pipeline_layers="2,2")) as engine:
        runner: Any = engine.executor.runner  # type: ignore[attr-defined]
        assert [len(stack.layers) for stack in runner.model.modules() if isinstance(stack, NativeStack)] == [2]
        assert torch.equal(logits_in_steps(engine), want)
    with closing(engine_of(tmp_path, 2, pipeline_layers="3,1")) as engine:
        assert len(engine.executor._cache.shapes) == 1  # type: ignore[attr-defined]
        assert torch.equal(logits_in_steps(engine), want)
    with pytest.raises(ConfigError, match="--pipeline_layers 3,2 are 5 layers, and the model has 4"):
        engine_of(tmp_path, 2, pipeline_layers="3,2")
    config = EngineConfig(model_path=tmp_path, pipeline_layers="2,1,1")
    assert config.resolved().pipeline == 3
    for settings, says in (
        ({"pipeline": 2, "pipeline_layers": "2,1,1"}, "which are 3 stages; leave --pipeline out"),
        ({"pipeline_layers": "2,0"}, "must be numbers of layers with commas between them, got '2,0'"),
    ):
        with pytest.raises(ConfigError, match=says):
            EngineConfig(model_path=tmp_path, **settings).resolved()  # type: ignore[arg-type]


@pytest.mark.exhaustive
def test_layers_that_attend_to_what_another_has_chosen_stay_with_it(tmp_path: Path) -> None:
    """The third and the fourth one use the second one's choice."""
    write_safetensors(latent_model("glm_moe_dsa"), tmp_path)
    with closing(engine_of(tmp_path, 1)) as engine:
        want = logits_in_steps(engine)
    with closing(engine_of(tmp_path, 2)) as engine:
        assert len(engine.executor._cache.shapes) == 3  # type: ignore[attr-defined]
        assert torch.equal(logits_in_steps(engine), want)
    with pytest.raises(ConfigError, match="cannot begin with layer 3, which uses what layers before it"):
        engine_of(tmp_path, 2, pipeline_layers="3,1")
    with pytest.raises(ConfigError, match="--pipeline 3: the model has 2 layers that 2 more cannot be parted from"):
        engine_of(tmp_path, 3)


def test_layers_that_share_keys_stay_with_their_owner(tmp_path: Path) -> None:
    """The third of four uses those of the first, and the fourth those of the second: nothing can be cut there."""
    write_safetensors(family_model("gemma3n_text", 0), tmp_path)
    opened = open_model(EngineConfig(model_path=tmp_path))
    assert [layer.shares for layer in opened.facts.layers] == [None, None, 0, 1]
    assert joined_layers(opened) == {1, 2, 3}


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("recurrent_gemma", "before its first layer, computes what cannot"),  # a normalizer, in the model's own forward
        ("zamba", "hands its layers what it makes of embeddings"),
        exhaustive("zaya", "before its first layer, computes what cannot"),
    ],
)
def test_what_is_computed_between_stages(family: str, says: str, tmp_path: Path) -> None:
    write_safetensors(recurrent_model(family), tmp_path)
    with pytest.raises(UnsupportedError, match=f"model type {family}, {says}"):
        engine_of(tmp_path, 2, pipeline_layers="2,2")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("qwen3_next", "2,1,1"),
        exhaustive("qwen3_next", "2,2"),
        exhaustive("bailing_hybrid", "1,1,2"),
        exhaustive("lfm2_moe", "1,2,1"),
        *(
            exhaustive(name, "2,2")
            for name in ("jamba", "granitemoehybrid", "bailing_hybrid", "falcon_h1", "mamba2", "kimi_linear")
        ),
    ],
)
def test_layers_with_a_state(family: str, layers: str, tmp_path: Path) -> None:
    write_safetensors(recurrent_model(family), tmp_path)
    with closing(engine_of(tmp_path, 1)) as engine:
        want = logits_in_steps(engine)
    with closing(engine_of(tmp_path, len(layers.split(",")), pipeline_layers=layers)) as engine:
        assert torch.equal(logits_in_steps(engine), want)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layers", [exhaustive("2,2"), "2,1,1"])
def test_prompts_begin_at_states_that_all_stages_keep(layers: str, tmp_path: Path) -> None:
    """The last of 2, 1, 1 stages has no layer with a state, and counts those of the others."""
    model = recurrent_model("qwen3_next", layer_types=[*["linear_attention"] * 3, "full_attention"])
    write_safetensors(model, tmp_path)
    shared = [3 + 7 * i % 90 for i in range(130)]
    prompts = [shared[:length] + [5 + length % 50] * 5 for length in (130, 70, 128, 3, 100)]
    got = []
    for given in ("", layers):
        with closing(engine_of(tmp_path, 1 + given.count(","), cache_lens=800, pipeline_layers=given)) as engine:
            config = scheduler_config(engine, snapshot_interval=64, num_states=engine.cache.num_states)
            loop = PagedLoop(config, lambda: engine.executor)
            params, names = SamplingParams(max_tokens=70, ignore_eos=True, temperature=0.0), []
            for prompt in prompts:
                names.append(loop.add(prompt, params))
                while len(loop.answers[names[0]].token_ids) < 3 and loop.step():
                    pass  # the others find what the first one has left
            while loop.step():
                pass
            assert loop.scheduler.stats().prefix_hit_len > 0
            got.append([loop.answers[name].token_ids for name in names])
    assert got[0] == got[1]


def test_settings_that_contradict_it(tmp_path: Path) -> None:
    write_safetensors(tiny_model("llama", seed=1), tmp_path)
    for settings, says in (
        ({"pipeline": 0}, "--pipeline must be a number from 1 to 64, got 0"),
        ({"pipeline": 2, "tensor_parallel": 2}, "in two ways: choose one of them"),
        ({"pipeline": 2, "cpu_memory_size_GB": 1.0}, "--pipeline keeps pages in the cache alone"),
    ):
        with pytest.raises(ConfigError, match=says):
            EngineConfig(model_path=tmp_path, **settings).resolved()  # type: ignore[arg-type]


@pytest.mark.exhaustive
def test_a_stage_that_dies_is_replaced_alone(tmp_path: Path) -> None:
    """Which the next step shows; the other stages keep their processes."""
    write_safetensors(tiny_model("llama", seed=1, num_hidden_layers=3), tmp_path)
    with closing(engine_of(tmp_path, 1)) as engine:
        want = logits_in_steps(engine)
    config = EngineConfig(model_path=tmp_path, cache_lens=96, cpu_infer=1, pipeline=3, self_check=False)
    ranks = Driver(config)
    with closing(build_engine(config, page_size=8, max_batch_size=4, ranks=ranks)) as engine:
        assert torch.equal(logits_in_steps(engine), want)
        for lost in (0, 1):
            before = [peer.process for peer in ranks._workers.workers]  # type: ignore[attr-defined]
            before[lost].kill()
            before[lost].wait()
            with pytest.raises(StageLostError):
                logits_in_steps(engine)
            engine.executor.recover()
            after = [peer.process for peer in ranks._workers.workers]  # type: ignore[attr-defined]
            assert [old is new for old, new in zip(before, after, strict=True)] == [i != lost for i in range(2)]
            assert torch.equal(logits_in_steps(engine), want)


@pytest.mark.exhaustive
def test_answers_of_llm_go_on_when_a_stage_dies() -> None:
    prompts = ["Once upon a time", "What is 17 + 25?", "Reverse the word: kernel"]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True)
    with LLM(DEMO_GGUF, cache_lens=512, cpu_infer=1) as llm:
        want = [output.token_ids for output in llm.generate(prompts, params)]
    with LLM(DEMO_GGUF, cache_lens=512, cpu_infer=1, pipeline=2) as llm:
        streams = [llm.stream(prompt, params) for prompt in prompts]
        got = [[next(stream).token_id for _ in range(5)] for stream in streams]
        ranks: Any = llm._batches.engine.ranks  # type: ignore[union-attr]
        ranks._workers.workers[0].process.kill()
        for tokens, stream in zip(got, streams, strict=True):
            tokens += [event.token_id for event in stream]
    assert [tuple(tokens) for tokens in got] == want


def test_layers_keep_their_names(tmp_path: Path) -> None:
    write_safetensors(tiny_model("qwen3_moe", seed=1, num_hidden_layers=5), tmp_path)
    names = []
    for stage in range(2):
        part = cut_stage(open_model(EngineConfig(model_path=tmp_path)), StageLink(stage, 2))
        names += [name for name, _ in part.model.named_parameters() if ".self_attn.q_proj." in name]
        assert len(part.facts.layers) == part.hf_config.num_hidden_layers == len(part.model.model.layers)
        attention = [layer.self_attn.layer_idx for layer in part.model.model.layers]
        assert attention == list(range(len(attention)))
    assert names == [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(5)]
