"""What every generator shares: the task record, the train / held-out split and the wording helpers.

It knows nothing of any skill, of the tokenizer or of the model.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, replace

HELDOUT_ONE_IN = 16
ZH_SHARE = 0.25


@dataclass(frozen=True)
class Task:
    """One exchange whose last message is the assistant answer that counts.

    `key` is the canonical instance (operands, not wording): it alone decides whether the task is held out.
    `messages` are chat messages (role, content, tool_calls) without a system turn; `tools` are OpenAI-style
    schemas; `thought` is what the assistant thinks before the last answer when thinking is switched on.
    """

    skill: str
    key: str
    messages: tuple[dict, ...]
    tools: tuple[dict, ...] = ()
    thought: str = ""

    @property
    def answer(self) -> dict:
        """The assistant message that is scored."""
        return self.messages[-1]

    def named(self, skill: str) -> Task:
        """The same task under another skill name (a skill may pool several generators)."""
        return replace(self, skill=skill)


def is_heldout(skill: str, key: str) -> bool:
    """True for the one instance in `HELDOUT_ONE_IN` that is never trained on."""
    digest = hashlib.blake2b(f"{skill}\0{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELDOUT_ONE_IN == 0


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict:
    return {"role": "assistant", "content": content}


def qa(skill: str, key: str, question: str, answer: str, thought: str) -> Task:
    """A task of one question and one answer."""
    return Task(skill, key, (user(question), assistant(answer)), (), thought)


def pick_zh(rng: random.Random) -> bool:
    return rng.random() < ZH_SHARE


_EN_OPENERS = (
    "Please tell me: ",
    "Hi! ",
    "Hello, ",
    "Can you help me? ",
    "Quick question: ",
    "OK, ",
    "Now: ",
    "Next: ",
    "And ",
)
_ZH_OPENERS = ("请问，", "你好，", "请告诉我，", "麻烦你，", "帮我看看：", "好的，", "现在，")


def vary(rng: random.Random, template: str, zh: bool = False) -> str:
    """Everyday variation of a question template: an opener, a missing full stop or capital, another mark.

    Only the template is touched, never the operands filled in afterwards.
    """
    text = template
    if text[-1] in "?.？。" and rng.random() < 0.25:
        text = text[:-1]
    roll = rng.random()
    if zh:
        if roll < 0.2:
            text = rng.choice(_ZH_OPENERS) + text
        elif roll < 0.25 and text[-1] == "？":
            text = text[:-1] + "?"
        return text
    first_word = text.split(" ", 1)[0]
    can_lower = first_word.isalpha() and first_word not in ("I", "JSON")
    if roll < 0.2 and can_lower:
        text = text[0].lower() + text[1:]
    elif roll < 0.35:
        text = rng.choice(_EN_OPENERS) + (text[0].lower() + text[1:] if can_lower and rng.random() < 0.5 else text)
    return text


def ask(rng: random.Random, templates: tuple[str, ...], zh: bool = False, **slots: object) -> str:
    """A varied wording with the operands filled in."""
    return vary(rng, rng.choice(templates), zh).format(**slots)


def plural(count: int, singular: str, many: str | None = None) -> str:
    return singular if count == 1 else (many or singular + "s")


def number_of_digits(rng: random.Random, most: int) -> int:
    """A non-negative number whose *length* is uniform in 1..most, so that short operands are not rare."""
    digits = rng.randint(1, most)
    return rng.randint(0 if digits == 1 else 10 ** (digits - 1), 10**digits - 1)
