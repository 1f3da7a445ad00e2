"""The shapes of a load of agents as plain data, and the prompts that follow from them. Sends nothing, knows no server.

A wave is what is sent before everything is waited for: one group of agents, or two that are on their way at the same
time. All prompts with a shared part begin with tokens of one sequence, so that a server's prefix cache finds in a wave
what an earlier one has left there:

    prompt = first `shared` tokens of the sequence | `own` tokens of the agent | `growth` tokens for each later turn
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ktransformers.errors import ConfigError

__all__ = [
    "WARM_UP",
    "WAVES",
    "AgentGroup",
    "Prompt",
    "Prompts",
    "Wave",
    "choose_waves",
    "parse_shape",
    "scaled",
    "slot_len",
]

Prompt = list[int] | str
"""Token ids, or text."""

_SLOT_ROUNDING = 256
"""llama.cpp rounds the context of a slot up to a multiple of this."""
_SLOT_SPARE = 8
"""Tokens of a slot that servers may add to a prompt: a BOS token, and what they reserve for the next step."""
_FIRST_ID = 256
"""Smallest token id of a prompt: most vocabularies begin with control tokens and single bytes."""
_MAX_AGENTS, _MAX_TURNS, _MAX_LEN = 4096, 1000, 1 << 24
_WORDS = (
    *("river", "stone", "light", "paper", "window", "garden", "music", "winter", "letter", "market", "silver"),
    *("forest", "bridge", "summer", "island", "number", "table", "water", "house", "morning", "story", "color"),
    *("money", "voice", "north", "south", "doctor", "animal", "family", "bread", "glass", "street"),
)


@dataclass(frozen=True, slots=True)
class AgentGroup:
    """Requests of `agents` agents that are sent together, once a turn, each turn after all answers of the one before.

    Lengths are in tokens: `shared`, `own` and `growth` of the prompt (see above), `answer` of each answer. A group that
    is not the first of its wave is sent when the first one has received `after_tokens` tokens, then `after_seconds`
    later, or at once when the first one is over.
    """

    name: str
    agents: int
    shared: int = 0
    own: int = 0
    answer: int = 64
    turns: int = 1
    growth: int = 0
    after_tokens: int = 0
    after_seconds: float = 0.0

    def prompt_len(self, turn: int) -> int:
        """Return the tokens of a prompt of turn 1, 2, ..."""
        return self.shared + self.own + (turn - 1) * self.growth


@dataclass(frozen=True, slots=True)
class Wave:
    """A wave of groups that are on their way at the same time, called `name` in `--waves` and in the figures."""

    name: str
    groups: tuple[AgentGroup, ...]

    @property
    def at_once(self) -> int:
        """The most requests of the wave that are on their way at a time."""
        return sum(group.agents for group in self.groups)

    @property
    def longest(self) -> int:
        """The tokens of the wave's longest prompt with its answer."""
        return max(group.prompt_len(group.turns) + group.answer for group in self.groups)


def _one_group(name: str, agents: int, **more: int) -> Wave:
    return Wave(name, (AgentGroup("", agents, **more),))


WARM_UP = _one_group("warm_up", 1, own=300, answer=16)
"""Sent first, whatever is chosen: the first request of a server may compile kernels."""

WAVES = (
    WARM_UP,
    _one_group("cold", 1, shared=6000, own=2192),
    _one_group("cached", 1, shared=6000, own=2192),
    _one_group("shared", 8, shared=6000, own=2192, turns=2, growth=264),
    _one_group("own", 8, own=8192),
    Wave(
        "beside",
        (AgentGroup("stream", 1, own=64, answer=300), AgentGroup("prompt", 1, own=8192, answer=8, after_tokens=32)),
    ),
    Wave(
        "behind",
        (AgentGroup("prompts", 6, own=8192, answer=32), AgentGroup("chat", 1, own=9, answer=16, after_seconds=1.0)),
    ),
    _one_group("many", 32, shared=6000, own=1000, answer=32),
)
"""The load without options, in the order in which it is sent."""


def choose_waves(names: Sequence[str] | None, shapes: Sequence[str], scale: float) -> list[Wave]:
    """Return the waves called `names`, then those of `shapes` (see parse_shape); lengths of prompts times `scale`.

    names None: all of WAVES, or only the shapes where there are any. WARM_UP always comes first, whether it is named or
    not. Raises ConfigError for unknown names and wrong shapes.
    """
    own = [parse_shape(text, number) for number, text in enumerate(shapes, 1)]
    known = {wave.name: wave for wave in WAVES}
    taken = [wave.name for wave in own]
    twice = next((name for name in taken if name in known or taken.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"--shape: there is a wave {twice!r} already; choose another name=")
    if names is None:
        names = () if own else tuple(known)
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise ConfigError(f"--waves {unknown} is not one of {', '.join(known)}")
    named = [wave for wave in WAVES if wave.name in names and wave is not WARM_UP]
    return [scaled(wave, scale) for wave in (WARM_UP, *named, *own)]


def parse_shape(text: str, number: int = 1) -> Wave:
    """Return the wave that `agents=16,shared=4000,own=500,answer=64,turns=3` describes: one group, fields as in Group.

    name=NAME calls it so; otherwise it is called shape and its `number`. A shape of several turns without growth=N adds
    own prompt's length each turn, or 256 tokens where there is no own part. Raises ConfigError for anything else.
    """
    most = {"agents": _MAX_AGENTS, "turns": _MAX_TURNS} | dict.fromkeys(("shared", "own", "answer", "growth"), _MAX_LEN)
    name, given = f"shape{number}", dict[str, int]()
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if key == "name" and value.replace("_", "").isalnum():
            name = value
            continue
        if not equals or key not in most:
            raise ConfigError(f"--shape {text}: {part!r} is none of name=, {'=, '.join(most)}=")
        least = 0 if key in ("shared", "own", "growth") else 1
        if not (value.isdecimal() and least <= int(value) <= most[key]):
            raise ConfigError(f"--shape {text}: {key} must be a number from {least} to {most[key]}, got {value!r}")
        if key in given:
            raise ConfigError(f"--shape {text}: {key} is given twice")
        given[key] = int(value)
    if given.get("turns", 1) > 1:
        given.setdefault("growth", given.get("own") or _SLOT_ROUNDING)
    group = AgentGroup("", **{"agents": 1} | given)
    if not group.prompt_len(1):
        raise ConfigError(f"--shape {text}: its prompts are empty; give shared= or own= tokens")
    return Wave(name, (group,))


def scaled(wave: Wave, scale: float) -> Wave:
    """Return the wave with the lengths of its prompts times `scale`, rounded, at least 1 where they are not 0."""

    def times(length: int) -> int:
        return max(round(length * scale), 1) if length else 0

    groups = (
        replace(group, shared=times(group.shared), own=times(group.own), growth=times(group.growth))
        for group in wave.groups
    )
    return Wave(wave.name, tuple(groups))


def slot_len(waves: Sequence[Wave]) -> int:
    """Return how many tokens of context one request needs at most, rounded up as llama.cpp does."""
    longest = max(wave.longest for wave in waves) + _SLOT_SPARE
    return -(-longest // _SLOT_ROUNDING) * _SLOT_ROUNDING


class Prompts:
    """The prompts of waves, the same for the same `seed`, whichever waves are chosen.

    Token ids are below `vocab`, and from 512 on at least 256. is_text: words of a fixed list in place of ids, as many
    as there would be tokens.
    """

    def __init__(self, seed: int, vocab: int, is_text: bool = False) -> None:
        self._seed, self._is_text = seed, is_text
        self._range = range(len(_WORDS)) if is_text else range(min(_FIRST_ID, vocab // 2), vocab)

    def of(self, wave: Wave, group: AgentGroup, turn: int) -> list[Prompt]:
        """Return a prompt for each agent of the group, for turn 1, 2, ..."""
        shared = self._drawn("shared", group.shared)
        own_len = group.prompt_len(turn) - group.shared
        owns = (self._drawn(f"{wave.name} {group.name} {agent}", own_len) for agent in range(group.agents))
        return [self._shown(shared + own) for own in owns]

    def _drawn(self, what: str, length: int) -> list[int]:
        """`length` numbers of the sequence called `what`; a longer one begins with the same numbers."""
        rng = random.Random(f"{self._seed} {what}")
        return [rng.choice(self._range) for _ in range(length)]

    def _shown(self, numbers: list[int]) -> Prompt:
        return " ".join(_WORDS[number] for number in numbers) if self._is_text else numbers
