"""`ktransformers bench`: the command lines of what ktransformers/bench measures."""

from __future__ import annotations

import argparse
import logging
import random
from dataclasses import replace
from functools import partial

from ktransformers.bench.common.report import print_record
from ktransformers.cli.bench.agents import add_agents
from ktransformers.cli.bench.moved import MOVED
from ktransformers.cli.bench.offline import add_offline
from ktransformers.cli.bench.options import (
    SHAPE_NAMES,
    Kinds,
    add_gguf_path,
    add_threads,
    check_between,
    check_range,
    check_threads,
    chosen,
    gguf_file,
    kind,
    numbers,
)
from ktransformers.cli.parsing.options import (
    add_logging_flag,
    add_model_argument,
    add_model_flags,
    engine_config,
    positive_numbers,
    set_up_logging,
    with_default_model,
)
from ktransformers.cli.parsing.parser import user_path
from ktransformers.errors import ConfigError
from ktransformers.system.cores import usable_cores

__all__ = ["add_parser"]

_log = logging.getLogger(__name__)

LOAD_FORMATS = ("gguf", "bf16", "fp8")
BACKENDS = ("balance_serve", "ktransformers", "transformers")
OPERATIONS = ("linear", "attention", "delta_scan", "rms_norm")


def add_parser(subparsers: Kinds) -> None:
    """Register `bench` among the subcommands."""
    parser = subparsers.add_parser(
        "bench", has_settings=False, help="measure this machine", description="Measure this machine."
    )
    parser.moved = MOVED
    kinds = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for add in (add_offline, _add_prediction, _add_serving, add_agents, _add_speed, _add_load, _add_operations):
        add(kinds)


def _add_prediction(kinds: Kinds) -> None:
    text = "What `plan` predicts beside what is then measured, on published shapes with few layers and random weights. "
    text += "The machine is measured first. Exit code 1: a prediction is off by more than --within."
    parser, group = kind(kinds, "prediction", "what plan predicts, against a run", text, _prediction)
    shapes = "qwen3-30b-a3b,gpt-oss-20b,deepseek-v2-lite"
    group.add_argument("--shapes", default=shapes, help=f"of {', '.join(SHAPE_NAMES)} (%(default)s)")
    group.add_argument("--layers", type=int, default=6, help="of each shape (%(default)s)")
    group.add_argument("--prefill", default="32,512", help="prompt lengths (%(default)s)")
    group.add_argument("--decode", default="1,4,16", help="sequences at once (%(default)s)")
    group.add_argument("--prompt_len", type=int, default=512, help="tokens in the cache before decode (%(default)s)")
    group.add_argument("--rounds", type=int, default=5, help="of each figure, the best of which counts (%(default)s)")
    group.add_argument("--visits", type=int, default=2, help="of machine and shapes in turns (%(default)s)")
    group.add_argument("--within", type=float, default=0.25, help="how far a prediction may be off (%(default)s)")
    group.add_argument("--remembered", action="store_true", help="predict from what doctor measured before")
    add_model_flags(parser)
    add_logging_flag(group)
    parser.set_defaults(max_new_tokens=8, log_level="warning")


def _add_serving(kinds: Kinds) -> None:
    text = "Starts a server and asks it: tokens/s, latencies and touched experts of N streams at once, beside what the "
    text += "read bandwidth allows."
    parser, group = kind(kinds, "serving", "a server under load", text, _serving)
    add_gguf_path(parser, group)
    group.add_argument("--backend_type", choices=BACKENDS, default=BACKENDS[0], help="the server's (%(default)s)")
    group.add_argument("--concurrency", default="1,4,16", help="streams at once (%(default)s)")
    group.add_argument("--prompt_len", type=int, default=64, help="tokens of a prompt (%(default)s)")
    group.add_argument("--max_tokens", type=int, default=64, help="tokens of an answer (%(default)s)")
    group.add_argument("--rounds", type=int, default=1, help="of all streams (%(default)s)")
    add_threads(group)


def _add_speed(kinds: Kinds) -> None:
    text = "Asks a running server, as benchmarks/test_speed.py does: prefill and decode rates per request and in all."
    _, group = kind(kinds, "speed", "a server that is running", text, _speed)
    group.add_argument("--url", help="the server; overrides --host and --port")
    group.add_argument("--host", default="127.0.0.1", help="where it listens (%(default)s)")
    group.add_argument("--port", type=int, default=10002, help="and its port (%(default)s)")
    group.add_argument("--api_key", default="", metavar="KEY", help="what the server wants to see")
    group.add_argument("--model_name", "--model", metavar="NAME", help="default: the first that the server names")
    group.add_argument("--concurrent", type=int, default=1, help="requests at once (%(default)s)")
    group.add_argument("--prompt_lens", type=int, nargs="+", default=[1024], help="tokens of the prompts (1024)")
    group.add_argument("--max_tokens", type=int, default=50, help="tokens of an answer (%(default)s)")
    group.add_argument("--temperature", type=float, default=0.3, help="of the answers (%(default)s)")
    group.add_argument("--timeout", type=float, default=600.0, help="seconds (%(default)s)")
    group.add_argument("--seed", type=int, help="of the prompts; default: another one for each run")
    group.add_argument("--conversation", action="store_true", help="send the turns of one conversation instead")


def _add_load(kinds: Kinds) -> None:
    text = "Loads a model, or files of random weights in Qwen3-30B's shape, some times: seconds, GB/s and what takes "
    text += "them, beside what the disk and a plain copy reach."
    parser, group = kind(kinds, "load", "how fast a model is loaded", text, _load)
    add_model_argument(parser)
    group.add_argument("--gguf_path", type=user_path, help="a GGUF file; without it and MODEL, files are written")
    group.add_argument("--model_path", type=user_path, help="folder of safetensors, or with config.json for a GGUF")
    text = "what is written: Q4_K_M, or safetensors with a tensor for each expert's matrix (%(default)s)"
    group.add_argument("--format", choices=LOAD_FORMATS, default=LOAD_FORMATS[0], help=text)
    text = "of what is written, 0.4 GB each in gguf, 1.2 in bf16, 0.6 in fp8 (%(default)s)"
    group.add_argument("--layers", type=int, default=8, help=text)
    group.add_argument("--runs", type=int, default=3, help="how often (%(default)s)")
    text = "whether the system has the files in its cache, before each run (%(default)s)"
    group.add_argument("--cache", choices=("warm", "cold", "both"), default="both", help=text)
    add_threads(group)


def _add_operations(kinds: Kinds) -> None:
    text = "Each native kernel of the CPU beside the torch call that it replaces: microseconds, GB/s of weights read."
    _, group = kind(kinds, "operations", "the CPU's kernels beside torch", text, _operations)
    group.add_argument("--only", default=",".join(OPERATIONS), metavar="NAMES", help="some of these (%(default)s)")
    group.add_argument("--seconds", type=float, default=0.2, help="per figure (%(default)s)")
    group.add_argument("--size", type=int, default=2048, help="rows and columns of the matrices (%(default)s)")
    add_threads(group, 1)


def _prediction(args: argparse.Namespace) -> int:
    set_up_logging(args.log_level)
    check_between(args, layers=1000, prompt_len=1 << 20, rounds=1000, visits=1000)
    check_range("within", args.within, 0, 100)
    prefills, batches = positive_numbers(args.prefill, "prefill"), positive_numbers(args.decode, "decode")
    shapes = chosen(args.shapes, "shapes", SHAPE_NAMES)
    config = engine_config(args)
    if config.model_path is not None or config.gguf_path is not None:
        raise ConfigError("this measures --shapes with random weights; leave the model's path out")
    config = config.resolved(needs_model=False)  # before the slow imports
    from ktransformers.bench.offline.runs import DecodeCase
    from ktransformers.bench.prediction import PredictionWork, bench_prediction
    from ktransformers.bench.probe.cpu import FULL
    from ktransformers.bench.probe.measuring import known_or_measured, measure_machine
    from ktransformers.optimize.machine_speed import SpeedFile

    case = DecodeCase(steps=config.max_new_tokens, prompt_len=args.prompt_len)
    work = PredictionWork(config, shapes, args.layers, prefills, batches, case, args.rounds, args.within, args.visits)
    patient = partial(measure_machine, sizes=replace(FULL, seconds=float("inf")))
    measured = partial(known_or_measured, SpeedFile()) if args.remembered else patient
    return print_record("prediction", args.json, partial(bench_prediction, work, measured))


def _serving(args: argparse.Namespace) -> int:
    set_up_logging("warning")
    check_between(args, prompt_len=1 << 20, max_tokens=1 << 20, rounds=1000)
    check_threads(args)
    streams = numbers(args.concurrency, "concurrency", 4096)
    path = gguf_file(with_default_model(engine_config(args)))
    from ktransformers.bench.servers.serving import ServingWork, bench_serving

    threads = args.threads or usable_cores()
    work = ServingWork(path, streams, args.prompt_len, args.max_tokens, args.rounds, threads, args.backend_type)
    return print_record("serving", args.json, partial(bench_serving, work))


def _speed(args: argparse.Namespace) -> int:
    set_up_logging("warning")
    check_between(args, concurrent=4096, max_tokens=1 << 20, port=65535)
    check_range("prompt_lens", min(args.prompt_lens), 1, 1 << 20)
    check_range("timeout", args.timeout, 0.001, 1 << 20)
    from ktransformers.bench.servers.client import Client
    from ktransformers.bench.servers.speed import SpeedWork, bench_speed

    work = SpeedWork(
        client=Client(args.url or f"http://{args.host}:{args.port}", args.api_key, args.timeout),
        prompt_lens=args.prompt_lens,
        concurrent=args.concurrent,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed,
        model=args.model_name,
        is_conversation=args.conversation,
    )
    return print_record("speed", args.json, partial(bench_speed, work))


def _load(args: argparse.Namespace) -> int:
    set_up_logging("warning")
    check_between(args, layers=1000, runs=1000)
    check_threads(args)
    config = replace(engine_config(args), cpu_infer=args.threads or usable_cores(), cache_lens=256)
    if config.gguf_path is not None or config.model_path is not None:
        config = config.resolved()
    from ktransformers.bench.loading.files import FileShape
    from ktransformers.bench.loading.measure import CACHE_STATES, LoadWork, bench_load

    states = [state for state in CACHE_STATES if args.cache in (state, "both")]
    work = LoadWork(config, FileShape(args.layers), args.format, args.runs, states)
    return print_record("load", args.json, partial(bench_load, work))


def _operations(args: argparse.Namespace) -> int:
    set_up_logging("warning")
    names = chosen(args.only, "only", OPERATIONS)
    check_range("seconds", args.seconds, 0, 3600)
    check_between(args, size=1 << 15)
    if args.size % 256:
        raise ConfigError("--size must be a multiple of 256, the block of the K-quants")
    check_threads(args)
    from ktransformers.bench.operations import bench_operations

    measure = partial(bench_operations, names, args.threads or usable_cores(), args.seconds, args.size)
    return print_record("operations", args.json, measure)
