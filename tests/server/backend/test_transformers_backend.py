"""The reference backend: transformers' own modules and cache, compared with transformers' own generate."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import openai
import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.api.batch_loop import BatchLoop, EngineRequest
from ktransformers.engine.api.generate import prefill_and_generate
from ktransformers.engine.api.llm import LLM
from ktransformers.engine.load.reference import ReferenceRunner, build_reference_engine
from ktransformers.engine.step.context import ForwardBatch
from ktransformers.errors import UnsupportedError
from ktransformers.operators.context import ForwardContext
from ktransformers.scheduler.records import Request
from ktransformers.system.shipped_rules import shipped_path
from tests.support.engines.one_sequence import static_engine
from tests.support.gguf.writer import write_gguf
from tests.support.models.demo import DEMO_CHECKPOINT, DEMO_GGUF
from tests.support.models.tiny_models import tiny_model
from tests.support.servers.server_process import ServerProcess

QUESTIONS = ("What is 17 + 25?", "Count from 1 to 12.", "What is the capital of France?")


def forward(runner: ReferenceRunner, ids: Sequence[int], prefix: Sequence[int] = ()) -> torch.Tensor:
    """The logits of the last of `ids`, which stand behind a prefix."""
    runner.prefix, context = list(prefix), Mock(spec=ForwardContext)
    positions = torch.arange(len(prefix), len(prefix) + len(ids))
    return runner.reduced_step(ForwardBatch(torch.tensor(ids), positions, context, torch.tensor([len(ids) - 1])), None)


def test_answers_are_those_of_generate() -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO_CHECKPOINT, dtype=torch.float32)
    model.generation_config.temperature = model.generation_config.top_p = model.generation_config.top_k = None
    config = EngineConfig(model_path=DEMO_CHECKPOINT, cpu_infer=1)
    loop = BatchLoop(lambda report: build_reference_engine(config, report))
    for question in QUESTIONS:
        ids = loop.engine.model.tokenizer.apply_chat_template([{"role": "user", "content": question}])
        params = SamplingParams(temperature=0, max_tokens=40, seed=1)
        events = list(prefill_and_generate(loop, EngineRequest(Request(prompt_ids=ids, params=params))))
        wanted = model.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False)[0, len(ids) :].tolist()
        assert [event.token_id for event in events] == wanted
        again = list(prefill_and_generate(loop, EngineRequest(Request(prompt_ids=[*ids, *wanted], params=params))))
        assert again[-1].stats.cached_len >= len(ids) // 16 * 16  # what they share was not computed again
    loop.close()


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss", "mixtral"])
def test_a_gguf_file_becomes_the_same_model(model_type: str, tmp_path: Path) -> None:
    """F32 tensors carry over bit by bit, so the logits are equal; gpt_oss has sliding windows and expert biases."""
    model = tiny_model(model_type, seed=2)
    engine = build_reference_engine(EngineConfig(gguf_path=write_gguf(model, tmp_path / "m.gguf"), cpu_infer=1))
    ids = torch.randint(0, model.config.vocab_size, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0]
    got = engine.logits(ids)
    # Attention by SDPA instead of the eager oracle: other sums of the same fp32 numbers.
    assert (got - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    again = forward(engine.runner, ids[7:], ids[:7])  # rewinds, through the sliding window's memory too
    assert (again[0] - wanted[-1]).abs().max() <= 1e-4 * wanted.abs().max()


def test_our_logits_on_the_quantized_file_are_near() -> None:
    """Both dequantize the same blocks; our kernels round activations to int8 besides.

    That is a step of relative size 1/127/sqrt(12) = 0.2 % per product, which the residual stream of a few layers raises
    to about 2 % of the logits' norm. Where two experts nearly tie, a row may take the other one and differ by more.
    """
    config = EngineConfig(gguf_path=DEMO_GGUF, cpu_infer=1)
    engine, own = build_reference_engine(config), static_engine(config)
    errors = []
    for question in QUESTIONS:
        ids = engine.model.tokenizer.apply_chat_template([{"role": "user", "content": question}])
        theirs = engine.logits(ids)
        ours = own.runner.forward(ids, 0, range(len(ids)))
        errors += ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).tolist()
    own.close()
    assert statistics.median(errors) <= 3e-2
    assert sum(error > 1e-1 for error in errors) <= len(errors) // 10


def test_a_step_that_failed_leaves_no_trace() -> None:
    model: Any = tiny_model("llama")
    wanted = forward(ReferenceRunner(model), [1, 2, 3, 4, 5])
    runner = ReferenceRunner(model)
    forward(runner, [1, 2, 3])

    def fail(*args: Any) -> None:
        raise RuntimeError("out of memory")

    hook = model.model.layers[1].register_forward_pre_hook(fail)  # layer 0 has taken the tokens in by then
    with pytest.raises(RuntimeError):
        forward(runner, [9, 9], [1, 2, 3])
    hook.remove()
    assert (forward(runner, [4, 5], [1, 2, 3]) - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def test_a_prefix_that_it_does_not_hold_is_computed_first() -> None:
    model: Any = tiny_model("llama")
    wanted = forward(ReferenceRunner(model), [1, 2, 3, 4, 5])
    runner = ReferenceRunner(model)
    forward(runner, [1, 7, 7, 7])
    assert (forward(runner, [5], [1, 2, 3, 4]) - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def test_flags_that_it_cannot_honour_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="--cpu_quant"):
        build_reference_engine(EngineConfig(model_path=DEMO_CHECKPOINT, cpu_quant="q4_k"))
    with pytest.raises(UnsupportedError, match="--cpu_prefill"):
        build_reference_engine(EngineConfig(model_path=DEMO_CHECKPOINT, cpu_prefill="bf16"))
    with pytest.raises(UnsupportedError, match="--pipeline has no meaning here"):
        build_reference_engine(EngineConfig(model_path=DEMO_CHECKPOINT, pipeline=2))


def test_rules_have_no_effect_on_it(caplog: pytest.LogCaptureFixture) -> None:
    """As other flags that it has no use for: a script that names them all for every backend starts."""
    rules = shipped_path("Qwen3Moe-serve.yaml")
    build_reference_engine(EngineConfig(model_path=DEMO_CHECKPOINT, optimize_config_path=rules, cache_lens=64))
    assert caplog.text.count("--optimize_config_path has no effect") == 1


@pytest.mark.exhaustive
def test_both_backends_give_the_same_greedy_answers_over_http(llm: LLM) -> None:
    """The bundled model is sure of these answers: int8 activations do not change its choice."""
    with (
        ServerProcess("--backend_type", "transformers", "--gguf_path", str(DEMO_GGUF)) as process,
        openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0) as client,
    ):
        for question in QUESTIONS:
            messages: list[Any] = [{"role": "user", "content": question}]
            (ours,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=40))
            answer = client.chat.completions.create(
                model="demo-Q4_K_M", messages=messages, max_tokens=40, temperature=0
            )
            assert answer.choices[0].message.content == ours.text
        assert process.terminate() == 0


def test_readers_are_woken_before_the_model_computes() -> None:
    """Or each token would come to them when the next one is computed, and so would how far a prompt is."""
    config, said = EngineConfig(model_path=DEMO_CHECKPOINT, cpu_infer=1), list[str]()
    engine = build_reference_engine(config)
    try:
        engine.runner.meanwhile = lambda: said.append("meanwhile")
        handle = engine.runner._model.register_forward_pre_hook(lambda *_: said.append("model"))
        forward(engine.runner, [5, 6, 7])
        forward(engine.runner, [8], [5, 6, 7])
        handle.remove()
        assert said == ["meanwhile", "model", "model"]
    finally:
        engine.close()
