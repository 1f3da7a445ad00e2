"""Draws the pictures that the demo model's tower learns from: shapes, digits and numbers, by PIL alone.

Everything is drawn from contours and strokes in unit coordinates, bent, turned and shaken, so that no two are alike.
`evaluate.py` has ways of drawing of its own. It knows nothing of questions, tokens or models.
"""

from __future__ import annotations

import io
import math
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

SHAPES = ("circle", "square", "triangle", "star", "cross", "ring", "heart")
COLOURS = {
    "red": (220, 30, 35), "orange": (250, 140, 20), "yellow": (250, 225, 40), "green": (40, 160, 60),
    "blue": (35, 80, 215), "purple": (130, 45, 165), "pink": (250, 150, 195), "brown": (125, 75, 35),
    "black": (15, 15, 15), "white": (250, 250, 250), "grey": (128, 128, 128),
}  # fmt: skip
# Other shades that go by the same name; one lies between its shade and the colour's own.
_SHADES = {
    "red": ((255, 0, 0), (170, 15, 25), (235, 65, 55)), "orange": ((255, 165, 0), (235, 115, 15), (255, 150, 60)),
    "yellow": ((255, 255, 0), (240, 205, 20), (255, 240, 110)), "green": ((0, 128, 0), (0, 255, 0), (110, 200, 90), (15, 90, 40)),
    "blue": ((0, 0, 255), (15, 30, 130), (70, 140, 235), (60, 180, 240)), "purple": ((128, 0, 128), (160, 70, 220), (95, 25, 125)),
    "pink": ((255, 192, 203), (255, 105, 180), (245, 130, 165)), "brown": ((139, 69, 19), (95, 55, 30), (160, 95, 50)),
    "black": ((0, 0, 0), (35, 35, 40)), "white": ((255, 255, 255), (240, 240, 235)), "grey": ((150, 150, 150), (100, 105, 110), (170, 170, 175)),
}  # fmt: skip
_BACKGROUNDS = (
    (255, 255, 255), (255, 255, 255), (255, 255, 255), (255, 255, 255), (245, 245, 240), (0, 0, 0), (30, 30, 35), (128, 128, 128), (210, 210, 210),
    (200, 225, 255), (255, 240, 200), (215, 245, 215), (250, 220, 230), (20, 40, 90), (30, 80, 50), (90, 40, 40), (60, 60, 75),
    (255, 230, 60), (60, 130, 230), (90, 190, 100), (230, 70, 60), (190, 150, 220),
)  # fmt: skip
_FONTS = Path("/usr/share/fonts/truetype/dejavu")  # used where they are; Pillow's own two always
_TRAINING_FONTS = ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSansMono.ttf", "DejaVuSansCondensed.ttf")

Colour = tuple[int, int, int]
Points = np.ndarray  # [N, 2], x to the right, y down, within [-1, 1]


@dataclass(frozen=True)
class Thing:
    """What is drawn: `kind` is one of SHAPES, or "digit" with `text` of one or two digits."""

    kind: str
    colour: str
    text: str = ""


@dataclass(frozen=True)
class Scene:
    """The things in a picture from left to right, or from the top if `is_column`."""

    things: tuple[Thing, ...]
    is_column: bool = False


def random_scene(rng: random.Random) -> Scene:
    """What a training picture holds."""
    roll = rng.random()
    if roll < 0.05:
        return Scene(())
    if roll < 0.5:
        length = 1 if rng.random() < 0.72 else 2
        first = rng.choice("123456789" if length == 2 else "0123456789")
        text = first + ("" if length == 1 else rng.choice("0123456789"))
        return Scene((Thing("digit", rng.choice(list(COLOURS)), text),))
    count = rng.choices((1, 2, 3), (6, 2, 1.3))[0]
    pairs: list[tuple[str, str]] = []
    while len(pairs) < count:
        pair = (rng.choice(SHAPES), rng.choice(list(COLOURS)))
        if pair not in pairs:
            pairs.append(pair)
    return Scene(tuple(Thing(*pair) for pair in pairs), count > 1 and rng.random() < 0.2)


def shade(rng: random.Random, name: str) -> Colour:
    """A colour that goes by `name`."""
    base, other = COLOURS[name], rng.choice(_SHADES[name])
    part = rng.random()
    values = [a + (b - a) * part + rng.uniform(-6, 6) for a, b in zip(base, other, strict=True)]
    return tuple(int(min(255, max(0, v))) for v in values)  # type: ignore[return-value]


def distance(a: Colour, b: Colour) -> float:
    """How far apart two colours look, 0 to about 765 ("redmean")."""
    mean = (a[0] + b[0]) / 2
    red, green, blue = (x - y for x, y in zip(a, b, strict=True))
    return math.sqrt((2 + mean / 256) * red**2 + 4 * green**2 + (2 + (255 - mean) / 256) * blue**2)


def background_for(rng: random.Random, colours: list[Colour]) -> Colour:
    """A background on which all of `colours` are seen."""
    for _ in range(30):
        choice = rng.choice(_BACKGROUNDS)
        found = tuple(min(255, max(0, v + rng.randint(-8, 8))) for v in choice) if rng.random() < 0.5 else choice
        if all(distance(found, colour) > 130 for colour in colours):
            return found  # type: ignore[return-value]
    return max(_BACKGROUNDS, key=lambda one: min(distance(one, c) for c in colours))


# Shapes: contours in [-1, 1]. A contour inside of another one is a hole.


def _arc(x: float, y: float, rx: float, ry: float, start: float, end: float, count: int = 24) -> Points:
    angles = np.radians(np.linspace(start, end, count))
    return np.stack((x + rx * np.cos(angles), y + ry * np.sin(angles)), 1)


def _spokes(radii: list[float], turn: float = -90) -> Points:
    angles = np.radians(turn + np.arange(len(radii)) * 360 / len(radii))
    return np.stack((np.cos(angles), np.sin(angles)), 1) * np.array(radii)[:, None]


def contours(rng: random.Random, shape: str) -> list[Points]:
    """The contours of a shape, with the freedom that its name leaves."""
    if shape == "circle":
        return [_arc(0, 0, 1, 1, 0, 360, 48)]
    if shape == "ring":
        inner = rng.uniform(0.4, 0.7)
        return [_arc(0, 0, 1, 1, 0, 360, 48), _arc(0, 0, inner, inner, 0, 360, 48)]
    if shape == "square":
        return [np.array([(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)])]
    if shape == "triangle":
        if rng.random() < 0.2:
            corner = rng.choice((-1, 1))
            return [np.array([(-0.95, 0.9), (0.95, 0.9), (0.95 * corner, -0.9)])]
        height, top = rng.uniform(0.75, 1.0), rng.uniform(-0.15, 0.15)
        return [np.array([(top, -height), (1.0, 0.75), (-1.0, 0.75)])]
    if shape == "star":
        points = rng.choice((5, 5, 5, 5, 6, 4, 8))
        return [_spokes([1.0, rng.uniform(0.36, 0.5)] * points)]
    if shape == "cross":
        arm = rng.uniform(0.15, 0.38)
        corners = [(-arm, -1), (arm, -1), (arm, -arm), (1, -arm), (1, arm), (arm, arm)]
        corners += [(-x, -y) for x, y in corners]
        return [np.array(corners, dtype=float)]
    angles = np.linspace(0, 2 * math.pi, 60, endpoint=False)
    x = 16 * np.sin(angles) ** 3
    y = 13 * np.cos(angles) - 5 * np.cos(2 * angles) - 2 * np.cos(3 * angles) - np.cos(4 * angles)
    return [np.stack((x / 17, -(y + 2.5) / 15), 1)]


def _largest_turn(shape: str) -> float:
    return {"square": 20, "triangle": 25, "star": 36, "cross": 18, "heart": 22}.get(shape, 180)


# Digits as strokes in a box of [-0.6, 0.6] x [-1, 1].


def strokes(rng: random.Random, digit: str) -> list[Points]:
    """A digit as a hand writes it, in one of the ways that are usual."""
    w, v = rng.uniform(0.45, 0.65), rng.uniform(-0.12, 0.12)
    line = lambda *points: np.array(points, dtype=float)  # noqa: E731
    if digit == "0":
        return [_arc(0, 0, w, 1, -90, 270, 40)]
    if digit == "1":
        flag = [(-0.35 + v, -0.55 + v)] if rng.random() < 0.75 else []
        foot = [line((-0.4, 1), (0.4, 1))] if rng.random() < 0.25 else []
        return [line(*flag, (0.05, -1), (0.05, 1)), *foot]
    if digit == "2":
        top = _arc(0, -0.45, w, 0.55, 190, 370 + 20, 24)
        return [np.concatenate((top, line((-w, 1), (w, 1))))]
    if digit == "3":
        if rng.random() < 0.2:
            return [np.concatenate((line((-w, -1), (w * 0.9, -1), (0, -0.2)), _arc(0, 0.4, w, 0.6, -90, 150, 20)))]
        upper = _arc(0, -0.52, w * 0.9, 0.48, -155, 90, 20)
        return [np.concatenate((upper, _arc(0, 0.48, w, 0.52, -90, 155, 20)))]
    if digit == "4":
        if rng.random() < 0.4:  # open at the top
            return [line((-w * 0.7, -1), (-w, 0.3 + v), (w, 0.3 + v)), line((0.3, -0.6), (0.3, 1))]
        return [line((0.3, 1), (0.3, -1), (-w, 0.35 + v), (w + 0.1, 0.35 + v))]
    if digit == "5":
        belly = _arc(0, 0.38, w, 0.62, -140, 145, 26)
        return [np.concatenate((line((w, -1), (-w * 0.8, -1), (-w * 0.85, -0.05)), belly))]
    if digit == "6":
        if rng.random() < 0.3:
            curve = line((w * 0.6, -1), (-w * 0.75, 0.05))
        else:
            curve = _arc(0.25 * w, 0.35, 1.25 * w, 1.35, -70, -165, 18)
        return [np.concatenate((curve, _arc(0, 0.42, w, 0.58, -170, -530, 36)))]
    if digit == "7":
        bar = [line((-0.3, 0), (0.4, 0))] if rng.random() < 0.25 else []
        return [line((-w, -1), (w, -1), (-0.15 + v, 1)), *bar]
    if digit == "8":
        upper = _arc(0, -0.52, w * 0.85, 0.48, 90, 450, 30)
        return [upper, _arc(0, 0.48, w, 0.52, -90, 270, 30)]
    tail = (
        line((w * 0.95, -0.4), (w * 0.8, 1)) if rng.random() < 0.5 else _arc(-0.25 * w, -0.4, 1.25 * w, 1.4, 5, 110, 18)
    )
    return [np.concatenate((_arc(0, -0.45, w, 0.55, 0, -360, 36), tail))]


_SEGMENTS = {"0": "abcdef", "1": "bc", "2": "abged", "3": "abgcd", "4": "fgbc", "5": "afgcd", "6": "afgedc", "7": "abc", "8": "abcdefg", "9": "abcdfg"}  # fmt: skip
_SEGMENT = {"a": (-1, -1, 1, -1), "b": (1, -1, 1, 0), "c": (1, 0, 1, 1), "d": (-1, 1, 1, 1), "e": (-1, 0, -1, 1), "f": (-1, -1, -1, 0), "g": (-1, 0, 1, 0)}  # fmt: skip


def segments(digit: str) -> list[Points]:
    """A digit as clocks show it."""
    lines = (_SEGMENT[one] for one in _SEGMENTS[digit])
    return [np.array([(x0 * 0.5, y0 * 0.95), (x1 * 0.5, y1 * 0.95)]) for x0, y0, x1, y1 in lines]


# From unit coordinates to pixels.


def _dense(points: Points, closed: bool, step: float = 0.12) -> Points:
    ends = np.concatenate((points[1:], points[:1])) if closed else points[1:]
    starts = points if closed else points[:-1]
    pieces = []
    for a, b in zip(starts, ends, strict=True):
        count = max(1, int(np.hypot(*(b - a)) / step))
        pieces.append(a + (b - a) * (np.arange(count) / count)[:, None])
    return np.concatenate((*pieces, points[-1:])) if not closed else np.concatenate(pieces)


def shaken(rng: random.Random, points: Points, amount: float) -> Points:
    """`points` moved by a few smooth waves, as a hand that is not steady moves them."""
    moved = points.copy()
    for axis in (0, 1):
        for frequency in (1.3, 2.6, 5.0):
            phase, size = rng.uniform(0, 6.28), amount * rng.gauss(0, 1) / frequency
            moved[:, axis] += size * np.sin(frequency * (points[:, 0] * 1.3 + points[:, 1]) + phase)
    return moved


def _matrix(rng: random.Random, turn: float, stretch: float, slant: float = 0.0) -> np.ndarray:
    angle = math.radians(rng.uniform(-turn, turn))
    ratio = math.exp(rng.uniform(-stretch, stretch))
    rotation = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    return rotation @ np.array([[1, slant], [0, 1]]) @ np.diag([math.sqrt(ratio), 1 / math.sqrt(ratio)])


class Canvas:
    """A picture that is drawn `scale` times larger and brought down, or at its own size with hard edges."""

    def __init__(self, rng: random.Random, size: tuple[int, int], background: Colour):
        self.rng, self.size = rng, size
        self.scale = rng.choice((1, 2, 3)) if max(size) < 500 else rng.choice((1, 1, 2))
        self.image = Image.new("RGB", (size[0] * self.scale, size[1] * self.scale), background)
        if rng.random() < 0.12:
            self._gradient(background)
        self.draw = ImageDraw.Draw(self.image)
        self.background = background

    def _gradient(self, background: Colour) -> None:
        other = Image.new(
            "RGB", self.image.size, tuple(min(255, max(0, v + self.rng.choice((-40, 30)))) for v in background)
        )
        ramp = Image.linear_gradient("L").rotate(self.rng.choice((0, 90, 180, 270))).resize(self.image.size)
        self.image.paste(other, (0, 0), ramp)

    def pixels(self, points: Points, centre: tuple[float, float], radius: float) -> list[tuple[float, float]]:
        return [((centre[0] + radius * x) * self.scale, (centre[1] + radius * y) * self.scale) for x, y in points]

    def line(self, points: list[tuple[float, float]], width: float, colour: Colour) -> None:
        """A line with round ends and joints; `width` in pixels of the picture."""
        thick = max(1, round(width * self.scale))
        self.draw.line(points, fill=colour, width=thick, joint="curve")
        if thick > 2:
            for x, y in (points[0], points[-1]):
                r = thick / 2 - 0.5
                self.draw.ellipse((x - r, y - r, x + r, y + r), fill=colour)

    def done(self) -> Image.Image:
        if self.scale == 1:
            return self.image
        return self.image.resize(
            self.size, Image.Resampling.BOX if self.rng.random() < 0.5 else Image.Resampling.LANCZOS
        )


def _draw_shape(canvas: Canvas, shape: str, colour: Colour, centre: tuple[float, float], radius: float) -> None:
    rng = canvas.rng
    is_sketch = rng.random() < 0.3
    matrix = _matrix(rng, _largest_turn(shape), 0.1 if is_sketch else 0.05)
    amount = rng.uniform(0.01, 0.05) if is_sketch else 0.0
    lines = [shaken(rng, _dense(one, True), amount) @ matrix.T for one in contours(rng, shape)]
    if shape != "ring" and rng.random() < 0.35:  # a line drawing; a thin ring would be a circle
        width = rng.uniform(0.05, 0.15 if shape != "circle" else 0.12) * radius
        for one in lines:
            points = canvas.pixels(one, centre, radius)
            gap = rng.randint(0, 2) if is_sketch else 0
            points = points[: len(points) - gap] if gap else [*points, points[0], points[1]]
            canvas.line(points, max(width, 1.2), colour)
        return
    if len(lines) == 2:
        _fill_ring(canvas, lines, colour, centre, radius)
        return
    canvas.draw.polygon(canvas.pixels(lines[0], centre, radius), fill=colour)
    if rng.random() < 0.2:  # a thin outline in a colour next to it
        points = canvas.pixels(lines[0], centre, radius)
        darker = tuple(int(v * rng.choice((0.6, 0.75))) for v in colour) if rng.random() < 0.6 else (0, 0, 0)
        canvas.line([*points, points[0]], max(1, 0.04 * radius), darker)  # type: ignore[arg-type]


def _fill_ring(canvas: Canvas, lines: list[Points], colour: Colour, centre: tuple[float, float], radius: float) -> None:
    mask = Image.new("1", canvas.image.size, 0)
    draw = ImageDraw.Draw(mask)
    draw.polygon(canvas.pixels(lines[0], centre, radius), fill=1)
    draw.polygon(canvas.pixels(lines[1], centre, radius), fill=0)
    canvas.image.paste(colour, (0, 0), mask)


def _draw_strokes(canvas: Canvas, text: str, colour: Colour, centre: tuple[float, float], radius: float) -> None:
    """Digits by strokes or segments; `radius` is half of their height."""
    rng = canvas.rng
    shown = segments if rng.random() < 0.15 else lambda digit: strokes(rng, digit)
    width, amount = rng.uniform(0.08, 0.3) * radius, rng.choice((0.0, 0.03, 0.06)) * rng.random() * 2
    pitch, narrow = rng.uniform(1.25, 1.6) * radius, rng.uniform(0.75, 1.15)
    matrix = _matrix(rng, 10, 0.15, rng.uniform(-0.3, 0.1)) @ np.diag([narrow, 1])
    for index, digit in enumerate(text):
        x = centre[0] + (index - (len(text) - 1) / 2) * pitch
        for one in shown(digit):
            points = shaken(rng, _dense(one, False), amount) @ matrix.T
            canvas.line(canvas.pixels(points, (x, centre[1]), radius), max(width, 1.2), colour)


def _font(rng: random.Random, height: float) -> ImageFont.FreeTypeFont:
    names = [_FONTS / name for name in _TRAINING_FONTS if (_FONTS / name).exists()]
    if names and rng.random() < 0.65:
        return ImageFont.truetype(str(rng.choice(names)), int(height))
    return ImageFont.load_default(int(height))  # type: ignore[return-value]


def _draw_text(canvas: Canvas, text: str, colour: Colour, centre: tuple[float, float], radius: float) -> None:
    """Digits by a font, as they are, or turned and slanted a little."""
    rng = canvas.rng
    if rng.random() < 0.08:  # the bitmap font, enlarged
        font: ImageFont.ImageFont | ImageFont.FreeTypeFont = ImageFont.load_default_imagefont()
        bold, height = 0, 11.0
    else:
        height = max(8.0, 2.6 * radius * canvas.scale)
        font, bold = _font(rng, height), round(rng.choice((0, 0, 0, 0.02, 0.04)) * height)
    mask = Image.new("L", (int(height * len(text)) + 8 + 2 * bold, int(height * 1.5) + 2 * bold), 0)
    ImageDraw.Draw(mask).text((4 + bold, 2 + bold), text, font=font, fill=255, stroke_width=bold)
    mask = mask.crop(mask.getbbox())
    tall = 2 * radius * canvas.scale
    wide = tall * mask.width / mask.height * math.exp(rng.uniform(-0.15, 0.15))
    mask = mask.resize((max(2, int(wide)), max(3, int(tall))), Image.Resampling.BILINEAR)
    if rng.random() < 0.4:
        mask = mask.rotate(rng.uniform(-15, 15), Image.Resampling.BILINEAR, expand=True)
    x, y = centre[0] * canvas.scale - mask.width / 2, centre[1] * canvas.scale - mask.height / 2
    canvas.image.paste(colour, (int(x), int(y)), mask)


def places(rng: random.Random, scene: Scene, size: tuple[int, int]) -> list[tuple[tuple[float, float], float]]:
    """Centre and radius of each thing, in pixels: one anywhere, several in a row or a column."""
    width, height = size
    if len(scene.things) == 1:
        digits = len(scene.things[0].text)
        most = min(width / max(1.0, 0.85 * digits), height) / 2
        radius = most * (rng.uniform(0.35, 0.95) if rng.random() < 0.8 else rng.uniform(0.25, 0.4))
        half = radius * max(1.0, 0.8 * digits)
        x, y = rng.uniform(min(half, width / 2), max(width - half, width / 2)), rng.uniform(radius, height - radius)
        if rng.random() < 0.35:
            x, y = width / 2, height / 2
        return [((x, y), radius)]
    count = len(scene.things)
    along, across = (height, width) if scene.is_column else (width, height)
    cell, found = along / max(1, count), []
    for index in range(count):
        radius = min(cell, across) / 2 * rng.uniform(0.5, 0.95)
        a = cell * (index + 0.5) + rng.uniform(-1, 1) * (cell / 2 - radius)
        middle, slack = across / 2, min(across / 2 - radius, 0.8 * cell)
        b = middle + rng.uniform(-1, 1) * slack * (0.5 if across > along else 1)
        found.append((((b, a) if scene.is_column else (a, b)), radius))
    return found


def random_size(rng: random.Random) -> tuple[int, int]:
    """Pixels of a picture's sides: 40 to 400, seldom to 1200; half of them square."""
    longest = math.exp(rng.uniform(math.log(40), math.log(280))) if rng.random() < 0.97 else rng.uniform(280, 1200)
    if rng.random() < 0.55:
        return int(longest), int(longest)
    shorter = max(36.0, longest / rng.uniform(1.05, 2.0))
    return (int(longest), int(shorter)) if rng.random() < 0.7 else (int(shorter), int(longest))


def spoiled(rng: random.Random, image: Image.Image) -> Image.Image:
    """What happens to pictures on their way: blur, noise, JPEG."""
    roll = rng.random()
    if roll < 0.08:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 0.012 * min(image.size) + 0.3)))
    elif roll < 0.2:
        noise = np.random.default_rng(rng.getrandbits(32)).normal(0, rng.uniform(2, 18), (image.height, image.width, 3))
        image = Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))
    if rng.random() < 0.2:
        packed = io.BytesIO()
        image.save(packed, "JPEG", quality=rng.randint(30, 90))
        image = Image.open(packed).convert("RGB")
    return image


Place = tuple[float, float, float]  # centre and half of the size of a thing, in pixels


def draw_scene(rng: random.Random, scene: Scene) -> tuple[Image.Image, list[Place]]:
    """A picture of the scene, RGB, and where its things are."""
    size = random_size(rng)
    colours = [shade(rng, thing.colour) for thing in scene.things]
    canvas = Canvas(rng, size, background_for(rng, colours))
    placed = places(rng, scene, size)
    for thing, colour, (centre, radius) in zip(scene.things, colours, placed, strict=True):
        if thing.kind != "digit":
            _draw_shape(canvas, thing.kind, colour, centre, radius)
        elif rng.random() < 0.5:
            _draw_strokes(canvas, thing.text, colour, centre, radius * 0.85)
        else:
            _draw_text(canvas, thing.text, colour, centre, radius * 0.9)
    return spoiled(rng, canvas.done()), [(x, y, radius) for (x, y), radius in placed]
