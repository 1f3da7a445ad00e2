"""What a draft model is opened with, and whether it has the tokens of its target."""

from __future__ import annotations

from dataclasses import replace

from ktransformers.config import EngineConfig
from ktransformers.errors import ConfigError
from ktransformers.tokenizer import Tokenizer

__all__ = ["check_same_tokens", "draft_config", "mtp_layer_config"]

_SHOWN = 3
"""Tokens that an error names."""


def draft_config(target: EngineConfig) -> EngineConfig:
    """Return the configuration of the draft model that `target` names: with the default rules, and with what is said of
    the processor and of GPUs there. It drafts nothing itself; on a GPU its steps of several rows a sequence are
    captured as those of `target` are."""
    path = target.draft_model
    assert path is not None, "no draft model is named"
    has_config = path.is_dir() and (path / "config.json").is_file()
    return EngineConfig(
        model_path=path if has_config else None,
        gguf_path=None if has_config else path,
        chunk_size=target.chunk_size,
        cpu_infer=target.cpu_infer,
        cpu_prefill=target.cpu_prefill,
        cpu_activations=target.cpu_activations,
        cpu_bf16=target.cpu_bf16,
        use_cuda=target.use_cuda,
        use_cuda_graph=target.use_cuda_graph,
        gpu_memory=target.gpu_memory,
        hot_experts="off",
        experts_from="ram",
        trust_remote_code=target.trust_remote_code,
        self_check=target.self_check,
        speculative="ngram",
        speculative_tokens=target.speculative_tokens,
    )


def mtp_layer_config(target: EngineConfig) -> EngineConfig:
    """Return the configuration of the model's own layer for multi-token prediction, as `draft_config` of a draft
    model."""
    return replace(
        target,
        optimize_config_path=None,
        attention_backend="auto",
        hot_experts="off",
        experts_from="ram",
        experts_ram=0.0,
        cpu_memory_size_GB=0.0,
        kv_disk_path=None,
        spread_layers=False,
        self_check=False,
    )


def check_same_tokens(target: Tokenizer, draft: Tokenizer, name: str) -> None:
    """Raise ConfigError unless the draft model called `name` has the target's tokens under the same ids.

    Special tokens may differ, which models of one family add to. Of models without a vocabulary nothing is known.
    """
    if not target.has_vocabulary:
        return
    if not draft.has_vocabulary:
        raise ConfigError(
            f"--draft_model {name} has no tokenizer, so nothing says that its tokens are those of the model; put the "
            "model's tokenizer.json into its folder if they are"
        )
    ours, theirs = _plain_tokens(target), _plain_tokens(draft)
    special = target.added_ids | draft.added_ids
    wrong = sorted(i for i in ours.keys() | theirs.keys() if i not in special and ours.get(i) != theirs.get(i))
    wrong = [i for i in wrong if i not in ours or i not in theirs or target.token_bytes(i) != draft.token_bytes(i)]
    if not wrong:
        return
    shown = ", ".join(f"{i} is {_said(ours.get(i))} there {_said(theirs.get(i))}" for i in wrong[:_SHOWN])
    more = f", and {len(wrong) - _SHOWN} more differ" if len(wrong) > _SHOWN else ""
    raise ConfigError(
        f"--draft_model {name} has other tokens than the model, and can draft nothing for it: token {shown}{more}; "
        "take a smaller model of the same family"
    )


def _plain_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """The tokens by id, as they are spelled."""
    return {token_id: token for token, token_id in tokenizer.backend.get_vocab().items()}


def _said(token: str | None) -> str:
    return "missing" if token is None else repr(token)
