"""Which replica gets a prompt. Pure."""

from __future__ import annotations

import random

from ktransformers.cluster.affinity import PrefixAffinity, block_keys, keys_in


def test_keys_stand_for_a_block_and_all_before_it() -> None:
    ids = list(range(100, 110))
    keys = block_keys(ids, "", 4)
    assert len(keys) == 2
    assert block_keys(ids[:8], "", 4) == keys
    assert block_keys([0, *ids[1:]], "", 4)[0] != keys[0]
    assert block_keys([0, *ids[1:]], "", 4)[1] != keys[1]
    assert not set(block_keys(ids, "salt", 4)) & set(keys)
    assert block_keys(ids[:3], "", 4) == []
    assert keys_in(b"".join(keys)) == keys


def test_the_next_turn_goes_where_the_one_before_was() -> None:
    affinity = PrefixAffinity(max_imbalance=2)
    loads = {"a": 0, "b": 0, "c": 0}
    turn = list(range(20))
    affinity.took("b", block_keys(turn, "", 4))
    longer = block_keys([*turn, *range(50, 70)], "", 4)
    assert affinity.ranked(longer, loads)[0] == "b"
    assert affinity.known_len("b", longer) == 5
    assert affinity.ranked(longer, {**loads, "b": 2})[0] == "b"
    assert affinity.ranked(longer, {**loads, "b": 3}) == ["a", "c", "b"]  # it has too much to do
    assert affinity.ranked(block_keys(turn, "other", 4), {"a": 1, "b": 1, "c": 0})[0] == "c"


def test_prompts_that_nobody_knows_are_spread() -> None:
    affinity = PrefixAffinity(max_imbalance=2)
    loads = {"a": 0, "b": 0, "c": 0}
    chosen = []
    for number in range(6):
        keys = block_keys([number] * 8, "", 4)
        chosen.append(affinity.ranked(keys, loads)[0])
        affinity.took(chosen[-1], keys)
    assert chosen == ["a", "b", "c", "a", "b", "c"]


def test_the_longest_beginning_wins() -> None:
    affinity = PrefixAffinity(max_imbalance=2)
    prompt = list(range(40))
    affinity.took("a", block_keys(prompt[:12], "", 4))
    affinity.took("b", block_keys(prompt[:24], "", 4))
    assert affinity.ranked(block_keys(prompt, "", 4), {"a": 0, "b": 2})[0] == "b"
    assert affinity.ranked(block_keys(prompt, "", 4), {"a": 0, "b": 3})[0] == "a"  # the least loaded one
    assert affinity.ranked(block_keys(prompt[:12], "", 4), {"a": 1, "b": 0})[0] == "b"  # both know it


def test_a_replica_that_is_gone_is_forgotten() -> None:
    affinity = PrefixAffinity(max_imbalance=2)
    keys = block_keys(list(range(16)), "", 4)
    affinity.took("a", keys)
    affinity.keep(["b"])
    assert affinity.known_len("a", keys) == 0
    assert affinity.ranked(keys, {}) == []


def test_memory_is_bounded_and_the_beginnings_stay() -> None:
    affinity = PrefixAffinity(max_imbalance=2, max_blocks=10)
    first = block_keys(list(range(32)), "", 4)
    affinity.took("a", first)
    affinity.took("a", block_keys(list(range(100, 128)), "", 4))
    assert affinity.known_len("a", first) == 3  # seven of ten are the newer prompt's


def test_ranks_hold_every_replica_once() -> None:
    rng = random.Random(7)
    affinity = PrefixAffinity(max_imbalance=3, max_blocks=50)
    names = [f"r{number}" for number in range(5)]
    for _ in range(300):
        keys = block_keys([rng.randrange(3) for _ in range(rng.randrange(40))], "", 4)
        loads = {name: rng.randrange(8) for name in rng.sample(names, rng.randint(1, 5))}
        ranked = affinity.ranked(keys, loads)
        assert sorted(ranked) == sorted(loads)
        assert loads[ranked[0]] - min(loads.values()) <= 3
        assert [loads[name] for name in ranked[1:]] == sorted(loads[name] for name in ranked[1:])
        affinity.took(ranked[0], keys)
