"""Pictures and the server's settings: flags, limits, what is counted, and what clients are told of a model."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from ktransformers.cli.serve.command import server_parser
from ktransformers.cli.serve.serving import backend_maker, server_config
from ktransformers.config import EngineConfig
from ktransformers.errors import ConfigError
from ktransformers.media.fetching import Version
from ktransformers.media.picture import ReadPicture
from ktransformers.media.records import MediaItem
from ktransformers.server.answers.pictures import RequestPictures
from ktransformers.server.answers.requests import Conversation, Message, UnreadPicture
from ktransformers.server.app import create_app
from ktransformers.server.backend.interfaces.balance_serve import BalanceServeInterface
from ktransformers.server.config import ServerConfig
from tests.server.api.test_pictures import OTHER_URL, URL, WRONG, chat, check_media, image, of_chat, post, served, text
from tests.support.models.demo import DEMO_GGUF
from tests.support.servers.picture_backend import PAD, PNG, TOKENIZER, FakePictures, PictureBackend

NONE_COMPUTED = {"computed": 0, "tower_seconds": 0.0}


def test_the_number_of_pictures_is_limited() -> None:
    response, _ = served(post(*chat(image(), image(), image())), max_images=2)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].content[2].image_url"
    assert "3 pictures are more than 2 (--max_images)" in response.text
    assert served(post(*chat(image(), image())), max_images=2)[0].status_code == 200


def test_pictures_of_hosts_that_are_named_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: the next turn names it again."""
    fetched: list[tuple[str, Any]] = []

    def fetch(url: str, allowed_hosts: Sequence[str], known: Version | None) -> tuple[bytes, Version]:
        fetched.append((url, allowed_hosts))
        return PNG, Version(url, {}, None)

    monkeypatch.setattr("ktransformers.media.fetched.fetch_if_changed", fetch)
    first, again = (chat(image("https://a.example/b.png"), text(words)) for words in ("a", "b"))

    async def ask(client: httpx.AsyncClient) -> list[int]:
        other = chat(image("https://a.test/b.png"))
        return [(await client.post(path, json=body)).status_code for path, body in (first, again, other)]

    codes, backend = served(ask, image_hosts=("*.example",))
    assert codes == [200, 200, 400]
    assert fetched == [("https://a.example/b.png", ("*.example",))]
    for request in backend.requests:
        check_media(request, [PNG])


def test_flags_make_the_configuration() -> None:
    flags = ["--gguf_path", str(DEMO_GGUF), "--ignore_images", "--max_images", "3"]
    hosts = ["--allowed_image_hosts", "a.example,*.b.example", "--allowed_image_hosts", "c.example"]
    config = server_config(server_parser().parse_args([*flags, *hosts]), EngineConfig(gguf_path=DEMO_GGUF))
    assert (config.ignores_images, config.max_images) == (True, 3)
    assert config.image_hosts == ("a.example", "*.b.example", "c.example")
    plain = server_config(server_parser().parse_args(flags[:2]), EngineConfig(gguf_path=DEMO_GGUF))
    assert (plain.ignores_images, plain.max_images, plain.image_hosts) == (False, 64, ())
    with pytest.raises(ConfigError, match="--max_images"):
        ServerConfig(model_names=("m",), max_images=-1)


@pytest.mark.parametrize("has_journal", [True, False])
def test_with_a_journal_pictures_lie_in_its_folder(tmp_path: Path, has_journal: bool) -> None:
    flags = ["--state_dir", str(tmp_path)] if has_journal else []
    args = server_parser().parse_args(["--gguf_path", str(DEMO_GGUF), *flags])
    made = backend_maker(args, EngineConfig(gguf_path=DEMO_GGUF))()
    assert isinstance(made, BalanceServeInterface)
    assert made._config.engine.picture_folder == (tmp_path / "pictures" if has_journal else None)


def test_tokenize_has_the_token_of_a_picture_at_its_positions() -> None:
    _, body = chat(image(), text("a"))
    pictures = FakePictures()
    prompt = f"<|im_start|>user\n<v>{10 * PAD}</v>a<|im_end|><|im_start|>assistant\n"

    async def ask(client: httpx.AsyncClient) -> tuple[Any, Any]:
        tokenized = (await client.post("/tokenize", json=body | {"return_token_strs": True})).json()
        return tokenized, (await client.post("/detokenize", json={"tokens": tokenized["tokens"]})).json()

    (found, back), _ = served(ask, pictures)
    assert found["tokens"] == TOKENIZER.encode(prompt)
    assert "".join(found["token_strs"]) == prompt
    assert back == {"prompt": prompt}
    assert not +pictures.held
    assert served(post("/tokenize", body), has_tower=False)[0].status_code == 400


@pytest.mark.parametrize("has_tower", [True, False])
def test_capabilities_are_told(has_tower: bool) -> None:
    async def ask(client: httpx.AsyncClient) -> list[Any]:
        shown = await client.post("/api/show", json={"model": "demo"})
        gets = [(await client.get(path)).json() for path in ("/v1/models", "/v1/models/demo", "/props", "/v1/status")]
        return [shown.json(), *gets]

    (shown, models, model, props, status), _ = served(ask, has_tower=has_tower)
    assert ("vision" in shown["capabilities"]) == has_tower
    told = {"input_modalities": ["text", "image"][: 1 + has_tower], "output_modalities": ["text"]}
    assert models["data"][0]["architecture"] == model["architecture"] == told
    assert props["modalities"] == {"vision": has_tower, "audio": False}
    assert status["pictures"] == ({"read": 0, **NONE_COMPUTED} if has_tower else None)


def test_metrics_count_pictures() -> None:
    async def ask(client: httpx.AsyncClient) -> tuple[str, Any]:
        await post(*chat(image(), image(OTHER_URL)))(client)
        await post(*chat(image("%")))(client)
        await post(*of_chat(WRONG)[:2])(client)
        return (await client.get("/metrics")).text, (await client.get("/v1/status")).json()

    (metrics, status), _ = served(ask)
    for outcome, number in (("read", 2), ("refused", 1), ("left_out", 1)):
        assert f'ktransformers:pictures_total{{model_name="demo",outcome="{outcome}"}} {number}.0' in metrics
    assert 'ktransformers:picture_read_seconds_count{model_name="demo"} 2.0' in metrics
    assert status["pictures"] == {"read": 2, **NONE_COMPUTED}


def test_large_pictures_pass_and_huge_ones_do_not() -> None:
    large = base64.b64encode(PNG + bytes(20_000_000)).decode()
    pictures = FakePictures()
    response, _ = served(post(*chat(image(f"data:image/png;base64,{large}"))), pictures)
    assert response.status_code == 200, response.text
    assert pictures.calls == [(PNG + bytes(20_000_000), None)]
    response, _ = served(post(*chat(image("data:image/png;base64," + "A" * 200_000_000))))
    assert response.status_code == 413


def test_an_item_says_where_its_picture_begins() -> None:
    _, backend = served(post(*chat(text("ab"), image())))
    (item,) = backend.requests[0].media
    start = len(TOKENIZER.encode("<|im_start|>user\nab<v>"))
    assert item == MediaItem(FakePictures().read(PNG).digest, start, 10)


def test_fetching_takes_so_long_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktransformers.server.answers.pictures._FETCH_SECONDS", 0.0)
    monkeypatch.setattr(
        "ktransformers.media.fetched.fetch_if_changed", lambda url, hosts, known: (PNG, Version(url, {}, None))
    )
    response, backend = served(post(*chat(*[image("https://a.example/b.png")] * 2)), image_hosts=("a.example",))
    assert response.status_code == 400
    assert "messages[0].content[1].image_url: fetching the pictures of this request took more" in response.text
    assert not backend.requests


def test_pictures_that_come_when_nobody_waits_any_more_are_let_go() -> None:
    class Leaving(FakePictures):
        """Whoever asked leaves while the first picture is read."""

        def read(self, data: bytes, detail: str | None = None) -> ReadPicture:
            asked.release()
            return super().read(data, detail)

    backend = PictureBackend(pictures=(pictures := Leaving()))
    asked = RequestPictures(create_app(backend, ServerConfig(model_names=("m",))).state.service)
    parts = [UnreadPicture(source=URL, place="a", name="a")] * 2
    asyncio.run(asked.read(Conversation(messages=[Message(role="user", content=parts)])))
    assert len(pictures.calls) == 2
    assert not +pictures.held
