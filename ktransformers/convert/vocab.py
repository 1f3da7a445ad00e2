"""Makes the `tokenizer.*` metadata of a GGUF file from a fast tokenizer: the inverse of `tokenizer/gguf_vocab.py`.

A file holds tokens, merges and the name of the rule that cuts text into words. That name is found by trying all rules
that are known, and what was written is read back and compared with the tokenizer on a probe: one that would read text
differently is refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from ktransformers.convert.header import Entries, MetadataValue, entry
from ktransformers.errors import KTransformersError, UnsupportedError
from ktransformers.tokenizer.gguf_vocab import build_gguf_tokenizer, read_gguf_vocab
from ktransformers.tokenizer.pretokenizers import PRE_TOKENIZERS

__all__ = ["PROBE", "vocab_metadata"]

logger = logging.getLogger(__name__)

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # gguf.TokenType

PROBE = (
    "Hello, World! It's 3 o'clock; we'll PAY 1234567.89 for 12 camelCaseWords and snake_case_ones.\n\n"
    "\tdef f(x):\n        return x**2  # тест, Привет мир\n\n\n  "
    "你好,世界。日本語のテキスト 한국어 문장 ÄÖÜ straße naïve café 🚀🦄 ½ ² ١٢٣ हिन्दी ไทย\r\n"
    "http://example.org/a?b=c&d=%20 <tag attr='v'> ''' \"quoted\" I'M YOU'RE  -- ... !!! $100 100$ \u00a0x   "
)
"""Text in which rules for words differ: digits, cases, contractions, spaces, newlines, scripts."""


def vocab_metadata(backend: PreTrainedTokenizerFast, vocab_size: int) -> Entries:
    """Return the keys of a tokenizer with `vocab_size` tokens, ids that it does not use filled up.

    Raises UnsupportedError for a tokenizer that the format cannot hold.
    """
    fast = backend.backend_tokenizer
    content = json.loads(fast.to_str())
    model = content["model"]
    if model.get("type") != "BPE":
        raise UnsupportedError(
            f"a tokenizer of type {model.get('type')!r:.40} cannot be written into a GGUF file; BPE ones can"
        )
    tokens, types = _tokens(fast, content, vocab_size)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    values: dict[str, Any] = {}
    if _is_sentencepiece(content):
        values["tokenizer.ggml.model"] = "llama"
        values["tokenizer.ggml.pre"] = "default"
        _mark_bytes(tokens, types)
        scores = _scores(tokens, types, merges)
    else:
        values["tokenizer.ggml.model"] = "gpt2"
        values["tokenizer.ggml.pre"] = _rule_name(fast, bool(model.get("ignore_merges")))
        scores = None
    values["tokenizer.ggml.tokens"] = tokens
    made = {key: entry(value) for key, value in values.items()}
    if scores is not None:
        made["tokenizer.ggml.scores"] = entry(scores)
    from gguf import GGUFValueType

    made["tokenizer.ggml.token_type"] = MetadataValue(types, GGUFValueType.ARRAY, GGUFValueType.INT32)
    if scores is None:
        made["tokenizer.ggml.merges"] = entry(merges)
    made |= {key: entry(value) for key, value in _special(backend, content).items()}
    made |= {key: entry(value) for key, value in _templates(backend).items()}
    _check(backend, made)
    return made


def _is_sentencepiece(content: Mapping[str, Any]) -> bool:
    """Whether tokens spell text, with bytes as tokens of their own, not bytes as GPT-2 does."""
    return bool(content["model"].get("byte_fallback"))


def _tokens(fast: FastTokenizer, content: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """By id every token and its type."""
    added = {token["id"]: token for token in content["added_tokens"]}
    unknown = content["model"].get("unk_token")
    tokens, types = [], []
    for index in range(max(vocab_size, fast.get_vocab_size())):
        token = fast.id_to_token(index)
        if token is None or index >= vocab_size > 0:
            if token is not None:
                raise UnsupportedError(f"the tokenizer has token {index}, the model {vocab_size} tokens")
            tokens.append(f"[PAD{index}]")
            types.append(_UNUSED)
            continue
        tokens.append(token)
        if token == unknown:
            types.append(_UNKNOWN if index not in added else _CONTROL)
        elif index in added:
            types.append(_CONTROL if added[index]["special"] else _USER_DEFINED)
        else:
            types.append(_NORMAL)
    return tokens, types


def _mark_bytes(tokens: Sequence[str], types: list[int]) -> None:
    for index, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">") and types[index] == _NORMAL:
            types[index] = _BYTE


def _scores(tokens: Sequence[str], types: Sequence[int], merges: Sequence[str]) -> list[float]:
    """SentencePiece's: the earlier a token is merged, the higher."""
    rank: dict[str, int] = {}
    for number, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", "", 1), number)
    never = float(-len(merges) - 1)
    return [
        0.0 if kind != _NORMAL else -float(rank[token]) if token in rank else never
        for token, kind in zip(tokens, types, strict=True)
    ]


def _rule_name(fast: FastTokenizer, ignores_merges: bool) -> str:
    """The name of the rule that cuts the probe as the tokenizer does. Raises UnsupportedError when none does."""
    if fast.pre_tokenizer is None:
        raise UnsupportedError("the tokenizer has no rule that cuts text into words; GGUF has no name for that")

    def words(normalizer: Any, pre_tokenizer: Any) -> list[str]:
        text = PROBE if normalizer is None else normalizer.normalize_str(PROBE)
        return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]

    wanted = words(fast.normalizer, fast.pre_tokenizer)
    found = []
    for name, rule in PRE_TOKENIZERS.items():
        if rule.byte_level and words(rule.normalizer(), rule.build()) == wanted:
            if rule.ignore_merges == ignores_merges and rule.nfc == (fast.normalizer is not None):
                return name
            found.append((rule.ignore_merges != ignores_merges, name))
    if not found:
        raise UnsupportedError(
            "none of the rules that GGUF has names for cuts text into words as this tokenizer does; "
            "quantize a GGUF of the model"
        )
    return min(found)[1]


def _special(backend: PreTrainedTokenizerFast, content: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        token_id = getattr(backend, f"{name}_token_id")
        if token_id is not None:
            values[f"tokenizer.ggml.{role}_token_id"] = int(token_id)
    plain, marked = (backend("a", add_special_tokens=adds)["input_ids"] for adds in (False, True))
    if marked != plain:
        head = marked[: len(marked) - len(plain)] if marked[-len(plain) :] == plain else []
        values["tokenizer.ggml.add_bos_token"] = marked[:1] == [backend.bos_token_id] and plain[:1] != marked[:1]
        values["tokenizer.ggml.add_eos_token"] = not head and marked[-1:] == [backend.eos_token_id]
    else:
        values["tokenizer.ggml.add_bos_token"] = values["tokenizer.ggml.add_eos_token"] = False
    if _is_sentencepiece(content):
        values["tokenizer.ggml.add_space_prefix"] = backend.tokenize("a")[:1] == ["\u2581a"]
    return values


def _templates(backend: PreTrainedTokenizerFast) -> dict[str, str]:
    template = backend.chat_template
    if isinstance(template, str):
        return {"tokenizer.chat_template": template}
    named = dict(template or {})
    default = {"tokenizer.chat_template": named.pop("default")} if "default" in named else {}
    return default | {f"tokenizer.chat_template.{name}": text for name, text in named.items()}


def _check(backend: PreTrainedTokenizerFast, made: Entries) -> None:
    """Raises UnsupportedError when what was written reads the probe differently."""
    try:
        back = build_gguf_tokenizer(read_gguf_vocab({key: one.value for key, one in made.items()}))
    except KTransformersError as error:
        raise UnsupportedError(f"the tokenizer cannot be written into a GGUF file: {error}") from error
    for text in (PROBE, "a", " a b"):
        for adds in (False, True):
            wanted = backend(text, add_special_tokens=adds)["input_ids"]
            got = back(text, add_special_tokens=adds)["input_ids"]
            if wanted != got:
                at = next(
                    (i for i, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), min(len(wanted), len(got))
                )
                raise UnsupportedError(
                    "the tokenizer cannot be written into a GGUF file: what was written reads a text differently, from "
                    f"token {at} on ({wanted[at : at + 3]} becomes {got[at : at + 3]})"
                )
    special = "".join(dict.fromkeys(backend.all_special_tokens))
    text = f"{special}text{special}"
    if back(text, add_special_tokens=False)["input_ids"] != backend(text, add_special_tokens=False)["input_ids"]:
        logger.warning("readers of GGUF put other spaces after special tokens than this tokenizer does")
