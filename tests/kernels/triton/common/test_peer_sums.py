"""Sums over GPUs in one launch: of one GPU, to which the others have signalled already."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from ktransformers.kernels.triton.common.peer_sums import MAX_PROGRAMS, num_signals, peer_gather, peer_sum

SMALL, LARGE = 1024, 4096  # values of a program


def addresses(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors])


def slots(programs: int, size: int, of: list[int]) -> torch.Tensor:
    """Both moments of some programs, for these ranks."""
    found = torch.zeros(2, MAX_PROGRAMS, size, dtype=torch.int32)
    found[:, :programs, of] = 1
    return found.flatten()


@pytest.mark.parametrize(
    ("size", "rank", "numel", "programs"),
    [
        (2, 0, 5120, 5),
        (2, 1, 1, 1),
        (2, 1, 1500, 2),
        (4, 2, 2048, 2),
        (3, 1, 200_000, -(-200_000 // LARGE)),
        (2, 0, 600_000, MAX_PROGRAMS),  # a program has several parts
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_gpu_adds_up_in_the_order_of_ranks(
    size: int, rank: int, numel: int, programs: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(numel)
    shares = [torch.randn(numel + 16, generator=generator) * 10.0**i for i in range(size)]
    others = [i for i in range(size) if i != rank]
    signals = [slots(programs, size, others if i == rank else []) for i in range(size)]
    assert {len(each) for each in signals} == {num_signals(size)}
    out = torch.full((numel,), float("nan"), dtype=dtype)
    peer_sum(addresses(shares), addresses(signals), rank, out)
    want = shares[0].clone()
    for share in shares[1:]:
        want += share
    assert torch.equal(out, want[:numel].to(dtype))
    for other, got in enumerate(signals):  # its own are seen and taken back, the others' are set
        assert torch.equal(got, slots(programs, size, [] if other == rank else [rank]))


@pytest.mark.parametrize(
    ("size", "rank", "rows", "width"), [(2, 0, 1, 1500), (2, 1, 3, 700), (4, 2, 5, 33), (3, 0, 40, 4100), (2, 1, 1, 1)]
)
def test_a_gpu_puts_shares_side_by_side(size: int, rank: int, rows: int, width: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    shares = [torch.randn(rows, width, generator=generator) for _ in range(size)]
    programs = min(-(-rows * width // (SMALL if rows * width <= 1 << 17 else LARGE)), MAX_PROGRAMS)
    others = [i for i in range(size) if i != rank]
    signals = [slots(programs, size, others if i == rank else []) for i in range(size)]
    whole = torch.full((rows, size * width + 8), float("nan"))  # of which rows are far apart
    peer_gather(addresses(shares), addresses(signals), rank, whole[:, :-8])
    assert torch.equal(whole[:, :-8], torch.cat(shares, dim=1))
    assert whole[:, -8:].isnan().all()
    for other, got in enumerate(signals):
        assert torch.equal(got, slots(programs, size, [] if other == rank else [rank]))


@pytest.mark.parametrize("out", [torch.zeros(2, 3), torch.zeros(2, 4, dtype=torch.bfloat16)])
def test_what_cannot_be_gathered(out: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"out must be fp32 \[T, 2 \* width\]"):
        peer_gather(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), 0, out)


def test_launches_of_any_size_use_the_same_slots() -> None:
    """Else a signal could be written where another program has not seen the last one yet."""
    shares = [torch.ones(8 * SMALL) for _ in range(2)]
    seen = []
    for numel in (SMALL, 8 * SMALL):
        signals = [slots(MAX_PROGRAMS, 2, [1]), slots(0, 2, [])]
        peer_sum(addresses(shares), addresses(signals), 0, torch.empty(numel))
        seen.append(signals[1].view(2, MAX_PROGRAMS, 2)[:, :, 0].nonzero().tolist())
    assert seen == [[[moment, program] for moment in (0, 1) for program in range(count)] for count in (1, 8)]


def test_nothing_to_add_waits_for_nobody() -> None:
    peer_sum(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), 0, torch.empty(0, 4))


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"shares": torch.zeros(2)}, TypeError, "shares and signals must be int64 of one length"),
        ({"signals": torch.zeros(3, dtype=torch.int64)}, TypeError, "of one length"),
        ({"rank": 2}, ValueError, "no rank 2 of 2 GPUs"),
        ({"out": torch.zeros(4, 4).T}, ValueError, "contiguous"),
        ({"out": torch.zeros(4, dtype=torch.int32)}, TypeError, "out must be fp16, bf16 or fp32"),
    ],
)
def test_arguments_that_do_not_fit(changes: dict[str, object], error: type[Exception], says: str) -> None:
    fitting = {
        "shares": torch.zeros(2, dtype=torch.int64),
        "signals": torch.zeros(2, dtype=torch.int64),
        "rank": 0,
        "out": torch.zeros(4),
    }
    with pytest.raises(error, match=says):
        peer_sum(**{**fitting, **changes})  # type: ignore[arg-type]
