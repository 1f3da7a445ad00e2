"""Steps without the model's own code around its layers: which models have them, and that logits are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from ktransformers.config import EngineConfig
from ktransformers.engine.step.fused_decode import find_fused_decode
from ktransformers.operators.attention.rope import KRotaryEmbedding
from ktransformers.operators.layers.native_stack import NativeStack
from tests.support.engines.one_sequence import static_engine
from tests.support.engines.runners import random_ids, stacked_runner
from tests.support.models.agreement import TOLERANCE
from tests.support.models.tiny_models import random_model, tiny_config, tiny_model, write_safetensors


def check(model: PreTrainedModel, folder: Path, is_short: bool) -> None:
    write_safetensors(model, folder)
    engine = static_engine(EngineConfig(model_path=folder, cache_lens=96, cpu_infer=2))
    try:
        forward = engine.runner.steps._pass
        assert (forward.short is not None) == is_short
        ids = random_ids(model.config.vocab_size, 83)
        sizes = (3, 1, 70, 1, 8)

        def run() -> torch.Tensor:
            parts, start = [], 0
            for size in sizes:
                keep = range(size) if size < 8 else (0, size - 1)
                parts.append(engine.runner.forward(ids[start : start + size], start, keep).clone())
                start += size
            return torch.cat(parts)

        got, forward.short = run(), None
        assert torch.equal(got, run())
        with torch.no_grad():
            want = model(torch.tensor([ids])).logits[0][[0, 1, 2, 3, 4, 73, 74, 75, 82]]
        assert (got - want).abs().max() <= TOLERANCE * want.abs().max()
    finally:
        engine.close()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mixtral"])
def test_the_usual_model_has_one(family: str, tmp_path: Path) -> None:
    check(tiny_model(family), tmp_path, is_short=True)


def test_a_model_that_does_more_keeps_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """Its layers and all else are the usual ones, but what its head gives is divided."""
    caplog.set_level("DEBUG", "ktransformers.engine.step.fused_decode")
    runner = stacked_runner(tiny_model("llama"))
    shapes = list(runner.cache.shapes)
    assert find_fused_decode(runner.model, shapes, runner.pool, 64) is not None
    kind = type(runner.model)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = kind.forward(self, *args, **kwargs)
        output.logits = output.logits / 2
        return output

    runner.model.__class__ = type("Divided", (kind,), {"forward": forward})
    assert find_fused_decode(runner.model, shapes, runner.pool, 64) is None
    assert "which computes something else" in caplog.text


@pytest.mark.parametrize(("family", "changes"), [("granite", {"logits_scaling": 4.0}), ("cohere", {})])
def test_families_that_differ_keep_theirs(family: str, changes: dict[str, float], tmp_path: Path) -> None:
    """Logits are divided; layers compute attention and feed-forward side by side."""
    check(random_model(tiny_config(family, **changes), seed=1), tmp_path, is_short=False)


def test_whoever_looks_at_the_model_sees_it(tmp_path: Path) -> None:
    """Embeddings are made of what the decoder returns: the decoder runs while somebody waits for it."""
    model = tiny_model("qwen3_moe")
    write_safetensors(model, tmp_path)
    engine = static_engine(EngineConfig(model_path=tmp_path, cache_lens=32, cpu_infer=1))
    try:
        ids = random_ids(model.config.vocab_size, 6)
        with engine.runner.hook.watch() as seen:
            engine.runner.forward(ids, 0, [5])
        with torch.no_grad():
            want = model.model(torch.tensor([ids])).last_hidden_state[0]
        assert len(seen) == 1
        assert (seen[0] - want).abs().max() <= TOLERANCE * want.abs().max()
        assert engine.runner.steps._pass.short is not None
        assert engine.runner.steps._pass.short.is_wanted
    finally:
        engine.close()


@pytest.mark.parametrize("is_short", [True, False])
def test_python_is_left_to_others_before_the_layers(
    is_short: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each time that somebody wants to know, and behind what is done in Python before them."""
    write_safetensors(tiny_model("qwen3_moe"), tmp_path)
    engine = static_engine(EngineConfig(model_path=tmp_path, cache_lens=32, cpu_infer=1))
    said = list[str]()
    try:
        steps = engine.runner.steps
        if not is_short:
            steps._pass.short = None
        for kind, name in ((NativeStack, "layers"), (KRotaryEmbedding, "angles")):
            forward = kind.forward
            monkeypatch.setattr(kind, "forward", _telling(said, name, forward))
        steps.meanwhile = lambda: said.append("meanwhile")
        engine.runner.forward([3], 0, [0])
        first = ["angles", "meanwhile", "layers"] if is_short else ["meanwhile", "angles", "layers"]
        assert said == first
        engine.runner.forward([4], 1, [0])
        assert said == [*first, "angles", "layers"]
    finally:
        engine.close()


def _telling(said: list[str], name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    def told(*args: Any, **kwargs: Any) -> Any:
        said.append(name)
        return forward(*args, **kwargs)

    return told
