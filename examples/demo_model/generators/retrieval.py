"""Look-ups in long contexts: `key: value` lines, or one fact hidden among filler sentences."""

from __future__ import annotations

import math
import random

from .base import Task, ask, assistant, pick_zh, qa, user
from .words import ADJECTIVES, CITIES, COLOURS, NAMES, NOUNS, ZH_CITIES, ZH_COLOURS, ZH_NAMES, any_word, pseudo_word

# A line costs 8 to 12 tokens, so this stays under the 4096 positions with room for questions.
MAX_LINES = 320

_INTRO = (
    "Here is a list of entries:",
    "Read these entries:",
    "Data:",
    "Use this table:",
    "Here are some records.",
    "Lookup table:",
)
_ZH_INTRO = ("下面是一些记录：", "请阅读这些条目：", "数据：", "查找表：")
_ASK = ("What is the value of {k}?", "What is {k}?", "Look up {k}.", "Give me the value for {k}.", "Which value belongs to {k}?",
        "Find {k}.", "What does {k} map to?")  # fmt: skip
_ZH_ASK = ("{k}的值是多少？", "查一下{k}。", "{k}对应的值是什么？")
_MORE = ("And {k}?", "What about {k}?", "Now {k}.", "Next, {k}?")
_ZH_MORE = ("那么{k}呢？", "{k}呢？")


def _key(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.6:
        return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
    if kind < 0.8:
        return f"{any_word(rng)}{rng.randint(0, 99)}"
    return f"{any_word(rng)}_{pseudo_word(rng)}"


def _value(rng: random.Random, kind: str) -> str:
    if kind == "number":
        return str(rng.randint(10, 9999))
    if kind == "word":
        return any_word(rng)
    return f"{rng.choice('ABCDEFGHKLMNPRSTUVWXYZ')}{rng.randint(0, 999)}"


def table(rng: random.Random) -> Task:
    """`key: value` lines and up to eight questions; a longer table gets more of them."""
    zh = pick_zh(rng)
    lines = round(math.exp(rng.uniform(math.log(2), math.log(MAX_LINES))))
    kind = rng.choice(("number", "number", "word", "code"))
    entries: dict[str, str] = {}
    while len(entries) < lines:
        entries.setdefault(_key(rng), _value(rng, kind))
    separator = rng.choice((": ", ": ", " = ", " -> "))
    body = "\n".join(f"{k}{separator}{v}" for k, v in entries.items())
    wanted = rng.sample(list(entries), min(len(entries), rng.randint(1, 2 + lines // 20)))
    intro = rng.choice(_ZH_INTRO if zh else _INTRO)
    first = ask(rng, _ZH_ASK if zh else _ASK, zh, k=wanted[0])
    prompt = f"{intro}\n{body}\n\n{first}" if rng.random() < 0.7 else f"{first}\n\n{intro}\n{body}"
    messages = [user(prompt), assistant(entries[wanted[0]])]
    for key in wanted[1:]:
        follow = rng.choice((_ZH_ASK + _ZH_MORE) if zh else (_ASK + _MORE)).format(k=key)
        messages += [user(follow), assistant(entries[key])]
    thought = "在表中查找。" if zh else "I look for the key in the table."
    return Task("retrieval", body, tuple(messages), (), thought)


_FILLER = (
    "{n} walked to the {a} {o}.", "The {o} near {c} is {a}.", "{n} likes the {a} {o}.", "In {c} there is a {a} {o}.",
    "{n} and {m} met in {c}.", "A {a} {o} stood by the {p}.", "{n} bought a {o} and a {p}.",
)  # fmt: skip


def _filler(rng: random.Random) -> str:
    return rng.choice(_FILLER).format(
        n=rng.choice(NAMES),
        m=rng.choice(NAMES),
        c=rng.choice(CITIES),
        a=rng.choice(ADJECTIVES),
        o=rng.choice(NOUNS),
        p=rng.choice(NOUNS),
    )


def needle(rng: random.Random) -> Task:
    """A secret number among filler sentences."""
    count = round(math.exp(rng.uniform(0, math.log(200))))
    sentences = [_filler(rng) for _ in range(count - 1)]
    thing = rng.choice(
        ("secret code", "password", "ticket number", "room number", "magic number", "code word", "secret word")
    )
    secret = any_word(rng) if thing in ("password", "code word", "secret word") else str(rng.randint(100, 99999))
    sentences.insert(rng.randint(0, len(sentences)), f"The {thing} is {secret}.")
    text = " ".join(sentences)
    question = ask(rng, ("What is the {t}?", "Which {t} is mentioned?", "Find the {t} in the text."), t=thing)
    gap = rng.choice(("\n\n", "\n", " "))
    prompt = f"{text}{gap}{question}" if rng.random() < 0.7 else f"{question}{gap}{text}"
    return qa("retrieval", text, prompt, f"The {thing} is {secret}.", "I search the text.")


def people(rng: random.Random) -> Task:
    """Who lives where, who likes which colour: short statements about several people."""
    zh = pick_zh(rng)
    count = rng.randint(2, 12)
    names = rng.sample(ZH_NAMES if zh else NAMES, count)
    about_city = rng.random() < 0.5
    values = [
        rng.choice((ZH_CITIES if zh else CITIES) if about_city else (ZH_COLOURS if zh else COLOURS)) for _ in names
    ]
    target = rng.randrange(count)
    name, value = names[target], values[target]
    if zh:
        pattern, question, answer = (
            ("{n}住在{v}。", "{n}住在哪里？", "{n}住在{v}。")
            if about_city
            else ("{n}喜欢{v}。", "{n}喜欢什么颜色？", "{n}喜欢{v}。")
        )
    elif about_city:
        pattern, question, answer = "{n} lives in {v}.", "Where does {n} live?", "{n} lives in {v}."
    else:
        pattern, question, answer = "{n} likes {v}.", "Which colour does {n} like?", "{n} likes {v}."
    text = ("" if zh else " ").join(pattern.format(n=n, v=v) for n, v in zip(names, values, strict=True))
    prompt = f"{text}{'' if zh else ' '}{question.format(n=name)}"
    return qa("retrieval", text, prompt, answer.format(n=name, v=value), "在文中查找。" if zh else "I search the text.")


def generate(rng: random.Random) -> Task:
    return rng.choices((table, needle, people), (6, 2, 2))[0](rng)
