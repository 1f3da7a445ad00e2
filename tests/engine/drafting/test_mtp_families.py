"""Layers for multi-token prediction of further families draft what their reference implementations would, see
tests/support/models/mtp_families.py."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ktransformers.core import SamplingParams
from ktransformers.errors import UnsupportedError
from ktransformers.scheduler.drafting.planner import DraftPlanner
from tests.support.engines.drafter_steps import draft_in_every_step, equal_steps
from tests.support.engines.mtp_engines import Watched, check_drafts, check_engine, engine_of, loop_of
from tests.support.models.latent_models import LATENT_TYPES, latent_model
from tests.support.models.mtp_families import FAMILIES, GGUF_FAMILIES, tiny_family, write_family, write_family_gguf
from tests.support.models.tiny_models import tiny_model, write_safetensors


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens are drafted in each step, however few are right."""
    draft_in_every_step(monkeypatch)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_drafts_are_those_of_the_reference(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tiny_family(model_type)
    with engine_of(write_family(tiny, tmp_path)) as engine:
        check_engine(engine, tiny, monkeypatch, num_tokens=12)


@pytest.mark.parametrize("model_type", GGUF_FAMILIES)
def test_drafts_are_those_of_the_reference_from_a_gguf(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = tiny_family(model_type)
    with engine_of(write_family_gguf(tiny, tmp_path / "tiny.gguf")) as engine:
        check_engine(engine, tiny, monkeypatch, num_tokens=12)


def test_a_text_model_without_its_composite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Step 3.5 is published: the text model's config alone, layers for multi-token prediction at the end of its
    lists, and tensors in the names of the composite's checkpoints."""
    tiny = tiny_family("step3p7")
    config_file, weights = write_family(tiny, tmp_path) / "config.json", tmp_path / "model.safetensors"
    text = json.loads(config_file.read_text())["text_config"]
    text["layer_types"] += text.pop("mtp_layer_types")
    del text["mlp_layer_types"], text["mtp_mlp_layer_types"]
    config_file.write_text(json.dumps(text | {"architectures": ["Step3p5ForCausalLM"], "moe_layers_enum": "1"}))
    stored = safetensors.torch.load_file(weights)
    of_text = {name: tensor for name, tensor in stored.items() if not name.startswith("vi")}
    assert any(".moe.gate_proj." in name for name in of_text)
    safetensors.torch.save_file(of_text, weights, {"format": "pt"})
    with engine_of(tmp_path) as engine:
        check_engine(engine, tiny, monkeypatch, num_tokens=12)


def test_several_layers_draft_a_token_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the last of them all that are behind. Most steps want one token, so that the others wait for long."""
    tiny, steps = tiny_family("mimo_v2_flash"), itertools.count()

    def counts(
        self: DraftPlanner, chances: Sequence[tuple[float, ...]], costly: Sequence[bool]
    ) -> tuple[list[int], float]:
        most = 1 if next(steps) % 45 else 5
        return [min(len(one), most) * self._costs.knows(len(chances)) for one in chances], 1.0

    equal_steps(monkeypatch)
    monkeypatch.setattr(DraftPlanner, "_counts", counts)
    with engine_of(write_family(tiny, tmp_path), speculative_tokens=5) as engine:
        watched, loop = Watched(engine, monkeypatch), loop_of(engine)
        prompts = [[*range(3, 30)], [*range(40, 100)], [7]]
        params = SamplingParams(max_tokens=110, temperature=0.0, ignore_eos=True)
        names = [loop.add(prompt, params) for prompt in prompts]
        loop.drain()
        answers = [[*prompt, *loop.answers[name].token_ids] for prompt, name in zip(prompts, names, strict=True)]
        known = dict(zip(sorted({run for run, *_ in watched.by_run}), answers, strict=True))
        deep = [(run, at, drafts) for run, at, drafts in watched.by_run if len(drafts) == 5]
        assert len(deep) > 5
        assert sum(check_drafts(tiny, known[run], at, drafts) for run, at, drafts in deep) > 4 * len(deep)


def test_steps_of_few_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts do not depend on how many entries a step has room for."""
    tiny = tiny_family("mimo_v2_flash")
    with engine_of(write_family(tiny, tmp_path), chunk_size=4, speculative_tokens=4) as engine:
        check_engine(engine, tiny, monkeypatch, num_tokens=15)


def test_no_more_layers_than_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_family(tiny_family("mimo_v2_flash"), tmp_path)
    with caplog.at_level("INFO"), engine_of(folder, speculative_tokens=2):
        assert "2 layers for multi-token prediction make a draft token each" in caplog.text


_PARTS = {"eh_proj.weight": (64, 128), "enorm.weight": (64,), "hnorm.weight": (64,), "mlp.up_proj.weight": (96, 64)}
REFUSED = {
    "built otherwise": ("longcat_flash", "model.mtp.layers.0.", "hold one that is not run: it has one attention"),
    "joined otherwise": ("glm4_moe", "mtp.0.e_", "hold none, or one of a kind that is not known here"),
    "lacking tensors": ("glm4_moe", "mtp.layers.0.", "is of a kind that is not known here: .* tensors are missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_layers_of_other_kinds_are_refused(case: str, tmp_path: Path) -> None:
    model_type, prefix, match = REFUSED[case]
    model = latent_model(model_type) if model_type in LATENT_TYPES else tiny_model(model_type)
    folder = write_safetensors(model, tmp_path)
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    stored |= {f"{prefix}{name}": torch.ones(*shape) for name, shape in _PARTS.items()}
    safetensors.torch.save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedError, match=f"(?s){match}.*--draft_model"), engine_of(folder):
        pass
