"""A decode step takes no memory from the heap in native code once it is warm."""

from __future__ import annotations

import pytest

from ktransformers.kernels.extension import extension
from tests.support.engines.runners import fused_runner, random_ids
from tests.support.models.recurrent_models import RECURRENT_TYPES, recurrent_model
from tests.support.models.tiny_models import tiny_model

pytestmark = pytest.mark.skipif(extension.num_allocations() < 0, reason="allocations are not counted on this system")


@pytest.mark.every(5)
@pytest.mark.parametrize("rows", [1, 3, 12])
@pytest.mark.parametrize(
    "family", ["llama", "qwen3_moe", "qwen2_moe", "deepseek_v3", "gpt_oss", "qwen3_next", "qwen3_5_moe_text"]
)
def test_a_warm_step_allocates_nothing(family: str, rows: int) -> None:
    began = extension.num_allocations()
    runner = fused_runner(recurrent_model(family) if family in RECURRENT_TYPES else tiny_model(family))
    ids = random_ids(runner.vocab_size, 4 * rows)
    for step in range(3):  # memory of a session is made one block when it ends, and kept
        runner.forward(ids[step * rows : (step + 1) * rows], step * rows, range(rows))
    warm = extension.num_allocations()
    assert warm > began  # they are counted
    runner.forward(ids[3 * rows :], 3 * rows, range(rows))
    assert extension.num_allocations() == warm
