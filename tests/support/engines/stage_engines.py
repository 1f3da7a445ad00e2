"""Engines of one process and of several stages, and the steps whose logits tests compare."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import Engine, build_engine
from ktransformers.engine.parallel.ranks.driver import Driver
from ktransformers.engine.step.context import ForwardBatch, paged_context
from tests.support.engines.cut_models import HARDWARE
from tests.support.engines.fake_gpus import fake_hardware
from tests.support.engines.gpu_engines import step_row

IDS = [3 + 7 * i % 90 for i in range(19)]


def engine_of(path: Path, num_stages: int, on_gpu: bool = False, **settings: object) -> Engine:
    """Of 4 sequences. on_gpu: on a GPU that is made up, in all stages."""
    values = {"cache_lens": 96, "cpu_infer": 1, "pipeline": num_stages, "self_check": False, **settings}
    config = EngineConfig(model_path=path, **values)  # type: ignore[arg-type]
    ranks = Driver(config, None, HARDWARE) if on_gpu and num_stages > 1 else None
    hardware = fake_hardware() if on_gpu else None
    return build_engine(config, page_size=8, max_batch_size=4, ranks=ranks, hardware=hardware)


def logits(engine: Engine, ids: list[int], start: int) -> torch.Tensor:
    """Of `ids` at positions from `start` on, in pages 0 .. 3."""
    row = step_row(1, ids, start, [0, 1, 2, 3], read_slot=0 if start else -1, write_slot=0)
    positions, context = paged_context(engine.cache, engine.pool, [row], [np.arange(4, dtype=np.int32)])
    batch = ForwardBatch(torch.tensor(ids), positions, context, torch.arange(len(ids)))
    return engine.executor.runner.step(batch).clone()  # type: ignore[attr-defined]


def logits_in_steps(engine: Engine) -> torch.Tensor:
    """Of IDS: a prompt in two chunks, then steps of one row."""
    got = [logits(engine, IDS[:9], 0), logits(engine, IDS[9:16], 9)]
    return torch.cat(got + [logits(engine, [token], at) for at, token in enumerate(IDS[16:], 16)])
