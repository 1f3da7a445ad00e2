"""The rotary embedding that a GGUF file's metadata and factor tensors describe. Knows no model family.

What llama.cpp reads for every architecture is honoured here, or refused by the key's name: see models/gguf/keys.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ktransformers.errors import FormatError, UnsupportedError
from ktransformers.models.gguf.metadata import Metadata, Values

__all__ = ["rope_parameters", "rope_scaling_factor"]

_USUAL_CONTEXT = 8192  # of Llama 3, before its rotation is scaled
_CLOSE = 1e-4  # the converter computes factors in fp32; those further away are taken as they are


def rope_parameters(gguf: Metadata) -> Values:
    """Return the `rope_parameters` of transformers 5."""
    rope: Values = {"rope_type": "default", "rope_theta": gguf.float("rope.freq_base", 10000.0)}
    if not float(str(rope["rope_theta"])) > 0:
        raise FormatError(f"{gguf.arch}.rope.freq_base is {rope['rope_theta']}; a positive number is needed")
    kind, factor = _kind(gguf), rope_scaling_factor(gguf)
    if kind == "longrope":
        if factor != 1.0:
            raise UnsupportedError(f"{gguf.arch}.rope.scaling.factor {factor:g} beside longrope; pass --model_path")
        rope |= _longrope(gguf)
    elif kind == "yarn" and factor != 1.0:
        rope |= _yarn(gguf, factor)
    elif kind == "linear" and factor != 1.0:
        rope |= {"rope_type": "linear", "factor": factor}
    if kind != "longrope":
        _refuse_attention_factor(gguf)
    if "rope_freqs.weight" in gguf.shapes:
        factors = gguf.factors.get("rope_freqs.weight")
        if rope["rope_type"] != "default" or factors is None:
            raise UnsupportedError("rope_freqs.weight beside rope scaling is not supported; pass --model_path")
        rope |= _frequency_factors(gguf, factors, float(str(rope["rope_theta"])))
    return rope


def _kind(gguf: Metadata) -> str:
    """The kind of scaling. A file that names none means "linear", of which the factor is 1 unless it says more."""
    said = gguf.raw("rope.scaling.type")
    if said is not None and not isinstance(said, str):
        raise FormatError(f"{gguf.arch}.rope.scaling.type is no text but {type(said).__name__}")
    if said == "longrope" or (said != "yarn" and gguf.has(r"rope_factors_(long|short)\.weight")):
        return "longrope"
    if said not in (None, "none", "linear", "yarn"):
        raise UnsupportedError(f"rope scaling {said!r:.40} is not supported; pass --model_path with the config")
    return said or "linear"


def rope_scaling_factor(gguf: Metadata) -> float:
    """Return the number that positions are divided by; 1 where the file says nothing, 0 or 1. Raises FormatError for a
    negative one.
    """
    said = gguf.find_float("rope.scaling.factor")
    if said is None:
        said = gguf.find_float("rope.scale_linear")  # as old files have it
    if said is not None and said < 0:
        raise FormatError(f"{gguf.arch}.rope.scaling.factor is {said:g}; a positive number is needed")
    return said or 1.0


def _refuse_attention_factor(gguf: Metadata) -> None:
    """llama.cpp multiplies rotated queries and keys with it whatever the scaling; transformers in longrope only."""
    attention = gguf.find_float("rope.scaling.attn_factor")
    if attention not in (None, 1.0):
        raise UnsupportedError(f"{gguf.arch}.rope.scaling.attn_factor {attention:g} is read with longrope only")


def _yarn(gguf: Metadata, factor: float) -> Values:
    original = gguf.find_int("rope.scaling.original_context_length", 1)
    rope: Values = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original or gguf.int("context_length"),
        "beta_fast": gguf.float("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": gguf.float("rope.scaling.yarn_beta_slow", 1.0),
    }
    extrapolation = gguf.find_float("rope.scaling.yarn_ext_factor")
    if extrapolation is not None and 0 <= extrapolation != 1.0:  # negative: not set
        raise UnsupportedError(f"{gguf.arch}.rope.scaling.yarn_ext_factor {extrapolation:g} is not supported (1 is)")
    if (attention := gguf.find_float("rope.scaling.yarn_attn_factor")) is not None:
        rope["attention_factor"] = attention
    if (multiplier := gguf.find_float("rope.scaling.yarn_log_multiplier")) is not None:
        if gguf.arch == "mistral3":  # written as mscale_all_dim; mscale is 1
            return rope | {"mscale": 1.0, "mscale_all_dim": multiplier}
        # The converter writes 0.1 * mscale_all_dim. It does not write mscale, which is equal in every published model;
        # then the two cancel in the rotary tables and only the attention scale is left.
        mscale = float(f"{multiplier * 10:.6g}")
        rope |= {"mscale": mscale, "mscale_all_dim": mscale}
    return rope


def _longrope(gguf: Metadata) -> Values:
    """Two lists of factors, for sequences up to the original context length and beyond."""
    found = {kind: gguf.factors.get(f"rope_factors_{kind}.weight") for kind in ("long", "short")}
    if found["long"] is None or found["short"] is None:
        raise FormatError("the GGUF file has a longrope without rope_factors_long.weight and rope_factors_short.weight")
    original = gguf.int("rope.scaling.original_context_length", 2)
    rope: Values = {
        "rope_type": "longrope",
        "long_factor": [float(f"{one:.7g}") for one in found["long"]],
        "short_factor": [float(f"{one:.7g}") for one in found["short"]],
        "original_max_position_embeddings": original,
    }
    attention = gguf.find_float("rope.scaling.attn_factor")
    usual = math.sqrt(1 + math.log(max(gguf.int("context_length") / original, 1.0)) / math.log(original))
    if attention is not None and not math.isclose(attention, usual, rel_tol=1e-6):  # else transformers computes it
        rope["attention_factor"] = attention
    return rope


def _frequency_factors(gguf: Metadata, factors: Sequence[float], theta: float) -> Values:
    """Llama 3's parameters, where they give these factors; else the factors themselves, as a longrope of one list."""
    if not factors or not all(math.isfinite(one) and one > 0 for one in factors):
        raise FormatError("rope_freqs.weight holds factors that are not positive numbers; convert the file again")
    if max(factors) == min(factors) == 1.0:
        return {}
    for low, high in ((1.0, 4.0), (1.0, 1.0)):  # of Llama 3, and of Llama 4 Scout
        for context in _contexts(factors, theta, low, high):
            if _is_llama3(factors, theta, (low, high), context):
                return {
                    "rope_type": "llama3",
                    "factor": float(f"{max(factors):.6g}"),
                    "low_freq_factor": low,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": context,
                }
    same = [float(f"{one:.9g}") for one in factors]
    return {
        "rope_type": "longrope",
        "long_factor": same,
        "short_factor": same,
        "original_max_position_embeddings": gguf.int("context_length"),
        "attention_factor": 1.0,
    }


def _wavelengths(count: int, theta: float) -> list[float]:
    return [2 * math.pi * theta ** (index / count) for index in range(count)]


def _contexts(factors: Sequence[float], theta: float, low: float, high: float) -> Iterator[int]:
    """Original context lengths from which these factors may come, the usual one first."""
    yield _USUAL_CONTEXT
    most, lengths = max(factors), _wavelengths(len(factors), theta)
    between = [
        (low + (1 / one - 1 / most) / (1 - 1 / most) * (high - low)) * length
        for one, length in zip(factors, lengths, strict=True)
        if 1 + _CLOSE < one < most * (1 - _CLOSE)
    ]
    if between and high != low:
        yield max(round(sorted(between)[len(between) // 2]), 1)
        return
    # All are scaled or not: any length between the two wavelengths where that changes gives the same rotation.
    kept = max((high * length for one, length in zip(factors, lengths, strict=True) if one < most), default=1.0)
    scaled = min((low * length for one, length in zip(factors, lengths, strict=True) if one == most), default=kept)
    power = 1 << max(math.ceil(math.log2(max(kept, 1.0))), 0)
    yield power if kept <= power <= scaled else max(math.ceil(kept), 1)


def _is_llama3(given: Sequence[float], theta: float, bounds: tuple[float, float], context: int) -> bool:
    """Whether the factors are those of Llama 3 between wavelengths of context / high and context / low positions."""
    factor, (low, high) = max(given), bounds
    for one, length in zip(given, _wavelengths(len(given), theta), strict=True):
        turns = context / length
        smooth = float(turns >= low) if high == low else min(max((turns - low) / (high - low), 0.0), 1.0)
        if not math.isclose(one, 1 / ((1 - smooth) / factor + smooth), rel_tol=_CLOSE):
            return False
    return True
