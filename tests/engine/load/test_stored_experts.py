"""Models whose experts are read from files while they run: the same tokens and logits as with all of them in RAM."""

from __future__ import annotations

import gc
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.convert.pack_model import pack_model
from ktransformers.core import SamplingParams
from ktransformers.engine.api.llm import LLM
from ktransformers.engine.load.builder import Hardware, build_engine, plan_model
from ktransformers.engine.verify import self_check
from ktransformers.errors import CapacityError, ConfigError, EngineError, UnsupportedError, WeightError
from ktransformers.kernels.cpu import ExpertStore
from ktransformers.kernels.types import QuantType
from ktransformers.operators.expert_files import ExpertFiles
from ktransformers.optimize.expert_slots import EXPERT_SLOTS
from ktransformers.optimize.machine import Machine
from ktransformers.profiling import load
from ktransformers.profiling.records import PARTS
from ktransformers.profiling.report import write_report
from tests.support.engines.one_sequence import StaticEngine, static_engine
from tests.support.gguf.writer import write_gguf
from tests.support.models.demo import DEMO_GGUF
from tests.support.models.tiny_models import tiny_model, write_safetensors

MIB = 2**20
SOME = 5 * MIB / 2**30
"""GiB for more than half of the bundled model's experts, which take 8 MiB."""

PROMPTS = (
    "Once upon a time there was a small town by the sea, and in this town there lived a man who had a boat. " * 3,
    "Count: 1 2 3 1 2 3 1 2 3",
    "The capital of France",
)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the bundled model, which a test may change."""
    return Path(shutil.copy(DEMO_GGUF, tmp_path_factory.mktemp("demo") / "demo.gguf"))


def params(max_tokens: int = 16) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=max_tokens, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]


def answers(llm: LLM, prompts: Sequence[str] = PROMPTS) -> list[list[int]]:
    return [list(output.token_ids) for output in llm.generate(list(prompts), params()[: len(prompts)])]


def opened(model: Path, **options: object) -> LLM:
    settings = {"cpu_infer": 1, "cache_lens": 2048, "chunk_size": 16, "speculative": "off"}
    return LLM(model, **{**settings, **options})  # type: ignore[arg-type]


def files_of(llm: LLM) -> ExpertFiles:
    files = llm.engine.expert_files
    assert files is not None
    return files


@pytest.fixture(scope="module")
def expected(demo: Path) -> list[list[int]]:
    with opened(demo) as llm:
        assert llm.engine.expert_files is None
        return answers(llm)


@pytest.mark.parametrize("gib", [0.0, SOME, 3.5 * MIB / 2**30])
def test_the_bundled_model_answers_as_with_all_in_ram(demo: Path, expected: list[list[int]], gib: float) -> None:
    """A batch of three, whose first prompt takes several chunks; again, from the prefix cache; and one alone."""
    with opened(demo, experts_from="disk", experts_ram=gib) as llm:
        assert answers(llm) == expected
        assert answers(llm) == expected
        assert answers(llm, PROMPTS[:1]) == expected[:1]
        stats = files_of(llm).store.stats()
        assert stats.bytes_read > 0
        assert stats.read_errors == 0
        assert stats.hits > 0
        assert (stats.num_slots == stats.num_records) == (not gib)
        if not gib:
            assert stats.misses <= stats.num_records


@pytest.mark.parametrize("drafter", ["ngram", "mtp"])
def test_draft_tokens_change_nothing(demo: Path, expected: list[list[int]], drafter: str) -> None:
    settings = {"speculative": "ngram"} if drafter == "ngram" else {"draft_model": demo, "speculative": "draft"}
    with opened(demo, experts_from="disk", experts_ram=SOME, **settings) as llm:
        assert answers(llm) == expected


def test_a_packed_file_is_read_in_the_place_of_the_model(demo: Path, expected: list[list[int]], tmp_path: Path) -> None:
    model = Path(shutil.copy(demo, tmp_path / "model.gguf"))
    packed = pack_model(EngineConfig(gguf_path=model), None, lambda name, nbytes: _Silent()).path
    with opened(model, experts_from="disk", experts_ram=SOME) as llm:
        assert files_of(llm).paths == (packed,)
        assert answers(llm) == expected
    other = tmp_path / "other.gguf"
    write_gguf(tiny_model("qwen3_moe", hidden=256), other, QuantType.Q4_K, QuantType.Q8_0)
    packed.rename(tmp_path / "other.experts.kt")
    with pytest.raises(ConfigError, match=r"experts of another model \(model.gguf\)"):
        plan_model(EngineConfig(gguf_path=other, experts_from="disk"))


def test_matrices_that_are_stored_transposed_need_a_packed_file(tmp_path: Path) -> None:
    folder = write_safetensors(tiny_model("gpt_oss", hidden=256), tmp_path)
    config = EngineConfig(model_path=folder, cache_lens=64, cpu_infer=1, experts_from="disk")
    with pytest.raises(UnsupportedError, match=r"F32 and has to be laid out anew, by rows; pack the model first"):
        plan_model(config)


def test_a_link_to_a_packed_file_that_is_gone_is_told(
    demo: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "model.gguf"
    model.symlink_to(demo)
    (tmp_path / "model.experts.kt").symlink_to(tmp_path / "gone.kt")
    assert plan_model(EngineConfig(gguf_path=model, experts_from="disk")).stored_experts
    (said,) = [one.getMessage() for one in caplog.records if "which is not there" in one.getMessage()]
    assert str(tmp_path / "gone.kt") in said


class _Silent:
    def advance(self, nbytes: int) -> None: ...

    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *error: object) -> None: ...


def logits_of(engine: StaticEngine, vocab_size: int) -> list[torch.Tensor]:
    """A prompt, a step of several rows and steps of one token."""
    ids = torch.randint(vocab_size, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    found = [engine.runner.forward(ids[:24], 0, list(range(24))), engine.runner.forward(ids[24:30], 24, [5])]
    return [*found, *(engine.runner.forward([ids[at]], at, [0]) for at in range(30, 40))]


@pytest.mark.parametrize(
    ("family", "experts"),
    [("gpt_oss", QuantType.MXFP4), ("deepseek_v3", QuantType.Q4_K), ("qwen2_moe", QuantType.Q6_K), ("mixtral", None)],
)
def test_families_have_the_same_logits(family: str, experts: QuantType | None, tmp_path: Path) -> None:
    """GGUF, with biases and shared experts; and safetensors as they are."""
    model = tiny_model(family, hidden=256)
    if experts is None:
        config = EngineConfig(model_path=write_safetensors(model, tmp_path), cache_lens=64, cpu_infer=2)
    else:
        write_gguf(model, tmp_path / "model.gguf", experts, QuantType.Q8_0)
        config = EngineConfig(gguf_path=tmp_path / "model.gguf", cache_lens=64, cpu_infer=2)
    config = replace(config, chunk_size=16, self_check=False)
    engine = static_engine(config)
    wanted = [one.clone() for one in logits_of(engine, model.config.vocab_size)]
    engine.close()
    least = replace(config, experts_from="disk", experts_ram=1e-6)
    engine = static_engine(least)
    slots, stored = engine.plan.extra_bytes[EXPERT_SLOTS]["cpu"], engine.plan.stored_experts
    assert 0 < slots <= stored
    for one, want in zip(logits_of(engine, model.config.vocab_size), wanted, strict=True):
        assert torch.equal(one, want)
    stats = engine.expert_files.store.stats()
    assert stats.misses > 0
    engine.close()


def test_what_has_to_be_converted_needs_a_packed_file(tmp_path: Path) -> None:
    folder = write_safetensors(tiny_model("qwen3_moe", hidden=256), tmp_path)
    config = EngineConfig(model_path=folder, cache_lens=64, cpu_infer=1, cpu_quant="q4_0", experts_from="disk")
    with pytest.raises(
        UnsupportedError, match=r"F32 and has to be made Q4_0; .* pack MODEL, with the same --cpu_quant"
    ):
        plan_model(config)
    pack_model(config, None, lambda name, nbytes: _Silent())
    assert plan_model(config).stored_experts > 0
    with pytest.raises(ConfigError, match="packed with --cpu_quant q4_0"):
        plan_model(replace(config, cpu_quant="q8_0"))


def test_a_read_that_fails_ends_its_answers_and_nothing_else(
    demo: Path, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with opened(demo, experts_from="disk", experts_ram=SOME) as llm:
        store = files_of(llm).store
        store.fill(wait=True)  # which the next read is not to be of
        store.handle._fail_next(1)
        with pytest.raises(EngineError, match=r"demo\.gguf"):
            answers(llm)
        assert "the answers that were in it end" in caplog.text
        assert answers(llm) == expected
        assert files_of(llm).store.stats().read_errors == 1


def test_a_file_that_changes_is_an_error_until_it_is_as_it_was(demo: Path, expected: list[list[int]]) -> None:
    was = demo.stat()
    with opened(demo, experts_from="disk", experts_ram=3.5 * MIB / 2**30) as llm:
        assert answers(llm) == expected
        os.utime(demo, ns=(was.st_atime_ns, was.st_mtime_ns + 1))
        with pytest.raises(EngineError, match=r"demo\.gguf"):
            answers(llm)
        os.utime(demo, ns=(was.st_atime_ns, was.st_mtime_ns))
        assert answers(llm) == expected


def test_a_file_that_cannot_be_read_while_loading_is_a_weight_error(
    demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = ExpertFiles.open

    def failing(self: ExpertFiles, top_k: int) -> None:
        opening(self, top_k)
        self.store.handle._fail_next(1)

    monkeypatch.setattr(ExpertFiles, "open", failing)
    with pytest.raises(WeightError, match=r"demo\.gguf"):
        build_engine(EngineConfig(gguf_path=demo, cpu_infer=1, cache_lens=64, experts_from="disk", experts_ram=SOME))


def test_files_are_closed_with_the_engine(demo: Path) -> None:
    def num_open() -> int:
        return sum(os.path.realpath(f"/proc/self/fd/{fd}") == str(demo) for fd in os.listdir("/proc/self/fd"))

    gc.collect()
    before = num_open()
    with opened(demo, experts_from="disk") as llm:
        assert num_open() > before
        assert "found theirs in RAM" in files_of(llm).describe()
    gc.collect()
    assert num_open() == before


def test_a_profile_has_what_was_found_read_and_waited_for(demo: Path, tmp_path: Path) -> None:
    with opened(demo, experts_from="disk", experts_ram=1e-6, profile=tmp_path / "profile") as llm:
        files_of(llm).store.fill(wait=True)  # which is of no step
        files_of(llm).take()
        before = files_of(llm).store.stats()
        answers(llm)
        after = files_of(llm).store.stats()
    profile = load(tmp_path / "profile")
    found = profile.steps.read("stored_hits", "stored_misses", "stored_bytes", "stored_wait_us", "parts_us")
    sums = {name: float(np.nansum(found[name])) for name in ("stored_hits", "stored_misses", "stored_bytes")}
    assert sums["stored_hits"] == after.hits - before.hits
    assert sums["stored_misses"] == after.misses - before.misses > 0
    assert sums["stored_bytes"] == after.bytes_read - before.bytes_read > 0
    assert found["parts_us"][:, PARTS.index("wait_disk")].sum() > 0
    write_report(profile, tmp_path / "report.html")
    assert "experts found in RAM" in (tmp_path / "report.html").read_text()


def test_a_profile_marks_a_step_that_failed(demo: Path, expected: list[list[int]], tmp_path: Path) -> None:
    """Which has a line, and no tokens; those behind it are all there."""
    with opened(demo, experts_from="disk", experts_ram=1e-6, profile=tmp_path / "profile") as llm:
        store = files_of(llm).store
        store.fill(wait=True)  # which the next read is not to be of
        store.handle._fail_next(1)
        with pytest.raises(EngineError, match=r"demo\.gguf"):
            answers(llm)
        assert answers(llm) == expected
    profile = load(tmp_path / "profile")
    steps = profile.steps.read("step", "failed", "sampled", "rows")
    (failed,) = np.flatnonzero(steps["failed"])
    assert (steps["sampled"][failed], steps["rows"][failed] > 0) == (0, True)
    assert set(np.arange(steps["step"].max()) + 1) == set(steps["step"])
    tokens = profile.tokens.read("step", "token", "experts")
    assert steps["step"][failed] not in tokens["step"]
    assert sorted(tokens["token"]) == sorted(token for answer in expected for token in answer)
    assert (tokens["experts"] >= 0).all()
    write_report(profile, tmp_path / "report.html")
    assert "steps that failed" in (tmp_path / "report.html").read_text()


@pytest.fixture
def wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    """A model of 4 times 32 experts, alike in all layers, of which nothing is filled in the background."""
    monkeypatch.setattr(ExpertStore, "fill", lambda store, scores=None, wait=False: None)
    model = tiny_model("qwen3_moe", hidden=256, layers=4, num_experts=32, moe_intermediate_size=256)
    write_gguf(model, tmp_path / "model.gguf", QuantType.Q8_0, QuantType.Q8_0)
    return EngineConfig(gguf_path=tmp_path / "model.gguf", cpu_infer=1, cache_lens=64, experts_from="disk")


def test_loading_reads_a_few_experts(wide: EngineConfig) -> None:
    """Eight for the comparison of layers, and eight for that of steps; none is a use of it."""
    with closing(build_engine(wide)) as engine:
        assert engine.expert_files is not None
        store = engine.expert_files.store
        stats, record = store.stats(), store.layout(0).nbytes
        assert stats.num_records == 128
        assert 2 * 8 * record <= stats.bytes_read <= 2 * 8 * (record + 3 * 8192)  # in whole blocks
        assert (stats.hits, stats.misses, stats.waited_seconds) == (0, 0, 0)
        assert store.handle._held() == []


def test_what_is_compared_with_transformers_reads_its_own_experts(
    wide: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(self_check, "is_tested", lambda facts: False)
    with closing(build_engine(wide)) as engine:
        assert "self check: qwen3_moe as transformers computes it" in caplog.text
        assert engine.expert_files is not None
        stats = engine.expert_files.store.stats()
        assert stats.misses > 8
        assert engine.expert_files.store.handle._held() == []


def test_the_next_start_begins_with_what_was_used_most(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with opened(demo, experts_from="disk", experts_ram=1e-6) as llm:
        answers(llm)
        learned = files_of(llm).store.scores()
    begun: list[Mapping[int, torch.Tensor]] = []
    fill = ExpertStore.fill

    def filling(self: ExpertStore, scores: Mapping[int, torch.Tensor] | None = None, wait: bool = False) -> None:
        begun.append(scores or {})
        fill(self, scores, wait)

    monkeypatch.setattr(ExpertStore, "fill", filling)
    with opened(demo, experts_from="disk", experts_ram=1e-6) as llm:
        (scores,) = begun
        store = files_of(llm).store
        store.fill(wait=True)  # empty slots alone: over when the one before is
        count = store.stats().num_slots
        least = torch.cat(list(scores.values())).sort(descending=True).values[count - 1]
        for number, row in enumerate(scores.values()):
            for expert in (row > least).nonzero().flatten().tolist():
                assert store.hold(number, expert), "one that was used most, and not what loading has read"
                store.release(number, expert)
    assert scores.keys() == learned.keys()
    for layer, want in learned.items():
        assert torch.allclose(scores[layer], want, atol=1e-3)


def test_a_machine_that_is_too_small_reads_by_itself(demo: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = EngineConfig(gguf_path=demo, cpu_infer=1, cache_lens=64, self_check=False)
    whole = build_engine(config)
    ram = whole.plan.total_bytes["cpu"] - MIB
    whole.close()
    assert "on the disk" not in caplog.text
    hardware = Hardware(Machine(ram, ram, {"cpu": ram}))
    with pytest.raises(CapacityError, match="does not fit into this machine"):
        build_engine(replace(config, experts_from="ram"), hardware=hardware)
    engine = static_engine(config, hardware=hardware)
    assert "of experts stay on the disk" in caplog.text
    assert engine.plan.total_bytes["cpu"] <= ram
    assert engine.expert_files.store.stats().num_slots > 0
    assert engine.runner.forward([1, 2, 3], 0, [2]).isfinite().all()
    engine.close()
