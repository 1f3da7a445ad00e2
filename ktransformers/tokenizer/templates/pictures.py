"""Pictures in conversations: the template writes a placeholder for each, whose place the picture's own text takes.

    {"type": "image"} ── template ──> placeholder ──┐
                      └─ a mark in the text ────────┴──> the picture's text, once each

What a template does not write as a picture (some know strings only, some know pictures of the user alone) is a mark in
the turn's text: a number that nothing else holds, and behind it the picture's own. Afterwards stands there what the
template writes around a picture elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ktransformers.errors import ConversationError
from ktransformers.tokenizer.templates.probe import Prober
from ktransformers.tokenizer.templates.rendering import Message
from ktransformers.tokenizer.templates.turns import Rendered, Rendering
from ktransformers.tokenizer.verbatim import unused_number

__all__ = ["PictureTexts", "num_pictures", "takes_one", "with_pictures"]

_DIGITS = 4
_PROBE = "60217401"

_TAKEN = (None, frozenset({"user"}), frozenset[str]())
"""Roles whose pictures the template is given, one attempt after the other; None: all."""


@dataclass(frozen=True, slots=True)
class PictureTexts:
    """What stands in a prompt for pictures. placeholder: what the template writes for one. texts: of each, in order."""

    placeholder: str
    texts: Sequence[str]


def num_pictures(messages: Sequence[Message]) -> int:
    """Return how many parts of a conversation are pictures."""
    return sum(_is_picture(part) for message in messages for part in _parts(message))


def takes_one(placeholder: str, prober: Prober) -> bool:
    """Whether a template writes one picture of a turn, and of two not both. False of one that knows no pictures, whose
    texts they are put into."""
    one, two = (_probed(count, prober) for count in (1, 2))
    return one is not None and one.count(placeholder) == 1 and (two is None or two.count(placeholder) != 2)


def with_pictures(
    render: Callable[[Rendering], Rendered], prober: Prober, asked: Rendering, pictures: PictureTexts
) -> Rendered:
    """Return the text of a conversation with the texts of its pictures in their places.

    render, prober: of the template. Raises ConversationError when the template refuses the conversation.
    """
    refused: ConversationError | None = None
    for roles in _TAKEN:
        mark = unused_number(asked.messages)
        messages, marked = _marked(asked.messages, roles, mark)
        if roles is not None and not marked:
            continue  # as in the attempt before
        try:
            made = render(replace(asked, messages=messages))
        except ConversationError as error:
            refused = refused or error
            continue
        text = _put(made.text, mark, marked, pictures, prober)
        if text is not None:
            return replace(made, text=text)
    raise refused or ConversationError(
        "the model's chat template does not write each picture of this conversation once: special tokens that stand "
        "for pictures may be spelled in its texts"
    )


def _parts(message: Message) -> Sequence[object]:
    content = message.get("content")
    return () if content is None or isinstance(content, str) else content


def _is_picture(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def _marked(messages: Sequence[Message], roles: frozenset[str] | None, mark: str) -> tuple[list[Message], list[int]]:
    """The messages with marks for pictures in turns of other roles, and which pictures these are."""
    made, marked, count = list[Message](), list[int](), 0
    for message in messages:
        parts = _parts(message)
        numbers = range(count, count + sum(map(_is_picture, parts)))
        count = numbers.stop
        if numbers and roles is not None and message.get("role") not in roles:
            left = iter(numbers)
            texts = [f"{mark}{next(left):0{_DIGITS}}" if _is_picture(part) else _text(part) for part in parts]
            message = {**message, "content": "\n".join(texts)}
            marked += numbers
        made.append(message)
    return made, marked


def _text(part: object) -> str:
    found = part.get("text") if isinstance(part, Mapping) else part
    return found if isinstance(found, str) else ""


def _put(text: str, mark: str, marked: Sequence[int], pictures: PictureTexts, prober: Prober) -> str | None:
    """The text with all pictures in it; None where not each of them has one place."""
    around = _around(pictures.placeholder, prober) if marked else ("", "")
    own = iter([number for number in range(len(pictures.texts)) if number not in set(marked)])
    placed = list[int]()

    def put(found: re.Match[str]) -> str:
        is_mark = found[0] != pictures.placeholder
        number = int(found[0][-_DIGITS:]) if is_mark else next(own, -1)
        placed.append(number)
        made = pictures.texts[number] if 0 <= number < len(pictures.texts) else ""
        return made.join(around) if is_mark else made

    made = re.sub(rf"{mark}\d{{{_DIGITS}}}|{re.escape(pictures.placeholder)}", put, text)
    return made if sorted(placed) == list(range(len(pictures.texts))) else None


def _around(placeholder: str, prober: Prober) -> tuple[str, str]:
    """What the template writes before and behind the placeholder of a user's picture; nothing, where it knows none."""
    shown, plain = _probed(1, prober), _probed(0, prober)
    if shown is None or plain is None or shown.count(placeholder) != 1 or placeholder in plain:
        return "", ""
    start = _num_equal(shown, plain)
    end = _num_equal(shown[start:][::-1], plain[start:][::-1])
    before, _, behind = shown[start : len(shown) - end].partition(placeholder)
    return before, behind


def _probed(count: int, prober: Prober) -> str | None:
    """A user's turn of so many pictures and a text; None: the template refuses it."""
    words = {"type": "text", "text": _PROBE}
    return prober.render([{"role": "user", "content": [*[{"type": "image"}] * count, words]}])


def _num_equal(a: str, b: str) -> int:
    """How many letters two texts begin with alike."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
