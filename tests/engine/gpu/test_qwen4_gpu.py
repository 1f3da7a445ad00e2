"""N-grams of Qwen4 on a made-up GPU: many sequences, prefixes, and steps that are held until their tokens are known.

The answers are those of one sequence after the other on the CPU, whose logits are transformers'.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams, TokenEvent
from ktransformers.engine.api.batch_loop import BatchLoop, EngineRequest
from ktransformers.engine.api.generate import prefill_and_generate
from ktransformers.engine.load.builder import Engine, build_engine
from ktransformers.engine.step.runner import ModelRunner
from tests.support.engines.fake_gpus import FakeGraphs, fake_hardware
from tests.support.engines.one_sequence import static_engine
from tests.support.engines.sequential import Session
from tests.support.models.pooled_models import EOS, pooled_model
from tests.support.models.tiny_models import VOCAB_SIZE, write_safetensors

pytest.importorskip("triton")

NUM_TOKENS = 10


def some_ids(count: int, seed: int) -> list[int]:
    ids = torch.randint(3, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [EOS if at % 13 in (5, 7) else token for at, token in enumerate(ids)]


PROMPTS = [some_ids(30, 1), some_ids(3, 2), [*some_ids(30, 1)[:26], 5, 6], [9]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.mark.exhaustive
def test_answers_are_those_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers, of which the second attends; the first one adds n-grams."""
    kinds = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "indexed_attention"], "ple_layer_ids": [1]}
    write_safetensors(pooled_model("qwen4_exp_text", seed=6, **kinds), tmp_path)
    config = EngineConfig(model_path=tmp_path, cache_lens=256, cpu_infer=1, chunk_size=16)
    with closing(static_engine(config)) as engine:
        session = Session(engine.runner, chunk_size=512, has_prefix_cache=False)
        wanted = [[event.token_id for event in session.generate(ids, PARAMS)][:NUM_TOKENS] for ids in PROMPTS]
    held, launch_held, graphs = list[bool](), ModelRunner.launch_held, FakeGraphs()

    def launched(self: ModelRunner, *inputs: Any) -> bool:
        held.append(launch_held(self, *inputs))
        return held[-1]

    monkeypatch.setattr(ModelRunner, "launch_held", launched)

    def built(report: Any) -> Engine:
        hardware = fake_hardware(1, graphs=graphs)
        return build_engine(config, page_size=8, max_batch_size=4, hardware=hardware, progress=report)

    with closing(BatchLoop(built)) as loop:
        for _ in range(2):  # then behind cached prefixes
            events = [iter(prefill_and_generate(loop, EngineRequest(ids, PARAMS))) for ids in PROMPTS]
            assert [[one.token_id for one in each if isinstance(one, TokenEvent)] for each in events] == wanted
    assert graphs.replays > NUM_TOKENS
    assert sum(held) > NUM_TOKENS  # launched before their tokens were known
