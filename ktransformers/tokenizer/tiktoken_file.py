"""Loads Kimi's tokenizer from its `tiktoken.model` and `tokenizer_config.json`, without the Python code beside them.

`tiktoken.model` is lines of a token's bytes in base64 and its rank, which is its id and the order of merges. What is
not in it is Kimi's own: the pattern (`kimi-k2` in pretokenizers.py) and 256 control tokens behind the vocabulary, of
which tokenizer_config.json names some. (Kimi's code makes 258; the last two have no row in the models' embeddings.)
More than 25,000 characters without a space, which Kimi's code cuts before it looks for words, are not cut here.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ktransformers.errors import ConfigError, UnsupportedError
from ktransformers.tokenizer.pretokenizers import find_pre_tokenizer

__all__ = ["TIKTOKEN_FILE", "load_kimi_tokenizer", "read_ranks"]

TIKTOKEN_FILE = "tiktoken.model"
_KIMI_MODULES = ("tokenization_kimi", "tokenization_moonshot")
_CONTROL_TOKENS = 256
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read tokens and their ranks, which count from 0. Raises ConfigError, with the line, for other files."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            text, rank = line.split()
            token = base64.b64decode(text, validate=True)
            value = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ConfigError(f"{path}:{number}: no token in base64 and its rank") from error
        if not token or value != len(ranks) or token in ranks:
            raise ConfigError(f"{path}:{number}: token {len(ranks)} is expected, none of those before it")
        ranks[token] = value
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ConfigError(f"{path}: {len(missing)} of the 256 bytes are no tokens; the file is not whole")
    return ranks


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """All ways to make a token of two, in the order of the token's rank: tiktoken looks at nothing but the result."""
    merges = []
    for token in ranks:
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges


def _byte_level_bpe(ranks: Mapping[bytes, int]) -> Tokenizer:
    letters = bytes_to_unicode()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    vocab = {spelled(token): rank for token, rank in ranks.items()}
    merges = [(spelled(left), spelled(right)) for left, right in _merges(ranks)]
    rule = find_pre_tokenizer("kimi-k2")
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=rule.ignore_merges))
    tokenizer.pre_tokenizer = rule.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _content(value: object) -> str | None:
    """A token's text, which the config gives as it is or with its properties."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _control_tokens(config: Mapping[str, Any], first: int, source: Path) -> list[AddedToken]:
    """One for each of the ids from `first` on."""
    named = config.get("added_tokens_decoder", {})
    if not isinstance(named, Mapping):
        raise ConfigError(f"{source}: added_tokens_decoder is no object")
    tokens = [
        AddedToken(f"<|reserved_token_{first + i}|>", special=True, normalized=False) for i in range(_CONTROL_TOKENS)
    ]
    for key, value in named.items():
        text = _content(value)
        if text is None or not isinstance(value, Mapping) or not key.isdecimal():
            raise ConfigError(f"{source}: added_tokens_decoder[{key!r:.20}] is no token")
        if not first <= int(key) < first + _CONTROL_TOKENS:
            raise ConfigError(f"{source}: token {key} is none of the {_CONTROL_TOKENS} from {first} on")
        tokens[int(key) - first] = AddedToken(text, special=value.get("special") is True, normalized=False)
    return tokens


class _KimiTokenizer(PreTrainedTokenizerFast):  # type: ignore[misc]
    """Writes tools into prompts with their keys in alphabetical order, as Kimi's code does."""

    def apply_chat_template(self, conversation: Any, tools: Any = None, **options: Any) -> Any:
        return super().apply_chat_template(conversation, tools=_sorted_keys(tools), **options)


def _sorted_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted_keys(value[key]) for key in sorted(value)}
    return [_sorted_keys(item) for item in value] if isinstance(value, list) else value


def load_kimi_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load Kimi's tokenizer in `folder`.

    Raises ConfigError for broken files, UnsupportedError for those of other models.
    """
    path = folder / "tokenizer_config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; {TIKTOKEN_FILE} needs it") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is no object")
    module = _module(config)
    if module not in _KIMI_MODULES:
        raise UnsupportedError(
            f"{folder / TIKTOKEN_FILE} is not known to be Kimi's ({path.name} names {module!r:.60} as its code), and "
            "the file does not say how text is cut into words; copy tokenizer.json there from the original model"
        )
    ranks = read_ranks(folder / TIKTOKEN_FILE)
    tokenizer = _byte_level_bpe(ranks)
    control = _control_tokens(config, len(ranks), path)
    for token in control:  # one by one: each kind is added apart otherwise, and ids count on
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    for token_id, token in enumerate(control, start=len(ranks)):
        if tokenizer.token_to_id(token.content) != token_id:
            raise ConfigError(f"{path}: two tokens are spelled {token.content!r:.60}")
    roles = {role: text for role in _ROLES if (text := _content(config.get(role))) is not None}
    unknown = [text for text in roles.values() if tokenizer.token_to_id(text) is None]
    if unknown:
        raise ConfigError(f"{path}: {unknown[0]!r:.60} is no token")
    return _KimiTokenizer(
        tokenizer_object=tokenizer,
        chat_template=_chat_template(folder, config),
        clean_up_tokenization_spaces=False,
        **roles,
    )


def _module(config: Mapping[str, Any]) -> str | None:
    """The Python module that the tokenizer's authors wrote for it."""
    auto_map = config.get("auto_map")
    value = auto_map.get("AutoTokenizer") if isinstance(auto_map, Mapping) else None
    if isinstance(value, list):
        value = value[0] if value else None
    return value.rpartition("--")[2].partition(".")[0] if isinstance(value, str) else None


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    return template if isinstance(template, str) else None
