"""What is asked about a drawn picture and what the demo model answers, in English and Chinese, and both as tokens.

A picture comes with a short conversation: one to three questions, the picture's placeholder in the first one. It knows
nothing of drawing and of models.
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

ZH_SHAPES = {"circle": "圆形", "square": "正方形", "triangle": "三角形", "star": "星形", "cross": "十字", "ring": "圆环", "heart": "心形"}  # fmt: skip
ZH_COLOURS = {
    "red": "红色", "orange": "橙色", "yellow": "黄色", "green": "绿色", "blue": "蓝色", "purple": "紫色", "pink": "粉色", "brown": "棕色",
    "black": "黑色", "white": "白色", "grey": "灰色",
}  # fmt: skip
_COUNTS, _ZH_COUNTS = ("no shapes", "one shape", "two shapes", "three shapes"), ("零", "一", "两", "三")
BLANK, ZH_BLANK = "I cannot see anything: the picture is blank.", "我什么都看不到：图片是空白的。"
NO_DIGIT, ZH_NO_DIGIT = "I cannot see a digit.", "我看不到数字。"

Exchange = tuple[str, str]  # question, answer

_DESCRIBE = (
    "What is in the picture?", "What is in the picture?", "Describe this image.", "Describe the picture.", "What do you see?", "What is this?",
    "What does the picture show?", "What is shown here?", "Tell me what you see.", "What can you see in this image?", "What is it?", "Look at this.",
    "What did I draw?", "Can you see this picture?", "Please describe the image.", "What's in this image?", "Explain this picture.", "What is drawn here?",
    "What's this?", "Recognize this.", "Caption this image.", "What is in this photo?",
)  # fmt: skip
_ZH_DESCRIBE = ("图片里有什么？", "描述这张图片。", "你看到了什么？", "这是什么？", "图中是什么？", "请描述一下这幅图。", "我画了什么？", "看看这张图。")  # fmt: skip
_COLOUR = ("What colour is it?", "What color is it?", "Which colour is it?", "What colour is the {k}?", "What color is the {k}?", "Which color does the {k} have?",
           "Name the colour.", "What is the colour of the {k}?", "Tell me the color of the {k}.", "What color?")  # fmt: skip
_ZH_COLOUR = ("是什么颜色？", "它是什么颜色的？", "{k}是什么颜色？", "什么颜色？")
_SHAPE = ("What shape is it?", "Which shape is this?", "What shape do you see?", "Which shape do you see?", "Name the shape.", "What kind of shape is this?",
          "Which shape is in the picture?", "What shape is shown?")  # fmt: skip
_ZH_SHAPE = ("这是什么形状？", "图中是什么形状？", "你看到什么形状？")
_DIGIT = ("Which digit do you see?", "What digit is this?", "Which number is it?", "What number is this?", "Read the number.", "Which number do you see?",
          "What number is in the picture?", "Which digit is in the image?", "What does it say?", "Read this.")  # fmt: skip
_ZH_DIGIT = ("这是几？", "图中是什么数字？", "你看到哪个数字？", "读出数字。")
_COUNT = ("How many shapes?", "How many shapes are there?", "How many shapes do you see?", "Count the shapes.", "How many shapes are in the picture?",
          "How many objects are there?", "How many things do you see?")  # fmt: skip
_ZH_COUNT = ("有几个形状？", "图中有多少个形状？", "数一数形状。")
_IS_THERE = ("Is there a {s}?", "Do you see a {s}?", "Is a {s} in the picture?", "Can you see a {s}?", "Does the picture show a {s}?")  # fmt: skip
_SIDES = {"left": "左边", "right": "右边", "top": "上面", "bottom": "下面", "middle": "中间"}


def article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _listed(parts: Sequence[str], joint: str) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])}{joint}{parts[-1]}"


def _noun(thing: Thing, zh: bool) -> str:
    """A thing in the words of a question."""
    if thing.kind != "digit":
        return ZH_SHAPES[thing.kind] if zh else thing.kind
    return "数字" if zh else ("digit" if len(thing.text) == 1 else "number")


def _named(thing: Thing, zh: bool) -> str:
    """A thing with its colour."""
    if zh:
        kind = f"数字{thing.text}" if thing.text else ZH_SHAPES[thing.kind]
        return f"{ZH_COLOURS[thing.colour]}的{kind}"
    if thing.text:
        return f"the {_noun(thing, False)} {thing.text} in {thing.colour}"
    return article(f"{thing.colour} {thing.kind}")


def describe(scene: Scene, zh: bool = False) -> str:
    """The answer to a question for all that is seen."""
    if not scene.things:
        return ZH_BLANK if zh else BLANK
    names = [_named(thing, zh) for thing in scene.things]
    if zh:
        return f"图中有{'、'.join(names)}。"
    return f"The picture shows {_listed(names, ' and ')}."


def _has_colour(thing: Thing, zh: bool) -> str:
    noun = _noun(thing, zh)
    return f"{noun}是{ZH_COLOURS[thing.colour]}的。" if zh else f"The {noun} is {thing.colour}."


def _is_digit(thing: Thing, zh: bool) -> str:
    return f"数字是{thing.text}。" if zh else f"The {_noun(thing, False)} is {thing.text}."


def _whole(rng: random.Random, scene: Scene, zh: bool) -> Exchange:
    if rng.random() < 0.06:
        return "", describe(scene, False)
    return vary(rng, rng.choice(_ZH_DESCRIBE if zh else _DESCRIBE), zh), describe(scene, zh)


def _colour(rng: random.Random, scene: Scene, zh: bool) -> Exchange:
    templates = _ZH_COLOUR if zh else _COLOUR
    if not scene.things:
        return vary(rng, rng.choice(templates), zh).format(k="形状" if zh else "shape"), ZH_BLANK if zh else BLANK
    if len(scene.things) == 1:
        thing = scene.things[0]
        words = (
            [_noun(thing, zh), "形状" if zh else "shape"]
            if not thing.text
            else [_noun(thing, zh), "数字" if zh else "number"]
        )
        return vary(rng, rng.choice(templates), zh).format(k=rng.choice(words)), _has_colour(thing, zh)
    alone = [one for one in scene.things if sum(one.kind == other.kind for other in scene.things) == 1]
    if alone and rng.random() < 0.7:
        thing = rng.choice(alone)
        templates = [one for one in templates if "{k}" in one]
        return vary(rng, rng.choice(templates), zh).format(k=_noun(thing, zh)), _has_colour(thing, zh)
    colours = [thing.colour for thing in scene.things]
    alone = [one for one in scene.things if colours.count(one.colour) == 1]
    if not alone:
        return _whole(rng, scene, zh)
    thing = rng.choice(alone)
    if zh:
        return f"{rng.choice(('哪个形状是', '什么是'))}{ZH_COLOURS[thing.colour]}的？", _has_colour(thing, True)
    return vary(rng, rng.choice(("Which shape is {c}?", "What is {c}?", "Which one is {c}?"))).format(c=thing.colour), _has_colour(thing, False)  # fmt: skip


def _shape(rng: random.Random, scene: Scene, zh: bool) -> Exchange:
    question = vary(rng, rng.choice(_ZH_SHAPE if zh else _SHAPE), zh)
    if len(scene.things) != 1:
        return question, describe(scene, zh)
    thing = scene.things[0]
    if thing.text:
        return question, _is_digit(thing, zh)
    return question, f"这是{ZH_SHAPES[thing.kind]}。" if zh else f"It is {article(thing.kind)}."


def _digit(rng: random.Random, scene: Scene, zh: bool) -> Exchange:
    question = vary(rng, rng.choice(_ZH_DIGIT if zh else _DIGIT), zh)
    if not scene.things:
        return question, ZH_BLANK if zh else BLANK
    if scene.things[0].text:
        return question, _is_digit(scene.things[0], zh)
    return question, ZH_NO_DIGIT if zh else NO_DIGIT


def _count(rng: random.Random, scene: Scene, zh: bool) -> Exchange:
    question = vary(rng, rng.choice(_ZH_COUNT if zh else _COUNT), zh)
    if not scene.things:
        return question, ZH_BLANK if zh else BLANK
    if scene.things[0].text:
        return question, _is_digit(scene.things[0], zh)
    count = len(scene.things)
    if zh:
        return question, f"有{_ZH_COUNTS[count]}个形状。"
    return question, f"There {'is' if count == 1 else 'are'} {_COUNTS[count]}."


def _is_there(rng: random.Random, scene: Scene, zh: bool) -> Exchange:
    """English alone: is there such a shape, has it such a colour."""
    found = {thing.kind: thing for thing in scene.things if not thing.text}
    alone = [kind for kind in found if sum(one.kind == kind for one in scene.things) == 1]
    if alone and rng.random() < 0.5:
        thing = found[rng.choice(alone)]
        asked = thing.colour if rng.random() < 0.5 else rng.choice(list(COLOURS))
        question = vary(rng, rng.choice(("Is the {s} {c}?", "Is this {s} {c}?"))).format(s=thing.kind, c=asked)
        return question, f"{'Yes' if asked == thing.colour else 'No'}, the {thing.kind} is {thing.colour}."
    shape = rng.choice(alone) if alone and rng.random() < 0.5 else rng.choice(SHAPES)
    question = vary(rng, rng.choice(_IS_THERE)).format(s=shape)
    if sum(one.kind == shape for one in scene.things) > 1:
        return _whole(rng, scene, zh)
    if shape in found:
        return question, f"Yes, there is {article(f'{found[shape].colour} {shape}')}."
    return question, f"No, I cannot see {article(shape)}."


def _where(rng: random.Random, scene: Scene, zh: bool) -> Exchange:
    sides = ["top", "bottom"] if scene.is_column else ["left", "right"]
    side = rng.choice([*sides, "middle"] if len(scene.things) == 3 else sides)
    thing = scene.things[{"left": 0, "top": 0, "middle": 1}.get(side, -1)]
    if zh:
        return f"{_SIDES[side]}是什么？", f"{_SIDES[side]}是{_named(thing, True)}。"
    preposition = "in" if side == "middle" else ("at" if scene.is_column else "on")
    question = rng.choice(("What is {p} the {s}?", "What do you see {p} the {s}?", "Which shape is {p} the {s}?"))
    said = _named(thing, False)
    return vary(rng, question).format(p=preposition, s=side), f"{said[0].upper()}{said[1:]}."


def exchanges(rng: random.Random, scene: Scene, count: int, zh: bool) -> list[Exchange]:
    """`count` questions about the scene, the first of them for the whole in half of the cases."""
    kinds: dict[Callable[[random.Random, Scene, bool], Exchange], float] = {
        _whole: 4, _colour: 3, _shape: 2, _digit: 2 if scene.things and scene.things[0].text else 0.4, _count: 1.2, _is_there: 0 if zh else 1.2,
        _where: 2 if len(scene.things) > 1 else 0,
    }  # fmt: skip
    if scene.things and scene.things[0].text:
        kinds[_count], kinds[_shape] = 0.3, 0.4
    return [rng.choices(list(kinds), list(kinds.values()))[0](rng, scene, zh) for _ in range(count)]


def conversation(rng: random.Random, scene: Scene) -> list[dict]:
    """Messages about one picture, whose placeholder stands in the first question."""
    asked = exchanges(rng, scene, rng.choice((1, 2, 2, 3)), rng.random() < 0.18)
    messages = [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] if rng.random() < 0.2 else []
    for index, (question, answer) in enumerate(asked):
        if index == 0:
            gap = rng.choice(("", "", "", "\n", " ")) if question else ""
            picture = PLACEHOLDER * NUM_POSITIONS
            question = f"{picture}{gap}{question}" if rng.random() < 0.75 else f"{question}{gap}{picture}"
        elif not question:
            question = "What is in the picture?"
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
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
