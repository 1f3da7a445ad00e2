"""Several models whose experts are on the disk: what RAM their slots share is settled before the first is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from ktransformers.cli import main
from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.api.llm import LLM
from ktransformers.kernels.types import QuantType
from ktransformers.server.multi_model.needs import ModelNeeds, ToPlan, pinned, plan_needs, with_shares
from tests.support.gguf.writer import write_gguf
from tests.support.models.demo import DEMO_GGUF
from tests.support.models.tiny_models import tiny_model
from tests.support.servers.server_process import ServerProcess

MIB, GIB = 1 << 20, 1 << 30
QUESTION = "What is 17 + 25?"


def from_disk(rest: int, stored: int, least: int, slots: int, reserve: int = 0) -> ModelNeeds:
    needs = {"cpu": rest + slots, "cuda:0": 7}
    return ModelNeeds(needs, expert_slots=slots, stored_experts=stored, least_slots=least, reserve=reserve)


def slots_of(needs: list[ModelNeeds]) -> list[int]:
    for one in needs:
        assert one.nbytes["cpu"] >= one.expert_slots
    return [one.expert_slots for one in needs]


def test_slots_are_shared_in_the_ratio_of_experts() -> None:
    needs = [from_disk(10, 1000, 5, 90), from_disk(20, 3000, 15, 80, reserve=10), ModelNeeds({"cpu": 30})]
    # 190 less 60 of all else, 10 that stay free and 20 for the least are 100.
    shared = with_shares(needs, [True] * 3, [False] * 3, 190)
    assert slots_of(shared) == [5 + 25, 15 + 75, 0]
    assert [one.nbytes["cpu"] for one in shared] == [10 + 30, 20 + 90, 30]
    assert shared[0].nbytes["cuda:0"] == 7


def test_what_a_small_model_cannot_use_is_for_the_others() -> None:
    needs = [from_disk(0, 1000, 10, 100), from_disk(0, 20, 10, 20)]
    assert slots_of(with_shares(needs, [True] * 2, [False] * 2, 920)) == [900, 20]
    assert slots_of(with_shares(needs, [True] * 2, [False] * 2, 5000)) == [1000, 20]


def test_what_somebody_said_stays() -> None:
    needs = [from_disk(0, 1000, 10, 60), from_disk(0, 1000, 10, 100)]
    assert slots_of(with_shares(needs, [False, True], [False] * 2, 100)) == [60, 40]


def test_models_without_room_for_all_take_turns_beside_those_that_are_wanted() -> None:
    needs = [from_disk(10, 1000, 50, 90), from_disk(10, 1000, 50, 90), from_disk(10, 1000, 10, 90)]
    assert slots_of(with_shares(needs, [True] * 3, [False] * 3, 100)) == [90, 90, 90]
    assert slots_of(with_shares(needs, [True] * 3, [True, False, False], 100)) == [90, 90, 90]
    # 120: with a tenth for the last one there is no room for all; the first one has all that is left of it.
    assert slots_of(with_shares(needs, [True] * 3, [False, False, True], 120)) == [90, 90, 110]
    assert slots_of(with_shares(needs, [True] * 3, [False, False, True], 20)) == [90, 90, 10]


CONFIG = EngineConfig(gguf_path=DEMO_GGUF, cpu_infer=1, cache_lens=2048, experts_from="disk")


@pytest.fixture(scope="module")
def memory() -> int:
    """Bytes for two of the bundled model: with the least of its slots, and half of what is lacking."""
    needs = plan_needs(ToPlan(CONFIG))
    assert needs.expert_slots == needs.stored_experts > needs.least_slots > 0
    rest = needs.nbytes["cpu"] - needs.expert_slots
    least = 2 * rest + 2 * needs.least_slots
    memory = (least + (needs.stored_experts - needs.least_slots) + 512 * MIB) * 16 // 15
    return memory // MIB * MIB


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """A model with experts on the disk, and one with experts that drafts for it."""
    folder = tmp_path_factory.mktemp("drafting")
    for name, layers in (("large", 4), ("small", 2)):
        model = tiny_model("qwen3_moe", seed=layers, hidden=256, layers=layers)
        write_gguf(model, folder / f"{name}.gguf", QuantType.Q8_0, QuantType.Q8_0)
    return replace(CONFIG, gguf_path=folder / "large.gguf", draft_model=folder / "small.gguf", cache_lens=64)


def test_what_is_planned_for_a_model_and_its_draft_model_is_what_both_take(drafting: EngineConfig) -> None:
    """With room for nearly all experts the draft model's are in RAM, and with less than that takes beside the least
    slots of the target's, they are in slots, too."""
    needs = plan_needs(ToPlan(drafting))
    alone = plan_needs(ToPlan(replace(drafting, draft_model=None)))
    assert alone.expert_slots == alone.stored_experts
    drafts = needs.expert_slots - alone.expert_slots
    assert drafts > 0
    assert needs.stored_experts == needs.expert_slots
    assert needs.least_slots == alone.least_slots + drafts
    rest = needs.nbytes["cpu"] - needs.expert_slots
    for slots, has_slots in ((needs.expert_slots - MIB, False), (needs.least_slots - MIB, True)):
        again = plan_needs(ToPlan(pinned(drafting, replace(needs, expert_slots=slots))))
        assert (again.expert_slots, again.nbytes["cpu"]) == (slots, rest + slots)
        assert (again.least_slots < needs.least_slots) == has_slots
        assert pinned(drafting, again).experts_ram == slots / GIB


def models_yaml(folder: Path, memory: int) -> Path:
    flags = "cpu_infer: 1\ncache_lens: 2048\nexperts_from: disk\nbackend_type: ktransformers\n"
    models = "".join(f"  - name: {name}\n    gguf_path: {DEMO_GGUF}\n    load: start\n" for name in "ab")
    path = folder / "models.yaml"
    path.write_text(f"memory: {memory / GIB}\n{flags}models:\n{models}")
    return path


def test_plan_says_the_share_of_each(memory: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(models_yaml(tmp_path, memory))]) == 0
    a, b, all_models = capsys.readouterr().out.splitlines()
    assert a.replace("a takes", "b takes") == b
    assert "of that hold those of its experts that are used most, of 8" in a
    assert all_models.startswith("memory for all models: ")
    assert main(["plan", str(models_yaml(tmp_path, memory)), "--cache_lens", "512"]) == 2
    assert "--cache_lens is for one model" in capsys.readouterr().err


def test_two_run_beside_each_other_within_their_memory(memory: int, llm: LLM, tmp_path: Path) -> None:
    expected = llm.chat(QUESTION, SamplingParams(temperature=0))[0].text
    needs = plan_needs(ToPlan(CONFIG, memory=memory))
    (half,) = {one.expert_slots for one in with_shares([needs] * 2, [True] * 2, [True] * 2, memory)}
    assert needs.least_slots < half < needs.stored_experts
    assert plan_needs(ToPlan(pinned(CONFIG, replace(needs, expert_slots=half)))).expert_slots == half
    with ServerProcess("--models", str(models_yaml(tmp_path, memory))) as server:
        for name in "abab":
            body = {"model": name, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
            assert answer.json()["choices"][0]["message"]["content"] == expected, answer.text
        text = httpx.get(f"{server.url}/metrics", timeout=60).text
        for name in "ab":
            assert f'ktransformers:model_running{{model_name="{name}"}} 1.0' in text
            assert f'ktransformers:model_loads_total{{model_name="{name}"}} 1.0' in text
