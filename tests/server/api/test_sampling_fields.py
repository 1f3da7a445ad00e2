"""Each field about how an answer is drawn reaches the backend, on every route that takes it.

Readers name some of them by hand: one that is dropped on the way would change no answer of a test that does not send
it. Values are other than the defaults, and what the tables below leave out is named, too.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, fields
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from ktransformers.core import Constraint, ConstraintKind, ReasoningSpec, SamplingParams
from ktransformers.server.api.anthropic.schemas import MessagesBody
from ktransformers.server.api.ollama.schemas import ChatBody as OllamaChatBody
from ktransformers.server.api.ollama.schemas import GenerateBody, Options
from ktransformers.server.api.openai.responses.schemas import ResponsesBody
from ktransformers.server.api.openai.schemas import ChatBody, CompletionBody
from ktransformers.server.app import create_app
from ktransformers.server.backend.base import GenerationRequest
from ktransformers.server.config import ServerConfig
from ktransformers.server.http.fields import IGNORED_HEADER
from tests.support.servers.scripted_backend import TOKENIZER, Script, ScriptedBackend

TURN = {"role": "user", "content": "hello"}
REGEX = Constraint(ConstraintKind.REGEX, "a+")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
DRAFTS = {"speculative_tokens": 3}
BUDGET = 5

Cases = dict[str, tuple[dict[str, Any], object]]
"""By field of SamplingParams or GenerationRequest: what is sent, and what has to arrive. None: anything but the value
of a request that does not say it."""


class Prioritizing(ScriptedBackend):
    has_priorities = True


COMMON: Cases = {
    "temperature": ({"temperature": 0.25}, 0.25),
    "top_p": ({"top_p": 0.75}, 0.75),
    "top_k": ({"top_k": 7}, 7),
    "min_p": ({"min_p": 0.125}, 0.125),
    "seed": ({"seed": 11}, 11),
}
PENALTIES: Cases = {
    "repetition_penalty": ({"repetition_penalty": 1.5}, 1.5),
    "frequency_penalty": ({"frequency_penalty": 0.5}, 0.5),
    "presence_penalty": ({"presence_penalty": -0.5}, -0.5),
}
EXTENSIONS: Cases = {
    **COMMON,
    **PENALTIES,
    "ignore_eos": ({"ignore_eos": True}, True),
    "max_drafts": (DRAFTS, 3),
    "priority": ({"priority": 4}, 4),
    "timeout": ({"timeout": 99.0}, 99.0),
    "cache_salt": ({"cache_salt": "s"}, "s"),
}
PREDICTION: Cases = {
    "prediction_ids": (
        {
            "prediction": {
                "type": "content",
                "content": [{"type": "text", "text": "a b"}, {"type": "text", "text": "c"}],
            }
        },
        tuple(TOKENIZER.encode("a bc", add_special_tokens=False)),
    ),
}
OPENAI: Cases = {
    **EXTENSIONS,
    **PREDICTION,
    "logit_bias": ({"logit_bias": {"5": 1.5}}, {5: 1.5}),
    "max_tokens": ({"max_tokens": 9}, 9),
    "min_tokens": ({"min_tokens": 2}, 2),
    "stop": ({"stop": ["x", "y"]}, ("x", "y")),
    "stop_token_ids": ({"stop_token_ids": [6, 7]}, (6, 7)),
    "allowed_token_ids": ({"allowed_token_ids": [5, 6]}, (5, 6)),
    "include_stop_str_in_output": ({"include_stop_str_in_output": True}, True),
    "skip_special_tokens": ({"skip_special_tokens": False}, False),
    "constraint": ({"guided_regex": "a+"}, REGEX),
}
CHAT: Cases = {
    **OPENAI,
    "logprobs": ({"logprobs": True, "top_logprobs": 3}, 3),
    "reasoning": ({"thinking_budget": BUDGET}, None),
}
COMPLETIONS: Cases = {
    **OPENAI,
    "logprobs": ({"logprobs": 3}, 3),
    "prompt_logprobs": ({"logprobs": 3, "echo": True}, 3),
}
RESPONSES: Cases = {
    **EXTENSIONS,
    **PREDICTION,
    "max_tokens": ({"max_output_tokens": 9}, 9),
    "stop": ({"stop": "x"}, ("x",)),
    "logprobs": ({"top_logprobs": 3}, 3),
    "constraint": ({"guided_regex": "a+"}, REGEX),
}
MESSAGES: Cases = {
    **EXTENSIONS,
    "max_tokens": ({"max_tokens": 9}, 9),
    "stop": ({"stop_sequences": ["x"]}, ("x",)),
    "constraint": ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, None),
    "reasoning": ({"thinking": {"type": "enabled", "budget_tokens": BUDGET}}, None),
}
OLLAMA: Cases = {
    **COMMON,
    **PENALTIES,
    "ignore_eos": ({"ignore_eos": True}, True),
    "max_tokens": ({"num_predict": 9}, 9),
    "stop": ({"stop": ["x"]}, ("x",)),
    "max_drafts": (DRAFTS, 3),
    "logprobs": ({"logprobs": True, "top_logprobs": 3}, 3),
    "constraint": ({"format": SCHEMA}, None),
}


@dataclass(frozen=True)
class Route:
    """bare: a body that says nothing of sampling. inside: the field that has most of them. model: of the body."""

    bare: dict[str, Any]
    cases: Cases
    models: tuple[type[BaseModel], ...]
    inside: str = ""

    def body(self, sent: dict[str, Any]) -> dict[str, Any]:
        if not self.inside:
            return self.bare | sent
        own = {name: value for name, value in sent.items() if name in self.models[0].model_fields}
        return self.bare | own | {self.inside: {name: value for name, value in sent.items() if name not in own}}


ROUTES = {
    "/v1/chat/completions": Route({"messages": [TURN]}, CHAT, (ChatBody,)),
    "/v1/completions": Route({"prompt": "hello"}, COMPLETIONS, (CompletionBody,)),
    "/v1/responses": Route({"input": "hello"}, RESPONSES, (ResponsesBody,)),
    "/v1/messages": Route({"messages": [TURN], "max_tokens": 8}, MESSAGES, (MessagesBody,)),
    "/api/chat": Route({"messages": [TURN], "stream": False}, OLLAMA, (OllamaChatBody, Options), "options"),
    "/api/generate": Route({"prompt": "hello", "stream": False}, OLLAMA, (GenerateBody, Options), "options"),
}

NOWHERE = {"n", "pooling", "structured_outputs", "guided_decoding"} | {
    f"guided_{kind}" for kind in ("json", "regex", "choice", "grammar")
}
"""Fields of SamplingParams that a GenerationRequest has at their defaults: it is one answer, and its constraint is a
Constraint. pooling: of embeddings."""

NOT_AT_OLLAMA = {
    "allowed_token_ids", "cache_salt", "include_stop_str_in_output", "logit_bias", "min_tokens",
    "prediction_ids", "priority", "prompt_logprobs", "reasoning", "skip_special_tokens", "stop_token_ids", "timeout",
}  # fmt: skip

NOT_THERE = {
    "/v1/chat/completions": {"prompt_logprobs"},
    "/v1/completions": {"reasoning"},
    "/v1/responses": {
        "allowed_token_ids", "include_stop_str_in_output", "logit_bias", "min_tokens", "prompt_logprobs", "reasoning",
        "skip_special_tokens", "stop_token_ids",
    },
    "/v1/messages": {
        "allowed_token_ids", "include_stop_str_in_output", "logit_bias", "logprobs", "min_tokens", "prediction_ids",
        "prompt_logprobs", "skip_special_tokens", "stop_token_ids",
    },
    "/api/chat": NOT_AT_OLLAMA,
    "/api/generate": NOT_AT_OLLAMA,
}  # fmt: skip
"""What these routes have no field for."""

OTHERS = {
    # The conversation, and how it becomes a prompt.
    "add_generation_prompt", "chat_template_kwargs", "context_management", "continue_final_message", "enable_thinking",
    "function_call", "functions", "images", "input", "instructions", "max_completion_tokens", "messages",
    "parallel_tool_calls", "previous_response_id", "prompt", "raw", "reasoning",
    "reasoning_effort", "shift", "system", "think", "tool_choice",
    "tools", "truncate", "truncate_prompt_tokens", "truncation",
    # What comes back, and how.
    "best_of", "include", "model", "n", "return_speed", "return_token_ids", "store", "stream", "stream_options",
    # Echoed, or about the server.
    "keep_alive", "metadata", "num_ctx", "prompt_cache_key", "repeat_last_n", "safety_identifier", "service_tier",
    "user",
    # Other names of what is sent above: each has a test of its own in test_formats.py, `speculative` below.
    "grammar", "guided_choice", "guided_grammar", "guided_json", "json_schema", "options", "response_format",
    "speculative", "structured_outputs", "text",
}  # fmt: skip
"""Fields of bodies that say something else than the parameters of sampling."""

OF_REQUEST = {"cache_salt", "prediction_ids", "priority", "timeout"}


def arrived(path: str, body: dict[str, Any]) -> GenerationRequest:
    backend = Prioritizing(Script(["so"]))

    async def send() -> httpx.Response:
        app = create_app(backend, ServerConfig(model_names=("m",)))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.post(path, json=body)

    answer = asyncio.run(send())
    assert answer.status_code == 200, answer.text
    ignored = answer.headers.get(IGNORED_HEADER)
    assert ignored is None or (ignored, path) == ("thinking", "/v1/messages")  # this template has no switch for it
    return backend.requests[0]


def value_of(request: GenerationRequest, name: str) -> object:
    return getattr(request if name in OF_REQUEST else request.params, name)


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path, route in ROUTES.items() for name in route.cases], ids=str
)
def test_a_value_arrives(path: str, name: str) -> None:
    route = ROUTES[path]
    sent, wanted = route.cases[name]
    without, found = (value_of(arrived(path, route.body(fields)), name) for fields in ({}, sent))
    assert found != without
    if wanted is not None:
        assert found == wanted
    if isinstance(found, ReasoningSpec):
        assert found.max_tokens == BUDGET
    if name == "constraint":
        assert isinstance(found, Constraint)


@pytest.mark.parametrize("path", ROUTES)
def test_every_parameter_is_tried_or_named(path: str) -> None:
    known = {one.name for one in fields(SamplingParams)} - NOWHERE | OF_REQUEST
    assert ROUTES[path].cases.keys() | NOT_THERE[path] == known
    assert not ROUTES[path].cases.keys() & NOT_THERE[path]


@pytest.mark.parametrize("path", ROUTES)
def test_every_field_of_a_body_is_tried_or_named(path: str) -> None:
    route = ROUTES[path]
    sent = {name for one, _ in route.cases.values() for name in one}
    assert {name for model in route.models for name in model.model_fields} - OTHERS == sent - OTHERS


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("sent", "max_drafts"),
    [
        ({"speculative": "off"}, 0),
        ({"speculative": "off", "speculative_tokens": 0}, 0),
        ({"speculative": "auto"}, None),
        ({"speculative": "ngram", "speculative_tokens": 2.0}, 2),
        ({"speculative_tokens": 0}, 0),
        ({"speculative.n_max": 4, "speculative.n_min": 1, "speculative.p_min": 0.5, "speculative.type": "x"}, 4),
    ],
)
def test_drafts_in_other_words(path: str, sent: dict[str, Any], max_drafts: int | None) -> None:
    assert arrived(path, ROUTES[path].body(sent)).params.max_drafts == max_drafts
