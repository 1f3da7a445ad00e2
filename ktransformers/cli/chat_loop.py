"""The chat itself: reads turns, runs commands, streams answers. Knows the offline API, not how things look.

A turn is taken back when it cannot be answered, so that nothing of the conversation before it is lost.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType

from ktransformers.cli.chat_commands import find_command
from ktransformers.cli.chat_history import Conversation
from ktransformers.cli.chat_input import ReadLine, Turn, read_prompt_file, read_turn, typed_path
from ktransformers.cli.chat_output import View, format_stats
from ktransformers.core import FinishReason, GenerationStats, SamplingParams, TokenEvent
from ktransformers.engine.llm import LLM
from ktransformers.errors import ConfigError, ContextLengthError, KTransformersError
from ktransformers.tokenizer.reasoning import ReasoningParser

__all__ = ["ChatLoop", "ChatOptions"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """is_interactive: a person at a terminal, who can correct mistakes; otherwise a script, which sees exit codes."""

    params: SamplingParams
    system: str | None = None
    force_think: bool = False
    is_interactive: bool = False


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets a flag instead of raising in the middle of a step. Yields the flag's reader."""
    interrupts: list[int] = []

    def note_interrupt(signum: int, frame: FrameType | None) -> None:
        interrupts.append(signum)

    before = signal.signal(signal.SIGINT, note_interrupt)
    try:
        yield lambda: bool(interrupts)
    finally:
        signal.signal(signal.SIGINT, before)


class ChatLoop:
    """One chat with one model. Raises ConfigError when the model cannot chat as the options ask."""

    def __init__(self, llm: LLM, view: View, read_line: ReadLine, options: ChatOptions):
        self._llm, self.view, self._read_line, self._options = llm, view, read_line, options
        self.conversation = Conversation(options.system)
        self.is_finished = False
        self._num_errors = 0
        self._answers: list[GenerationStats] = []
        self._params = options.params
        self._tags = llm.tokenizer.reasoning_tags
        if not llm.tokenizer.has_vocabulary:
            raise ConfigError(
                "this model's files hold no vocabulary, so it cannot chat; pass --model_path with its tokenizer"
            )
        if options.force_think and self._tags is None:
            raise ConfigError("--force_think: this model's tokenizer knows no reasoning tags such as <think>")
        if not llm.tokenizer.has_chat_template:
            _log.warning("this model has no chat template; turns are sent as plain lines of 'role: content'")
            self._params = replace(options.params, stop=(*options.params.stop, "\nuser:"))

    def run(self, first_turns: Iterable[Turn] = ()) -> int:
        """Chat until the input ends. Returns the exit code, 1 when a script's turn failed.

        Raises KeyboardInterrupt when a script is interrupted.
        """
        for first in first_turns:
            self.handle(first)
        was_interrupted = False
        while not self.is_finished:
            try:
                turn = read_turn(self._read_line)
            except KeyboardInterrupt:
                if not self._options.is_interactive:
                    raise
                if was_interrupted:
                    break
                was_interrupted = True
                self.view.note("press Ctrl-C again, or Ctrl-D, to leave")
                continue
            if turn is None:
                break
            was_interrupted = False
            self.handle(turn)
        return 1 if self._num_errors and not self._options.is_interactive else 0

    def handle(self, turn: Turn) -> None:
        """Run a command, or answer a prompt. Errors are shown and counted."""
        text = turn.text.encode("utf-8", "replace").decode()  # terminals can deliver lone surrogates
        try:
            if not text.strip():
                return
            path = None if turn.is_literal else typed_path(text)
            command = None if turn.is_literal or path is not None else find_command(text)
            if command is not None:
                command[0].run(self, command[1])
                return
            if path is not None:
                text = read_prompt_file(path)
                self.view.note(f"the prompt is the text of {path}, {len(text)} characters")
            self.answer(text)
        except ContextLengthError as error:
            self._show_error(f"{error}. The conversation is kept: /clear starts over, /save FILE keeps it first")
        except KTransformersError as error:
            self._show_error(str(error))

    def _show_error(self, text: str) -> None:
        self._num_errors += 1
        self.view.error(text)

    def answer(self, text: str) -> None:
        """Add a user turn and stream the answer to it. Raises KTransformersError after taking the turn back."""
        with _interruptible() as is_interrupted, self.view.answering():
            is_aborted = self._answer(text, is_interrupted)
        if is_aborted and not self._options.is_interactive:
            raise KeyboardInterrupt

    def _answer(self, text: str, is_interrupted: Callable[[], bool]) -> bool:
        """Whether the answer was aborted."""
        self.conversation.add_user(text)
        try:
            prompt_ids = self._prompt_ids()
            last, content, reasoning = self._stream(prompt_ids, is_interrupted)
        except KTransformersError:
            self.conversation.drop_last()
            raise
        is_aborted = last.finish_reason is FinishReason.ABORT
        if is_aborted and not content:
            self.conversation.drop_last()
        else:
            self.conversation.add_assistant(content, reasoning)
        self._answers.append(last.stats)
        self._explain_end(last)
        self.view.stats(last.stats)
        return is_aborted

    def _prompt_ids(self) -> list[int]:
        tokenizer, messages = self._llm.tokenizer, self.conversation.messages
        if not tokenizer.has_chat_template:
            return tokenizer.apply_plain_template(messages)
        prompt_ids = tokenizer.apply_chat_template(messages)
        if self._options.force_think and self._tags and not tokenizer.opens_reasoning(prompt_ids):
            prompt_ids += tokenizer.encode(self._tags[0] + "\n", add_special_tokens=False)
        return prompt_ids

    def _stream(self, prompt_ids: list[int], is_interrupted: Callable[[], bool]) -> tuple[TokenEvent, str, str]:
        """Show the answer as it comes; its last event, its content and its reasoning."""
        events = self._llm.stream(prompt_ids, self._params, is_interrupted, self.view.reading)
        parser = ReasoningParser(self._tags, self._llm.tokenizer.opens_reasoning(prompt_ids))
        content, reasoning, last = [], [], None
        try:
            for last in events:
                part = parser.feed(last.text)
                if last.finish_reason is not None:
                    rest = parser.flush()
                    part = replace(part, reasoning=part.reasoning + rest.reasoning, content=part.content + rest.content)
                if part.reasoning:
                    reasoning.append(part.reasoning)
                    self.view.reasoning(part.reasoning)
                if part.content:
                    content.append(part.content)
                    self.view.content(part.content)
        finally:
            self.view.end()
        assert last is not None
        return last, "".join(content), "".join(reasoning)

    def _explain_end(self, last: TokenEvent) -> None:
        if last.finish_reason is FinishReason.ABORT:
            self.view.note("stopped")
        elif last.finish_reason is FinishReason.LENGTH:
            stats, max_len = last.stats, self._llm.session.max_len
            if stats.prompt_len + stats.completion_len >= max_len:
                self.view.note(
                    f"the answer was cut: the cache of {max_len} tokens is full. "
                    "/clear starts over, /save FILE keeps the conversation first; --cache_lens makes the cache larger"
                )
            else:
                self.view.note(f"the answer was cut after {stats.completion_len} tokens; --max_new_tokens allows more")

    def describe_stats(self) -> str:
        """The whole chat in a line per fact."""
        answers = self._answers
        total = GenerationStats(
            prompt_len=sum(stats.prompt_len for stats in answers),
            cached_len=sum(stats.cached_len for stats in answers),
            completion_len=sum(stats.completion_len for stats in answers),
            prefill_seconds=sum(stats.prefill_seconds for stats in answers),
            decode_seconds=sum(stats.decode_seconds for stats in answers),
        )
        steps = total.completion_len - sum(1 for stats in answers if stats.completion_len)
        rate = steps / total.decode_seconds if total.decode_seconds > 0 else 0.0
        session = self._llm.session
        latest = f"\nlatest answer: {format_stats(answers[-1])}" if answers else ""
        return (
            f"{len(answers)} answers, {len(self.conversation.messages)} messages\n"
            f"prompt: {total.prompt_len} tokens, {total.cached_len} of them reused, "
            f"{total.prefill_seconds:.2f} s, {total.prefill_rate:.1f} tokens/s\n"
            f"answers: {total.completion_len} tokens, {total.decode_seconds:.2f} s, {rate:.1f} tokens/s\n"
            f"cache: {len(session.cached_ids)} of {session.max_len} tokens{latest}"
        )
