"""On a real GPU, in bf16: experts in slots there, in slots in RAM and in files, whose places change meanwhile.

The oracle is `transformers` in fp32 on the dequantized weights, the tolerance that of tests/engine/gpu/test_cuda.py.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import Hardware
from ktransformers.engine.step.hot import HotGpu
from ktransformers.kernels.cpu.expert_store import ReadError
from ktransformers.kernels.types import QuantType
from ktransformers.operators.device import cuda_memory
from ktransformers.optimize.machine import detect_machine
from tests.support.engines.cuda_engines import check
from tests.support.engines.gpu_engines import EXPERTS_ON_CPU, rules_of
from tests.support.engines.one_sequence import StaticEngine, static_engine
from tests.support.gguf.writer import write_gguf
from tests.support.models.agreement import dequantized, logits_of
from tests.support.models.tiny_models import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STEPS = 48


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def engine_of(folder: Path, qtype: QuantType, use_cuda_graph: bool) -> tuple[StaticEngine, torch.Tensor, list[int]]:
    """With slots for 3 of 8 experts of each layer on the GPU, and for 6 of all 16 in RAM. Logits to compare with."""
    model = tiny_model("qwen3_moe", seed=3, hidden=256)
    path = write_gguf(model, folder / "model.gguf", qtype, qtype)
    rules = rules_of("qwen3_moe", folder, EXPERTS_ON_CPU, EXPERTS_ON_CPU)
    ids = [int(token) for token in np.random.default_rng(4).choice([5, 9, 3, 7, 11], STEPS)]
    want = logits_of(dequantized(model, qtype, qtype), ids)
    config = EngineConfig(
        gguf_path=path,
        optimize_config_path=rules,
        cache_lens=64,
        cpu_infer=2,
        hot_experts="3",
        experts_from="disk",
        experts_ram=1e-6,
        use_cuda_graph=use_cuda_graph,
    )
    return static_engine(config, hardware=Hardware(detect_machine(gpus=cuda_memory))), want, ids


def step(engine: StaticEngine, token: int, position: int) -> torch.Tensor:
    return engine.runner.forward([token], position, [0]).clone().float().cpu()


def read_something(engine: StaticEngine) -> None:
    for token in range(64):
        step(engine, token, 0)


@pytest.mark.parametrize("use_cuda_graph", [True, False])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_three_tiers_agree_with_transformers(kind: str, use_cuda_graph: bool, tmp_path: Path) -> None:
    engine, want, ids = engine_of(tmp_path, QuantType[kind], use_cuda_graph)
    with closing(engine):
        store = engine.expert_files.store
        check(torch.cat([step(engine, token, position) for position, token in enumerate(ids)]), want)
        (follower,) = engine.plan.devices["cuda:0"].followers
        assert isinstance(follower, HotGpu)
        (pool,) = follower.pools
        policy, stats = pool.slots.policy, store.stats()
        assert stats.num_slots == 6
        assert stats.misses > 0
        assert policy.totals.hits > 0
        assert policy.totals.uploads > 0
        policy.check_integrity()
        store.handle._fail_next(1)
        with pytest.raises(ReadError, match=r"model\.gguf"):
            read_something(engine)
        check(torch.cat([step(engine, token, position) for position, token in enumerate(ids)]), want)
        policy.check_integrity()
    assert not pool.slots._sources
