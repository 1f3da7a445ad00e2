"""Chooses the type that each tensor gets: llama.cpp's mixtures by name, and a user's rules before them.

A mixture has a type for most matrices and better ones for those that err most: values and down projections of some
layers, the output head. They are the ones that files of these names have, so that names mean the same everywhere
(docs/quantize.md has the table); those with types of ik_llama.cpp are that program's. Knows names and shapes, and no
bytes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from gguf import LlamaFileType

from ktransformers.errors import RuleError
from ktransformers.kernels.types import QuantType, block_size
from ktransformers.optimize.document import Item, read_yaml
from ktransformers.weights.quantize.write import WRITABLE_TYPES

__all__ = [
    "MIXTURES",
    "Mixture",
    "ModelShape",
    "TypeRule",
    "choose_types",
    "is_quantized",
    "need_importance",
    "read_rules",
]

logger = logging.getLogger(__name__)

T = QuantType
FLOAT_TYPES = (T.F32, T.F16, T.BF16)


class ForkFileType(IntEnum):
    """Values of `general.file_type` that ik_llama.cpp's llama.h has beyond llama.cpp's."""

    MOSTLY_IQ2_K = 138
    MOSTLY_IQ3_K = 139
    MOSTLY_IQ4_K = 140
    MOSTLY_IQ4_KS = 145


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Numbers of a model by which mixtures choose. queries_per_key: heads of queries that share one of keys."""

    num_layers: int
    num_experts: int = 0
    queries_per_key: int = 1
    has_importance: bool = False


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor is: number `index` of `count` of its kind."""

    index: int
    count: int
    model: ModelShape


_When = Callable[[_Place], bool]
_Higher = tuple[str, _When, QuantType]

_EIGHT_EXPERTS = 8  # Mixtral, whose attention is small beside its experts


def _always(place: _Place) -> bool:
    return True


def _shared_keys(place: _Place) -> bool:
    return place.model.queries_per_key >= 4


def _paired_keys(place: _Place) -> bool:
    return place.model.queries_per_key >= 2


def _shared_values(place: _Place) -> bool:
    return _shared_keys(place) or place.model.num_experts >= 4


def _four_experts(place: _Place) -> bool:
    return place.model.num_experts >= 4


def _eight_experts(place: _Place) -> bool:
    return place.model.num_experts == _EIGHT_EXPERTS


def _unweighted(place: _Place) -> bool:
    return not place.model.has_importance


def _early(place: _Place) -> bool:
    """Whether the layer is in the first eighth."""
    return place.index < place.count // 8


def _between(place: _Place) -> bool:
    """Whether the layer is neither in the first eighth nor in the last."""
    return not _early(place) and place.index < 7 * place.count // 8


def _more(place: _Place) -> bool:
    """Whether the layer is in the first or last eighth, or every third between."""
    return not _between(place) or (place.index - place.count // 8) % 3 == 2


def _early_or_eight_experts_more(place: _Place) -> bool:
    return _early(place) or (_eight_experts(place) and _more(place))


def _first(count: int) -> _When:
    return lambda place: place.index < count


def _early_and(has_importance: bool) -> _When:
    return lambda place: _early(place) and place.model.has_importance is has_importance


@dataclass(frozen=True, slots=True)
class Mixture:
    """A named choice of types. base: of matrices that nothing else is said of.

    higher: (role, condition, type), the first that fits counts. output, embedding: of the head and of the table of
    tokens; None: base. experts: of routed experts. An output head that is the table itself counts as the head.
    """

    file_type: LlamaFileType | ForkFileType
    base: QuantType
    higher: tuple[_Higher, ...] = ()
    output: QuantType | None = T.Q6_K
    embedding: QuantType | None = None
    experts: QuantType | None = None

    @property
    def is_lowest(self) -> bool:
        """Whether the mixture has so few bits that Q8_0 for the attention of eight experts would be too many beside the
        others.
        """
        return self.base in _LOWEST


_F = LlamaFileType
_LOWEST = (T.IQ1_S, T.IQ1_M, T.IQ2_XXS, T.IQ2_XS, T.IQ2_S)


def _lowest(value: QuantType, *attention: _Higher) -> tuple[_Higher, ...]:
    """What types below three bits have in common; `value` is also that of the first down projections."""
    return (
        ("value", _shared_values, T.Q4_K),
        ("value", _always, value),
        ("key", _eight_experts, T.Q4_K),
        ("down", _early, value),
        ("attention", _eight_experts, T.Q5_K),
        *attention,
    )


_IQ1_HIGHER = _lowest(T.Q2_K, ("attention", _always, T.IQ2_XXS))
_IQ2_HIGHER = _lowest(T.Q2_K)
_IQ2_MORE = _lowest(T.IQ3_S, ("attention", _always, T.IQ3_S))
_IQ3_XXS_HIGHER: tuple[_Higher, ...] = (
    ("value", _shared_keys, T.Q4_K),
    ("value", _unweighted, T.IQ3_S),
    ("query", _always, T.IQ2_S),
    ("key", _always, T.IQ2_S),
    ("down", _early_and(has_importance=False), T.Q4_K),
    ("down", _unweighted, T.Q3_K),
    ("attention", _always, T.IQ3_S),
)
_IQ3_XS_HIGHER: tuple[_Higher, ...] = (
    ("value", _shared_keys, T.Q4_K),
    ("query", _always, T.IQ3_XXS),
    ("key", _always, T.IQ3_XXS),
    ("gate", _between, T.IQ3_XXS),
    ("up", _between, T.IQ3_XXS),
)
_IQ3_M_HIGHER: tuple[_Higher, ...] = (
    ("value", _always, T.Q4_K),
    ("down", _early_or_eight_experts_more, T.Q4_K),
    ("attention", _always, T.Q4_K),
    ("qkv", _always, T.Q4_K),
)
_IQ4_HIGHER = (("value", _shared_keys, T.Q5_K), ("down", _early_and(has_importance=False), T.Q5_K))
_IQ4_KS_HIGHER = (
    ("value", _paired_keys, T.IQ5_K),
    ("down", _early_and(has_importance=False), T.Q5_K),
    ("attention", _four_experts, T.Q5_K),
)
_IQ4_K_HIGHER = (("value", _paired_keys, T.IQ5_K), ("attention", _four_experts, T.Q5_K))
_IQ3_K_HIGHER = (("value", _paired_keys, T.IQ4_K), ("attention", _four_experts, T.Q5_K))
_IQ2_K_HIGHER: tuple[_Higher, ...] = (
    ("value", _paired_keys, T.IQ4_K),
    ("value", _always, T.IQ3_K),
    ("attention", _four_experts, T.Q5_K),
    ("attention", _always, T.IQ3_K),
)

MIXTURES: Mapping[str, Mixture] = {
    "f32": Mixture(_F.ALL_F32, T.F32, output=None),
    "f16": Mixture(_F.MOSTLY_F16, T.F16, output=None),
    "bf16": Mixture(_F.MOSTLY_BF16, T.BF16, output=None),
    "q8_0": Mixture(_F.MOSTLY_Q8_0, T.Q8_0, output=None),
    "q6_k": Mixture(_F.MOSTLY_Q6_K, T.Q6_K),
    "q5_k_m": Mixture(
        _F.MOSTLY_Q5_K_M, T.Q5_K, (("value", _more, T.Q6_K), ("down", _more, T.Q6_K), ("qkv", _always, T.Q6_K))
    ),
    "q5_k_s": Mixture(_F.MOSTLY_Q5_K_S, T.Q5_K),
    "q4_k_m": Mixture(
        _F.MOSTLY_Q4_K_M, T.Q4_K, (("value", _more, T.Q6_K), ("down", _more, T.Q6_K), ("qkv", _always, T.Q5_K))
    ),
    "q4_k_s": Mixture(_F.MOSTLY_Q4_K_S, T.Q4_K, (("value", _first(4), T.Q5_K), ("down", _early, T.Q5_K))),
    "q3_k_l": Mixture(
        _F.MOSTLY_Q3_K_L,
        T.Q3_K,
        (
            ("value", _always, T.Q5_K),
            ("down", _always, T.Q5_K),
            ("attention", _always, T.Q5_K),
            ("qkv", _always, T.Q4_K),
        ),
    ),
    "q3_k_m": Mixture(
        _F.MOSTLY_Q3_K_M,
        T.Q3_K,
        (
            ("value", _first(2), T.Q5_K),
            ("value", _always, T.Q4_K),
            ("down", lambda place: place.index < place.count // 16, T.Q5_K),
            ("down", _always, T.Q4_K),
            ("attention", _always, T.Q4_K),
            ("qkv", _always, T.Q4_K),
        ),
    ),
    "q3_k_s": Mixture(_F.MOSTLY_Q3_K_S, T.Q3_K),
    "q2_k": Mixture(
        _F.MOSTLY_Q2_K,
        T.Q2_K,
        (
            ("value", _shared_keys, T.Q4_K),
            ("value", _always, T.Q3_K),
            ("down", _always, T.Q3_K),
            ("attention", _always, T.Q3_K),
        ),
    ),
    "q2_k_s": Mixture(_F.MOSTLY_Q2_K_S, T.Q2_K, (("value", _shared_keys, T.Q4_K), ("down", _early, T.Q4_K))),
    "q4_0": Mixture(_F.MOSTLY_Q4_0, T.Q4_0, (("down", _early_and(has_importance=True), T.Q4_1),)),
    "q4_1": Mixture(_F.MOSTLY_Q4_1, T.Q4_1),
    "q5_0": Mixture(_F.MOSTLY_Q5_0, T.Q5_0, (("down", _early_and(has_importance=True), T.Q5_1),)),
    "q5_1": Mixture(_F.MOSTLY_Q5_1, T.Q5_1),
    "iq4_nl": Mixture(_F.MOSTLY_IQ4_NL, T.IQ4_NL, _IQ4_HIGHER),
    "iq4_xs": Mixture(_F.MOSTLY_IQ4_XS, T.IQ4_XS, _IQ4_HIGHER),
    "iq3_m": Mixture(_F.MOSTLY_IQ3_M, T.IQ3_S, _IQ3_M_HIGHER),
    "iq3_s": Mixture(_F.MOSTLY_IQ3_S, T.IQ3_S, (("value", _shared_keys, T.Q4_K),)),
    "iq3_xs": Mixture(_F.MOSTLY_IQ3_XS, T.IQ3_S, _IQ3_XS_HIGHER),
    "iq3_xxs": Mixture(_F.MOSTLY_IQ3_XXS, T.IQ3_XXS, _IQ3_XXS_HIGHER, T.Q5_K, T.IQ3_S),
    "iq2_m": Mixture(_F.MOSTLY_IQ2_M, T.IQ2_S, _IQ2_MORE, T.Q5_K, T.IQ3_S),
    "iq2_s": Mixture(_F.MOSTLY_IQ2_S, T.IQ2_XS, _IQ2_MORE, T.Q5_K, T.IQ3_S),
    "iq2_xs": Mixture(_F.MOSTLY_IQ2_XS, T.IQ2_XS, _IQ2_HIGHER, T.Q5_K, T.Q2_K),
    "iq2_xxs": Mixture(_F.MOSTLY_IQ2_XXS, T.IQ2_XXS, _IQ2_HIGHER, T.Q5_K, T.Q2_K),
    "iq1_m": Mixture(_F.MOSTLY_IQ1_M, T.IQ1_M, _IQ1_HIGHER, T.Q5_K, T.Q2_K),
    "iq1_s": Mixture(_F.MOSTLY_IQ1_S, T.IQ1_S, _IQ1_HIGHER, T.Q5_K, T.Q2_K),
    "iq4_k": Mixture(ForkFileType.MOSTLY_IQ4_K, T.IQ4_K, _IQ4_K_HIGHER),
    "iq4_ks": Mixture(ForkFileType.MOSTLY_IQ4_KS, T.IQ4_KS, _IQ4_KS_HIGHER),
    "iq3_k": Mixture(ForkFileType.MOSTLY_IQ3_K, T.IQ3_K, _IQ3_K_HIGHER, T.Q5_K),
    "iq2_k": Mixture(ForkFileType.MOSTLY_IQ2_K, T.IQ2_K, _IQ2_K_HIGHER, T.Q5_K),
    "mxfp4_moe": Mixture(_F.MOSTLY_MXFP4_MOE, T.Q8_0, output=T.Q8_0, experts=T.MXFP4),
    "tq1_0": Mixture(_F.MOSTLY_TQ1_0, T.TQ1_0, embedding=T.Q4_K),
    "tq2_0": Mixture(_F.MOSTLY_TQ2_0, T.TQ2_0, embedding=T.Q4_K),
    "q1_0": Mixture(_F.MOSTLY_Q1_0, T.Q1_0, embedding=T.Q4_K),
}
"""By the name that --type takes."""

_ROLES = (
    ("value", re.compile(r"\.attn_(v|v_b|kv_b)\.weight$")),
    ("query", re.compile(r"\.attn_q\.weight$")),
    ("key", re.compile(r"\.attn_k\.weight$")),
    ("qkv", re.compile(r"\.attn_qkv\.weight$")),
    ("attention", re.compile(r"\.attn_output\.weight$")),
    *((part, re.compile(rf"\.ffn_{part}(_exps|_shexp|\.\d+)?\.weight$")) for part in ("down", "gate", "up")),
)
_KEPT = re.compile(
    r"(.*\.)?(ffn_gate_inp|ffn_gate_inp_shexp|position_embd|token_types|.*_norm|ssm_conv1d(_[qkv])?|shortconv\.conv|"
    r"time_mix_.*|attn_rel_b|altup_.*|laurel_.*|per_layer_model_proj|rope_factors_(long|short)|rope_freqs)\.weight"
)
"""Matrices that stay in floats: routers, whose rounding would choose other experts, and small ones."""

# Rows that are no multiple of a super-block of 256 get a type of blocks of 32 of about as many bits, as in llama.cpp.
_SHORT_ROWS = {
    **dict.fromkeys((*_LOWEST, T.Q2_K, T.Q3_K, T.IQ3_XXS, T.IQ3_S, T.IQ4_XS, T.TQ1_0, T.TQ2_0, T.Q1_0), T.IQ4_NL),
    **dict.fromkeys((T.IQ2_K, T.IQ3_K, T.IQ4_KS), T.IQ4_NL),
    **dict.fromkeys((T.Q4_K, T.IQ4_K), T.Q5_0),
    **dict.fromkeys((T.Q5_K, T.IQ5_K), T.Q5_1),
    T.Q6_K: T.Q8_0,
}
_EIGHT_EXPERT_OUTPUTS = (T.Q2_K, T.Q3_K, T.Q4_K, T.IQ3_XXS, T.IQ3_S, T.IQ4_NL, T.IQ4_XS)


_UNWATCHED = ("token_embd.weight", "output.weight")  # which no imatrix has
_NEED_IMPORTANCE = (T.IQ1_S, T.IQ1_M, T.IQ2_XXS, T.IQ2_XS)


def need_importance(types: Mapping[str, QuantType]) -> list[str]:
    """Return the tensors whose types have so few bits that the columns must be known that matter."""
    return [name for name, one in types.items() if one in _NEED_IMPORTANCE and name not in _UNWATCHED]


def is_quantized(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is of those whose type a mixture or a rule chooses; others keep floats."""
    return len(shape) >= 2 and name.endswith(".weight") and _KEPT.fullmatch(name) is None


@dataclass(slots=True)
class TypeRule:
    """Rule of a user: tensors whose name `match` is found in get `qtype`. hits: how many did."""

    match: re.Pattern[str]
    qtype: QuantType
    line: int
    hits: int = 0


def read_rules(path: Path) -> list[TypeRule]:
    """Return the rules of a YAML file: a list of `{match: regex, type: name}`. Raises RuleError with file and line."""
    document = read_yaml(path)
    if document is None or not isinstance(document.value, list):
        line = None if document is None else document.line
        raise RuleError("must be a list of rules (`- {match: ffn_down, type: q6_k}`)", file=str(path), line=line)
    return [_rule(item, path, number) for number, item in enumerate(document.value, start=1)]


def _rule(item: Item, path: Path, number: int) -> TypeRule:
    def fail(message: str, line: int = item.line) -> RuleError:
        return RuleError(message, file=str(path), line=line, rule=number)

    values = item.value
    if not isinstance(values, dict) or set(values) != {"match", "type"}:
        raise fail("a rule needs the keys match and type, and no others")
    match, name = values["match"], values["type"]
    if not isinstance(match.value, str):
        raise fail(f"match must be a regular expression, not {match.kind()}", match.line)
    try:
        pattern = re.compile(match.value)
    except re.error as error:
        raise fail(f"match is no regular expression: {error}", match.line) from error
    known = {qtype.name.lower(): qtype for qtype in WRITABLE_TYPES}
    if not isinstance(name.value, str) or name.value.lower() not in known:
        raise fail(f"type must be one of {', '.join(known)}", name.line)
    return TypeRule(pattern, known[name.value.lower()], item.line)


def choose_types(
    mixture: Mixture, shapes: Mapping[str, tuple[int, ...]], model: ModelShape, rules: Sequence[TypeRule] = ()
) -> dict[str, QuantType]:
    """Return the type of every tensor that `is_quantized`, by name.

    Rows that do not fit the chosen type get one that they fit, with a line in the log; so does a rule that no tensor
    matches.
    """
    names = [name for name, shape in shapes.items() if is_quantized(name, shape)]
    places = _places(names, model)
    chosen: dict[str, QuantType] = {}
    short: dict[tuple[QuantType, QuantType], list[str]] = {}
    for name in names:
        rule = next((rule for rule in rules if rule.match.search(name)), None)
        if rule is not None:
            rule.hits += 1
        wanted = _of_mixture(mixture, name, places, model, shapes) if rule is None else rule.qtype
        chosen[name] = _fitting(wanted, shapes[name][-1])
        if chosen[name] is not wanted:
            short.setdefault((wanted, chosen[name]), []).append(name)
    for (wanted, got), which in short.items():
        logger.warning(
            "%d tensors (%s, ...) get %s: their rows fill no blocks of %s", len(which), which[0], got.name, wanted.name
        )
    for rule in rules:
        if rule.hits == 0:
            logger.warning("the rule of line %d (%s) is used by no tensor", rule.line, rule.match.pattern)
    return chosen


def _fitting(wanted: QuantType, cols: int) -> QuantType:
    for qtype in (wanted, _SHORT_ROWS.get(wanted)):
        if qtype is not None and cols % block_size(qtype) == 0:
            return qtype
    return T.F16


def _role(name: str) -> str:
    return next((role for role, pattern in _ROLES if pattern.search(name)), "")


def _places(names: Sequence[str], model: ModelShape) -> dict[str, _Place]:
    """Values are counted one by one, as not every layer has them; others by their layer."""
    values = [name for name in names if _role(name) == "value"]
    places = {name: _Place(index, len(values), model) for index, name in enumerate(values)}
    for name in names:
        layer = re.match(r"blk\.(\d+)\.", name)
        if name not in places and layer is not None:
            places[name] = _Place(int(layer[1]), model.num_layers, model)
    return places


def _of_mixture(
    mixture: Mixture,
    name: str,
    places: Mapping[str, _Place],
    model: ModelShape,
    shapes: Mapping[str, tuple[int, ...]],
) -> QuantType:
    if name == "output.weight" or (name == "token_embd.weight" and "output.weight" not in shapes):
        return mixture.output or mixture.base
    if name == "token_embd.weight":
        return mixture.embedding or mixture.base
    if mixture.experts is not None:
        return mixture.experts if len(shapes[name]) == 3 and "_exps" in name else mixture.base
    role, place = _role(name), places.get(name)
    if mixture.base in (*FLOAT_TYPES, T.Q8_0) or place is None:
        return mixture.base
    if _eight_experts(place) and not mixture.is_lowest:
        if role in ("value", "key"):
            return T.Q8_0
        if role == "attention" and mixture.base in _EIGHT_EXPERT_OUTPUTS:
            return T.Q5_K
    found = (qtype for wanted, when, qtype in mixture.higher if wanted == role and when(place))
    return next(found, mixture.base)
