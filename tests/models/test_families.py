"""Every causal family of the installed transformers: a tiny random model agrees with it, or is refused as we say.

A new version of transformers that brings a family fails here by the family's name, until models/families.py has a line.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from docs.families import PAGE, families_text, page_with
from ktransformers.models.families import (
    FAMILIES,
    FAMILY_SUPPORT,
    NO_CONTEXT,
    NOT_BUILT,
    OWN_ATTENTION,
    Refusal,
    Since,
    Support,
    support_in,
)
from tests.support.checks.products import thinned
from tests.support.models import family_outcomes
from tests.support.models.family_models import CAUSAL_TYPES, COMPOSITE_TYPES, LENGTH, family_config, has_experts
from tests.support.models.family_outcomes import check_family

RUNNING = [name for name in (*CAUSAL_TYPES, *COMPOSITE_TYPES) if isinstance(FAMILY_SUPPORT.get(name), Support)]
UNREADABLE = [name for name in CAUSAL_TYPES if FAMILY_SUPPORT.get(name) is NOT_BUILT]
VARIATIONS = range(3)


@pytest.mark.every(5)
@pytest.mark.parametrize("model_type", [*CAUSAL_TYPES, *(name for name in COMPOSITE_TYPES if name in FAMILY_SUPPORT)])
def test_a_family_agrees_or_is_refused_as_the_table_says(model_type: str, tmp_path: Path) -> None:
    check_family(model_type, tmp_path)


def test_composite_families_with_experts_have_a_line() -> None:
    found = {name for name in COMPOSITE_TYPES if has_experts(name)}
    assert found <= FAMILY_SUPPORT.keys(), f"families.py says nothing of {sorted(found - FAMILY_SUPPORT.keys())}"


@pytest.mark.every(5)
@pytest.mark.parametrize(("model_type", "seed"), thinned(itertools.product(RUNNING, VARIATIONS), strength=1))
def test_a_family_agrees_in_other_widths_too(model_type: str, seed: int, tmp_path: Path) -> None:
    check_family(model_type, tmp_path, seed)


def test_the_documentation_is_what_the_table_says() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page_with(families_text(), page) == page, "docs/models.md is older than the table; run `make families`"


@pytest.mark.parametrize(
    ("version", "said"),
    [((5, 17), OWN_ATTENTION), ((5, 23), OWN_ATTENTION), ((5, 24), Support.CHECKED), ((6, 0), Support.CHECKED)],
)
def test_a_line_may_hold_from_a_version_on(version: tuple[int, int], said: Support | Refusal) -> None:
    assert support_in(version)["codegen"] is said
    assert support_in(version)["llama"] is Support.TESTED
    assert support_in(version)["lara_mini"] is Support.CHECKED  # whoever has the family has it so


def test_the_documentation_names_the_versions_of_a_line() -> None:
    written = families_text()
    for name, line in FAMILIES.items():
        if isinstance(line, Since):
            version = ".".join(map(str, line.version))
            assert f"`{name}` (from {version})" in written
            assert (f"`{name}` (before {version})" in written) == (line.before is not None)


def test_a_family_without_a_line_fails_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without = {name: support for name, support in FAMILY_SUPPORT.items() if name != "llama"}
    monkeypatch.setattr(family_outcomes, "FAMILY_SUPPORT", without)
    with pytest.raises(AssertionError, match=r"has llama, of which .* says nothing; it agrees with transformers"):
        check_family("llama", tmp_path)


@pytest.mark.parametrize(
    ("model_type", "line", "complaint"),
    [
        ("llama", OWN_ATTENTION, "refuses llama, and it agrees with transformers; write CHECKED there"),
        ("bloom", Support.CHECKED, "says that bloom runs, but it is refused: model type bloom attends by code"),
        ("bloom", NO_CONTEXT, "refuses bloom for another reason; it is refused: model type bloom attends by code"),
    ],
)
def test_a_line_that_lapsed_fails(
    model_type: str, line: Support | Refusal, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(family_outcomes, "FAMILY_SUPPORT", {**FAMILY_SUPPORT, model_type: line})
    with pytest.raises(AssertionError, match=complaint):
        check_family(model_type, tmp_path)


def test_a_window_that_prompts_do_not_reach_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family_outcomes, "reaches", lambda config: [("sliding_window", LENGTH)])
    with pytest.raises(AssertionError, match=r"llama: sequences of 64 tokens would not show \{'sliding_window': 64\}"):
        check_family("llama", tmp_path)


@pytest.mark.parametrize("model_type", [name for name in CAUSAL_TYPES if name not in UNREADABLE])
def test_tiny_models_have_every_kind_of_layer(model_type: str) -> None:
    """Of those that a family names as such, as many as fit."""
    known = CONFIG_MAPPING[model_type]().get_text_config(decoder=True)
    tiny = family_config(model_type).get_text_config(decoder=True)
    for field in ("layer_types", "layers_block_type", "mlp_layer_types"):
        kinds = set(getattr(known, field, None) or ())
        assert kinds <= set(getattr(tiny, field, None) or ()) or len(kinds) > tiny.num_hidden_layers
