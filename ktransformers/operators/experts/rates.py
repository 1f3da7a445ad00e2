"""Measures how fast this machine copies experts and computes them: once on a model's own, then remembered.

Takes a few hundred milliseconds, the compilation of GPU kernels aside. The result is kept in the user's cache folder,
in a file per machine, shape of the model and number of threads. Knows an ExpertPrefill and a kernel; not models.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from ktransformers.kernels.cpu import MoeKernel
from ktransformers.operators.device import STREAM_ROWS
from ktransformers.operators.experts.split import NEVER, CpuRate, PrefillRates, threshold_of
from ktransformers.operators.experts.streamed import ExpertPrefill
from ktransformers.system.user_files import replace_own
from ktransformers.system.user_folders import user_cache_dir

__all__ = ["CpuTimer", "RatesFile", "calibrate", "describe_rates", "measure_rates"]

logger = logging.getLogger(__name__)

_FORMAT = 1
_ROWS = (1, 8, 32, 128)  # of each expert
_TOUCHED_BYTES = 1 << 30  # of experts that a measurement reads: more than any cache holds
_REPEATS = 3
_MOST_GROUPS = 256


class CpuTimer:
    """Times the CPU's kernel of one layer on even routing."""

    def __init__(self, kernel: MoeKernel, top_k: int, expert_nbytes: int, clock: Callable[[], float]) -> None:
        self._kernel, self._clock, self._top_k = kernel, clock, top_k
        fitting = max(_TOUCHED_BYTES // max(expert_nbytes, 1), top_k)
        self.num_touched = min(kernel.num_experts, fitting)

    def inputs(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return hidden states, ids and weights such that each of num_touched experts gets `rows` rows, or nearly."""
        tokens = max(self.num_touched * rows // self._top_k, 1)
        ids = torch.arange(tokens * self._top_k) % self.num_touched
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(tokens, self._kernel.hidden_size, generator=generator)
        return x, ids.view(tokens, self._top_k), torch.full((tokens, self._top_k), 1.0 / self._top_k)

    def seconds(self, rows: int, go_on: Callable[[int], bool] = lambda number: number < _REPEATS) -> float:
        """Return the CPU's time for one expert with `rows` rows, the best of a few runs."""
        arguments, best, number = self.inputs(rows), float("inf"), 0
        while number == 0 or go_on(number):
            began = self._clock()
            self._kernel.forward(*arguments)
            best = min(best, self._clock() - began)
            number += 1
        return best / min(self.num_touched, arguments[1].numel())


def measure_rates(prefill: ExpertPrefill, cpu: CpuTimer, layer: int = 0) -> PrefillRates:
    """Measure the rates of one layer's experts. The CPU is timed alone and beside copies, copies while the CPU
    works.
    """
    copy = prefill.copy_seconds(layer, 4, lambda is_done: None)
    alone, shared, copies = list[float](), list[float](), list[float]()
    for rows in _ROWS:
        cpu.seconds(rows, lambda number: False)  # memory of the kernel's own is made
        alone.append(cpu.seconds(rows))
        took = alone[-1] * cpu.num_touched
        group = prefill.copy_seconds(layer, 1, lambda is_done: None) * prefill.group_size(layer)
        beside: list[float] = []

        def work(is_done: Callable[[], bool], rows: int = rows, beside: list[float] = beside) -> None:
            beside.append(cpu.seconds(rows, lambda number: number < _REPEATS and not is_done()))

        num_groups = min(max(int(_REPEATS * took / max(group, 1e-7)) + 1, 2), _MOST_GROUPS)
        copies.append(prefill.copy_seconds(layer, num_groups, work))
        shared.append(max(alone[-1], *beside))
    return PrefillRates(
        copy=max(copy, sorted(copies)[len(copies) // 2]),
        gpu_row=prefill.gpu_seconds(layer),
        cpu=CpuRate(_ROWS, tuple(alone)),
        shared_cpu=CpuRate(_ROWS, tuple(shared)),
    )


class RatesFile:
    """File of rates that were measured before. key: everything that they depend on, in JSON types."""

    def __init__(self, key: Mapping[str, object], folder: Path | None = None) -> None:
        self._key = json.dumps({"format": _FORMAT, **key}, sort_keys=True)
        name = hashlib.sha256(self._key.encode()).hexdigest()[:20]
        self.path = (folder or user_cache_dir()) / "prefill-rates" / f"{name}.json"

    def read(self) -> PrefillRates | None:
        """Return the rates in the file, or None. A file that cannot be understood is a warning, and is written anew."""
        try:
            text = self.path.read_text()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            logger.warning("%s cannot be read (%s): rates are measured anew", self.path, error)
            return None
        try:
            held = json.loads(text)
            if held["key"] != self._key:
                return None
            rates = held["rates"]
            cpu, shared = (CpuRate(tuple(rates[n]["rows"]), tuple(rates[n]["seconds"])) for n in ("cpu", "shared_cpu"))
            return PrefillRates(float(rates["copy"]), float(rates["gpu_row"]), cpu, shared)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            logger.warning("%s is damaged (%r): rates are measured anew", self.path, error)
            return None

    def write(self, rates: PrefillRates) -> None:
        """Write rates to the file; a folder that cannot be written to is one logged line."""
        text = json.dumps({"key": self._key, "rates": asdict(rates)})
        try:
            replace_own(self.path, text.encode())
        except OSError as error:
            logger.info("%s cannot be written (%s): rates will be measured at every start", self.path, error)


def describe_rates(rates: PrefillRates, threshold: int, expert_nbytes: int) -> str:
    """Return a line for the log about the rates and the threshold."""
    cpu = ", ".join(f"{1e6 * s:.0f}" for s in rates.cpu.seconds)
    rows = ", ".join(str(n) for n in rates.cpu.rows)
    start = "never" if threshold == NEVER else f"from {threshold} tokens of a step on"
    return (
        f"experts are streamed to the GPU {start}: {expert_nbytes / rates.copy / 1e9:.1f} GB/s over PCIe "
        f"({1e6 * rates.copy:.0f} us an expert); the CPU takes {cpu} us for {rows} rows of one, "
        f"the GPU {1e9 * rates.gpu_row:.0f} ns a row"
    )


def _threshold(rates: PrefillRates, prefill: ExpertPrefill) -> int:
    """Where the GPU holds experts, smaller steps use them without the host's choice; larger ones than the stream's
    order takes do not."""
    sizes = prefill.shape.top_k, prefill.shape.num_experts
    threshold = threshold_of(rates, *sizes)
    if not prefill.shape.num_held:
        return threshold
    return max(threshold, min(threshold_of(rates, *sizes, prefill.shape.num_held), STREAM_ROWS + 1))


def calibrate(
    prefill: ExpertPrefill,
    kernel: MoeKernel,
    expert_nbytes: int,
    file: RatesFile | None,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Give `prefill` its rates and threshold, from the file or measured and kept there. Logs one line."""
    rates = None if file is None else file.read()
    origin = f" (measured before, {file.path})" if file is not None and rates is not None else ""
    if rates is None:
        rates = measure_rates(prefill, CpuTimer(kernel, prefill.shape.top_k, expert_nbytes, clock))
        if file is not None:
            file.write(rates)
    prefill.rates = rates
    prefill.threshold = max(_threshold(rates, prefill), prefill.least_rows)
    logger.info("%s%s", describe_rates(rates, prefill.threshold, expert_nbytes), origin)
