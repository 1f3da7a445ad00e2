"""A family whose Python code comes with the model (auto_map), under --trust_remote_code, with a router of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PretrainedConfig, PreTrainedModel, dynamic_module_utils

from ktransformers.config import EngineConfig
from ktransformers.engine.model.skeleton import build_causal
from ktransformers.errors import ConfigError
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.operators.experts.router import KRouter
from tests.support.engines.one_sequence import StaticEngine, static_engine
from tests.support.models.agreement import engine_of, prompt
from tests.support.models.family_models import LENGTH, STEPS, family_config
from tests.support.models.family_outcomes import check_agrees
from tests.support.models.own_code import softplus_moe, write_with_code

GATES = [f"model.layers.{layer}.mlp.gate" for layer in range(2)]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return softplus_moe()


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The model's folder, while transformers keeps its copies of code elsewhere than in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.setattr(sys, "path", [*sys.path])
        yield write_with_code(model, tmp_path_factory.mktemp("softplus_moe"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[StaticEngine]:
    config = EngineConfig(model_path=folder, cache_lens=LENGTH + STEPS, cpu_infer=1, trust_remote_code=True)
    engine = static_engine(config)
    yield engine
    engine.close()


def test_the_code_runs_where_it_is_trusted_alone(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--trust_remote_code runs it"):
        engine_of(folder)


def test_logits_agree_with_the_code_in_transformers(model: PreTrainedModel, engine: StaticEngine) -> None:
    check_agrees(model, engine)


def test_the_router_is_the_models_own_and_the_rest_is_ours(
    engine: StaticEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    operators = engine.plan.operators
    calls = list[type]()
    for key in GATES:
        gate = operators[key]
        assert isinstance(gate, KRouter)
        assert gate.spec is None
        assert isinstance(operators[key.replace("gate", "experts")], KTransformersExperts)
        own = type(gate.inner)
        assert own.__module__.startswith("transformers_modules.")
        forward = own.forward
        monkeypatch.setattr(gate.inner, "forward", lambda x, f=forward, m=gate.inner: calls.append(type(m)) or f(m, x))
    engine.runner.forward([3, 4, 5], 0, [2])
    assert [one.__name__ for one in calls] == ["SoftplusRouter"] * len(GATES)


def test_logits_do_not_depend_on_chunks(model: PreTrainedModel, engine: StaticEngine) -> None:
    ids = prompt(model.config.vocab_size)
    whole = engine.runner.forward(ids, 0, range(len(ids)))
    for size in (1, 3, 7, 16):
        starts = range(0, len(ids), size)
        parts = [engine.runner.forward(part := ids[at : at + size], at, range(len(part))) for at in starts]
        assert torch.equal(torch.cat(parts), whole), f"chunks of {size}"


def modules_of(config: PretrainedConfig, is_trusted: bool) -> list[tuple[str, type]]:
    with torch.device("meta"):
        return [(name, type(one)) for name, one in build_causal(config, is_trusted).named_modules()]


@pytest.mark.parametrize("model_type", ["dbrx", "jetmoe"])
def test_code_of_a_tokenizer_alone_leaves_the_model_as_it_is(model_type: str) -> None:
    """Trusted or not, the classes are those of transformers, with experts in the form that operators take."""
    config = family_config(model_type)
    want = [(name, kind.__name__) for name, kind in modules_of(config, False)]
    config.auto_map = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    assert [(name, kind.__name__) for name, kind in modules_of(config, True)] == want
