"""The views that show a chat: what a view is, and the one for pipes. Does not know models or commands.

terminal_view.py has those for terminals.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TextIO

from typing_extensions import override

from ktransformers.cli.chat.terminal_text import Sanitizer
from ktransformers.core import GenerationStats

__all__ = ["PlainView", "View", "drafts_of", "format_stats", "short_stats"]


def format_stats(stats: GenerationStats) -> str:
    """Return counts and rates of one answer in one line."""
    computed = stats.prompt_len - stats.cached_len
    reused = f" ({stats.cached_len} of them reused)" if stats.cached_len else ""
    return (
        f"prompt eval: {stats.prompt_len} tokens{reused}, {computed} in {stats.prefill_seconds:.2f} s, "
        f"{stats.prefill_rate:.1f} tokens/s · eval: {stats.completion_len} tokens in {stats.decode_seconds:.2f} s, "
        f"{stats.decode_rate:.1f} tokens/s" + (f" · {drafts_of(stats)}" if stats.num_drafted else "")
    )


def drafts_of(stats: GenerationStats) -> str:
    """Return what became of an answer's draft tokens, in words."""
    return f"{stats.num_accepted:,} of {stats.num_drafted:,} draft tokens accepted"


def short_stats(stats: GenerationStats, width: int) -> str:
    """Return counts and rates of one answer, as much of them as `width` columns hold."""
    if not stats.completion_len:  # it was stopped before the prompt was read
        return f"0 tokens · {stats.prefill_seconds:.1f} s"[:width]
    answer = [f"{stats.completion_len:,} tokens" if stats.completion_len != 1 else "1 token"]
    if stats.decode_rate:
        answer.append(f"{_rate(stats.decode_rate)} tokens/s")
    read = f"{stats.prompt_len - stats.cached_len:,}"
    seconds = f"{stats.prefill_seconds:.1f} s"
    whole = f"{', '.join(answer)} · read {read} in {seconds} ({_rate(stats.prefill_rate)}/s)"
    tries = [
        *([f"{whole} · {drafts_of(stats)}"] if stats.num_drafted else []),
        whole,
        f"{', '.join(answer)} · read {read} in {seconds}",
        ", ".join(answer),
        answer[-1],
    ]
    return next((line for line in tries if len(line) <= width), answer[-1][:width])


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


class View(ABC):
    """The place where answers and messages of a chat go. An answer is any number of reasoning and content, then end."""

    def answering(self) -> AbstractContextManager[None]:
        """Return a context to enter before an answer is worked on, and to leave when everything about it was shown."""
        return nullcontext()

    @abstractmethod
    def reading(self, done: int, total: int) -> None:
        """Show that `done` of the `total` tokens that have to be computed of a prompt are computed."""

    @abstractmethod
    def reasoning(self, text: str) -> None:
        """Show a piece of the answer's reasoning."""

    @abstractmethod
    def content(self, text: str) -> None:
        """Show a piece of the answer itself."""

    @abstractmethod
    def end(self) -> None:
        """Show that the answer is complete, or was stopped."""

    @abstractmethod
    def stats(self, stats: GenerationStats) -> None:
        """Show counts and rates of the answer that ended."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Show a message about the chat: what a command did, why an answer ended."""

    @abstractmethod
    def error(self, text: str) -> None:
        """Show a message about something that went wrong."""


class PlainView(View):
    """A view that writes answers to `out`, one per turn, as they are, and everything else to `err`.

    Where one of them is a terminal after all, control characters become visible ones.
    """

    def __init__(self, out: TextIO, err: TextIO):
        self._out, self._err = out, err
        self._sanitizers = {stream: Sanitizer() for stream in (out, err) if stream.isatty()}
        self._is_line_open = True  # an empty answer is an empty line, so that answers can be counted
        self._is_reasoning = False

    @override
    def reading(self, done: int, total: int) -> None:
        pass  # a pipe has no line that could be erased

    @override
    def reasoning(self, text: str) -> None:
        self._is_reasoning = True
        self._write(self._err, text)

    @override
    def content(self, text: str) -> None:
        if text:
            self._is_line_open = not text.endswith("\n")
            self._write(self._out, text)

    @override
    def end(self) -> None:
        for stream, sanitizer in self._sanitizers.items():
            stream.write(sanitizer.flush())
        if self._is_reasoning:
            self._write(self._err, "\n")
        if self._is_line_open:
            self._write(self._out, "\n")
        self._is_line_open, self._is_reasoning = True, False

    @override
    def stats(self, stats: GenerationStats) -> None:
        self.note(format_stats(stats))

    @override
    def note(self, text: str) -> None:
        self._write(self._err, text + "\n")

    @override
    def error(self, text: str) -> None:
        self._write(self._err, f"error: {text}\n")

    def _write(self, stream: TextIO, text: str) -> None:
        if stream in self._sanitizers:
            text = self._sanitizers[stream].feed(text)
        stream.write(text)
        stream.flush()
