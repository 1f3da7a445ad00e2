"""DeepSeek models on a made-up GPU whose prefill steps expand keys: logits against `transformers`, and who chooses.

All compute in fp32, so that the tolerance is that of tests/engine/gpu/test_gpu.py.
"""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import build_engine, plan_model
from ktransformers.errors import ConfigError
from ktransformers.operators.attention import latent_gpu as gpu_latent
from ktransformers.operators.attention import mla
from ktransformers.operators.attention.latent_materialization import EXPANSION_NBYTES, Rates
from ktransformers.scheduler.records import StepPlan
from ktransformers.system.shipped_rules import shipped_path
from tests.support.engines import fake_flashinfer
from tests.support.engines.fake_gpus import fake_hardware
from tests.support.engines.gpu_engines import sequence_start, step_row
from tests.support.engines.one_sequence import StaticEngine, static_engine
from tests.support.models.agreement import TOLERANCE, prompt
from tests.support.models.tiny_models import tiny_model, write_safetensors

pytest.importorskip("triton")

RULE = """
- match: {{name: '^model\\.layers\\..*\\.self_attn$'}}
  replace:
    class: ktransformers.operators.attention.KDeepseekV2Attention
    kwargs: {{generate_device: cuda, prefill_device: cuda, absorb_for_prefill: {}}}
"""
CHUNKS = [(0, 18), (18, 23), (23, 24)]
AT_ONCE = Rates(launch_us=0.0, dense=1e9, materialization=1e9)  # expands whatever it may
SOME = Rates(absorbed=220.0, expanded=340.0, dense=1e9, materialization=1400.0, launch_us=0.0)
"""With a rank of 128: 18 rows of 18 positions and not 5 of 23. Saved are 272 / 220 - 80 / 340 units for each of 171
and 105 pairs, and a position costs 8192 / 1400 units."""


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the calls of the kernel on expanded keys."""
    seen: list[int] = []
    kernel = gpu_latent.materialized_attention

    def counted(*args):  # type: ignore[no-untyped-def]
        seen.append(int(args[2][:, 1].sum()))
        return kernel(*args)

    monkeypatch.setattr(gpu_latent, "materialized_attention", counted)
    return seen


def rules_with(absorb: bool, path: Path, device: str = "cuda") -> Path:
    """The family's own rules behind one that says how its attention prefills."""
    rules = path / "rules.yaml"
    shipped = shipped_path("DeepSeek-V3-Chat.yaml").read_text()
    rules.write_text(RULE.format(str(absorb).lower()).replace("cuda", device) + shipped)
    return rules


def engine_of(path: Path, absorb: bool | None = None, attention_backend: str = "auto") -> StaticEngine:
    rules = None if absorb is None else rules_with(absorb, path)
    config = EngineConfig(
        model_path=path, cache_lens=60, cpu_infer=1, optimize_config_path=rules, attention_backend=attention_backend,
        use_cuda_graph=False,
    )  # fmt: skip
    return static_engine(config, hardware=fake_hardware())


def logits(engine: StaticEngine, ids: list[int]) -> torch.Tensor:
    return torch.cat([engine.runner.forward(ids[a:b], a, range(b - a)).clone() for a, b in CHUNKS])


@pytest.mark.exhaustive
@pytest.mark.every(3)
@pytest.mark.parametrize("model_type", ["deepseek_v2", pytest.param("deepseek_v3", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("absorb", "rates", "expanded"),
    [(False, Rates(), [18, 18, 5, 5]), (None, SOME, [18, 18]), (True, AT_ONCE, []), (None, AT_ONCE, [18, 18, 5, 5])],
    ids=["forced", "some", "absorbed", "all"],
)
def test_chunks_agree_with_transformers(
    absorb: bool | None,
    rates: Rates,
    expanded: list[int],
    model_type: str,
    tmp_path: Path,
    taken: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A chunk, a short one behind it, and a token: two layers each."""
    monkeypatch.setattr(mla, "Rates", lambda: rates)
    model = tiny_model(model_type, seed=1, kv_lora_rank=128)
    ids = prompt(model.config.vocab_size)
    write_safetensors(model, tmp_path)
    with closing(engine_of(tmp_path, absorb)) as engine:
        taken.clear()
        got = logits(engine, ids)
    assert taken == expanded
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


def test_sequences_share_steps(tmp_path: Path, taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt beside two sequences that decode, on scattered pages; then all decode: greedy tokens agree."""
    monkeypatch.setattr(mla, "Rates", lambda: AT_ONCE)
    model = tiny_model("deepseek_v3", seed=1, kv_lora_rank=128)
    write_safetensors(model, tmp_path)
    ids = prompt(model.config.vocab_size)
    prompts = [ids[:5], ids[5:8], ids[:18]]
    tables = [[9, 2, 7], [4, 0], [3, 11, 1, 6, 10]]
    config = EngineConfig(model_path=tmp_path, cache_lens=64, cpu_infer=1, use_cuda_graph=False)
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    with closing(build_engine(config, page_size=4, max_batch_size=4, hardware=fake_hardware())) as paged:
        taken.clear()

        def step(number: int, rows: list[tuple[int, list[int], int]]) -> None:
            starts = [sequence_start(i, prompts[i]) for i, _, start in rows if start == 0]
            plan = [step_row(i, part, start, tables[i]) for i, part, start in rows]
            done = paged.executor.execute(StepPlan(step_id=number, ended=[], starts=starts, rows=plan))
            for (i, _, _), result in zip(rows, done.results, strict=True):
                tokens[i].append(result.token_id)

        step(1, [(0, prompts[0], 0), (1, prompts[1], 0)])
        step(2, [(0, tokens[0][-1:], 5), (2, prompts[2], 0), (1, tokens[1][-1:], 3)])
        step(3, [(i, tokens[i][-1:], len(prompts[i]) + len(tokens[i]) - 1) for i in range(3)])
    assert taken == [8, 8, 18, 18]
    for i, count in enumerate((3, 3, 2)):
        given = torch.tensor([prompts[i]])
        want = model.generate(given, max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None)
        assert tokens[i] == want[0, len(prompts[i]) :].tolist()


@pytest.mark.exhaustive
def test_flashinfer_attends_where_keys_are_not_expanded(
    tmp_path: Path, taken: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """auto: the long chunk is expanded; flashinfer: none is, and a rule that wants it expanded is an error."""
    calls = fake_flashinfer.install(monkeypatch)
    model = tiny_model("deepseek_v3", seed=1, kv_lora_rank=512, qk_rope_head_dim=64)
    write_safetensors(model, tmp_path)
    ids = prompt(model.config.vocab_size)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    # FlashInfer at 600: 18 rows of 18 positions and not 5 of 23
    monkeypatch.setattr(mla, "Rates", lambda: Rates(expanded=340.0, dense=1e9, materialization=4000.0, launch_us=0.0))
    for backend, expanded, runs in (("auto", [18, 18], 2), ("flashinfer", [], 4)):
        with caplog.at_level(logging.INFO), closing(engine_of(tmp_path, attention_backend=backend)) as engine:
            taken.clear()
            calls.runs.clear()
            got = logits(engine, ids)
        assert (taken, len(calls.runs)) == (expanded, runs)
        assert (got - want).abs().max() <= TOLERANCE * want.abs().max()
    with pytest.raises(ConfigError, match="absorb_for_prefill: false, and FlashInfer attends absorbed"):
        engine_of(tmp_path, False, attention_backend="flashinfer")


def test_the_workspace_is_in_the_plan(tmp_path: Path) -> None:
    write_safetensors(tiny_model("deepseek_v3", seed=1), tmp_path)
    config = EngineConfig(model_path=tmp_path, cache_lens=64, cpu_infer=1)
    plan = plan_model(config, hardware=fake_hardware())
    assert plan.extra_bytes["workspace"]["cuda:0"] >= (512 << 20) + EXPANSION_NBYTES


def test_the_cpu_says_that_it_absorbs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mla._log_absorbed.cache_clear()
    write_safetensors(tiny_model("deepseek_v2", seed=1), tmp_path)
    rules = rules_with(False, tmp_path, "cpu")
    with caplog.at_level(logging.INFO):
        plan_model(EngineConfig(model_path=tmp_path, cpu_infer=1, optimize_config_path=rules))
    assert caplog.text.count("absorb_for_prefill: false has no effect on the CPU") == 1
