"""Splits an answer into its reasoning (`<think>` ... `</think>`) and its content, as it streams.

Only a tag at the very beginning of an answer opens reasoning: an answer may talk about the tag later. A closing tag
there closes a reasoning that was none, which some models write to say so. Line breaks right after either tag belong to
the tag. Does not know tokens or templates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ktransformers.errors import ConfigError, UnsupportedError
from ktransformers.tokenizer.stop import held_back

__all__ = [
    "HARMONY_REASONING",
    "NO_REASONING",
    "OPENED_NEWLINE",
    "REASONING_FORMATS",
    "REASONING_TAGS",
    "EndTrimmer",
    "ReasoningParser",
    "SplitText",
    "Unwrapper",
    "close_reasoning",
    "open_reasoning",
    "open_thoughts",
]

NO_REASONING = "none"
REASONING_FORMATS: dict[str, tuple[str, str] | None] = {
    NO_REASONING: None,
    "think": ("<think>", "</think>"),  # DeepSeek, Qwen, GLM, Kimi, MiniMax, Hunyuan, ERNIE
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>"),
    "hy_v3": ("<think:opensource>", "</think:opensource>"),
    "solar_open": ("<|think|>", "<|end|><|begin|>assistant"),
    "kimi_k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "muse_glimmer": ("to=self<|message|>", "<|eom|><|start|>assistant"),
    "apriel": ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
}
"""Marks of the reasoning by the names of --reasoning_format, but for "auto". "none": reasoning is part of the text."""

REASONING_TAGS = tuple(
    pair
    for name in ("think", "seed_oss", "mistral", "gemma4", "minimax_m3", "cohere", "apertus")
    if (pair := REASONING_FORMATS[name]) is not None
)
"""Marks that are tags of one family each: a template, or a tokenizer, that has them tells the format."""

HARMONY_REASONING = ("<|channel|>analysis<|message|>", "<|end|>")
"""gpt-oss: a message on a channel of its own. HarmonyParser reads the whole answer."""


@dataclass(frozen=True, slots=True)
class SplitText:
    """A piece of an answer: text of the reasoning, then text of the content. Either may be empty."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """Splits one answer. tags: opening and closing tag, None for a model without them.

    starts_inside: the prompt wrote the opening tag.
    goes_on: and some of the reasoning, so that line breaks at the beginning do not belong to the tag. stops: tags that
    end the reasoning, too, and stay: some models call tools in the middle of it.
    """

    def __init__(
        self,
        tags: tuple[str, str] | None,
        starts_inside: bool = False,
        goes_on: bool = False,
        stops: tuple[str, ...] = (),
    ):
        self._open, self._close = tags or ("", "")
        self._ends = (self._close, *stops)
        self._state = "content" if tags is None else "reasoning" if starts_inside else "start"
        self._text = ""
        self._drops_newlines = starts_inside and not goes_on

    @property
    def is_reasoning(self) -> bool:
        return self._state == "reasoning"

    def feed(self, piece: str) -> SplitText:
        """Return what `piece` adds to the reasoning and to the text; what may become a tag is held back."""
        self._text += piece
        if self._state == "start" and not self._leave_start():
            return SplitText()
        reasoning = self._take_reasoning() if self._state == "reasoning" else ""
        return SplitText(reasoning, self._take(len(self._text)) if self._state == "content" else "")

    def flush(self) -> SplitText:
        """Return the text that was held back. Call once, at the end of the answer."""
        rest = self._take(len(self._text))
        return SplitText(reasoning=rest) if self._state == "reasoning" else SplitText(content=rest)

    def _leave_start(self) -> bool:
        stripped = self._text.lstrip()
        if stripped.startswith(self._open):
            self._state, self._text, self._drops_newlines = "reasoning", stripped[len(self._open) :], True
        elif stripped.startswith(self._close):
            self._state, self._text, self._drops_newlines = "content", stripped[len(self._close) :], True
        elif not self._open.startswith(stripped) and not self._close.startswith(stripped):
            self._state = "content"
        return self._state != "start"

    def _take_reasoning(self) -> str:
        end, tag = min(((at, tag) for tag in self._ends if (at := self._text.find(tag)) >= 0), default=(-1, ""))
        if end < 0:
            return self._take(len(self._text) - held_back(self._text, self._ends))
        reasoning = self._take(end)
        if tag == self._close:
            self._text = self._text[len(self._close) :]
        self._state, self._drops_newlines = "content", tag == self._close
        return reasoning

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        if self._drops_newlines and taken:
            taken = taken.lstrip("\r\n")
            self._drops_newlines = not taken
        return taken


class Unwrapper:
    """Takes the tags off that some families write around the text of an answer: `<answer>`, `<response>`.

    Line breaks inside next to the tags belong to them. An answer that does not begin with the tag is left alone.
    """

    def __init__(self, tags: tuple[str, str]):
        self._open, self._close = tags
        self._ends = tuple("\n" * count + self._close for count in (2, 1, 0))
        self._state, self._text = "start", ""

    def feed(self, piece: str) -> str:
        """Return the text that this piece makes certain."""
        self._text += piece
        if self._state == "start":
            stripped = self._text.lstrip()
            if stripped.startswith(self._open):
                self._state, self._text = "opened", stripped[len(self._open) :]
            elif self._open.startswith(stripped):
                return ""
            else:
                self._state = "outside"
        if self._state == "opened":
            self._text = self._text.lstrip("\r\n")
            if not self._text:
                return ""
            self._state = "inside"
        if self._state == "inside":
            found = min((at for end in self._ends if (at := self._text.find(end)) >= 0), default=-1)
            if found < 0:
                return self._take(len(self._text) - held_back(self._text, self._ends))
            shown, rest = self._text[:found], self._text[found:].lstrip("\n")[len(self._close) :]
            self._state, self._text = "outside", ""
            return shown + rest
        return self._take(len(self._text))

    def flush(self) -> str:
        """Return the text that was held back. Call once, at the end."""
        return self._take(len(self._text))

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        return taken


class EndTrimmer:
    """Drops a text from the end of an answer; blanks around it, too. Elsewhere it is text like any other."""

    def __init__(self, end: str):
        self._end, self._text = end, ""

    def feed(self, piece: str) -> str:
        """Return the text that this piece makes certain."""
        self._text += piece
        if not self._text:
            return ""
        whole = self._text.rstrip()
        kept = len(self._end) if whole.endswith(self._end) else held_back(whole, (self._end,))
        kept += len(self._text) - len(whole) if kept else 0
        shown, self._text = self._text[: len(self._text) - kept], self._text[len(self._text) - kept :]
        return shown

    def flush(self) -> str:
        """Return the text that was held back and is not the end. Call once."""
        return "" if self._text.rstrip() == self._end else self._text


OPENED_NEWLINE = "\n"
"""Follows a reasoning tag that is opened here, as the templates of DeepSeek-R1 and Qwen3 write it."""


_FIRST_TAIL = 64


def _tails(decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int]) -> Iterator[tuple[str, bool]]:
    """Ever longer ends of a prompt, and whether that is all of it: the answer's beginning is near the end."""
    count = _FIRST_TAIL
    while count < len(prompt_ids):
        yield decode(prompt_ids[-count:]), False
        count *= 8
    yield decode(prompt_ids), True


def open_thoughts(
    decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int], tags: tuple[str, str], opening: str
) -> str | None:
    """Return the beginning of an answer's reasoning that a prompt ends with: the text behind its last opening tag.

    decode: ids to text with all special tokens. opening: what the template writes in front of an answer. None when the
    prompt does not end inside of the reasoning.
    """
    opens, closes = (tag.strip() for tag in tags)
    header = _header(opening, tags)
    for text, is_all in _tails(decode, prompt_ids):
        begins = text.rfind(header) + len(header) if header and header in text else 0 if is_all or not header else -1
        if begins < 0:
            continue
        answer = text[begins:]
        _, found, after = answer.rpartition(opens)
        if not found or closes in after:
            return None
        return after
    return None


def _header(opening: str, tags: tuple[str, str]) -> str:
    """The end of what a template writes in front of answers, from its last tag on, without the reasoning's tags."""
    for tag in tags:
        before, found, _ = opening.rpartition(tag.strip())
        opening = before if found else opening
    opening = opening.rstrip()
    at = len(opening)
    while at >= 0 and any(opening[at:] in tag for tag in tags):  # marks are made of the same tokens in some families
        at = max(opening.rfind(mark, 0, at) for mark in ("<", "["))
    return opening[at:] if at >= 0 else opening[-_MAX_HEADER:]


_MAX_HEADER = 40


def open_reasoning(prompt: str, tags: tuple[str, str] | None) -> str:
    """Return a rendered prompt, extended to the beginning of its answer's reasoning.

    Raises UnsupportedError and ConfigError where there can be none.
    """
    if tags is None:
        raise UnsupportedError("this model's files tell of no reasoning: an answer can only go on from its text")
    opening, closing = (tag.rstrip() for tag in tags)
    if prompt.rstrip().endswith(opening):
        return prompt
    if tags != HARMONY_REASONING and prompt.rstrip().endswith(closing):  # harmony's closing tag ends every message
        raise ConfigError("an answer cannot go on inside its reasoning while reasoning is turned off")
    return prompt + tags[0] + (OPENED_NEWLINE if opening.endswith("think>") else "")


def close_reasoning(prompt: str, tags: tuple[str, str] | None) -> str:
    """Return a rendered prompt, extended to the beginning of its answer's text: reasoning that it opens ends there."""
    if tags is None or not prompt.rstrip().endswith(tags[0].rstrip()):
        return prompt
    return f"{prompt}{tags[1]}\n\n"
