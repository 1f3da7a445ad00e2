"""Recognizes the form of a model's answers by its chat template: how calls are written, what marks reasoning and text.

Found by rendering: a past call, past reasoning and a past answer made of words that occur nowhere else go through the
template, and what stands around these words are the marks. Tags in the template's source and tokens come second.

probe.py    renders                        segments.py   texts as tags and what is between them
turns.py    marks of reasoning and text    calls.py      the shape of calls
answers.py  everything together, with what was asked for by hand
"""

from ktransformers.tokenizer.recognition.answers import (
    NO_REASONING,
    REASONING_FORMATS,
    AnswerFormat,
    Source,
    check_reasoning_format,
    recognize,
)
from ktransformers.tokenizer.recognition.calls import LEARNED
from ktransformers.tokenizer.recognition.probe import Probe
from ktransformers.tokenizer.recognition.turns import TurnMarks, turn_frame

__all__ = [
    "LEARNED",
    "NO_REASONING",
    "REASONING_FORMATS",
    "AnswerFormat",
    "Probe",
    "Source",
    "TurnMarks",
    "check_reasoning_format",
    "recognize",
    "turn_frame",
]
