"""Loads a model's tokenizer: from a local folder, or the metadata of a GGUF file."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ktransformers.errors import ConfigError, UnsupportedError, reason_of
from ktransformers.system.file_kinds import why_not_json
from ktransformers.tokenizer.gguf_vocab import build_gguf_tokenizer, read_gguf_vocab
from ktransformers.tokenizer.growth import why_too_much
from ktransformers.tokenizer.tiktoken_file import TIKTOKEN_FILE, load_kimi_tokenizer
from ktransformers.tokenizer.tokenizer import Tokenizer

__all__ = ["has_tokenizer_files", "load_tokenizer", "read_chat_template"]

_log = logging.getLogger(__name__)

_FOLDER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
    TIKTOKEN_FILE,
)


def _load_folder(path: Path, trust_remote_code: bool) -> PreTrainedTokenizerFast:
    if (path / TIKTOKEN_FILE).is_file() and not (path / "tokenizer.json").is_file():
        return load_kimi_tokenizer(path)
    if (path / "tokenizer.json").is_file():
        why = why_too_much((path / "tokenizer.json").read_bytes())
        if why is not None:
            raise ConfigError(f"{path / 'tokenizer.json'} cannot be used: {why}")
    try:
        backend = AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=trust_remote_code, local_files_only=True, use_fast=True
        )
    except BaseException as error:
        # The tokenizers library raises bare Exception for files that it cannot use, or panics, which is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        broken = _broken_file(path)
        if broken is not None:
            raise ConfigError(broken) from error
        why = reason_of(error)
        if "trust_remote_code" in str(error):
            why = "it is Python code that comes with the model; --trust_remote_code runs it, for who trusts its author"
        elif not (path / "tokenizer.json").is_file():
            why = "tokenizer.json is missing; copy it there from the original model"
        raise ConfigError(f"the tokenizer in {path} cannot be loaded: {why}") from error
    if not getattr(backend, "is_fast", False):
        raise UnsupportedError(f"the tokenizer in {path} has no fast version (tokenizer.json); this program needs one")
    if backend.backend_tokenizer.get_vocab_size(with_added_tokens=False) < 2:
        raise ConfigError(
            f"the tokenizer in {path} has no vocabulary; copy tokenizer.json there from the original model"
        )
    why = _wrong_template(backend.chat_template)
    if why is not None:
        raise ConfigError(f"the tokenizer in {path} cannot be used: its chat_template {why}; see tokenizer_config.json")
    return backend


def _wrong_template(template: object) -> str | None:
    """What is wrong with a chat template as transformers has read it: text, or texts by name; None: nothing."""
    texts = template.values() if isinstance(template, dict) else [] if template is None else [template]
    odd = next((text for text in texts if not isinstance(text, str)), None)
    return None if odd is None else f"must be text, or a list of templates with names, and holds {odd!r:.40}"


def _broken_file(folder: Path) -> str | None:
    """The first of the tokenizer's files that is not JSON, and where; None when all are."""
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json"):
        path = folder / name
        data = path.read_bytes() if path.is_file() else b"{}"
        try:
            json.loads(data)
        except (ValueError, RecursionError) as error:
            return f"{path} {why_not_json(data, error)}"
    return None


def has_tokenizer_files(folder: Path) -> bool:
    """Whether a model's folder holds a tokenizer in any of the forms that there are."""
    return any((folder / name).is_file() for name in _FOLDER_FILES)


def load_tokenizer(
    model_path: Path | None,
    gguf_metadata: Mapping[str, object] | None,
    *,
    trust_remote_code: bool = False,
    vocab_size: int | None = None,
) -> Tokenizer:
    """Load the tokenizer in the folder `model_path`, else that in a GGUF file's metadata, else one without vocabulary.

    A folder's tokenizer without chat template takes the GGUF file's, and one that cannot be loaded gives way to it.
    vocab_size: of the GGUF's model, see read_gguf_vocab.
    Raises ConfigError or UnsupportedError.
    """
    metadata = gguf_metadata or {}
    model = metadata.get("tokenizer.ggml.model", "no_vocab")
    has_vocab = not isinstance(model, str) or model not in ("no_vocab", "none")
    if model_path is not None and has_tokenizer_files(Path(model_path)):
        try:
            backend = _load_folder(Path(model_path), trust_remote_code)
        except (ConfigError, UnsupportedError) as error:
            if not has_vocab:
                raise
            _log.warning("%s; using the GGUF file's", error)
        else:
            template = metadata.get("tokenizer.chat_template")
            if backend.chat_template is None and isinstance(template, str):
                _log.info("the tokenizer in %s has no chat template; using the GGUF file's", model_path)
                backend.chat_template = template
            return Tokenizer(backend)
    if not has_vocab:
        _log.info("no tokenizer found: this model takes token ids only")
        return Tokenizer(None)
    vocab = read_gguf_vocab(metadata, vocab_size)
    return Tokenizer(build_gguf_tokenizer(vocab), vocab.eos_token_ids())


def read_chat_template(value: str) -> str:
    """Return the source of a chat template: `value` itself where that is Jinja, else what the file of this name holds.

    Raises ConfigError when there is no such file.
    """
    if "{{" in value or "{%" in value:
        return value
    try:
        return Path(value).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = reason_of(error)
        raise ConfigError(
            f"--chat_template {value[:200]!r} is neither a file that can be read ({why}) nor a template, which has "
            "{{ or {% in it; names of templates built into other programs are not known here"
        ) from error
