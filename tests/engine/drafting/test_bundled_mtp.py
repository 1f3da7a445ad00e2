"""The bundled model's own layer for multi-token prediction drafts tokens that are right, and changes no answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ktransformers.core import Constraint, ConstraintKind, SamplingParams
from ktransformers.engine.api.llm import LLM
from ktransformers.engine.sequence.outputs import RequestOutput
from tests.support.engines.drafter_steps import draft_in_every_step
from tests.support.models.demo import DEMO_CHECKPOINT

QUESTIONS = [
    "73 meters is how many centimeters?",
    "What does recursive mean in a rule?",
    "Write this list backwards: beach, pocket, clock, ocean, comet, peach, pepper, sand",
    "What are you?",
    "Write this list as a JSON array: forest, candle, butter, rabbit",
    "What is --backend_type?",
    "Sort 2, 8, 9, 5, 7",
    "How do you spell falcon?",
    "What is 5 February 2008 in ISO format?",
    "温度为0是什么意思？",
]
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string", "maxLength": 40}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
}
ROUTE = {
    "type": "function",
    "function": {
        "name": "find_route",
        "description": "Find a route",
        "parameters": {
            "type": "object",
            "properties": {"start": {"type": "string"}, "end": {"type": "string"}},
            "required": ["start", "end"],
        },
    },
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "seed": 7},
    "schema": {"temperature": 0.0, "constraint": Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA))},
    "tools": {"temperature": 0.8, "seed": 9},
}


def answers(speculative: str) -> dict[str, list[RequestOutput]]:
    found = {}
    with LLM(model_path=DEMO_CHECKPOINT, cpu_infer=1, speculative=speculative, speculative_tokens=3) as llm:
        for way, values in WAYS.items():
            questions = (
                QUESTIONS if way != "tools" else [f"Find a route from Rome to {q.split()[0]}." for q in QUESTIONS]
            )
            params = SamplingParams(max_tokens=60, logprobs=1, **values)
            messages = [[{"role": "user", "content": question}] for question in questions]
            found[way] = llm.chat(messages, params, tools=[ROUTE] if way == "tools" else None)
    return found


def test_it_is_right_and_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens are drafted in each step, by the layer alone: what is counted does not depend on time."""
    draft_in_every_step(monkeypatch)
    plain, drafted = answers("off"), answers("mtp")
    for way in WAYS:
        for one, other in zip(plain[way], drafted[way], strict=True):
            assert (one.token_ids, one.text, one.logprobs) == (other.token_ids, other.text, other.logprobs), way
            assert one.stats.num_drafted == 0
    for way, outputs in drafted.items():
        num_drafted, num_accepted = (
            sum(getattr(one.stats, name) for one in outputs) for name in ("num_drafted", "num_accepted")
        )
        least = 0.2 if way == "schema" else 0.4  # what a grammar allows behind the next token is not known
        assert num_accepted > least * num_drafted, f"{way}: {num_accepted} of {num_drafted}"


def test_transformers_opens_the_model_as_without_it() -> None:
    """The layer is in a file that its class does not look for, so that nothing is said of it either."""
    names = json.loads((DEMO_CHECKPOINT / "model.safetensors.index.json").read_text())["weight_map"]
    for file in ("model.safetensors", "mtp.safetensors"):
        with safe_open(DEMO_CHECKPOINT / file, "pt") as opened:
            assert set(opened.keys()) == {name for name, where in names.items() if where == file}
    assert {tensor.dtype for tensor in load_file(DEMO_CHECKPOINT / "mtp.safetensors").values()} == {torch.bfloat16}
    model, said = AutoModelForCausalLM.from_pretrained(DEMO_CHECKPOINT, output_loading_info=True)
    assert not said["unexpected_keys"]
    assert not said["missing_keys"]
    assert model.config.mtp_num_hidden_layers == 1
