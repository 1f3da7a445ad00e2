"""Keys and values in 8 bits on a made-up GPU in fp32: logits against torch and against our own engine on the CPU.

Both keep the same codes but where a number lies on the border of two that an fp32 sum in another order carries across;
which order that is depends on the processor. So logits are compared for the first prompt whose codes are all alike.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import build_engine, plan_model
from ktransformers.errors import ConfigError
from ktransformers.kernels import reference
from ktransformers.operators.attention import latent_gpu, mla
from ktransformers.operators.attention.latent_materialization import Rates
from ktransformers.scheduler.records import StepPlan
from tests.engine.gpu.test_sparse_gpu import BLOCK_TYPE, model_of
from tests.support.checks.products import product
from tests.support.engines import fake_flashinfer
from tests.support.engines.fake_gpus import FakeGraphs, fake_hardware
from tests.support.engines.gpu_engines import sequence_start, step_row
from tests.support.engines.one_sequence import StaticEngine, static_engine
from tests.support.models.agreement import TOLERANCE, prompt
from tests.support.models.tiny_models import tiny_model, write_safetensors

pytest.importorskip("triton")

KV_TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
CHUNKS = [(0, 18), (18, 23), (23, 24)]
AT_ONCE = Rates(launch_us=0.0, dense=1e9, materialization=1e9)  # expands whatever it may


Seen = tuple[torch.Tensor, list[torch.Tensor]]
"""Logits, and the codes of keys and values."""


def seen_of(path: Path, ids: list[int], num_gpus: int, **settings: Any) -> Seen:
    """In chunks, of which the last is a decode step."""
    graphs = FakeGraphs()
    config = EngineConfig(model_path=path, cache_lens=32, cpu_infer=1, self_check=False, **settings)
    with closing(static_engine(config, hardware=fake_hardware(num_gpus, graphs=graphs))) as engine:
        kept = engine.runner.cache.tensors()
        assert {kept[name].dtype for name in kept if name.endswith(".keys")} == {KV_TYPES[config.kv_type]}
        got = torch.cat([engine.runner.forward(ids[a:b], a, range(b - a)).clone() for a, b in CHUNKS])
        codes = [kept[name][: len(ids)].float() for name in sorted(kept) if name.endswith((".keys", ".values"))]
    assert bool(graphs.replays) is (num_gpus > 0 and "use_cuda_graph" not in settings)
    return got, codes


def check_alike(vocab_size: int, run: Callable[[list[int]], tuple[Seen, Seen]]) -> None:
    """run: what is seen of a prompt, and what is wanted."""
    for shift in range(0, 60, 10):
        (got, codes), (want, others) = run([(token + shift) % vocab_size for token in prompt(vocab_size)])
        if all(torch.equal(*pair) for pair in zip(codes, others, strict=True)):
            assert (got - want).abs().max() <= TOLERANCE * want.abs().max()
            return
    raise AssertionError("there are other codes for each prompt")


def both(path: Path, kv_type: str) -> Callable[[list[int]], tuple[Seen, Seen]]:
    """On a GPU, and on the CPU."""
    return lambda ids: (
        seen_of(path, ids, 1, kv_type=kv_type, use_cuda_graph=False),
        seen_of(path, ids, 0, kv_type=kv_type),
    )


def rounded_attention(
    dtype: torch.dtype,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    noted: list[torch.Tensor] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of one sequence, [1, heads, T, D], to keys and values that were kept as `dtype`.

    noted: takes their codes, [T, heads, D].
    """
    kept = []
    for rows in (key, value):
        codes, scales = reference.quantize_kv(rows, dtype)
        assert scales is not None
        if noted is not None:
            noted.append(codes[0].transpose(0, 1).float())
        kept.append((codes.float() * scales).repeat_interleave(query.shape[1] // rows.shape[1], dim=1))
    scores = query @ kept[0].transpose(2, 3) * options["scaling"]
    is_later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(is_later, float("-inf")).softmax(dim=-1)
    return (weights @ kept[1]).transpose(1, 2), None


@pytest.mark.exhaustive
@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_logits_are_those_of_rounded_keys_and_values(kv_type: str, tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", seed=1)
    write_safetensors(model, tmp_path)
    noted = list[torch.Tensor]()
    AttentionInterface.register(
        f"kept as {kv_type}", functools.partial(rounded_attention, KV_TYPES[kv_type], noted=noted)
    )
    model.config._attn_implementation = f"kept as {kv_type}"

    def run(ids: list[int]) -> tuple[Seen, Seen]:
        noted.clear()
        with torch.no_grad():
            want = model(torch.tensor([ids])).logits[0]
        return seen_of(tmp_path, ids, 1, kv_type=kv_type), (want, list(noted))

    check_alike(model.config.vocab_size, run)


@pytest.mark.exhaustive
@pytest.mark.every(3)
@product(strength=1, model_type=["gpt_oss", "deepseek_v3", BLOCK_TYPE, "glm_moe_dsa"], kv_type=[*KV_TYPES])
def test_families_agree_with_the_cpu(model_type: str, kv_type: str, tmp_path: Path) -> None:
    """Windows and sinks, latents, and positions that were chosen for heads and for rows."""
    sparse = (BLOCK_TYPE, "glm_moe_dsa")
    model = model_of(model_type) if model_type in sparse else tiny_model(model_type, seed=1)
    write_safetensors(model, tmp_path)
    check_alike(model.config.vocab_size, both(tmp_path, kv_type))


@pytest.fixture
def expanded(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The rotated keys of all calls of the kernel on expanded keys."""
    seen: list[torch.Tensor] = []
    kernel: Callable[..., None] = latent_gpu.materialized_attention  # type: ignore[attr-defined]

    def noted(*args: Any) -> None:
        seen.append(args[3])
        kernel(*args)

    monkeypatch.setattr(mla, "Rates", lambda: AT_ONCE)
    monkeypatch.setattr(latent_gpu, "materialized_attention", noted)
    return seen


@pytest.mark.exhaustive
@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_expanded_keys_are_made_of_what_is_kept(kv_type: str, tmp_path: Path, expanded: list[torch.Tensor]) -> None:
    model = tiny_model("deepseek_v3", seed=1, kv_lora_rank=128)
    write_safetensors(model, tmp_path)
    check_alike(model.config.vocab_size, both(tmp_path, kv_type))
    assert {keys.dtype for keys in expanded} == {torch.float32}


@product(strength=1, model_type=["qwen3_moe", "deepseek_v3"], kv_type=[*KV_TYPES])
def test_sequences_share_steps(model_type: str, kv_type: str, tmp_path: Path, expanded: list[torch.Tensor]) -> None:
    """Prompts on scattered pages, one in two parts beside one that decodes: the tokens are the CPU's."""
    values = {"kv_lora_rank": 128} if model_type == "deepseek_v3" else {}
    model = tiny_model(model_type, seed=1, **values)
    write_safetensors(model, tmp_path)
    ids, tables = prompt(model.config.vocab_size), [[9, 2, 7], [4, 0]]
    steps = [
        [step_row(0, ids[:5], 0, tables[0]), step_row(1, ids[5:12], 0, tables[1])],
        [step_row(0, ids[12:18], 5, tables[0]), step_row(1, [ids[0]], 7, tables[1])],
        [step_row(0, [ids[1]], 11, tables[0])],
    ]
    tokens: list[list[Any]] = [[], []]
    for found, num_gpus in zip(tokens, (1, 0), strict=True):
        config = EngineConfig(
            model_path=tmp_path, cache_lens=64, cpu_infer=1, kv_type=kv_type, self_check=False,
            use_cuda_graph=False if num_gpus else None,
        )  # fmt: skip
        paged = build_engine(config, page_size=4, max_batch_size=2, hardware=fake_hardware(num_gpus))
        with closing(paged):
            for number, rows in enumerate(steps):
                starts = [sequence_start(row.run_id, [*row.token_ids]) for row in rows if row.start == 0]
                plan = StepPlan(step_id=number, ended=[], starts=starts, rows=rows)
                found.append([result.token_id for result in paged.executor.execute(plan).results])
    assert tokens[0] == tokens[1]
    assert bool(expanded) is (model_type == "deepseek_v3")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    write_safetensors(tiny_model("qwen3_moe", seed=1, head_dim=64), tmp_path)
    return tmp_path


def engine_of(path: Path, backend: str = "auto") -> StaticEngine:
    config = EngineConfig(model_path=path, cache_lens=60, cpu_infer=1, attention_backend=backend, kv_type="int8")
    return static_engine(config, hardware=fake_hardware())


@pytest.mark.exhaustive
def test_flashinfer_is_not_used(saved: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    calls = fake_flashinfer.install(monkeypatch)
    with caplog.at_level(logging.INFO), closing(engine_of(saved)) as engine:
        engine.runner.forward(prompt(160), 0, [0])
    assert not calls.runs
    said = "attention on GPUs: Triton (FlashInfer is not used: it does not read the scales of --kv_type int8)"
    assert caplog.messages.count(said) == 1
    assert "--kv_type int8:" not in caplog.text
    with pytest.raises(ConfigError, match=r"--attention_backend flashinfer: .* scales of --kv_type int8"):
        engine_of(saved, "flashinfer")


def test_the_plan_counts_them(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers with two heads of 64 columns: half the bytes of bf16, and 4 for each scale."""
    fake_flashinfer.install(monkeypatch)
    found = []
    for kv_type in ("auto", "int8"):
        config = EngineConfig(model_path=saved, cache_lens=64, kv_type=kv_type)
        found.append(plan_model(config, hardware=fake_hardware(dtype=torch.bfloat16)).extra_bytes)
    assert found[0]["kv cache"] == {"cuda:0": 2 * 64 * 2 * (64 + 64) * 2}
    assert found[1]["kv cache"] == {"cuda:0": 2 * 64 * 2 * (64 + 64 + 2 * 4)}
    assert ["flashinfer" in extra for extra in found] == [True, False]
