"""DeepSeek's DSpark head drafts what its formulas say, a block in each pass, and no answer depends on it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.drafting.drafter import ModelDrafter
from ktransformers.engine.load.builder import plan_model
from ktransformers.engine.model.opened import open_model
from ktransformers.engine.step.drafts import ComputedRow
from ktransformers.errors import ConfigError, UnsupportedError
from ktransformers.kernels.reference import dequantize
from ktransformers.weights.source import ExpertsLayout
from tests.support.engines.drafter_steps import draft_in_every_step
from tests.support.engines.fake_gpus import fake_hardware
from tests.support.engines.known_drafts import answers_of, told
from tests.support.engines.mtp_engines import Watched, check_drafts, check_engine, engine_of, loop_of
from tests.support.gguf.deepseek4_dspark import (
    BLOCK_SIZE,
    tiny_dspark,
    write_dspark,
)
from tests.support.models.tiny_models import VOCAB_SIZE, tiny_model, write_safetensors


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens as may be are drafted in each step, however few are right."""
    draft_in_every_step(monkeypatch)


def greedy(max_tokens: int, **values: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **values)  # type: ignore[arg-type]


def test_drafts_are_those_of_the_formulas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a prompt in chunks, behind a cached prefix, and where a block ends behind the pages of its sequence."""
    tiny = tiny_dspark()
    with engine_of(write_dspark(tiny, tmp_path), speculative_tokens=7) as engine:
        config = engine.scheduler_config
        assert (config.max_drafts, config.drafter, config.drafts_in_block) == (BLOCK_SIZE, "mtp", True)
        check_engine(engine, tiny, monkeypatch, num_tokens=9)
        watched, loop, prompt = Watched(engine, monkeypatch), loop_of(engine), list(range(12, 84))
        name = loop.add(prompt, greedy(10, max_drafts=1))
        loop.drain()
        known = [*prompt, *loop.answers[name].token_ids]
        positions = {position for position, _ in watched.seen}
        assert any(at // 16 == (at + 1) // 16 < (at + BLOCK_SIZE - 1) // 16 for at in positions)
        assert sum(check_drafts(tiny, known, *seen) for seen in watched.seen) >= 6


def test_what_it_takes_of_the_model_and_drafts_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hidden states of four sequences, whose prompts come in chunks beside one another, and their draft tokens."""
    tiny, rng = tiny_dspark(), random.Random(3)
    prompts = [[rng.randrange(3, VOCAB_SIZE - 1) for _ in range(length)] for length in (5, 24, 17, 9)]
    shown: dict[int, dict[int, torch.Tensor]] = {}
    observe = ModelDrafter.observe

    def watching(drafter: ModelDrafter, rows: Sequence[ComputedRow]) -> None:
        for row in rows:
            hidden = drafter._forward.hidden_states(row.first, len(row.token_ids))
            assert hidden is not None
            shown.setdefault(row.run_id, {}).update(enumerate(hidden, row.start))
        observe(drafter, rows)

    monkeypatch.setattr(ModelDrafter, "observe", watching)
    with engine_of(write_dspark(tiny, tmp_path), speculative_tokens=5) as engine:
        watched, loop = Watched(engine, monkeypatch), loop_of(engine, max_batch_size=4, chunk_size=16)
        names = [loop.add(prompt, greedy(14)) for prompt in prompts]
        loop.drain()
    compared = 0
    for run_id, prompt, name in zip(sorted(shown), prompts, names, strict=True):
        text = [*prompt, *loop.answers[name].token_ids]
        rows = torch.stack([shown[run_id][position] for position in range(len(shown[run_id]))])
        want = tiny.hidden_states(text[: len(rows)])
        assert len(prompt) <= len(rows) < len(text)
        assert torch.allclose(rows, want, atol=1e-3 * float(want.abs().max()))
        drafts = [(position, tokens) for other, position, tokens in watched.by_run if other == run_id]
        compared += sum(check_drafts(tiny, text, *one) for one in drafts)
    assert compared > 4 * 6


def test_answers_do_not_depend_on_drafts(tmp_path: Path) -> None:
    """Greedy and sampled, of one stream and of four, of requests that are suspended, and of engines that die."""
    asked: list[dict[str, object]] = [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.9, "top_p": 0.9, "seed": 5},
        {"temperature": 0.7, "repetition_penalty": 1.3, "seed": 6},
        {"temperature": 1.0, "top_k": 20, "seed": 7},
    ]
    params = [SamplingParams(max_tokens=12, ignore_eos=True, **one) for one in asked]  # type: ignore[arg-type]
    with engine_of(write_dspark(tiny_dspark(), tmp_path), speculative_tokens=5) as engine:
        plain = told(answers_of(loop_of(engine, max_drafts=0, max_batch_size=4), params, VOCAB_SIZE))

        def restarted() -> object:
            engine.executor.reset()
            return engine.executor

        for batch in (4, 1):
            engine.executor.reset()
            loop = loop_of(engine, max_batch_size=batch, chunk_size=16)
            assert told(answers_of(loop, params, VOCAB_SIZE)) == plain
            assert loop.scheduler.stats().num_drafted > 40
        engine.executor.reset()
        loop, rng = loop_of(engine, max_batch_size=4), random.Random(1)
        loop._make = restarted  # type: ignore[assignment]
        for one in params:
            loop.add([rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(5, 40))], one)
        loop.disturb(random.Random(2))
        assert told(list(loop.answers.values())) == plain


def test_fp4_and_fp8_as_published(tmp_path: Path) -> None:
    """Each matrix is read as the number that its codes and scales stand for; what is not read is no error."""
    tiny = tiny_dspark(hidden=128)
    folder = write_dspark(tiny, tmp_path, (128, 128))
    config = EngineConfig(model_path=folder, speculative="mtp", cpu_infer=1)
    draft = open_model(config).draft
    assert draft is not None
    last = "mtp.2."
    pairs = {
        "model.layers.0.main_proj.weight": "mtp.0.main_proj.weight",
        "model.layers.0.main_norm.weight": "mtp.0.main_norm.weight",
        "model.layers.0.markov_table.weight": f"{last}markov_head.markov_w1.weight",
        "model.layers.0.markov_proj.weight": f"{last}markov_head.markov_w2.weight",
        "model.norm.weight": f"{last}norm.weight",
        "model.hc_head.hc_fn": f"{last}hc_head_fn",
        "model.layers.1.attn_hc.base": "mtp.1.hc_attn_base",
        "model.layers.1.self_attn.kv_proj.weight": "mtp.1.attn.wkv.weight",
        "model.layers.2.self_attn.sinks": f"{last}attn.attn_sink",
        "model.layers.2.mlp.gate.e_score_correction_bias": f"{last}ffn.gate.bias",
    }
    for ours, theirs in pairs.items():
        assert torch.equal(draft.source.dense(ours).float(), tiny.stored[theirs]), ours
    down = tiny.stored["mtp.1.ffn.experts.3.w2.weight"]
    made = draft.source.experts("model.layers.1.mlp.experts", ExpertsLayout(8, *down.shape))
    assert torch.equal(dequantize(made.down[3]), down)
    plan = plan_model(config)  # every tensor has a place, and they are counted
    stored = sum(tensor.nbytes for name, tensor in draft.source._model.tensors.items())  # type: ignore[attr-defined]
    assert stored < plan.extra_bytes["draft model"]["cpu"] < 1.2 * stored + 2 * plan.extra_bytes["kv cache"]["cpu"]


def test_its_experts_are_in_the_models_slots_where_these_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, prompt = tiny_dspark(), list(range(3, 30))
    path = write_dspark(tiny, tmp_path)
    with engine_of(path, speculative_tokens=5, experts_from="disk", experts_ram=1e-6) as engine:
        watched, loop = Watched(engine, monkeypatch), loop_of(engine)
        name = loop.add(prompt, greedy(12))
        loop.drain()
        assert engine.expert_files is not None
        scores, num_layers = engine.expert_files.store.scores(), int(tiny.main.config.num_hidden_layers)
        assert all(scores[num_layers + layer].sum() > 0 for layer in range(3))
        known = [*prompt, *loop.answers[name].token_ids]
    assert sum(check_drafts(tiny, known, *seen) for seen in watched.seen) > 8


@pytest.mark.exhaustive
def test_drafts_on_a_gpu_are_those_of_the_formulas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tiny_dspark()
    with engine_of(write_dspark(tiny, tmp_path), fake_hardware(1)) as engine:
        check_engine(engine, tiny, monkeypatch, num_tokens=8)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("block_size", None, "dspark_block_size None; a whole number from 1 on"),
        ("noise_token_id", VOCAB_SIZE, "dspark_noise_token_id 160; a whole number from 0 to 159"),
        ("target_layer_ids", [1, 4], r"dspark_target_layer_ids \[1, 4\]; numbers of some of the model's 4 layers"),
    ],
)
def test_a_config_without_its_numbers_is_refused(name: str, value: object, message: str, tmp_path: Path) -> None:
    folder = write_dspark(tiny_dspark(), tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {f"dspark_{name}": value}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"the config says {message}"):
        open_model(EngineConfig(model_path=folder, speculative="mtp"))


def test_heads_that_are_not_known_are_refused(tmp_path: Path) -> None:
    """Without a layer, and of another family."""
    folder = write_dspark(tiny_dspark(), tmp_path / "cut")
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    cut = {name: tensor for name, tensor in stored.items() if not name.startswith("mtp.1.")}
    safetensors.torch.save_file(cut, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"layers \[0, 2\]: some of them are missing"):
        open_model(EngineConfig(model_path=folder, speculative="mtp"))
    other = write_safetensors(tiny_model("glm4_moe"), tmp_path / "other")
    stored = safetensors.torch.load_file(other / "model.safetensors")
    stored["mtp.0.markov_head.markov_w1.weight"] = torch.ones(8, 8)
    safetensors.torch.save_file(stored, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedError, match=r"a DSpark head, of which .* model's type is glm4_moe"):
        open_model(EngineConfig(model_path=other, speculative="mtp"))
