"""Pictures on a real GPU: steps that show them run eagerly, those behind them are replayed.

The oracle is the same engine on the CPU in fp32, which is compared with transformers elsewhere. All experts are chosen,
since near ties in bf16 would choose others. The tolerance is what transformers itself loses in bf16.
"""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformers.core import SamplingParams
from ktransformers.engine.load.builder import Hardware
from ktransformers.media.records import Sight
from ktransformers.operators.device import cuda_memory
from ktransformers.optimize.machine import detect_machine
from tests.support.engines.cuda_engines import check_beside
from tests.support.engines.paged_loop import PagedLoop, scheduler_config
from tests.support.engines.picture_engines import picture_composite, picture_engine
from tests.support.engines.picture_steps import logits_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ALL = {"num_experts_per_tok": 8}
ANSWER = range(100, 112)
CASES: dict[str, dict[str, object]] = {
    "qwen3_vl_moe": ALL,
    "gemma3": {"sliding_window": 4},
    "glm4v": {},
    "qwen3_5_moe": ALL,
    "granite4_vision": {},
    "ernie4_5_vl_moe": {},
    "paligemma of gemma2": {},
    "molmo2": {},
}


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_cpu(name: str, graphs: bool, tmp_path: Path) -> None:
    model, found = picture_composite(name, **CASES[name]), list[torch.Tensor]()
    for place in ("cpu", "gpu"):
        hardware = Hardware(detect_machine(gpus=cuda_memory if place == "gpu" else dict))
        more: dict[str, Any] = {"cpu_infer": 2, "use_cuda_graph": graphs}
        engine, pictures = picture_engine(model, tmp_path / place, hardware, **more)
        with closing(engine):
            assert engine.uses_gpus == (place == "gpu")
            shown = pictures.picture("first", 6, 8), pictures.picture("second", 3, 2)
            prompt = pictures.prompt(list(range(10, 30)), shown[0], [60, 61], shown[1], list(range(70, 90)))
            cuts = [len(prompt.ids)] if pictures.family.sight is not Sight.NOTHING else [33, 40]
            found.append(logits_of(engine, prompt, ANSWER, cuts))
            if place == "gpu":  # and in a loop, whose steps are held until their tokens are known
                params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
                loop = PagedLoop(scheduler_config(engine, chunk_size=128), partial(getattr, engine, "executor"))
                names = [loop.add(prompt.ids, params, media=prompt.media) for _ in range(2)]
                names.append(loop.add(list(range(10, 40)), params))
                loop.drain()
                assert [len(loop.answers[one].token_ids) for one in names] == [24] * 3
    pictures.model.to(torch.bfloat16)
    check_beside(found[1], found[0], pictures.logits(prompt, ANSWER).float())
