"""The chat itself: reads turns, runs commands, streams answers. Knows the offline API, not how things look.

A turn is taken back when it cannot be answered, so that nothing of the conversation before it is lost.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from ktransformers.cli.chat.attachments import attach_files, names_files, read_picture_file, with_document
from ktransformers.cli.chat.history import ChatHistory, Content, text_of
from ktransformers.cli.chat.input import TurnSource, UserTurn, quoted, read_prompt_file, typed_path
from ktransformers.cli.chat.output import View, drafts_of, format_stats
from ktransformers.cli.chat.settings import Settings
from ktransformers.core import FinishReason, GenerationStats, SamplingParams, TokenEvent, format_bytes
from ktransformers.engine.api.llm import LLM
from ktransformers.engine.sampling.sampler import draw_seed
from ktransformers.engine.sequence.partial import PartialGeneration
from ktransformers.engine.sequence.picture_parts import SentPicture, picture_part, split_pictures
from ktransformers.engine.sequence.prompts import media_of
from ktransformers.engine.sequence.saved_session import SavedSession
from ktransformers.errors import CapacityError, ConfigError, ContextLengthError, KTransformersError
from ktransformers.tokenizer.shortening import prompt_room, shorten
from ktransformers.tokenizer.tools import ReasoningPiece, TextPiece

__all__ = ["ChatLoop", "ChatOptions"]

_log = logging.getLogger(__name__)

_LEAVING = ("exit", "quit")
_NEARLY_FULL = 0.8
_NOT_EDITED = "the question stays as it was"


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The ways in which a chat behaves.

    is_interactive: a person at a terminal can correct mistakes; a script sees exit codes.
    find_command: what a turn's text asks the chat to do, None for a prompt. Raises ConfigError for an unknown command.
    reads_special_tokens: those that a turn spells are tokens, not text. drops_oldest: a conversation that is longer
    than the context loses its oldest turns; else its next one is refused.
    """

    params: SamplingParams
    system: str | None = None
    force_think: bool = False
    is_interactive: bool = False
    find_command: Callable[[str], Callable[[ChatLoop], None] | None] = lambda text: None
    reads_special_tokens: bool = False
    drops_oldest: bool = True


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
    """A chat with one model: reads turns, runs commands and streams answers.

    Raises ConfigError when the model cannot chat as the options ask.
    """

    def __init__(self, llm: LLM, view: View, source: TurnSource, options: ChatOptions):
        self.llm, self.view, self.source, self._options = llm, view, source, options
        self._last: PartialGeneration | SavedSession | None = None  # what /save writes of the cache
        self.conversation = ChatHistory(options.system)
        self.is_finished = False
        self._num_errors = 0
        self._answers: list[GenerationStats] = []
        self._typed: tuple[Content, str] | None = None  # the last question as it was sent and as it was typed
        self._is_editing = False
        self._num_retries = 0
        self._num_dropped = 0  # of the oldest turns, at the last prompt
        self._is_warned = False  # that the context is nearly full
        self._tags = llm.tokenizer.reasoning_tags
        if not llm.tokenizer.has_vocabulary:
            raise ConfigError(
                "this model's files hold no vocabulary, so it cannot chat; pass --model_path with its tokenizer"
            )
        if options.force_think and self._tags is None:
            raise ConfigError("--force_think: this model's tokenizer knows no reasoning tags such as <think>")
        has_template = llm.tokenizer.has_chat_template
        if not has_template:
            _log.warning("this model has no chat template; turns are sent as plain lines of 'role: content'")
        self.settings = Settings(
            llm.tokenizer, options.params, options.force_think, () if has_template else ("\nuser:",)
        )

    @property
    def is_interactive(self) -> bool:
        """Whether a person sits at a terminal."""
        return self._options.is_interactive

    def run(self, first_turns: Iterable[UserTurn] = ()) -> int:
        """Chat until the input ends. Returns the exit code, 1 when a script's turn failed.

        Raises KeyboardInterrupt when a script is interrupted.
        """
        for first in first_turns:
            self.handle(first)
        while not self.is_finished:
            try:
                turn = self._next_turn()
                if turn is None:
                    break
                self.handle(turn)
            except KeyboardInterrupt:
                if not self.is_interactive:
                    raise
                self.view.note(self._what_ctrl_c_did())
        return 1 if self._num_errors and not self.is_interactive else 0

    def _next_turn(self) -> UserTurn | None:
        try:
            return self.source.read_turn()
        except CapacityError as error:  # only of documents, after which nothing comes
            self._show_error(str(error))
            return None

    def _what_ctrl_c_did(self) -> str:
        was_editing, self._is_editing = self._is_editing, False
        return _NOT_EDITED if was_editing else "Ctrl-D or /bye leaves"

    def handle(self, turn: UserTurn) -> None:
        """Run a command, or answer a prompt. Errors are shown and counted."""
        text = turn.text.encode("utf-8", "replace").decode()  # terminals can deliver lone surrogates
        is_edited, self._is_editing = self._is_editing, False
        try:
            content: Content = text
            path = None if turn.is_literal else typed_path(text)
            if not text.strip() or (not turn.is_literal and path is None and self._run_command(text)):
                if is_edited and not self._is_editing:
                    self.view.note(_NOT_EDITED)
                return
            typed = quoted(text) if turn.is_literal and "\n" not in text else text
            if path is not None:
                content = self._content_of(path)
            elif turn.has_attachments:
                attached = attach_files(text, self.view.note)
                content = self._with_pictures(with_document(attached.text, turn.document), attached.pictures)
            elif names_files(text):
                self.view.note(
                    "files named with @ are attached to -p PROMPT and to --lines, not to a text from elsewhere"
                )
            self.answer(content, replaces=is_edited)
            self._typed = (content, typed)
        except ContextLengthError as error:
            hint = ". The conversation is kept: /clear starts over, /save FILE keeps it first"
            self._show_error(f"{error}{hint if self.source.has_commands else ''}")
        except KTransformersError as error:
            self._show_error(str(error))

    def _content_of(self, path: Path) -> Content:
        """The prompt in a file: its text, or the picture that it is."""
        picture = read_picture_file(path)
        if picture is not None:
            return self._with_pictures("", [picture])
        text = read_prompt_file(path)
        self.view.note(f"the prompt is the text of {path}, {len(text)} characters")
        return text

    def _with_pictures(self, text: str, pictures: Sequence[bytes]) -> Content:
        """A prompt's text behind its pictures, which are read now, so that what is wrong with them shows at once."""
        if not pictures:
            return text
        if not self.llm.tokenizer.has_chat_template:
            raise ConfigError("this model has no chat template, and pictures need one")
        for read in self.llm.pictures.read([SentPicture(data) for data in pictures]):
            self.view.note(f"[picture {read.width} x {read.height}, {read.num_positions} tokens]")
        words: list[dict[str, object]] = [{"type": "text", "text": text}] if text else []
        return [*map(picture_part, pictures), *words]

    def _run_command(self, text: str) -> bool:
        """Run the command in `text`; False when it is a prompt. Raises ConfigError."""
        if self.is_interactive and text in _LEAVING:  # a line of a pipe can be such a word
            self.is_finished = True
            return True
        command = self._options.find_command(text)
        if command is not None:
            command(self)
        return command is not None

    def _show_error(self, text: str) -> None:
        self._num_errors += 1
        self.view.error(text)

    def _last_question(self) -> Content:
        question = self.conversation.last_question
        if question is None:
            raise ConfigError("there is no question yet")
        return question

    def regenerate(self) -> None:
        """Answer the last question again, with another seed. Raises ConfigError when there is none."""
        question, params = self._last_question(), self.settings.params
        if params.is_greedy:
            self.view.note("at temperature 0 answers do not vary; /set parameter temperature 0.7 changes that")
        elif params.seed is not None:
            self._num_retries += 1
            params = replace(params, seed=params.seed + self._num_retries)
        self.answer(question, replaces=True, params=params)

    def edit(self) -> None:
        """Put the last question into the next prompt, whose turn replaces it. Raises ConfigError."""
        question = self._last_question()
        text = text_of(question)
        if self._typed is not None and self._typed[0] == question:
            text = self._typed[1]
        elif text != question:
            raise ConfigError("the pictures of this question came with the conversation: ask again with @FILE for each")
        elif text.startswith(("/", '"""')):
            text = quoted(text)
        self.source.prefill(text)
        self._is_editing = True
        self.view.note("Enter replaces the question and its answer, Ctrl-C leaves them")

    def answer(self, content: Content, *, replaces: bool = False, params: SamplingParams | None = None) -> None:
        """Add a user turn and stream the answer to it. Raises KTransformersError after taking the turn back.

        replaces: in place of the last question and its answer. params: None for those of the settings.
        """
        with _interruptible() as is_interrupted, self.view.answering():
            is_aborted = self._answer(content, replaces, params or self.settings.params, is_interrupted)
        if is_aborted and not self.is_interactive:
            raise KeyboardInterrupt

    def _answer(
        self, question: Content, replaces: bool, params: SamplingParams, is_interrupted: Callable[[], bool]
    ) -> bool:
        """Whether the answer was aborted."""
        before = list(self.conversation.turns)
        if replaces:
            self.conversation.drop_question()
        self.conversation.add_user(question)
        try:
            prompt_ids = self._fitting_ids(params)
            last, content, reasoning = self._stream(prompt_ids, params, is_interrupted)
        except BaseException:
            self.conversation.turns[:] = before
            raise
        is_aborted = last.finish_reason is FinishReason.ABORT
        if is_aborted and not content:
            self.conversation.turns[:] = before
        else:
            self.conversation.add_assistant(content, reasoning)
        self._answers.append(last.stats)
        self._explain_end(last)
        self._warn_when_nearly_full(last.stats)
        self.view.stats(last.stats)
        return is_aborted

    def _fitting_ids(self, params: SamplingParams) -> list[int]:
        """Ids of the prompt, of the conversation without its oldest turns where it is too long."""
        messages, max_len = self.conversation.messages, self.llm.max_len
        prompt_ids = self._prompt_ids(messages)
        if not self._options.drops_oldest:
            return prompt_ids
        room = prompt_room(max_len, params.max_tokens)
        if len(prompt_ids) <= room:
            self._num_dropped = 0
            return prompt_ids

        def prompt_of(kept: Sequence[int]) -> list[int] | int:
            ids = self._prompt_ids([messages[at] for at in kept])
            return ids if len(ids) <= room else len(ids)

        sizes = [self._size(message["content"]) for message in messages]
        found = shorten([message["role"] for message in messages], sizes, max_len, len(prompt_ids), room, prompt_of)
        if found is None:
            return prompt_ids  # refused, with its length, unless an answer has some room all the same
        if found.num_dropped != self._num_dropped:
            self.view.note(f"the context is full: the oldest {found.num_dropped} messages are left out from here on")
        self._num_dropped = found.num_dropped
        return found.prompt_ids

    def _size(self, content: Content) -> int:
        """Bytes of a message's text, and four for each position of its pictures."""
        pictures = split_pictures([{"content": content}])[1]
        num_positions = sum(read.num_positions for read in self.llm.pictures.read(pictures)) if pictures else 0
        return len(text_of(content).encode(errors="replace")) + 4 * num_positions

    def _warn_when_nearly_full(self, stats: GenerationStats) -> None:
        """Once, when more than four fifths of the context are taken."""
        used, max_len = stats.prompt_len + stats.completion_len, self.llm.max_len
        is_nearly_full = used >= _NEARLY_FULL * max_len
        if is_nearly_full and not self._is_warned and self.is_interactive:
            then = "then the oldest messages are left out" if self._options.drops_oldest else "then no more fits"
            self.view.note(f"{100 * used // max_len} % of the {max_len} tokens of context are taken; {then}")
        self._is_warned = is_nearly_full

    def _prompt_ids(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        tokenizer = self.llm.tokenizer
        reads = self._options.reads_special_tokens
        if not tokenizer.has_chat_template:
            return tokenizer.apply_plain_template(messages, reads_special_tokens=reads)
        prompt_ids = self.llm.read_chat(messages, special_tokens_in_content=reads, **self.settings.template_kwargs)
        if self.settings.force_think and self._tags and not tokenizer.opens_reasoning(prompt_ids):
            prompt_ids += tokenizer.encode(self._tags[0] + "\n", add_special_tokens=False)
        return prompt_ids

    def _stream(
        self, prompt_ids: list[int], params: SamplingParams, is_interrupted: Callable[[], bool]
    ) -> tuple[TokenEvent, str, str]:
        """Show the answer as it comes; its last event, its content and its reasoning."""
        if params.seed is None:  # which a saved session must know
            params = replace(params, seed=draw_seed())
        answer_ids: list[int] = []
        self._last = PartialGeneration(prompt_ids, params, answer_ids, media_of(prompt_ids))
        events = self.llm.stream(prompt_ids, params, is_interrupted, self.view.reading)
        parser = self.llm.tokenizer.answer_parser(prompt_ids)
        content, reasoning, last = [], [], None
        try:
            for last in events:
                if last.token_id is not None:
                    answer_ids.append(last.token_id)
                parts = parser.feed(last.text)
                if last.finish_reason is not None:
                    parts += parser.flush()
                for part in parts:
                    if isinstance(part, ReasoningPiece):
                        reasoning.append(part.text)
                        self.view.reasoning(part.text)
                    elif isinstance(part, TextPiece):
                        content.append(part.text)
                        self.view.content(part.text)
        finally:
            self.view.end()
        assert last is not None
        return last, "".join(content), "".join(reasoning)

    def _explain_end(self, last: TokenEvent) -> None:
        if last.finish_reason is FinishReason.ABORT:
            self.view.note("stopped")
        elif last.finish_reason is FinishReason.LENGTH:
            stats, max_len = last.stats, self.llm.max_len
            if stats.prompt_len + stats.completion_len >= max_len:
                larger = "" if self.llm.is_models_limit else "; --cache_lens makes the cache larger"
                self.view.note(
                    f"the answer was cut: the cache of {max_len} tokens is full. "
                    f"/clear starts over, /save FILE keeps the conversation first{larger}"
                )
            else:
                self.view.note(f"the answer was cut after {stats.completion_len} tokens; --max_new_tokens allows more")

    def save_session(self, path: Path) -> None:
        """Write the conversation and what the cache keeps of it to `path`. Raises KTransformersError."""
        session = self._last or ()
        token_ids = session.token_ids if session else ()
        self.view.note(f"saving {format_bytes(self.llm.saved_nbytes(token_ids))} to {path} ...")
        saved = self.llm.save_session(path, session, self.conversation.messages)
        kept = f"{saved.cached_len} of {len(saved.token_ids)} tokens in the cache"
        self.view.note(
            f"saved {len(self.conversation.messages)} messages, {kept}, {format_bytes(saved.nbytes)}, to {path}"
        )

    def load_session(self, path: Path) -> None:
        """Go on with a saved session: the next turn computes only what is new. Raises KTransformersError."""
        saved = self.llm.load_session(path, recompute=True)  # what cannot be used is logged, and computed again
        if saved.messages is None:
            raise ConfigError(f"{path} holds {len(saved.token_ids)} tokens and no conversation")
        self.conversation.take(saved.messages, path)
        self._last = saved
        self.view.note(
            f"loaded {len(self.conversation.messages)} messages and {saved.cached_len} tokens of the cache from {path}"
        )

    def describe_stats(self) -> str:
        """Return counts and rates of all answers of the chat, a line per fact."""
        answers = self._answers
        total = GenerationStats(
            prompt_len=sum(stats.prompt_len for stats in answers),
            cached_len=sum(stats.cached_len for stats in answers),
            completion_len=sum(stats.completion_len for stats in answers),
            prefill_seconds=sum(stats.prefill_seconds for stats in answers),
            decode_seconds=sum(stats.decode_seconds for stats in answers),
            num_drafted=sum(stats.num_drafted for stats in answers),
            num_accepted=sum(stats.num_accepted for stats in answers),
        )
        steps = total.completion_len - sum(1 for stats in answers if stats.completion_len)
        rate = steps / total.decode_seconds if total.decode_seconds > 0 else 0.0
        drafts = f"drafts: {drafts_of(total)}\n" if total.num_drafted else ""
        hot = self.llm.engine.hot.describe()
        latest = f"\nhot experts: {hot}" if hot is not None else ""
        files = self.llm.engine.expert_files
        latest += f"\nexperts on the disk: {files.describe()}" if files is not None else ""
        latest += f"\nlatest answer: {format_stats(answers[-1])}" if answers else ""
        return (
            f"{len(answers)} answers, {len(self.conversation.messages)} messages\n"
            f"prompt: {total.prompt_len} tokens, {total.cached_len} of them reused, "
            f"{total.prefill_seconds:.2f} s, {total.prefill_rate:.1f} tokens/s\n"
            f"answers: {total.completion_len} tokens, {total.decode_seconds:.2f} s, {rate:.1f} tokens/s\n{drafts}"
            f"cache: {min(self.llm.used_len, self.llm.max_len)} of {self.llm.max_len} tokens{latest}"
        )

    def describe_model(self) -> str:
        """Return what is known of the loaded model, a line per fact."""
        engine, tokenizer = self.llm.engine, self.llm.tokenizer
        thinking = "no" if tokenizer.reasoning_tags is None else " ".join(tokenizer.reasoning_tags)
        set_by = "the most that the model takes" if self.llm.is_models_limit else "--cache_lens"
        return (
            f"model: {engine.description}\n"
            f"context: {self.llm.max_len:,} tokens ({set_by})\n"
            f"vocabulary: {tokenizer.vocab_size:,} tokens\n"
            f"chat template: {'yes' if tokenizer.has_chat_template else 'none'}, thinking: {thinking}"
        )

    def describe_template(self) -> str:
        """Return the model's chat template. Raises ConfigError when it has none."""
        if not self.llm.tokenizer.has_chat_template:
            raise ConfigError("this model has no chat template")
        template = self.llm.tokenizer.backend.chat_template
        if isinstance(template, str):
            return template
        return "\n\n".join(f"{name}:\n{text}" for name, text in template.items())
