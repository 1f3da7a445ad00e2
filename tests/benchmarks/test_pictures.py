"""benchmarks.gpu.pictures on the smallest files, without a GPU; the peer is made up."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3VLMoeVisionConfig, Qwen3VLMoeVisionModel

from benchmarks.gpu import pictures
from benchmarks.gpu.picture_bounds import Hardware, PictureBounds, text_flop
from benchmarks.gpu.picture_files import TowerShape, draw_screenshot
from benchmarks.gpu.pictures import PicturesWork, bench_pictures, write_once
from ktransformers.bench.loading.files import FileShape
from ktransformers.config import EngineConfig
from ktransformers.kernels.cpu import limits
from ktransformers.weights.gguf.file import open_gguf

TOWER = TowerShape(blocks=3, hidden=64, heads=2, width=96, patch=16, side=6, deepstack=(0, 1))
TEXT = FileShape(layers=4, hidden=256, experts=8, width=256, heads=2, kv_heads=1)


def test_operations_of_a_tower() -> None:
    """As torch counts those of transformers' own."""
    config = Qwen3VLMoeVisionConfig(
        depth=TOWER.blocks,
        hidden_size=TOWER.hidden,
        num_heads=TOWER.heads,
        intermediate_size=TOWER.width,
        out_hidden_size=256,
        num_position_embeddings=TOWER.side**2,
        deepstack_visual_indexes=list(TOWER.deepstack),
        attn_implementation="eager",
    )
    model, grid = Qwen3VLMoeVisionModel(config), torch.tensor([[1, 8, 6]])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(48, 3 * 2 * 16 * 16), grid_thw=grid)
    assert TOWER.flop(8 * 6 * 16 * 16, 256) == counter.get_total_flops()


def test_operations_of_the_text() -> None:
    experts, dense = text_flop(replace(TEXT, layers=1), 3)
    assert experts == 2 * 3 * 8 * (256 * 256 * 3)  # 8 experts a token, gate, up and down
    projections = 256 * 256 + 256 * 128 + 256 * 128 + 256 * 256 + 256 * 8  # queries, keys, values, output, router
    pairs = 1 + 2 + 3  # a token sees itself and those before
    assert dense == 2 * 3 * projections + 2 * pairs * 2 * 256


def test_bounds() -> None:
    hardware = Hardware({}, cpu_fp32=10.0, cpu_int8=100.0, ram=50.0, gpu_bf16=1000.0, vram=500.0, pcie=25.0)
    found = PictureBounds.of(hardware, {"ram": 100, "vram": 300}, (400.0, 2000.0), 5000.0, on_gpu=True)
    assert (found.tower, found.dense) == (5.0, 2.0)
    assert found.vram_experts == 0.6  # 300 bytes; 300 operations take 0.3
    assert found.ram_experts == pytest.approx(4 / 3)  # 2 s on the CPU or 4 s of copies: a third of them is copied
    assert found.milliseconds == pytest.approx(
        {"tower_ms": 5e3, "text_ms": 2600 + 4e3 / 3, "first_token_ms": 7600 + 4e3 / 3}
    )
    alone = replace(hardware, gpu_bf16=0.0, vram=0.0, pcie=0.0)
    found = PictureBounds.of(alone, {"ram": 400, "vram": 0}, (400.0, 2000.0), 50.0, on_gpu=False)
    assert (found.tower, found.dense, found.vram_experts, found.ram_experts) == (5.0, 20.0, 0.0, 8.0)


def test_screenshots_differ(tmp_path: Path) -> None:
    for name, number in (("a", 1), ("b", 2), ("c", 1)):
        draw_screenshot(tmp_path / f"{name}.png", number, 256)
    a, b, c = ((tmp_path / f"{name}.png").read_bytes() for name in "abc")
    assert a == c != b


class FakePeer:
    """Takes a second for a picture."""

    name = "llama.cpp"

    def __init__(self) -> None:
        self.questions: list[str] = []
        self.is_closed = False

    def ask(self, question: str) -> float | None:
        self.questions.append(question)
        return {"part tower": 0.5, "part token": 7.0, "part read": None}.get(question, 1.0)

    def close(self) -> None:
        self.is_closed = True


def test_files_are_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = PicturesWork(EngineConfig(), TEXT, TOWER, 1, tmp_path)
    for shape, is_written in ((TEXT, True), (TEXT, False), (replace(TEXT, layers=5), True)):
        write_once(replace(work, text=shape))
        assert ("random weights written" in capsys.readouterr().out) is is_written
        assert open_gguf(tmp_path / "text.gguf").metadata["qwen3vlmoe.block_count"] == shape.layers


@pytest.mark.slow
def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = limits.read_bandwidth
    monkeypatch.setattr(limits, "read_bandwidth", partial(read, nbytes=1 << 20, repeats=1))
    peer = FakePeer()
    monkeypatch.setattr(pictures, "is_missing", lambda *args: False)
    monkeypatch.setattr(pictures, "llama_pictures_peer", lambda work: peer)
    config = EngineConfig(use_cuda=False, cpu_infer=1, cache_lens=512, self_check=False)
    work = PicturesWork(config, TEXT, TOWER, 1, tmp_path, size=128, has_peer=True)
    record = bench_pictures(work)
    assert [row["program"] for row in record["rows"]] == ["ktransformers", "llama.cpp"] * 3
    ours, theirs = record["medians"]["ktransformers"], record["medians"]["llama.cpp"]
    assert min(ours[key] for key in ("read_ms", "tower_ms", "text_ms", "next_turn_ms")) > 0
    assert ours["first_token_ms"] == pytest.approx(ours["read_ms"] + ours["tower_ms"] + ours["text_ms"])
    assert (theirs["first_token_ms"], theirs["tower_ms"], theirs["read_ms"]) == (1000.0, 500.0, None)
    assert record["settings"]["tower on"] == "cpu"
    assert 16 < record["settings"]["prompt_len"] < 200  # 128 x 128 pixels are 16 positions
    assert record["bounds"]["nbytes"]["vram"] == 0 < record["bounds"]["nbytes"]["ram"]
    assert ours["next_turn_ms"] == pytest.approx(sum(ours[f"next_{part}_ms"] for part in ("read", "tower", "text")))
    parts = ["part read", "part tower", "part text"]
    asked = [(str(tmp_path / f"{n}.png"), *parts, "part token", "again", *parts) for n in range(3)]
    assert peer.questions == [question for picture in asked for question in picture]
    assert peer.is_closed
