"""Builds a fast tokenizer from the `tokenizer.*` metadata of a GGUF file.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#tokenizer. Four kinds are built: "gpt2" (byte-level BPE,
the pre-tokenizer given by name), "llama" (SentencePiece BPE: scores instead of merges, bytes as fallback), "gemma4"
(the same with merges) and "t5" (SentencePiece unigram: the sequence of tokens whose scores have the largest sum).
Everything in the metadata is checked before it is used: a file is not to be trusted. Does not read files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE, Unigram
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import generate_merges

from ktransformers.errors import ConfigError, KTransformersError, UnsupportedError
from ktransformers.tokenizer.pretokenizers import SPACE_PATTERNS, find_pre_tokenizer

__all__ = ["END_OF_TURN_TOKENS", "GgufVocab", "build_gguf_tokenizer", "cut_vocab", "read_gguf_vocab"]

_log = logging.getLogger(__name__)

_CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 3, 4, 5, 6  # gguf.TokenType
_UNKNOWN = 2
_SPACE = "\u2581"  # how SentencePiece spells a space

_MODELS = ("gpt2", "llama", "t5", "gemma4")
_DEFAULT_ROLES = {"llama": {"unknown": 0, "bos": 1, "eos": 2}, "t5": {"padding": 0, "eos": 1, "unknown": 2}}

END_OF_TURN_TOKENS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|eot|>", "<|return|>"),
    "[EOT]",
)
"""Control tokens that end an answer although a file may name another token as its end-of-sequence."""

_HARMONY_ENDS = {"<|return|>", "<|call|>"}
"""Of gpt-oss, whose answers have several messages: `<|end|>` ends only one of them."""


@dataclass(frozen=True, slots=True)
class GgufVocab:
    """The checked vocabulary of a GGUF: V tokens, V types and scores, merges as pairs, special ids by their role."""

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float] | None
    merges: list[tuple[str, str]] | None
    roles: dict[str, int]  # "bos", "eos", "eot", "eom", "unknown", "padding" -> id
    more_eos: list[int]  # ids, as Ollama's files list them beside the role
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    remove_extra_whitespaces: bool
    charsmap: bytes | None  # SentencePiece's compiled normalization
    chat_template: str | dict[str, str] | None

    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: the file's eos, eot, eom and eos_token_ids, and control tokens that end a turn."""
        ids = [*(self.roles[role] for role in ("eos", "eot", "eom") if role in self.roles), *self.more_eos]
        known = _HARMONY_ENDS if set(self.tokens) >= _HARMONY_ENDS else set(END_OF_TURN_TOKENS)
        ids += [
            i
            for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind == _CONTROL and token in known
        ]
        return tuple(dict.fromkeys(ids))


def _get(metadata: Mapping[str, object], key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
    value = metadata.get(key)
    if value is None:
        return default
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise ConfigError(f"GGUF metadata {key} has the wrong type {type(value).__name__}")
    return value


def _array(metadata: Mapping[str, object], key: str, length: int | None) -> list[Any] | None:
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ConfigError(f"GGUF metadata {key} must be an array, got {type(value).__name__}")
    if length is not None and len(value) != length:
        raise ConfigError(f"GGUF metadata {key} has {len(value)} entries, the vocabulary has {length}")
    return list(value)


def _strings(metadata: Mapping[str, object], key: str) -> list[str] | None:
    values = _array(metadata, key, None)
    if values is not None and not all(isinstance(value, str) for value in values):
        raise ConfigError(f"GGUF metadata {key} must be an array of strings")
    return values


def _numbers(metadata: Mapping[str, object], key: str, length: int, kind: type | tuple[type, ...]) -> list[Any] | None:
    values = _array(metadata, key, length)
    if values is None:
        return None
    values = [value.item() if isinstance(value, np.generic) else value for value in values]
    if not all(isinstance(value, kind) and not isinstance(value, bool) for value in values):
        raise ConfigError(f"GGUF metadata {key} must be an array of numbers")
    if not all(np.isfinite(value) for value in values):
        raise ConfigError(f"GGUF metadata {key} holds values that are not finite")
    return values


def _read_merges(metadata: Mapping[str, object], tokens: Sequence[str]) -> list[tuple[str, str]] | None:
    lines = _strings(metadata, "tokenizer.ggml.merges")
    if lines is None:
        return None
    known, pairs = set(tokens), []
    for number, line in enumerate(lines):
        parts = line.split(" ")
        if len(parts) != 2 or parts[0] not in known or parts[1] not in known or "".join(parts) not in known:
            raise ConfigError(f"GGUF metadata tokenizer.ggml.merges: merge {number} does not fit the vocabulary")
        pairs.append((parts[0], parts[1]))
    return pairs


def _read_chat_template(metadata: Mapping[str, object]) -> str | dict[str, str] | None:
    default = _get(metadata, "tokenizer.chat_template", str)
    prefix = "tokenizer.chat_template."
    named = {key.removeprefix(prefix): _get(metadata, key, str) for key in metadata if key.startswith(prefix)}
    if not named:
        return default  # type: ignore[no-any-return]
    return {"default": default, **named} if default is not None else named


def _read_roles(metadata: Mapping[str, object], model: str, num_tokens: int) -> dict[str, int]:
    roles = {}
    for role in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        token_id = _get(metadata, f"tokenizer.ggml.{role}_token_id", int)
        if token_id is not None:
            if not 0 <= token_id < num_tokens:
                raise ConfigError(
                    f"GGUF metadata tokenizer.ggml.{role}_token_id {token_id}: the vocabulary has {num_tokens} tokens"
                )
            roles[role] = token_id
    return _DEFAULT_ROLES.get(model, {}) | roles if num_tokens > 2 else roles


def cut_vocab(metadata: Mapping[str, object], vocab_size: int | None) -> Mapping[str, object]:
    """Return the metadata with no more tokens than `vocab_size`, and no merge that makes one of the others.

    Logs what is left aside. Raises ConfigError for arrays of other lengths.
    """
    tokens = _strings(metadata, "tokenizer.ggml.tokens") or []
    if vocab_size is None or len(tokens) <= vocab_size:
        return metadata
    lost = tokens[vocab_size:]
    shown = ", ".join(ascii(token) for token in lost[:3])
    _log.warning("the vocabulary has %d tokens more than the model (%s): they are left aside", len(lost), shown)
    made: dict[str, object] = {"tokenizer.ggml.tokens": tokens[:vocab_size]}
    for key in ("tokenizer.ggml.token_type", "tokenizer.ggml.scores"):
        values = _array(metadata, key, len(tokens))
        if values is not None:
            made[key] = values[:vocab_size]
    merges = _strings(metadata, "tokenizer.ggml.merges")
    if merges is not None:
        gone = set(lost).difference(tokens[:vocab_size])
        made["tokenizer.ggml.merges"] = [
            line for line in merges if gone.isdisjoint((*line.split(" "), line.replace(" ", "", 1)))
        ]
    return {**metadata, **made}


def _read_more_eos(metadata: Mapping[str, object], num_tokens: int) -> list[int]:
    key = "tokenizer.ggml.eos_token_ids"
    ids = _array(metadata, key, None) or []
    if not all(type(one) is int and 0 <= one < num_tokens for one in ids):
        raise ConfigError(f"GGUF metadata {key} must be ids of the vocabulary's {num_tokens} tokens")
    return ids


def _read_charsmap(metadata: Mapping[str, object]) -> bytes | None:
    key = "tokenizer.ggml.precompiled_charsmap"
    values = _array(metadata, key, None)
    if not values:
        return None
    if not all(isinstance(value, int) and -128 <= value < 256 for value in values):
        raise ConfigError(f"GGUF metadata {key} must be an array of bytes")
    return bytes(value & 0xFF for value in values)


def read_gguf_vocab(metadata: Mapping[str, object], vocab_size: int | None = None) -> GgufVocab:
    """Check the `tokenizer.*` keys of a GGUF file. Raises ConfigError or UnsupportedError naming the key.

    vocab_size: rows of the embedding table, beyond which tokens are left aside: Ollama's files of Gemma 3 list those of
    images there. None: as many as there are tokens. Of ids that have no token none is ever the text's.
    """
    metadata = cut_vocab(metadata, vocab_size)
    model = _get(metadata, "tokenizer.ggml.model", str, "")
    if model not in _MODELS:
        raise UnsupportedError(
            f"the GGUF file's tokenizer model {model!r:.60} is not one of {', '.join(_MODELS)}; "
            "pass --model_path with a folder that holds the model's tokenizer.json"
        )
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    if not tokens:
        raise ConfigError("the GGUF file has no tokenizer.ggml.tokens; pass --model_path with the model's tokenizer")
    # An empty token can be the result of no merge; it needs a name of its own to keep its id.
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    types = _numbers(metadata, "tokenizer.ggml.token_type", len(tokens), int) or [1] * len(tokens)
    pre = _get(metadata, "tokenizer.ggml.pre", str)
    if model == "gemma4":
        pre = "gemma4"
    if pre is None and model == "gpt2":
        _log.warning(
            "the GGUF file names no pre-tokenizer (tokenizer.ggml.pre); using 'default', text may be split badly"
        )
    roles = _read_roles(metadata, model, len(tokens))
    is_spm = model == "llama"
    # As llama.cpp does for files that do not say.
    adds_bos = is_spm or (model != "t5" and find_pre_tokenizer(pre or "default").adds_bos)
    return GgufVocab(
        model=model,
        pre=pre or "default",
        tokens=tokens,
        types=types,
        scores=_numbers(metadata, "tokenizer.ggml.scores", len(tokens), (int, float)),
        merges=_read_merges(metadata, tokens),
        roles=roles,
        more_eos=_read_more_eos(metadata, len(tokens)),
        add_bos=_get(metadata, "tokenizer.ggml.add_bos_token", bool, adds_bos) and "bos" in roles,
        add_eos=_get(metadata, "tokenizer.ggml.add_eos_token", bool, model == "t5") and "eos" in roles,
        add_space_prefix=_get(metadata, "tokenizer.ggml.add_space_prefix", bool, is_spm),
        remove_extra_whitespaces=_get(metadata, "tokenizer.ggml.remove_extra_whitespaces", bool, False),
        charsmap=_read_charsmap(metadata),
        chat_template=_read_chat_template(metadata),
    )


def _token_ids(tokens: Sequence[str]) -> dict[str, int]:
    ids: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        ids.setdefault(token, token_id)
    if len(ids) != len(tokens):
        _log.warning("the GGUF vocabulary spells %d tokens twice; the first id of each is used", len(tokens) - len(ids))
    return ids


def _byte_level(vocab: GgufVocab) -> Tokenizer:
    if vocab.merges is None:
        raise ConfigError("the GGUF file has no tokenizer.ggml.merges; pass --model_path with the model's tokenizer")
    rule = find_pre_tokenizer(vocab.pre)
    model = BPE(vocab=_token_ids(vocab.tokens), merges=vocab.merges, ignore_merges=rule.ignore_merges)
    tokenizer = Tokenizer(model)
    normalizer = rule.normalizer()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = rule.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocab: GgufVocab) -> Tokenizer:
    """SentencePiece's BPE merges the adjacent pair whose result scores highest, so scores give the order of merges.

    A space prefix goes before every stretch of text, also after a special token, as llama.cpp does it.
    """
    ids = _token_ids(vocab.tokens)
    merges = vocab.merges
    if merges is None:
        if vocab.model != "llama":
            raise ConfigError(
                "the GGUF file has no tokenizer.ggml.merges; pass --model_path with the model's tokenizer"
            )
        if vocab.scores is None:
            raise ConfigError("the GGUF file has neither tokenizer.ggml.scores nor tokenizer.ggml.merges")
        skip = {_CONTROL, _USER_DEFINED, _BYTE, _UNKNOWN, _UNUSED}
        scores = {
            token: score
            for token, score, kind in zip(vocab.tokens, vocab.scores, vocab.types, strict=True)
            if kind not in skip
        }
        merges = generate_merges({token: ids[token] for token in scores}, scores)
    unknown = vocab.tokens[vocab.roles["unknown"]] if "unknown" in vocab.roles else None
    model = BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    if vocab.add_space_prefix:
        steps.insert(0, normalizers.Prepend(_SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = _text_decoder(vocab)
    return tokenizer


def _unigram(vocab: GgufVocab) -> Tokenizer:
    """SentencePiece's unigram model; what its normalizer does to spaces is done here in the same order."""
    if vocab.scores is None:
        raise ConfigError("the GGUF file has no tokenizer.ggml.scores, which a unigram vocabulary needs")
    pieces = list(zip(vocab.tokens, vocab.scores, strict=True))
    has_bytes = _BYTE in vocab.types
    tokenizer = Tokenizer(Unigram(pieces, unk_id=vocab.roles.get("unknown"), byte_fallback=has_bytes))
    steps: list[normalizers.Normalizer] = []
    if vocab.charsmap is not None:
        steps.append(normalizers.Precompiled(vocab.charsmap))
    if vocab.remove_extra_whitespaces:
        runs, ends = SPACE_PATTERNS
        steps += [normalizers.Replace(Regex(runs), " "), normalizers.Replace(Regex(ends), "")]
    if vocab.add_space_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = _text_decoder(vocab)
    return tokenizer


def _text_decoder(vocab: GgufVocab) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocab.add_space_prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    return decoders.Sequence(steps)


def _add_tokens(tokenizer: Tokenizer, vocab: GgufVocab) -> None:
    """Control tokens become special, user-defined ones plain added tokens; both are matched whole in any text."""
    control, plain = [], []
    for token, kind in zip(vocab.tokens, vocab.types, strict=True):
        if kind == _CONTROL:
            control.append(AddedToken(token, normalized=False, special=True))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(plain)


def _set_post_processor(tokenizer: Tokenizer, vocab: GgufVocab) -> None:
    used = [role for role, is_added in (("bos", vocab.add_bos), ("eos", vocab.add_eos)) if is_added]
    special = [(vocab.tokens[vocab.roles[role]], vocab.roles[role]) for role in used]
    head = [vocab.tokens[vocab.roles["bos"]]] if vocab.add_bos else []
    tail = [vocab.tokens[vocab.roles["eos"]]] if vocab.add_eos else []
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*head, "$A", *tail], pair=[*head, "$A", "$B", *tail], special_tokens=special
    )


def _builder(vocab: GgufVocab) -> Callable[[GgufVocab], Tokenizer]:
    if vocab.model == "t5":
        return _unigram
    is_text = vocab.model == "llama" or not find_pre_tokenizer(vocab.pre).byte_level
    return _sentencepiece if is_text else _byte_level


def build_gguf_tokenizer(vocab: GgufVocab) -> PreTrainedTokenizerFast:
    """Build the Hugging Face fast tokenizer that `vocab` describes. Raises ConfigError when it cannot be built."""
    try:
        tokenizer = _builder(vocab)(vocab)
        _add_tokens(tokenizer, vocab)
        _set_post_processor(tokenizer, vocab)
    except KTransformersError:
        raise
    except Exception as error:  # the tokenizers library raises no narrower one
        raise ConfigError(f"the GGUF file's tokenizer cannot be built: {error}") from error
    roles = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    named = {roles[role]: vocab.tokens[token_id] for role, token_id in vocab.roles.items() if role in roles}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=vocab.chat_template,
        clean_up_tokenization_spaces=False,
        **named,
    )
