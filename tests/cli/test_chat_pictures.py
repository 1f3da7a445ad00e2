"""Pictures in a chat: named with @, pasted as a path, kept with the conversation. The model is a fake."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from ktransformers.cli.chat.commands import bound_command
from ktransformers.cli.chat.loop import ChatLoop, ChatOptions
from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.api.llm import LLM
from ktransformers.engine.api.pictures import Pictures
from ktransformers.engine.media.family import PictureFamily
from ktransformers.engine.media.features import PictureFeatures
from ktransformers.media.fetching import data_of
from ktransformers.media.picture import ReadPicture
from ktransformers.tokenizer.loading import load_tokenizer
from tests.cli.test_chat_commands import Recorder, Script
from tests.support.engines.fake_runner import FakeEngine, FakeRunner, scripted_logits
from tests.support.pictures.folders import FAMILIES, LocalReader, write_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("qwen3_vl"), "qwen3_vl", FAMILIES["qwen3_vl"])


class Encoder:
    """A tower whose rows nobody looks at. reader: who knows how many each picture has."""

    family = PictureFamily(token_id=0)

    def __init__(self, reader: LocalReader):
        self.counts = dict[bytes, int]()
        read = reader.read

        def noted(data: bytes, detail: str | None = None) -> ReadPicture:
            made = read(data, detail)
            self.counts[made.digest] = made.num_positions
            return made

        reader.read = noted  # type: ignore[method-assign]

    def features(self, digest: bytes) -> PictureFeatures:
        return PictureFeatures(torch.zeros(self.counts[digest], 1))

    def positions(self, token_ids: object, media: object) -> None:
        return None


class Room:
    """A chat whose model says how many characters of text it was asked."""

    def __init__(self, folder: Path, reads: bool = True):
        tokenizer = load_tokenizer(folder, None)
        pictures = Pictures(EngineConfig(model_path=folder))
        if reads:
            local: Any = LocalReader(folder)
            local.close = lambda: pictures.store and pictures.store.close()
            pictures.reader = local
            tokenizer.use_pictures(local)
        else:
            pictures.why_not = "its files hold no tower"
        runner = FakeRunner(scripted_logits(tokenizer, lambda prompt: "seen"), tokenizer.vocab_size, 4096)
        engine: Any = FakeEngine(runner, tokenizer)
        engine.executor.pictures = Encoder(local) if reads else None
        self.llm = LLM.from_engine(engine)
        self.llm._take(self.llm._batches, pictures, None)
        self.view, self.source = Recorder(), Script()
        params = SamplingParams(temperature=0, max_tokens=20)
        options = ChatOptions(params, is_interactive=True, find_command=bound_command)
        self.loop = ChatLoop(self.llm, self.view, self.source, options)

    def say(self, *turns: str) -> None:
        self.source.turns = list(turns)
        assert self.loop.run() == 0

    @property
    def last(self) -> Any:
        return self.loop.conversation.turns[-2]["content"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, colour in (("a.png", "red"), ("my cat.png", "blue")):
        Image.new("RGB", (64, 96), colour).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("BM is no picture")
    (tmp_path / "broken.png").write_bytes((tmp_path / "a.png").read_bytes()[:60])
    return tmp_path


@pytest.fixture
def room(folder: Path) -> Iterator[Room]:
    made = Room(folder)
    yield made
    made.llm.close()


def decoded(part: Any) -> bytes:
    return data_of(part["image_url"]["url"])


def test_a_picture_that_is_named(room: Room, here: Path) -> None:
    room.say("what is @a.png?")
    assert "[picture 64 x 96, 6 tokens]" in room.view.notes
    assert room.view.errors == [""]
    picture, words = room.last
    assert decoded(picture) == (here / "a.png").read_bytes()
    assert words == {"type": "text", "text": "what is @a.png?"}
    assert room.view.answers[-2] == "seen"
    (item,) = room.loop._last.media  # type: ignore[union-attr]
    assert item.length == 6


@pytest.mark.parametrize(
    "typed",
    ["HERE/a.png", "look: HERE/a.png", "'HERE/my cat.png'", '"HERE/my cat.png" what?', "HERE/my\\ cat.png", "~/a.png"],
)
def test_a_path_that_is_pasted(room: Room, here: Path, typed: str) -> None:
    room.say(typed.replace("HERE", str(here)))
    assert "[picture 64 x 96, 6 tokens]" in room.view.notes
    assert room.last[0]["type"] == "image_url"


def test_what_is_no_picture_stays_text(room: Room, here: Path) -> None:
    room.say("read @notes.txt", f"{here}/gone.png")
    assert room.loop.conversation.turns[0]["content"].startswith("read @notes.txt\n\nnotes.txt:\n```txt\nBM is")
    assert room.last == f"{here}/gone.png"


def test_a_broken_picture_is_an_error_and_the_conversation_stays(room: Room, here: Path) -> None:
    room.say("hello", "what is @broken.png")
    assert "the picture is damaged" in room.view.errors[-1]
    assert len(room.loop.conversation.turns) == 2


def test_a_model_without_a_tower_says_so_by_name(folder: Path, here: Path) -> None:
    room = Room(folder, reads=False)
    room.say("what is @a.png")
    assert room.view.errors[-1] == f"{folder.name} reads text only, no pictures: its files hold no tower"
    assert room.loop.conversation.turns == []
    room.llm.close()


def test_several_regenerated_edited_and_kept(room: Room, here: Path) -> None:
    room.say('compare @a.png and @"my cat.png"', "/regen", "/edit")
    assert room.source.prefilled == 'compare @a.png and @"my cat.png"'
    assert [part["type"] for part in room.last] == ["image_url", "image_url", "text"]
    room.say("/save kept.json", "/clear", "/load kept.json", "and now?")
    assert room.view.errors == [""]
    kept = json.loads((here / "kept.json").read_text())
    assert [decoded(part) for part in kept[0]["content"][:2]] == [
        (here / name).read_bytes() for name in ("a.png", "my cat.png")
    ]
    assert len(room.loop._last.media) == 2  # type: ignore[union-attr]
    (here / "odd.json").write_text(json.dumps([{"role": "user", "content": [{"type": "video", "video": "x"}]}]))
    room.say("/load odd.json")
    assert "must be text, or parts of text and pictures" in room.view.errors[-1]


def test_the_oldest_turns_go_with_their_pictures(room: Room, here: Path) -> None:
    room.say("what is @a.png", *["x" * 1000] * 5)
    assert any("messages are left out" in note for note in room.view.notes)
    assert room.loop._last.media == ()  # type: ignore[union-attr]


def test_llm_chat_takes_pictures_in_all_spellings(room: Room, here: Path) -> None:
    data = (here / "a.png").read_bytes()
    image = Image.open(io.BytesIO(data))
    encoded = base64.b64encode(data).decode()
    parts: list[dict[str, Any]] = [
        {"type": "image", "image": here / "a.png"},
        {"type": "image", "image": str(here / "a.png")},
        {"type": "image", "image": data},
        {"type": "image", "image": image},
        {"type": "image", "url": f"data:image/png;base64,{encoded}"},
        {"type": "image", "base64": encoded},
        {"type": "image", "path": f"file://{here}/a.png"},
        {"type": "image_pil", "image_pil": image},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}", "detail": "low"}},
        {"type": "image_url", "image_url": f"data:image/png;base64,{encoded}"},
    ]
    found = []
    for part in parts:
        (output,) = room.llm.chat([{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}])
        found.append((output.media, output.prompt_token_ids))
    assert len(set(found)) == 1
    prompt = room.llm.read_chat([{"role": "user", "content": [parts[0], {"type": "text", "text": "what?"}]}])
    assert tuple(prompt) == found[0][1]
    assert "".join(event.text for event in room.llm.stream(prompt)) == "seen"


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image"}, "a picture is"),
        ({"type": "image", "image": 3}, "a picture is"),
        ({"type": "image", "image": "gone.png"}, "the picture gone.png cannot be read"),
        ({"type": "image", "image": b"text"}, "no picture that can be read"),
        (
            {"type": "image_url", "image_url": {"url": "http://a.example/b.png"}},
            "not fetched here; give a path, the bytes",
        ),
        ({"type": "image_url", "image_url": {"url": "data:;base64,AAAA", "detail": "much"}}, "detail|no picture"),
        ({"type": "image", "image": b"a", "url": "b"}, "a picture is"),
    ],
)
def test_llm_chat_says_what_is_wrong(room: Room, part: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        room.llm.chat([{"role": "user", "content": [part]}])


def test_files_of_pictures_are_held_meanwhile(room: Room, here: Path) -> None:
    prompt = room.llm.read_chat([{"role": "user", "content": [{"type": "image", "image": here / "a.png"}]}])
    store = room.llm.pictures.store
    assert store is not None
    events = room.llm.stream(prompt)
    next(events)
    assert store._held == {prompt.media[0].digest: 1}
    list(events)
    assert not store._held
