"""Uploads over a slow link: what a step's launch waits for, which is nothing, and how many bytes are under way.

The link is a clock that the test moves: 2 GB/s, as of a GPU behind one lane or two.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ktransformers.cache.hot_experts import HotExperts
from ktransformers.kernels.cpu import WorkerPool
from tests.operators.experts.test_streamed import DEVICE, E, make_kernel
from tests.support.engines.inline_device import InlineDriver

pytest.importorskip("triton")

from ktransformers.engine.step.hot import _most_uploads
from ktransformers.operators.experts.gpu_slots import HotPool
from ktransformers.operators.experts.split import CpuRate, PrefillRates

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")

LINK = 2e9  # bytes a second
LAYERS = 4


class SlowLink:
    """A CopyQueue whose copies take their time, one after another. A mark is the time at which it is reached.

    waits: seconds that a caller or the compute stream waited for a mark that was not reached. put: (time, bytes).
    """

    def __init__(self, scale: float) -> None:
        self.now, self._free_at, self._scale = 0.0, 0.0, scale
        self.compute_until = 0.0
        self.waits: list[float] = []
        self.put: list[tuple[float, float]] = []

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self._free_at = max(self._free_at, self.now) + nbytes * self._scale / LINK
        self.put.append((self.now, nbytes * self._scale))

    def mark(self) -> float:
        return max(self._free_at, self.now)

    def compute_mark(self) -> float:
        return self.compute_until

    def wait(self, mark: float) -> None:
        self._free_at = max(self._free_at, mark)

    def compute_waits(self, mark: float) -> None:
        self._note(mark)

    def is_done(self, mark: float) -> bool:
        return mark <= self.now

    def synchronize(self, mark: float) -> None:
        self._note(mark)

    def _note(self, mark: float) -> None:
        if mark > self.now:
            self.waits.append(mark - self.now)
            self.now = mark


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with_threads = WorkerPool(1)
    yield with_threads
    with_threads.close()


@pytest.mark.parametrize("step_seconds", [2e-3, 8e-3])
def test_no_step_waits_for_an_upload(step_seconds: float, pool: WorkerPool) -> None:
    """Experts of 2.6 MB, of which the link brings one in 1.3 ms: one upload at a time, behind the step that was
    launched last, and the map names what is there."""
    kernels = [make_kernel(pool, seed) for seed in range(LAYERS)]
    expert = 2.6e6
    copy = expert / LINK
    flat = CpuRate((1,), (1e-4,))
    uploads = _most_uploads(PrefillRates(copy, 0.0, flat, flat), 1)
    assert uploads == 1
    policy = HotExperts(LAYERS, E, LAYERS * 2, uploads)
    nbytes = HotPool(DEVICE, kernels, policy, SlowLink(1.0), InlineDriver(), 8).expert_nbytes  # type: ignore[arg-type]
    link = SlowLink(expert / nbytes)
    slots = HotPool(DEVICE, kernels, policy, link, InlineDriver(), max_rows=8)  # type: ignore[arg-type]
    slots.begin()
    begun, link.waits = len(link.put), []
    generator = np.random.default_rng(0)
    for number in range(200):
        hot = (number // 50 + np.arange(2)) % E  # the experts that all layers use, others after 50 steps
        chosen = hot if generator.random() < 0.9 else generator.integers(0, E, 2)
        link.compute_until = link.now + step_seconds  # launched: over by then
        slots.picks[:, torch.from_numpy(np.unique(chosen))] += 1
        slots.launched()
        assert (slots.slot_of.numpy() == slots.mapped).all()
        link.now = link.compute_until
        slots.finished(1)
        policy.check_integrity()
    assert link.waits == []
    assert policy.totals.uploads >= 3 * LAYERS  # one expert of each layer, three times
    assert policy.totals.hits > 0.7 * policy.totals.reads
    # Within any time the link was asked for no more than it carries: never more than one upload that is not there yet.
    sent = [at for at, _ in link.put[begun:]]
    under_way = [sum(n for at, n in link.put[begun:] if start <= at < start + copy) for start in sorted(set(sent))]
    assert max(under_way) <= 1.01 * expert


def test_the_limit_follows_the_link() -> None:
    flat = CpuRate((1,), (1e-4,))
    found = [_most_uploads(PrefillRates(2.6e6 / rate, 0.0, flat, flat), 1) for rate in (2e9, 12e9, 50e9, 1e13)]
    assert found == [1, 4, 19, 64]
    assert _most_uploads(None, 2) == 8
