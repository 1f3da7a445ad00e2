"""What is asked about a drawn picture and what the demo model answers, and both as tokens.

A picture comes with a short conversation: one question or two, the picture's placeholder in the first. It knows nothing
of drawing and of models.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from draw import COLOURS, SHAPES, Scene, Thing
from tokenizers import Tokenizer

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for the text side: generators, render
from generators import SYSTEM_PROMPTS
from generators.base import vary
from render import pieces

PLACEHOLDER = "<|image_pad|>"
UNUSED = "\u00ff"  # how byte-level BPE writes the byte 0xFF, which no UTF-8 holds: its id and its row are free
NUM_POSITIONS = 16  # of a picture

NOTHING, NO_DIGIT = "nothing", "none"  # what a blank picture shows, and the digit of one with shapes

Exchange = tuple[str, str]  # question, answer

_DESCRIBE = (
    "What is in the picture?", "What is in the picture?", "Describe this image.", "Describe the picture.", "What do you see?", "What is this?",
    "What does the picture show?", "What is shown here?", "Tell me what you see.", "What can you see in this image?", "What is it?", "Look at this.",
    "What did I draw?", "Can you see this picture?", "Please describe the image.", "What's in this image?", "Explain this picture.", "What is drawn here?",
    "What's this?", "Recognize this.", "Caption this image.", "What is in this photo?", "What is in the image?", "Describe it.",
)  # fmt: skip
_COLOUR = ("What colour is it?", "What color is it?", "Which colour is it?", "What colour is the {k}?", "What color is the {k}?", "Which color does the {k} have?",
           "Name the colour.", "What is the colour of the {k}?", "Tell me the color of the {k}.", "What color?", "Which colour do you see?")  # fmt: skip
_SHAPE = ("What shape is it?", "Which shape is this?", "What shape do you see?", "Which shape do you see?", "Name the shape.", "What kind of shape is this?",
          "Which shape is in the picture?", "What shape is shown?", "What shape is this?")  # fmt: skip
_DIGIT = ("Which digit do you see?", "What digit is this?", "Which number is it?", "What number is this?", "Read the number.", "Which number do you see?",
          "What number is in the picture?", "Which digit is in the image?", "What does it say?", "Read this.", "Which digit is it?")  # fmt: skip
_COUNT = ("How many shapes?", "How many shapes are there?", "How many shapes do you see?", "Count the shapes.", "How many shapes are in the picture?",
          "How many objects are there?", "How many things do you see?")  # fmt: skip


def _named(thing: Thing) -> str:
    return f"{thing.colour} {thing.text or thing.kind}"


def describe(scene: Scene) -> str:
    """The answer to a question for all that is seen: values alone, as the model answers from a table."""
    return ", ".join(_named(thing) for thing in scene.things) or NOTHING


def _whole(rng: random.Random, scene: Scene) -> Exchange:
    return (vary(rng, rng.choice(_DESCRIBE)) if rng.random() > 0.06 else ""), describe(scene)


def _colour(rng: random.Random, scene: Scene) -> Exchange:
    """Of the one thing, or of one whose kind is there once."""
    kinds = [thing.kind for thing in scene.things]
    alone = [thing for thing in scene.things if kinds.count(thing.kind) == 1]
    if not scene.things:
        return vary(rng, rng.choice(_COLOUR)).format(k="shape"), NOTHING
    if not alone:
        return _whole(rng, scene)
    thing = rng.choice(alone)
    if len(kinds) > 1:
        return vary(rng, rng.choice([one for one in _COLOUR if "{k}" in one])).format(k=thing.kind), thing.colour
    words = ("digit", "number") if thing.text else (thing.kind, "shape")
    return vary(rng, rng.choice(_COLOUR)).format(k=rng.choice(words)), thing.colour


def _shape(rng: random.Random, scene: Scene) -> Exchange:
    return vary(rng, rng.choice(_SHAPE)), ", ".join(thing.text or thing.kind for thing in scene.things) or NOTHING


def _digit(rng: random.Random, scene: Scene) -> Exchange:
    answer = (scene.things[0].text or NO_DIGIT) if scene.things else NOTHING
    return vary(rng, rng.choice(_DIGIT)), answer


def _count(rng: random.Random, scene: Scene) -> Exchange:
    return vary(rng, rng.choice(_COUNT)), str(sum(not thing.text for thing in scene.things))


def exchange(rng: random.Random, scene: Scene) -> Exchange:
    """A question about the scene, and its answer."""
    has_digits = bool(scene.things and scene.things[0].text)
    kinds: dict[Callable[[random.Random, Scene], Exchange], float] = {
        _whole: 4, _colour: 2, _shape: 0.3 if has_digits else 2, _digit: 4 if has_digits else 0.4, _count: 0.2 if has_digits else 1.2,
    }  # fmt: skip
    return rng.choices(list(kinds), list(kinds.values()))[0](rng, scene)


def conversation(rng: random.Random, scene: Scene) -> list[dict]:
    """Messages about one picture, whose placeholder stands in the first question."""
    messages = [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] if rng.random() < 0.1 else []
    for index in range(rng.choice((1, 1, 1, 2))):
        question, answer = exchange(rng, scene)
        if index == 0:
            gap = rng.choice(("", "", "", "\n", " ")) if question else ""
            picture = PLACEHOLDER * NUM_POSITIONS
            question = f"{picture}{gap}{question}" if rng.random() < 0.8 else f"{question}{gap}{picture}"
        messages += [{"role": "user", "content": question or _DESCRIBE[0]}, {"role": "assistant", "content": answer}]
    return messages


def with_placeholder(tokenizer: str) -> str:
    """A tokenizer.json in which the placeholder has the id of the unused byte; no text's ids change."""
    content = json.loads(tokenizer)
    vocab = content["model"]["vocab"]
    index = vocab[UNUSED]
    content["model"]["vocab"] = {PLACEHOLDER if token == UNUSED else token: i for token, i in vocab.items()}
    entry = {"id": index, "content": PLACEHOLDER} | dict.fromkeys(
        ("single_word", "lstrip", "rstrip", "normalized"), False
    )
    content["added_tokens"].insert(0, {**entry, "special": True})
    return json.dumps(content, ensure_ascii=False, indent=2)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The checkpoint's tokenizer, with the placeholder."""
    return Tokenizer.from_str(with_placeholder((folder / "tokenizer.json").read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Sample:
    """Tokens of a conversation and which of them the assistant says."""

    ids: list[int]
    is_answer: list[bool]


def encode(tokenizer: Tokenizer, messages: list[dict]) -> Sample:
    ids: list[int] = []
    is_answer: list[bool] = []
    for text, said in pieces(messages):
        found = tokenizer.encode(text, add_special_tokens=False).ids
        ids += found
        is_answer += [said] * len(found)
    return Sample(ids, is_answer)


def _classes(thing: Thing | None) -> list[int]:
    """Kind, colour and two digits of a thing as numbers of classes, 0 for nothing."""
    if thing is None:
        return [0, 0, 0, 0]
    digits = [int(thing.text[i]) + 1 if i < len(thing.text) else 0 for i in range(2)]
    return [(*SHAPES, "digit").index(thing.kind) + 1, tuple(COLOURS).index(thing.colour) + 1, *digits]


def labels(scene: Scene) -> list[int]:
    """Classes of the whole picture for the heads: kind and colour of three places, then two digits."""
    found = [_classes(scene.things[i] if i < len(scene.things) else None) for i in range(3)]
    return [*(value for one in found for value in one[:2]), *found[0][2:]]


def cell_labels(scene: Scene, spots: Sequence[tuple[float, float, float, float]]) -> list[list[int]]:
    """Classes of each position, row by row: of the thing whose box its middle lies in, or whose middle lies in it.

    spots: middle and half sides of each thing's box, in shares of the picture's sides.
    """
    side = math.isqrt(NUM_POSITIONS)
    cells = [_classes(None) for _ in range(NUM_POSITIONS)]
    for thing, (x, y, wide, tall) in zip(scene.things, spots, strict=True):
        wide *= max(1.0, 0.8 * len(thing.text))
        for row in range(side):
            for column in range(side):
                across, down = abs((column + 0.5) / side - x), abs((row + 0.5) / side - y)
                if (across < wide and down < tall) or (across <= 0.5 / side and down <= 0.5 / side):
                    cells[row * side + column] = _classes(thing)
    return cells


LABEL_SIZES = (9, 12, 9, 12, 9, 12, 11, 11)
CELL_SIZES = (9, 12, 11, 11)
