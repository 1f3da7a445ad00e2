"""Families of transformers that run, and why others are refused: one line for each model_type.

Of all causal families, and of the composite ones whose language model has experts. `docs/models.md` is written from
this table (`make families`). tests/models/test_families.py builds a tiny random model of every such family that the
installed transformers has, and holds each line to what it sees; a family without a line fails it by name. To open a
family, put CHECKED into its line. A family that only some versions of transformers have, or that they compute
otherwise, has a line with a version (`Since`). Knows neither configs nor modules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import version

__all__ = [
    "FAMILIES",
    "FAMILY_SUPPORT",
    "NOT_IN_TRANSFORMERS",
    "TESTED_TYPES",
    "Refusal",
    "Since",
    "Support",
    "support_in",
]

Version = tuple[int, int]
"""Of transformers: 5.24.1 is (5, 24)."""


class Support(StrEnum):
    """Ways in which a family that runs is known to agree with transformers.

    TESTED: compared by tests/models in every feature it has, and therefore not while loading. CHECKED: compared by the
    tests as a tiny model of its own defaults, and every model of it while it is loaded (engine/verify/self_check.py).
    """

    TESTED = "tested"
    CHECKED = "checked"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Reason for which a family does not run. means: in words, for docs/models.md. says: what the error says
    (re.search).
    """

    means: str
    says: str


@dataclass(frozen=True, slots=True)
class Since:
    """Families that versions of transformers treat differently: `then` from `version` on, `before` until it.

    version: the first of those tested for which `then` is so. before: None where earlier versions lack the family.
    """

    version: Version
    then: Support | Refusal
    before: Support | Refusal | None = None


TESTED, CHECKED = Support.TESTED, Support.CHECKED

# -- layers that have no cache here

INDEXED = Refusal(
    "an indexer that is not known here chooses the positions that a token sees",
    r"'NoneType' object (?:is not subscriptable|has no attribute 'dtype')",
)
REFERENCES = Refusal("layers see the image, and a window", r"layers of type reference_sliding_attention\b")


# -- attention that goes around the cache

OWN_ATTENTION = Refusal(
    "attention is computed by code of its own, not through transformers' attention interface",
    r"does not say its head_dim|the key 'ktransformers' is missing|attends by (?:code|classes) of its own",
)
LOOPS = Refusal(
    "layers run several times for each token, each time with keys and values of their own", r"n_recurrent_loops"
)
DRAFTS = Refusal(
    "it drafts for another model, as its `--draft_model`, and attends to that model's keys and values",
    r"no keys and values of their own",
)
TWICE = Refusal("a layer attends more than once", r"calls attention 2 times|expert parameters .* do not fit")
DISTANCES = Refusal(
    "attention adds what it has learned of distances to its scores, and no kernel here takes such numbers",
    r"has learned of distances",
)
OWN_MASK = Refusal("layers make a mask of their own", r"passes attention_mask|_MaskStandIn")
OWN_POSITIONS = Refusal(
    "the decoder of an encoder-decoder, which counts positions by transformers' cache",
    r"the embeddings differ from transformers'|in two chunks have the shape",
)
NO_CONTEXT = Refusal(
    "layers do not hand keyword arguments down to attention", r"does not hand keyword arguments down to attention"
)

# -- files and configs

CROSS = Refusal("layers see the image only", r"layer 3 runs 0 times in a step")
ENDLESS = Refusal("the config says no length of a sequence", r"max_position_embeddings -1")
NO_LAYERS = Refusal("bytes go through several models, one inside the other", r"says no num_hidden_layers")
NOT_BUILT = Refusal(
    "transformers itself builds no model from a small config of the family",
    r"requires the timm library|No module named|Class validation error|Validation error for field|"
    r"The set of layer types|no attribute '(?:dropout|vocab_size)'",
)

FAMILIES: Mapping[str, Support | Refusal | Since] = {
    "afmoe": TESTED,
    "apertus": CHECKED,
    "apertus1p5_text": Since((5, 24), CHECKED),
    "arcee": CHECKED,
    "aria_text": CHECKED,
    "axk1": CHECKED,
    "axk2": CHECKED,
    "bailing_hybrid": TESTED,
    "bamba": CHECKED,
    "bart": OWN_POSITIONS,
    "beam": CHECKED,
    "bert": OWN_ATTENTION,
    "bert-generation": OWN_ATTENTION,
    "big_bird": OWN_ATTENTION,
    "bigbird_pegasus": OWN_POSITIONS,
    "biogpt": CHECKED,
    "bitnet": CHECKED,
    "blenderbot": OWN_POSITIONS,
    "blenderbot-small": OWN_POSITIONS,
    "bloom": OWN_ATTENTION,
    "blt": NO_LAYERS,
    "camembert": OWN_ATTENTION,
    "codegen": Since((5, 24), CHECKED, OWN_ATTENTION),
    "cohere": CHECKED,
    "cohere2": CHECKED,
    "cohere2_moe": TESTED,
    "cohere_compass_text": TESTED,
    "cpmant": OWN_ATTENTION,
    "ctrl": CHECKED,
    "cwm": CHECKED,
    "data2vec-text": OWN_ATTENTION,
    "dbrx": CHECKED,
    "deepseek_v2": TESTED,
    "deepseek_v3": TESTED,
    "deepseek_v32": TESTED,
    "deepseek_v4": TESTED,
    "deepseek_v41": TESTED,
    "diffllama": TWICE,
    "doge": OWN_MASK,
    "dory": Since((5, 24), LOOPS),
    "dots1": TESTED,
    "dots3_note": CHECKED,
    "dots3_note_text": CHECKED,
    "electra": OWN_ATTENTION,
    "emu3": CHECKED,
    "ernie": OWN_ATTENTION,
    "ernie4_5": CHECKED,
    "ernie4_5_moe": TESTED,
    "exaone": Since((5, 24), CHECKED),
    "exaone4": CHECKED,
    "exaone_moe": TESTED,
    "falcon": OWN_ATTENTION,
    "falcon_h1": TESTED,
    "falcon_mamba": TESTED,
    "flex_olmo": TESTED,
    "flint": CHECKED,
    "fuyu": CHECKED,
    "gemma": CHECKED,
    "gemma2": TESTED,
    "gemma3": CHECKED,
    "gemma3_text": TESTED,
    "gemma3n": NOT_BUILT,
    "gemma3n_text": TESTED,
    "gemma4": CHECKED,
    "gemma4_assistant": NOT_BUILT,
    "gemma4_text": TESTED,
    "gemma4_unified": CHECKED,
    "gemma4_unified_assistant": Since((5, 24), DRAFTS, NOT_BUILT),
    "gemma4_unified_text": CHECKED,
    "git": OWN_ATTENTION,
    "glm": CHECKED,
    "glm4": CHECKED,
    "glm4_moe": TESTED,
    "glm4_moe_lite": TESTED,
    "glm_moe_dsa": TESTED,
    "got_ocr2": CHECKED,
    "gpt-sw3": CHECKED,
    "gpt2": CHECKED,
    "gpt_bigcode": CHECKED,
    "gpt_neo": OWN_ATTENTION,
    "gpt_neox": TESTED,
    "gpt_neox_japanese": OWN_ATTENTION,
    "gpt_oss": TESTED,
    "gptj": Since((5, 24), CHECKED, OWN_ATTENTION),
    "granite": CHECKED,
    "granite_swa": CHECKED,
    "granitemoe": TESTED,
    "granitemoe_swa": CHECKED,
    "granitemoehybrid": TESTED,
    "granitemoeshared": TESTED,
    "helium": CHECKED,
    "hrm_text": OWN_ATTENTION,
    "hunyuan_v1_dense": CHECKED,
    "hunyuan_v1_moe": TESTED,
    "hy_v3": TESTED,
    "hy_v4": CHECKED,
    "hyperclovax": CHECKED,
    "inkling2_loop_text": Since((5, 24), DISTANCES),
    "inkling2_text": DISTANCES,
    "inkling_text": DISTANCES,
    "internlm3": CHECKED,
    "iquestcoder": CHECKED,
    "jais2": CHECKED,
    "jamba": TESTED,
    "jetmoe": CHECKED,
    "kimi_linear": TESTED,
    "kolibri1": CHECKED,
    "laguna": TESTED,
    "lara_mini": Since((5, 24), CHECKED),
    "lfm2": CHECKED,
    "lfm2_moe": TESTED,
    "lfm3": TESTED,
    "llama": TESTED,
    "llama4": CHECKED,
    "llama4_text": TESTED,
    "longcat_flash": TESTED,
    "mamba": TESTED,
    "mamba2": TESTED,
    "marian": OWN_POSITIONS,
    "mbart": OWN_POSITIONS,
    "megatron-bert": OWN_ATTENTION,
    "mellum": TESTED,
    "mimo_v2_flash": TESTED,
    "minicpm3": CHECKED,
    "minimax": TESTED,
    "minimax_m2": TESTED,
    "minimax_m3_vl_text": TESTED,
    "ministral": CHECKED,
    "ministral3": TESTED,
    "mistral": TESTED,
    "mixtral": TESTED,
    "mllama": CROSS,
    "modernbert-decoder": CHECKED,
    "moshi": Since((5, 23), CHECKED, NO_CONTEXT),
    "moss_transcribe_diarize": CHECKED,
    "mpt": OWN_ATTENTION,
    "musicgen": NOT_BUILT,
    "musicgen_melody": NOT_BUILT,
    "mvp": OWN_MASK,
    "nanochat": CHECKED,
    "nemotron": TESTED,
    "nemotron_h": TESTED,
    "olmo": CHECKED,
    "olmo2": CHECKED,
    "olmo3": TESTED,
    "olmo_hybrid": TESTED,
    "olmoe": TESTED,
    "openai-gpt": OWN_ATTENTION,
    "opt": CHECKED,
    "pegasus": OWN_POSITIONS,
    "persimmon": CHECKED,
    "phi": CHECKED,
    "phi3": TESTED,
    "phi4_multimodal": CHECKED,
    "phimoe": TESTED,
    "plbart": OWN_POSITIONS,
    "prophetnet": OWN_ATTENTION,
    "qwen2": TESTED,
    "qwen2_moe": TESTED,
    "qwen3": TESTED,
    "qwen3_5": CHECKED,
    "qwen3_5_moe": CHECKED,
    "qwen3_5_moe_text": TESTED,
    "qwen3_5_text": CHECKED,
    "qwen3_moe": TESTED,
    "qwen3_next": TESTED,
    "qwen4_exp": CHECKED,
    "qwen4_exp_text": TESTED,
    "recurrent_gemma": TESTED,
    "reformer": OWN_ATTENTION,
    "rembert": OWN_ATTENTION,
    "roberta": OWN_ATTENTION,
    "roberta-prelayernorm": OWN_ATTENTION,
    "roc_bert": OWN_ATTENTION,
    "roformer": OWN_ATTENTION,
    "rwkv": OWN_ATTENTION,
    "sarvam_mla": Since((5, 24), CHECKED),
    "sarvam_moe": Since((5, 24), CHECKED),
    "seed_oss": CHECKED,
    "smollm3": TESTED,
    "solar_open": TESTED,
    "stablelm": TESTED,
    "starcoder2": CHECKED,
    "trocr": OWN_MASK,
    "vaultgemma": CHECKED,
    "whisper": OWN_POSITIONS,
    "xglm": OWN_ATTENTION,
    "xlm": OWN_ATTENTION,
    "xlm-roberta": OWN_ATTENTION,
    "xlm-roberta-xl": OWN_ATTENTION,
    "xlnet": ENDLESS,
    "xlstm": OWN_ATTENTION,
    "xmod": OWN_ATTENTION,
    "youtu": CHECKED,
    "zamba": TESTED,
    "zamba2": TESTED,
    "zaya": TESTED,
    # Families that AutoModelForCausalLM does not know: a language model with experts inside of one for images.
    "aria": CHECKED,
    "deepseek_ocr2": CHECKED,
    "ernie4_5_vl_moe": CHECKED,
    "glm4v_moe": CHECKED,
    "glm5_next": CHECKED,
    "glm5_next_text": TESTED,
    "hy_v4_vl": Since((5, 24), CHECKED),
    "inkling2": DISTANCES,
    "inkling2_loop": Since((5, 24), DISTANCES),
    "inkling_mm_model": NOT_BUILT,
    "kimi_k25": CHECKED,
    "minimax_m3_vl": CHECKED,
    "mistral4": CHECKED,
    "mistral_large4": INDEXED,
    "muse_glimmer": CHECKED,
    "muse_spark": CHECKED,
    "nemotron_h_omni": CHECKED,
    "qwen3_omni_moe_thinker": CHECKED,
    "qwen3_vl_moe": CHECKED,
    "step3p7": CHECKED,
    "unlimited_ocr": REFERENCES,
}
"""By model_type of a model's config. One line is one family."""

_HYPER_LATENT = (
    "latent attention between hyper-connections, whose streams end in their mean; its own Python code computes it"
)

NOT_IN_TRANSFORMERS: Mapping[str, str] = {
    "kimi_k3": (
        "residuals across blocks of layers, experts in a narrower space, a gate behind latent attention that rotates "
        "nothing, and an activation of its own (SiTU); its own Python code computes it, and transformers' pull request "
        "47670 is open"
    ),
    "telechat4": _HYPER_LATENT,
    "xing4_0": _HYPER_LATENT,
    "xingchen4": _HYPER_LATENT,
}
"""By model_type of published configs that no version of transformers has a class for: what it would have to compute."""


def support_in(transformers: Version) -> dict[str, Support | Refusal]:
    """Return what FAMILIES says for one version of transformers. Families that it lacks are as in later ones."""
    return {name: _in_version(line, transformers) for name, line in FAMILIES.items()}


def _in_version(line: Support | Refusal | Since, transformers: Version) -> Support | Refusal:
    if not isinstance(line, Since):
        return line
    return line.then if line.before is None or transformers >= line.version else line.before


def _installed() -> Version:
    major, minor = re.findall(r"\d+", version("transformers"))[:2]
    return int(major), int(minor)


FAMILY_SUPPORT: Mapping[str, Support | Refusal] = support_in(_installed())
"""What FAMILIES says for the installed transformers."""

TESTED_TYPES = frozenset(name for name, support in FAMILY_SUPPORT.items() if support is Support.TESTED)
"""Model types whose logits tests/models compares with transformers'; others are compared while loading."""
