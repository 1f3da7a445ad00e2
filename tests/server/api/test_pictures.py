"""Pictures in every dialect, by the official clients and in other programs' shapes, on a model without a tower too."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anthropic
import httpx
import httpx2
import ollama
import openai
import pytest

from ktransformers.media.records import Sight, is_media_id, media_ids
from ktransformers.server.app import create_app
from ktransformers.server.backend.base import GenerationRequest
from ktransformers.server.config import ServerConfig
from ktransformers.server.http.fields import IGNORED_HEADER
from tests.support.servers.picture_backend import PNG, FakePictures, PictureBackend, PictureTokenizer

OTHER = PNG + b"another"
DATA = base64.b64encode(PNG).decode()
URL, OTHER_URL = (f"data:image/png;base64,{base64.b64encode(one).decode()}" for one in (PNG, OTHER))
WRONG = base64.b64encode(b"nothing").decode()

Ask = Callable[[httpx.AsyncClient], Awaitable[Any]]
Message = dict[str, Any]


def served(
    ask: Ask, pictures: FakePictures | None = None, has_tower: bool = True, **config: Any
) -> tuple[Any, PictureBackend]:
    """What `ask` returns, and the backend that was asked."""
    backend = PictureBackend(pictures=(pictures or FakePictures()) if has_tower else None)
    app = create_app(backend, ServerConfig(model_names=("demo",), **config))

    async def main() -> Any:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await ask(client)

    return asyncio.run(main()), backend


def post(path: str, body: dict[str, Any]) -> Ask:
    async def ask(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(path, json=body)

    return ask


def chat(*parts: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": list(parts)}], **more}


def image(url: str = URL, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def claude_image(data: str = DATA) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def user(*content: Any) -> Message:
    return {"role": "user", "content": list(content)}


# The official clients.


async def by_openai(client: httpx.AsyncClient) -> None:
    asked = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="x", http_client=client)
    messages: Any = [user(image(), image(OTHER_URL), text("What?"))]
    answer = await asked.chat.completions.create(model="demo", messages=messages)
    assert answer.choices[0].message.content == "ok"


async def by_responses(client: httpx.AsyncClient) -> None:
    asked = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="x", http_client=client)
    content = [{"type": "input_image", "image_url": url, "detail": "auto"} for url in (URL, OTHER_URL)]
    items: Any = [user(*content, {"type": "input_text", "text": "What?"})]
    answer = await asked.responses.create(model="demo", input=items)
    assert answer.output_text == "ok"
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.model_extra == {"image_tokens": 20}


async def by_anthropic(client: httpx.AsyncClient) -> None:
    assert isinstance(client._transport, httpx.ASGITransport)
    own = httpx2.AsyncClient(transport=httpx2.ASGITransport(client._transport.app))
    asked = anthropic.AsyncAnthropic(base_url="http://localhost", api_key="x", http_client=own)
    content = [claude_image(), {"type": "image", "source": {"type": "url", "url": OTHER_URL}}, text("What?")]
    messages: Any = [user(*content)]
    answer = await asked.messages.create(model="demo", max_tokens=9, messages=messages)
    assert answer.content[0].type == "text"
    counted = await asked.messages.count_tokens(model="demo", messages=messages)
    assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


async def by_ollama(client: httpx.AsyncClient) -> None:
    asked = ollama.AsyncClient("http://localhost", transport=client._transport)
    messages = [{"role": "user", "content": "What?", "images": [PNG, OTHER]}]
    assert (await asked.chat("demo", messages)).message.content == "ok"


async def by_generate(client: httpx.AsyncClient) -> None:
    asked = ollama.AsyncClient("http://localhost", transport=client._transport)
    assert (await asked.generate("demo", "What?", images=[PNG, OTHER])).response == "ok"


@pytest.mark.parametrize("ask", [by_openai, by_responses, by_anthropic, by_ollama, by_generate])
def test_the_same_pictures_arrive_by_every_official_client(ask: Ask) -> None:
    pictures = FakePictures()
    _, backend = served(ask, pictures)
    assert [data for data, _ in pictures.calls][:2] == [PNG, OTHER]
    assert len(backend.requests) == 1
    assert "user\n<v>##########</v><v>##########</v>What?<|im_end|>" in backend.prompts[0]
    check_media(backend.requests[0], [PNG, OTHER])
    assert not +pictures.held


def check_media(request: GenerationRequest, sent: Sequence[bytes]) -> None:
    """The items say where the pseudo-ids of these pictures are, and there are no others."""
    digests = [FakePictures().read(data).digest for data in sent]
    assert [item.digest for item in request.media] == digests
    for item in request.media:
        assert list(request.prompt_ids[item.start : item.end]) == media_ids(item.digest, 10)
    assert sum(map(is_media_id, request.prompt_ids)) == 10 * len(sent)


# Shapes, places and orders.


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": URL},
        {"type": "image_url", "image_url": {"url": DATA}},
        {"type": "image_url", "image_url": {"url": "\n".join((DATA[:76], DATA[76:]))}},
        {"type": "input_image", "image_url": URL},
        {"type": "image", "image": URL},
        {"type": "image", "url": URL},
        {"type": "image", "data": DATA, "mimeType": "image/png"},
        {"type": "image", "source": {"type": "base64", "data": DATA}},
        {"type": "image", "source": {"type": "url", "url": URL}},
        {"type": "video", "video": [URL]},
        {"type": "video_url", "video_url": {"url": [URL]}},
        {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{DATA}"}},
    ],
)
def test_a_picture_in_other_shapes(part: dict[str, Any]) -> None:
    asked: list[tuple[str, dict[str, Any]]] = [chat(text("a"), part, text("b"))]
    if not part["type"].startswith("video"):
        asked.append(("/v1/responses", {"input": [user(text("a"), part, text("b"))]}))
    for path, body in asked:
        pictures = FakePictures()
        response, backend = served(post(path, body), pictures)
        assert response.status_code == 200, response.text
        assert pictures.calls == [(PNG, None)]
        assert "user\na<v>##########</v>b<|im_end|>" in backend.prompts[0]


@pytest.mark.parametrize("takes_one", [True, False])
def test_frames_of_a_video_where_a_message_takes_one_picture(takes_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PictureTokenizer, "takes_one_picture", takes_one)
    video = {"type": "video", "video": [URL, OTHER_URL]}
    response, backend = served(post(*chat(image(), video)))
    assert served(post(*chat(image(), {"type": "video", "video": [URL]})))[0].status_code == 200
    if not takes_one:
        assert response.status_code == 200
        assert len(backend.requests[0].media) == 3
        return
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "messages[0].content[1].video"
    assert "a video is several pictures, and demo takes one in a message: send one frame" in error["message"]


def test_texts_and_pictures_keep_their_order() -> None:
    path, body = chat(text("a"), text("b"), image(), text(""), image(OTHER_URL), text("c"))
    body["messages"] = [{"role": "system", "content": "s"}, *body["messages"], {"role": "user", "content": [image()]}]
    _, backend = served(post(path, body))
    picture = "<v>##########</v>"
    assert f"user\na\nb{picture}{picture}c<|im_end|><|im_start|>user\n{picture}<|im_end|>" in backend.prompts[0]
    check_media(backend.requests[0], [PNG, OTHER, PNG])


@pytest.mark.parametrize(
    ("sent", "read"), [("low", "low"), ("high", "high"), ("auto", "auto"), ("original", "high"), (None, None)]
)
def test_the_detail_is_passed_on(sent: str | None, read: str | None) -> None:
    for part in (image(detail=sent), {"type": "input_image", "image_url": URL, "detail": sent}):
        pictures = FakePictures()
        served(post(*chat(part)), pictures)
        assert pictures.calls == [(PNG, read)]


@pytest.mark.parametrize("url", [f" {URL}\n", URL.partition(",")[2].rstrip("=")])
def test_space_around_a_url_and_padding_left_out(url: str) -> None:
    pictures = FakePictures()
    served(post(*chat(image(url))), pictures)
    assert pictures.calls == [(PNG, None)]


def test_a_picture_is_read_once_for_all_answers() -> None:
    pictures = FakePictures()
    response, backend = served(post(*chat(image(), n=3)), pictures)
    assert len(response.json()["choices"]) == 3
    assert len(pictures.calls) == 1
    assert len(backend.requests) == 3
    assert len({request.media for request in backend.requests}) == 1
    assert response.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 1, "image_tokens": 10}
    assert "image_tokens" not in served(post(*chat(text("a"))))[0].json()["usage"]["prompt_tokens_details"]


def test_pictures_leave_with_their_turns() -> None:
    long = "x" * (1 << 17)
    turns = [user(image(), text(long)), {"role": "assistant", "content": "ok"}] * 2
    system = {"role": "system", "content": [image()]}
    body = {"messages": [system, *turns, user(text("a"), image(OTHER_URL))], "truncate_prompt_tokens": -1}
    response, backend = served(post("/v1/chat/completions", body))
    assert response.headers["x-ktransformers-dropped-messages"] == "4"
    check_media(backend.requests[0], [PNG, OTHER])


def test_edits_of_a_conversation_clear_pictures_of_results() -> None:
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "see", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [claude_image(), text("x" * 99)]}
    edit = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "tool_uses", "value": 0},
        "keep": {"type": "tool_uses", "value": 0},
    }
    body = {
        "max_tokens": 9,
        "messages": [user(text("a")), use, user(result, claude_image())],
        "context_management": {"edits": [edit]},
    }
    response, backend = served(post("/v1/messages", body))
    assert response.json()["context_management"]["applied_edits"][0]["cleared_tool_uses"] == 1
    check_media(backend.requests[0], [PNG])
    assert backend.prompts[0].count("#") == 10


# Results of tools.


def of_chat(data: str) -> tuple[str, dict[str, Any], str]:
    result = {"role": "tool", "tool_call_id": "a", "content": [text("seen"), image(f"data:;base64,{data}")]}
    return "/v1/chat/completions", {"messages": [user(text("a")), result]}, "messages.content.image_url"


def of_responses(data: str) -> tuple[str, dict[str, Any], str]:
    output = [{"type": "input_text", "text": "seen"}, {"type": "input_image", "image_url": f"data:;base64,{data}"}]
    item = {"type": "function_call_output", "call_id": "a", "output": output}
    return "/v1/responses", {"input": [user(text("a")), item]}, "input.function_call_output.output.input_image"


def of_claude(data: str) -> tuple[str, dict[str, Any], str]:
    block = {"type": "tool_result", "tool_use_id": "a", "content": [text("seen"), claude_image(data)]}
    return "/v1/messages", {"max_tokens": 9, "messages": [user(text("a")), user(block)]}, "messages.tool_result.image"


def of_ollama(data: str) -> tuple[str, dict[str, Any], str]:
    result = {"role": "tool", "content": "seen", "images": [data]}
    body = {"model": "demo", "stream": False, "messages": [{"role": "user", "content": "a"}, result]}
    return "/api/chat", body, "messages.images"


RESULTS = [of_chat, of_responses, of_claude, of_ollama]


@pytest.mark.parametrize("result_of", RESULTS)
def test_pictures_in_results_of_tools_are_read(result_of: Any) -> None:
    path, body, _ = result_of(DATA)
    response, backend = served(post(path, body))
    assert response.status_code == 200, response.text
    assert IGNORED_HEADER not in response.headers
    check_media(backend.requests[0], [PNG])
    assert sorted(("seen", "<v>##########</v>")) == sorted(_tool_turn(backend.prompts[0]))


def _tool_turn(prompt: str) -> list[str]:
    turn = prompt.rpartition("<|im_start|>tool")[2].partition("<|im_end|>")[0].partition("\n")[2]
    return [part for part in turn.replace("<v>", "\n<v>").replace("</v>", "</v>\n").split("\n") if part]


@pytest.mark.parametrize("result_of", RESULTS)
@pytest.mark.parametrize("data", [WRONG, "%", ""])
def test_a_result_that_is_no_picture_refuses_nothing(result_of: Any, data: str) -> None:
    path, body, name = result_of(data)
    response, backend = served(post(path, body))
    assert response.status_code == 200, response.text
    assert response.headers[IGNORED_HEADER] == name
    assert "[picture left out: it could not be read]" in _tool_turn(backend.prompts[0])


@pytest.mark.parametrize("result_of", RESULTS)
def test_without_a_tower_results_are_named_in_their_place(result_of: Any) -> None:
    path, body, name = result_of(DATA)
    response, backend = served(post(path, body), has_tower=False)
    assert response.status_code == 200, response.text
    assert response.headers[IGNORED_HEADER] == name
    assert "[picture left out: only text can be read here]" in _tool_turn(backend.prompts[0])


def test_results_without_a_source_are_left_out() -> None:
    parts: list[dict[str, Any]] = [
        {"type": "image_url"},
        {"type": "image", "source": {"type": "file", "file_id": "f"}},
        {"type": "input_image", "file_id": "f"},
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
    ]
    for part in parts:
        for path, body, _ in (of_chat(DATA), of_responses(DATA), of_claude(DATA)):
            sent = json.loads(json.dumps(body))
            if path == "/v1/responses":
                sent["input"][1]["output"][1] = part
            elif path == "/v1/messages":
                sent["messages"][1]["content"][0]["content"][1] = part
            else:
                sent["messages"][1]["content"][1] = part
            response, backend = served(post(path, sent))
            assert response.status_code == 200, response.text
            assert " left out: " in backend.prompts[0]
            assert IGNORED_HEADER in response.headers


# What is refused.


def responses(part: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": [user(part)]}


def claude(block: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"max_tokens": 9, "messages": [user(block)]}


def ollama_chat(*images: Any) -> tuple[str, dict[str, Any]]:
    message = {"role": "user", "content": "a", "images": list(images)}
    return "/api/chat", {"model": "demo", "messages": [message]}


@pytest.mark.parametrize(
    ("asked", "place", "said"),
    [
        (chat(text("a"), image(f"data:;base64,{WRONG}")), "messages[0].content[1].image_url", "it is no picture"),
        (chat(image("%")), "messages[0].content[0].image_url", "neither a URL nor base64"),
        (chat(image("data:;base64,%")), "messages[0].content[0].image_url", "base64"),
        (chat(image("http://h/a.png")), "messages[0].content[0].image_url", "--allowed_image_hosts"),
        (chat(image("file:///etc/passwd")), "messages[0].content[0].image_url", "messages[0].content[0].image_url"),
        (chat({"type": "image_url"}), "messages[0].content[0]", "image_url is missing"),
        (chat({"type": "input_image", "file_id": "f"}), "messages[0].content[0]", "files are not kept here"),
        (chat(image(detail="most")), "messages[0].content[0]", "low, high or auto"),
        (chat({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}),
         "messages[0].content[0]", "no support for videos as files"),
        (responses({"type": "input_image", "image_url": WRONG}), "input[0].content[0].image_url", "it is no picture"),
        (responses({"type": "input_image", "file_id": "f"}), "input[0].content[0]", "files are not kept here"),
        (claude(claude_image(WRONG)), None, "messages[0].content[0].source: it is no picture"),
        (claude({"type": "image", "source": {"type": "file", "file_id": "f"}}), None, "files are not kept here"),
        (ollama_chat(DATA, WRONG), None, "messages[0].images[1]: it is no picture"),
        (ollama_chat(3), None, "images must be texts"),
        (("/api/generate", {"model": "demo", "prompt": "a", "images": [WRONG]}), None, "images[0]: it is no picture"),
        (("/api/generate", {"model": "demo", "prompt": "a", "images": [DATA], "raw": True}), None, "leave raw out"),
        (("/api/embed", {"model": "demo", "input": "a", "images": [DATA]}), None, "images"),
        (("/v1/embeddings", {"input": "a", "images": [DATA]}), "images", "images"),
        (("/v1/completions", {"prompt": "a", "multimodal_data": [DATA]}), "multimodal_data", "messages"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_a_400_that_names_its_place(
    asked: tuple[str, dict[str, Any]], place: str | None, said: str
) -> None:
    pictures = FakePictures()
    response, backend = served(post(*asked), pictures)
    assert response.status_code == 400, response.text
    assert said in response.text
    if place is not None:
        assert response.json()["error"]["param"] == place
    assert not backend.requests
    assert not +pictures.held


@pytest.mark.parametrize(
    ("asked", "place"),
    [
        (chat(image()), "messages[0].content[0].image_url"),
        (responses({"type": "input_image", "image_url": URL}), "input[0].content[0].image_url"),
        (claude(claude_image()), "messages[0].content[0].source"),
        (ollama_chat(DATA), "messages[0].images[0]"),
    ],
)
def test_a_model_without_a_tower_says_so_or_reads_a_note(asked: tuple[str, dict[str, Any]], place: str) -> None:
    response, _ = served(post(*asked), has_tower=False)
    assert response.status_code == 400
    assert f"{place}: no support for images: demo reads text only: its files hold no tower" in response.text
    assert "--ignore_images" in response.text
    response, backend = served(post(*asked), has_tower=False, ignores_images=True)
    assert response.status_code == 200, response.text
    assert "[picture left out: only text can be read here]" in backend.prompts[0]
    assert response.headers[IGNORED_HEADER].startswith(("messages.", "input."))


def test_an_ignored_picture_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        for _ in range(3):
            await post(*chat(image()))(client)

    served(ask, has_tower=False, ignores_images=True, is_strict_on_fields=True)
    assert [one.getMessage().count("messages.content.image_url") for one in caplog.records if "carry" in one.msg] == [1]


@pytest.mark.parametrize(("path", "param"), [("/v1/chat/completions", "messages"), ("/v1/responses", "input")])
def test_a_picture_that_no_step_computes_names_its_field(
    path: str, param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a family whose pictures are computed whole."""
    monkeypatch.setattr(PictureBackend, "max_picture_len", 9)
    monkeypatch.setattr(PictureBackend, "picture_sight", Sight.PICTURE)
    parts = {"messages": [image()], "input": [{"type": "input_image", "image_url": URL}]}[param]
    answer, backend = served(post(path, {param: [user(*parts)]}))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith("a picture takes 10 positions, which this model computes in one step")
    assert backend.requests == []


def test_pictures_of_earlier_responses_are_read_again() -> None:
    part = {"type": "input_image", "image_url": URL}

    async def ask(client: httpx.AsyncClient) -> None:
        first = await post("/v1/responses", {"input": [user(part)]})(client)
        body = {"input": "And now?", "previous_response_id": first.json()["id"]}
        assert (await post("/v1/responses", body)(client)).status_code == 200

    _, backend = served(ask)
    check_media(backend.requests[1], [PNG])
    assert "And now?" in backend.prompts[1]
