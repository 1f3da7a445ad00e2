"""Questions about ktransformers itself, in English and Chinese. The wording is the instance: held-out wordings are new.

Facts come from the project's own design; an answer is one or two short sentences.
"""

from __future__ import annotations

import random

from .base import Task, qa, vary
from .facts_data import EN, ZH

_EN_WRAP = ("{q}", "{q}", "{q}", "Please explain: {q}", "I have a question. {q}", "Could you tell me: {q}", "One more thing: {q}",
            "{q} Please answer briefly.", "{q} Thanks!", "I am new here. {q}", "Tell me, {q}", "So, {q}")  # fmt: skip
_ZH_WRAP = (
    "{q}",
    "{q}",
    "请解释一下：{q}",
    "我有个问题：{q}",
    "我是新手，{q}",
    "{q}谢谢！",
    "{q}请简短回答。",
    "请问一下，{q}",
)


def _fact(rng: random.Random, skill: str, facts: dict, wraps: tuple[str, ...], zh: bool) -> Task:
    name = rng.choice(list(facts))
    questions, answer = facts[name]
    question = rng.choice(wraps).format(q=vary(rng, rng.choice(questions), zh))
    if rng.random() < 0.15:
        question = question.replace("ktransformers", rng.choice(("KTransformers", "Ktransformers", "KTRANSFORMERS")))
    thought = "这是关于ktransformers的问题。" if zh else "This is a question about ktransformers."
    return qa(skill, f"{name} {question}", question, answer, thought)


def english(rng: random.Random) -> Task:
    return _fact(rng, "facts_en", EN, _EN_WRAP, False)


def chinese(rng: random.Random) -> Task:
    return _fact(rng, "facts_zh", ZH, _ZH_WRAP, True)
