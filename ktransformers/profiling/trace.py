"""A profile as a trace for ui.perfetto.dev, in the JSON of Chrome's trace viewer.

    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format)

Tracks: requests (as many as were under way at once), steps, the CPU's parts, the GPU's, and a track of layers for each
part. A profile has the begin of a step and how long each part and each layer of it took, not when: within a step they
stand one after the other, parts in the order of PARTS, layers in the order of the model.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from ktransformers.profiling.records import PARTS
from ktransformers.profiling.tables import Profile

__all__ = ["MAX_LAYERED_STEPS", "write_trace"]

MAX_LAYERED_STEPS = 2000
"""A longer profile has slices of layers for its last steps only: a viewer cannot hold them all."""

_REQUESTS, _STEPS, _LAYERS = 1, 2, 3  # "processes" of the format: groups of tracks
_STEP_TRACK, _CPU_TRACK, _GPU_TRACK = 1, 2, 3

Event = dict[str, Any]


def write_trace(profile: Profile, path: Path) -> int:
    """Write the trace; returns the number of its events. Memory does not grow with the number of steps."""
    count = 0
    with path.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for events in (_names(), _requests(profile), _steps(profile)):
            count = _write(file, events, count)
        file.write(b"\n]}\n")
    return count


def _write(file: BinaryIO, events: Iterable[Event], count: int) -> int:
    encoder = msgspec.json.Encoder()
    for event in events:
        file.write((b",\n" if count else b"") + encoder.encode(event))
        count += 1
    return count


def _named(process: int, name: str, track: int | None = None) -> Event:
    if track is None:
        return {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": track, "args": {"name": name}}


def _names() -> Iterator[Event]:
    yield _named(_REQUESTS, "requests")
    yield _named(_STEPS, "steps")
    yield _named(_STEPS, "steps", _STEP_TRACK)
    yield _named(_STEPS, "CPU parts", _CPU_TRACK)
    yield _named(_STEPS, "GPU parts", _GPU_TRACK)
    yield _named(_LAYERS, "layers")
    for index, part in enumerate(PARTS, 1):
        yield _named(_LAYERS, f"layers: {part}", index)


def _slice(process: int, track: int, name: str, begin_us: float, micros: float, args: Event | None = None) -> Event:
    event: Event = {"ph": "X", "pid": process, "tid": track, "name": name}
    event |= {"ts": round(begin_us, 3), "dur": round(micros, 3)}
    return event | {"args": args} if args else event


def _requests(profile: Profile) -> Iterator[Event]:
    """A slice for each request, in it one for its waiting, one each for prefill and decode, and those it was suspended.

    One that came before the profile begins with it, one that was still there ends with the last step.
    """
    steps = profile.steps.read("t", "ms")
    last = float((steps["t"] + steps["ms"] / 1e3).max(initial=0.0))
    columns = {name: column.tolist() for name, column in profile.requests.read().items()}
    ends: list[tuple[float, int]] = []  # when each track is free again
    columns["arrived"] = [0.0 if math.isnan(value) else value for value in columns["arrived"]]
    for row in sorted(range(len(columns["arrived"])), key=columns["arrived"].__getitem__):
        value = {name: column[row] for name, column in columns.items()}
        begin, end = value["arrived"], value["ended"]
        if math.isnan(end):
            end = max(begin, last)
        if ends and ends[0][0] <= begin:
            _, track = heapq.heappop(ends)
        else:
            track = len(ends) + 1
            yield _named(_REQUESTS, f"requests {track}", track)
        heapq.heappush(ends, (end, track))
        args = {name: value[name] for name in ("prompt_len", "cached_len", "completion_len", "preemptions")}
        if value["num_drafted"]:
            args |= {name: value[name] for name in ("num_drafted", "num_accepted")}
        args["finish_reason"] = value["finish_reason"]
        yield _slice(_REQUESTS, track, value["request"], begin * 1e6, (end - begin) * 1e6, args)
        marks = [begin, value["admitted"], value["first_token"], end]
        for name, left, right in zip(("waits", "prefill", "decode"), marks, marks[1:], strict=False):
            if right >= left:  # nor is NaN
                yield _slice(_REQUESTS, track, name, left * 1e6, (right - left) * 1e6)
        for left, right in value["suspended"]:
            over = end if right is None else right
            yield _slice(_REQUESTS, track, "suspended", left * 1e6, (over - left) * 1e6)


def _steps(profile: Profile) -> Iterator[Event]:
    names = ("step", "ms", "rows", "prefill_rows", "seqs", "parts_us", "gpu_us", "layers_us")
    begins = np.append(profile.steps["t"], np.inf) * 1e6
    layered_from = len(profile.steps) - MAX_LAYERED_STEPS
    at = 0
    for batch in profile.steps.batches(*names):
        for row in range(len(batch["step"])):
            begin = float(begins[at])
            # Begins are rounded to microseconds, and a track must not have slices that overlap a little.
            micros = min(float(batch["ms"][row]) * 1e3, max(0.0, float(begins[at + 1]) - begin))
            args = {name: int(batch[name][row]) for name in ("rows", "prefill_rows", "seqs")}
            kind = "prefill" if args["prefill_rows"] else "decode"
            yield _slice(_STEPS, _STEP_TRACK, f"{kind} {batch['step'][row]}", begin, micros, args)
            on_gpu = not np.isnan(batch["gpu_us"][row]).any()
            yield from _in_turn(_STEPS, _CPU_TRACK, begin, micros, batch["parts_us"][row], PARTS)
            if on_gpu:
                yield from _in_turn(_STEPS, _GPU_TRACK, begin, micros, batch["gpu_us"][row], PARTS)
            if at >= layered_from:
                yield from _layers(begin, micros, batch["layers_us"][row])
            at += 1


def _layers(begin: float, micros: float, by_part: npt.NDArray[np.float32]) -> Iterator[Event]:
    names = [f"layer {layer}" for layer in range(by_part.shape[1])]
    for index, times in enumerate(by_part, 1):
        if times.any():
            yield from _in_turn(_LAYERS, index, begin, micros, times, names)


def _in_turn(
    process: int, track: int, begin: float, micros: float, times: npt.NDArray[Any], names: Iterable[str]
) -> Iterator[Event]:
    """Slices one after the other from `begin`. Where they are longer than the step (they overlapped), they are drawn
    shorter, all by one factor, and carry their own time."""
    total = float(times.sum())
    factor = min(1.0, micros / total) if total else 1.0
    for name, time in zip(names, times.tolist(), strict=True):
        if time > 0:
            args = {"us": round(time, 3)} if factor < 0.999 else None
            yield _slice(process, track, name, begin, time * factor, args)
            begin += time * factor
