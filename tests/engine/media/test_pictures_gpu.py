"""Pictures on made-up GPUs: logits as transformers' whole composite has them. Tolerance: see test_gpu."""

from __future__ import annotations

from contextlib import closing
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from ktransformers.engine.step.decode_inputs import StepSize
from ktransformers.media.records import Sight
from tests.support.engines.fake_gpus import FakeGraphs, fake_hardware
from tests.support.engines.picture_engines import picture_composite, picture_engine
from tests.support.engines.picture_steps import logits_of
from tests.support.models.agreement import TOLERANCE

pytest.importorskip("triton")

WINDOW = {"sliding_window": 4}
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "qwen3_vl_moe": ("qwen3_vl_moe", {}),
    "gemma3": ("gemma3", WINDOW),
    "gemma4": ("gemma4", {**WINDOW, "use_bidirectional_attention": "vision"}),
    "glm4v_moe": ("glm4v_moe", {}),
    "qwen3_5": ("qwen3_5", {}),
    "kimi_k25": ("kimi_k25", {}),
    "qwen4_exp": ("qwen4_exp", {}),
    "granite4_vision": ("granite4_vision", {}),
    "ernie4_5_vl_moe": ("ernie4_5_vl_moe", {}),
    "paligemma of gemma2": ("paligemma of gemma2", {}),
    "molmo2": ("molmo2", {}),
}


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "num_gpus"), [*((name, 1) for name in CASES), ("qwen3_vl_moe", 2)])
def test_on_gpus_as_transformers(name: str, num_gpus: int, tmp_path: Path) -> None:
    model_type, values = CASES[name]
    model = picture_composite(model_type, **values)
    more = {"self_check": False, "spread_layers": num_gpus > 1}
    engine, pictures = picture_engine(model, tmp_path, fake_hardware(num_gpus), **more)
    with closing(engine):
        first, second = pictures.picture("first", 2, 3), pictures.picture("second", 2, 2)
        prompt = pictures.prompt([5, 9, 17, 23, 4], first, [60, 61], second, [70, 71, 72, 73, 74])
        answer = [11, 12]
        want = pictures.logits(prompt, answer)
        cuts = [len(prompt.ids)] if pictures.family.sight is not Sight.NOTHING else [7, 6, 1, 9]
        got = logits_of(engine, prompt, answer, cuts)
        assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("name", "axes", "layers"),
    [("qwen3_vl_moe", 3, (0, 1)), ("glm4v_moe", 3, ()), ("qwen3_5", 3, ()), ("kimi_k25", 1, ())],
)
def test_steps_that_show_pictures_are_replayed(name: str, axes: int, layers: tuple[int, ...], tmp_path: Path) -> None:
    """Cut within pictures, between them, and with the end of one alone, as a turn behind a prefix hit has it."""
    model, cuts, found = picture_composite(name), [6, 3, 4, 11, 2, 3], list[torch.Tensor]()
    for use_cuda_graph in (True, False):
        graphs = FakeGraphs()
        hardware = fake_hardware(1, graphs=graphs, graph_rows=(16,))
        more = {"self_check": False, "use_cuda_graph": use_cuda_graph}
        engine, pictures = picture_engine(model, tmp_path / str(use_cuda_graph), hardware, **more)
        with closing(engine):
            first, second = pictures.picture("first", 2, 3), pictures.picture("second", 2, 2)
            prompt = pictures.prompt([5, 9, 17, 23, 4], first, [60, 61], second, list(range(70, 90)))
            answer, before = [11, 12], graphs.replays
            found.append(logits_of(engine, prompt, answer, cuts, last=True))
            sizes = engine.executor.runner._decode._graphs._captured  # type: ignore[attr-defined]
            seqs = next(size.seqs for size in sizes if size.rows == 16)
            assert StepSize(16, seqs, axes=axes, layers=layers) in sizes
            ends = [*accumulate(cuts), len(prompt.ids), len(prompt.ids) + 1, len(prompt.ids) + 2]
            assert graphs.replays - before == (len(ends) if use_cuda_graph else 0)
            want = pictures.logits(prompt, answer)[torch.tensor(ends) - 1]
            assert (found[-1] - want).abs().max() <= TOLERANCE * want.abs().max()
    assert torch.equal(*found)
