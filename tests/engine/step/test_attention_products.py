"""`--attention_products kv` on a made-up GPU in fp32: logits against torch with rounded queries, keys and values; and
what it is refused for. And on the CPU, of a cache of bf16.

Queries are rounded to the same codes on both sides but where a number lies on the border of two, which in these cases
none does.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from ktransformers.cache.paged import LayerShape
from ktransformers.config import EngineConfig
from ktransformers.engine.load import stages
from ktransformers.engine.load.builder import plan_model
from ktransformers.engine.plan import kv_types
from ktransformers.engine.plan.kv_types import KvTypes
from ktransformers.errors import ConfigError
from ktransformers.kernels import reference
from ktransformers.kernels.cpu import Isa, WorkerPool
from ktransformers.kernels.triton.attention import launch as attention_launch
from ktransformers.operators.attention import gqa
from tests.engine.gpu.test_kv_types_gpu import CHUNKS, KV_TYPES, rounded_attention
from tests.support.engines.fake_gpus import fake_hardware
from tests.support.engines.one_sequence import static_engine
from tests.support.models.agreement import TOLERANCE, prompt
from tests.support.models.tiny_models import tiny_model, write_safetensors

pytest.importorskip("triton")

PREFILL_ROWS = 18  # of the first chunk: more than the kernel of few rows takes


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each launch of the prefill kernel: whether it multiplies codes."""
    seen: list[bool] = []
    kernel: Any = attention_launch.prefill_kernel  # type: ignore[attr-defined]

    class Watched:
        def __getitem__(self, grid: Any) -> Any:
            launch = kernel[grid]

            def run(*args: Any, **constants: Any) -> None:
                seen.append(constants["QUANTIZED_ATTENTION"])
                launch(*args, **constants)

            return run

    monkeypatch.setattr(attention_launch, "prefill_kernel", Watched())
    return seen


def config_of(path: Path, **settings: Any) -> EngineConfig:
    given = {"attention_products": "kv", "kv_type": "int8", "cache_lens": 32, "use_cuda_graph": False} | settings
    return EngineConfig(model_path=path, self_check=False, **({"cpu_infer": 1} | given))


def logits_of(path: Path, ids: list[int], **settings: Any) -> torch.Tensor:
    with closing(static_engine(config_of(path, **settings), hardware=fake_hardware())) as engine:
        return torch.cat([engine.runner.forward(ids[a:b], a, range(b - a)).clone() for a, b in CHUNKS])


def attention_of_codes(
    dtype: torch.dtype, module: Any, query: torch.Tensor, *args: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """`rounded_attention` with the queries of the first chunk rounded too."""
    codes, scales = reference.quantize_kv(query[:, :, :PREFILL_ROWS], dtype)
    assert scales is not None
    rows = torch.cat((codes.float() * scales, query[:, :, PREFILL_ROWS:]), dim=2)
    return rounded_attention(dtype, module, rows, *args, **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kv_type", ["int8", pytest.param("fp8", marks=pytest.mark.exhaustive)])
def test_logits_are_those_of_rounded_queries(kv_type: str, tmp_path: Path, launched: list[bool]) -> None:
    model = tiny_model("qwen3_moe", seed=1)
    write_safetensors(model, tmp_path)
    ids = prompt(model.config.vocab_size)
    AttentionInterface.register(f"codes of {kv_type}", functools.partial(attention_of_codes, KV_TYPES[kv_type]))
    model.config._attn_implementation = f"codes of {kv_type}"
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    got = logits_of(tmp_path, ids, kv_type=kv_type)
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()
    assert launched == [True] * model.config.num_hidden_layers
    plain = logits_of(tmp_path, ids, kv_type=kv_type, attention_products="bf16")
    assert (plain - want).abs().max() > TOLERANCE * want.abs().max()
    assert launched[model.config.num_hidden_layers :] == [False] * model.config.num_hidden_layers


@pytest.mark.exhaustive
def test_modules_that_are_not_recognized(tmp_path: Path, launched: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """They call the attention function themselves; the kernel is given the same, windows and sinks included."""
    model = tiny_model("gpt_oss", seed=1)
    write_safetensors(model, tmp_path)
    ids = prompt(model.config.vocab_size)
    want = logits_of(tmp_path, ids)
    monkeypatch.setattr(gqa, "recognize_attention", lambda module: None)
    got = logits_of(tmp_path, ids)
    assert launched == [True] * 2 * model.config.num_hidden_layers
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


@pytest.mark.exhaustive
def test_latent_attention_stays_as_it_is(
    tmp_path: Path, launched: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("deepseek_v3", seed=1)
    write_safetensors(model, tmp_path)
    ids = prompt(model.config.vocab_size)
    with caplog.at_level(logging.WARNING):
        got = logits_of(tmp_path, ids)
    said = "--attention_products kv: all layers multiply numbers, not codes (latent attention)"
    assert caplog.messages.count(said) == 1
    assert not any(launched)
    assert torch.equal(got, logits_of(tmp_path, ids, attention_products="bf16"))


def test_it_is_part_of_what_tokens_depend_on(tmp_path: Path) -> None:
    write_safetensors(tiny_model("qwen3_moe", seed=1), tmp_path)
    found = []
    for products in ("bf16", "kv"):
        config = config_of(tmp_path, attention_products=products)
        with closing(static_engine(config, hardware=fake_hardware())) as engine:
            found.append(engine.identity)
    assert found[1].other_arithmetic(found[0]) == "attention_products was nothing and is kv"
    assert found[0].digest != found[1].digest


def test_where_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--attention_products kv multiplies what .* keeps, and --kv_type is auto"):
        EngineConfig(model_path=tmp_path, attention_products="kv").resolved()
    with pytest.raises(ConfigError, match="--attention_products int8 is not one of bf16, kv"):
        EngineConfig(model_path=tmp_path, attention_products="int8", kv_type="int8").resolved()
    write_safetensors(tiny_model("qwen3_moe", seed=1), tmp_path)
    with pytest.raises(
        ConfigError, match="--attention_products kv, of --kv_type int8: no attention of this model runs"
    ):
        plan_model(config_of(tmp_path), hardware=fake_hardware(0))
    with pytest.raises(ConfigError, match=r"--attention_backend flashinfer: .* scales of --kv_type int8"):
        plan_model(config_of(tmp_path, attention_backend="flashinfer"), hardware=fake_hardware())


def test_what_stays_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """On a GPU without products of e4m3, and on the CPU."""
    monkeypatch.setattr(kv_types, "why_no_quantized_attention", lambda dtype, device, widths: "this GPU has 8.0")
    made, gpu = KvTypes("fp8", {}, "kv"), LayerShape(2, 64, 64, place="cuda:0")
    shapes = made.applied([gpu, gpu, replace(gpu, place="cpu"), LayerShape.without_pages()])
    assert [shape.kept_products for shape in shapes] == 4 * [False]
    with caplog.at_level(logging.WARNING):
        made.report(shapes)
    assert caplog.messages == [
        "--attention_products kv: layers 0-1 multiply numbers, not codes (this GPU has 8.0)",
        "--attention_products kv: layers 2 multiply numbers, not codes (on the CPU)",
    ]


def cpu_logits(path: Path, ids: list[int], borders: Sequence[int], **settings: Any) -> torch.Tensor:
    """Of a whole model on the CPU, in steps of ids[a:b] for neighbouring borders."""
    given = {"kv_type": "bf16", "use_cuda": False, "cpu_infer": 2} | settings
    with closing(static_engine(config_of(path, **given), hardware=fake_hardware(0))) as engine:
        return torch.cat([engine.runner.forward(ids[a:b], a, range(b - a)).clone() for a, b in pairwise(borders)])


@pytest.mark.every(3)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "gemma2"])
def test_tokens_on_the_cpu_do_not_depend_on_chunks(family: str, tmp_path: Path) -> None:
    """In layers that are one native call and in others; windows, sinks and a softcap included."""
    model = tiny_model(family, seed=1)
    write_safetensors(model, tmp_path)
    ids = prompt(model.config.vocab_size)
    end = len(ids)
    whole = cpu_logits(tmp_path, ids, (0, end))
    for borders in ((0, 5, 6, end), (0, 17, end), range(end + 1)):
        assert torch.equal(cpu_logits(tmp_path, ids, borders), whole), borders
    plain = cpu_logits(tmp_path, ids, (0, end), attention_products="bf16")
    assert not torch.equal(plain, whole)
    assert float((plain - whole).abs().max()) < 0.05 * float(plain.abs().max())


def test_what_stays_on_the_cpu_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_safetensors(tiny_model("deepseek_v3", seed=1), tmp_path)
    with caplog.at_level(logging.WARNING):
        plan_model(config_of(tmp_path, kv_type="bf16", use_cuda=False), hardware=fake_hardware(0))
    assert "--attention_products kv: all layers multiply as without it (latent attention)" in caplog.messages
    caplog.clear()
    cpu, gpu = LayerShape(2, 64, 64), LayerShape(2, 64, 64, place="cuda:0", row_dtype=torch.bfloat16)
    made = KvTypes("bf16", {3: "compressed attention"}, "kv")
    shapes = made.applied([cpu, replace(cpu, key_dim=640), gpu, cpu, LayerShape.without_pages()])
    assert [shape.bf16_products for shape in shapes] == [True, False, False, False, False]
    with caplog.at_level(logging.WARNING):
        made.report(shapes)
    assert [line for line in caplog.messages if "products" in line] == [
        "--attention_products kv: layers 1 multiply as without it (keys of more than 512 dimensions)",
        "--attention_products kv: layers 2 multiply as without it (a GPU's products are of bf16)",
        "--attention_products kv: layers 3 multiply as without it (what is kept is float32)",
    ]


def test_a_processor_without_the_instruction(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is said, and gives the same logits."""
    model = tiny_model("qwen3_moe", seed=1)
    write_safetensors(model, tmp_path)
    ids = prompt(model.config.vocab_size)
    want = cpu_logits(tmp_path, ids, (0, len(ids)))
    with pytest.MonkeyPatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(stages, "WorkerPool", lambda threads, planes: WorkerPool(threads, Isa.SCALAR, planes=planes))
        got = cpu_logits(tmp_path, ids, (0, len(ids)))
    assert torch.equal(got, want)
    assert any("scalar has no products of bf16 (AVX512-BF16 has)" in line for line in caplog.messages)
