"""A conversation: system prompt and turns, saved to and loaded from JSON. Knows neither terminal nor model."""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from ktransformers.errors import ConfigError, reason_of
from ktransformers.system.user_files import read_named

__all__ = ["ChatHistory", "Content", "text_of"]

_ROLES = frozenset({"system", "user", "assistant", "tool"})
_TEXT_KEYS = frozenset({"role", "content", "reasoning_content", "name", "tool_call_id"})
_MAX_BYTES = 256 * 2**20  # with pictures

Content = str | list[dict[str, object]]
"""Of a message: text, or parts: texts and pictures, as OpenAI's API has them."""


class ChatHistory:
    """A chat's conversation. system: its prompt, or None. turns: messages as chat templates take them, without it."""

    def __init__(self, system: str | None = None):
        self.system = system
        self.turns: list[dict[str, Any]] = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The system prompt, if there is one, and all turns, as a chat template takes them."""
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*head, *self.turns]

    def add_user(self, content: Content) -> None:
        """Append a question of the user."""
        self.turns.append({"role": "user", "content": content})

    def add_assistant(self, content: str, reasoning: str = "") -> None:
        """Append an answer of the model. reasoning: as templates want it back, left out when there is none."""
        turn = {"role": "assistant", "content": content}
        self.turns.append(turn | {"reasoning_content": reasoning} if reasoning else turn)

    @property
    def last_question(self) -> Content | None:
        """The content of the user's last turn, None when there is none."""
        return next((turn["content"] for turn in reversed(self.turns) if turn["role"] == "user"), None)

    def drop_question(self) -> None:
        """Remove the user's last turn and all that followed it."""
        while self.turns and self.turns.pop()["role"] != "user":
            pass

    def clear(self) -> None:
        """Forget all turns; the system prompt stays."""
        self.turns.clear()

    def save(self, path: Path) -> None:
        """Write the messages as a JSON list, whole or not at all. Raises ConfigError when that fails."""
        text = json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n"
        target = Path(os.path.realpath(path))  # a link stays one
        rest = target.with_name(f".{target.name[:200]}.{os.getpid()}.new")
        try:
            if target.exists() and not target.is_file():  # replacing would remove a device or a pipe
                raise ConfigError(f"cannot save to {path}: it is not a regular file")
            rest.write_text(text, encoding="utf-8")
            if target.exists():
                rest.chmod(stat.S_IMODE(target.stat().st_mode))
            os.replace(rest, target)
        except OSError as error:
            with suppress(OSError):
                rest.unlink()
            raise ConfigError(f"cannot save to {path}: {error.strerror}") from error

    def load(self, path: Path) -> None:
        """Replace this conversation by a saved one. Raises ConfigError, changing nothing, when it is not one."""
        try:
            if path.stat().st_size > _MAX_BYTES:
                raise ConfigError(f"{path} is too large to be a conversation")
            data = json.loads(read_named(path))
        except OSError as error:
            raise ConfigError(f"cannot load {path}: {reason_of(error)}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not JSON: {error}") from error
        self.take(data, path)

    def take(self, data: object, path: Path) -> None:
        """Replace this conversation by the messages in `data`, which `path` holds. Raises ConfigError as `load`."""
        messages = _checked(data, path)
        has_system = bool(messages) and messages[0]["role"] == "system"
        self.system = messages[0]["content"] if has_system else None
        self.turns = messages[1:] if has_system else messages


def text_of(content: Content) -> str:
    """Return the text of a message's content, without its pictures."""
    if isinstance(content, str):
        return content
    return "\n".join(str(part["text"]) for part in content if part["type"] == "text")


def _texts(content: object) -> list[object]:
    """What must be texts in a content: itself, or the texts and the URLs of pictures in its parts; None for others."""
    if not isinstance(content, list):
        return [content]
    found = list[object]()
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        value = part.get(kind) if kind in ("text", "image_url") else None
        found.append(value.get("url") if kind == "image_url" and isinstance(value, dict) else value)
    return found


def _checked(data: Any, path: Path) -> list[dict[str, Any]]:
    if not isinstance(data, list):
        raise ConfigError(f"{path} does not hold a list of messages")
    for number, message in enumerate(data, 1):
        if not isinstance(message, dict) or message.get("role") not in tuple(_ROLES):
            raise ConfigError(f"{path}: message {number} has no role out of {', '.join(sorted(_ROLES))}")
        if message["role"] == "system" and number > 1:
            raise ConfigError(f"{path}: message {number} is a system prompt, which must be the first message")
        texts = [message.get(key, "") for key in _TEXT_KEYS - {"content"}]
        if "content" not in message or not all(isinstance(one, str) for one in [*texts, *_texts(message["content"])]):
            raise ConfigError(f"{path}: the content of message {number} must be text, or parts of text and pictures")
        if not isinstance(message.get("tool_calls", []), list) or set(message) - _TEXT_KEYS - {"tool_calls"}:
            raise ConfigError(f"{path}: message {number} has keys that messages do not have")
    return data
