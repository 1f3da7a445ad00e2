"""Deterministic text for the demo model: skills, the train / held-out split, and whole conversations.

Every function takes a `random.Random`; the same seed gives the same text on every machine. Nothing here knows the
tokenizer, the chat template or the model.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from . import arithmetic, chat, facts, lists, quantities, retrieval, spelling, structured, tools
from .base import Task, is_heldout

__all__ = ["SKILLS", "Task", "conversation", "is_heldout", "sample"]

# skill -> (generator, share of the training tasks)
SKILLS: dict[str, tuple[Callable[[random.Random], Task], float]] = {
    "arithmetic": (arithmetic.generate, 6.0),
    "sorting": (lists.sorting, 3.0),
    "reversing": (lists.reversing, 2.0),
    "counting": (lists.counting, 3.0),
    "copying": (lists.copying, 1.5),
    "retrieval": (retrieval.generate, 2.5),
    "spelling": (spelling.generate, 2.0),
    "units": (quantities.units, 2.5),
    "dates": (quantities.dates, 3.0),
    "json": (structured.generate, 2.0),
    "tool_calls": (tools.calls, 2.5),
    "tool_results": (tools.results, 1.0),
    "facts_en": (facts.english, 1.5),
    "facts_zh": (facts.chinese, 1.0),
    "chat": (chat.generate, 1.5),
}

SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are the demo model of ktransformers.", "Answer briefly.",
    "You are a concise and friendly assistant.", "Be helpful.", "你是一个有用的助手。", "请简短回答。",
    "You are a pirate.", "You are a helpful AI assistant. Answer the questions of the user.", "Be precise and polite.", "You are an expert.",
    "Today is a good day.", "Think carefully.", "You are a chatbot on a website. Help the visitors.",
)  # fmt: skip
_WITH_TOOLS = ("tool_calls", "tool_results")
# Small talk is kept out of conversations with tools: "what is the weather" is refused without a tool and called with one.
_BESIDE_TOOLS = (
    "arithmetic",
    "sorting",
    "reversing",
    "counting",
    "copying",
    "spelling",
    "units",
    "facts_en",
    "facts_zh",
)
THINK_SHARE = 0.08


def sample(skill: str, rng: random.Random, heldout: bool) -> Task:
    """One task of `skill` from the wanted side of the split (rejection sampling on the task's key)."""
    generate = SKILLS[skill][0]
    while True:
        task = generate(rng)
        if is_heldout(skill, task.key) == heldout:
            return task


def _pick(rng: random.Random, skills: tuple[str, ...]) -> str:
    return rng.choices(skills, [SKILLS[s][1] for s in skills])[0]


def _system(rng: random.Random) -> list[dict]:
    return [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] if rng.random() < 0.4 else []


def conversation(rng: random.Random) -> tuple[list[dict], list[dict]]:
    """A training conversation `(messages, tools)`: one to five tasks, at most one toolbox, sometimes thinking.

    A message with `reasoning_content` is an assistant turn that thinks before it answers.
    """
    first = _pick(rng, tuple(SKILLS))
    tasks = [sample(first, rng, heldout=False)]
    long = first == "retrieval" and len(tasks[0].messages[0]["content"]) > 2000
    others = _BESIDE_TOOLS if first in _WITH_TOOLS else tuple(s for s in SKILLS if s not in (*_WITH_TOOLS, "retrieval"))
    more = 0 if long else rng.choice((0, 0, 0, 1, 1, 2, 3, 4))
    tasks += [sample(_pick(rng, others), rng, heldout=False) for _ in range(more)]
    rng.shuffle(tasks)
    think = rng.random() < THINK_SHARE
    messages = _system(rng)
    for task in tasks:
        messages += task.messages[:-1]
        answer = dict(task.answer)
        if think and task.thought:
            answer["reasoning_content"] = task.thought
        messages.append(answer)
    toolbox = [t for task in tasks for t in task.tools]
    return messages, toolbox


def evaluation(skill: str, count: int, seed: int) -> list[tuple[list[dict], list[dict]]]:
    """`count` held-out conversations of one skill, the last message being the expected answer.

    Half of them carry a system prompt or an earlier, unrelated exchange, as real chats do.
    """
    rng = random.Random(f"{skill}/{seed}")
    found: dict[str, tuple[list[dict], list[dict]]] = {}
    while len(found) < count:
        task = sample(skill, rng, heldout=True)
        messages = _system(rng)
        is_long = len(task.messages[0]["content"]) > 2000
        if rng.random() < 0.3 and not is_long:
            before = sample(_pick(rng, _BESIDE_TOOLS), rng, heldout=False)
            messages += before.messages
        prompt = "\n".join(str(m.get("content")) for m in task.messages[:-1])
        found.setdefault(prompt, ([*messages, *task.messages], list(task.tools)))
    return list(found.values())
