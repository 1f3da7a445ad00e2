"""Table of the fields that Ollama's clients send, and what becomes of each (server/http/fields.py says how). Knows no
model.
"""

from __future__ import annotations

from ktransformers.server.api.sampling_fields import SAMPLING_FIELDS
from ktransformers.server.http.fields import FieldTable, hint, honour, mapped, refuse, within, without_effect

__all__ = ["CHAT", "EMBED", "EMBED_ONE", "GENERATE", "OPTIONS", "PULL", "SHOW"]

OPTIONS: FieldTable = {
    "num_predict": honour(),
    "num_ctx": honour(),
    **SAMPLING_FIELDS,
    "stop": honour(),
    "repeat_last_n": honour(),
    # Samplers that there are none of here.
    "mirostat": refuse("temperature, top_p or min_p", 0),
    "mirostat_tau": hint(),  # these two mean something beside mirostat only
    "mirostat_eta": hint(),
    "typical_p": refuse("top_p or min_p", 1),
    "tfs_z": refuse("top_p or min_p", 1),
    "penalize_newline": refuse("repeat_penalty for all tokens alike", True),
    # How a model is loaded: the server's own flags say that.
    "numa": hint(),
    "num_batch": hint(),
    "num_gpu": hint(),
    "main_gpu": hint(),
    "num_thread": hint(),
    "num_keep": hint(),
    "low_vram": hint(),
    "f16_kv": hint(),
    "logits_all": hint(),
    "vocab_only": hint(),
    "use_mmap": hint(),
    "use_mlock": hint(),
    "embedding_only": hint(),
}
"""`options` of all of them."""

_COMMON: FieldTable = {
    "model": honour(),
    "options": within(OPTIONS),
    "keep_alive": honour(),  # the model stays loaded: only 0, which asks for the opposite, is more than a hint
}

_ANSWER: FieldTable = {
    **_COMMON,
    "stream": honour(),
    "format": honour(""),
    "think": honour(),
    "logprobs": honour(False),
    "top_logprobs": honour(0),
    "truncate": honour(),
    "shift": honour(),
}

CHAT: FieldTable = {**_ANSWER, "messages": honour(), "tools": honour([])}
"""POST /api/chat."""

GENERATE: FieldTable = {
    **_ANSWER,
    "prompt": honour(),
    "system": honour(""),
    "raw": honour(False),
    "template": refuse("raw: true with the whole prompt, or start the server with another chat template", ""),
    "suffix": refuse("prompt alone", ""),
    "images": honour([]),
    "context": refuse("/api/chat with messages", []),
}
"""POST /api/generate."""

_IDLE: FieldTable = {name: hint() if name != "num_ctx" else without_effect() for name in OPTIONS}
"""`options` where nothing is drawn."""

EMBED: FieldTable = {
    **_COMMON,
    "options": within(_IDLE),
    "input": honour(),
    "truncate": honour(),
    "dimensions": honour(0),
    "images": refuse("input as text", []),
}
"""POST /api/embed."""

EMBED_ONE: FieldTable = {**_COMMON, "options": within(_IDLE), "prompt": honour()}
"""POST /api/embeddings."""

SHOW: FieldTable = {"model": honour(), "name": mapped("model"), "verbose": hint()}
"""POST /api/show. name: what older clients call it."""

PULL: FieldTable = {"model": honour(), "name": mapped("model"), "stream": hint(), "insecure": hint()}
"""POST /api/pull."""
