"""Recurrent layers on (made-up) GPUs: states there, carried through replayed steps, in their slots."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.load.builder import build_engine, plan_model
from ktransformers.engine.step.decode_inputs import DecodeInputs, StaticInputs
from ktransformers.kernels.types import StateStep
from ktransformers.operators.attention.latent_materialization import EXPANSION_NBYTES
from tests.support.engines.fake_gpus import FakeGraphs, fake_hardware
from tests.support.engines.one_sequence import static_engine
from tests.support.engines.paged_loop import PagedLoop, scheduler_config
from tests.support.engines.sequential import Session
from tests.support.models.recurrent_models import recurrent_model

CPU = torch.device("cpu")
TOLERANCE = 1e-4  # as of all families on GPUs


def some_ids(count: int, seed: int = 7) -> list[int]:
    return torch.randint(3, 160, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.exhaustive
@pytest.mark.every(3)
@pytest.mark.parametrize(
    "model_type",
    [
        # One of each kind of layer; of the others' kinds there is one already.
        *("qwen3_next", "jamba", "lfm2_moe", "kimi_linear", "minimax", "nemotron_h"),
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in (
                *("olmo_hybrid", "mamba", "zamba", "recurrent_gemma", "granitemoehybrid", "qwen3_5_moe_text"),
                "falcon_h1",
            )
        ),
    ],
)
def test_agrees_with_transformers(model_type: str, tmp_path: Path) -> None:
    model, ids, graphs = recurrent_model(model_type), some_ids(24), FakeGraphs()
    model.save_pretrained(tmp_path)
    config = EngineConfig(model_path=tmp_path, cache_lens=64, cpu_infer=1, self_check=False)
    engine = static_engine(config, hardware=fake_hardware(graphs=graphs))
    with torch.no_grad():
        want = model(torch.tensor([ids]), use_cache=False).logits[0]
    first = engine.runner.forward(ids[:20], 0, range(20)).clone()
    rest = [engine.runner.forward([token], 20 + i, [0]).clone() for i, token in enumerate(ids[20:])]
    assert float((torch.cat([first, *rest]) - want).abs().max()) <= TOLERANCE * float(want.abs().max())
    assert graphs.replays == 4
    states = engine.runner.cache.states
    assert states is not None
    assert {shape.place for shape in states.shapes.values()} == {"cuda:0"}
    assert engine.plan.extra_bytes["states"] == {"cuda:0": states.nbytes}
    engine.close()


@pytest.mark.parametrize(
    ("model_type", "of_row"),
    [
        # By head: products within a chunk, two factors, with the delta rule keys and values that correct the state;
        # and the gates, decay and beta (of Kimi by column of a key) or dt. All fp32.
        ("qwen3_next", 4 * (64 + 2 + 16 + 24 + 2)),
        ("kimi_linear", 4 * (64 + 2 + 16 + 16 + 16 + 1)),
        ("olmo_hybrid", 4 * (64 + 2 + 12 + 24 + 2)),
        ("nemotron_h", 8 * (64 + 2 + 2)),
        ("minimax", 4 * (64 + 2)),
        ("jamba", 0),
    ],
)
def test_what_scans_work_in_is_in_the_plan(model_type: str, of_row: int, tmp_path: Path) -> None:
    recurrent_model(model_type).save_pretrained(tmp_path)
    config = EngineConfig(model_path=tmp_path, cache_lens=64, cpu_infer=1, chunk_size=2048)
    plan = plan_model(config, hardware=fake_hardware())
    others = (512 << 20) + (EXPANSION_NBYTES if model_type == "kimi_linear" else 0)
    assert plan.extra_bytes["workspace"]["cuda:0"] == others + 4 * 2048 * of_row


@pytest.mark.exhaustive
def test_replayed_steps_of_several_sequences(tmp_path: Path) -> None:
    recurrent_model("nemotron_h").save_pretrained(tmp_path)
    config = EngineConfig(model_path=tmp_path, cache_lens=256, cpu_infer=1, self_check=False)
    graphs = FakeGraphs()
    paged = build_engine(config, page_size=16, max_batch_size=3, hardware=fake_hardware(graphs=graphs))
    loop = PagedLoop(scheduler_config(paged, num_states=paged.cache.num_states), lambda: paged.executor)
    prompts = [some_ids(length, seed=length) for length in (3, 9, 14, 5)]
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
    names = [loop.add(prompt, params) for prompt in prompts]
    loop.drain()
    assert graphs.replays
    single = static_engine(replace(config, use_cuda_graph=False), hardware=fake_hardware())
    for name, prompt in zip(names, prompts, strict=True):
        session = Session(single.runner, chunk_size=64, has_prefix_cache=False)
        assert loop.answers[name].token_ids == [event.token_id for event in session.generate(prompt, params)]
    single.close()
    paged.close()


def inputs_of(states: StateStep, rows: int) -> DecodeInputs:
    lens = states.kv_lens
    table = torch.zeros(states.num_seqs, 1, dtype=torch.int32)
    wide = torch.arange(rows)
    return DecodeInputs(torch.zeros(rows, 2), wide, wide, torch.zeros(rows, dtype=torch.int32), lens, table, states)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_padding_belongs_to_no_sequence_and_keeps_no_state() -> None:
    static = StaticInputs(4, 2, CPU, 2, torch.float32, has_states=True)
    got = static.inputs.states
    assert got is not None
    assert got.first_rows.tolist() == [0] * 5
    step = StateStep(ints(0, 2, 3), ints(5, -1), ints(5, 7), ints(-1, 9, -1), ints(4, 5, 1), 2)
    static.fill(inputs_of(step, 3))
    assert got.first_rows.tolist() == [0, 2, 3, 3, 3]
    assert got.read_slots.tolist() == [5, -1, -1, -1]
    assert got.write_slots.tolist() == [5, 7, -1, -1]
    assert got.save_slots.tolist() == [-1, 9, -1, -1]
    assert got.kv_lens.tolist() == [4, 5, 1, 0]
    assert got.max_rows is None
    static.pad()
    assert {*got.read_slots.tolist(), *got.write_slots.tolist(), *got.save_slots.tolist()} == {-1}
    assert StaticInputs(4, 2, CPU, 2).inputs.states is None
