"""Models of families that no test covers, compared with transformers while loading: wrong ones are refused by name.

`arcee` stands for a family that no test covers, `smollm3` (with TESTED_TYPES emptied) for one whose layers differ.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.engine.verify import self_check, stack_check
from ktransformers.errors import UnsupportedError
from ktransformers.kernels.types import QuantType
from ktransformers.models import registry
from ktransformers.operators.attention import gqa as attention
from ktransformers.operators.attention.gqa_gpu import gqa_forward
from ktransformers.operators.layers import cpu as fused
from ktransformers.operators.layers import gpu
from tests.support.engines.fake_gpus import fake_hardware
from tests.support.engines.one_sequence import StaticEngine, static_engine
from tests.support.gguf.writer import write_gguf
from tests.support.models.agreement import TYPES
from tests.support.models.attention_families import CASES
from tests.support.models.latent_models import WHOLE_TYPES
from tests.support.models.pooled_models import POOLED_TYPES
from tests.support.models.recurrent_models import RECURRENT_TYPES
from tests.support.models.tiny_models import (
    SCALED_ROPES,
    UNROTATED_TYPES,
    WINDOW,
    WINDOWED_TYPES,
    tiny_model,
    write_safetensors,
)
from tests.support.oracles.deepseek_v41 import MODEL_TYPE as WITH_AN_ORACLE


def load(folder: Path, **settings: Any) -> StaticEngine:
    return static_engine(EngineConfig(model_path=folder, **{"cache_lens": 96, "cpu_infer": 2, **settings}))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == self_check.__name__]


@pytest.fixture
def _all_untested(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(registry, "TESTED_TYPES", frozenset())
    caplog.set_level(logging.INFO, logger="ktransformers")


def test_the_list_is_what_the_tests_of_models_cover() -> None:
    covered = {*TYPES, *WINDOWED_TYPES, *UNROTATED_TYPES, *SCALED_ROPES, *WHOLE_TYPES, *RECURRENT_TYPES, *POOLED_TYPES}
    covered |= {model_type for model_type, _ in CASES.values()}
    covered.add(WITH_AN_ORACLE)
    assert covered == registry.TESTED_TYPES


def test_what_tests_cover_is_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build_reference_model(*args: object) -> None:
        raise EOFError("a reference module was built")

    monkeypatch.setattr(self_check, "build_reference_model", build_reference_model)
    load(write_safetensors(tiny_model("qwen3"), tmp_path)).close()
    with pytest.raises(EOFError, match="a reference module"):
        load(write_safetensors(tiny_model("arcee"), tmp_path))
    load(tmp_path, self_check=False).close()


@pytest.mark.parametrize("self_check", [True, False])
def test_layers_with_attention_of_their_own_are_refused_by_name(self_check: bool, tmp_path: Path) -> None:
    """XGLM's attention asks no attention function, so no cache and no mask reach it: seen without comparing."""
    values = {"d_model": 64, "ffn_dim": 96, "num_layers": 3, "attention_heads": 4}
    folder = write_safetensors(tiny_model("xglm", **values), tmp_path)
    with pytest.raises(UnsupportedError, match=r"layer 0 \(XGLMDecoderLayer\) attends by code of its own"):
        load(folder, self_check=self_check)


def wrong_attention(change: Callable[[dict[str, Any]], None]) -> Callable[..., Any]:
    """Attention that is asked for something else."""

    def forward(module: Any, query: torch.Tensor, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        change(kwargs)
        return attention.attention_forward(module, query, key, value, mask, **kwargs)

    return forward


@pytest.mark.usefixtures("_all_untested")
@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("olmoe", lambda kwargs: kwargs.update(scaling=kwargs["scaling"] * 1.05)),
        (
            "gemma2",
            lambda kwargs: kwargs.update(sliding_window=kwargs["sliding_window"] and kwargs["sliding_window"] + 1),
        ),
        ("gpt_oss", lambda kwargs: kwargs.update(s_aux=kwargs["s_aux"] + 0.1)),
    ],
)
def test_small_differences_are_found(
    family: str, change: Callable[[dict[str, Any]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 % in a scale, one position in a window, a tenth in a sink: in fp32 nothing near is taken for rounding."""
    from transformers import AttentionInterface

    folder = write_safetensors(tiny_model(family), tmp_path)
    register = wrong_attention(change)
    monkeypatch.setattr(
        "ktransformers.engine.model.skeleton.register_attention",
        lambda: AttentionInterface.register(attention.ATTENTION_NAME, register),
    )
    try:
        with pytest.raises(UnsupportedError, match=rf"{family}: model\.layers\.\d\.self_attn \(\w+\) differs"):
            load(folder)
    finally:
        attention.register_attention()


@pytest.mark.usefixtures("_all_untested")
def test_native_layers_are_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native calls rotate always; every other layer of this model does not, and here nothing else notices."""
    monkeypatch.setattr(fused, "_agrees", lambda *args: True)
    with pytest.raises(UnsupportedError, match=r"smollm3: model\.layers\.1 \(SmolLM3DecoderLayer\) differs"):
        load(write_safetensors(tiny_model("smollm3"), tmp_path))


@pytest.mark.usefixtures("_all_untested")
def test_the_first_and_the_last_layer_of_each_kind_are_computed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(write_safetensors(tiny_model("smollm3", layers=6), tmp_path)).close()
    (line,) = said(caplog)
    assert "smollm3 as transformers computes it: embeddings, 4 of 6 layers and the head, on 64 tokens" in line


@pytest.mark.every(3)
@pytest.mark.usefixtures("_all_untested")
@pytest.mark.parametrize(
    ("family", "types"),
    [
        ("gpt_oss", (QuantType.Q4_0, QuantType.Q8_0)),
        ("deepseek_v3", (QuantType.Q4_K, QuantType.Q8_0)),
        ("qwen2_moe", (QuantType.BF16, QuantType.BF16)),
        ("qwen3", (QuantType.BF16, QuantType.BF16)),
    ],
)
def test_rounded_activations_are_no_difference(
    family: str, types: tuple[QuantType, QuantType], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What int8 and bf16 do to a layer is measured, on the numbers that the file holds."""
    model = tiny_model(family, hidden=256, tie_word_embeddings=family == "qwen3")
    model.config.save_pretrained(tmp_path)
    load(tmp_path, gguf_path=write_gguf(model, tmp_path / "m.gguf", *types)).close()
    assert "as transformers computes it" in said(caplog)[0]


@pytest.mark.every(3)
@pytest.mark.usefixtures("_all_untested")
@pytest.mark.parametrize("settings", [{"cpu_quant": "q4_0"}, {"cache_lens": WINDOW}, {"cache_lens": 4}])
def test_settings_of_the_engine(settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(write_safetensors(tiny_model("qwen3_moe", hidden=256), tmp_path), **settings).close()
    assert "as transformers computes it" in said(caplog)[0]


@pytest.mark.usefixtures("_all_untested")
def test_of_large_experts_the_last_rows_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_safetensors(tiny_model("qwen3_moe"), tmp_path)
    monkeypatch.setattr(self_check, "_EXPERT_BYTES", 4 * 3 * 64 * 96 * 7)  # one less than there are
    load(folder).close()
    assert "on 64 tokens; wide parts for the last 1 of them only" in said(caplog)[-1]


@pytest.mark.usefixtures("_all_untested")
@pytest.mark.parametrize("is_wrong", [False, True])
def test_wide_models_are_compared_in_parts(
    is_wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One layer of each kind, feed-forward parts for the last rows, one run; and what differs is named as ever."""
    monkeypatch.setattr(self_check, "_MOST_WORK_OF_A_PART", 64 * 96 * 3 * 5)
    monkeypatch.setattr(self_check, "_LEAST_ROWS_OF_A_PART", 2)
    monkeypatch.setattr(self_check, "_MOST_WORK", 1)
    folder = write_safetensors(tiny_model("smollm3", layers=6), tmp_path)
    if is_wrong:
        monkeypatch.setattr(fused, "_agrees", lambda *args: True)
        with pytest.raises(UnsupportedError, match=r"smollm3: model\.layers\.1 \(SmolLM3DecoderLayer\) differs"):
            load(folder)
        return
    load(folder).close()
    announced, line = said(caplog)
    assert "takes a while (--no_self_check)" in announced
    assert "2 of 6 layers and the head, on 64 tokens; wide parts for the last 5 of them only" in line


@pytest.mark.usefixtures("_all_untested")
def test_a_large_matrix_is_multiplied_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ktransformers.engine.verify.reference_module._PIECE", 64 * 33)
    load(write_safetensors(tiny_model("qwen3_moe"), tmp_path)).close()
    assert "as transformers computes it" in said(caplog)[0]


@pytest.mark.usefixtures("_all_untested")
def test_a_reference_module_that_fails_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def build_reference_model(*args: object) -> None:
        raise ImportError("This needs a package that is not here\nand more")

    monkeypatch.setattr(self_check, "build_reference_model", build_reference_model)
    load(write_safetensors(tiny_model("qwen3"), tmp_path)).close()
    (line,) = said(caplog)
    assert "nothing was compared" in line
    assert "(ImportError: This needs a package that is not here)" in line


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_wrong", [False, True])
def test_layers_on_a_gpu(
    is_wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In bf16: what rounding does there is measured in the same way."""
    caplog.set_level(logging.INFO, logger="ktransformers")
    folder = write_safetensors(tiny_model("arcee", layers=1), tmp_path)
    config = EngineConfig(model_path=folder, cache_lens=48, cpu_infer=1)
    hardware = fake_hardware(dtype=torch.bfloat16)
    if not is_wrong:
        static_engine(config, hardware=hardware).close()
        assert "arcee as transformers computes it" in said(caplog)[0]
        return
    monkeypatch.setattr(attention, "gqa_forward", lambda *args: 1.25 * gqa_forward(*args))
    with pytest.raises(UnsupportedError, match=r"arcee: model\.layers\.0\.self_attn \(ArceeAttention\) differs"):
        static_engine(config, hardware=hardware)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", ["sum", "given"])
def test_layers_that_were_joined_are_compared_with_each_alone(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum that is wrong in the stack's own launches, and layers that were not given all the same."""
    add_norm, forward = gpu.add_rms_norm, gpu.LayerStack.forward

    def wrong_sum(added: torch.Tensor, total: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return add_norm(1.2 * added, total, *args, **kwargs)

    def wrong_angles(self: gpu.LayerStack, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        cos, sin = kwargs["position_embeddings"]
        return forward(self, hidden_states, *args, **{**kwargs, "position_embeddings": (cos, -sin)})

    if fault == "sum":
        monkeypatch.setattr(gpu, "add_rms_norm", wrong_sum)
    if fault == "given":
        monkeypatch.setattr(gpu.LayerStack, "forward", wrong_angles)
    folder = write_safetensors(tiny_model("arcee", layers=2), tmp_path)
    config = EngineConfig(model_path=folder, cache_lens=48, cpu_infer=1)
    with pytest.raises(UnsupportedError, match="layers 0 to 1 differ, joined, from what they compute one by one"):
        static_engine(config, hardware=fake_hardware(dtype=torch.bfloat16))


def test_a_stack_that_does_not_widen_rows_is_held_to_their_rounding() -> None:
    """Norms of some families (nemotron_h) give fp32 of bf16 where a layer runs alone."""
    given, want = (torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    assert stack_check._off(want.bfloat16(), want, given) is None
    assert stack_check._off((want + 0.2 * (want - given)).bfloat16(), want, given) is not None
    assert stack_check._off(want + 1e-3 * (want - given), want, given) is not None  # both fp32
