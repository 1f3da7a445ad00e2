"""Prefill and decode of a model on this machine through the engine of balance_serve, without a server.

The weights are a model's, or random ones in a published shape, so that no model's files are needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from ktransformers.bench.common.machine import (
    machine_facts,
    ram_peak,
    reset_ram_peak,
    reset_vram_peak,
    shown_machine,
    vram_peak,
)
from ktransformers.bench.common.report import Column, FigureTable, Record, Row
from ktransformers.bench.offline.runs import DecodeCase, OfflineRuns, slots_needed
from ktransformers.bench.offline.streams import StreamWork, slots_of_stream, stream_beside_prompt
from ktransformers.config import EngineConfig
from ktransformers.core import Progress
from ktransformers.engine.load.builder import Engine, build_engine, plan_model
from ktransformers.engine.model.opened import OpenedModel, open_model, open_synthetic
from ktransformers.errors import ConfigError
from ktransformers.models.synthetic_shapes import find_shape
from ktransformers.optimize.decode_bound import layer_of
from ktransformers.optimize.plan import Plan

__all__ = [
    "OfflineWork",
    "PeerProgram",
    "StartPeers",
    "bench_offline",
    "fitting_layers",
    "load_work",
    "open_work",
]

PAGE_SIZE = 64
SPARE_BYTES = 2 << 30
"""RAM left for activations when the number of layers is chosen by what fits."""


PEER_ROUNDS = 2
"""The better one counts: the first one warms up."""

_COLUMNS = (
    Column("phase", 7, title=" "),
    Column("tokens", 6),
    Column("context", 7, title="behind"),
    Column("tokens_per_s", 9, ".1f", "tokens/s"),
    Column("ms_per_step", 9, ".2f", "ms/step"),
    Column("gb_s", 7, ".1f", "GB/s"),
    Column("distinct_experts", 8, ".1f", "experts"),
    Column("even_experts", 8, ".1f", "if even"),
)
_HOT_COLUMN = Column("hot_percent", 7, ".1f", "% hot")


@dataclass(frozen=True, slots=True)
class OfflineWork:
    """The figures to measure: prompts of `prefills` tokens, and `batches` sequences that decode as each case says.

    Cases differ in prompt_len alone; peers are asked for the first one. seconds: least per figure.
    synthetic: random weights in this shape instead of the config's model, with `layers` of its layers; None: as many as
    fit into memory. routing: how tokens of a synthetic model choose experts.
    stream: what is measured of one beside a prompt.
    """

    config: EngineConfig
    prefills: list[int]
    batches: list[int]
    cases: list[DecodeCase]
    seconds: float
    synthetic: str | None = None
    layers: int | None = None
    routing: str = "even"
    stream: StreamWork | None = None


class PeerProgram(Protocol):
    """A peer program with the same model, whose figures stand beside ours."""

    name: str

    def ask(self, question: str) -> float | None:
        """Return tokens per second of "prefill TOKENS" or "decode SEQUENCES"; None where the program has no figure."""

    def close(self) -> None:
        """End the other program."""


StartPeers = Callable[[Engine, OfflineWork], Sequence[PeerProgram]]
"""Starts the programs to compare with, once the engine is loaded and the work is cut to what the model holds."""


def bench_offline(
    work: OfflineWork,
    loading: Callable[[], AbstractContextManager[Progress | None]],
    start_peers: StartPeers = lambda engine, work: (),
) -> Record:
    """Load a model, measure prefill and decode, and print a table. Returns the record.

    loading: shows progress while it is open. start_peers: programs that are measured in turns with ours, and closed.
    """
    work, opened = open_work(work)
    with loading() as progress:
        engine, report = _load(opened, _most_sequences(work), progress)
    _print_report(report)
    report["settings"] |= {"decode_prompt_len": work.cases[0].prompt_len, "decode_steps": work.cases[0].steps}
    hot = opened.config.hot_experts if engine.hot.gpus else "off"
    report["settings"] |= {"routing": work.routing, "hot_experts": hot}
    with ExitStack() as stack:
        stack.callback(engine.close)
        peers = start_peers(engine, work)
        for peer in peers:
            stack.callback(peer.close)
        runs = OfflineRuns(engine, work.seconds)
        rows, memory = _measure(engine, runs, work, peers)
        share = runs.quarter_share()
        beside = None if work.stream is None else _measure_stream(engine, work.stream)
    return {**report, "memory": memory, "rows": rows, "quarter_share": share, "stream": beside}


def open_work(work: OfflineWork) -> tuple[OfflineWork, OpenedModel]:
    """Open the model, with a cache for all figures: the work as far as the model's context goes, and the model with as
    many layers as fit."""
    opened = _open(work)
    longest = max(work.cases, key=lambda case: case.prompt_len)
    prefills = _within_context(opened, work.prefills, longest)
    stream = _stream_within(opened.facts.context_len, work.stream)
    work = replace(work, prefills=prefills, stream=stream)
    num_slots = slots_needed(prefills, work.batches, longest, PAGE_SIZE)
    if stream is not None:
        num_slots = max(num_slots, slots_of_stream(stream, PAGE_SIZE))
    opened = replace(opened, config=_with_cache(opened.config, num_slots))
    if work.synthetic is not None and work.layers is None:
        opened = _cut_to_fit(work.synthetic, opened, work.routing)
    return work, opened


def load_work(work: OfflineWork) -> OfflineRuns:
    """Load the model of `work`, and return what measures its figures one by one. Says nothing."""
    work, opened = open_work(work)
    return OfflineRuns(_load(opened, _most_sequences(work), None)[0], work.seconds)


def _most_sequences(work: OfflineWork) -> int:
    return max(*work.batches, 1 if work.stream is None else 2)


def _stream_within(context: int | None, work: StreamWork | None) -> StreamWork | None:
    """The stream and the prompt beside it, if the model's context holds each; a line says so if not."""
    if work is None or context is None or max(work.most_tokens, work.prompt_len + 1) <= context:
        return work
    print(
        f"a stream beside a prompt of {work.prompt_len} tokens is left out: the model's context is {context} tokens; "
        "--beside chooses a shorter prompt"
    )
    return None


def _measure_stream(engine: Engine, work: StreamWork) -> Record:
    figure = stream_beside_prompt(engine, work)
    limit = f"at most x {work.max_itl_ratio:g} wanted" if work.max_itl_ratio else "no limit"
    print(
        f"a stream's time between tokens: alone {figure.alone_ms:.2f} ms (worst {figure.alone_worst_ms:.2f}), beside a "
        f"prompt of {work.prompt_len} tokens {figure.beside_ms:.2f} ms (worst {figure.beside_worst_ms:.2f}): "
        f"x {figure.ratio:.2f} (worst x {figure.worst_ratio:.2f}; {limit}); {figure.chunk:.0f} tokens of the prompt a "
        f"step, its first token after {figure.first_token_ms:.0f} ms"
    )
    return asdict(figure)


def _beside(row: Row, peers: Sequence[PeerProgram]) -> Row:
    """The row with what the peers do, the better of two rounds: their first one warms up."""
    for peer in peers:
        answers = [peer.ask(f"{row['phase']} {row['tokens']}") for _ in range(PEER_ROUNDS)]
        rate = max((one for one in answers if one is not None), default=None)
        row |= {peer.name: rate, f"ours / {peer.name}": row["tokens_per_s"] / rate if rate else None}
    return row


def _with_cache(config: EngineConfig, num_slots: int) -> EngineConfig:
    if config.cache_lens and config.cache_lens < num_slots:
        raise ConfigError(
            f"--cache_lens {config.cache_lens} is too small: these figures need {num_slots}; leave it out, or ask for "
            "less with --prefill, --decode, --prompt_len, --max_new_tokens and --beside"
        )
    return replace(config, cache_lens=config.cache_lens or num_slots)


def _open(work: OfflineWork) -> OpenedModel:
    """The model's files, or random weights in a shape, all its layers when `layers` does not say."""
    if work.synthetic is None:
        return open_model(work.config)
    return open_synthetic(work.config, find_shape(work.synthetic).config(work.layers), work.routing)


def _cut_to_fit(name: str, opened: OpenedModel, routing: str) -> OpenedModel:
    """The shape called `name`, opened whole, with as many layers as fit into memory."""
    shape = find_shape(name)
    count = fitting_layers(plan_model(opened.config, opened))
    print(f"{shape.name}: {count} of {shape.num_layers} layers fit into memory; --layers N chooses another number")
    return opened if count == shape.num_layers else open_synthetic(opened.config, shape.config(count), routing)


def fitting_layers(plan: Plan) -> int:
    """Return how many of the plan's first layers, at least 1, fit into the machine with all that is no layer.

    On the CPU there must be room for one more, which is made before it is repacked, and SPARE_BYTES.
    """
    layers: dict[int, dict[str, int]] = {}
    for entry in plan.entries:
        layer = layer_of(entry)
        if layer >= 0:
            _add(layers.setdefault(layer, {}), entry.nbytes)
    for nbytes in plan.extra_bytes.values():  # the cache: a share of each layer
        for held_by in layers.values():
            _add(held_by, {device: count // len(layers) for device, count in nbytes.items()})
    held = dict(plan.total_bytes)
    for held_by in layers.values():
        _add(held, {device: -count for device, count in held_by.items()})
    held["cpu"] = held.get("cpu", 0) + SPARE_BYTES + max((one.get("cpu", 0) for one in layers.values()), default=0)
    count = 0
    for index in sorted(layers):
        _add(held, layers[index])
        if any(nbytes > plan.capacity.get(device, 0) for device, nbytes in held.items()):
            break
        count += 1
    return max(count, 1)


def _add(sums: dict[str, int], more: Mapping[str, int]) -> None:
    for device, nbytes in more.items():
        sums[device] = sums.get(device, 0) + nbytes


def _within_context(opened: OpenedModel, prefills: list[int], case: DecodeCase) -> list[int]:
    """The prompts that the model's context holds; the others are named on the console."""
    context = opened.facts.context_len
    if context is None:
        return prefills
    if case.prompt_len + case.steps > context:
        raise ConfigError(
            f"--prompt_len {case.prompt_len} and --max_new_tokens {case.steps} together are beyond the model's "
            f"context of {context} tokens"
        )
    left_out = [count for count in prefills if count > context]
    if left_out:
        print(f"prefill of {', '.join(map(str, left_out))} tokens is left out: the model's context is {context} tokens")
    return [count for count in prefills if count <= context]


def _load(opened: OpenedModel, max_batch_size: int, progress: Progress | None) -> tuple[Engine, Record]:
    """The engine, and what is known of machine, model and loading."""
    began = time.perf_counter()
    engine = build_engine(
        opened.config,
        page_size=PAGE_SIZE,
        max_batch_size=max_batch_size,
        progress=progress,
        opened=opened,
    )
    seconds, peak = time.perf_counter() - began, ram_peak()
    return engine, {
        "machine": machine_facts(engine.pool),
        "model": {
            "description": engine.model.description,
            "layers": opened.facts.num_layers,
            "rules": Path(engine.plan.rule_file).name,
            "weight_bytes": {device: nbytes for device, nbytes in engine.plan.weight_bytes.items() if nbytes},
        },
        "settings": {"chunk_size": engine.config.chunk_size, "cache_lens": engine.config.cache_lens},
        "load": {"seconds": seconds, "ram_peak_gb": peak / 1e9},
    }


def _print_report(report: Record) -> None:
    machine, model, load = report["machine"], report["model"], report["load"]
    gpus = ", ".join(gpu["name"] for gpu in machine["gpus"]) or "no GPU"
    weights = ", ".join(f"{nbytes / 1e9:.2f} GB on {device}" for device, nbytes in model["weight_bytes"].items())
    print(
        f"{shown_machine(machine)}; {gpus}\n{model['description']}, {model['layers']} layers; weights {weights}; "
        f"loaded in {load['seconds']:.1f} s, RAM peak {load['ram_peak_gb']:.2f} GB"
    )


def _measure(
    engine: Engine, runs: OfflineRuns, work: OfflineWork, peers: Sequence[PeerProgram]
) -> tuple[list[Row], dict[str, float | None]]:
    """Every figure, printed as it comes, and the peaks of memory meanwhile."""
    reset_ram_peak()
    reset_vram_peak()
    contexts = " and ".join(str(case.prompt_len) for case in work.cases)
    print(f"prompts in chunks of {engine.config.chunk_size} tokens; decode after {contexts} tokens")
    columns = [(Column(peer.name, 10, ".1f"), Column(f"ours / {peer.name}", 8, ".2f", "ours, x")) for peer in peers]
    hot = [_HOT_COLUMN] if engine.hot.gpus else []
    table = FigureTable([*_COLUMNS, *hot, *(one for pair in columns for one in pair)])
    for count in work.prefills:
        table.add(_beside(asdict(runs.prefill(count)), peers))
    for case in work.cases:
        for batch in work.batches:
            table.add(_beside(asdict(runs.decode(batch, case)), peers if case is work.cases[0] else ()))
    share = runs.quarter_share()
    if share is not None:
        print(f"the most used quarter of each layer's experts had {100 * share:.0f} % of the picks of decode")
    if engine.hot.gpus:
        print(f"hot experts: {engine.hot.describe()}")
    if engine.expert_files is not None:
        print(f"experts on the disk: {engine.expert_files.describe()}")
    ram, vram = ram_peak(), vram_peak()
    print(f"RAM peak {ram / 1e9:.2f} GB", end="")
    print("" if vram is None else f", VRAM peak {vram.reserved / 1e9:.2f} GB")
    memory: dict[str, float | None] = {"ram_peak_gb": ram / 1e9, "vram_peak_gb": None}
    if vram is not None:
        memory["vram_peak_gb"] = vram.reserved / 1e9
        memory["vram_allocated_peak_gb"] = vram.allocated / 1e9
        memory["vram_device_used_gb"] = vram.device_used / 1e9
    return table.rows, memory
