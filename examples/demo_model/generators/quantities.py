"""Units with whole-number factors, and dates: weekdays, months, day arithmetic. Years never matter to the result."""

from __future__ import annotations

import random

from .arithmetic import product_text
from .base import Task, ask, number_of_digits, pick_zh, plural, qa

# (big unit, small unit, factor, zh big, zh small, reverse asked too)
_UNITS = (
    ("hour", "minute", 60, "小时", "分钟", True),
    ("minute", "second", 60, "分钟", "秒", True),
    ("day", "hour", 24, "天", "小时", False),
    ("week", "day", 7, "周", "天", True),
    ("year", "month", 12, "年", "个月", False),
    ("kilometer", "meter", 1000, "公里", "米", True),
    ("meter", "centimeter", 100, "米", "厘米", True),
    ("centimeter", "millimeter", 10, "厘米", "毫米", True),
    ("kilogram", "gram", 1000, "公斤", "克", True),
    ("liter", "milliliter", 1000, "升", "毫升", True),
    ("yard", "foot", 3, "码", "英尺", True),
    ("foot", "inch", 12, "英尺", "英寸", False),
    ("gallon", "quart", 4, "加仑", "夸脱", True),
    ("pound", "ounce", 16, "磅", "盎司", False),
    ("century", "year", 100, "世纪", "年", True),
)
_MANY = {"foot": "feet", "inch": "inches", "century": "centuries"}
_SHORT = {"kilometer": "km", "meter": "m", "centimeter": "cm", "millimeter": "mm", "kilogram": "kg", "gram": "g", "hour": "h",
          "minute": "min", "second": "s"}  # fmt: skip
_EN = ("How many {ys} are {n} {x}?", "How many {ys} are in {n} {x}?", "Convert {n} {x} to {ys}.", "What is {n} {x} in {ys}?",
       "{n} {x} in {ys}?", "Express {n} {x} in {ys}.", "{n} {x} is how many {ys}?")  # fmt: skip
_ONE = ("How many {ys} are in {n} {x}?", "How many {ys} are there in {n} {x}?", "How many {ys} does {n} {x} have?")
_ZH = ("{n}{x}等于多少{ys}？", "{n}{x}是多少{ys}？", "把{n}{x}换算成{ys}。")


def _unit(name: str, count: int) -> str:
    return plural(count, name, _MANY.get(name))


def units(rng: random.Random) -> Task:
    """`How many minutes are 7 hours?` -> `7 hours = 7 × 60 minutes = 420 minutes.`"""
    big, small, factor, zh_big, zh_small, reverse = rng.choice(_UNITS)
    zh = pick_zh(rng)
    n = max(1, number_of_digits(rng, 3 if factor in (10, 100, 1000) else 2))
    n = 1 if rng.random() < 0.05 else n
    key = f"{n} {big}>{small}"
    down = not (reverse and rng.random() < 0.35)
    given, wanted, count = (big, small, n) if down else (small, big, n * factor)
    result = n * factor if down else n
    if zh:
        given_zh, wanted_zh = (zh_big, zh_small) if down else (zh_small, zh_big)
        work = product_text(n, factor) if down else f"{count} / {factor} = {n}"
        work = f"{n} × {factor} = {work}" if down else work
        question = ask(rng, _ZH, True, n=count, x=given_zh, ys=wanted_zh)
        return qa("units", key, question, f"{work}，所以{count}{given_zh}等于{result}{wanted_zh}。", "这是单位换算。")
    abbreviated = given in _SHORT and count > 1 and rng.random() < 0.2
    single = count == 1 and rng.random() < 0.5
    question = ask(
        rng,
        _ONE if single else _EN,
        n=("an" if given == "hour" else "a") if single else count,
        x=_SHORT[given] if abbreviated else _unit(given, count),
        ys=_unit(wanted, 2),
    )
    work = f"{n} × {factor} = {product_text(n, factor)}" if down else f"{count} / {factor} = {n}"
    answer = f"{work}, so {count} {_unit(given, count)} = {result} {_unit(wanted, result)}."
    return qa("units", key, question, answer, "This is a unit conversion.")


_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_ZH_DAYS = "星期一 星期二 星期三 星期四 星期五 星期六 星期日".split()
_MONTHS = "January February March April May June July August September October November December".split()
_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_DATE_THOUGHT = ("This is a question about dates.", "这是日期问题。")


def _weekday(rng: random.Random) -> Task:
    zh = pick_zh(rng)
    start, days = rng.randrange(7), rng.randint(1, 30)
    back = rng.random() < 0.3
    end = (start - days if back else start + days) % 7
    names = _ZH_DAYS if zh else _DAYS
    key = f"weekday {start} {-days if back else days}"
    weeks, rest = divmod(days, 7)
    split = f"{days} = {weeks} × 7 + {rest}"
    if zh:
        word = "前" if back else "后"
        question = ask(
            rng, ("{d}的{n}天{w}是星期几？", "今天是{d}，{n}天{w}是星期几？"), True, d=names[start], n=days, w=word
        )
        return qa("dates", key, question, f"{split}，所以是{names[end]}。", _DATE_THOUGHT[1])
    word = "before" if back else "after"
    templates = (
        "What day is {n} {u} {w} {d}?",
        "Which weekday is {n} {u} {w} {d}?",
        "What day of the week comes {n} {u} {w} {d}?",
    )
    forward = ("Today is {d}. What day is it in {n} {u}?", "If today is {d}, which day is it in {n} {u}?")
    question = ask(
        rng, templates if back else templates + forward, n=days, u=plural(days, "day"), w=word, d=names[start]
    )
    return qa("dates", key, question, f"{split}, so it is {names[end]}.", _DATE_THOUGHT[0])


def _date_text(day: int, month: int, zh: bool) -> str:
    return f"{month + 1}月{day}日" if zh else f"{day} {_MONTHS[month]}"


def _shift(rng: random.Random) -> Task:
    zh = pick_zh(rng)
    month = rng.choice([m for m in range(12) if m != 1])
    day, days = rng.randint(1, _LENGTHS[month]), rng.randint(1, 28)
    total, length = day + days, _LENGTHS[month]
    key = f"shift {day} {month} {days}"
    start = _date_text(day, month, zh)
    if total <= length:
        end = _date_text(total, month, zh)
        work = f"{day} + {days} = {total}"
    else:
        end = _date_text(total - length, (month + 1) % 12, zh)
        work = f"{day} + {days} = {total}, {total} - {length} = {total - length}"
    if zh:
        question = ask(rng, ("{s}的{n}天后是几月几日？", "{s}过{n}天是哪一天？"), True, s=start, n=days)
        return qa("dates", key, question, f"{work}，所以是{end}。", _DATE_THOUGHT[1])
    templates = (
        "{n} {u} after {s}?",
        "What date is {n} {u} after {s}?",
        "Which date comes {n} {u} after {s}?",
        "Today is {s}. What date is it in {n} {u}?",
    )
    question = ask(rng, templates, s=start, n=days, u=plural(days, "day"))
    return qa("dates", key, question, f"{work}, so it is {end}.", _DATE_THOUGHT[0])


def _between(rng: random.Random) -> Task:
    zh = pick_zh(rng)
    month = rng.randrange(12)
    first, last = sorted(rng.sample(range(1, _LENGTHS[month] + 1), 2))
    gap = last - first
    key = f"between {first} {last} {month}"
    a, b = _date_text(first, month, zh), _date_text(last, month, zh)
    if zh:
        return qa("dates", key, ask(rng, ("从{a}到{b}有多少天？", "{a}到{b}相差几天？"), True, a=a, b=b), f"{last} - {first} = {gap}，所以是{gap}天。", _DATE_THOUGHT[1])  # fmt: skip
    templates = (
        "How many days are there from {a} to {b}?",
        "How many days are between {a} and {b}?",
        "How long is it from {a} to {b}?",
    )
    return qa("dates", key, ask(rng, templates, a=a, b=b), f"{last} - {first} = {gap}, so it is {gap} {plural(gap, 'day')}.", _DATE_THOUGHT[0])  # fmt: skip


def _iso(rng: random.Random) -> Task:
    zh = pick_zh(rng)
    month, year = rng.randrange(12), rng.randint(1900, 2099)
    day = rng.randint(1, _LENGTHS[month])
    iso = f"{year}-{month + 1:02d}-{day:02d}"
    if zh:
        shown = f"{year}年{month + 1}月{day}日"
        return qa(
            "dates",
            iso,
            ask(rng, ("把{s}写成YYYY-MM-DD格式。", "用ISO格式写{s}。"), True, s=shown),
            iso,
            _DATE_THOUGHT[1],
        )
    shown = f"{day} {_MONTHS[month]} {year}" if rng.random() < 0.5 else f"{_MONTHS[month]} {day}, {year}"
    templates = ("Write {s} as YYYY-MM-DD.", "What is {s} in ISO format?", "Convert the date {s} to YYYY-MM-DD.")
    return qa("dates", iso, ask(rng, templates, s=shown), iso, _DATE_THOUGHT[0])


def _neighbour(rng: random.Random) -> Task:
    """Next and previous day or month: few instances, so the wording is part of the key."""
    zh = pick_zh(rng)
    months = rng.random() < 0.5
    names = ([f"{m + 1}月" for m in range(12)] if zh else _MONTHS) if months else (_ZH_DAYS if zh else _DAYS)
    at, back = rng.randrange(len(names)), rng.random() < 0.4
    answer = names[(at - 1 if back else at + 1) % len(names)]
    if zh:
        question = ask(rng, ("{d}的{w}是什么？", "{w}是什么，如果现在是{d}？"), True, d=names[at], w=("上个月" if back else "下个月") if months else ("前一天" if back else "后一天"))  # fmt: skip
        text = f"是{answer}。"
    else:
        unit, word = ("month" if months else "day"), ("before" if back else "after")
        question = ask(
            rng,
            ("Which {u} comes {w} {d}?", "What {u} is right {w} {d}?", "What is the {u} {w} {d}?"),
            d=names[at],
            u=unit,
            w=word,
        )
        text = f"{answer} comes {word} {names[at]}."
    return qa("dates", f"neighbour {question}", question, text, _DATE_THOUGHT[zh])


def _month_length(rng: random.Random) -> Task:
    zh = pick_zh(rng)
    month = rng.choice([m for m in range(12) if m != 1])
    if zh:
        question = ask(rng, ("{m}月有多少天？", "{m}月一共有几天？"), True, m=month + 1)
        return qa("dates", f"length {question}", question, f"{month + 1}月有{_LENGTHS[month]}天。", _DATE_THOUGHT[1])
    question = ask(
        rng, ("How many days does {m} have?", "How many days are in {m}?", "How long is {m}?"), m=_MONTHS[month]
    )
    return qa(
        "dates", f"length {question}", question, f"{_MONTHS[month]} has {_LENGTHS[month]} days.", _DATE_THOUGHT[0]
    )


def dates(rng: random.Random) -> Task:
    """One of the date questions above."""
    kinds = (_weekday, _shift, _between, _iso, _neighbour, _month_length)
    return rng.choices(kinds, (3, 3, 2, 2, 1, 0.5))[0](rng)
