"""`ktransformers bench offline MODEL`: prefill and decode of a model on this machine, without a server.

With `--synthetic SHAPE` the weights are random and made in memory, so that no model's files are needed. Flags that
choose rules, placement, threads and cache are those of `chat`. The last line of standard output is JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktransformers.cli.bench_json import add_json_flag, table_beside_json
from ktransformers.cli.options import (
    add_logging_flag,
    add_model_argument,
    add_model_flags,
    engine_config,
    positive_numbers,
    set_up_logging,
    with_default_model,
)
from ktransformers.errors import ConfigError

if TYPE_CHECKING:
    from ktransformers.cli.offline_runs import DecodeCase, Figure, OfflineRuns
    from ktransformers.config import EngineConfig
    from ktransformers.engine.builder import PagedEngine
    from ktransformers.engine.opened import OpenedModel
    from ktransformers.operators.base import ExpertStats
    from ktransformers.optimize.plan import Plan

__all__ = ["add_parser", "fitting_layers", "run"]

logger = logging.getLogger(__name__)

SHAPE_NAMES = ("qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3", "gpt-oss-20b", "gpt-oss-120b")
PAGE_SIZE = 64
SPARE_BYTES = 2 << 30
"""RAM left for activations when the number of layers is chosen by what fits."""

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command below `bench`."""
    text = "Prefill and decode of a model: tokens/s, GB/s of weights touched, distinct experts, peaks of memory. "
    text += "--max_new_tokens is the length of a decode pass. Without MODEL and --synthetic, the bundled model."
    parser = kinds.add_parser("offline", help="a model, or random weights in its shape", description=text)
    add_model_argument(parser)
    group = parser.add_argument_group("measuring")
    group.add_argument("--synthetic", metavar="SHAPE", help=f"random weights: {', '.join(SHAPE_NAMES)}")
    group.add_argument("--layers", type=int, help="layers of SHAPE; default: as many as fit into memory")
    group.add_argument("--prefill", default="32,128,512,2048,8192", help="prompt lengths (%(default)s)")
    group.add_argument("--decode", default="1,2,4,8,16", help="sequences at once (%(default)s)")
    group.add_argument("--prompt_len", type=int, default=64, help="tokens in the cache before decode (%(default)s)")
    group.add_argument("--seconds", type=float, default=2.0, help="least time per figure (%(default)s)")
    add_model_flags(parser)
    add_json_flag(group)
    add_logging_flag(group)
    parser.set_defaults(run=run, max_new_tokens=32)  # here: tokens per sequence in one pass of decode


def run(args: argparse.Namespace) -> int:
    """Load, measure and print. Returns the exit code."""
    set_up_logging(args.log_level)
    with table_beside_json(args.json):
        record = _record(args)
    print(json.dumps(record))
    return 0


def _record(args: argparse.Namespace) -> dict[str, Any]:
    """Load, measure and print a table. Returns the record, in JSON types."""
    prefills, batches = positive_numbers(args.prefill, "prefill"), positive_numbers(args.decode, "decode")
    for flag, least, most in (("prompt_len", 1, 1 << 24), ("seconds", 0, 3600)):
        value = getattr(args, flag)
        if not least <= value <= most:
            limit = f"at most {most}" if value > most else f"at least {least}"
            raise ConfigError(f"--{flag} must be {limit}, got {value}")
    config = _config(args).resolved(needs_model=args.synthetic is None)  # before the slow imports
    from ktransformers.cli.offline_runs import DecodeCase, OfflineRuns, slots_needed
    from ktransformers.operators.base import ExpertStats

    case = DecodeCase(steps=config.max_new_tokens, prompt_len=args.prompt_len)
    opened = _open(args, config)
    prefills = _within_context(opened, prefills, case)
    slots = slots_needed(prefills, batches, case, PAGE_SIZE)
    opened = replace(opened, config=_with_cache(opened.config, slots))
    if args.synthetic is not None and args.layers is None:
        opened = _cut_to_fit(args.synthetic, opened)
    expert_stats = ExpertStats()
    engine, report = _load(opened, max(batches), expert_stats)
    report["settings"] |= {"decode_prompt_len": case.prompt_len, "decode_steps": case.steps}
    try:
        figures, memory = _measure(engine, OfflineRuns(engine, expert_stats, args.seconds), prefills, batches, case)
    finally:
        engine.close()
    return {"bench": "offline", **report, "memory": memory, "rows": [asdict(f) for f in figures]}


def _config(args: argparse.Namespace) -> EngineConfig:
    """What the flags ask for. Raises ConfigError when they contradict each other."""
    config = engine_config(args)
    if args.synthetic is None:
        if args.layers is not None:
            raise ConfigError("--layers cuts a --synthetic shape; a model's files have the layers that they have")
        return with_default_model(config)
    if config.model_path is not None or config.gguf_path is not None:
        raise ConfigError("--synthetic needs no model: its weights are made on the spot; leave the path out")
    return config


def _with_cache(config: EngineConfig, num_slots: int) -> EngineConfig:
    if config.cache_lens and config.cache_lens < num_slots:
        raise ConfigError(
            f"--cache_lens {config.cache_lens} is too small: these figures need {num_slots}; leave it out, or ask for "
            "less with --prefill, --decode, --prompt_len and --max_new_tokens"
        )
    return replace(config, cache_lens=config.cache_lens or num_slots)


def _open(args: argparse.Namespace, config: EngineConfig) -> OpenedModel:
    """The model's files, or random weights in a shape, all its layers when --layers does not say."""
    from ktransformers.engine.opened import open_model, open_synthetic

    if args.synthetic is None:
        return open_model(config)
    from ktransformers.models.synthetic_shapes import find_shape

    return open_synthetic(config, find_shape(args.synthetic).config(args.layers))


def _cut_to_fit(name: str, opened: OpenedModel) -> OpenedModel:
    """The shape called `name`, opened whole, with as many layers as fit into memory."""
    from ktransformers.engine.builder import plan_model
    from ktransformers.engine.opened import open_synthetic
    from ktransformers.models.synthetic_shapes import find_shape

    shape = find_shape(name)
    count = fitting_layers(plan_model(opened.config, opened))
    print(f"{shape.name}: {count} of {shape.num_layers} layers fit into memory; --layers N chooses another number")
    return opened if count == shape.num_layers else open_synthetic(opened.config, shape.config(count))


def fitting_layers(plan: Plan) -> int:
    """How many of the plan's layers, from the first on, fit into the machine with all that is no layer; at least 1.

    On the CPU there must be room for one more, which is made before it is re-laid, and SPARE_BYTES.
    """
    layers: dict[int, dict[str, int]] = {}
    for entry in plan.entries:
        found = _LAYER.search(entry.key)
        if found is not None:
            _add(layers.setdefault(int(found[1]), {}), entry.nbytes)
    for nbytes in plan.extra_bytes.values():  # the cache: a share of each layer
        for layer in layers.values():
            _add(layer, {device: count // len(layers) for device, count in nbytes.items()})
    held = dict(plan.total_bytes)
    for layer in layers.values():
        _add(held, {device: -count for device, count in layer.items()})
    held["cpu"] = held.get("cpu", 0) + SPARE_BYTES + max((layer.get("cpu", 0) for layer in layers.values()), default=0)
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
    from ktransformers.engine.opened import context_len_of

    context = context_len_of(opened.hf_config)
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


def _load(opened: OpenedModel, max_batch_size: int, expert_stats: ExpertStats) -> tuple[PagedEngine, dict[str, Any]]:
    """The engine, and what is known of machine, model and loading."""
    from ktransformers.cli.bench_machine import describe_machine, ram_peak
    from ktransformers.cli.loading import loading_bar
    from ktransformers.engine.builder import build_paged_engine
    from ktransformers.kernels.cpu import limits

    began = time.perf_counter()
    with loading_bar(sys.stderr) as progress:
        engine = build_paged_engine(
            opened.config,
            page_size=PAGE_SIZE,
            max_batch_size=max_batch_size,
            progress=progress,
            expert_stats=expert_stats,
            opened=opened,
        )
    seconds, peak = time.perf_counter() - began, ram_peak()
    machine = describe_machine(engine.pool) | {"read_bandwidth_gb_s": limits.read_bandwidth(engine.pool) / 1e9}
    weights = {device: nbytes for device, nbytes in engine.plan.weight_bytes.items() if nbytes}
    gpus = ", ".join(gpu["name"] for gpu in machine["gpus"]) or "no GPU"
    print(
        f"{machine['cpu']}, {machine['threads']} threads, {machine['isa']}, reads {machine['read_bandwidth_gb_s']:.1f} "
        f"GB/s; {gpus}\n{engine.model.description}, {opened.hf_config.num_hidden_layers} layers; weights "
        + ", ".join(f"{nbytes / 1e9:.2f} GB on {device}" for device, nbytes in weights.items())
        + f"; loaded in {seconds:.1f} s, RAM peak {peak / 1e9:.2f} GB"
    )
    return engine, {
        "machine": machine,
        "model": {
            "description": engine.model.description,
            "layers": opened.hf_config.num_hidden_layers,
            "rules": Path(engine.plan.rule_file).name,
            "weight_bytes": weights,
        },
        "settings": {"chunk_size": engine.config.chunk_size, "cache_lens": engine.config.cache_lens},
        "load": {"seconds": seconds, "ram_peak_gb": peak / 1e9},
    }


def _measure(
    engine: PagedEngine, runs: OfflineRuns, prefills: list[int], batches: list[int], case: DecodeCase
) -> tuple[list[Figure], dict[str, float | None]]:
    """Every figure, printed as it comes, and the peaks of memory meanwhile."""
    from ktransformers.cli.bench_machine import ram_peak, reset_ram_peak, reset_vram_peak, vram_peak

    reset_ram_peak()
    reset_vram_peak()
    print(f"prompts in chunks of {engine.config.chunk_size} tokens; decode after {case.prompt_len} tokens")
    print(f"{'':>7} {'tokens':>6} {'tokens/s':>9} {'ms/step':>9} {'GB/s':>7} {'experts':>8} {'if even':>8}", flush=True)
    figures = []
    for count in prefills:
        figures.append(runs.prefill(count))
        _print(figures[-1])
    for batch in batches:
        figures.append(runs.decode(batch, case))
        _print(figures[-1])
    ram, vram = ram_peak(), vram_peak()
    print(f"RAM peak {ram / 1e9:.2f} GB", end="")
    print("" if vram is None else f", VRAM peak {vram.reserved / 1e9:.2f} GB")
    memory: dict[str, float | None] = {"ram_peak_gb": ram / 1e9, "vram_peak_gb": None}
    if vram is not None:
        memory["vram_peak_gb"] = vram.reserved / 1e9
        memory["vram_allocated_peak_gb"] = vram.allocated / 1e9
        memory["vram_device_used_gb"] = vram.device_used / 1e9
    return figures, memory


def _print(figure: Figure) -> None:
    shown = [figure.gb_s, figure.distinct_experts, figure.even_experts]
    gb_s, distinct, even = ("-" if value is None else f"{value:.1f}" for value in shown)
    print(
        f"{figure.phase:>7} {figure.tokens:>6} {figure.tokens_per_s:>9.1f} {figure.ms_per_step:>9.2f} {gb_s:>7} "
        f"{distinct:>8} {even:>8}",
        flush=True,
    )
