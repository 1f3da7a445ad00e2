"""The demo model's tower: its training's parts against transformers, the folder that ships, and what it sees."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from ktransformers import LLM
from ktransformers.cli.parsing.options import with_default_model
from ktransformers.cli.serve.serving import model_names
from ktransformers.config import EngineConfig
from tests.support.models.demo import DEMO_CHECKPOINT, DEMO_EYES, DEMO_GGUF, demo_with_eyes

EXAMPLE = DEMO_CHECKPOINT.parent
IMAGE_TOKEN = "<|image_pad|>"


@pytest.fixture(autouse=True)
def example_on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before, path = set(sys.modules), list(sys.path)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.syspath_prepend(str(EXAMPLE / "vision"))
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:  # `data`, `model` and the like must not leak into other tests
        if str(EXAMPLE) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


def test_the_same_seed_draws_the_same_picture() -> None:
    from draw import draw_scene, random_scene

    def drawn() -> list[bytes]:
        rng = random.Random(3)
        return [draw_scene(rng, random_scene(rng))[0].tobytes() for _ in range(20)]

    assert drawn() == drawn()


def test_training_sees_what_the_processor_makes() -> None:
    from draw import draw_scene, random_scene
    from train import pixels_of

    processor, rng = AutoProcessor.from_pretrained(DEMO_EYES), random.Random(4)
    for _ in range(20):
        image, _ = draw_scene(rng, random_scene(rng))
        made = processor.image_processor(image, return_tensors="pt")["pixel_values"][0]
        assert torch.allclose(made, torch.from_numpy(pixels_of(image).astype(np.float32)) / 127.5 - 1, atol=1e-6)


def test_positions_are_named_by_what_is_drawn_there() -> None:
    from data import Scene, Thing, cell_labels
    from train import spots_of

    scene = Scene((Thing("circle", "red"), Thing("digit", "blue", "7")))
    spots = spots_of(Image.new("RGB", (200, 100)), [(50.0, 50.0, 25.0), (190.0, 50.0, 5.0)], squash=False)
    kinds = np.array(cell_labels(scene, spots))[:, 0].reshape(4, 4)
    assert kinds.tolist() == [[0, 0, 0, 0], [1, 1, 0, 8], [1, 1, 0, 8], [0, 0, 0, 0]]


def test_the_placeholder_changes_no_ids_of_texts() -> None:
    from generators import conversation
    from render import pieces

    before = Tokenizer.from_file(str(DEMO_CHECKPOINT / "tokenizer.json"))
    after = Tokenizer.from_file(str(DEMO_EYES / "tokenizer.json"))
    rng = random.Random(5)
    texts = ["".join(text for text, _ in pieces(*conversation(rng))) for _ in range(30)]
    texts += ["".join(chr(rng.randrange(0x20, 0xD800)) for _ in range(200)) for _ in range(30)]
    assert [before.encode(text).ids for text in texts] == [after.encode(text).ids for text in texts]
    assert before.id_to_token(after.token_to_id(IMAGE_TOKEN)) == "ÿ"  # the byte 0xFF, which UTF-8 has nowhere
    assert before.get_vocab_size() == after.get_vocab_size()


def test_the_template_is_the_checkpoints_for_text_and_what_training_wrote_for_pictures() -> None:
    from data import NUM_POSITIONS, conversation
    from draw import random_scene
    from generators import conversation as of_text
    from render import pieces

    plain, eyes = (AutoTokenizer.from_pretrained(folder) for folder in (DEMO_CHECKPOINT, DEMO_EYES))
    rng = random.Random(6)
    for _ in range(50):
        messages, tools = of_text(rng)
        texts = [one.apply_chat_template(messages, tools=tools or None, tokenize=False) for one in (plain, eyes)]
        assert texts[0] == texts[1]
    for _ in range(50):
        messages = conversation(rng, random_scene(rng))
        parted = []
        for message in messages:
            before, picture, after = message["content"].partition(IMAGE_TOKEN * NUM_POSITIONS)
            parts = [
                {"type": "text", "text": before},
                *([{"type": "image"}] if picture else []),
                {"type": "text", "text": after},
            ]
            parted.append({**message, "content": parts} if message["role"] == "user" else message)
        text = eyes.apply_chat_template(parted, tokenize=False).replace(IMAGE_TOKEN, IMAGE_TOKEN * NUM_POSITIONS)
        assert text == "".join(one for one, _ in pieces(messages))


def test_the_language_model_of_training_is_transformers() -> None:
    from model import FrozenLanguageModel

    language = FrozenLanguageModel(DEMO_CHECKPOINT)
    model = AutoModelForCausalLM.from_pretrained(DEMO_CHECKPOINT, dtype=torch.float32)
    ids = torch.randint(0, 2500, (2, 30), generator=torch.Generator().manual_seed(1))
    x = model.get_input_embeddings()(ids).detach().requires_grad_()
    want = model(inputs_embeds=x).logits
    y = x.detach().clone().requires_grad_()
    got = language.logits(y, torch.arange(60)).view_as(want)
    assert (got - want).abs().mean() < 0.05 * want.std()  # products in BF16
    labels = ids.flatten()
    entropy = torch.nn.functional.cross_entropy
    theirs = torch.autograd.grad(entropy(want.flatten(0, 1), labels), x)[0]
    ours = torch.autograd.grad(entropy(got.flatten(0, 1), labels), y)[0]
    assert torch.cosine_similarity(ours.flatten(), theirs.flatten(), 0) > 0.98


def test_what_ships() -> None:
    """A composite around the language model as it is; no weight of that, and the tower under 8 MB."""
    config = json.loads((DEMO_EYES / "config.json").read_text(encoding="utf-8"))
    assert config["text_config"] == json.loads((DEMO_CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    state = load_file(DEMO_EYES / "vision.safetensors")
    assert {name.split(".")[1] for name in state} == {"vision_tower", "multi_modal_projector"}
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    assert sum(file.stat().st_size for file in DEMO_EYES.iterdir()) < 8_000_000


def test_export_writes_what_ships(tmp_path: Path) -> None:
    import export

    export.main(
        [
            "--weights",
            str(DEMO_EYES / "vision.safetensors"),
            "--out",
            str(tmp_path / "out"),
            "--whole",
            str(tmp_path / "whole"),
        ]
    )
    for file in DEMO_EYES.iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    stored = load_file(DEMO_CHECKPOINT / "model.safetensors")
    assert torch.equal(model.get_input_embeddings().weight, stored["model.embed_tokens.weight"].float())


def circle(draw: ImageDraw.ImageDraw) -> None:
    draw.ellipse((200, 120, 440, 360), fill="red")


def square(draw: ImageDraw.ImageDraw) -> None:
    draw.rectangle((220, 140, 420, 340), fill="blue")


def seven(draw: ImageDraw.ImageDraw) -> None:
    draw.line([(240, 100), (400, 100), (300, 380)], fill="green", width=30, joint="curve")


def test_it_sees(tmp_path: Path) -> None:
    demo_with_eyes(tmp_path)
    processor = AutoProcessor.from_pretrained(tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    wanted = {
        circle: "red circle",
        square: "blue square",
        seven: "green 7",
    }
    for drawn, answer in wanted.items():
        image = Image.new("RGB", (640, 480), "white")
        drawn(ImageDraw.Draw(image))
        turn = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is in the picture?"}]}]
        text = processor.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        inputs = processor(images=image, text=text, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=30, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert processor.tokenizer.decode(ids, skip_special_tokens=True) == answer


def test_the_engine_sees_what_transformers_sees() -> None:
    """From the GGUF of the language model, with the tower of the folder beside it."""
    with LLM(cpu_infer=1, self_check=False) as llm:
        for drawn, answer in ((circle, "red circle"), (square, "blue square")):
            image = Image.new("RGB", (640, 480), "white")
            drawn(ImageDraw.Draw(image))
            parts = [{"type": "image", "image": image}, {"type": "text", "text": "What is in the picture?"}]
            (output,) = llm.chat([{"role": "user", "content": parts}], temperature=0.0)
            assert output.text == answer
        (output,) = llm.chat("What is 17 + 25?", temperature=0.0)
        assert output.text == "17 + 25 = 42."


def test_the_model_is_served_by_one_name() -> None:
    config = with_default_model(EngineConfig())
    assert (config.model_path, config.gguf_path) == (DEMO_EYES, DEMO_GGUF)
    assert model_names(argparse.Namespace(model_name=[]), config) == (DEMO_GGUF.stem,)
