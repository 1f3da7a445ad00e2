"""Finds the nodes that no value fits, and those that have no finite value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ktransformers.tokenizer.schemas.nodes import ArrayLeaf, Leaf, ObjectLeaf, SchemaNode, ValuesLeaf
from ktransformers.tokenizer.schemas.report import refuse

__all__ = ["check_depth", "check_ends", "children", "pruned"]

_MAX_DEPTH = 200
"""llguidance goes down on the stack, which ends the process at some 1,000 levels on a thread with 8 MiB of it."""


def needed(leaf: Leaf) -> Iterator[int]:
    """Yield the nodes of which every value of a leaf has one."""
    if isinstance(leaf, ArrayLeaf):
        yield from leaf.prefix[: leaf.least]
        if leaf.least > len(leaf.prefix):
            yield leaf.items
    elif isinstance(leaf, ObjectLeaf):
        yield from (leaf.properties[name] for name in leaf.required)


def children(leaf: Leaf) -> Iterator[int]:
    """Yield all nodes that a leaf's values may have."""
    if isinstance(leaf, ArrayLeaf):
        yield from leaf.prefix
        yield leaf.items
    elif isinstance(leaf, ObjectLeaf):
        yield from leaf.properties.values()
        yield from leaf.patterns.values()
        yield leaf.others


def _fixpoint(nodes: Sequence[SchemaNode], start: bool) -> list[bool]:
    """Which nodes have values. start: whether those that need themselves count as having some."""
    found = [start] * len(nodes)
    users: list[list[int]] = [[] for _ in nodes]
    for number, node in enumerate(nodes):
        for option in node.options:
            for other in (option,) if isinstance(option, int) else needed(option):
                users[other].append(number)
    waiting = list(range(len(nodes)))
    while waiting:
        number = waiting.pop()
        has = any(_has(option, found) for option in nodes[number].options)
        if has != found[number]:
            found[number] = has
            waiting += users[number]
    return found


def _has(option: Leaf | int, found: Sequence[bool]) -> bool:
    if isinstance(option, int):
        return found[option]
    if isinstance(option, ValuesLeaf):
        return bool(option.values)
    return all(found[other] for other in needed(option))


def pruned(nodes: Sequence[SchemaNode]) -> list[bool]:
    """Return which nodes have values; options without any are taken out of the others."""
    has = _fixpoint(nodes, True)
    for node in nodes:
        needs = [one for option in node.options for one in ((option,) if isinstance(option, int) else needed(option))]
        node.cause = next((one for one in needs if not has[one]), None)
        node.options = [option for option in node.options if _has(option, has)]
        for option in node.options:
            if isinstance(option, ArrayLeaf):
                _shorten(option, has)
            elif isinstance(option, ObjectLeaf):
                option.patterns = {name: one for name, one in option.patterns.items() if has[one] or has[option.others]}
    return has


def _shorten(leaf: ArrayLeaf, has: Sequence[bool]) -> None:
    """An array ends before the first item that nothing fits."""
    places = [*leaf.prefix, leaf.items]
    first = next((place for place, one in enumerate(places) if not has[one]), None)
    if first is not None and (leaf.most is None or leaf.most > first):
        leaf.most = first


def check_ends(nodes: Sequence[SchemaNode], has: Sequence[bool], root: int, named: Callable[[int], str]) -> None:
    """Raise SchemaError for a node each of whose values has another of the same in it: there is no finite one."""
    for cycle in _in_place_cycles(nodes):
        refuse(named(cycle), "$ref", "it leads back to itself")
    ends = _fixpoint(nodes, False)
    seen, waiting = {root}, [root]
    while waiting:
        number = waiting.pop()
        if has[number] and not ends[number]:
            refuse(named(number), "$ref", "each value needs another one of the same, so that no answer would end")
        for option in nodes[number].options:
            for other in (option,) if isinstance(option, int) else children(option):
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)


def check_depth(nodes: Sequence[SchemaNode], root: int) -> None:
    """Raise SchemaError for nodes that lie too deep within each other for a reader that goes down on its stack."""
    seen, path = {root}, [iter(_all_children(nodes[root]))]
    while path:
        other = next((one for one in path[-1] if one not in seen), None)
        if other is None:
            path.pop()
            continue
        seen.add(other)
        path.append(iter(_all_children(nodes[other])))
        if len(path) > _MAX_DEPTH:
            refuse(nodes[other].at, "schema", f"schemas lie more than {_MAX_DEPTH} levels within each other")


def _all_children(node: SchemaNode) -> list[int]:
    return [one for option in node.options for one in ((option,) if isinstance(option, int) else children(option))]


def _in_place_cycles(nodes: Sequence[SchemaNode]) -> Iterator[int]:
    """Nodes that stand for themselves."""
    state = [0] * len(nodes)  # 1: being looked at; 2: done
    for start in range(len(nodes)):
        path = [(start, iter(nodes[start].options))] if not state[start] else []
        state[start] = state[start] or 1
        while path:
            number, options = path[-1]
            option = next((one for one in options if isinstance(one, int)), None)
            if option is None:
                state[number] = 2
                path.pop()
            elif state[option] == 1:
                yield option
                return
            elif not state[option]:
                state[option] = 1
                path.append((option, iter(nodes[option].options)))
