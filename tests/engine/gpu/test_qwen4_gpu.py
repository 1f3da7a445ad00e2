"""N-grams of Qwen4 on a made-up GPU: many sequences, prefixes, and steps that are held until their tokens are known.

The answers are those of one sequence after the other on the CPU, whose logits are transformers'.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
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
from ktransformers.errors import EngineError
from ktransformers.scheduler.records import Request
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
@pytest.mark.parametrize("experts_from", ["ram", "disk"])
def test_answers_are_those_of_the_cpu(experts_from: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers, of which the second attends; the first one adds n-grams, whose rows may come from the disk."""
    kinds = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "indexed_attention"], "ple_layer_ids": [1]}
    write_safetensors(pooled_model("qwen4_exp_text", seed=6, **kinds), tmp_path)
    config = EngineConfig(model_path=tmp_path, cache_lens=256, cpu_infer=1, chunk_size=16)
    with closing(static_engine(config)) as engine:
        session = Session(engine.runner, chunk_size=512, has_prefix_cache=False)
        wanted = [[event.token_id for event in session.generate(ids, PARAMS)][:NUM_TOKENS] for ids in PROMPTS]
    config = replace(config, experts_from=experts_from, experts_ram=1e-6 * (experts_from == "disk"))
    held, launch_held, graphs = list[bool](), ModelRunner.launch_held, FakeGraphs()
    engines = list[Engine]()

    def launched(self: ModelRunner, *inputs: Any) -> bool:
        held.append(launch_held(self, *inputs))
        return held[-1]

    monkeypatch.setattr(ModelRunner, "launch_held", launched)

    def built(report: Any) -> Engine:
        hardware = fake_hardware(1, graphs=graphs)
        engines.append(build_engine(config, page_size=8, max_batch_size=4, hardware=hardware, progress=report))
        return engines[-1]

    def answers(loop: BatchLoop) -> list[list[int]]:
        events = [
            iter(prefill_and_generate(loop, EngineRequest(Request(prompt_ids=ids, params=PARAMS)))) for ids in PROMPTS
        ]
        return [[one.token_id for one in each if isinstance(one, TokenEvent)] for each in events]

    with closing(BatchLoop(built)) as loop:
        assert answers(loop) == wanted
        assert answers(loop) == wanted  # behind cached prefixes
        files = engines[-1].expert_files
        assert (files is not None) == (experts_from == "disk")
        if files is not None:
            (table,) = files._tables
            table.handle._fail_next(1)
            with pytest.raises(EngineError, match="cannot be read"):
                list(prefill_and_generate(loop, EngineRequest(Request(prompt_ids=[7, *PROMPTS[0]], params=PARAMS))))
            assert answers(loop) == wanted
    assert graphs.replays > NUM_TOKENS
    assert sum(held) > NUM_TOKENS  # launched before their tokens were known
