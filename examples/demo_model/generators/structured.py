"""JSON answers: facts of a sentence as an object, `key=value` pairs as an object, a list as an array."""

from __future__ import annotations

import json
import random

from .base import Task, ask, pick_zh, qa
from .words import CITIES, COLOURS, NAMES, NOUNS, ZH_CITIES, ZH_COLOURS, ZH_NAMES, ZH_NOUNS, any_word, distinct

# (sentences, fields in order); a field draws its own value.
_RECORDS = (
    (("{name} is {age} years old and lives in {city}.", "{name}, aged {age}, lives in {city}.", "In {city} lives {name}, who is {age}."),
     ("name", "age", "city")),
    (("{name} bought {count} {item}s for {price} dollars.", "For {price} dollars {name} got {count} {item}s."),
     ("name", "item", "count", "price")),
    (("The {color} {item} costs {price} dollars.", "A {color} {item} is {price} dollars."), ("item", "color", "price")),
    (("{name} travels from {city} to {target} on {day}.", "On {day}, {name} goes from {city} to {target}."),
     ("name", "city", "target", "day")),
    (("Meeting with {name} on {day} at {hour} o'clock.", "On {day} at {hour} o'clock I meet {name}."), ("name", "day", "hour")),
    (("Room {room} has {count} chairs and a {color} door.",), ("room", "count", "color")),
    (("{name} has a {color} {item}.", "The {item} of {name} is {color}."), ("name", "item", "color")),
)  # fmt: skip
_ZH_RECORDS = (
    (("{name}今年{age}岁，住在{city}。", "住在{city}的{name}今年{age}岁。"), ("name", "age", "city")),
    (("{name}花{price}元买了{count}个{item}。",), ("name", "item", "count", "price")),
    (("{name}有一个{color}的{item}。",), ("name", "item", "color")),
)
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()


def _field(rng: random.Random, name: str, zh: bool) -> object:
    draws = {
        "name": lambda: rng.choice(ZH_NAMES if zh else NAMES),
        "city": lambda: rng.choice(ZH_CITIES if zh else CITIES),
        "target": lambda: rng.choice(CITIES),
        "color": lambda: rng.choice(ZH_COLOURS if zh else COLOURS),
        "item": lambda: rng.choice(ZH_NOUNS if zh else NOUNS),
        "day": lambda: rng.choice(_DAYS),
        "age": lambda: rng.randint(1, 99),
        "count": lambda: rng.randint(2, 99),
        "price": lambda: rng.randint(1, 999),
        "hour": lambda: rng.randint(1, 12),
        "room": lambda: rng.randint(1, 999),
    }
    return draws[name]()


_EXTRACT = (
    "Extract {f} as JSON: {s}", "Return a JSON object with {f}: {s}", "Give me {f} as JSON. {s}", "{s} Answer with a JSON object with {f}.",
    "JSON with the keys {f}, please: {s}",
)  # fmt: skip
_ZH_EXTRACT = ("提取{f}，用JSON回答：{s}", "用JSON返回{f}：{s}", "{s}请用JSON给出{f}。")


def _extract(rng: random.Random) -> Task:
    zh = pick_zh(rng)
    sentences, fields = rng.choice(_ZH_RECORDS if zh else _RECORDS)
    values = {f: _field(rng, f, zh) for f in fields}
    chosen = list(fields)
    if rng.random() < 0.5:
        chosen = rng.sample(chosen, rng.randint(1, len(chosen)))
    sentence = rng.choice(sentences).format(**values)
    listed = "、".join(chosen) if zh else _english_list(chosen)
    answer = json.dumps({f: values[f] for f in chosen}, ensure_ascii=False)
    question = ask(rng, _ZH_EXTRACT if zh else _EXTRACT, zh, f=listed, s=sentence)
    return qa(
        "json",
        f"{sentence} {chosen}",
        question,
        answer,
        "提取信息并写成JSON。" if zh else "I extract the fields and write JSON.",
    )


def _english_list(items: list[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


_PAIRS = (
    "Write this as a JSON object: {x}",
    "Turn into JSON: {x}",
    "Convert to JSON: {x}",
    "Make a JSON object with {x}",
)
_ZH_PAIRS = ("把下面的内容写成JSON对象：{x}", "转换成JSON：{x}")


def _pairs(rng: random.Random) -> Task:
    zh = pick_zh(rng)
    keys = distinct(rng, any_word, rng.randint(1, 5))
    values: list[object] = []
    for _ in keys:
        kind = rng.random()
        values.append(rng.randint(0, 999) if kind < 0.5 else rng.random() < 0.5 if kind < 0.6 else any_word(rng))
    pattern = rng.choice(("{k}={v}", "{k}: {v}", "{k} is {v}"))
    shown = ", ".join(
        pattern.format(k=k, v=str(v).lower() if isinstance(v, bool) else v) for k, v in zip(keys, values, strict=True)
    )
    answer = json.dumps(dict(zip(keys, values, strict=True)), ensure_ascii=False)
    return qa(
        "json",
        shown,
        ask(rng, _ZH_PAIRS if zh else _PAIRS, zh, x=shown),
        answer,
        "写成JSON。" if zh else "I write a JSON object.",
    )


_ARRAYS = ("Write this list as a JSON array: {x}", "Convert to a JSON array: {x}", "JSON array of {x}, please.")
_ZH_ARRAYS = ("把这个列表写成JSON数组：{x}", "转换成JSON数组：{x}")


def _array(rng: random.Random) -> Task:
    zh = pick_zh(rng)
    count = rng.randint(2, 7)
    items: list[object] = (
        [rng.randint(0, 999) for _ in range(count)] if rng.random() < 0.5 else list(distinct(rng, any_word, count))
    )
    shown = ", ".join(map(str, items))
    answer = json.dumps(items, ensure_ascii=False)
    return qa(
        "json",
        shown,
        ask(rng, _ZH_ARRAYS if zh else _ARRAYS, zh, x=shown),
        answer,
        "写成JSON。" if zh else "I write a JSON array.",
    )


def generate(rng: random.Random) -> Task:
    return rng.choices((_extract, _pairs, _array), (5, 3, 1.5))[0](rng)
