"""List skills: sorting, reversing, counting, copying. Items are numbers, words, letters or codes."""

from __future__ import annotations

import random

from .base import Task, ask, assistant, pick_zh, plural, qa, user
from .words import ADJECTIVES, NOUNS, NUMBER_WORDS, ZH_NOUNS, any_word, distinct

MAX_ITEMS = 8
_SEPARATORS = (", ", ", ", ", ", " ", ",", "; ")
_ZH_SEPARATORS = ("、", "，", ", ", " ")


def _joined(rng: random.Random, items: list[str], zh: bool) -> str:
    return rng.choice(_ZH_SEPARATORS if zh else _SEPARATORS).join(items)


def _numbers(rng: random.Random, count: int) -> list[int]:
    top = rng.choice((9, 20, 99, 99, 99, 999)) if count <= MAX_ITEMS else 99
    top = max(top, count * 2)
    return rng.sample(range(top + 1), count)


_SORT_NUMBERS = {
    False: ("Sort these numbers: {x}", "Sort {x}", "Sort the numbers {x} in ascending order.", "Put in order: {x}",
            "Sort from smallest to largest: {x}", "Please sort: {x}", "Arrange {x} from low to high."),
    True: ("Sort these numbers in descending order: {x}", "Sort {x} from largest to smallest.", "Sort descending: {x}",
           "Arrange {x} from high to low.", "Put in reverse order of size: {x}"),
}  # fmt: skip
_ZH_SORT = {
    False: ("把这些数从小到大排序：{x}", "请将{x}按升序排列。", "从小到大排列：{x}", "排序：{x}"),
    True: ("把这些数从大到小排序：{x}", "请将{x}按降序排列。", "从大到小排列：{x}"),
}
_SORT_WORDS = {
    False: ("Sort these words alphabetically: {x}", "Sort alphabetically: {x}", "Put these words in alphabetical order: {x}",
            "Sort the words {x} from A to Z.", "Alphabetical order, please: {x}"),
    True: ("Sort these words in reverse alphabetical order: {x}", "Sort the words {x} from Z to A.", "Sort from Z to A: {x}"),
}  # fmt: skip


def sorting(rng: random.Random) -> Task:
    """Numbers by size or words by alphabet, either way round; sometimes only the extreme is asked for."""
    count = rng.randint(2, MAX_ITEMS)
    down = rng.random() < 0.35
    if rng.random() < 0.35:
        words = rng.sample(NOUNS, count)
        question = ask(rng, _SORT_WORDS[down], x=_joined(rng, words, False))
        answer = ", ".join(sorted(words, reverse=down))
        return qa("sorting", f"{' '.join(sorted(words))} {down}", question, answer, "I sort the words.")
    zh = pick_zh(rng)
    numbers = _numbers(rng, count)
    shown = _joined(rng, [str(n) for n in numbers], zh)
    key = f"{sorted(numbers)} {down}"
    if rng.random() < 0.2:
        best = max(numbers) if down else min(numbers)
        if zh:
            word = "最大" if down else "最小"
            return qa("sorting", key, ask(rng, ("{x}中{w}的数是哪个？", "找出{w}的数：{x}"), zh, x=shown, w=word),
                      f"{word}的数是{best}。", "找出极值。")  # fmt: skip
        word = "largest" if down else "smallest"
        templates = ("What is the {w} number in {x}?", "Find the {w} of {x}.", "Which is the {w}: {x}?")
        return qa(
            "sorting",
            key,
            ask(rng, templates, x=shown, w=word),
            f"The {word} number is {best}.",
            "I look for one number.",
        )
    if rng.random() < 0.1:
        shown = f"[{', '.join(map(str, numbers))}]"
    question = ask(rng, (_ZH_SORT if zh else _SORT_NUMBERS)[down], zh, x=shown)
    answer = ", ".join(map(str, sorted(numbers, reverse=down)))
    if rng.random() < 0.1:
        return _then_reversed(rng, "sorting", key, question, answer, zh)
    return qa("sorting", key, question, answer, "给数字排序。" if zh else "I sort the numbers.")


_AGAIN = (
    "Now reverse it.",
    "Now reverse that.",
    "Reverse it.",
    "And backwards?",
    "Now the other way round.",
    "Reverse the result.",
)
_ZH_AGAIN = ("再倒过来。", "现在倒序。", "把结果反转。")


def _then_reversed(rng: random.Random, skill: str, key: str, question: str, answer: str, zh: bool) -> Task:
    """The same exchange, followed by a request to reverse its result."""
    follow = user(ask(rng, _ZH_AGAIN if zh else _AGAIN, zh))
    messages = (user(question), assistant(answer), follow, assistant(", ".join(answer.split(", ")[::-1])))
    return Task(skill, f"{key} reversed", messages, (), "把顺序倒过来。" if zh else "I reverse the order.")


_REVERSE = ("Reverse this list: {x}", "Reverse {x}", "Reverse the order of: {x}", "Write this list backwards: {x}",
            "Please reverse: {x}", "Give me this in reverse order: {x}")  # fmt: skip
_ZH_REVERSE = ("把这个列表倒过来：{x}", "反转：{x}", "请将{x}倒序排列。", "倒着写：{x}")
_REVERSE_DIGITS = (
    "Reverse the digits of {x}.",
    "Write {x} backwards.",
    "Reverse the number {x}.",
    "What is {x} in reverse?",
)
_ZH_REVERSE_DIGITS = ("把数字{x}倒过来写。", "{x}倒过来是多少？")


def reversing(rng: random.Random) -> Task:
    """A list of words, numbers or letters, or the digits of one number, back to front."""
    zh = pick_zh(rng)
    thought = "把顺序倒过来。" if zh else "I reverse the order."
    if rng.random() < 0.25:
        digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(2, MAX_ITEMS)))
        question = ask(rng, _ZH_REVERSE_DIGITS if zh else _REVERSE_DIGITS, zh, x=digits)
        return qa("reversing", digits, question, digits[::-1], thought)
    count = rng.randint(2, MAX_ITEMS)
    kind = rng.random()
    if kind < 0.3:
        items = [str(n) for n in _numbers(rng, count)]
    elif kind < 0.5:
        items = [rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(count)]
    elif zh and kind < 0.8:
        items = rng.sample(ZH_NOUNS, count)
    else:
        items = distinct(rng, any_word, count)
    question = ask(rng, _ZH_REVERSE if zh else _REVERSE, zh, x=_joined(rng, items, zh))
    return qa("reversing", " ".join(items), question, ", ".join(items[::-1]), thought)


_COUNT_ITEMS = ("How many items are in this list: {x}", "Count the items: {x}", "How many things are listed here? {x}",
                "How long is this list: {x}")  # fmt: skip
_ZH_COUNT_ITEMS = ("这个列表里有几项：{x}", "数一数有几项：{x}")
_COUNT_ONE = ('How many times does "{w}" appear in: {x}', "How often does {w} occur in this list: {x}", "Count the {w} in: {x}",
              'Count how many times "{w}" appears: {x}')  # fmt: skip
_ZH_COUNT_ONE = ("“{w}”在下面出现了几次：{x}", "数一数{w}出现的次数：{x}")
_COUNT_RANGE = (
    "Count from {a} to {b}.",
    "Please count from {a} to {b}.",
    "List the numbers from {a} to {b}.",
    "Numbers from {a} to {b}?",
)
_ZH_COUNT_RANGE = ("从{a}数到{b}。", "列出{a}到{b}的数。")


def counting(rng: random.Random) -> Task:
    """How many items, how often one item, or counting up or down between two numbers."""
    zh = pick_zh(rng)
    kind = rng.random()
    if kind < 0.3:
        a = rng.choice((0, 1, rng.randint(0, 90), rng.randint(0, 900)))
        b = a + rng.choice((-1, 1)) * rng.randint(1, rng.choice((12, 12, 30)))
        b = max(b, 0) if a else max(b, 1)
        step = 1 if b > a else -1
        start_given = a != 1 or step < 0 or rng.random() < 0.5
        templates = (
            (_ZH_COUNT_RANGE if zh else _COUNT_RANGE)
            if start_given
            else (("数到{b}。",) if zh else ("Count to {b}.", "Count up to {b}."))
        )
        word = not zh and b <= 20 and rng.random() < 0.15
        question = ask(rng, templates, zh, a=a, b=NUMBER_WORDS[b] if word else b)
        answer = ", ".join(map(str, range(a, b + step, step)))
        return qa("counting", f"{a}..{b}", question, answer, "依次数数。" if zh else "I count step by step.")
    if kind < 0.6:
        items = distinct(rng, (lambda r: r.choice(ZH_NOUNS)) if zh else any_word, rng.randint(1, 12))
        question = ask(rng, _ZH_COUNT_ITEMS if zh else _COUNT_ITEMS, zh, x=_joined_always(rng, items, zh))
        answer = f"一共有{len(items)}项。" if zh else f"The list has {len(items)} {plural(len(items), 'item')}."
        return qa("counting", " ".join(items), question, answer, "数一数有几项。" if zh else "I count the items.")
    return _occurrences(rng, zh)


def _joined_always(rng: random.Random, items: list[str], zh: bool) -> str:
    return rng.choice(("、", "，") if zh else (", ", ", ", ",", "; ")).join(items)


def _occurrences(rng: random.Random, zh: bool) -> Task:
    letters = rng.random() < 0.3
    pool = [rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(4)] if letters else None
    if pool is None:
        pool = rng.sample(ZH_NOUNS, 4) if zh else distinct(rng, any_word, 4)
    wanted = pool[0]
    others = [p for p in pool[1:] if p != wanted] or ["yes" if wanted != "yes" else "no"]
    hits = rng.randint(0, 8)
    items = [wanted] * hits + [rng.choice(others) for _ in range(rng.randint(1, 6))]
    rng.shuffle(items)
    question = ask(
        rng,
        _ZH_COUNT_ONE if zh else _COUNT_ONE,
        zh,
        w=wanted,
        x=" ".join(items) if letters else _joined(rng, items, zh),
    )
    answer = f"“{wanted}”出现了{hits}次。" if zh else f'"{wanted}" appears {hits} {plural(hits, "time")}.'
    return qa(
        "counting", f"{wanted}: {' '.join(items)}", question, answer, "数出现的次数。" if zh else "I count the matches."
    )


_COPY = ("Repeat after me: {x}", "Copy this exactly: {x}", "Say this: {x}", "Repeat: {x}", "Echo the following text: {x}",
         "Copy: {x}", "Please repeat this text: {x}", "Write exactly this: {x}")  # fmt: skip
_ZH_COPY = ("请重复：{x}", "跟我说：{x}", "原样抄写：{x}", "复制下面的内容：{x}")


def _code(rng: random.Random) -> str:
    def part() -> str:
        if rng.random() < 0.5:
            return "".join(rng.choice("0123456789") for _ in range(rng.randint(1, 4)))
        return "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(rng.randint(1, 3)))

    return rng.choice("-_./").join(part() for _ in range(rng.randint(2, 4)))


def copying(rng: random.Random) -> Task:
    """Text given back unchanged: words, invented words, numbers, codes, Chinese."""
    zh = pick_zh(rng)
    kind = rng.random()
    if rng.random() < 0.05:
        text = " ".join(any_word(rng) for _ in range(rng.randint(10, 60)))
    elif kind < 0.25:
        text = _code(rng)
    elif kind < 0.45:
        text = " ".join(str(rng.randint(0, 9999)) for _ in range(rng.randint(1, 6)))
    elif zh and kind < 0.85:
        text = "".join(rng.choice(ZH_NOUNS) for _ in range(rng.randint(1, 6)))
    elif kind < 0.7:
        text = f"the {rng.choice(ADJECTIVES)} {any_word(rng)} and the {rng.choice(ADJECTIVES)} {any_word(rng)}"
        text = text.capitalize() + "." if rng.random() < 0.5 else text
    else:
        text = " ".join(any_word(rng) for _ in range(rng.randint(1, 8)))
    return qa(
        "copying",
        text,
        ask(rng, _ZH_COPY if zh else _COPY, zh, x=text),
        text,
        "原样重复。" if zh else "I repeat the text.",
    )
