"""Embeddings: pooled from hidden states, the same in every chunk size, and those of plain transformers."""

from __future__ import annotations

import json
import logging
from contextlib import closing
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from ktransformers.config import EngineConfig
from ktransformers.core import EmbeddingForm, Pooling, SamplingParams
from ktransformers.engine.api.batch_loop import BatchLoop, EngineRequest
from ktransformers.engine.api.generate import prefill_and_generate
from ktransformers.engine.load.builder import build_engine
from ktransformers.engine.load.loaded import LoadedModel
from ktransformers.engine.load.reference import build_reference_engine
from ktransformers.engine.model.card import card_of
from ktransformers.engine.model.opened import open_model
from ktransformers.engine.step.hidden import HiddenStatesHook, Pooled, embedding_form
from ktransformers.errors import ConfigError, UnsupportedError
from ktransformers.models.heads import lacks_head
from ktransformers.scheduler.limits import Limits
from ktransformers.scheduler.records import Request
from tests.support.engines.one_sequence import static_engine
from tests.support.engines.sequential import Session
from tests.support.gguf.writer import write_gguf
from tests.support.models.demo import DEMO_GGUF
from tests.support.models.tiny_models import tiny_config, tiny_model, write_safetensors

ROWS = torch.arange(12, dtype=torch.float32).view(4, 3)
IDS = tuple(range(5, 35))


@pytest.mark.parametrize("cuts", [(4,), (1, 3), (2, 1, 1)])
def test_pooling(cuts: tuple[int, ...]) -> None:
    first, last, mean = [0.0, 1.0, 2.0], [9.0, 10.0, 11.0], [4.5, 5.5, 6.5]
    for pooling, expected in ((Pooling.FIRST, first), (Pooling.LAST, last), (Pooling.MEAN, mean)):
        pooled = Pooled(pooling)
        for part in ROWS.split(cuts):
            pooled.add(part)
        assert np.frombuffer(pooled.vector(), "<f4").tolist() == expected


@pytest.mark.parametrize(
    ("modes", "pooling"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}, Pooling.LAST),
        ({"pooling_mode_lasttoken": False, "pooling_mode_mean_tokens": True}, Pooling.MEAN),
        ({"pooling_mode_cls_token": True}, Pooling.FIRST),
        ({"pooling_mode_max_tokens": True}, None),
        ({"pooling_mode": "mean"}, Pooling.MEAN),
        ({"pooling_mode": "weightedmean"}, None),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True}, None),
        ({}, None),
    ],
)
def test_a_model_says_how_it_is_pooled(modes: dict[str, bool], pooling: Pooling | None, tmp_path: Path) -> None:
    assert embedding_form(None, None, tmp_path) == EmbeddingForm(Pooling.LAST, normalizes=True)
    (tmp_path / "1_Pooling").mkdir()
    file = tmp_path / "1_Pooling" / "config.json"
    file.write_text(json.dumps(modes))
    assert embedding_form(1, None, tmp_path) == EmbeddingForm(pooling)
    for wrong in ("[", "[]"):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match="cannot be read"):
            embedding_form(None, tmp_path)


_STEPS = "sentence_transformers.models."


@pytest.mark.parametrize(
    ("modules", "form"),
    [
        (["Transformer", "Pooling", "Normalize"], EmbeddingForm(Pooling.MEAN, normalizes=True)),
        (["Transformer", "Pooling"], EmbeddingForm(Pooling.MEAN, normalizes=False)),
        (["Transformer", "Pooling", "Dense", "Normalize"], EmbeddingForm(None)),
        (["Transformer"], EmbeddingForm(Pooling.LAST, normalizes=False)),
    ],
)
def test_modules_say_what_becomes_of_a_vector(modules: list[str], form: EmbeddingForm, tmp_path: Path) -> None:
    named = [{"idx": i, "path": f"{i}_{one}", "type": _STEPS + one} for i, one in enumerate(modules)]
    (tmp_path / "modules.json").write_text(json.dumps(named))
    if "Pooling" in modules:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    assert embedding_form(gguf.PoolingType.LAST, tmp_path) == form


@pytest.mark.parametrize(
    ("number", "pooling"),
    [(-1, Pooling.LAST), (0, None), (1, Pooling.MEAN), (2, Pooling.FIRST), (3, Pooling.LAST), (4, None), (9, None)],
)
def test_a_gguf_says_how_it_is_pooled(number: int, pooling: Pooling | None, tmp_path: Path) -> None:
    """llama.cpp's numbers: none, mean, cls, last, rank."""
    assert embedding_form(number, tmp_path / "model.gguf") == EmbeddingForm(pooling)
    with pytest.raises(ConfigError, match="pooling_type is 'mean', not a number"):
        embedding_form("mean")


def test_the_pooling_of_a_gguf_is_on_its_card(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(tiny_model("qwen3_moe"), path, pooling_type=gguf.PoolingType.MEAN)
    assert card_of(open_model(EngineConfig(gguf_path=path))).pooling_type == gguf.PoolingType.MEAN
    assert card_of(open_model(EngineConfig(gguf_path=DEMO_GGUF))).pooling_type is None


def test_a_model_without_a_decoder_of_its_own_makes_none() -> None:
    with pytest.raises(UnsupportedError, match="makes no embeddings"), HiddenStatesHook(nn.Linear(2, 2)).watch():
        pass


def _embedding(engine: LoadedModel, pooling: Pooling) -> np.ndarray:
    """Of IDS, asked for twice: the second time the prompt's whole pages are in the cache."""
    found, params = [], SamplingParams(temperature=0, max_tokens=2, pooling=pooling, seed=1)
    with closing(BatchLoop(lambda report: engine)) as loop:
        for _ in range(2):
            first, second = prefill_and_generate(loop, EngineRequest(Request(prompt_ids=IDS, params=params)))
            assert second.embedding is None
            assert first.embedding is not None
            found.append(first.embedding)
        page_size = loop.config.page_size
    assert len(IDS) > page_size
    assert first.stats.cached_len == ((len(IDS) - 1) // page_size * page_size if pooling is Pooling.LAST else 0)
    before, after = (np.frombuffer(one, "<f4") for one in found)
    assert np.allclose(before, after, rtol=1e-4, atol=1e-5)
    return before


@pytest.mark.every(3)
@pytest.mark.parametrize("pooling", list(Pooling))
def test_embeddings_are_those_of_transformers(pooling: Pooling) -> None:
    configs = [EngineConfig(gguf_path=DEMO_GGUF, cpu_infer=1, cache_lens=64, chunk_size=size) for size in (8, 64)]
    chunked, whole = (_embedding(build_engine(config), pooling) for config in configs)
    expected = _embedding(build_reference_engine(configs[0]), pooling)
    assert np.allclose(chunked, whole, rtol=1e-6, atol=1e-6)
    if pooling is Pooling.LAST:
        assert (chunked == whole).all()
    assert float(whole @ expected) > 0.999 * float(np.linalg.norm(whole) * np.linalg.norm(expected))


def test_a_pooling_is_named() -> None:
    with pytest.raises(ConfigError, match="pooling must be None or a Pooling, got 'mean'"):
        SamplingParams(pooling="mean")  # type: ignore[arg-type]


HEADLESS = [  # what the files call themselves, the names' prefix, family
    ("MistralModel", "", "mistral"),
    ("Qwen3Model", "", "qwen3"),
    ("Qwen3ForCausalLM", "model.", "qwen3"),
    ("LlamaModel", "model.", "llama"),
]


@pytest.mark.parametrize(("architecture", "prefix", "family"), HEADLESS)
def test_a_model_without_a_head_makes_embeddings_and_no_text(
    architecture: str, prefix: str, family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As embedding models are published: no lm_head, and embeddings that are not tied to one."""
    model = tiny_model(family, **({"sliding_window": None} if family == "mistral" else {}))
    headless(write_safetensors(model, tmp_path), architecture, prefix)
    with caplog.at_level(logging.WARNING):
        engine = static_engine(EngineConfig(model_path=tmp_path, cpu_infer=1, cache_lens=64))
    assert "hold no output head" in caplog.text
    session, ids = Session.of(engine), list(IDS)
    (event,) = session.generate(ids, SamplingParams(temperature=0, max_tokens=1, pooling=Pooling.MEAN))
    with torch.no_grad():
        wanted = model.model(torch.tensor([ids])).last_hidden_state[0].mean(0)
    assert event.embedding is not None
    assert np.allclose(np.frombuffer(event.embedding, "<f4"), wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(UnsupportedError, match=r"no output head \(lm_head\): it generates no text; ask it for embed"):
        list(session.generate(ids, SamplingParams(max_tokens=1)))


def headless(folder: Path, architecture: str, prefix: str) -> None:
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    kept = {name.replace("model.", prefix, 1): one for name, one in stored.items() if name != "lm_head.weight"}
    safetensors.torch.save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))


def test_a_server_refuses_text_of_such_a_model() -> None:
    """By the one check for every way in."""
    limits = Limits(max_len=8, vocab_size=8, is_models_limit=True, has_head=False)
    limits.check([1, 2], SamplingParams(pooling=Pooling.LAST, max_tokens=1))
    with pytest.raises(UnsupportedError, match="ask it for embeddings"):
        limits.check([1, 2], SamplingParams())


HEADS = [
    ({"model.embed_tokens.weight": (160, 64)}, True),
    ({"embed_tokens.weight": (160, 64), "layers.0.mlp.up_proj.weight": (96, 64)}, True),
    ({"model.embed_tokens.weight": (160, 64), "lm_head.weight": (160, 64)}, False),
    ({"model.embed_tokens.weight": (160, 64), "lm_head.weight_packed": (160, 8)}, False),
    ({"model.embed_tokens.weight": (160, 64), "lm_head.qweight": (8, 160)}, False),
    ({"transformer.wte.weight": (160, 64), "transformer.ff_out.weight": (160, 64)}, False),  # whatever it is called
    ({"token_embd.weight": (160, 64), "output.weight": (160, 64)}, False),
    ({"model.layers.0.mlp.up_proj.weight": (96, 64)}, False),  # no embeddings either: a file is missing
]


@pytest.mark.parametrize(("shapes", "lacks"), HEADS)
def test_what_is_no_head(shapes: dict[str, tuple[int, ...]], lacks: bool) -> None:
    assert lacks_head(tiny_config("llama"), shapes) is lacks
    assert not lacks_head(tiny_config("llama", tie_word_embeddings=True), shapes)
