"""Plans over real files and real operators: nothing missing, nothing left over, and the bytes are the checkpoint's."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from ktransformers.engine.model.skeleton import build_skeleton, restore_buffers
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.models.facts import ModelFacts
from ktransformers.models.registry import default_optimize_rules
from ktransformers.operators.base import OperatorConfig
from ktransformers.optimize.apply import apply_plan, load_plan
from ktransformers.optimize.plan import make_plan
from ktransformers.optimize.rules import load_rules
from ktransformers.weights.safetensors.file import open_safetensors
from ktransformers.weights.safetensors.source import SafetensorsSource
from tests.support.engines.fake_operators import MACHINE
from tests.support.models.tiny_models import tiny_model, write_safetensors


@pytest.mark.parametrize(
    ("model_type", "is_tied"),
    [("qwen2_moe", True), ("deepseek_v3", False), ("mixtral", False), ("minimax_m2", True), ("llama", True)],
)
def test_bytes_are_those_of_the_checkpoint(model_type: str, is_tied: bool, tmp_path: Path) -> None:
    write_safetensors(tiny_model(model_type, tie_word_embeddings=is_tied), tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = sum(4 * file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118 - not a mapping
    skeleton = build_skeleton(tiny_model(model_type, tie_word_embeddings=is_tied).config)
    facts = ModelFacts.of(skeleton.config)
    source = SafetensorsSource(open_safetensors(tmp_path), facts)
    pool = WorkerPool(1)
    try:
        plan = make_plan(
            skeleton,
            load_rules(default_optimize_rules(facts, skeleton)),
            operator_config=OperatorConfig(facts, pool),
            source=source,
            machine=MACHINE,
            strict=True,
            ignorable=lambda name: False,
        )
        assert plan.weight_bytes == {"cpu": stored}
        assert set().union(*(entry.stored_names for entry in plan.entries)) == set(source.stored_names())
        apply_plan(skeleton, plan)
        restore_buffers(skeleton)
        progress: list[int] = []
        load_plan(skeleton, plan, source, lambda nbytes, key: progress.append(nbytes))
        assert progress[-1] == stored
    finally:
        pool.close()
