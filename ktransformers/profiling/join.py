"""Joins the records of engine and scheduler about a step to the lines of a profile. Pure: messages in, lines out.

    StepRecord (engine), native records ──┐
                                          ├── by step ──> steps, tokens
    TokensRecord (scheduler) ─────────────┘
    RequestRecord (scheduler) ── after its last token ──> requests

Steps leave in their order. One of which half is missing is waited for, since its engine may have died: a token has its
line in any case, and exactly one. Memory is bounded by how many steps and requests are open at once.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ktransformers.profiling.gpu_steps import gpu_calls, gpu_ops
from ktransformers.profiling.messages import (
    SCHEMA_VERSION,
    DropsRecord,
    Farewell,
    GpuRecord,
    Message,
    NativeRecords,
    RequestRecord,
    StepRecord,
    TokensRecord,
)
from ktransformers.profiling.oplog import ExpertsCall, OpLog, StepOps, critical_ns
from ktransformers.profiling.records import HOST, PARTS, TOWER

__all__ = ["Joiner", "Sink"]

Sink = Callable[[str, dict[str, Any]], None]
"""Takes a line: the name of its file, and what is in it."""

HOLD_SECONDS = 2.0
"""How long half of a step waits for the other: senders drain every tenth of that or faster."""

_SAMPLING = PARTS.index("sampling")
_LOST = "the engine's record of the step is lost"
_NO_EXPERTS = "no routed experts were recorded in the step"
_NO_ROW = "the row's experts were not recorded"


@dataclass(slots=True)
class _Open:
    """A step of which not everything is known yet."""

    since: float
    step: StepRecord | None = None
    tokens: TokensRecord | None = None


@dataclass(frozen=True, slots=True)
class _Timed:
    """A step's line, and what its tokens have of it."""

    line: dict[str, Any]
    layers_us: list[float] | None
    routed: Sequence[tuple[int, dict[int, list[int]]]]
    rows: dict[str, list[int]]  # of each request, those of the tokens that are still to be written


@dataclass(slots=True)
class Joiner:
    """Joins messages to lines. began_ns: what times in lines count from. num_layers: of the model, 0 when unknown.

    num_overlaps: steps whose parts took longer than the step, which cannot be: something was counted twice.
    """

    sink: Sink
    began_ns: int
    num_layers: int = 0
    max_open: int = 4096
    max_requests: int = 1 << 16
    counts: dict[str, int] = field(default_factory=lambda: {"steps": 0, "tokens": 0, "requests": 0})
    num_overlaps: int = 0
    num_hurried: int = 0  # steps that were written before all was known of them, to bound memory
    _open: dict[int, _Open] = field(default_factory=dict)
    _order: list[int] = field(default_factory=list)  # a heap of the keys of _open
    _logs: dict[int, OpLog] = field(default_factory=dict)  # by epoch
    _lost: tuple[int, int] = (0, 0)  # of logs that are gone: lost, outside
    _last_ns: dict[str, int] = field(default_factory=dict)  # when a request's last token came
    _newest: int = -1  # step of the last TokensRecord
    _requests: deque[tuple[int, RequestRecord]] = field(default_factory=deque)  # after which step, what

    def take(self, message: Message, now: float) -> None:
        """Take in a message. now: seconds, of any clock that never goes back."""
        match message:
            case NativeRecords(epoch, data):
                self._log(epoch).feed(data)
            case GpuRecord():
                self._log(message.epoch).add(gpu_ops(message), gpu_calls(message), message.step_id)
            case StepRecord():
                self._opened(message.step_id, now).step = message
            case TokensRecord():
                self._newest = max(self._newest, message.step_id)
                self._opened(message.step_id, now).tokens = message
            case RequestRecord():
                self._requests.append((self._newest, message))
            case DropsRecord() | Farewell():
                pass

    def settle(self, now: float) -> None:
        """Write the steps and requests that are complete, or have waited for long enough."""
        while self._order:
            step_id = self._order[0]
            one = self._open[step_id]
            is_complete = one.step is not None and one.tokens is not None
            if not is_complete and now - one.since < HOLD_SECONDS:
                if len(self._order) <= self.max_open:
                    break
                self.num_hurried += 1
            heapq.heappop(self._order)
            del self._open[step_id]
            self._write(one)
        while self._requests and (not self._order or self._requests[0][0] < self._order[0]):
            self._write_request(self._requests.popleft()[1])

    def finish(self) -> None:
        """Write the steps and requests that are left, complete or not."""
        self.settle(float("inf"))

    @property
    def num_lost_records(self) -> int:
        """The number of native records that could not be read or kept."""
        return self._lost[0] + sum(log.num_lost for log in self._logs.values())

    @property
    def num_outside(self) -> int:
        """The number of native operations that ran in no step."""
        return self._lost[1] + sum(log.num_outside for log in self._logs.values())

    def _opened(self, step_id: int, now: float) -> _Open:
        one = self._open.get(step_id)
        if one is None:
            one = self._open[step_id] = _Open(now)
            heapq.heappush(self._order, step_id)
        return one

    def _log(self, epoch: int) -> OpLog:
        if epoch not in self._logs:
            for old in [known for known in self._logs if known < epoch - 1]:  # the last one may have steps open
                gone = self._logs.pop(old)
                self._lost = (self._lost[0] + gone.num_lost, self._lost[1] + gone.num_outside)
            self._logs[epoch] = OpLog()
        return self._logs[epoch]

    def _seconds(self, ns: int | None) -> float | None:
        return None if ns is None else round((ns - self.began_ns) / 1e9, 6)

    def _say(self, name: str, line: dict[str, Any]) -> None:
        self.counts[name] += 1
        self.sink(name, line)

    def _write(self, one: _Open) -> None:
        timed = None
        if one.step is not None:
            waiting = None if one.tokens is None else one.tokens.waiting
            timed = self._timed(one.step, waiting)
            self._say("steps", timed.line)
        if one.tokens is not None:
            for token in one.tokens.tokens:
                self._write_token(token, one.tokens, one.step, timed)

    def _timed(self, step: StepRecord, waiting: int | None) -> _Timed:
        found = self._log(step.epoch).take(step.step_id, step.began_ns, step.ended_ns)
        wall_ns = step.ended_ns - step.began_ns
        layers = self._layers(found)
        self.num_layers = max(self.num_layers, layers)
        parts_ns, gpu_ns = _parts(found, step.sampling_ns)
        if step.tower_ns:
            parts_ns[TOWER] = step.tower_ns
        rest = wall_ns - sum(parts_ns.values())
        self.num_overlaps += rest < 0
        parts_ns[HOST] = max(rest, 0)
        line = {
            "v": SCHEMA_VERSION,
            "step": step.step_id,
            "epoch": step.epoch,
            "t": self._seconds(step.began_ns),
            "ms": round(wall_ns / 1e6, 4),
            "rows": step.num_rows,
            "prefill_rows": step.prefill_rows,
            "sampled": len(step.sampled),
            "seqs": step.num_seqs,
            "waiting": waiting,
            "parts_us": {part: round(ns / 1e3, 1) for part, ns in parts_ns.items()},
            "layers_us": _layers_us(found, self.num_layers),
            "cpu": _cpu(found, wall_ns),
            "bytes": _bytes(found),
            "gpu_us": None if gpu_ns is None else {part: round(ns / 1e3, 1) for part, ns in gpu_ns.items()},
            "experts": _experts(found.calls),
        }
        for name, (hits, misses, nbytes, waited, errors) in (
            ("stored", step.stored),
            ("stored_rows", step.stored_rows),
        ):
            if hits or misses or errors:
                counts = {"hits": hits, "misses": misses, "bytes": nbytes, "wait_us": round(waited * 1e6, 1)}
                line[name] = counts | {"errors": errors}
        if step.has_failed:
            line["failed"] = True
        ops, per_layer = found.ops, None
        critical = critical_ns(ops)
        if (ops["layer"] >= 0).any():
            per_layer = [round(ns / 1e3, 1) for ns in _by_layer(ops["layer"], critical, self.num_layers)]
        rows: dict[str, list[int]] = {}
        for request, row in step.sampled:
            rows.setdefault(request, []).append(row)
        return _Timed(line, per_layer, _routed(found.calls, {row for _, row in step.sampled}), rows)

    def _layers(self, found: StepOps) -> int:
        known = [call.layer for call in found.calls]
        if len(found.ops):
            known.append(int(found.ops["layer"].max()))
        return max(known, default=-1) + 1

    def _write_token(
        self, token: tuple[str, int, int, int], record: TokensRecord, step: StepRecord | None, timed: _Timed | None
    ) -> None:
        request, index, position, token_id = token
        at = record.time_ns if step is None else step.ended_ns
        before = self._last_ns.pop(request, None) or record.arrived_ns.get(request)
        self._last_ns[request] = at  # the last one of the dict: those before it have been silent for longer
        if len(self._last_ns) > self.max_requests:
            del self._last_ns[next(iter(self._last_ns))]
        suspended = record.suspended_ns.get(request, 0)
        line: dict[str, Any] = {
            "v": SCHEMA_VERSION,
            "request": request,
            "index": index,
            "position": position,
            "token": token_id,
            "step": record.step_id,
            "t": self._seconds(at),
            "ms": None if before is None else round(max(at - before - suspended, 0) / 1e6, 4),
            "step_ms": None if timed is None else timed.line["ms"],
            "batch": None if step is None else step.num_rows,
            "layers_us": None if timed is None else timed.layers_us,
        }
        if suspended:
            line["suspended_ms"] = round(suspended / 1e6, 4)
        experts, why = (None, _LOST) if timed is None else self._experts_of(request, timed)
        line["experts"] = experts
        if why is not None:
            line["experts_why"] = why
        self._say("tokens", line)

    def _experts_of(self, request: str, timed: _Timed) -> tuple[list[list[int] | None] | None, str | None]:
        """By layer, and why there are none."""
        if not timed.routed:
            return None, _NO_EXPERTS
        rows = timed.rows.get(request)
        row, found = rows.pop(0) if rows else -1, False
        layers: list[list[int] | None] = [None] * self.num_layers
        for layer, ids_of in timed.routed:
            ids = ids_of.get(row)
            if ids is not None:
                found = True
                layers[layer] = (layers[layer] or []) + ids
        return (layers, None) if found else (None, _NO_ROW)

    def _write_request(self, record: RequestRecord) -> None:
        self._last_ns.pop(record.request, None)
        self._say(
            "requests",
            {
                "v": SCHEMA_VERSION,
                "request": record.request,
                "arrived": self._seconds(record.arrived_ns),
                "admitted": self._seconds(record.admitted_ns),
                "first_token": self._seconds(record.first_token_ns),
                "ended": self._seconds(record.ended_ns),
                "prompt_len": record.prompt_len,
                "cached_len": record.cached_len,
                "completion_len": record.completion_len,
                "num_drafted": record.num_drafted,
                "num_accepted": record.num_accepted,
                "finish_reason": record.finish_reason,
                "preemptions": max(record.num_starts - 1, 0),
                "suspended": [[self._seconds(begin), self._seconds(end)] for begin, end in record.suspended],
            },
        )


def _parts(found: StepOps, sampling_ns: int | None) -> tuple[dict[str, int], dict[str, int] | None]:
    """(ns by part on the critical path, ns by part on GPUs or None). sampling_ns stands for all ops of sampling."""
    ops = found.ops
    numbers, critical = ops["part"].astype(np.int64), critical_ns(ops)
    if sampling_ns is not None:
        critical = np.where(numbers == _SAMPLING, 0, critical)
    parts = _by_part(numbers, critical)
    if sampling_ns is not None:
        parts[PARTS[_SAMPLING]] = sampling_ns
    is_gpu = ops["device"] > 0
    gpu = _by_part(numbers[is_gpu], ops["duration_ns"][is_gpu]) if is_gpu.any() else None
    return parts, gpu


def _by_part(numbers: npt.NDArray[Any], values: npt.NDArray[Any]) -> dict[str, int]:
    sums = np.bincount(np.minimum(numbers, PARTS.index(HOST)), weights=values, minlength=len(PARTS))
    return {part: int(value) for part, value in zip(PARTS, sums, strict=True) if value}


def _by_layer(layers: npt.NDArray[Any], values: npt.NDArray[Any], num_layers: int) -> list[float]:
    is_inside = layers >= 0
    sums: list[float] = np.bincount(layers[is_inside], weights=values[is_inside], minlength=num_layers).tolist()
    return sums


def _layers_us(found: StepOps, num_layers: int) -> dict[str, list[float]]:
    ops = found.ops
    lines = {}
    for number in np.unique(ops["part"]):
        of_part = ops[(ops["part"] == number) & (ops["layer"] >= 0)]
        if len(of_part) and number < len(PARTS):
            sums = _by_layer(of_part["layer"], of_part["duration_ns"], num_layers)
            lines[PARTS[number]] = [round(ns / 1e3, 1) for ns in sums]
    return lines


def _cpu(found: StepOps, wall_ns: int) -> dict[str, Any]:
    ops = found.ops[found.ops["device"] == 0]
    num_threads = int(ops["num_threads"].max()) if len(ops) else 0
    busy = int(ops["busy_ns"].sum())
    return {
        "busy_us": round(busy / 1e3, 1),
        "idle_us": round(max(num_threads * wall_ns - busy, 0) / 1e3, 1),
        "wait_us": round(int(ops["wait_ns"].sum()) / 1e3, 1),
        "num_threads": num_threads,
    }


def _bytes(found: StepOps) -> dict[str, int]:
    return _by_part(found.ops["part"].astype(np.int64), found.ops["bytes"])


def _experts(calls: Sequence[ExpertsCall]) -> list[list[Any]]:
    """[layer, {expert: rows}], by layer."""
    layers: dict[int, dict[str, int]] = {}
    for call in calls:
        used = call.counts.nonzero()[0]
        rows = dict(zip(map(str, used.tolist()), call.counts[used].tolist(), strict=True))
        known = layers.setdefault(call.layer, rows)
        if known is not rows:
            for expert, count in rows.items():
                known[expert] = known.get(expert, 0) + count
    return [[layer, layers[layer]] for layer in sorted(layers)]


def _routed(calls: Sequence[ExpertsCall], rows: Collection[int]) -> list[tuple[int, dict[int, list[int]]]]:
    """(layer, the experts of each of these rows) of each call."""
    routed = []
    for call in calls:
        pairs = zip(call.row_index.tolist(), call.ids.tolist(), strict=True)
        ids_of = {row: ids for row, ids in pairs if row in rows}
        if (call.ids < 0).any():
            ids_of = {row: [one for one in ids if one >= 0] for row, ids in ids_of.items()}
        routed.append((call.layer, ids_of))
    return routed
