"""Mixtures: the layers that llama.cpp's files of these names give more bits, and a user's rules before them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ktransformers.cli.models.quantize import TYPES
from ktransformers.convert.mixtures import MIXTURES, ModelShape, choose_types, read_rules
from ktransformers.errors import RuleError
from ktransformers.kernels.types import QuantType as T


def llama_shapes(layers: int = 32, *, experts: int = 0, cols: int = 4096) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (32000, cols)}
    for layer in range(layers):
        block = f"blk.{layer}."
        shapes[block + "attn_norm.weight"] = (cols,)
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes[f"{block}{part}.weight"] = (cols, cols)
        if experts:
            shapes[block + "ffn_gate_inp.weight"] = (experts, cols)
        for part in ("ffn_gate", "ffn_up", "ffn_down"):
            shapes[f"{block}{part}{'_exps' * bool(experts)}.weight"] = (experts, cols, cols)[not experts :]
    return {**shapes, "output_norm.weight": (cols,), "output.weight": (32000, cols)}


def layers_of(types: dict[str, T], part: str, qtype: T) -> list[int]:
    return [int(name.split(".")[1]) for name, one in types.items() if f".{part}." in name and one is qtype]


def test_the_command_line_offers_them_all() -> None:
    assert tuple(MIXTURES) == TYPES


def test_q4_k_m_is_that_of_published_files() -> None:
    """Layers with Q6_K in Llama 2 7B's Q4_K_M files, as they are listed there."""
    types = choose_types(MIXTURES["q4_k_m"], llama_shapes(), ModelShape(32))
    more = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert layers_of(types, "attn_v", T.Q6_K) == layers_of(types, "ffn_down", T.Q6_K) == more
    assert types["output.weight"] is T.Q6_K
    others = {one for name, one in types.items() if "attn_v" not in name and "ffn_down" not in name}
    assert others == {T.Q4_K, T.Q6_K}
    assert types["token_embd.weight"] is T.Q4_K
    assert "blk.0.attn_norm.weight" not in types


def test_other_mixtures() -> None:
    def of(name: str, shape: ModelShape | None = None, **shapes: int) -> dict[str, T]:
        return choose_types(MIXTURES[name], llama_shapes(**shapes), shape or ModelShape(32))

    small = of("q4_k_s")
    assert layers_of(small, "attn_v", T.Q5_K) == layers_of(small, "ffn_down", T.Q5_K) == [0, 1, 2, 3]
    middle = of("q3_k_m")
    assert layers_of(middle, "attn_v", T.Q5_K) == layers_of(middle, "ffn_down", T.Q5_K) == [0, 1]
    assert len(layers_of(middle, "attn_output", T.Q4_K)) == 32
    two = of("q2_k", ModelShape(32, queries_per_key=8))
    assert (two["blk.5.attn_v.weight"], two["blk.5.ffn_down.weight"]) == (T.Q4_K, T.Q3_K)
    assert set(of("q8_0").values()) == {T.Q8_0}
    four = of("mxfp4_moe", ModelShape(32, 16), experts=16)
    assert (four["blk.1.ffn_up_exps.weight"], four["blk.1.attn_q.weight"]) == (T.MXFP4, T.Q8_0)
    assert "blk.1.ffn_gate_inp.weight" not in four  # routers stay in F32
    assert of("q4_0", ModelShape(32, has_importance=True))["blk.1.ffn_down.weight"] is T.Q4_1
    assert of("q4_0")["blk.1.ffn_down.weight"] is T.Q4_0
    eight = of("q4_k_m", ModelShape(32, 8), experts=8)  # Mixtral
    assert (eight["blk.9.attn_k.weight"], eight["blk.9.attn_output.weight"]) == (T.Q8_0, T.Q5_K)


def test_mixtures_of_few_bits() -> None:
    """As `llama-quantize` chooses types for its files of these names."""

    def of(name: str, shape: ModelShape | None = None, **shapes: int) -> dict[str, T]:
        return choose_types(MIXTURES[name], llama_shapes(**shapes), shape or ModelShape(32, has_importance=True))

    ends = [*range(4), *range(28, 32)]
    xs = of("iq3_xs")
    assert layers_of(xs, "ffn_gate", T.IQ3_S) == layers_of(xs, "ffn_up", T.IQ3_S) == ends
    assert (xs["blk.9.attn_q.weight"], xs["blk.9.attn_v.weight"]) == (T.IQ3_XXS, T.IQ3_S)
    assert (xs["blk.9.ffn_down.weight"], xs["output.weight"]) == (T.IQ3_S, T.Q6_K)
    xxs = of("iq3_xxs")
    assert (xxs["blk.9.attn_q.weight"], xxs["blk.9.attn_output.weight"]) == (T.IQ2_S, T.IQ3_S)
    assert (xxs["blk.1.ffn_down.weight"], xxs["output.weight"]) == (T.IQ3_XXS, T.Q5_K)
    unweighted = of("iq3_xxs", ModelShape(32))
    assert layers_of(unweighted, "ffn_down", T.Q4_K) == [0, 1, 2, 3]
    assert layers_of(unweighted, "ffn_down", T.Q3_K) == list(range(4, 32))
    assert set(of("iq3_s").values()) == {T.IQ3_S, T.Q6_K}
    middle = of("iq3_m")
    assert layers_of(middle, "ffn_down", T.Q4_K) == [0, 1, 2, 3]
    assert {middle["blk.9.attn_v.weight"], middle["blk.9.attn_output.weight"]} == {T.Q4_K}
    for name, base, more in (("iq2_s", T.IQ2_XS, T.IQ3_S), ("iq2_m", T.IQ2_S, T.IQ3_S), ("iq2_xs", T.IQ2_XS, T.Q2_K)):
        two = of(name)
        assert two["blk.9.ffn_down.weight"] is two["blk.9.attn_k.weight"] is base
        assert {two["blk.0.ffn_down.weight"], two["blk.9.attn_v.weight"], two["token_embd.weight"]} == {more}
        assert two["blk.9.attn_output.weight"] is (T.IQ3_S if more is T.IQ3_S else base)
        assert two["output.weight"] is T.Q5_K
    one = of("iq1_s", ModelShape(32, queries_per_key=8, has_importance=True))
    assert (one["blk.9.attn_v.weight"], one["blk.9.attn_output.weight"]) == (T.Q4_K, T.IQ2_XXS)
    assert one["blk.9.attn_k.weight"] is T.IQ1_S
    eight = of("iq2_xxs", ModelShape(32, 8, has_importance=True), experts=8)
    assert (eight["blk.9.attn_k.weight"], eight["blk.9.attn_v.weight"]) == (T.Q4_K, T.Q4_K)
    assert (eight["blk.9.attn_output.weight"], eight["blk.9.ffn_up_exps.weight"]) == (T.Q5_K, T.IQ2_XXS)
    assert of("iq3_m", ModelShape(32, 8), experts=8)["blk.29.ffn_down_exps.weight"] is T.Q4_K


def test_mixtures_of_ik_llama_cpps_types() -> None:
    """As that program's `llama-quantize` chooses types for files of these names."""

    def of(name: str, shape: ModelShape, **shapes: int) -> dict[str, T]:
        return choose_types(MIXTURES[name], llama_shapes(**shapes), shape)

    four = of("iq4_k", ModelShape(32, 16, queries_per_key=2), experts=16)
    assert (four["blk.9.attn_v.weight"], four["blk.9.attn_output.weight"]) == (T.IQ5_K, T.Q5_K)
    assert (four["blk.9.ffn_up_exps.weight"], four["output.weight"]) == (T.IQ4_K, T.Q6_K)
    small = of("iq4_ks", ModelShape(32))
    assert layers_of(small, "ffn_down", T.Q5_K) == [0, 1, 2, 3]
    assert (small["blk.9.attn_v.weight"], small["blk.9.attn_output.weight"]) == (T.IQ4_KS, T.IQ4_KS)
    three = of("iq3_k", ModelShape(32, queries_per_key=8))
    assert (three["blk.9.attn_v.weight"], three["blk.9.ffn_down.weight"]) == (T.IQ4_K, T.IQ3_K)
    two = of("iq2_k", ModelShape(32))
    assert {two["blk.9.attn_v.weight"], two["blk.9.attn_output.weight"]} == {T.IQ3_K}
    assert (two["blk.9.ffn_down.weight"], two["output.weight"]) == (T.IQ2_K, T.Q5_K)


def test_a_head_that_is_the_table_of_tokens() -> None:
    shapes = llama_shapes(8)
    del shapes["output.weight"]
    assert choose_types(MIXTURES["q4_k_m"], shapes, ModelShape(8))["token_embd.weight"] is T.Q6_K


def test_short_rows_get_other_blocks(caplog: pytest.LogCaptureFixture) -> None:
    types = choose_types(MIXTURES["q4_k_s"], llama_shapes(8, cols=96), ModelShape(8))
    assert types["blk.3.attn_q.weight"] is T.Q5_0
    assert types["output.weight"] is T.Q8_0
    assert "fill no blocks of Q4_K" in caplog.text
    assert choose_types(MIXTURES["q4_0"], {"blk.0.attn_q.weight": (4, 33)}, ModelShape(1)) == {
        "blk.0.attn_q.weight": T.F16
    }


def test_the_first_rule_that_matches_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text("- {match: 'blk\\.0\\..*ffn', type: F16}\n- match: ffn_(up|down)\n  type: q8_0\n"
                    "- {match: nothing, type: q6_k}\n")  # fmt: skip
    types = choose_types(MIXTURES["q4_k_s"], llama_shapes(8), ModelShape(8), read_rules(path))
    assert types["blk.0.ffn_up.weight"] is types["blk.0.ffn_gate.weight"] is T.F16
    assert types["blk.1.ffn_up.weight"] is T.Q8_0
    assert types["blk.1.ffn_gate.weight"] is T.Q4_K
    assert "line 4 (nothing) is used by no tensor" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("match: a", r"rules.yaml:1: must be a list"),
        ("", r"must be a list"),
        ("- {match: a}", r"rules.yaml:1 \(rule 1\): a rule needs the keys match and type"),
        ("- {match: a, type: q4_0}\n- {match: '(', type: q4_0}", r":2 \(rule 2\): match is no regular expression"),
        ("- {match: a, type: q4_k_m}", "type must be one of .*q4_k"),
        ("- {match: 3, type: q4_0}", "match must be a regular expression"),
        ("- {match: a, type: q4_0, recursive: true}", "and no others"),
    ],
)
def test_wrong_rules_say_where(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    with pytest.raises(RuleError, match=message):
        read_rules(path)
