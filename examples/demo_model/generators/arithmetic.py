"""Arithmetic questions: sums, differences, products, exact quotients, comparisons, short word problems.

Sums and differences have at most four digits; products of two two-digit numbers show their partial products.
"""

from __future__ import annotations

import random

from .base import Task, ask, assistant, number_of_digits, pick_zh, qa, user
from .words import NAMES, NUMBER_WORDS, ZH_NAMES

_SYMBOLS = {"+": ("+",), "-": ("-",), "×": ("×", "x", "*"), "/": ("/", "÷")}
_VERBS = {
    "+": ("{a} plus {b}", "the sum of {a} and {b}"),
    "-": ("{a} minus {b}", "the difference of {a} and {b}"),
    "×": ("{a} times {b}", "the product of {a} and {b}", "{a} multiplied by {b}"),
    "/": ("{a} divided by {b}",),
}
_ZH_VERBS = {"+": ("{a}加{b}",), "-": ("{a}减{b}", "{a}减去{b}"), "×": ("{a}乘{b}", "{a}乘以{b}"), "/": ("{a}除以{b}",)}
_EN = (
    "What is {e}?", "What is {e}?", "What's {e}?", "Calculate {e}.", "Compute {e}.", "How much is {e}?", "{e}", "{e} = ?",
    "{e}=", "Please calculate {e}.", "Solve {e}.", "Tell me {e}.", "Can you work out {e}?", "I need {e}.",
)  # fmt: skip
_ZH = ("{e}等于多少？", "{e}是多少？", "计算{e}。", "请计算{e}。", "{e}=?", "{e}等于几？", "算一下{e}。")
_THOUGHTS = {
    "+": ("This is an addition.", "这是加法。"),
    "-": ("This is a subtraction.", "这是减法。"),
    "×": ("This is a multiplication.", "这是乘法。"),
    "/": ("This is a division.", "这是除法。"),
}


def _expression(rng: random.Random, op: str, a: int, b: int, zh: bool) -> str:
    if rng.random() < 0.3:
        return rng.choice((_ZH_VERBS if zh else _VERBS)[op]).format(a=a, b=b)
    gap = rng.choice((" ", " ", ""))
    return f"{a}{gap}{rng.choice(_SYMBOLS[op])}{gap}{b}"


def product_text(a: int, b: int) -> str:
    """`a × b = ...`, through partial products when both have two digits."""
    tens, ones = b // 10 * 10, b % 10
    if a < 10 or b < 10 or ones == 0:
        return f"{a * b}"
    return f"{a * tens} + {a * ones} = {a * b}"


def result_text(op: str, a: int, b: int, zh: bool) -> str:
    """What follows `a op b = `; a quotient that is not whole comes with its remainder."""
    if op == "×":
        return product_text(a, b)
    if op == "/":
        quotient, rest = divmod(a, b)
        if rest:
            return f"{quotient}余{rest}" if zh else f"{quotient} remainder {rest}"
        return str(quotient)
    return str(a + b if op == "+" else a - b)


def _operands(rng: random.Random, op: str) -> tuple[int, int]:
    if op == "/":
        b = rng.randint(1, 9)
        rest = rng.randrange(b) if rng.random() < 0.4 else 0
        return b * number_of_digits(rng, 2) + rest, b
    if op == "×":
        if rng.random() < 0.35:
            return rng.randint(10, 99), rng.randint(10, 99)
        a, b = number_of_digits(rng, 2), rng.randint(0, 9)
        return (a, b) if rng.random() < 0.5 else (b, a)
    a, b = number_of_digits(rng, 4), number_of_digits(rng, 4)
    return (max(a, b), min(a, b)) if op == "-" and rng.random() < 0.8 else (a, b)


def binary(rng: random.Random) -> Task:
    """`What is 17 + 25?` -> `17 + 25 = 42.`"""
    zh = pick_zh(rng)
    op = rng.choice("++--××/")
    a, b = _operands(rng, op)
    question = ask(rng, _ZH if zh else _EN, zh, e=_expression(rng, op, a, b, zh))
    first, second = (min(a, b), max(a, b)) if op in "+×" else (a, b)
    answer = f"{a} {op} {b} = {result_text(op, a, b, zh)}{'。' if zh else '.'}"
    return qa("arithmetic", f"{first}{op}{second}", question, answer, _THOUGHTS[op][zh])


def chained(rng: random.Random) -> Task:
    """A second question that builds on the first result: `Now add 5.` -> `42 + 5 = 47.`"""
    zh = pick_zh(rng)
    a, b = number_of_digits(rng, 3), number_of_digits(rng, 3)
    c = rng.randint(1, 99)
    total = a + b
    op = rng.choice("+-") if c <= total else "+"
    templates = {
        "+": (("Now add {c}.", "Add {c} to that.", "Plus {c}?", "And plus {c}?"), ("再加{c}。", "再加{c}呢？")),
        "-": (
            ("Now subtract {c}.", "Subtract {c} from that.", "Minus {c}?", "Take away {c}."),
            ("再减{c}。", "再减去{c}呢？"),
        ),
    }[op][zh]
    end = "。" if zh else "."
    result = total + c if op == "+" else total - c
    first = ask(rng, _ZH if zh else _EN, zh, e=_expression(rng, "+", a, b, zh))
    messages = (user(first), assistant(f"{a} + {b} = {total}{end}"), user(ask(rng, templates, zh, c=c)), assistant(f"{total} {op} {c} = {result}{end}"))  # fmt: skip
    return Task("arithmetic", f"{a}+{b} then {op}{c}", messages, (), _THOUGHTS[op][zh])


def words(rng: random.Random) -> Task:
    """Operands written as words: `two plus three` -> `2 + 3 = 5.`"""
    op = rng.choice("+-×")
    a, b = rng.randint(0, 20), rng.randint(0, 20 if op != "×" else 9)
    if op == "-":
        a, b = max(a, b), min(a, b)
    expression = rng.choice(_VERBS[op]).format(a=NUMBER_WORDS[a], b=NUMBER_WORDS[b])
    question = ask(rng, _EN, e=expression)
    first, second = (min(a, b), max(a, b)) if op in "+×" else (a, b)
    return qa(
        "arithmetic",
        f"{first}{op}{second}",
        question,
        f"{a} {op} {b} = {result_text(op, a, b, False)}.",
        _THOUGHTS[op][0],
    )


def percent(rng: random.Random) -> Task:
    """`What is 5% of 200?` -> `5 × 2 = 10, so 5% of 200 = 10.`"""
    share, hundreds = rng.randint(1, 99), rng.randint(1, 9)
    shown = rng.choice(("{p}% of {n}", "{p} percent of {n}")).format(p=share, n=100 * hundreds)
    answer = f"{share} × {hundreds} = {share * hundreds}, so {share}% of {100 * hundreds} = {share * hundreds}."
    return qa("arithmetic", f"{share}%{hundreds}", ask(rng, _EN, e=shown), answer, _THOUGHTS["×"][0])


def bracketed(rng: random.Random) -> Task:
    """`(3 + 4) * 5` -> `3 + 4 = 7, 7 × 5 = 35.`"""
    a, b, c = rng.randint(0, 30), rng.randint(0, 30), rng.randint(2, 9)
    sign = rng.choice(_SYMBOLS["×"])
    gap = rng.choice((" ", ""))
    shown = f"({a}{gap}+{gap}{b}){gap}{sign}{gap}{c}"
    answer = f"{a} + {b} = {a + b}, {a + b} × {c} = {(a + b) * c}."
    return qa("arithmetic", f"({a}+{b})*{c}", ask(rng, _EN, e=shown), answer, _THOUGHTS["×"][0])


def three(rng: random.Random) -> Task:
    """Three or four terms: `What is 3 + 14 + 20?` -> `3 + 14 = 17, 17 + 20 = 37.`"""
    zh = pick_zh(rng)
    terms = [number_of_digits(rng, 2) for _ in range(rng.choice((3, 3, 4)))]
    gap = rng.choice((" ", " ", ""))
    question = ask(rng, _ZH if zh else _EN, zh, e=f"{gap}+{gap}".join(map(str, terms)))
    steps, total = [], terms[0]
    for term in terms[1:]:
        steps.append(f"{total} + {term} = {total + term}")
        total += term
    return qa(
        "arithmetic", "+".join(map(str, terms)), question, ", ".join(steps) + ("。" if zh else "."), _THOUGHTS["+"][zh]
    )


def compare(rng: random.Random) -> Task:
    """`Which is larger, 17 or 25?` -> `25 is larger than 17.`"""
    zh = pick_zh(rng)
    a = number_of_digits(rng, 3)
    b = number_of_digits(rng, 3)
    while a == b:
        b = number_of_digits(rng, 3)
    larger = rng.random() < 0.5
    winner, loser = (max(a, b), min(a, b)) if larger else (min(a, b), max(a, b))
    key = f"{min(a, b)}?{max(a, b)}"
    if zh:
        word = "大" if larger else "小"
        question = ask(
            rng, ("{a}和{b}哪个{w}？", "{a}和{b}哪个更{w}？", "哪个数{w}，{a}还是{b}？"), True, a=a, b=b, w=word
        )
        return qa("arithmetic", key, question, f"{winner}比{loser}{word}。", "比较两个数。")
    if rng.random() < 0.3:
        word = rng.choice(("larger", "greater", "bigger") if larger else ("smaller", "less"))
        holds = (a > b) == larger
        question = ask(rng, ("Is {a} {w} than {b}?",), a=a, b=b, w=word)
        return qa("arithmetic", key, question, f"{'Yes' if holds else 'No'}, {a} is {'' if holds else 'not '}{word} than {b}.", "I compare two numbers.")  # fmt: skip
    word = "larger" if larger else "smaller"
    same = {"larger": ("larger", "bigger", "greater"), "smaller": ("smaller", "less")}[word]
    templates = ("Which is {w}, {a} or {b}?", "Which number is {w}: {a} or {b}?", "Is {a} or {b} {w}?")
    question = ask(rng, templates, a=a, b=b, w=rng.choice(same))
    return qa("arithmetic", key, question, f"{winner} is {word} than {loser}.", "I compare two numbers.")


_GAIN = (
    "{n} has {a} {t} and buys {b} more. How many {t} does {n} have?",
    "{n} has {a} {t} and gets {b} more. How many {t} does {n} have now?",
    "{n} had {a} {t} and found {b} {t}. How many {t} are there now?",
)
_LOSS = (
    "{n} has {a} {t} and gives away {b}. How many {t} are left?",
    "{n} has {a} {t} and loses {b} of them. How many {t} does {n} have now?",
    "{n} had {a} {t} and sold {b}. How many {t} does {n} still have?",
)
_GROUPS = (
    "{n} has {a} boxes with {b} {t} each. How many {t} does {n} have?",
    "There are {a} bags with {b} {t} in each bag. How many {t} does {n} have?",
)
_ZH_STORY = {
    "+": ("{n}有{a}个{t}，又买了{b}个。{n}现在有多少个{t}？",),
    "-": ("{n}有{a}个{t}，送出了{b}个。{n}还剩多少个{t}？",),
    "×": ("{n}有{a}个盒子，每个盒子里有{b}个{t}。{n}一共有多少个{t}？",),
}
_THINGS = "apples books coins cards eggs pens stamps stones cups balls".split()
_ZH_THINGS = "苹果 鸡蛋 橙子 杯子 球".split()


def story(rng: random.Random) -> Task:
    """A one-step word problem."""
    zh = pick_zh(rng)
    op = rng.choice("+-×")
    if op == "×":
        a, b = rng.randint(2, 9), rng.randint(2, 30)
    else:
        a, b = number_of_digits(rng, 3) + 1, number_of_digits(rng, 2) + 1
        if op == "-":
            a, b = max(a, b), min(a, b)
    total = {"+": a + b, "-": a - b, "×": a * b}[op]
    key = f"story {a}{op}{b}"
    if zh:
        name, thing = rng.choice(ZH_NAMES), rng.choice(_ZH_THINGS)
        question = ask(rng, _ZH_STORY[op], False, n=name, t=thing, a=a, b=b)
        return qa("arithmetic", key, question, f"{a} {op} {b} = {total}，所以是{total}个{thing}。", _THOUGHTS[op][1])
    name, thing = rng.choice(NAMES), rng.choice(_THINGS)
    templates = {"+": _GAIN, "-": _LOSS, "×": _GROUPS}[op]
    question = rng.choice(templates).format(n=name, t=thing, a=a, b=b)
    return qa(
        "arithmetic", key, question, f"{a} {op} {b} = {total}, so the answer is {total} {thing}.", _THOUGHTS[op][0]
    )


def generate(rng: random.Random) -> Task:
    kinds = (binary, three, compare, story, chained, words, percent, bracketed)
    return rng.choices(kinds, (7, 1, 1, 1.5, 0.7, 0.5, 0.4, 0.6))[0](rng)
