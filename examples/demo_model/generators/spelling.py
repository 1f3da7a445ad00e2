"""Letters of words: spelling, backwards spelling, counting letters. Answers spell letter by letter."""

from __future__ import annotations

import random

from .base import Task, ask, plural, qa
from .words import ADJECTIVES, COMMON, NAMES, NOUNS, OBJECTS, VERBS, pseudo_word

_WORDS = [*NOUNS, *ADJECTIVES, *COMMON, *VERBS, *OBJECTS, *(n.lower() for n in NAMES)]
_SPELL = ("Spell {w}.", "Spell the word {w}.", "How do you spell {w}?", 'Spell "{w}".', "Please spell {w}.")
_BACK = (
    "Reverse the word {w}.",
    "Spell {w} backwards.",
    'Write "{w}" backwards.',
    "What is {w} backwards?",
    "Reverse the letters of {w}.",
)
_LENGTH = ("How many letters are in {w}?", "How many letters does {w} have?", "How many letters are in the word {w}?", 'How long is the word "{w}"?',
           "Count the letters of {w}.")  # fmt: skip
_ONE = ("How many {c}'s are in {w}?", 'How many times does the letter {c} appear in "{w}"?', "How many {c} are in {w}?", "Count the letter {c} in {w}.",
        "How often does {c} occur in the word {w}?")  # fmt: skip


def generate(rng: random.Random) -> Task:
    """`How many letters are in banana?` -> `b-a-n-a-n-a: 6 letters.`"""
    word = pseudo_word(rng) if rng.random() < 0.4 else rng.choice(_WORDS)
    spelled = "-".join(word)
    kind = rng.choice(("spell", "back", "length", "one"))
    if kind == "spell":
        return qa("spelling", f"spell {word}", ask(rng, _SPELL, w=word), spelled, "I spell the word.")
    if kind == "back":
        return qa(
            "spelling",
            f"back {word}",
            ask(rng, _BACK, w=word),
            f"{spelled} backwards is {spelled[::-1]}.",
            "I spell the word backwards.",
        )
    if kind == "length":
        answer = f"{spelled}: {len(word)} {plural(len(word), 'letter')}."
        return qa("spelling", f"length {word}", ask(rng, _LENGTH, w=word), answer, "I count the letters.")
    letter = rng.choice(word) if rng.random() < 0.8 else rng.choice("abcdefghijklmnopqrstuvwxyz")
    hits = word.count(letter)
    answer = f"{spelled}: {letter} appears {hits} {plural(hits, 'time')}."
    return qa("spelling", f"{letter} in {word}", ask(rng, _ONE, w=word, c=letter), answer, "I count a letter.")
