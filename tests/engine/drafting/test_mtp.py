"""A model's own layer for multi-token prediction drafts what transformers' module of it says, and changes no answer."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.load.builder import build_engine, plan_model
from ktransformers.engine.model.opened import config_of_model
from ktransformers.errors import ConfigError, FormatError, UnsupportedError
from ktransformers.models.mtp_config import mtp_layer_types
from ktransformers.operators.layers.native_stack import NativeStack
from ktransformers.operators.layers.traced import layer_list
from ktransformers.weights.gguf.file import GGUFModel, open_gguf
from tests.support.engines.drafter_steps import draft_in_every_step, runner_of
from tests.support.engines.fake_gpus import FakeGraphs, fake_hardware
from tests.support.engines.mtp_engines import Watched, check_drafts, check_engine, engine_of, loop_of
from tests.support.engines.paged_loop import PagedLoop
from tests.support.models.mtp_models import GGUF_MTP_TYPES, MTP_TYPES, tiny_mtp, write_mtp, write_mtp_gguf
from tests.support.models.tiny_models import NUM_EXPERTS, VOCAB_SIZE, tiny_model, write_safetensors

PARAMS: list[dict[str, object]] = [
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.9, "top_p": 0.9, "seed": 5},
    {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2, "seed": 6},
    {"temperature": 0.8, "seed": 8, "logit_bias": {3: 4.0, 9: -5.0}, "prompt_logprobs": 1},
]


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens are drafted in each step, however few are right."""
    draft_in_every_step(monkeypatch)


def answers_of(loop: PagedLoop) -> list[tuple[object, ...]]:
    rng = random.Random(1)
    for one in PARAMS:
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(5, 90))]
        loop.add(prompt, SamplingParams(max_tokens=40, ignore_eos=True, **one))  # type: ignore[arg-type]
    loop.drain()
    return [(one.token_ids, one.logprobs, one.prompt_logprobs, one.reason) for one in loop.answers.values()]


@pytest.mark.parametrize("model_type", MTP_TYPES)
def test_drafts_are_those_of_transformers(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tiny_mtp(model_type)
    with engine_of(write_mtp(tiny, tmp_path)) as engine:
        check_engine(engine, tiny, monkeypatch)


@pytest.mark.parametrize("model_type", GGUF_MTP_TYPES)
def test_drafts_are_those_of_transformers_from_a_gguf(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = tiny_mtp(model_type)
    with engine_of(write_mtp_gguf(tiny, tmp_path / "tiny.gguf")) as engine:
        check_engine(engine, tiny, monkeypatch)


def test_a_gguf_that_counts_it_among_the_models_own_layers_is_refused(tmp_path: Path) -> None:
    """Which would run it as its last one, and answer wrongly."""
    opened = open_gguf(write_mtp_gguf(tiny_mtp("glm4_moe"), tmp_path / "tiny.gguf"))
    (file,) = opened.files
    key = "glm4moe.nextn_predict_layers"
    assert file.metadata[key] == 1
    for metadata in ({**file.metadata, key: 0}, {k: v for k, v in file.metadata.items() if k != key}):
        with pytest.raises(FormatError, match=r"blk\.2\.nextn\..* one of the model's own 3; .* is wrong or missing"):
            config_of_model(GGUFModel([replace(file, metadata=metadata)]))


def test_drafts_of_a_layer_without_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model with experts, as the bundled one is."""
    tiny = tiny_mtp("qwen3_moe", is_dense=True)
    with engine_of(write_mtp(tiny, tmp_path)) as engine:
        check_engine(engine, tiny, monkeypatch)


@pytest.mark.parametrize("model_type", MTP_TYPES)
def test_drafting_changes_no_answer(model_type: str, tmp_path: Path) -> None:
    folder = write_mtp(tiny_mtp(model_type), tmp_path)
    with engine_of(folder, speculative="off") as engine:
        plain = answers_of(loop_of(engine))
    with engine_of(folder) as engine:
        loop = loop_of(engine)
        assert answers_of(loop) == plain
        assert loop.scheduler.stats().num_drafted > 100
        engine.executor.reset()
        again = loop_of(engine, num_pages=8)  # too few for all of them
        assert answers_of(again) == plain


@pytest.mark.parametrize("model_type", MTP_TYPES)
def test_the_layer_runs_in_one_native_call(model_type: str, tmp_path: Path) -> None:
    """Without the model's own code around it, as the model's layers do, with the model's own head."""
    with engine_of(write_mtp(tiny_mtp(model_type), tmp_path)) as engine:
        forward = runner_of(engine)._pass
        (layer,) = layer_list(forward.model) or ()
        assert isinstance(layer, NativeStack)
        assert forward.short is not None
        assert forward.short.head is engine.executor.runner._pass.model.lm_head  # type: ignore[attr-defined]


def test_the_layer_is_in_the_plan(tmp_path: Path) -> None:
    folder = write_mtp(tiny_mtp("deepseek_v3"), tmp_path)
    config = EngineConfig(model_path=folder, cpu_infer=1, cache_lens=1024, speculative="mtp")
    nbytes = plan_model(config).extra_bytes["draft model"]["cpu"]
    hidden, position = 64, plan_model(config).extra_bytes["kv cache"]["cpu"] // 2  # of two layers
    assert nbytes > position + 4 * 2 * hidden * hidden


def test_a_model_without_one_is_refused(tmp_path: Path) -> None:
    folder = write_safetensors(tiny_model("glm4_moe"), tmp_path)
    with pytest.raises(UnsupportedError, match=r"--speculative mtp: .*\(glm4_moe\) hold none, or one of a kind"):
        build_engine(EngineConfig(model_path=folder, cpu_infer=1, speculative="mtp"))


@pytest.mark.parametrize("name", ["mtp_layer_types", "mtp_layers_block_type"])
@pytest.mark.parametrize("value", [3, "full_attention", [1], {"a": 1}])
def test_a_config_that_names_no_kinds_of_layers_is_refused(name: str, value: object) -> None:
    config = tiny_model("glm4_moe").config
    setattr(config, name, value)
    with pytest.raises(ConfigError, match=f"config says {name} .*; a list of names is needed"):
        mtp_layer_types(config)


def test_transformers_opens_a_model_with_one(tmp_path: Path) -> None:
    """As the same model as without, though its class of Qwen3-MoE knows no such tensors."""
    tiny = tiny_mtp("qwen3_moe")
    got = AutoModelForCausalLM.from_pretrained(write_mtp(tiny, tmp_path), dtype=torch.float32)
    wanted = tiny.main.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in got.state_dict().items())


def test_hidden_states_are_the_same_by_each_way_of_running_a_step(tmp_path: Path) -> None:
    """The short forward and the model's own give a drafter the same rows, and no other logits."""
    tiny = tiny_mtp("glm4_moe")
    with engine_of(write_mtp(tiny, tmp_path)) as engine:
        forward = engine.executor.runner._pass  # type: ignore[attr-defined]
        assert forward.last_hidden is not None
        loop, found = loop_of(engine), list[torch.Tensor]()
        short = forward.short
        assert short is not None
        for one in (short, None):
            forward.short = one
            engine.executor.reset()
            loop = loop_of(engine)
            loop.add(range(3, 43), SamplingParams(max_tokens=1, temperature=0.0))
            loop.drain()
            found.append(forward.last_hidden.rows(0, 40))
    assert torch.equal(found[0], found[1])
    with torch.no_grad():
        want = tiny.main.model(torch.arange(3, 43)[None]).last_hidden_state[0]  # type: ignore[operator]
    assert torch.allclose(found[0], want, atol=1e-3)


def test_hidden_states_come_from_a_gpu_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From steps that are replayed, with draft tokens and without, and from those that are not."""
    tiny, graphs = tiny_mtp("glm4_moe"), FakeGraphs()
    hardware = fake_hardware(graphs=graphs, graph_rows=(4,))
    with engine_of(write_mtp(tiny, tmp_path), hardware=hardware, max_batch_size=2) as engine:
        assert engine.uses_gpus
        watched, prompt = Watched(engine, monkeypatch), list(range(3, 30))
        loop = loop_of(engine, max_batch_size=2)
        name = loop.add(prompt, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
        loop.drain()
        known = [*prompt, *loop.answers[name].token_ids]
        assert sum(check_drafts(tiny, known, *seen) for seen in watched.seen) > 6
    assert graphs.replays > 2 or torch.cuda.is_available()


def test_from_a_model_for_images_whose_experts_are_in_one_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Qwen3.5's checkpoints are: the language model below another name, the layer beside it."""
    tiny = tiny_mtp("qwen3_5_moe_text")
    folder = write_mtp(tiny, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    whole = {
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": config,
    }
    (folder / "config.json").write_text(json.dumps(whole))
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    renamed = {re.sub(r"^model\.", "model.language_model.", name): tensor for name, tensor in stored.items()}
    experts = "mtp.layers.0.mlp.experts"
    by_part = {
        part: torch.stack([renamed.pop(f"{experts}.{i}.{part}.weight") for i in range(NUM_EXPERTS)])
        for part in ("gate_proj", "up_proj", "down_proj")
    }
    renamed[f"{experts}.gate_up_proj"] = torch.cat([by_part["gate_proj"], by_part["up_proj"]], dim=1)
    renamed[f"{experts}.down_proj"] = by_part["down_proj"]
    safetensors.torch.save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    with engine_of(folder) as engine:
        check_engine(engine, tiny, monkeypatch)
