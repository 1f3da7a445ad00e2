"""The settings that /set changes in a running chat: sampling parameters and thinking. Knows no terminal."""

from __future__ import annotations

import difflib
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ktransformers.cli.parsing.options import IDLE_WHEN_GREEDY
from ktransformers.core import SamplingParams
from ktransformers.errors import ConfigError
from ktransformers.tokenizer.tokenizer import Tokenizer

__all__ = ["PARAMETERS", "Settings"]


def _strings(text: str) -> tuple[str, ...]:
    return tuple(word.replace("\\n", "\n").replace("\\t", "\t") for word in shlex.split(text))


PARAMETERS: Mapping[str, Callable[[str], Any]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "seed": int,
    "max_tokens": int,
    "stop": _strings,
}
"""The fields of SamplingParams that /set parameter knows, and how their values are read."""

_WANTED: Mapping[Callable[[str], Any], str] = {int: "a whole number", float: "a number"}
_OFF: Mapping[str, Any] = {"seed": None, "max_tokens": None, "stop": ()}
_SAME = {"num_predict": "max_tokens", "max_new_tokens": "max_tokens"}
_ELSEWHERE = {  # what other programs call it: where it is here
    "num_ctx": "start with --cache_lens TOKENS",
    "num_thread": "start with --cpu_infer THREADS",
    "num_gpu": "start with --gpu_memory GIB, or --no_use_cuda",
    "num_batch": "start with --chunk_size TOKENS",
    "repeat_penalty": "/set parameter repetition_penalty, which looks at the whole text",
}
_THINKING_VARIABLES = ("enable_thinking", "thinking")  # of chat templates


class Settings:
    """The settings of a chat. params: for sampling the next answer. force_think: answers begin with the thinking tag.

    always_stop: strings that end an answer whatever the parameters say.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, force_think: bool, always_stop: tuple[str, ...] = ()
    ):
        self._tokenizer, self._chosen, self._defaults, self._always_stop = tokenizer, params, params, always_stop
        self.force_think = force_think
        self.template_kwargs: dict[str, Any] = {}  # for the chat template

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of the next answer."""
        return replace(self._chosen, stop=(*self._chosen.stop, *self._always_stop))

    def set_parameter(self, name: str, value: str) -> str:
        """Change one sampling parameter; return a line with its new value. Raises ConfigError and changes nothing."""
        name = _SAME.get(name, name)
        if name not in PARAMETERS:
            raise ConfigError(_unknown_parameter(name))
        if not value:
            raise ConfigError(f"usage: /set parameter {name} VALUE; {name} is {self._spelled(name)}")
        self._chosen = replace(self._chosen, **{name: self._read(name, value)})
        said = f"{name} is {self._spelled(name)}"
        if self._chosen.is_greedy and name in IDLE_WHEN_GREEDY:
            said += ", which has no effect at temperature 0"
        return said

    def _read(self, name: str, value: str) -> Any:
        if value == "default":
            return getattr(self._defaults, name)
        if name in _OFF and value in ("off", "none"):
            return _OFF[name]
        kind = PARAMETERS[name]
        try:
            number = kind(value)
        except ValueError as error:
            words = " or off" if name in _OFF else ""
            raise ConfigError(f"{name} takes {_WANTED.get(kind, 'strings in quotes')}{words}, got {value!r}") from error
        if kind is float and not math.isfinite(number):
            raise ConfigError(f"{name} takes a finite number, got {value!r}")
        return number

    def _spelled(self, name: str) -> str:
        value = getattr(self._chosen, name)
        if name == "stop":
            return " ".join(f'"{text}"'.replace("\n", "\\n") for text in value) or "off"
        return "off" if value is None else str(value)

    def describe_parameters(self) -> str:
        """Return a line per sampling parameter; one that was changed shows its former value too."""
        lines = []
        for name in PARAMETERS:
            line = f"{name:<20}{self._spelled(name)}"
            if getattr(self._chosen, name) != getattr(self._defaults, name):
                line += "  (changed)"
            lines.append(line)
        return "\n".join(lines)

    def set_thinking(self, is_on: bool) -> None:
        """Let the model think before it answers, or not. Raises ConfigError when its template has no switch."""
        variable = next((name for name in _THINKING_VARIABLES if self._tokenizer.template_knows(name)), None)
        if variable is not None:
            self.template_kwargs = {variable: is_on}
        elif self._tokenizer.reasoning_tags is None:
            raise ConfigError("this model's chat template has no switch for thinking")
        elif not is_on and not self.force_think:
            raise ConfigError("this model's chat template has no switch that keeps it from thinking")
        self.force_think = is_on and (self.force_think or variable is None)

    def describe_thinking(self) -> str:
        """Return whether the model thinks before it answers: "on", "off" or "as the template says"."""
        if self.force_think or any(self.template_kwargs.values()):
            return "on"
        return "off" if self.template_kwargs else "as the template says"


def _unknown_parameter(name: str) -> str:
    if name in _ELSEWHERE:
        return f"{name} is not a parameter here: {_ELSEWHERE[name]}"
    near = difflib.get_close_matches(name, PARAMETERS, n=1)
    return f"unknown parameter {name}; " + (
        f"did you mean {near[0]}?" if near else f"there are {', '.join(PARAMETERS)}"
    )
