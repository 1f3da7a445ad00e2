"""What drafts for a model whose experts are in files: its own layer in the same slots, another model in slots of its
own where RAM has no room. Answers and draft tokens are those of all experts in RAM.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from ktransformers.config import EngineConfig
from ktransformers.convert import pack_model as pack_module
from ktransformers.convert.pack_model import pack_model
from ktransformers.core import FinishReason, SamplingParams
from ktransformers.engine.load.builder import Engine, Hardware, build_engine, plan_model
from ktransformers.engine.model.opened import open_model
from ktransformers.engine.step.drafts import DraftRequest
from ktransformers.kernels.types import QuantType
from ktransformers.optimize.expert_slots import EXPERT_SLOTS
from ktransformers.optimize.machine import Machine
from ktransformers.profiling.stored_counts import StoredCounts
from tests.support.engines.drafter_steps import draft_in_every_step
from tests.support.engines.mtp_engines import check_engine, engine_of, loop_of
from tests.support.gguf.writer import write_gguf
from tests.support.models.mtp_models import TinyMtp, tiny_mtp, write_mtp, write_mtp_gguf
from tests.support.models.tiny_models import tiny_model

LEAST = {"experts_from": "disk", "experts_ram": 1e-6}
RESERVE = 512 << 20


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens are drafted in each step, however few are right."""
    draft_in_every_step(monkeypatch)


class Silent:
    def advance(self, nbytes: int) -> None: ...

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *error: object) -> None: ...


def pack(config: EngineConfig) -> Path:
    return pack_model(config, None, lambda name, nbytes: Silent()).path


def answers_of(engine: Engine) -> list[list[int]]:
    loop = loop_of(engine)
    params = [SamplingParams(max_tokens=20, temperature=0.8 * (at % 2), seed=at, ignore_eos=True) for at in range(3)]
    names = [loop.add(list(range(3 + at, 60 * at + 9)), one) for at, one in enumerate(params)]
    loop.drain()
    return [loop.answers[name].token_ids for name in names]


@pytest.fixture(scope="module")
def tiny() -> TinyMtp:
    return tiny_mtp("deepseek_v3")


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_models_own_layer_has_its_experts_in_the_same_slots(
    tiny: TinyMtp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_packed: bool
) -> None:
    path = write_mtp_gguf(tiny, tmp_path / "tiny.gguf")
    with engine_of(path) as engine:
        expected, in_ram = answers_of(engine), engine.plan.extra_bytes["draft model"]["cpu"]
    paths = (pack(EngineConfig(gguf_path=path)),) if is_packed else (path,)
    with engine_of(path, **LEAST) as engine:
        files, plan = engine.expert_files, engine.plan
        assert files is not None
        assert files.paths == paths
        num_layers = tiny.main.config.num_hidden_layers
        (of_layer,) = {entry.stored_experts for entry in plan.entries if entry.stored_experts}
        assert num_layers in files.store.scores()
        assert plan.extra_bytes["draft model"]["cpu"] <= in_ram - of_layer * 9 // 10  # a record is rounded up
        before = files.store.stats()
        assert answers_of(engine) == expected
        after = files.store.stats()
        assert after.misses > before.misses
        assert files.store.scores()[num_layers].sum() > 0
        engine.executor.reset()
        check_engine(engine, tiny, monkeypatch)
        assert engine.plan.extra_bytes[EXPERT_SLOTS]["cpu"] < plan.stored_experts + of_layer
    with engine_of(path, experts_from="disk") as engine:  # room for all: those of the layer, too
        stats = engine.expert_files.store.stats() if engine.expert_files else None
        assert stats is not None
        assert stats.num_slots == stats.num_records


def test_a_layer_that_the_packed_file_lacks_stays_in_ram(
    tiny: TinyMtp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = write_mtp(tiny, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(pack_module, "_opened", open_model)
        pack(EngineConfig(model_path=folder))
    plan = plan_model(EngineConfig(model_path=folder, cpu_infer=1, cache_lens=64, speculative="mtp", **LEAST))
    assert "experts of the layer that drafts are in RAM" in caplog.text
    assert "lacks the experts of mtp.0." in caplog.text
    assert plan.extra_bytes["draft model"]["cpu"] > max(one.stored_experts for one in plan.entries)


def test_a_read_that_fails_while_drafting_ends_the_answers_of_that_step(tiny: TinyMtp, tmp_path: Path) -> None:
    with engine_of(write_mtp_gguf(tiny, tmp_path / "tiny.gguf"), **LEAST) as engine:
        expected = answers_of(engine)
        engine.executor.reset()
        assert engine.expert_files is not None
        drafter, store = engine.executor.drafter, engine.expert_files.store
        assert drafter is not None
        draft = drafter.draft

        def failing(requests: Sequence[DraftRequest]) -> list[list[int]]:
            store.handle._fail_next(1)
            return draft(requests)

        drafter.draft = failing  # type: ignore[method-assign]
        loop = loop_of(engine)
        name = loop.add(list(range(3, 40)), SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
        loop.drain()
        assert loop.answers[name].reason is FinishReason.ABORT
        drafter.draft = draft  # type: ignore[method-assign]
        store.handle._fail_next(0)
        assert answers_of(engine) == expected


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and one that drafts for it."""
    folder = tmp_path_factory.mktemp("models")
    for name, layers in (("large", 4), ("small", 2)):
        model = tiny_model("qwen3_moe", seed=layers, hidden=256, layers=layers)
        write_gguf(model, folder / f"{name}.gguf", QuantType.Q8_0, QuantType.Q8_0)
    return folder / "large.gguf", folder / "small.gguf"


def hardware_of(ram: int) -> Hardware:
    return Hardware(Machine(ram, ram, {"cpu": ram}))


def test_a_draft_model_is_in_ram_while_that_has_room(
    models: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Room: beside the least slots of the target's experts and the reserve."""
    caplog.set_level(logging.INFO)
    large, small = models
    config = EngineConfig(gguf_path=large, draft_model=small, cpu_infer=1, cache_lens=64, experts_from="disk")
    in_ram = plan_model(replace(config, gguf_path=small, draft_model=None, experts_from="ram"))
    plan = plan_model(config, hardware=hardware_of(4 << 30))
    assert "experts of the draft model are in RAM, which has room for them" in caplog.text
    whole = plan.extra_bytes["draft model"]["cpu"]
    few = plan_model(replace(config, experts_ram=1e-6), hardware=hardware_of(4 << 30))  # for both models
    least = few.total_bytes["cpu"] - few.extra_bytes["draft model"]["cpu"] + whole
    ram = (least + RESERVE) * 16 // 15 + 2  # a sixteenth is reserved besides
    assert plan_model(config, hardware=hardware_of(ram)).extra_bytes["draft model"]["cpu"] == whole
    caplog.clear()
    split = plan_model(config, hardware=hardware_of(ram - (1 << 20)))
    assert "the draft model: " in caplog.text
    assert "of experts stay on the disk" in caplog.text
    assert split.extra_bytes["draft model"]["cpu"] < whole
    assert in_ram.stored_experts == 0


def test_a_draft_model_with_slots_of_its_own(models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = models
    config = EngineConfig(gguf_path=large, draft_model=small, cpu_infer=1, cache_lens=1024, self_check=False)
    config = replace(config, speculative="draft", speculative_tokens=3)

    def opened(config: EngineConfig, ram: int) -> Engine:
        return build_engine(config, page_size=16, max_batch_size=4, hardware=hardware_of(ram))

    with closing(opened(config, 4 << 30)) as whole:
        assert whole.expert_files is None
        expected = answers_of(whole)
    with closing(opened(replace(config, experts_from="disk"), RESERVE)) as engine:  # there is less than the reserve
        assert engine.expert_files is not None
        assert engine.plan.extra_bytes["draft model"]["cpu"] < whole.plan.extra_bytes["draft model"]["cpu"]
        take, uses = engine.executor.experts.take_stored, list[int]()

        def taken() -> tuple[StoredCounts, StoredCounts]:
            found = take()
            uses.append(found[0][0] + found[0][1])
            return found

        monkeypatch.setattr(engine.executor.experts, "take_stored", taken)
        before = engine.expert_files.store.stats()
        assert answers_of(engine) == expected
        after = engine.expert_files.store.stats()
        assert sum(uses) > after.hits + after.misses - before.hits - before.misses > 0  # of both stores
