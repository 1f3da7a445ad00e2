"""Tiers below the paged cache: the same tokens with and without, after restarts, and whatever happens to the files."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ktransformers.cache.paged import LayerShape, PagedCache
from ktransformers.cache.state import StateShape
from ktransformers.cache.tiers import PAGE, STATE
from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import Engine, build_engine
from ktransformers.engine.step.kv_offload import TieredCache
from ktransformers.scheduler.tier_records import TierPlan, TierResult
from tests.support.engines.tiered_service import FINGERPRINT, PAGE_SIZE, Service, tier_config
from tests.support.models.recurrent_models import recurrent_model
from tests.support.models.tiny_models import VOCAB_SIZE, tiny_model

SHAPES = [
    LayerShape(2, 4, 3, dtype=torch.bfloat16),
    LayerShape(1, 5, 3, is_latent=True, index_dim=3),
    LayerShape.without_pages(StateShape({"conv": (3, 5), "recurrent": (2, 2, 2)})),
]


def filled(num_pages: int = 6) -> PagedCache:
    cache, generator = PagedCache(SHAPES, num_pages, 4, num_states=3), torch.Generator().manual_seed(1)
    for tensor in (*cache.tensors().values(), *cache.states.tensors().values()):  # type: ignore[union-attr]
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return cache


def finished(tiers: TieredCache) -> TierResult:
    """Once every file has ended."""
    assert tiers._threads is not None
    writes, reads = [], []
    result = tiers.result()
    while True:
        writes += result.writes
        reads += result.reads
        if not tiers._threads.num_open:
            return TierResult(writes=writes, reads=reads)
        tiers.run(TierPlan(waits=True))
        result = tiers.result()


def test_copies_bring_every_tensor_back_and_touch_nothing_else(tmp_path: Path) -> None:
    cache = filled()
    before = {name: tensor.clone() for name, tensor in cache.tensors().items()}
    states = {name: tensor.clone() for name, tensor in cache.states.tensors().items()}  # type: ignore[union-attr]
    tiers = TieredCache(cache, tier_config(cache), tmp_path)
    page, state = PAGE + bytes(32), STATE + bytes(32)
    tiers.run(TierPlan(stores=[(2, 7)], state_stores=[(1, 3)], writes=[(page, 5, 7), (state, 5, 3)]))
    assert finished(tiers).writes == [(page, True), (state, True)]
    for tensor in (*cache.tensors().values(), *cache.states.tensors().values()):  # type: ignore[union-attr]
        tensor.zero_()
    tiers.run(TierPlan(reads=[(page, 5, 9), (state, 5, 0)]))
    assert finished(tiers).reads == [(page, True), (state, True)]
    tiers.run(TierPlan(loads=[(9, 4)], state_loads=[(0, 2)]))
    loaded = tiers.result().loaded
    assert loaded[0] == sum(layout.nbytes for layout in TieredCache.layouts(cache).values())
    for name, tensor in cache.tensors().items():
        assert torch.equal(tensor[16:20], before[name][8:12]), name
        assert not tensor[:16].any()
        assert not tensor[20:].any()
    for name, tensor in cache.states.tensors().items():  # type: ignore[union-attr]
        assert torch.equal(tensor[2], states[name][1]), name
        assert not tensor[:2].any()
    tiers.close()


class Event:
    """Of a GPU that is as far as the test says."""

    is_over = threading.Event()

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        return self.is_over.is_set()

    def synchronize(self) -> None:
        assert self.is_over.wait(60)

    def elapsed_time(self, other: Event) -> float:
        return 250.0


def test_files_and_figures_wait_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    monkeypatch.setattr(Event, "is_over", threading.Event())
    cache = filled()
    tiers = TieredCache(cache, tier_config(cache), tmp_path)
    tiers._devices = [torch.device("cuda:0")]
    name = PAGE + bytes(32)
    tiers.run(TierPlan(stores=[(2, 7)], loads=[(7, 1)], writes=[(name, 0, 7)]))
    result = tiers.result()
    assert (result.loaded, result.writes) == ((0, 0.0), [])
    assert not list(tmp_path.glob("*.page"))
    Event.is_over.set()
    tiers.run(TierPlan(waits=True))
    result = tiers.result()
    assert result.loaded == (TieredCache.layouts(cache)[PAGE].nbytes, 0.25)
    assert list(result.writes) == [(name, True)]
    tiers.close()


# Models.


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3_next"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp(request.param)
    make = tiny_model if request.param == "qwen3_moe" else recurrent_model
    make(request.param).save_pretrained(folder)
    config = EngineConfig(model_path=folder, cache_lens=1024, cpu_infer=1, self_check=False)
    made = build_engine(config, page_size=PAGE_SIZE, max_batch_size=4)
    yield made
    made.close()


def some_ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


TURNS = [some_ids(count, seed) for seed, count in enumerate((100, 40, 70, 33))]


def conversation(service: Service, turns: int = len(TURNS)) -> tuple[list[list[int]], list[int], list[int]]:
    """The answers, the rows of each turn, and all tokens."""
    history, answers, rows = list[int](), [], []
    for turn in TURNS[:turns]:
        history += turn
        answer, count = service.answer(history)
        answers.append(answer)
        rows.append(count)
        history += answer
    return answers, rows, history


@pytest.fixture(scope="module")
def expected(engine: Engine) -> tuple[list[list[int]], list[int]]:
    """The answers, and one more, with no tiers and a cache that holds all."""
    plain = Service(engine, host_pages=0)
    answers, _, history = conversation(plain)
    return answers, plain.answer([*history, 5, 6, 7])[0]


Expected = tuple[list[list[int]], list[int]]


def test_a_cache_that_is_too_small_gives_the_same_tokens(engine: Engine, expected: Expected) -> None:
    service, without = Service(engine, num_pages=24), Service(engine, num_pages=24, host_pages=0)
    rows = {}
    for each in (service, without):
        answers, count = [], 0
        history = list[int]()
        for turn in TURNS:
            history += turn
            answer, computed = each.answer(history)
            answers.append(answer)
            history += answer
            count += computed
            each.answer(some_ids(330, 50))  # takes all the pages
        assert answers == expected[0]
        rows[each] = count
    assert rows[service] < rows[without] / 2
    assert service.stats().host_hit_len > 0
    service.close()


def test_the_next_service_computes_the_last_turn_alone(engine: Engine, expected: Expected, tmp_path: Path) -> None:
    first = Service(engine, tmp_path)
    answers, _, history = conversation(first)
    assert answers == expected[0]
    first.close()
    second = Service(engine, tmp_path)
    last, rows = second.answer([*history, 5, 6, 7])
    assert last == expected[1]
    limit = 3 + PAGE_SIZE + 20 if not engine.cache.num_states else 3 + 64 + 20
    assert rows <= limit
    assert second.stats().disk_hit_len > 200
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    second.close()


def test_an_engine_that_dies_is_followed_by_one_that_reads_the_files(
    engine: Engine, expected: Expected, tmp_path: Path
) -> None:
    service = Service(engine, tmp_path)
    answers, _, history = conversation(service)
    service.close()
    service.loop.crash()
    (tmp_path / "writing-0123").write_bytes(b"torn")
    last, rows = service.answer([*history, 5, 6, 7])
    assert (answers, last) == expected
    assert rows < 100
    assert not (tmp_path / "writing-0123").exists()
    service.close()  # behind the files that the last answer is still writing
    assert not list(tmp_path.glob("writing-*"))


def damaged_by_a_bit(folder: Path) -> None:
    for path in folder.glob("[!.]*"):
        data = bytearray(path.read_bytes())
        data[-7] ^= 1
        path.write_bytes(data)


def cut_short(folder: Path) -> None:
    for path in folder.glob("[!.]*"):
        os.truncate(path, path.stat().st_size // 2)


def of_another_model(folder: Path) -> None:
    for path in folder.glob("[!.]*"):
        path.write_bytes(path.read_bytes().replace(FINGERPRINT, b"n" * 32))


def swapped(folder: Path) -> None:
    """Files that are good, with names of others."""
    for kind in ("page", "state"):
        paths = sorted(folder.glob(f"*.{kind}"))
        data = [path.read_bytes() for path in paths]
        for path, other in zip(paths, data[1:] + data[:1], strict=True):
            path.write_bytes(other)


@pytest.mark.every(4)
@pytest.mark.parametrize("harm", [damaged_by_a_bit, cut_short, of_another_model, swapped])
def test_files_that_are_wrong_are_computed_instead(
    engine: Engine, expected: Expected, tmp_path: Path, harm: object, caplog: pytest.LogCaptureFixture
) -> None:
    first = Service(engine, tmp_path)
    _, _, history = conversation(first)
    first.close()
    harm(tmp_path)  # type: ignore[operator]
    second = Service(engine, tmp_path)
    with caplog.at_level(logging.WARNING):
        last, rows = second.answer([*history, 5, 6, 7])
    assert last == expected[1]
    assert rows >= len(history)
    assert second.stats().num_read_errors > 0
    assert second.stats().disk_hit_len == 0
    assert len([line for line in caplog.messages if "cannot read cached pages" in line]) == 1
    second.close()


@pytest.mark.parametrize("is_gone_early", [True, False])
def test_a_folder_that_cannot_be_used_costs_nothing_but_the_files(
    engine: Engine, expected: Expected, tmp_path: Path, is_gone_early: bool, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "pages"
    folder.mkdir(mode=0o700)
    service = Service(engine, folder)
    if is_gone_early:
        folder.rename(tmp_path / "early")
    with caplog.at_level(logging.WARNING):
        answers, _, history = conversation(service)
        if not is_gone_early:
            folder.rename(tmp_path / "late")
        folder.write_text("a file is no folder")
        assert (answers, service.answer([*history, 5, 6, 7])[0]) == expected
    assert not is_gone_early or service.stats().num_write_errors > 3
    service.close()


class FullDisk:
    def write(self, fd: int, data: memoryview, /) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_counted_and_leaves_nothing(
    engine: Engine, expected: Expected, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service = Service(engine, tmp_path, system=FullDisk())
    with caplog.at_level(logging.WARNING):
        assert conversation(service)[0] == expected[0]
    assert service.stats().num_write_errors > 3
    assert service.stats().written_bytes == 0
    assert len([line for line in caplog.messages if "No space left" in line]) == 1
    service.close()
    assert [path.name for path in tmp_path.iterdir()] == [".quota"]


def test_files_stay_within_their_bytes(engine: Engine, expected: Expected, tmp_path: Path) -> None:
    probe = tier_config(PagedCache(engine.cache.shapes, 1, PAGE_SIZE, 1))
    most = 8 * probe.page_file_bytes + 2 * probe.state_file_bytes
    service = Service(engine, tmp_path, disk_bytes=most)
    assert conversation(service)[0] == expected[0]
    service.close()
    assert 0 < sum(path.stat().st_size for path in tmp_path.glob("[!.]*")) <= most


def test_two_services_with_one_folder_do_each_other_no_harm(engine: Engine, expected: Expected, tmp_path: Path) -> None:
    """Each lists what the other has, writes what it has written, and deletes what it counts on. One quota is kept."""
    probe = tier_config(PagedCache(engine.cache.shapes, 1, PAGE_SIZE, 1))
    small = 6 * probe.page_file_bytes + 2 * probe.state_file_bytes
    conversation(first := Service(engine, tmp_path))
    first.close()
    services = [Service(engine, tmp_path, num_pages=24, disk_bytes=size * small) for size in (2, 1)]
    histories, answers = [list[int](), list[int]()], [list[list[int]](), list[list[int]]()]
    for turn in TURNS:
        for service, history, said in zip(services, histories, answers, strict=True):
            history += turn
            answer, _ = service.answer(history)
            said.append(answer)
            history += answer
            service.answer(some_ids(330, 50))
    assert answers == [expected[0]] * 2
    for each in services:
        each.close()
        # What the other one is writing yet is renamed at any moment.
        kept = [path for path in tmp_path.glob("[!.]*") if not path.name.startswith("writing-")]
        assert sum(path.stat().st_size for path in kept) <= 2 * small
