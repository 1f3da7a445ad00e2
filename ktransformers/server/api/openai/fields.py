"""Table of the fields that OpenAI's routes and vLLM's know, and what becomes of each (http/fields.py says how). Knows
no model.

OpenAI's names are joined by those of vLLM, SGLang, llama.cpp, Ollama, DeepSeek and OpenRouter, whose clients send them
by habit. `docs/server.md` has the same as a table for readers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktransformers.errors import FieldError
from ktransformers.server.api.sampling_fields import SAMPLING_FIELDS, SCHEDULING_FIELDS
from ktransformers.server.http.fields import FieldRule, FieldTable, hint, honour, inside, mapped, refuse, without_effect

__all__ = [
    "CHAT_FIELDS",
    "COMPLETION_FIELDS",
    "CONSTRAINT_FIELDS",
    "DETOKENIZE_FIELDS",
    "EMBEDDING_FIELDS",
    "GENERATION_FIELDS",
    "TOKENIZE_FIELDS",
]

_SAMPLER = "temperature, top_p, top_k or min_p"
_NO_LIMIT = (-1, -2)  # llama.cpp: without end; until the context is full
_MAX_TOP = 20


def _hints(*names: str) -> dict[str, FieldRule]:
    return dict.fromkeys(names, hint())


def _on_or_off(value: Any) -> dict[str, Any]:
    """`think` of Ollama: a bool, or how much."""
    if isinstance(value, bool):
        return {"enable_thinking": value}
    if isinstance(value, str) and value:
        return {"reasoning_effort": value}
    raise FieldError("it must be true, false, or low, medium or high", "")


def _thinking(value: Any) -> dict[str, Any]:
    """`thinking` of Anthropic, GLM and DeepSeek: {"type": "enabled", "budget_tokens": N}."""
    if not isinstance(value, dict):
        return _on_or_off(value)
    types = {"enabled": True, "disabled": False, "adaptive": None, "auto": None, None: None}
    kind = value.get("type")
    if not isinstance(kind, str | None) or kind not in types:
        raise FieldError("its type must be enabled or disabled", "")
    return {"enable_thinking": types[kind], "thinking_budget": value.get("budget_tokens") if types[kind] else None}


def _reasoning(value: Any) -> dict[str, Any]:
    """`reasoning` of OpenRouter and of OpenAI's other API: {"effort", "max_tokens", "enabled"}."""
    if not isinstance(value, dict):
        return _on_or_off(value)
    return {
        "reasoning_effort": value.get("effort"),
        "thinking_budget": value.get("max_tokens"),
        "enable_thinking": value.get("enabled"),
    }


def _format(value: Any) -> dict[str, Any]:
    """`format` of Ollama: "json", or a schema."""
    if value == "json":
        return {"response_format": {"type": "json_object"}}
    schema = {"name": "format", "schema": value}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _transforms(value: Any) -> Mapping[str, Any]:
    """OpenRouter's list of what may be done to a conversation that is too long."""
    return {"truncate_prompt_tokens": -1} if isinstance(value, list) and "middle-out" in value else {}


def _top_logprobs(value: Any) -> Mapping[str, Any]:
    """`n_probs` of llama.cpp for a chat."""
    return {"logprobs": True, "top_logprobs": _at_most(value)}


def _at_most(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return min(value, _MAX_TOP) if is_number else value


_ORDER = ("penalties", "dry", "top_n_sigma", "top_k", "tfs_z", "typ_p", "top_p", "min_p", "xtc", "temperature")
_LETTERS = dict(zip("edskfypmxt", _ORDER, strict=True))
_OTHER_WORDS = {"typical_p": "typ_p", "typical": "typ_p", "temp": "temperature", "top-k": "top_k", "top-p": "top_p"}
_NEEDED = frozenset({"top_k", "top_p", "min_p", "temperature"})
"""Samplers that there are here: an order without one of them would leave out what a request says."""


def _samplers(value: Any) -> Mapping[str, Any]:
    """`samplers` of llama.cpp, as names, names parted by semicolons, or letters: taken in their default order."""
    names = value.split(";") if isinstance(value, str) and ";" in value else value
    if isinstance(names, str):
        names = [_LETTERS.get(letter, letter) for letter in names]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FieldError("it must be a list of names", "")
    asked = [_OTHER_WORDS.get(name.lower(), name.lower()) for name in names]
    if asked != [name for name in _ORDER if name in asked] or not set(asked) >= _NEEDED:
        raise FieldError(f"only the default order is served; leave it out, and use {_SAMPLER}", "")
    return {}


_OTHER_PROMPTS = (
    "prompt_embeds", "input_embeds", "inputs_embeds", "input_ids", "prompt_token_ids", "instruction", "instructions",
    "system", "system_prompt", "input", "inputs", "images", "image_data", "audio_data", "video_data",
    "multi_modal_data", "multimodal_data", "tool_prompt",
)  # fmt: skip


def _refused(nearest: str, *names: str) -> dict[str, FieldRule]:
    return dict.fromkeys(names, refuse(nearest, "", [], {}))


GENERATION_FIELDS: FieldTable = {
    "model": honour(),
    "stream": honour(),
    "stream_options": honour({}),
    "n": honour(),
    **SAMPLING_FIELDS,
    **SCHEDULING_FIELDS,
    "stop": honour("", [], [""]),
    "logit_bias": honour({}),
    "max_tokens": honour(*_NO_LIMIT),
    "min_tokens": honour(0),
    "stop_token_ids": honour([]),
    "allowed_token_ids": honour(),
    "include_stop_str_in_output": honour(False),
    "skip_special_tokens": honour(True),
    "return_speed": honour(),
    "prediction": honour(),
    # Other programs' names.
    "n_predict": mapped("max_tokens", *_NO_LIMIT),
    "num_predict": mapped("max_tokens", *_NO_LIMIT),
    "max_new_tokens": mapped("max_tokens", *_NO_LIMIT),
    "max_gen_len": mapped("max_tokens"),
    "stop_sequences": mapped("stop", []),
    "stop_strings": mapped("stop", []),
    "random_seed": mapped("seed"),
    "options": inside(
        _hints(
            "num_gpu", "num_thread", "num_batch", "num_keep", "main_gpu", "low_vram", "use_mmap", "use_mlock", "numa",
            "vocab_only", "f16_kv",
        )
    ),
    "extra_body": inside({}),
    "num_ctx": without_effect(),
    "repeat_last_n": without_effect(-1),
    "penalize_newline": without_effect(True, False),
    # About speed, storage, billing and tracing.
    **_hints(
        "user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "store", "service_tier",
        "verbosity", "request_id", "rid", "cache_prompt", "id_slot", "slot_id", "n_keep",
        "timings_per_token", "return_progress", "stream_tool_calls", "api_key", "session_id", "provider",
        "keep_alive", "kv_transfer_params", "mm_processor_kwargs", "bootstrap_host", "include_reasoning",
        "separate_reasoning", "return_tokens_as_token_ids", "vllm_xargs",
    ),
    # Taken at the value that changes nothing.
    "spaces_between_special_tokens": refuse("skip_special_tokens", True),
    "bad_words": refuse("logit_bias", []),
    "length_penalty": refuse("repetition_penalty", 1),
    "use_beam_search": refuse("best_of in /v1/completions", False),
    "early_stopping": refuse("stop", False),
    "truncate_prompt_tokens": honour(),
    "transforms": mapped(_transforms, []),
    "no_stop_trim": mapped("include_stop_str_in_output", False),
    "mirostat": refuse(_SAMPLER, 0),
    "typical_p": refuse(_SAMPLER, 1),
    "tfs_z": refuse(_SAMPLER, 1),
    "dynatemp_range": refuse("temperature", 0),
    "xtc_probability": refuse(_SAMPLER, 0),
    "dry_multiplier": refuse("repetition_penalty", 0),
    "top_n_sigma": refuse(_SAMPLER, -1, 0),
    "top_a": refuse("min_p", 0),
    "lora": refuse("a model with the adapter merged in", []),
    "lora_path": refuse("a model with the adapter merged in"),
    "logits_processors": refuse("logit_bias", []),
    "custom_logit_processor": refuse("logit_bias", ""),
    "samplers": mapped(_samplers, []),
    "sampler_seq": mapped(_samplers, ""),
    "typ_p": mapped("typical_p", 1),
    "min_new_tokens": mapped("min_tokens", 0),
    # Another prompt than the one that is read here.
    **_refused("messages or prompt, as text", *_OTHER_PROMPTS),
    # They tune what is refused unless it is off.
    **_hints(
        "mirostat_tau", "mirostat_eta", "dynatemp_exponent", "xtc_threshold", "dry_base", "dry_allowed_length",
        "dry_penalty_last_n", "dry_sequence_breakers",
    ),
}  # fmt: skip
"""What both routes know."""

CONSTRAINT_FIELDS: FieldTable = {
    "response_format": honour({"type": "text"}),
    **dict.fromkeys(
        (
            "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema",
            "grammar",
        ),
        honour(""),
    ),
    "regex": mapped("guided_regex", ""),
    "ebnf": mapped("guided_grammar", ""),
    "structural_tag": refuse("structured_outputs", ""),
}  # fmt: skip
"""What an answer's text has to look like: answers/constraints.py."""

CHAT_FIELDS: FieldTable = {
    **GENERATION_FIELDS,
    **CONSTRAINT_FIELDS,
    "messages": honour(),
    "max_completion_tokens": honour(*_NO_LIMIT),
    "logprobs": honour(),
    "top_logprobs": honour(0),
    "tools": honour([]),
    "tool_choice": honour(),
    "parallel_tool_calls": honour(True),
    "functions": honour([]),
    "function_call": honour(),
    "reasoning_effort": honour(""),
    "enable_thinking": honour(),
    "thinking_budget": honour(-1),
    "chat_template_kwargs": honour({}),
    "add_generation_prompt": honour(),
    "continue_final_message": honour(False),
    "n_probs": mapped(_top_logprobs, 0),
    "think": mapped(_on_or_off),
    "thinking": mapped(_thinking),
    "reasoning": mapped(_reasoning),
    "reasoning_budget": mapped("thinking_budget", -1),
    "thinking_token_budget": mapped("thinking_budget", -1),
    "format": mapped(_format, ""),
    "return_token_ids": hint(),
    "reasoning_format": without_effect("auto", "deepseek"),
    "modalities": refuse("text", ["text"]),
    "audio": refuse("text"),
    "web_search_options": refuse("a tool of your own"),
    "documents": refuse("messages", []),
    **_refused("messages", "prompt"),
    "chat_template": refuse("the model's own template"),
    "echo": refuse("/v1/completions", False),
    "prompt_logprobs": refuse("/v1/completions with echo and logprobs"),
    "best_of": refuse("n", 1),
}
"""POST /v1/chat/completions."""

COMPLETION_FIELDS: FieldTable = {
    **GENERATION_FIELDS,
    **CONSTRAINT_FIELDS,
    "prompt": honour(),
    "return_token_ids": honour(),
    "logprobs": honour(),
    "echo": honour(),
    "best_of": honour(),
    "n_probs": mapped(lambda value: {"logprobs": _at_most(value)}, 0),
    "suffix": refuse("a prompt with the model's own tokens for filling in", ""),
    "add_special_tokens": refuse("prompt as token ids", True),
    "prompt_logprobs": refuse("echo and logprobs"),
    "format": mapped(_format, ""),
}
"""POST /v1/completions."""

EMBEDDING_FIELDS: FieldTable = {
    **dict.fromkeys(("model", "input", "encoding_format", "dimensions", "priority", "timeout"), honour()),
    "content": mapped("input"),
    "extra_body": inside({}),
    "add_special_tokens": refuse("input as token ids", True),
    **dict.fromkeys(("truncate_prompt_tokens", "truncation_side"), honour()),
    **_refused(
        "the instruction's words in front of each input",
        "instruction",
        "instruct",
        "prompt",
        "prompt_name",
        "task",
        "task_type",
        "input_type",
    ),
    **_refused("input", "prompt_embeds", "input_embeds", "inputs_embeds", "input_ids", "prompt_token_ids", "images"),
    "normalize": refuse("the vectors of length 1 as they are", True),
    "embd_normalize": refuse("the vectors of length 1 as they are", 2),
    **_hints("user", "metadata", "store", "service_tier", "request_id", "rid", "api_key", "mm_processor_kwargs"),
}
"""POST /v1/embeddings."""

_OF_PROMPTS = (
    "model", "messages", "tools", "tool_choice", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message", "reasoning_effort", "enable_thinking", "thinking_budget", "think", "thinking",
    "reasoning", "reasoning_budget", "thinking_token_budget", "extra_body", "chat_template", "documents",
)  # fmt: skip
"""What shapes a chat's prompt."""

TOKENIZE_FIELDS: FieldTable = {
    **dict.fromkeys(CHAT_FIELDS, hint()),  # how an answer is drawn, which is not asked for here
    **{name: CHAT_FIELDS[name] for name in (*_OF_PROMPTS, *_OTHER_PROMPTS)},
    **dict.fromkeys(("prompt", "add_special_tokens", "return_token_strs"), honour()),
    "functions": refuse("tools", []),
    "content": mapped("prompt"),
    "add_special": mapped("add_special_tokens"),
    "parse_special": refuse("prompt without special tokens", True),
    "with_pieces": refuse("return_token_strs", False),
}
"""POST /tokenize."""

DETOKENIZE_FIELDS: FieldTable = {
    "model": honour(),
    "tokens": honour(),
    "skip_special_tokens": refuse("tokens without the special ones", False),
}
"""POST /detokenize."""
