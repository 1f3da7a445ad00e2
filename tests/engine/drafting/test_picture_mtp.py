"""Layers for multi-token prediction see pictures as the model does: their features, at their rotary positions."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.load.builder import build_engine
from ktransformers.engine.media.features import PictureFeatures
from ktransformers.media.records import is_media_id
from tests.support.engines.drafter_steps import draft_in_every_step
from tests.support.engines.fake_gpus import FakeGraphs, fake_hardware
from tests.support.engines.mtp_engines import Watched, check_drafts, engine_of, loop_of
from tests.support.engines.picture_engines import IMAGE_TOKEN, ComposedPictures, Prompt
from tests.support.models.mtp_families import PlainMtp, tiny_family, write_family
from tests.support.models.tiny_models import tiny_model, write_safetensors
from tests.support.pictures.towers import tiny_with_tower

FAMILIES = ("qwen3_5_moe", "exaone4_5", "step3p7")
"""With positions of three axes; with windows; with a layer for each draft token."""

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens are drafted in each step, however few are right."""
    draft_in_every_step(monkeypatch)


@dataclass
class PictureMtp(PlainMtp):
    """The oracle behind a prompt with pictures: transformers' composite, and layers that get features and positions as
    vLLM gives them, whose drafts look a token ahead of the positions of the target's hidden states."""

    pictures: ComposedPictures
    prompt: Prompt

    @override
    def run_main(self, token_ids: list[int]) -> None:
        self.pictures.logits(self.prompt, token_ids[len(self.prompt.ids) :])

    @override
    def embedded(self, token_ids: list[int], start: int) -> torch.Tensor:
        found = super().embedded(token_ids, start).clone()
        rows = {}
        for item in self.prompt.media:
            shown = [at for at in range(item.start, item.end) if is_media_id(self.prompt.ids[at])]
            rows |= dict(zip(shown, self.pictures.pictures[item.digest].features.hidden, strict=True))
        for at, row in rows.items():
            if 0 <= at - start < len(token_ids):
                found[0, at - start] = row
        return found

    @override
    def positions(self, count: int) -> torch.Tensor | None:
        axes = self.pictures.positions(self.prompt.ids, self.prompt.media)
        if axes is None:
            return None
        more = axes.max() + 1 + torch.arange(max(count - axes.shape[1], 0))
        return torch.cat([axes, more.expand(3, -1)], dim=1)[:, None, :count]


def written(name: str, folder: Path) -> PlainMtp:
    tiny = tiny_family(name)
    config: Any = tiny.main.config
    config.image_token_id = IMAGE_TOKEN
    write_family(tiny, folder)
    return tiny


def two_pictures(pictures: ComposedPictures) -> Prompt:
    first, second = pictures.picture("first", 4, 5), pictures.picture("second", 3, 2)
    return pictures.prompt([5, 9, 17], first, [*range(20, 60)], second, [70, 71])


def known_of(prompt: Prompt, answer: list[int]) -> list[int]:
    return [*prompt.plain_ids, *answer]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("chunk", [64, 7])
def test_drafts_behind_pictures(name: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 7 end within them."""
    tiny = written(name, tmp_path)
    with engine_of(tmp_path) as engine:
        pictures = ComposedPictures.of(tiny.main)
        engine.executor.pictures = pictures
        prompt, watched = two_pictures(pictures), Watched(engine, monkeypatch)
        oracle = PictureMtp(tiny.family, tiny.main, tiny.layers, pictures, prompt)
        loop = loop_of(engine, chunk_size=chunk)
        answer = loop.add(prompt.ids, GREEDY, media=prompt.media)
        loop.drain()
        known = known_of(prompt, loop.answers[answer].token_ids)
        assert sum(check_drafts(oracle, known, *seen) for seen in watched.seen) > 12


@pytest.mark.slow
def test_drafts_on_a_gpu_and_behind_a_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that show pictures are not replayed, those behind them are, at shifted positions."""
    tiny, graphs = written("exaone4_5", tmp_path), FakeGraphs()
    with engine_of(tmp_path, hardware=fake_hardware(graphs=graphs, graph_rows=(4,)), max_batch_size=2) as engine:
        assert engine.uses_gpus
        pictures = ComposedPictures.of(tiny.main)
        engine.executor.pictures = pictures
        prompt, watched, loop = two_pictures(pictures), Watched(engine, monkeypatch), loop_of(engine, max_batch_size=2)
        for further in ([], [80, 81, 82]):
            prompt = Prompt([*prompt.ids, *further], prompt.media)
            watched.seen.clear()
            oracle = PictureMtp(tiny.family, tiny.main, tiny.layers, pictures, prompt)
            name = loop.add(prompt.ids, GREEDY, media=prompt.media)
            loop.drain()
            answer = loop.answers[name]
            known = known_of(prompt, answer.token_ids)
            assert sum(check_drafts(oracle, known, *seen) for seen in watched.seen) > 6
            prompt = Prompt([*prompt.ids, *answer.token_ids], prompt.media)
        assert answer.last is not None
        assert answer.last.cached_len > 32
    assert graphs.replays > 2 or torch.cuda.is_available()


def test_a_picture_that_is_gone_spoils_drafts_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Forgetful(ComposedPictures):
        """Has each picture once."""

        @override
        def features(self, digest: bytes) -> PictureFeatures:
            if digest in self.asked:
                self.broken.add(digest)
            return super().features(digest)

    tiny, answers = written("qwen3_5_moe", tmp_path), []
    with engine_of(tmp_path) as engine:
        for kind in (ComposedPictures, Forgetful):
            pictures = engine.executor.pictures = kind.of(tiny.main)
            prompt = two_pictures(pictures)
            engine.executor.reset()
            loop = loop_of(engine)
            name = loop.add(prompt.ids, GREEDY, media=prompt.media, cache_salt=kind.__name__)
            loop.drain()
            answers.append(loop.answers[name].token_ids)
    assert answers[0] == answers[1]
    assert caplog.text.count("draft tokens come without a picture: a picture of the prompt cannot be used: ") == 1


@pytest.mark.parametrize("is_seeing", [True, False])
def test_a_draft_model_sees_none_and_says_so(is_seeing: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_with_tower("qwen3_vl", seed=1)
    model.save_pretrained(tmp_path / "target")
    draft = write_safetensors(tiny_model("qwen3", vocab_size=model.config.text_config.vocab_size), tmp_path / "draft")
    config = EngineConfig(
        model_path=tmp_path / "target",
        draft_model=draft,
        speculative="draft",
        cache_lens=64,
        cpu_infer=1,
        picture_folder=tmp_path if is_seeing else None,
    )
    with caplog.at_level(logging.INFO), closing(build_engine(config)):
        said = caplog.text.count("the model that drafts sees no pictures: behind one, fewer of its tokens are right")
    assert said == is_seeing
