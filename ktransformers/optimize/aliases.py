"""Resolves names in rule files to the classes of today.

Match side: upstream's model classes, those of transformers, torch and what is imported already. Replace side:
upstream's operator names of both families and our own classes. Whoever trusts the rules may name classes of other
modules, which are imported then. Knows names only, no rule syntax.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import logging
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ktransformers.models.registry import custom_models, family_of
from ktransformers.operators.base import Operator

__all__ = [
    "OLD_KWARGS",
    "OLD_OPS",
    "OPERATOR_ALIASES",
    "NameProblem",
    "legacy_names",
    "match_class",
    "nearest",
    "operator_class",
    "undriven_hardware",
]


logger = logging.getLogger(__name__)


class NameProblem(Exception):
    """A name does not resolve; the message says why and, where there is one, the nearest valid name."""


MODELS_PREFIX = "ktransformers.models."
OPERATORS_PREFIX = "ktransformers.operators."


@dataclass(frozen=True, slots=True)
class _Operator:
    """An operator that rule files may name. name: MODULE.CLASS as they say it. home: the module that defines it.

    upstream: {upstream's module: its names for it there}. All modules are under ktransformers.operators.
    """

    name: str
    home: str
    upstream: Mapping[str, str] = field(default_factory=dict)

    @property
    def class_name(self) -> str:
        """Name of the class alone."""
        return self.name.rpartition(".")[2]

    def names(self) -> Iterator[str]:
        """Yield every dotted name that means it, its own first."""
        yield self.name
        for module, names in self.upstream.items():
            yield from (f"{module}.{name}" for name in names.split())


_OPERATORS = (
    _Operator("linear.KTransformersLinear", "linear.linear", {"linear": "KTransformerLinear"}),
    _Operator(
        "experts.KTransformersExperts",
        "experts.routed",
        {"experts": "KTransformersExpertsV2 KGlm4Experts KTransformersMLPExpert"},
    ),
    _Operator(
        "moe.KMoEBlock",
        "experts.block",
        {
            "experts": "KDeepseekV2MoE KDeepseekV3MoE KDeepseekV3MoEV2 KQwen2MoeSparseMoeBlock "
            "KQwen2MoeSparseMoeBlockV2 KQwen3MoeSparseMoeBlock KQwen3MoeSparseMoeBlockV2 KMistralSparseMoEBlock "
            "KGlm4MoeMoE KHunyuanMoE "
            # of the first releases; the second one is spelt like that
            "DeepseekV2MoEInjected KMisrtalSparseMoEBlock Qwen2MoeSparseMoeBlockInjected"
        },
    ),
    _Operator("moe.KScaledMoEBlock", "experts.scaled"),
    _Operator("experts.KExpertLinear", "experts.single"),
    _Operator("router.KRouter", "experts.router", {"gate": "KMoEGate KMoEGateQwen2Moe KMoEGateDeepSeekV3"}),
    _Operator(
        "attention.KAttention",
        "attention.gqa",
        {
            "attention": "KLlamaAttention KHunYuanAttention",
            "balance_serve_attention": "KQwen2MoeAttention KQwen3MoeAttention KGlm4MoeAttention KHunYuanAttention",
        },
    ),
    _Operator(
        "mla.KMLAAttention",
        "attention.mla",
        {
            "attention": "KDeepseekV2Attention KDeepseekV3Attention DeepseekV2AttentionInjected flashinfer_attn",
            "balance_serve_attention": "flashinfer_attn deepseek_torch_attn",
        },
    ),
    _Operator("compressed.KCompressedAttention", "attention.compressed"),
    _Operator("shared.KSharedCompressedAttention", "attention.shared"),
    _Operator("engram.KEngram", "attention.engram"),
    _Operator("lagged.KLaggedConnection", "layers.lagged"),
    _Operator("hyper.KHyperConnection", "layers.hyper"),
    _Operator("hyper.KGatedStreams", "layers.hyper"),
    _Operator(
        "model.KModel",
        "layers.model",
        {
            "models": "KDeepseekV2Model KDeepseekV3Model KQwen2MoeModel KQwen3MoeModel KLlamaModel KMixtralModel "
            "KGlm4MoeModel KHunyuanModel",
            # where these lived before `models`
            "layer_wise_prefill": "KDeepseekV2Model KQwen2MoeModel DeepseekV2ModelPerLayerPrefill "
            "Qwen2MoeModelPerLayerPrefill DeepseekV2ModelKTransformers Qwen2MoeModelKTransformers",
        },
    ),
    _Operator(
        "rope.KRotaryEmbedding",
        "attention.rope",
        {
            "RoPE": "RotaryEmbedding RotaryEmbeddingV2 RotaryEmbeddingV3 RotaryEmbeddingV4 YarnRotaryEmbedding "
            "YarnRotaryEmbeddingV2 YarnRotaryEmbeddingV3 DynamicNTKScalingRotaryEmbedding KQwen2MoeRotaryEmbedding "
            "KQwen3MoeRotaryEmbedding KGlm4MoeRotaryEmbedding KHunYuanRotaryEmbedding"
        },
    ),
    _Operator(
        "norm.KRMSNorm",
        "norm",
        {
            "layernorm": "RMSNorm KQwen2MoeRMSNorm KQwen3MoeRMSNorm KGlm4MoeRMSNorm KHunYuanRMSNorm "
            "DeepseekV3RMSNormTorch"
        },
    ),
    _Operator("mlp.KMLP", "linear.mlp", {"mlp": "kDeepseekV3MLP KQwen2MoeMLP KQwen3MoeMLP KGlm4MoeMLP KHunYuanMLP"}),
    _Operator("indexer.KIndexer", "attention.indexer"),
    _Operator("indexer.KBlockIndexer", "attention.indexer"),
    _Operator("indexer.KPooledIndexer", "attention.indexer"),
    _Operator("embedding.KEmbedding", "linear.embedding"),
    _Operator("activation.KActivation", "activation"),
    _Operator("recurrent.KRecurrent", "recurrent.kinds"),
    _Operator("recurrent.KConvolvedProjection", "recurrent.convolved"),
    _Operator("recurrent.KGatedDeltaNet", "recurrent.delta"),
    _Operator("recurrent.KGatedDeltaParts", "recurrent.delta"),
    _Operator("recurrent.KKimiDeltaAttention", "recurrent.delta"),
    _Operator("recurrent.KGatedLinearUnit", "recurrent.gated_linear"),
    _Operator("recurrent.KMamba", "recurrent.mamba"),
    _Operator("recurrent.KMamba2", "recurrent.mamba"),
    _Operator("recurrent.KMambaHeads", "recurrent.mamba"),
    _Operator("recurrent.KShortConv", "recurrent.short"),
    _Operator("recurrent.KLightningAttention", "recurrent.short"),
    _Operator("recurrent.KPerLayerEmbedding", "recurrent.ngram_embedding"),
)

_DEFINED_AS = {
    f"{OPERATORS_PREFIX}{operator.name}": f"{OPERATORS_PREFIX}{operator.home}.{operator.class_name}"
    for operator in _OPERATORS
}

OPERATOR_ALIASES: dict[str, str] = {
    f"{OPERATORS_PREFIX}{name}": f"{OPERATORS_PREFIX}{operator.name}"
    for operator in _OPERATORS
    for name in operator.names()
}
"""Every operator name that rule files may use -> the class that it means. Canonical names map to themselves."""

OLD_KWARGS = {f"{phase}_{kind}_type": f"{phase}_op" for phase in ("generate", "prefill") for kind in ("linear", "mlp")}
"""Keyword arguments of the first releases -> what they are called since."""

OLD_OPS = {
    "QuantizedLinearMarlin": "KLinearMarlin",
    "QuantizedLinearTorch": "KLinearTorch",
    "QuantizedLinearCPUInfer": "KLinearCPUInfer",
    "MLPCPUExperts": "KExpertsCPU",
    "MLPExpertsMarlin": "KExpertsMarlin",
    "MLPExpertsTorch": "KExpertsTorch",
    "KMoEGateNative": "KRouterNative",
    "KMoEGateTriton": "KRouterTriton",
    "KMoEGateTorch": "KRouterTorch",
}
"""Op names of the first releases -> what they are called since."""

_UNDRIVEN = (
    (re.compile(r"ascend|NPU", re.IGNORECASE), "Ascend NPUs"),
    (re.compile(r"IPEX", re.IGNORECASE), "Intel's IPEX"),
    (re.compile(r"XPU", re.IGNORECASE), "Intel XPUs"),
)

_KNOWN_PACKAGES = frozenset({"ktransformers", "transformers", "torch"})  # that run here anyway

_MODEL_MODULES = {family.upstream.module: name for name, family in custom_models.items() if family.upstream is not None}
_ROPE_VARIANT = re.compile(r"(Linear|LinearScaling|DynamicNTKScaling|DynamicNTKAlpha|Yarn)(?=RotaryEmbedding$)")


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return `; did you mean X?` for the closest candidate, or the empty string."""
    found = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


def undriven_hardware(name: str) -> str | None:
    """Return what hardware an operator's or op's name is for, when it is one that this project does not drive."""
    return next((hardware for pattern, hardware in _UNDRIVEN if pattern.search(name)), None)


def operator_class(name: str, trust: bool = False) -> type[Operator]:
    """Return the operator that `name` means on the replace side. trust: whether it may be a user's own. Raises
    NameProblem.
    """
    hardware = undriven_hardware(name)
    if hardware is not None:
        raise NameProblem(f"operator {name} is for {hardware}, hardware that ktransformers does not drive")
    target = OPERATOR_ALIASES.get(name)
    if target is None and name.startswith(OPERATORS_PREFIX):
        raise NameProblem(f"unknown operator {name}{_nearest_operator(name)}")
    if target is None and not trust and not _is_known_code(name):
        raise _untrusted(name, _nearest_operator(name))
    try:
        found = _import_attribute(name if target is None else _DEFINED_AS[target])
    except NameProblem as problem:
        raise NameProblem(f"unknown operator {name} ({problem}){_nearest_operator(name)}") from problem
    if not (isinstance(found, type) and issubclass(found, Operator)):
        raise NameProblem(f"{name} is not a subclass of ktransformers.operators.base.Operator{_nearest_operator(name)}")
    if inspect.isabstract(found):
        raise NameProblem(f"{name} is abstract: it must define {', '.join(sorted(found.__abstractmethods__))}")
    return found


def _nearest_operator(name: str) -> str:
    hint = nearest(name, OPERATOR_ALIASES)
    if hint:
        return hint
    by_leaf = {full.rsplit(".", 1)[1]: full for full in OPERATOR_ALIASES}
    found = difflib.get_close_matches(name.rsplit(".", 1)[-1], by_leaf, n=1, cutoff=0.6)
    return f"; did you mean {by_leaf[found[0]]}?" if found else ""


def match_class(name: str, trust: bool = False) -> type:
    """Return the class that `name` means on the match side. trust: whether any module may be imported. Raises
    NameProblem.
    """
    if name.startswith(MODELS_PREFIX):
        return _upstream_model_class(name)
    module_name = name.rpartition(".")[0]
    if module_name and not (trust or module_name in sys.modules or _is_known_code(module_name)):
        raise _untrusted(name)
    found = _import_attribute(name)
    if not isinstance(found, type):
        raise NameProblem(f"{name} is not a class")
    return found


def _upstream_model_class(name: str) -> type:
    """`ktransformers.models.modeling_X.Y` -> the class of transformers that plays its role today."""
    parts = name.removeprefix(MODELS_PREFIX).split(".")
    if len(parts) != 2 or not parts[0].startswith("modeling_"):
        raise NameProblem(f"unknown class {name}; upstream's names look like {MODELS_PREFIX}modeling_qwen3_moe.Class")
    family = parts[0].removeprefix("modeling_")
    family = _MODEL_MODULES.get(family, family)
    module_name = f"transformers.models.{family}.modeling_{family}"
    classes = {cls.__name__: cls for cls in _module_classes(_import_module(module_name), module_name)}
    upstream = family_of(family).upstream
    theirs, ours = upstream.prefixes if upstream is not None else ("", "")
    found = _find_upstream_class(ours + parts[1].removeprefix(theirs), classes)
    if found is None:
        known = (f"{MODELS_PREFIX}{parts[0]}.{known}" for known in classes)
        raise NameProblem(f"unknown class {name} (looked in {module_name}){nearest(name, known)}")
    return found


def _find_upstream_class(name: str, classes: dict[str, type]) -> type | None:
    if name == "MoEGate":  # one name in two upstream files; transformers calls it a router
        return next((cls for known, cls in classes.items() if known.lower().endswith("topkrouter")), None)
    # transformers has one rotary class per family, whatever the scaling, and spells some names otherwise (V2Moe).
    wanted = _ROPE_VARIANT.sub("", name).lower()
    return next((cls for known, cls in classes.items() if known.lower() == wanted), None)


def _module_classes(module: Any, module_name: str) -> list[type[nn.Module]]:
    members = vars(module).values()
    return [m for m in members if isinstance(m, type) and issubclass(m, nn.Module) and m.__module__ == module_name]


def _is_known_code(module_name: str) -> bool:
    return module_name.partition(".")[0] in _KNOWN_PACKAGES


def _untrusted(name: str, hint: str = "") -> NameProblem:
    return NameProblem(
        f"{name!a:.120} is no class of ktransformers, transformers or torch, and importing it runs its code; "
        f"--trust_rules allows that, for who trusts its author{hint}"
    )


def _log_origin(name: str) -> None:
    """One line about a module that a rule file brings in, before it runs."""
    if name in sys.modules or _is_known_code(name):
        return
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):  # the import says why
        return
    if spec is not None:
        logger.warning("--trust_rules: importing %s, code of %s", name, spec.origin or "a namespace package")


def _import_module(name: str) -> Any:
    _log_origin(name)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise NameProblem(f"there is no module {error.name}{_nearest_module(error.name)}") from error
        raise NameProblem(f"module {name} cannot be imported: {error}") from error
    except Exception as error:  # whatever the module does while it is imported
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise NameProblem(f"module {name} cannot be imported: {why:.300}") from error


def _nearest_module(name: str) -> str:
    prefix = "transformers.models."
    if not name.startswith(prefix):
        return ""
    import transformers.models

    families = [module.name for module in pkgutil.iter_modules(transformers.models.__path__)]
    return nearest(name, (prefix + family for family in families))


def _import_attribute(name: str) -> Any:
    module_name, _, attribute = name.rpartition(".")
    if not module_name or not all(part.isidentifier() for part in name.split(".")):
        raise NameProblem(f"{name!r} is not a dotted name such as torch.nn.Linear")
    module = _import_module(module_name)
    try:
        return getattr(module, attribute)
    except (AttributeError, ImportError, RuntimeError) as error:  # transformers' packages import what is asked for
        known = (f"{module_name}.{known}" for known, value in vars(module).items() if isinstance(value, type))
        raise NameProblem(f"there is no {name}{nearest(name, known)}") from error


def legacy_names(model_type: str, key: str, pattern: str) -> tuple[str, ...]:
    """Return the names under which a rule's regex `pattern` is tried on module `key`.

    A pattern that uses a family's older segment means the older name: a lookahead that excludes
    `block_sparse_moe.gate` must not be fooled by a second try under the new name.
    """
    new, old = family_of(model_type).old_segments or ("", "")
    if not old or old not in pattern:
        return (key,)
    older = ".".join(old if part == new else part for part in key.split("."))
    mentions_new = re.search(rf"(?<!\w){new}(?!\w)", pattern) is not None
    return (older, key) if mentions_new and older != key else (older,)
