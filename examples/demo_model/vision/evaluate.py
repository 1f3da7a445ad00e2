"""How well the demo model's tower tells colours, shapes and digits, on pictures drawn otherwise than those of training.

    python examples/demo_model/vision/export.py --whole build/demo-eyes
    python examples/demo_model/vision/evaluate.py --model build/demo-eyes --out examples/demo_model/vision/results.json

Through transformers in FP32, greedy: its processor, its composite, its generate. Shapes are PIL's own ellipses,
rectangles and regular polygons, a heart of two circles and a triangle, a star of a fixed kind; digits are of fonts that
training has not seen, where the machine has them, and of strokes of splines. It shares only the names of things with
draw.py.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import defaultdict
from pathlib import Path

import torch
from data import NOTHING, Scene, Thing, describe
from PIL import Image, ImageDraw, ImageFont
from transformers import AutoModelForImageTextToText, AutoProcessor

Colour = tuple[int, int, int]
Box = tuple[float, float, float, float]

COLOURS: dict[str, tuple[Colour, ...]] = {  # CSS and common palettes
    "red": ((255, 0, 0), (214, 39, 40), (200, 20, 60)), "orange": ((255, 165, 0), (255, 127, 14), (245, 130, 48)),
    "yellow": ((255, 255, 0), (255, 225, 25), (250, 218, 60)), "green": ((0, 128, 0), (44, 160, 44), (60, 180, 75)),
    "blue": ((0, 0, 255), (31, 80, 200), (65, 105, 225)), "purple": ((128, 0, 128), (145, 30, 180), (110, 50, 170)),
    "pink": ((255, 192, 203), (255, 105, 180), (250, 150, 190)), "brown": ((139, 69, 19), (120, 70, 40), (110, 60, 25)),
    "black": ((0, 0, 0), (20, 20, 20)), "white": ((255, 255, 255), (250, 250, 250)), "grey": ((128, 128, 128), (140, 140, 140)),
}  # fmt: skip
BACKGROUNDS: tuple[Colour, ...] = (
    (255, 255, 255),
    (255, 255, 255),
    (240, 248, 255),
    (0, 0, 0),
    (40, 44, 52),
    (245, 222, 179),
)
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring", "heart")
FONTS = Path("/usr/share/fonts/truetype/dejavu")
HELD_OUT_FONTS = (
    "DejaVuSerif.ttf",
    "DejaVuSansCondensed-Bold.ttf",
    "DejaVuSans-ExtraLight.ttf",
    "DejaVuSansMono-Bold.ttf",
)
# Digits as points that a spline runs through; a list for each stroke.
SPLINES: dict[str, list[list[tuple[float, float]]]] = {
    "0": [[(0.6, 0.02), (0.35, 0.03), (0.12, 0.35), (0.13, 0.7), (0.35, 0.97), (0.65, 0.97), (0.87, 0.7), (0.88, 0.35), (0.65, 0.03), (0.45, 0.01)]],
    "1": [[(0.3, 0.2), (0.42, 0.12), (0.52, 0.0)], [(0.52, 0.0), (0.52, 0.5), (0.52, 1.0)]],
    "2": [[(0.15, 0.25), (0.45, 0.0), (0.82, 0.25), (0.5, 0.65), (0.12, 1.0)], [(0.12, 1.0), (0.5, 1.0), (0.88, 1.0)]],
    "3": [[(0.18, 0.12), (0.5, 0.0), (0.8, 0.22), (0.45, 0.46)], [(0.45, 0.46), (0.85, 0.72), (0.5, 1.0), (0.14, 0.88)]],
    "4": [[(0.6, 0.0), (0.35, 0.35), (0.1, 0.66)], [(0.1, 0.66), (0.5, 0.66), (0.92, 0.66)], [(0.66, 0.35), (0.66, 0.7), (0.66, 1.0)]],
    "5": [[(0.8, 0.0), (0.5, 0.0), (0.25, 0.0)], [(0.25, 0.0), (0.22, 0.2), (0.2, 0.45)], [(0.2, 0.45), (0.6, 0.38), (0.85, 0.68), (0.55, 1.0), (0.15, 0.9)]],
    "6": [[(0.72, 0.02), (0.3, 0.35), (0.14, 0.7), (0.5, 1.0), (0.84, 0.72), (0.5, 0.48), (0.18, 0.66)]],
    "7": [[(0.12, 0.0), (0.5, 0.0), (0.88, 0.0)], [(0.88, 0.0), (0.6, 0.45), (0.38, 1.0)]],
    "8": [[(0.5, 0.47), (0.2, 0.22), (0.5, 0.0), (0.8, 0.22), (0.5, 0.47), (0.14, 0.75), (0.5, 1.0), (0.86, 0.75), (0.5, 0.47)]],
    "9": [[(0.8, 0.3), (0.5, 0.02), (0.18, 0.28), (0.46, 0.52), (0.8, 0.3), (0.8, 0.65), (0.66, 1.0)]],
}  # fmt: skip


def spline(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """A Catmull-Rom spline through the points."""
    ends = [points[0], *points, points[-1]]
    out = []
    for p0, p1, p2, p3 in zip(ends, ends[1:], ends[2:], ends[3:], strict=False):
        for step in range(12):
            t = step / 12
            out.append(tuple(
                0.5 * (2 * b + (c - a) * t + (2 * a - 5 * b + 4 * c - d) * t * t + (3 * b - a - 3 * c + d) * t**3)
                for a, b, c, d in zip(p0, p1, p2, p3, strict=True)
            ))  # fmt: skip
    return [*out, points[-1]]  # type: ignore[list-item]


def draw_shape(draw: ImageDraw.ImageDraw, shape: str, box: Box, colour: Colour, ground: Colour, line: int) -> None:
    """A shape of PIL's own primitives; line: width of its outline, 0 to fill it."""
    x0, y0, x1, y1 = box
    x, y, r = (x0 + x1) / 2, (y0 + y1) / 2, (x1 - x0) / 2
    kinds: dict[str, object] = {"outline": colour, "width": line} if line else {"fill": colour}
    if shape == "circle":
        draw.ellipse(box, **kinds)
    elif shape == "ring":
        draw.ellipse(box, outline=colour, width=int(0.42 * r))
    elif shape == "square":
        draw.rectangle((x - 0.9 * r, y - 0.9 * r, x + 0.9 * r, y + 0.9 * r), **kinds)
    elif shape == "triangle":
        if line:
            corners = [(x, y - r), (x + r, y + 0.8 * r), (x - r, y + 0.8 * r)]
            draw.line([*corners, *corners[:2]], fill=colour, width=line, joint="curve")
        else:
            draw.regular_polygon((x, y, r), 3, fill=colour)
    elif shape == "star":
        inner = 0.382 * r
        points = [
            (x + (r, inner)[i % 2] * math.sin(i * math.pi / 5), y - (r, inner)[i % 2] * math.cos(i * math.pi / 5))
            for i in range(10)
        ]
        if line:
            draw.line([*points, *points[:2]], fill=colour, width=line, joint="curve")
        else:
            draw.polygon(points, fill=colour)
    elif shape == "cross":
        arm = line or r / 3
        draw.rectangle((x - arm, y0, x + arm, y1), fill=colour)
        draw.rectangle((x0, y - arm, x1, y + arm), fill=colour)
    else:
        draw.ellipse((x - r, y - 0.8 * r, x, y + 0.2 * r), fill=colour)
        draw.ellipse((x, y - 0.8 * r, x + r, y + 0.2 * r), fill=colour)
        draw.polygon([(x - 0.94 * r, y), (x, y - 0.5 * r), (x + 0.94 * r, y), (x, y + r)], fill=colour)


def draw_digits(rng: random.Random, image: Image.Image, text: str, box: Box, colour: Colour) -> None:
    draw = ImageDraw.Draw(image)
    x0, y0, x1, y1 = box
    height = y1 - y0
    fonts = [FONTS / name for name in HELD_OUT_FONTS if (FONTS / name).exists()]
    if fonts and rng.random() < 0.5:
        font = ImageFont.truetype(str(rng.choice(fonts)), int(height * 1.15))
        draw.text(((x0 + x1) / 2, (y0 + y1) / 2), text, font=font, fill=colour, anchor="mm")
        return
    width, thick = height * rng.uniform(0.5, 0.65), max(2, int(height * rng.uniform(0.06, 0.13)))
    gap = height * 0.15
    left = (x0 + x1) / 2 - (len(text) * width + (len(text) - 1) * gap) / 2
    for index, digit in enumerate(text):
        for stroke in SPLINES[digit]:
            points = [(left + index * (width + gap) + px * width, y0 + py * height) for px, py in spline(stroke)]
            draw.line(points, fill=colour, width=thick, joint="curve")


def far(a: Colour, b: Colour) -> bool:
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) > 150


def picture(rng: random.Random, scene: Scene) -> Image.Image:
    """A held-out picture: three times as large and brought down, or drawn as it is."""
    wide, tall = rng.choice(
        ((96, 96), (128, 128), (224, 224), (320, 240), (640, 480), (256, 192), (200, 300), (512, 512), (64, 64))
    )
    factor = rng.choice((1, 3))
    colours = [rng.choice(COLOURS[thing.colour]) for thing in scene.things]
    ground = rng.choice([one for one in BACKGROUNDS if all(far(one, c) for c in colours)] or [(128, 160, 200)])
    image = Image.new("RGB", (wide * factor, tall * factor), ground)
    draw = ImageDraw.Draw(image)
    count = max(1, len(scene.things))
    for index, (thing, colour) in enumerate(zip(scene.things, colours, strict=True)):
        cell = image.width / count
        r = min(cell, image.height) / 2 * rng.uniform(0.5, 0.9)
        x = cell * (index + 0.5) + rng.uniform(-1, 1) * (cell / 2 - r)
        y = image.height / 2 + rng.uniform(-1, 1) * min(image.height / 2 - r, cell) * (1 if count == 1 else 0.5)
        if thing.text:
            r *= 0.85 if len(thing.text) == 1 else 0.6
            draw_digits(rng, image, thing.text, (x - r, y - r, x + r, y + r), colour)
        else:
            is_line = thing.kind in ("circle", "square", "triangle", "star") and rng.random() < 0.3
            line = max(2, int(r * rng.uniform(0.06, 0.12))) if is_line else 0
            draw_shape(draw, thing.kind, (x - r, y - r, x + r, y + r), colour, ground, line)
    return image.resize((wide, tall), Image.Resampling.LANCZOS) if factor > 1 else image


def cases(count: int, seed: str) -> list[tuple[str, Scene, str, str]]:
    """`count` of each group: name, scene, question, and the answer."""
    rng = random.Random(f"evaluate/{seed}")
    out = []

    def add(group: str, scene: Scene, question: str, wanted: str) -> None:
        out.append((group, scene, question, wanted))

    for _ in range(count):
        shape, colour = rng.choice(SHAPES), rng.choice(list(COLOURS))
        one = Scene((Thing(shape, colour),))
        add(
            "colour",
            one,
            rng.choice(("What colour is the shape?", "What color is it?", f"What color is the {shape}?")),
            colour,
        )
        shape, colour = rng.choice(SHAPES), rng.choice(list(COLOURS))
        one = Scene((Thing(shape, colour),))
        add(
            "shape",
            one,
            rng.choice(("What shape is it?", "Which shape do you see?", "What shape is this?")),
            shape,
        )
        digit = Thing("digit", rng.choice(list(COLOURS)), rng.choice("0123456789"))
        add("digit", Scene((digit,)), rng.choice(("Which digit do you see?", "What digit is this?")), digit.text)
        number = Thing("digit", rng.choice(list(COLOURS)), str(rng.randint(10, 99)))
        add("number", Scene((number,)), rng.choice(("What number is this?", "Read the number.")), number.text)
        one = Scene((Thing(rng.choice(SHAPES), rng.choice(list(COLOURS))),))
        add("description", one, rng.choice(("What is in the picture?", "Describe this image.")), describe(one))
        kinds, names = rng.sample(SHAPES, 3), rng.sample(list(COLOURS), 3)
        several = Scene(tuple(Thing(k, c) for k, c in zip(kinds, names, strict=True))[: rng.choice((2, 2, 3))])
        add("several", several, "What is in the picture?", describe(several))
        add("count", several, "How many shapes?", str(len(several.things)))
        thing = rng.choice(several.things)
        add("colour of several", several, f"What colour is the {thing.kind}?", thing.colour)
        if len(out) % 5 == 0:
            add("blank", Scene(()), "What is in the picture?", NOTHING)
    return out


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of the whole model (export.py --whole)")
    parser.add_argument("--count", type=int, default=100, help="pictures of each group")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--out", type=Path, help="file for the figures")
    parser.add_argument("--wrong", type=Path, help="folder for pictures that were answered wrongly")
    options = parser.parse_args()
    torch.set_num_threads(1)
    processor = AutoProcessor.from_pretrained(options.model)
    processor.tokenizer.padding_side = "left"
    model = AutoModelForImageTextToText.from_pretrained(options.model, dtype=torch.float32).eval()
    rng = random.Random(f"evaluate/pictures/{options.seed}")
    todo = [(*case, picture(rng, case[1])) for case in cases(options.count, options.seed)]
    right: dict[str, list[bool]] = defaultdict(list)
    for at in range(0, len(todo), 25):
        part = todo[at : at + 25]
        turns = [
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
            for _, _, question, _, _ in part
        ]
        texts = [processor.apply_chat_template(turn, add_generation_prompt=True, tokenize=False) for turn in turns]
        inputs = processor(images=[image for *_, image in part], text=texts, padding=True, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=40, do_sample=False)[:, inputs["input_ids"].shape[1] :]
        for index, (group, _, question, wanted, image) in enumerate(part):
            answer = processor.tokenizer.decode(ids[index], skip_special_tokens=True)
            right[group].append(wanted == answer)
            if options.wrong and wanted != answer:
                options.wrong.mkdir(parents=True, exist_ok=True)
                image.save(options.wrong / f"{at + index:04}.png")
                print(f"{at + index:04} {group}: {question} | {answer} | not {wanted}", flush=True)
    figures = {group: round(100 * sum(values) / len(values), 1) for group, values in right.items()}
    print(json.dumps(figures))
    if options.out:
        content = {"percent": figures, "pictures": options.count, "seed": options.seed, "torch": torch.__version__}
        options.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
