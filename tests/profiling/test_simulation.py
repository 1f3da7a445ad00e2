"""The simulation of expert caches, beside caches that are simulated one access at a time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ktransformers.cache.hot_experts import MAX_UPLOADS, HotExperts, replay
from ktransformers.profiling import Profile, load
from ktransformers.profiling.cache_simulation import POLICIES, simulate
from tests.support.checks.profile_folders import Run, Written, meta, write_lines, write_profile

RUN = Run(requests=8, experts=12, top_k=3, layers=5, dense=2, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace")


@pytest.fixture(scope="module")
def written(folder: Path) -> Written:
    return write_profile(folder, RUN)


def accesses(written: Written) -> list[list[set[int]]]:
    """[steps][layers with experts]: the experts that decoding tokens of the step chose."""
    steps = sorted({line["step"] for line in written.tokens if line["index"] > 0})
    lines = {step: [one for one in written.tokens if one["step"] == step and one["index"] > 0] for step in steps}
    return [
        [{e for one in lines[step] for e in one["experts"][layer]} for layer in range(RUN.dense, RUN.layers)]
        for step in steps
    ]


def cached(trace: list[list[set[int]]], slots: int, by: str) -> float:
    """The hit rate of caches of `slots` experts per layer. Equal ones: the smaller number stays."""
    hits = reads = 0
    for layer in range(len(trace[0])):
        last: dict[int, int] = {}
        count: dict[int, int] = {}
        content: set[int] = set()
        for now, step in enumerate(trace):
            hits += len(step[layer] & content)
            reads += len(step[layer])
            for expert in step[layer]:
                last[expert] = now
                count[expert] = count.get(expert, 0) + 1
            rank = {e: ((last[e],) if by == "lru" else (count[e], last[e])) for e in last}
            content = set(sorted(last, key=lambda e: (*rank[e], -e), reverse=True)[:slots])
    return hits / reads


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_every_size_of_the_caches(folder: Path, written: Written, policy: str) -> None:
    rates = simulate(load(folder))
    assert rates is not None
    trace = accesses(written)
    assert rates.num_steps == len(trace)
    assert rates.num_reads == sum(len(experts) for step in trace for experts in step)
    assert rates.rates[policy].tolist() == [cached(trace, slots, policy) for slots in range(RUN.experts + 1)]
    assert rates.budgets.tolist() == [slots * 3 * RUN.expert_bytes for slots in range(RUN.experts + 1)]


def test_the_policy_itself(folder: Path, written: Written) -> None:
    """At the sizes at which it is run; between two it is on the line through them."""
    rates = simulate(load(folder))
    assert rates is not None
    steps = [
        tuple(np.array(pair) for pair in zip(*((n, e) for n, layer in enumerate(step) for e in layer), strict=True))
        for step in accesses(written)
    ]
    num_layers, got = RUN.layers - RUN.dense, rates.rates["hot"]
    for slots in (3, 6, 9):
        policy = HotExperts(num_layers, RUN.experts, slots * num_layers, MAX_UPLOADS)
        policy.land(policy.begin())
        assert got[slots] == sum(replay(policy, steps)) / rates.num_reads
    assert got[0] == 0.0
    assert got[-1] == 1.0
    assert got[7] == pytest.approx((got[6] + got[8]) / 2)


def counts(written: Written) -> np.ndarray:
    found = np.zeros((RUN.layers - RUN.dense, RUN.experts), int)
    for step in accesses(written):
        for layer, experts in enumerate(step):
            for expert in experts:
                found[layer, expert] += 1
    return found


def test_fixed_choices(folder: Path, written: Written) -> None:
    rates = simulate(load(folder))
    assert rates is not None
    used = counts(written)
    for slots, (static, layers) in enumerate(zip(rates.rates["static"], rates.rates["layers"], strict=True)):
        assert static == sum(sorted(used.ravel(), reverse=True)[: 3 * slots]) / used.sum()
        whole = 3 * slots // RUN.experts
        assert layers == used[len(used) - whole :].sum() / used.sum()


def test_layers_of_different_sizes(tmp_path: Path, written: Written) -> None:
    """The static choice weighs hits against bytes; whole layers come from the last one."""
    sizes = [0, 0, 1 << 20, 1 << 20, 1 << 30]
    (tmp_path / "meta.json").write_text(json.dumps(meta(replace(RUN, model={"expert_bytes": sizes}))))
    write_lines(tmp_path / "tokens.jsonl", written.tokens)
    rates = simulate(load(tmp_path))
    assert rates is not None
    used = counts(written)
    assert rates.budgets[1] == (1 << 30) + (2 << 20)
    # Both small layers (24 MiB) come before the first of the large ones, of which one slot each holds as many.
    best = used[:2].sum() + used[2].max()
    assert rates.rates["static"][2] == best / used.sum()
    assert rates.rates["layers"][:12].tolist() == [0.0] * 12  # the last layer takes 12 GiB


def test_a_long_trace_is_cut_to_its_end(folder: Path, written: Written) -> None:
    rates = simulate(load(folder), max_steps=10)
    assert rates is not None
    assert rates.num_steps == 10
    trace = accesses(written)[-10:]
    assert rates.rates["lru"].tolist() == [cached(trace, slots, "lru") for slots in range(RUN.experts + 1)]


def test_knee_of_skewed_and_of_even_use(tmp_path: Path) -> None:
    def run(name: str, ids: list[list[int]]) -> Profile:
        folder = tmp_path / name
        written = write_profile(folder, replace(RUN, requests=1, layers=1, dense=0, experts=10, top_k=2))
        line = {**written.tokens[1], "index": 1}
        rows = [{**line, "step": step, "experts": [chosen]} for step, chosen in enumerate(ids)]
        write_lines(folder / "tokens.jsonl", rows)
        return load(folder)

    skewed = simulate(run("skewed", [[0, 1]] * 96 + [[2, 3], [4, 5], [6, 7], [8, 9]]))
    assert skewed is not None
    assert skewed.knee == 2
    even = simulate(run("even", [[2 * (i % 5), 2 * (i % 5) + 1] for i in range(100)]))
    assert even is not None
    assert even.knee is None


def test_profiles_without_a_trace(tmp_path: Path, written: Written) -> None:
    assert set(POLICIES) == {"lru", "lfu", "hot", "static", "layers"}
    write_lines(tmp_path / "tokens.jsonl", [{**line, "experts": None} for line in written.tokens])
    (tmp_path / "meta.json").write_text(json.dumps(meta(RUN)))
    assert simulate(load(tmp_path)) is None
    (tmp_path / "meta.json").write_text('{"v": 1}')
    assert simulate(load(tmp_path)) is None


def test_the_policy_misses_less_than_lru(tmp_path: Path) -> None:
    """A recorded trace of layers that use their experts unevenly, each in its own way."""
    written = write_profile(tmp_path, replace(RUN, requests=1, layers=3, dense=0, experts=32, top_k=4))
    line = {**written.tokens[1], "index": 1}
    generator = np.random.default_rng(2)
    logits = -np.array([0.3, 1.0, 2.0])[:, None] * np.log(1.0 + np.argsort(generator.random((3, 32)), axis=1))
    rows = []
    for step in range(600):
        keys = logits + generator.gumbel(size=logits.shape)
        rows.append({**line, "step": step, "experts": np.argsort(-keys, axis=1)[:, :4].tolist()})
    write_lines(tmp_path / "tokens.jsonl", rows)
    rates = simulate(load(tmp_path))
    assert rates is not None
    hot, lru = rates.rates["hot"], rates.rates["lru"]
    for slots in (8, 16):
        assert 1.0 - hot[slots] < 0.88 * (1.0 - lru[slots])
