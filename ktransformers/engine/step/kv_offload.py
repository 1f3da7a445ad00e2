"""The bytes below the cache: slots of host memory, files, and the copies between. Does what plans say, knows no prefix.

    cache, on its devices ── copies, in the order of the steps ── host slots ── two threads ── files

A slot holds all tensors of a page (or of a state) one after the other, so that a file is one piece. Copies of a GPU's
tensors go over the stream that steps run on: whoever comes later in it finds them done, and the threads wait for marks.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ktransformers.cache.page_files import PageFiles, PageFormat, WrongFile
from ktransformers.cache.paged import PagedCache
from ktransformers.cache.tiers import PAGE, STATE
from ktransformers.errors import KernelError, reason_of
from ktransformers.kernels.transfer.copies import PinnedRanges
from ktransformers.kernels.transfer.cuda import CudaDriver
from ktransformers.scheduler.config import TierConfig
from ktransformers.scheduler.tier_records import TierPlan, TierResult

__all__ = ["SlotLayout", "TieredCache"]

logger = logging.getLogger(__name__)

_ALIGN = 64


class SlotLayout:
    """The layout of a page's tensors in a slot, or of a state's. tensors: [num * rows, ...] each; rows: of one."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], rows: int):
        self.tensors = {name: tensor.view(-1, rows, *tensor.shape[1:]) for name, tensor in tensors.items()}
        self.offsets: dict[str, int] = {}
        at = 0
        for name, tensor in self.tensors.items():
            self.offsets[name] = at
            at += -(-tensor[0].numel() * tensor.itemsize // _ALIGN) * _ALIGN
        self.nbytes = max(at, _ALIGN)
        self.devices = sorted({tensor.device for tensor in tensors.values() if tensor.is_cuda}, key=str)

    def views(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        """View slots, uint8 [num_slots, nbytes], as the tensors in them, [num_slots, rows, ...]."""
        found = {}
        for name, tensor in self.tensors.items():
            first, shape = self.offsets[name] // tensor.itemsize, tensor.shape[1:]  # whole, see _ALIGN
            typed = block.view(tensor.dtype)[:, first : first + shape.numel()]
            found[name] = typed.view(-1, *shape)
        return found

    def __str__(self) -> str:
        """All of it, for headers of files."""
        return "; ".join(
            f"{name} {tensor.dtype} {'x'.join(map(str, tensor.shape[1:]))}" for name, tensor in self.tensors.items()
        )


class _Slots:
    """Host memory of one kind, uint8 [num_slots, nbytes]. Touched when it is written first, unless it is pinned."""

    def __init__(self, layout: SlotLayout, num_slots: int):
        self.layout = layout
        self.block = torch.empty(num_slots, layout.nbytes, dtype=torch.uint8)
        self.views = layout.views(self.block)
        self._pairs = [(tensor, self.views[name]) for name, tensor in layout.tensors.items()]

    def store(self, source: int, slot: int) -> None:
        for tensor, host in self._pairs:
            host[slot].copy_(tensor[source], non_blocking=True)

    def load(self, slot: int, target: int) -> None:
        for tensor, host in self._pairs:
            tensor[target].copy_(host[slot], non_blocking=True)

    def bytes_of(self, slot: int) -> memoryview:
        return self.block[slot].numpy().data

    def pin(self) -> PinnedRanges | None:
        """Pin the slots where the cache is on a GPU, so that copies need no step in between."""
        if not self.layout.devices or not self.block.numel():
            return None
        pieces = [(self.block.data_ptr(), self.block.numel())]
        try:
            return PinnedRanges(CudaDriver(self.layout.devices[0]), pieces, [self.block])
        except KernelError as error:
            logger.warning("host memory of --cpu_memory_size_GB is not pinned, copies are slower: %s", error)
            return None


class _Marks:
    """A point in the streams of some devices."""

    def __init__(self, devices: Sequence[torch.device]):
        self._events = [torch.cuda.Event(enable_timing=True) for _ in devices]  # type: ignore[no-untyped-call]
        for event, device in zip(self._events, devices, strict=True):
            event.record(torch.cuda.current_stream(device))
        self._at = time.perf_counter()

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()

    def seconds_until(self, later: _Marks) -> float | None:
        """Seconds from these marks to `later`; None while that has not come."""
        if not all(event.query() for event in later._events):  # type: ignore[no-untyped-call]
            return None
        pairs = zip(self._events, later._events, strict=True)
        return max((a.elapsed_time(b) / 1e3 for a, b in pairs), default=later._at - self._at)


@dataclass(frozen=True, slots=True)
class _Job:
    """kind: read, write or delete."""

    kind: str
    name: bytes
    depth: int
    slot: int
    marks: _Marks | None = None


@dataclass(frozen=True, slots=True)
class _Done:
    job: _Job
    is_good: bool
    seconds: float


class _FileThreads:
    """Reads beside writes and deletes, both in order. Errors are misses: told, and logged once for each reason."""

    def __init__(self, files: PageFiles, bytes_of: Callable[[bytes, int], memoryview]):
        self._files, self._bytes_of = files, bytes_of
        self.done: queue.SimpleQueue[_Done] = queue.SimpleQueue()
        self.num_open = 0  # reads and writes that no result has told of
        self._said: set[str] = set()
        self._inboxes = {kind: queue.SimpleQueue[_Job | None]() for kind in ("read", "write")}
        self._threads = [
            threading.Thread(target=self._run, args=(inbox,), name=f"ktransformers-{kind}-pages", daemon=True)
            for kind, inbox in self._inboxes.items()
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: _Job) -> None:
        self.num_open += job.kind != "delete"
        self._inboxes["read" if job.kind == "read" else "write"].put(job)

    def list(self) -> list[tuple[bytes, int, int]]:
        try:
            return [(one.name, one.depth, one.nbytes) for one in self._files.found()]
        except OSError as error:
            self._say("list", error)
            return []

    def close(self) -> None:
        """Finish the jobs that were begun."""
        for inbox in self._inboxes.values():
            inbox.put(None)
        for thread in self._threads:
            thread.join()
        self._files.close()

    def _run(self, inbox: queue.SimpleQueue[_Job | None]) -> None:
        while (job := inbox.get()) is not None:
            if job.marks is not None:
                job.marks.wait()
            began, is_good = time.perf_counter(), True
            try:
                self._do(job)
            except (OSError, WrongFile) as error:
                self._say(job.kind, error)
                is_good = False
            if job.kind != "delete":
                self.done.put(_Done(job, is_good, time.perf_counter() - began))

    def _do(self, job: _Job) -> None:
        if job.kind == "delete":
            self._files.delete(job.name, job.depth)
        elif job.kind == "write":
            self._files.write(job.name, job.depth, self._bytes_of(job.name[:1], job.slot))
        else:
            try:
                self._files.read(job.name, job.depth, self._bytes_of(job.name[:1], job.slot))
            except WrongFile:
                self._files.delete(job.name, job.depth)  # or it would be found again at every start
                raise

    def _say(self, what: str, error: OSError | WrongFile) -> None:
        reason = f"cannot {what} cached pages in {self._files.folder}: {reason_of(error)}"
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("%s; such pages are computed instead (counted, and not said again)", reason)


class TieredCache:
    """Host slots, and files in `folder` where there is one, below `cache`. One caller at a time.

    config: with as many slots and bytes as there are to be. files: instead of those of `folder`, for tests.
    """

    def __init__(
        self, cache: PagedCache, config: TierConfig, folder: Path | None = None, files: PageFiles | None = None
    ):
        layouts = self.layouts(cache)
        counts = {PAGE: config.host_pages, STATE: config.host_states}
        self._slots = {kind: _Slots(layout, counts[kind]) for kind, layout in layouts.items()}
        self._pinned = [slots.pin() for slots in self._slots.values()]
        self._devices = layouts[PAGE].devices
        self._loading: list[tuple[int, _Marks, _Marks]] = []
        self._waited: list[_Done] = []  # that `done` has told of and no result yet
        self._found: list[tuple[bytes, int, int]] | None = None
        if folder is not None and files is None:
            files = self.files(cache, config.fingerprint, folder, config.disk_bytes)
        self._files = files
        self._threads = (
            None if files is None else _FileThreads(files, lambda kind, slot: self._slots[kind].bytes_of(slot))
        )

    @staticmethod
    def layouts(cache: PagedCache) -> dict[bytes, SlotLayout]:
        """Return layouts by kind: what a slot of each holds."""
        layouts = {PAGE: SlotLayout(cache.tensors(), cache.page_size)}
        if cache.states is not None:
            layouts[STATE] = SlotLayout(cache.states.tensors(), 1)
        return layouts

    @classmethod
    def files(cls, cache: PagedCache, fingerprint: bytes, folder: Path, max_bytes: int) -> PageFiles:
        """Open the files of a cache, of at most max_bytes."""
        formats = {
            kind: PageFormat(fingerprint, str(layout), layout.nbytes) for kind, layout in cls.layouts(cache).items()
        }
        return PageFiles(folder, formats, max_bytes=max_bytes)

    def in_slot(self, kind: bytes, slot: int) -> dict[str, torch.Tensor]:
        """Return what a host slot holds, [rows, ...] by name, until the next step. Copies to it must have ended."""
        return {name: view[slot] for name, view in self._slots[kind].views.items()}

    def in_file(self, name: bytes, depth: int) -> dict[str, torch.Tensor] | None:
        """Return what a file holds, as `in_slot`, in memory of its own. On any thread. None when it cannot be used:
        logged."""
        assert self._files is not None, "a file is asked for, and there are none"
        layout = self._slots[name[:1]].layout
        block = torch.empty(1, layout.nbytes, dtype=torch.uint8)
        try:
            self._files.read(name, depth, block[0].numpy().data)
        except (OSError, WrongFile) as error:
            logger.warning("cannot read a cached page in %s: %s", self._files.folder, reason_of(error))
            return None
        return {each: view[0] for each, view in layout.views(block).items()}

    def run(self, plan: TierPlan) -> None:
        """Do what a plan says before its rows; ends when copies are on their way and files are asked for."""
        if plan.lists and self._threads is not None:
            self._found = self._threads.list()
        for page, slot in plan.stores:
            self._slots[PAGE].store(page, slot)
        for state, slot in plan.state_stores:
            self._slots[STATE].store(state, slot)
        if plan.loads or plan.state_loads:
            self._load(plan)
        if plan.reads or plan.writes or plan.deletes:
            self._ask(plan)
        if plan.waits:
            self._wait()

    def _load(self, plan: TierPlan) -> None:
        nbytes, began = 0, _Marks(self._devices)
        for kind, loads in ((PAGE, plan.loads), (STATE, plan.state_loads)):
            for slot, target in loads:
                self._slots[kind].load(slot, target)
                nbytes += self._slots[kind].layout.nbytes
        self._loading.append((nbytes, began, _Marks(self._devices)))

    def _ask(self, plan: TierPlan) -> None:
        assert self._threads is not None, "files are asked for, and there are none"
        marks = _Marks(self._devices) if self._devices else None
        for name, depth, slot in plan.reads:
            self._threads.put(_Job("read", name, depth, slot, marks))
        for name, depth in plan.deletes:
            self._threads.put(_Job("delete", name, depth, -1))
        for name, depth, slot in plan.writes:
            self._threads.put(_Job("write", name, depth, slot, marks))

    def _wait(self) -> None:
        """Until a file has ended; at once when none is on its way."""
        threads = self._threads
        if threads is not None and threads.num_open > len(self._waited):
            self._waited.append(threads.done.get())

    def result(self, row_seconds: float = 0.0) -> TierResult:
        """Return what was done since the last result."""
        writes, reads = list[tuple[bytes, bool]](), list[tuple[bytes, bool]]()
        read_bytes, read_seconds = 0, 0.0
        for done in self._ended():
            is_read = done.job.kind == "read"
            (reads if is_read else writes).append((done.job.name, done.is_good))
            if is_read and done.is_good:
                read_bytes += self._slots[done.job.name[:1]].layout.nbytes
                read_seconds += done.seconds
        found, self._found = self._found, None
        return TierResult(
            row_seconds=row_seconds,
            loaded=self._loaded(),
            read=(read_bytes, read_seconds),
            writes=writes,
            reads=reads,
            found=found,
        )

    def _ended(self) -> list[_Done]:
        ended, self._waited = self._waited, []
        if self._threads is not None:
            while not self._threads.done.empty():
                ended.append(self._threads.done.get())
            self._threads.num_open -= len(ended)
        return ended

    def _loaded(self) -> tuple[int, float]:
        nbytes, seconds, left = 0, 0.0, []
        for one in self._loading:
            took = one[1].seconds_until(one[2])
            if took is None:
                left.append(one)
            else:
                nbytes, seconds = nbytes + one[0], seconds + took
        self._loading = left
        return nbytes, seconds

    def reset(self) -> None:
        """Forget all, as the scheduler does after a step that failed: nothing is on its way afterwards."""
        while self._threads is not None and self._threads.num_open:
            self._wait()
            self._ended()
        self._loading.clear()
        self._found = None

    def close(self) -> None:
        """Finish files on their way, and give the memory back."""
        if self._threads is not None:
            self._threads.close()
            self._threads = None
        for pinned in self._pinned:
            if pinned is not None:
                pinned.close()
