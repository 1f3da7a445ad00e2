"""The shapes built in code against what is published of the models."""

from __future__ import annotations

import math

import pytest

from ktransformers.cli.bench.options import SHAPE_NAMES
from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import plan_model
from ktransformers.engine.model.opened import open_synthetic
from ktransformers.engine.model.skeleton import build_skeleton
from ktransformers.engine.plan.dry_run import dry_run
from ktransformers.errors import ConfigError
from ktransformers.models.synthetic_shapes import SHAPES, find_shape, small_config
from tests.docs.named import ROOT


def test_the_command_line_names_every_shape() -> None:
    assert tuple(SHAPES) == SHAPE_NAMES


@pytest.mark.parametrize("page", ["plan.md", "bench.md"])
def test_docs_name_every_shape(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert [name for name in SHAPES if f"`{name}`" not in text] == []


@pytest.mark.parametrize(("name", "count"), [("glm-5.3-flash", 3), ("deepseek-v3", 3), ("qwen3-32b", 0)])
def test_layers_without_experts_are_said(name: str, count: int, caplog: pytest.LogCaptureFixture) -> None:
    """count: of such layers in front of those with experts; 0: there are none with."""
    shape = find_shape(name)
    open_synthetic(EngineConfig(), shape.config(max(count, 1)))
    assert caplog.text.count("have no experts, those behind have: take more (--layers)") == (count > 0)
    caplog.clear()
    open_synthetic(EngineConfig(), shape.config(count + 1))
    assert "no experts" not in caplog.text


def test_plans_have_tables_of_ngrams_in_files() -> None:
    """As the published model's are; what is loaded makes its own, in memory."""
    shape, table = small_config("qwen3.8-flash-next", 2), "model.layers.1.ple.ple_embedding.ngram_embedding"
    made, planned = (open_synthetic(EngineConfig(), shape, stands_for_files=one) for one in (False, True))
    info = made.source.find(f"{table}.weight")
    assert info is not None
    entries = [
        next(one for one in plan_model(opened.config, opened).entries if one.stored_names >= {f"{table}.weight"})
        for opened in (made, planned)
    ]
    assert entries[0].nbytes["cpu"] - entries[1].nbytes["cpu"] == info.nbytes > 0
    assert [entry.in_files for entry in entries] == [0, math.prod(info.shape)]
    both = [dry_run(opened).summary for opened in (made, planned)]
    assert both[0].resident - both[1].resident == math.prod(info.shape)
    assert both[1].bits_per_weight == 8 * (both[0].memory_bytes - info.nbytes) / both[1].resident


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3-30b-a3b", 30.5),
        ("deepseek-v2-lite", 15.7),
        ("deepseek-v3", 671),
        ("deepseek-v4-flash", 284),
        ("glm-5.3-flash", 313),  # of 320: without its layer for multi-token prediction and the part for images
        ("gpt-oss-20b", 20.91),
        ("gpt-oss-120b", 116.83),
        ("qwen3.6-35b-a3b", 35),
        ("qwen3-coder-next", 80),
        ("qwen3.8-flash-next", 177),  # 125.7, and 51.2 of n-grams
        ("qwen3-32b", 32.8),
    ],
)
def test_parameters_are_as_many_as_published(name: str, billions: float) -> None:
    """Counted for two depths and extended to the whole, so that not every layer is built; kinds repeat after 4."""
    shape = find_shape(name)

    def count(layers: int) -> int:
        return sum(p.numel() for p in build_skeleton(shape.config(layers)).parameters())

    few, more = count(4), count(8)
    whole = few + (shape.num_layers - 4) * (more - few) / 4
    decimals = len(str(billions).partition(".")[2])
    assert round(whole / 1e9, decimals) == billions


def test_unknown_shapes_and_depths_are_refused() -> None:
    with pytest.raises(ConfigError, match="qwen3-30b-a3b, deepseek-v2-lite, deepseek-v3"):
        find_shape("gpt-5")
    for layers in (0, 49):
        with pytest.raises(ConfigError, match="has 1 to 48 layers"):
            find_shape("Qwen3-30B-A3B").config(layers)
