"""Which records a store keeps: by hand, by a plain model of the scores, beside prompts, and at a start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from ktransformers.errors import CapacityError, FormatError, WeightError
from ktransformers.kernels.cpu import ExpertStore, MoeKernel, WorkerPool
from ktransformers.kernels.cpu.expert_store import Extent, least_store_nbytes
from ktransformers.kernels.types import ActivationSpec, ExpertWeights, QuantType, RawTensor
from tests.support.checks.stored_experts import Stored, build, make_layer, write_records

MakeWeight = Callable[..., RawTensor]
Held = set[tuple[int, int]]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(2)
    yield made
    made.close()


def made_of(
    path: Path, make_weight: MakeWeight, pool: WorkerPool, layers: int, experts: int, slots: int, top_k: int = 1
) -> Stored:
    several = [make_layer(make_weight, pool, experts=experts, seed=seed) for seed in range(layers)]
    return build(path / "experts", several, pool, slots, top_k)


def use(kernel: MoeKernel, experts: list[int], rows: int = 1) -> None:
    """A call whose rows all have these experts."""
    ids = torch.tensor([experts] * rows)
    kernel.forward(torch.ones(rows, kernel.hidden_size), ids, torch.ones(ids.shape))


def held(made: Stored) -> Held:
    return set(made.store.handle._held())


def test_who_leaves_by_hand(make_weight: MakeWeight, pool: WorkerPool, tmp_path: Path) -> None:
    """g = 2^(1/32). After calls of 0, 0, 0, 1, 1, 2 a seventh finds worth
    0: (g^-6 + g^-5 + g^-4) / (4 + 16) = 0.135   1: (g^-3 + g^-2) / (2 + 16) = 0.105   2: g^-1 / (1 + 16) = 0.058.
    """
    made = made_of(tmp_path, make_weight, pool, layers=1, experts=8, slots=3)
    (kernel,) = made.kernels
    for expert in (0, 0, 0, 1, 1, 2):
        use(kernel, [expert])
    assert held(made) == {(0, 0), (0, 1), (0, 2)}
    use(kernel, [3])
    assert held(made) == {(0, 0), (0, 1), (0, 3)}
    use(kernel, [2])  # 3 is worth 0.058 now, 1 still 0.098
    assert held(made) == {(0, 0), (0, 1), (0, 2)}
    for _ in range(13):
        use(kernel, [2])
    # In the call after step 20: 0 has 3 picks at steps 0 to 2, (g^-21 + g^-20 + g^-19) / (19 + 16) = 0.056; 1 has
    # (g^-18 + g^-17) / (17 + 16) = 0.042; 2 has many.
    use(kernel, [4])
    assert held(made) == {(0, 0), (0, 2), (0, 4)}
    use(kernel, [5])  # 0: (g^-22 + g^-21 + g^-20) / (20 + 16) = 0.053; 4: g^-1 / 17 = 0.058
    assert held(made) == {(0, 2), (0, 4), (0, 5)}
    stats = made.store.stats()
    assert (stats.misses, stats.hits) == (7, 16)
    assert stats.bytes_read == 7 * made.store.layout(0).nbytes
    made.store.close()


def test_agrees_with_a_plain_model(make_weight: MakeWeight, pool: WorkerPool, tmp_path: Path) -> None:
    """Of decode steps over three layers: every pick of a record with its age, summed up anew each time."""
    layers, experts, slots = 3, 16, 11
    made = made_of(tmp_path, make_weight, pool, layers, experts, slots, top_k=3)
    picks: dict[tuple[int, int], list[int]] = {}
    there: Held = set()
    generator = torch.Generator().manual_seed(5)

    def worth(record: tuple[int, int], step: int) -> float:
        return sum(2.0 ** ((at - step) / 32) for at in picks[record]) / (step - picks[record][-1] + 16)

    for step in range(120):
        for layer in range(layers):
            skewed = torch.rand(experts, generator=generator) * torch.arange(1, experts + 1) ** -0.7
            chosen = sorted((layer, int(expert)) for expert in skewed.topk(3).indices)
            for record in chosen:
                picks.setdefault(record, []).append(step)
            others = sorted(there - set(chosen), key=lambda record: (worth(record, step), record))
            lacking = [record for record in chosen if record not in there]
            leaving = max(len(there) + len(lacking) - slots, 0)
            there = (there - set(others[:leaving])) | set(lacking)
            use(made.kernels[layer], [expert for _, expert in chosen])
            assert held(made) == there, (step, layer)
    made.store.close()


def test_a_prompt_leaves_what_decode_needs(make_weight: MakeWeight, pool: WorkerPool, tmp_path: Path) -> None:
    made = made_of(tmp_path, make_weight, pool, layers=2, experts=32, slots=24, top_k=4)
    hot = [[0, 1, 2, 3], [8, 9, 10, 11]]
    for _ in range(8):
        for layer in range(2):
            use(made.kernels[layer], hot[layer])
    for layer in range(2):  # what is left of the slots
        for first in range(16, 24, 4):
            use(made.kernels[layer], list(range(first, first + 4)))
    before = made.store.stats()
    for _ in range(3):
        for layer in range(2):
            ids = torch.arange(32).repeat(5, 1)[:, torch.randperm(32)][:, :32].reshape(40, 4)
            made.kernels[layer].forward(torch.ones(40, 256), ids, torch.ones(40, 4))
    after = made.store.stats()
    assert after.misses - before.misses >= 3 * 2 * (32 - 24)
    assert {(layer, expert) for layer in range(2) for expert in hot[layer]} <= held(made)
    for layer in range(2):
        use(made.kernels[layer], hot[layer])
    assert made.store.stats().misses == after.misses
    made.store.close()


def test_many_rows_adapt_too(make_weight: MakeWeight, pool: WorkerPool, tmp_path: Path) -> None:
    """A large batch that decodes is no different from a prompt: what it uses step by step comes to stay."""
    made = made_of(tmp_path, make_weight, pool, layers=1, experts=32, slots=16, top_k=4)
    made.store.fill(wait=True)
    assert held(made) == {(0, expert) for expert in range(16)}
    for _ in range(40):
        use(made.kernels[0], [16, 17, 18, 19], rows=8)
    assert {(0, expert) for expert in range(16, 20)} <= held(made)
    before = made.store.stats().misses
    use(made.kernels[0], [16, 17, 18, 19], rows=8)
    assert made.store.stats().misses == before
    made.store.close()


def test_filled_evenly_or_as_it_was(make_weight: MakeWeight, pool: WorkerPool, tmp_path: Path) -> None:
    made = made_of(tmp_path, make_weight, pool, layers=3, experts=8, slots=7)
    made.store.fill(wait=True)
    even = {(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2)}
    assert held(made) == even
    assert made.store.stats().num_filled == 7
    for _ in range(3):
        use(made.kernels[1], [5])
    use(made.kernels[2], [6])
    scores = made.store.scores()
    assert {layer: row.nonzero().ravel().tolist() for layer, row in scores.items()} == {0: [], 1: [5], 2: [6]}
    made.store.close()
    again = made_of(tmp_path, make_weight, pool, layers=3, experts=8, slots=7)
    again.store.fill(scores, wait=True)
    assert held(again) == {(1, 5), (2, 6), (0, 0), (1, 0), (2, 0), (0, 1), (1, 1)}
    assert all(torch.equal(row, scores[layer]) for layer, row in again.store.scores().items())
    with pytest.raises(ValueError, match="scores of layer 0 must be 8 numbers"):
        again.store.fill({0: torch.ones(7)})
    again.store.close()


def test_all_fit(make_weight: MakeWeight, pool: WorkerPool, tmp_path: Path) -> None:
    made = made_of(tmp_path, make_weight, pool, layers=2, experts=8, slots=1000)
    assert made.store.stats().num_slots == 16
    made.store.fill(wait=True)
    for layer in range(2):
        use(made.kernels[layer], list(range(8)), rows=9)
    stats = made.store.stats()
    assert (stats.misses, stats.hits, stats.hit_rate) == (0, 16, 1.0)
    made.store.close()


@pytest.mark.parametrize(("experts", "layers", "top_k"), [(8, 1, 2), (8, 5, 3), (64, 4, 8), (16, 1, 16)])
def test_the_smallest_budget(
    experts: int, layers: int, top_k: int, make_weight: MakeWeight, pool: WorkerPool, tmp_path: Path
) -> None:
    """What a plan takes for it is what the store takes, with records of two sizes."""
    kinds = [(QuantType.Q8_0, QuantType.Q8_0), (QuantType.Q8_0, QuantType.F32)]
    several = [make_layer(make_weight, pool, kinds[i % 2], experts=experts, seed=i) for i in range(layers)]
    written = write_records(tmp_path / "experts", several)
    records = Counter[int]()
    for layout, extents in written:
        records[layout.nbytes] += len(extents)
    least = least_store_nbytes(records, top_k)
    for budget in (least - 1, least):
        store = ExpertStore([tmp_path / "experts"], pool, budget)
        for number, (layout, extents) in enumerate(written):
            store.add_layer(number, layout, extents)
        with pytest.raises(CapacityError) if budget < least else nullcontext():
            store.open(top_k)
        store.close()


def test_what_is_refused(make_weight: MakeWeight, pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "experts"
    layer = make_layer(make_weight, pool)
    ((layout, extents),) = write_records(path, [layer])
    with pytest.raises(WeightError, match="nowhere cannot be opened: No such file"):
        ExpertStore([tmp_path / "nowhere"], pool, 1 << 20)
    with pytest.raises(ValueError, match="io_threads must be between 1"):
        ExpertStore([path], pool, 1 << 20, io_threads=0)
    with pytest.raises(CapacityError, match="for experts are too few: the 2 of a token"):
        build(tmp_path / "other", [layer], pool, slots=3, top_k=2)
    store = ExpertStore([path], pool, 1 << 20)
    last = Extent(0, path.stat().st_size, layout.nbytes)
    for wrong, message in (
        ([*extents[:-1], [last]], "ends before its experts do"),
        ([*extents[:-1], [Extent(1, 0, layout.nbytes)]], "a file that is not there"),
        ([[Extent(0, 64, layout.nbytes)]], "is not what the record needs"),
        ([*extents[:-1], [extents[0][0]] * 3], "all experts as many"),
        ([], "at least one expert"),
    ):
        with pytest.raises(FormatError, match=f"layer 4 .*{message}"):
            store.add_layer(4, layout, wrong)
    number = store.add_layer(4, layout, extents)
    with pytest.raises(ValueError, match="layer 4 already"):
        store.add_layer(4, layout, extents)
    biases = ExpertWeights(None, [], [])
    kernel = MoeKernel(biases, ActivationSpec(), pool, 4, (store, number))
    with pytest.raises(RuntimeError, match="was not opened yet"):
        use(kernel, [0])
    with pytest.raises(ValueError, match="give biases alone"):
        MoeKernel(layer.resident, ActivationSpec(), pool, 4, (store, number))
    with pytest.raises(ValueError, match="up_bias must have shape"):
        MoeKernel(ExpertWeights(None, [], [], up_bias=torch.ones(8, 3)), ActivationSpec(), pool, 4, (store, number))
    store.open(1)
    with pytest.raises(ValueError, match="opened once"):
        store.open(1)
    with pytest.raises(IndexError, match=r"topk_ids\[0, 0\] is 9"):
        use(kernel, [9])
    use(kernel, [0])
    store.close()
    store.close()
    with pytest.raises(RuntimeError, match="this ExpertStore is closed"):
        use(kernel, [0])
