"""Engines on made-up GPUs, the rules that place their experts, and the steps that tests give them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.load.builder import Hardware
from ktransformers.engine.step.expert_streaming import PrefillTools
from ktransformers.operators.device import Device
from ktransformers.scheduler.records import NewSequence, ScheduledSequence
from tests.support.engines.fake_gpus import fake_hardware
from tests.support.engines.fake_operators import inlined_rules
from tests.support.engines.inline_device import InlineDriver, LazyCopies
from tests.support.engines.one_sequence import StaticEngine, static_engine


def gpu_engine(path: Path, num_gpus: int = 1, **settings: object) -> StaticEngine:
    where = {"model_path": path} if path.is_dir() else {"gguf_path": path}
    config = EngineConfig(cache_lens=64, cpu_infer=1, **where, **settings)  # type: ignore[arg-type]
    return static_engine(config, hardware=fake_hardware(num_gpus))


def logits_in_steps(engine: StaticEngine, ids: list[int]) -> torch.Tensor:
    """Logits of all positions: a prefill, then a few steps of one row."""
    first = engine.runner.forward(ids[:-3], 0, range(len(ids) - 3))
    rest = [engine.runner.forward([token], len(ids) - 3 + i, [0]).clone() for i, token in enumerate(ids[-3:])]
    return torch.cat([first, *rest])


RULES = {
    "qwen3_moe": "Qwen3Moe-ktransformers.yaml",
    "deepseek_v3": "DeepSeek-V3-Chat.yaml",
    "mixtral": "Mixtral.yaml",
}
EXPERTS_ON_CPU = "generate_device: cpu\n      generate_op: KExpertsCPU"
EXPERTS_ON_GPU = "generate_device: cuda\n      generate_op: KExpertsMarlin"


def rules_of(model_type: str, folder: Path, old: str, new: str, before: str = "") -> Path:
    """The family's own rule file with `old` replaced by `new`, behind the rules `before`."""
    text = inlined_rules(RULES[model_type])
    assert old in text
    path = folder / "rules.yaml"
    path.write_text(before + text.replace(old, new))
    return path


def sequence_start(run_id: int, ids: list[int], top_k: int = 0) -> NewSequence:
    """Greedy without top_k."""
    params = SamplingParams(temperature=0.7 if top_k else 0.0, top_k=top_k, seed=0)
    return NewSequence(run_id=run_id, request_id=str(run_id), params=params, prompt_len=len(ids), token_ids=ids)


def step_row(run_id: int, ids: list[int], start: int, table: list[int], **slots: int) -> ScheduledSequence:
    """slots: of the state, read_slot and write_slot."""
    where = {"start": start, "block_table": table, **slots}
    return ScheduledSequence(run_id=run_id, token_ids=ids, token_source=None, is_sampled=True, **where)  # type: ignore[arg-type]


class Gpu:
    """The tools of one made-up GPU."""

    def __init__(self) -> None:
        self.driver, self.copies = InlineDriver(), LazyCopies()

    def __call__(self, device: Device) -> PrefillTools:
        return PrefillTools(self.driver, self.copies, "made up")

    def hardware(self, **settings: int) -> Hardware:
        return replace(fake_hardware(**settings), prefill_tools=self)
