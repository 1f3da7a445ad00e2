"""`ktransformers bench offline` with llama.cpp in the same run.

python -m benchmarks.offline MODEL.gguf --peer llama.cpp

Both have the same GGUF file and take turns. llama.cpp has everything on the GPU but the routed experts that our plan
leaves to the CPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from benchmarks.command import benchmark_parser
from benchmarks.peers.base import PeerProcess, is_missing
from benchmarks.peers.llama_model import llama_model_peer
from benchmarks.peers.work import ModelWork
from ktransformers.bench.common.report import print_record
from ktransformers.bench.offline.measure import OfflineWork, bench_offline, layer_of
from ktransformers.cli import run_command
from ktransformers.cli.bench.offline import TEXT, add_offline_flags, offline_work
from ktransformers.cli.loading import loading_bar
from ktransformers.cli.parsing.options import set_up_logging
from ktransformers.engine.load.builder import Engine
from ktransformers.errors import ConfigError
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.optimize.plan import Plan
from ktransformers.system.cores import usable_cores
from ktransformers.weights.gguf.file import open_gguf

__all__ = ["cpu_expert_layers", "main", "start_llama_cpp"]

PEER = "llama.cpp"


def cpu_expert_layers(plan: Plan) -> list[int] | None:
    """Layers whose routed experts lie in RAM, of a plan that has something on a GPU; None for the CPU alone."""
    if all(device == "cpu" for device, nbytes in plan.total_bytes.items() if nbytes):
        return None
    experts = [entry for entry in plan.entries if isinstance(plan.operators.get(entry.key), KTransformersExperts)]
    in_ram = [entry for entry in experts if entry.nbytes.get("cpu", 0) > entry.total_bytes // 2]
    return sorted(layer for entry in in_ram if (layer := layer_of(entry.key)) is not None)


def start_llama_cpp(engine: Engine, work: OfflineWork) -> list[PeerProcess]:
    """llama.cpp on the engine's GGUF file; nothing, and one printed line, where it is not installed."""
    path = engine.config.gguf_path
    assert path is not None, "checked before loading"
    if is_missing(PEER, "llama_cpp", "llama-cpp-python"):
        return []
    sizes = ModelWork(work.prefills, work.batches, work.case.steps, work.case.prompt_len)
    threads = engine.config.cpu_infer or usable_cores()
    file = open_gguf(path).files[0].path
    return [llama_model_peer(file, threads, engine.model.vocab_size, sizes, cpu_expert_layers(engine.plan))]


def _offline(args: argparse.Namespace) -> int:
    set_up_logging(args.log_level)
    work, loading = offline_work(args), partial(loading_bar, sys.stderr)
    if not args.peer:
        return print_record("offline", args.json, partial(bench_offline, work, loading))
    if work.config.gguf_path is None:
        raise ConfigError("--peer reads a GGUF file: name one as MODEL, and leave --synthetic out")
    return print_record("offline", args.json, partial(bench_offline, work, loading, start_llama_cpp))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's). Returns the exit code."""
    parser, group = benchmark_parser("offline", TEXT, _offline)
    text = "measure it too, on the same GGUF file; needs llama-cpp-python, built for the GPU where there is one"
    group.add_argument("--peer", action="append", choices=(PEER,), default=[], help=text)
    add_offline_flags(parser, group)
    return run_command(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
