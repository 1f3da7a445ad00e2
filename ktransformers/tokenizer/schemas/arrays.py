"""Merges the parts of a schema that hold at once for an array: for each place all that its item has to fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ktransformers.tokenizer.schemas.expand import is_free
from ktransformers.tokenizer.schemas.nodes import ArrayLeaf
from ktransformers.tokenizer.schemas.references import SubSchema
from ktransformers.tokenizer.schemas.report import WideningReport, refuse
from ktransformers.tokenizer.schemas.scalars import count_of

__all__ = ["MAX_ITEMS", "merged_array"]

MAX_ITEMS = 2000
"""Of one array, where a schema counts them: a grammar has a place for each."""


class _Items(NamedTuple):
    """What one part says: of the first items, and of those behind; None: nothing."""

    prefix: list[SubSchema]
    others: SubSchema | None


def merged_array(
    parts: Sequence[SubSchema], report: WideningReport, child: Callable[[Sequence[SubSchema]], int]
) -> ArrayLeaf | tuple[str, str]:
    """Return the leaf of all parts; or the keyword, and its place, that leaves none.

    child: the node of all these parts.
    """
    said = [_items(part) for part in parts]
    said += [one for part in parts for one in _unevaluated(part, parts, report)]
    length = max((len(one.prefix) for one in said), default=0)
    if length > MAX_ITEMS:
        refuse(parts[0].at, "prefixItems", f"at most {MAX_ITEMS} items are followed")
    prefix = []
    for place in range(length):
        of_place = [one.prefix[place] if place < len(one.prefix) else one.others for one in said]
        prefix.append(child([part for part in of_place if part is not None]))
    others = child([one.others for one in said if one.others is not None])
    leaf = ArrayLeaf(prefix, others)
    return _counted(leaf, parts, report)


def _items(part: SubSchema) -> _Items:
    items, prefix = part.get("items"), part.get("prefixItems")
    keyword, others = "prefixItems", items
    if isinstance(items, list):  # up to draft 2019-09
        keyword, prefix, others = "items", items, part.get("additionalItems")
    if prefix is not None and not isinstance(prefix, list):
        refuse(part.at, keyword, "it must be a list of schemas")
    behind = "additionalItems" if keyword == "items" else "items"
    return _Items(
        [part.below(one, keyword, place) for place, one in enumerate(prefix or ())],
        None if others is None else part.below(others, behind),
    )


def _unevaluated(part: SubSchema, parts: Sequence[SubSchema], report: WideningReport) -> list[_Items]:
    """`unevaluatedItems`: of items that neither the part nor any schema in it, at its place, is about."""
    wanted = part.get("unevaluatedItems")
    if wanted is None or is_free(wanted):
        return []
    within = [one for one in parts if one is part or id(part.schema) in one.chain]
    said = [_items(one) for one in within]
    inner = [one for one in within if one is not part and one.get("unevaluatedItems") is not None]
    if inner or any(one.others is not None for one in said):
        return []
    if any(one.is_option or one.has_conditions or one.get("contains") is not None for one in within):
        report.widen(part.at, "unevaluatedItems")
        return []
    longest = max(said, key=lambda one: len(one.prefix)).prefix
    return [_Items([one.beside(True) for one in longest], part.below(wanted, "unevaluatedItems"))]


def _counted(leaf: ArrayLeaf, parts: Sequence[SubSchema], report: WideningReport) -> ArrayLeaf | tuple[str, str]:
    where = parts[0].at
    for part in parts:
        least, most = count_of(part, "minItems") or 0, count_of(part, "maxItems")
        if part.get("contains") is not None:
            least = max(least, _contained(part, report))
        if part.get("uniqueItems") is True:
            # Whether items differ no grammar tells; how many different ones there are, core_schema.py looks at.
            leaf.is_unique_at = part.at
        elif part.get("uniqueItems") not in (None, False):
            refuse(part.at, "uniqueItems", "it must be true or false")
        if most is not None and most > MAX_ITEMS:
            report.widen(part.at, "maxItems")
            most = None
        if least > MAX_ITEMS:
            refuse(part.at, "minItems", f"at most {MAX_ITEMS} items are followed")
        leaf.least = max(leaf.least, least)
        if most is not None and (leaf.most is None or most < leaf.most):
            leaf.most, where = most, part.at
    if leaf.most is not None and leaf.least > leaf.most:
        return where, "maxItems"
    return leaf


def _contained(part: SubSchema, report: WideningReport) -> int:
    """How many items a part's `contains` asks for at least."""
    least, most = count_of(part, "minContains"), count_of(part, "maxContains")
    least = 1 if least is None else least
    wanted: Any = part.schema["contains"]
    if (least and not is_free(wanted)) or most is not None:
        report.widen(part.at, "contains")
    return least
