"""What is said of a body that is wrong: where, and what is wanted there, without the names of a union's members."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel, ValidationError

from ktransformers.server.api.anthropic.schemas import MessagesBody
from ktransformers.server.api.openai.responses.schemas import ResponsesBody
from ktransformers.server.api.openai.schemas.chat import ChatBody
from ktransformers.server.api.openai.schemas.completions import CompletionBody
from ktransformers.server.responses import install_error_handlers
from ktransformers.server.validation import first_invalid

TEXT_OR_LIST = "Input should be a valid string or a valid list"


def said(content: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("schema", "body", "place", "message"),
    [
        (CompletionBody, {"prompt": 5}, ("prompt",), TEXT_OR_LIST),
        (CompletionBody, {"prompt": ["a", 5]}, ("prompt", 1), "Input should be a valid string"),
        (CompletionBody, {"prompt": [[1], [-1]]}, ("prompt", 1, 0), "Input should be greater than or equal to 0"),
        (
            CompletionBody,
            {"prompt": [1.5]},
            ("prompt", 0),
            "Input should be a valid string or a valid integer or a valid list",
        ),
        (ChatBody, said(5), ("messages", 0, "content"), TEXT_OR_LIST),
        (ChatBody, said([5]), ("messages", 0, "content", 0), "Input should be a JSON object"),
        (ChatBody, said("a") | {"stop": [5]}, ("stop", 0), "Input should be a valid string"),
        (ChatBody, said("a") | {"stop": 5}, ("stop",), TEXT_OR_LIST),
        (ChatBody, said("a") | {"tools": [{}]}, ("tools", 0, "type"), "Field required"),
        (ChatBody, [], (), "Input should be a JSON object"),
        (MessagesBody, said(5), ("messages", 0, "content"), TEXT_OR_LIST),
        (MessagesBody, said([{"type": "text"}]), ("messages", 0, "content", 0, "text"), "Field required"),
        (ResponsesBody, {"input": 5}, ("input",), TEXT_OR_LIST),
    ],
)
def test_the_fault_that_is_named(
    schema: type[BaseModel], body: Any, place: tuple[int | str, ...], message: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        schema.model_validate(body)
    errors = [{**one, "loc": ("body", *one["loc"])} for one in caught.value.errors()]  # as FastAPI has them
    fault = first_invalid(errors, body)
    assert (fault.place, fault.message) == (place, message)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is empty: send a JSON object"),
        (b'{"prompt": "\xff"}', "the body is not valid JSON: send it as UTF-8"),
        (b'{"prompt": %s}' % (b"1" * 5000), "the body is not valid JSON: a whole number in it has too many digits"),
        (
            b'{"prompt": [-1]}',
            "prompt[0]: Input should be a valid string or greater than or equal to 0 or a valid list",
        ),
    ],
)
def test_the_answer_says_it(body: bytes, message: str) -> None:
    app = FastAPI()
    install_error_handlers(app)

    @app.post("/v1/completions")
    async def complete(body: CompletionBody) -> None:
        """Is never run."""

    answer = TestClient(app).post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == message
