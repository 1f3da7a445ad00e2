"""Draws panels of a roofline as one SVG that needs nothing else: axes, roofs, points with their tokens, a legend.

Both axes are logarithmic. Colour is the program, shape the type of weights; the pointer shows all of a point. Labels
are put one after another where nothing lies yet, near their point first, with a thin line to it where they are not
beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from benchmarks.roofline.points import OURS, Panel, Point, Series
from ktransformers.errors import ConfigError

__all__ = ["MAX_TYPES", "Axis", "Box", "draw"]

WIDTH = 1000
_HEAD, _FOOT = 52, 60  # of a panel: above and below its axes
_LEFT, _RIGHT = 76, 250
_PLOT_HEIGHT = 500  # at least
_FONT, _SMALL = 13, 11
_LEGEND_LINE = 18
_TEXT, _MUTED, _GRID, _ROOF = "#0f172a", "#64748b", "#e8edf3", "#334155"
_COLORS = {
    OURS: "#0f766e",
    f"{OURS}, bf16 products": "#22a06b",
    "llama.cpp": "#c2410c",
    "kt-kernel": "#6d28d9",
    "experts": "#0f766e",
    "matrix": "#2563eb",
}
_OTHER_COLOR = "#64748b"
_SHAPES = ("circle", "square", "triangle", "diamond", "down", "hexagon")
MAX_TYPES = 2 * len(_SHAPES)  # filled, then hollow
_RADIUS = 4.5


@dataclass(frozen=True, slots=True)
class Axis:
    """From values `low` to `high` to pixels `start` to `stop`, by their logarithms."""

    low: float
    high: float
    start: float
    stop: float

    def at(self, value: float) -> float:
        """In pixels."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self) -> tuple[list[float], list[float]]:
        """Powers of ten with 2 and 5 times them where there is room, and all other multiples of powers of ten."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        every = [scale * 10.0**power for power in powers for scale in range(1, 10)]
        inside = [value for value in every if self.low <= value <= self.high]
        room = abs(self.stop - self.start) / math.log10(self.high / self.low)  # of a power
        named = "125" if room > 90 else "1"
        chosen = [value for value in inside if f"{value:.0e}"[0] in named]
        return chosen, [value for value in inside if value not in chosen]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        """Whether they share more than an edge."""
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )

    def is_within(self, other: Box) -> bool:
        """Whether nothing of it is outside of the other."""
        return (
            other.left <= self.left
            and self.right <= other.right
            and other.top <= self.top
            and self.bottom <= other.bottom
        )


def text_box(x: float, y: float, text: str, size: int = _SMALL) -> Box:
    """Of a text in the middle of (x, y); digits of usual fonts are at most 0.6 of their size wide."""
    width = 0.6 * size * len(text) + 2
    return Box(x - width / 2, y - size / 2 - 1, x + width / 2, y + size / 2 + 1)


def draw(title: str, panels: Sequence[Panel]) -> str:
    """The picture. Raises ConfigError for more than MAX_TYPES types in a panel: shapes tell no more apart."""
    height = 44 + sum(_HEAD + _plot_height(panel) + _FOOT for panel in panels)
    svg = ET.Element(
        "svg",
        {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {WIDTH} {height}", "width": str(WIDTH)},
        height=str(height),
        role="img",
    )
    svg.set("font-family", "system-ui, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif")
    ET.SubElement(svg, "title").text = title
    ET.SubElement(svg, "rect", width="100%", height="100%", fill="#ffffff")
    _text(svg, 24, 32, title, size=18, anchor="start", weight="600")
    top = 44
    for panel in panels:
        _PanelDrawing(svg, panel, top).draw()
        top += _HEAD + _plot_height(panel) + _FOOT
    ET.indent(svg)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(svg, encoding="unicode") + "\n"


def _plot_height(panel: Panel) -> int:
    """Its legend has room beside it, with a line for each series."""
    return max(_PLOT_HEIGHT, _LEGEND_LINE * (len(panel.series) + 3))


def _number(value: float) -> str:
    """Of a tick."""
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _color(series: Series) -> str:
    return _COLORS.get(series.engine, _OTHER_COLOR)


def _text(
    parent: ET.Element, x: float, y: float, text: str, *, size: int = _SMALL, anchor: str = "middle", **more: str
) -> ET.Element:
    more = {"fill": _TEXT} | {key.replace("weight", "font-weight"): value for key, value in more.items()}
    found = ET.SubElement(parent, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}", "font-size": str(size)}, **more)
    found.set("text-anchor", anchor)
    found.text = text
    return found


def _line(parent: ET.Element, start: tuple[float, float], stop: tuple[float, float], color: str, **more: str) -> None:
    (x1, y1), (x2, y2) = start, stop
    places = {name: f"{value:.1f}" for name, value in (("x1", x1), ("y1", y1), ("x2", x2), ("y2", y2))}
    ET.SubElement(parent, "line", places, stroke=color, **{key.replace("_", "-"): value for key, value in more.items()})


def _polygon(x: float, y: float, corners: int, turn: float, radius: float) -> str:
    angles = [turn + 2 * math.pi * i / corners for i in range(corners)]
    return " ".join(f"{x + radius * math.sin(a):.1f},{y - radius * math.cos(a):.1f}" for a in angles)


def _mark(parent: ET.Element, x: float, y: float, color: str, shape: int) -> ET.Element:
    """The point itself: the shape of that number, hollow in the second round."""
    name, is_hollow = _SHAPES[shape % len(_SHAPES)], shape >= len(_SHAPES)
    style = {"fill": "#ffffff" if is_hollow else color, "stroke": color if is_hollow else "#ffffff"}
    style["stroke-width"] = "1.8" if is_hollow else "0.8"
    if name == "circle":
        return ET.SubElement(parent, "circle", style, cx=f"{x:.1f}", cy=f"{y:.1f}", r=str(_RADIUS))
    corners, turn = {
        "square": (4, math.pi / 4),
        "triangle": (3, 0.0),
        "diamond": (4, 0.0),
        "down": (3, math.pi),
        "hexagon": (6, 0.0),
    }[name]
    return ET.SubElement(parent, "polygon", style, points=_polygon(x, y, corners, turn, 1.2 * _RADIUS))


class _PanelDrawing:
    """One panel below `top`."""

    def __init__(self, svg: ET.Element, panel: Panel, top: float) -> None:
        self._group, self._panel, self._top = ET.SubElement(svg, "g", {"class": "panel"}), panel, top
        points = [point for series in panel.series for point in series.points]
        ridge = max(roof.top_s for roof in panel.roofs) / panel.read_gb_s * 1e3  # where the highest level begins
        xs = [*(point.ops_per_byte for point in points), ridge]
        ys = [*(point.top_s for point in points), *(roof.top_s for roof in panel.roofs)]
        self._x = Axis(min(xs) / 1.6, max(xs) * 3, _LEFT, WIDTH - _RIGHT)
        self._area = Box(_LEFT, top + _HEAD, WIDTH - _RIGHT, top + _HEAD + _plot_height(panel))
        self._y = Axis(min(ys) / 2, max(ys) * 2, self._area.bottom, self._area.top)
        self._taken: list[Box] = []
        self._num_unlabelled = 0
        types = list(dict.fromkeys(series.type for series in panel.series))
        if len(types) > MAX_TYPES:
            raise ConfigError(
                f"a picture tells at most {MAX_TYPES} types apart, got {len(types)}: choose fewer --types"
            )
        self._shapes = {name: index for index, name in enumerate(types)}

    def draw(self) -> None:
        """Everything, what matters most on top."""
        _text(self._group, 24, self._top + 24, self._panel.title, size=_FONT, anchor="start", fill=_MUTED)
        self._draw_axes()
        self._draw_roofs()
        for series in self._panel.series:
            self._draw_series(series)
        self._draw_labels()
        self._draw_legend()

    def _place(self, point: Point) -> tuple[float, float]:
        return self._x.at(point.ops_per_byte), self._y.at(point.top_s)

    def _draw_axes(self) -> None:
        area, group = self._area, ET.SubElement(self._group, "g", {"class": "axes"})
        for axis, is_x in ((self._x, True), (self._y, False)):
            named, others = axis.ticks()
            for value in [*others, *named]:
                at = axis.at(value)
                ends = ((at, area.top), (at, area.bottom)) if is_x else ((area.left, at), (area.right, at))
                _line(group, *ends, _GRID, stroke_width="1.2" if value in named else "0.6")
            for value in named:
                at = axis.at(value)
                x, y, anchor = (at, area.bottom + 17, "middle") if is_x else (area.left - 8, at + 4, "end")
                _text(group, x, y, _number(value), anchor=anchor, fill=_MUTED)
        middle = (area.left + area.right) / 2
        _text(group, middle, area.bottom + 40, "operations per byte of weights touched", size=_FONT)
        x, y = 24.0, (area.top + area.bottom) / 2
        _text(group, x, y, "TOP/s", size=_FONT, transform=f"rotate(-90 {x:.1f} {y:.1f})")

    def _draw_roofs(self) -> None:
        panel, area, group = self._panel, self._area, ET.SubElement(self._group, "g", {"class": "roofs"})
        slope = panel.read_gb_s / 1e3  # TOP/s for an operation a byte
        highest = max(roof.top_s for roof in panel.roofs)
        left = max(self._x.low, self._y.low / slope)
        start = self._x.at(left), self._y.at(left * slope)
        stop = self._x.at(highest / slope), self._y.at(highest)
        _line(group, start, stop, _ROOF, stroke_width="2", **{"class": "memory"})
        angle = math.atan2(stop[1] - start[1], stop[0] - start[0])
        text = f"{panel.read_name}: {panel.read_gb_s:,.0f} GB/s"
        length = 0.6 * _SMALL * len(text)
        x, y = start[0] + 0.7 * (stop[0] - start[0]), start[1] + 0.7 * (stop[1] - start[1])
        x, y = x + 9 * math.sin(angle), y - 9 * math.cos(angle)  # above the line
        turned = f"rotate({math.degrees(angle):.1f} {x:.1f} {y:.1f})"
        _text(group, x, y, text, transform=turned, fill=_ROOF)
        steps = max(2, int(length / 8))  # a slanted text is covered by small boxes
        for step in range(steps + 1):
            shift = (step / steps - 0.5) * length
            px, py = x + math.cos(angle) * shift, y + math.sin(angle) * shift
            self._taken.append(Box(px - 8, py - 10, px + 8, py + 4))
        for roof in panel.roofs:
            level = self._y.at(roof.top_s)
            begin = max(area.left, self._x.at(roof.top_s / slope))
            _line(group, (begin, level), (area.right, level), _ROOF, stroke_width="1.6", stroke_dasharray="7 4")
            self._name_roof(group, f"{roof.name}: {roof.top_s:,.3g} TOP/s", level)

    def _name_roof(self, group: ET.Element, text: str, level: float) -> None:
        """Over the line at its right end; below it where another name is there already."""
        width = 0.6 * _SMALL * len(text)
        right = self._area.right - 6
        for y in (level - 6, level + 15):
            box = Box(right - width, y - _SMALL, right, y + 3)
            if not any(box.overlaps(other) for other in self._taken):
                break
        self._taken.append(box)
        _text(group, right, y, text, anchor="end", fill=_ROOF)

    def _draw_series(self, series: Series) -> None:
        color = _color(series)
        group = ET.SubElement(self._group, "g", {"class": "series"})
        group.set("data-engine", series.engine)
        group.set("data-type", series.type)
        places = [self._place(point) for point in series.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        line = {"stroke": color, "stroke-width": "1.3", "stroke-opacity": "0.45", "fill": "none"}
        ET.SubElement(group, "polyline", line, points=path)
        for point, (x, y) in zip(series.points, places, strict=True):
            mark = _mark(group, x, y, color, self._shapes[series.type])
            mark.set("data-tokens", str(point.tokens))
            tokens = "1 token" if point.tokens == 1 else f"{point.tokens:,} tokens"
            ET.SubElement(mark, "title").text = (
                f"{series.engine} {series.type}, {tokens}: {point.us:,.0f} us, {point.top_s:.3g} TOP/s, "
                f"{point.ops_per_byte:.3g} operations per byte"
            )
            self._taken.append(Box(x - _RADIUS, y - _RADIUS, x + _RADIUS, y + _RADIUS))

    def _draw_labels(self) -> None:
        """Ours first, so that they are next to their points."""
        group = ET.SubElement(self._group, "g", {"class": "labels"})
        for series in self._panel.series:
            color = _color(series)
            for point in series.points:
                x, y = self._place(point)
                text = f"{point.tokens:,}"
                box = self._free_place(x, y, text)
                if box is None:
                    self._num_unlabelled += 1
                    continue  # the pointer still shows it
                self._taken.append(box)
                center = (box.left + box.right) / 2, (box.top + box.bottom) / 2
                if math.dist((x, y), center) > 24:
                    _line(group, (x, y), center, color, stroke_width="0.6", stroke_opacity="0.6")
                label = _text(group, center[0], center[1] + 0.36 * _SMALL, text, fill=color)
                label.set("paint-order", "stroke")
                label.set("stroke", "#ffffff")
                label.set("stroke-width", "2.5")

    def _free_place(self, x: float, y: float, text: str) -> Box | None:
        for distance in (13, 18, 24, 32, 42, 54, 68, 84, 102):
            for step in range(16):
                angle = 2 * math.pi * step / 16
                box = text_box(x + 1.15 * distance * math.sin(angle), y - distance * math.cos(angle), text)
                if box.is_within(self._area) and not any(box.overlaps(other) for other in self._taken):
                    return box
        return None

    def _draw_legend(self) -> None:
        """Two lines a series, or one where they are many."""
        group, x, y = ET.SubElement(self._group, "g", {"class": "legend"}), self._area.right + 24.0, self._area.top + 8
        is_short = (2 * _LEGEND_LINE) * (len(self._panel.series) + 1) > _plot_height(self._panel)
        for series in self._panel.series:
            color = _color(series)
            _mark(group, x, y - 4, color, self._shapes[series.type])
            if is_short:
                _text(group, x + 14, y, f"{series.engine} {series.type}", anchor="start", fill=color)
            else:
                _text(group, x + 14, y, series.engine, anchor="start", fill=color, weight="600")
                _text(group, x + 14, y + 14, series.type, anchor="start", fill=_MUTED)
            y += _LEGEND_LINE if is_short else 2 * _LEGEND_LINE
        _text(group, x - 6, y + 4, "Numbers at points: tokens of the call", anchor="start", fill=_MUTED)
        if self._num_unlabelled:
            text = f"(no room for {self._num_unlabelled} of them: point at these)"
            _text(group, x - 6, y + 4 + _LEGEND_LINE, text, anchor="start", fill=_MUTED)
