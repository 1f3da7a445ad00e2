"""The bundled model through every path: exact whatever splits the work, and equal to `transformers`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.api.llm import LLM
from ktransformers.engine.load.builder import build_engine
from ktransformers.kernels.cpu import available_isas
from tests.support.models.demo import DEMO_CHECKPOINT, DEMO_EYES, DEMO_GGUF, demo_with_eyes

GREEDY = SamplingParams(temperature=0, max_tokens=48)
QUESTIONS = [
    "What is 17 + 25?",
    "Sort these numbers: 9, 3, 27, 14.",
    "What is ktransformers?",
    "你好，你是谁？",
    "Reverse the word: kernel",
]


def open_llm(path: Path, *, threads: int = 2, chunk_size: int = 512) -> LLM:
    key = "gguf_path" if path.suffix == ".gguf" else "model_path"
    config = EngineConfig(**{key: path}, cpu_infer=threads, chunk_size=chunk_size, cache_lens=512)  # type: ignore[arg-type]
    return LLM.from_engine(build_engine(config))


def answers(llm: LLM) -> list[tuple[int, ...]]:
    try:
        return [llm.chat([{"role": "user", "content": q}], GREEDY)[0].token_ids for q in QUESTIONS]
    finally:
        llm.close()


@pytest.fixture(scope="module")
def reference() -> list[tuple[int, ...]]:
    return answers(open_llm(DEMO_GGUF))


def test_the_first_question() -> None:
    with open_llm(DEMO_GGUF) as llm:
        assert "42" in llm.chat([{"role": "user", "content": QUESTIONS[0]}], GREEDY)[0].text


@pytest.mark.every(3)
@pytest.mark.parametrize("chunk_size", [1, 7, 64])
def test_chunks_do_not_change_tokens(chunk_size: int, reference: list[tuple[int, ...]]) -> None:
    assert answers(open_llm(DEMO_GGUF, chunk_size=chunk_size)) == reference


@pytest.mark.exhaustive
def test_threads_do_not_change_tokens(reference: list[tuple[int, ...]]) -> None:
    assert answers(open_llm(DEMO_GGUF, threads=1)) == reference


@pytest.mark.every(3)
@pytest.mark.parametrize("isa", [isa.value for isa in available_isas()])
def test_instruction_sets_do_not_change_tokens(
    isa: str, reference: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KTRANSFORMERS_ISA", isa)
    assert answers(open_llm(DEMO_GGUF)) == reference


def test_tokens_equal_transformers_on_the_bf16_model() -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO_CHECKPOINT, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.temperature = model.generation_config.top_p = model.generation_config.top_k = None
    with open_llm(DEMO_CHECKPOINT) as llm:
        for question in QUESTIONS:
            ours = llm.chat([{"role": "user", "content": question}], GREEDY)[0]
            prompt = torch.tensor([ours.prompt_token_ids])
            theirs = model.generate(prompt, max_new_tokens=GREEDY.max_tokens, do_sample=False)
            assert theirs[0, prompt.shape[1] :].tolist() == list(ours.token_ids), question


@pytest.mark.parametrize("path", ["gguf", "safetensors"])
def test_a_tower_changes_no_answer_to_text(path: str, tmp_path: Path, reference: list[tuple[int, ...]]) -> None:
    """The composite's config, its tokenizer and its template, with the GGUF's weights and with the checkpoint's."""
    if path == "gguf":
        config = EngineConfig(model_path=DEMO_EYES, gguf_path=DEMO_GGUF, cpu_infer=1, cache_lens=512)
        want = reference
    else:
        demo_with_eyes(tmp_path)
        config = EngineConfig(model_path=tmp_path, cpu_infer=1, cache_lens=512)
        want = answers(open_llm(DEMO_CHECKPOINT))
    assert answers(LLM.from_engine(build_engine(config))) == want
