"""`ktransformers bench offline` with others in the same run.

python -m benchmarks.offline MODEL.gguf --peer llama.cpp
python -m benchmarks.offline --synthetic qwen3.6-35b-a3b --routing skewed --gpu_memory 11 --peer whole_layers

All take turns. llama.cpp has the same GGUF file, and everything on the GPU but the routed experts that our plan leaves
to the CPU. whole_layers is this program with --hot_experts off, with as much video memory: --gpu_memory says how much.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from benchmarks.command import benchmark_parser
from benchmarks.peers.base import PeerProcess, is_missing
from benchmarks.peers.llama_library import PEER
from benchmarks.peers.llama_model import llama_model_peer
from benchmarks.peers.placement import cpu_expert_layers
from benchmarks.peers.whole_layers import WHOLE_LAYERS, whole_layers_peer
from benchmarks.peers.work import ModelWork
from ktransformers.bench.common.report import print_record
from ktransformers.bench.offline.measure import OfflineWork, bench_offline
from ktransformers.cli import run_command
from ktransformers.cli.bench.offline import TEXT, add_offline_flags, offline_work
from ktransformers.cli.loading import loading_bar
from ktransformers.cli.parsing.options import set_up_logging
from ktransformers.engine.load.builder import Engine
from ktransformers.errors import ConfigError
from ktransformers.system.cores import usable_cores
from ktransformers.weights.gguf.file import open_gguf

__all__ = ["main", "start_llama_cpp"]


def start_llama_cpp(engine: Engine, work: OfflineWork) -> list[PeerProcess]:
    """llama.cpp on the engine's GGUF file; nothing, and one printed line, where it is not installed."""
    path = engine.config.gguf_path
    assert path is not None, "checked before loading"
    if is_missing(PEER, "llama_cpp", "llama-cpp-python"):
        return []
    sizes = ModelWork(work.prefills, work.batches, work.cases[0].steps, work.cases[0].prompt_len)
    threads = engine.config.cpu_infer or usable_cores()
    file = open_gguf(path).files[0].path
    return [llama_model_peer(file, threads, engine.model.vocab_size, sizes, cpu_expert_layers(engine.plan))]


def _start_peers(args: argparse.Namespace, engine: Engine, work: OfflineWork) -> list[PeerProcess]:
    found = start_llama_cpp(engine, work) if PEER in args.peer else []
    if WHOLE_LAYERS in args.peer:
        found.append(whole_layers_peer(args.argv))
    return found


def _offline(args: argparse.Namespace) -> int:
    set_up_logging(args.log_level)
    work, loading = offline_work(args), partial(loading_bar, sys.stderr)
    if PEER in args.peer and work.config.gguf_path is None:
        raise ConfigError("--peer llama.cpp reads a GGUF file: name one as MODEL, and leave --synthetic out")
    if WHOLE_LAYERS in args.peer and not work.config.gpu_memory:
        raise ConfigError(f"--peer {WHOLE_LAYERS} takes as much video memory: say how much of it (--gpu_memory GIB)")
    return print_record("offline", args.json, partial(bench_offline, work, loading, partial(_start_peers, args)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's). Returns the exit code."""
    parser, group = benchmark_parser("offline", TEXT, _offline)
    text = f"measure it too: {PEER} on the same GGUF file (needs llama-cpp-python, built for the GPU where there is "
    text += f"one), {WHOLE_LAYERS}: this with --hot_experts off; repeatable"
    group.add_argument("--peer", action="append", choices=(PEER, WHOLE_LAYERS), default=[], help=text)
    add_offline_flags(parser, group)
    given = list(sys.argv[1:] if argv is None else argv)
    parser.set_defaults(argv=_without_peers(given))
    return run_command(parser, given)


def _without_peers(argv: Sequence[str]) -> list[str]:
    """Leave out what a peer is started by."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--peer", action="append")
    return parser.parse_known_args(list(argv))[1]


if __name__ == "__main__":
    sys.exit(main())
