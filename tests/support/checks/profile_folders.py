"""Folders of believable profiles: a small serving simulation that writes what `--profile` would have written."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

CPU_PARTS = {"norm": 0.03, "linear": 0.25, "attention": 0.12, "router": 0.05, "shared_experts": 0.0, "lm_head": 0.04}


@dataclass(frozen=True)
class Run:
    """What is simulated."""

    requests: int = 12
    answer_len: int = 20
    prompt_len: int = 150
    layers: int = 4
    dense: int = 1
    """Layers at the front without experts."""
    experts: int = 16
    top_k: int = 2
    seed: int = 0
    memory_gbps: float = 40.0
    expert_bytes: int = 3 << 20
    chunk: int = 128
    max_batch: int = 4
    has_gpu: bool = False
    model: dict[str, Any] = field(default_factory=dict)
    """What meta.json says otherwise."""


@dataclass
class _Request:
    id: str
    arrived: float
    prompt_left: int
    prompt_len: int
    admitted: float | None = None
    first_token: float | None = None
    last: float = 0.0
    done: int = 0


@dataclass
class Written:
    """The lines of each file, as they were written."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[dict[str, Any]] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)


def meta(run: Run) -> dict[str, Any]:
    gpus = [{"name": "Test GPU", "memory_gbps": 900.0}] if run.has_gpu else []
    expert_bytes = [0 if layer < run.dense else run.expert_bytes for layer in range(run.layers)]
    model = {"name": "tiny-moe", "architecture": "qwen3moe", "num_layers": run.layers, "num_experts": run.experts}
    return {
        "v": 1,
        "schema": "ktransformers-profile",
        "began_unix_ns": 1_760_000_000_000_000_000,
        "began_monotonic_ns": 1_000_000_000,
        "version": "0.1.0",
        "command": ["ktransformers", "serve", "tiny-moe.gguf", "--profile", "profile"],
        "model": {**model, "top_k": run.top_k, "expert_bytes": expert_bytes, "types": {"experts": "Q4_K"}, **run.model},
        "backend": "balance_serve",
        "placement": {"experts_on_gpu": [0] * run.layers},
        "machine": {"cpu": "Test CPU", "num_threads": 8, "isa": "avx2", "memory_gbps": run.memory_gbps, "gpus": gpus},
        "dropped": {"records": 0, "messages": 0},
        "stopped_unix_ns": 1_760_000_100_000_000_000,
    }


class _Simulation:
    """Requests arrive at random; a step takes one chunk of a prompt and a row of each sequence that decodes."""

    def __init__(self, run: Run):
        self.run, self.rng = run, np.random.default_rng(run.seed)
        arrivals = np.cumsum(self.rng.exponential(0.05, run.requests))
        lens = self.rng.integers(max(1, run.prompt_len // 2), run.prompt_len * 3 // 2, run.requests)
        self.waiting = [
            _Request(f"r-{i}", float(t), int(n), int(n)) for i, (t, n) in enumerate(zip(arrivals, lens, strict=True))
        ]
        self.running: list[_Request] = []
        self.now, self.step, self.written = 0.0, 0, Written()
        # Some experts are used far more often than others, in each layer different ones.
        popularity = 1.0 / np.arange(1, run.experts + 1) ** 0.8
        order = np.argsort(self.rng.random((run.layers, run.experts)), axis=1)
        pool = np.log(popularity)[order] + self.rng.gumbel(size=(256, run.layers, run.experts))
        self.pool = np.argpartition(-pool, run.top_k - 1, axis=2)[:, :, : run.top_k]

    def go(self) -> Written:
        while self.waiting or self.running:
            if not self.running and self.waiting[0].arrived > self.now:
                self.now = self.waiting[0].arrived
            while self.waiting and self.waiting[0].arrived <= self.now and len(self.running) < self.run.max_batch:
                self.running.append(self.waiting.pop(0))
                self.running[-1].admitted = self.now
            self._step()
        return self.written

    def _step(self) -> None:
        run, rng = self.run, self.rng
        began, prefill, sampled = self.now, 0, []
        for request in self.running:
            if request.prompt_left:
                rows = min(run.chunk - prefill, request.prompt_left)
                prefill += rows
                request.prompt_left -= rows
                if not request.prompt_left and rows:
                    sampled.append(request)
            else:
                sampled.append(request)
        rows = prefill + sum(1 for request in sampled if request.first_token is not None)
        ids = self.pool[rng.integers(0, len(self.pool), rows)]  # rows, layers, top_k
        counts = [np.bincount(ids[:, layer].ravel(), minlength=run.experts) for layer in range(run.layers)]
        line = self._line(rows, prefill, len(sampled), counts)
        self.now += line["ms"] / 1e3
        self.written.steps.append({**line, "t": round(began, 6)})
        for row, request in enumerate(sampled):
            self._token(request, ids[rows - 1 - row], line)
        self.step += 1

    def _line(self, rows: int, prefill: int, sampled: int, counts: list[Any]) -> dict[str, Any]:
        run, rng = self.run, self.rng
        moe = range(run.dense, run.layers)
        nbytes = sum(int((counts[layer] > 0).sum()) for layer in moe) * run.expert_bytes
        slow = 4.0 if rng.random() < 0.02 else 1.0
        experts = nbytes / (run.memory_gbps * 1e9 * 0.8) * 1e6 * slow * (1 + 0.05 * rng.random()) + 4.0 * prefill
        parts = {part: experts * share * (1 + 0.1 * rng.random()) for part, share in CPU_PARTS.items()}
        parts = {"experts": experts, **parts, "sampling": 30.0 * sampled, "host": 120.0 * (1 + rng.random())}
        parts = {part: round(float(us), 3) for part, us in parts.items() if us}
        per_layer = {
            part: [round(parts[part] / run.layers, 3)] * run.layers for part in ("norm", "linear", "attention")
        } | {
            "router": [0.0] * run.dense + [round(parts["router"] / len(moe), 3)] * len(moe),
            "experts": [0.0] * run.dense + [round(experts / len(moe), 3)] * len(moe),
        }
        total = sum(parts.values())
        return {
            "v": 1,
            "step": self.step,
            "epoch": 0,
            "t": 0.0,
            "ms": round(total / 1e3, 6),
            "rows": rows,
            "prefill_rows": prefill,
            "sampled": sampled,
            "seqs": len(self.running),
            "waiting": sum(1 for one in self.waiting if one.arrived <= self.now),
            "parts_us": parts,
            "layers_us": per_layer,
            "cpu": {"busy_us": total * 7, "idle_us": total, "wait_us": 20.0, "num_threads": 8},
            "bytes": {"experts": nbytes, "linear": 2 << 20},
            "gpu_us": {"attention": 50.0, "linear": 80.0} if run.has_gpu else None,
            "experts": [
                [layer, {str(e): int(counts[layer][e]) for e in np.flatnonzero(counts[layer])}] for layer in moe
            ],
        }

    def _token(self, request: _Request, ids: Any, line: dict[str, Any]) -> None:
        run = self.run
        before = request.arrived if request.first_token is None else request.last
        if request.first_token is None:
            request.first_token = self.now
        layers = (np.sum(list(line["layers_us"].values()), axis=0)).round(3).tolist()
        self.written.tokens.append(
            {
                "v": 1,
                "request": request.id,
                "index": request.done,
                "position": request.prompt_len + request.done,
                "token": int(self.rng.integers(0, 1000)),
                "step": self.step,
                "t": round(self.now, 6),
                "ms": round((self.now - before) * 1e3, 6),
                "step_ms": line["ms"],
                "batch": line["rows"],
                "layers_us": layers,
                "experts": [None if layer < run.dense else ids[layer].tolist() for layer in range(run.layers)],
            }
        )
        request.last, request.done = self.now, request.done + 1
        if request.done == run.answer_len:
            self.running.remove(request)
            self.written.requests.append(
                {
                    "v": 1,
                    "request": request.id,
                    "arrived": round(request.arrived, 6),
                    "admitted": round(request.admitted or 0.0, 6),
                    "first_token": round(request.first_token, 6),
                    "ended": round(self.now, 6),
                    "prompt_len": request.prompt_len,
                    "cached_len": 0,
                    "completion_len": request.done,
                    "finish_reason": "length",
                    "preemptions": 1 if request.id == "r-3" else 0,
                }
            )


def write_lines(path: Path, lines: Iterable[Any]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def write_profile(folder: Path, run: Run | None = None, **changes: Any) -> Written:
    """Simulate `run` with `changes` and write its folder. Returns the lines, for oracles."""
    run = replace(run or Run(), **changes)
    folder.mkdir(parents=True, exist_ok=True)
    written = _Simulation(run).go()
    (folder / "meta.json").write_text(json.dumps(meta(run)))
    for name in ("steps", "tokens", "requests"):
        write_lines(folder / f"{name}.jsonl", getattr(written, name))
    return written


def expert_counts(written: Written, run: Run) -> np.ndarray[Any, Any]:
    """[layers, experts]: the rows of each expert, added up one line at a time."""
    counts: Counter[tuple[int, int]] = Counter()
    for line in written.steps:
        for layer, by_expert in line["experts"]:
            for expert, rows in by_expert.items():
                counts[layer, int(expert)] += rows
    return np.array([[counts[layer, expert] for expert in range(run.experts)] for layer in range(run.layers)])
