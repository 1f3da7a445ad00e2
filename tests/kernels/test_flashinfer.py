"""What is handed to FlashInfer: page tables, shapes, and whether it is used at all. FlashInfer itself is made up."""

from __future__ import annotations

import inspect
import operator

import pytest
import torch

from ktransformers.kernels import flashinfer
from ktransformers.kernels.flashinfer import FlashInfer, GqaShape, LatentShape, pages_of
from tests.support.engines import fake_flashinfer

pytest.importorskip("triton")

CPU = torch.device("cpu")
GQA = GqaShape(4, 2, 64, torch.bfloat16, 64**-0.5)


@pytest.mark.parametrize("page_size", [1, 4, 6, 16, 48, 7])
def test_pages_are_those_of_the_block_table(page_size: int) -> None:
    """Every position of every sequence is found in the slot that the block table names."""
    lengths, counts = [37, 5, 48, 1], [12, 5, 1, 1]
    num_pages = [-(-length // page_size) for length in lengths]
    table = torch.full((4, max(num_pages)), -1, dtype=torch.int32)
    free = torch.randperm(sum(num_pages) + 3, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    for s, n in enumerate(num_pages):
        table[s, :n], free = free[:n], free[n:]
    seq_ids = torch.repeat_interleave(torch.arange(4, dtype=torch.int32), torch.tensor(counts))
    kv_lens = torch.tensor([k for n, c in zip(lengths, counts, strict=True) for k in range(n - c + 1, n + 1)])
    pages = pages_of(seq_ids, kv_lens.to(torch.int32), table, page_size)
    assert pages.qo_indptr.tolist() == [0, 12, 17, 18, 19]
    assert pages.kv_lens.tolist() == lengths
    assert 16 % pages.page_size == page_size % pages.page_size == 0
    ends = (pages.kv_indptr.diff() - 1) * pages.page_size + pages.last_page_lens
    assert ends.tolist() == lengths
    for s, length in enumerate(lengths):
        mine = pages.indices[pages.kv_indptr[s] : pages.kv_indptr[s + 1]]
        for p in range(length):
            slot = int(mine[p // pages.page_size]) * pages.page_size + p % pages.page_size
            assert slot == int(table[s, p // page_size]) * page_size + p % page_size


def test_sequences_without_rows_are_left_out() -> None:
    table = torch.tensor([[3], [1], [2]], dtype=torch.int32)
    seq_ids, kv_lens = torch.tensor([0, 2, 2], dtype=torch.int32), torch.tensor([4, 1, 2], dtype=torch.int32)
    pages = pages_of(seq_ids, kv_lens, table, 4)
    assert pages.qo_indptr.tolist() == [0, 1, 3]
    assert pages.indices.tolist() == [3, 2]
    assert pages.kv_lens.tolist() == [4, 2]


@pytest.mark.parametrize(("seq_ids", "kv_lens"), [([0, 1, 0], [1, 1, 2]), ([0, 0], [2, 1]), ([0, 0], [1, 3])])
def test_rows_out_of_order_are_refused(seq_ids: list[int], kv_lens: list[int]) -> None:
    table = torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="side by side"):
        pages_of(torch.tensor(seq_ids), torch.tensor(kv_lens), table, 4)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "shape",
    [
        GQA,
        GqaShape(6, 2, 128, torch.float16, 0.1, window=20),
        GqaShape(2, 2, 64, torch.float16, 0.2, softcap=30.0),
        LatentShape(3, 512, 64, torch.float16, 0.05),
    ],
)
def test_it_agrees_with_the_triton_kernels(shape: GqaShape | LatentShape, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_flashinfer.install(monkeypatch)
    assert flashinfer.why_not_shape(shape) is None
    flash = FlashInfer(CPU)
    assert flashinfer.difference(flash, shape) <= flashinfer.tolerance(shape)
    assert flashinfer.difference(flash, shape, 100) <= flashinfer.tolerance(shape)
    calls.fault = 2 * flashinfer.tolerance(shape)
    assert flashinfer.difference(flash, shape) > flashinfer.tolerance(shape)
    assert [plan["page_size"] for plan in calls.plans] == [16, 4, 16]
    assert len(calls.runs) == 3


def test_reasons_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer.remove(monkeypatch)
    assert flashinfer.version() is None
    assert flashinfer.why_not(CPU) == "it is not installed"
    fake_flashinfer.install(monkeypatch, capability=(7, 5))
    assert flashinfer.version() == "0.0-fake"
    assert "7.5" in str(flashinfer.why_not(CPU))
    fake_flashinfer.install(monkeypatch)
    assert flashinfer.why_not(CPU) is None
    monkeypatch.undo()
    fake_flashinfer.install(monkeypatch)
    monkeypatch.setattr(flashinfer, "_capability", lambda device: None)
    assert flashinfer.why_not(CPU) == "cpu is no CUDA device"


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (GqaShape(4, 2, 64, torch.float32, 1.0), "float32"),
        (GqaShape(4, 2, 96, torch.float16, 1.0), "96 columns"),
        (LatentShape(4, 256, 64, torch.bfloat16, 1.0), "256 + 64"),
    ],
)
def test_shapes_that_it_has_no_kernel_for(shape: GqaShape | LatentShape, reason: str) -> None:
    found = flashinfer.why_not_shape(shape)
    assert found is not None
    assert reason in found


@pytest.mark.parametrize("method", ["__init__", "plan", "run"])
@pytest.mark.parametrize("kind", ["BatchPrefillWithPagedKVCacheWrapper", "mla.BatchMLAPagedAttentionWrapper"])
def test_the_fake_has_its_signatures(kind: str, method: str) -> None:
    """Where FlashInfer is installed: the same parameters in the same order, as far as the fake has them."""
    real = pytest.importorskip("flashinfer")
    theirs = inspect.signature(getattr(operator.attrgetter(kind)(real), method)).parameters
    ours = inspect.signature(getattr(getattr(fake_flashinfer, kind.rpartition(".")[2]), method)).parameters
    positional = [name for name, one in ours.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert [name for name in theirs if name in positional] == positional
    assert list(theirs)[: len(positional)] == positional


def test_parts_that_differ_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("flashinfer-cubin version does not match")

    monkeypatch.setattr(flashinfer, "_module", refuse)
    assert flashinfer.version() is None
    assert flashinfer.why_not(CPU) == "it cannot be imported (flashinfer-cubin version does not match)"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "shape",
    [
        GqaShape(32, 4, 128, torch.bfloat16, 128**-0.5),
        GqaShape(32, 4, 128, torch.bfloat16, 128**-0.5, window=100),
        GqaShape(16, 16, 64, torch.float16, 0.2, softcap=30.0),
        LatentShape(16, 512, 64, torch.bfloat16, 192**-0.5),
    ],
)
def test_the_real_one(shape: GqaShape | LatentShape) -> None:
    pytest.importorskip("flashinfer")
    device = torch.device("cuda:0")
    assert flashinfer.why_not(device) is None
    assert flashinfer.difference(FlashInfer(device), shape) <= flashinfer.tolerance(shape)
