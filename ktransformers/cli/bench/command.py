"""`ktransformers bench`: the command lines of what ktransformers/bench measures."""

from __future__ import annotations

import argparse
import logging
import random
import sys
from dataclasses import replace
from functools import partial

from benchmarks.fidelity.__main__ import add_fidelity
from benchmarks.kernels import __main__ as bench_kernels
from benchmarks.peers.work import ModelWork
from ktransformers.bench.common.report import print_record
from ktransformers.cli.bench import gpu as bench_gpu
from ktransformers.cli.bench.agents import add_agents
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
    model_or_shape,
    numbers,
)
from ktransformers.cli.loading import loading_bar
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
from ktransformers.scheduler.config import MAX_ITL_RATIO, check_itl_ratio
from ktransformers.system.cores import usable_cores

__all__ = ["SHAPE_NAMES", "add_parser"]

_log = logging.getLogger(__name__)

MODEL_PEERS = ("llama.cpp",)
LOAD_FORMATS = ("gguf", "bf16", "fp8")
BACKENDS = ("balance_serve", "ktransformers", "transformers")
OPERATIONS = ("linear", "attention", "delta_scan", "rms_norm")


def add_parser(subparsers: Kinds) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "bench", has_settings=False, help="measure this machine", description="Measure this machine."
    )
    kinds = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for add in (_add_model, _add_offline, _add_prediction, _add_serving, add_agents, _add_speed, _add_soak, _add_load):
        add(kinds)
    bench_kernels.add_parsers(kinds)
    for add in (add_fidelity, _add_operations, _add_sampling, _add_scheduler, _add_profiling):
        add(kinds)
    bench_gpu.add_parsers(kinds)


def _add_model(kinds: Kinds) -> None:
    text = "A whole model on the CPU: tokens/s of prefill and decode, beside what the read bandwidth allows."
    parser, model = kind(kinds, "model", "a whole model on the CPU", text, _model)
    add_gguf_path(parser, model)
    model.add_argument("--model_path", type=user_path, help="folder with config.json, for a GGUF that says too little")
    add_threads(model)
    model.add_argument("--prefill", default="128,256,512,2048", help="prompt lengths (%(default)s)")
    model.add_argument("--batches", default="1,4", help="sequences that decode together (%(default)s)")
    model.add_argument("--steps", type=int, default=32, help="decode steps (%(default)s)")
    model.add_argument("--context", type=int, default=64, help="tokens before the first decode step (%(default)s)")
    model.add_argument("--repeats", type=int, default=2, help="rounds per figure, the best counts (%(default)s)")
    model.add_argument("--peer", action="append", choices=MODEL_PEERS, default=[], help="measure it too")


def _add_offline(kinds: Kinds) -> None:
    text = "Prefill and decode of a model: tokens/s, GB/s of weights touched, distinct experts, peaks of memory. "
    text += "--max_new_tokens is the length of a decode pass. Without MODEL and --synthetic, the bundled model."
    parser, group = kind(kinds, "offline", "a model, or random weights in its shape", text, _offline)
    add_model_argument(parser)
    group.add_argument("--synthetic", metavar="SHAPE", help=f"random weights: {', '.join(SHAPE_NAMES)}")
    group.add_argument("--layers", type=int, help="layers of SHAPE; default: as many as fit into memory")
    text = "how tokens of SHAPE choose experts; skewed: a quarter of them has 70 %% of the picks (even)"
    group.add_argument("--routing", choices=("even", "skewed"), help=text)
    group.add_argument("--prefill", default="17,32,128,512,2048,8192", help="prompt lengths (%(default)s)")
    group.add_argument("--decode", default="1,2,4,8,16", help="sequences at once (%(default)s)")
    text = "tokens of a prompt that arrives while a stream runs; 0: leave that out (%(default)s)"
    group.add_argument("--beside", type=int, default=2000, metavar="TOKENS", help=text)
    text = "of that stream, as `serve` has it; 0: --chunk_size alone decides (%(default)s)"
    group.add_argument("--max_itl_ratio", type=float, default=MAX_ITL_RATIO, metavar="X", help=text)
    group.add_argument("--prompt_len", type=int, default=64, help="tokens in the cache before decode (%(default)s)")
    group.add_argument("--seconds", type=float, default=2.0, help="least time per figure (%(default)s)")
    text = "measure it too, on the same GGUF file; needs llama-cpp-python, built for the GPU where there is one"
    group.add_argument("--peer", action="append", choices=MODEL_PEERS, default=[], help=text)
    add_model_flags(parser)
    add_logging_flag(group)
    parser.set_defaults(max_new_tokens=32)  # here: tokens per sequence in one pass of decode


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


def _add_soak(kinds: Kinds) -> None:
    text = "Starts a server, keeps it busy with mixed requests, some of which leave, and says what memory, descriptors "
    text += "and requests are left. Exit code 1: something is still held, or a request failed."
    parser, group = kind(kinds, "soak", "what long load leaves behind", text, _soak)
    add_gguf_path(parser, group)
    group.add_argument("--seconds", type=float, default=600.0, help="how long (%(default)s)")
    group.add_argument("--streams", type=int, default=32, help="requests at a time (%(default)s)")
    text = "seconds between two kills of the engine; 0: never (%(default)s)"
    group.add_argument("--kill_every", type=float, default=0.0, help=text)


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


def _add_sampling(kinds: Kinds) -> None:
    text = "What choosing a token costs, beside what transformers' processors take in torch."
    _, group = kind(kinds, "sampling", "choosing a token", text, _sampling)
    group.add_argument("--vocab", type=int, default=151_936, help="logits of a row (%(default)s)")
    group.add_argument("--seconds", type=float, default=1.0, help="per figure (%(default)s)")
    add_threads(group, 1)


def _add_scheduler(kinds: Kinds) -> None:
    text = "What planning a step costs with many sequences, without a model."
    _, group = kind(kinds, "scheduler", "planning a step", text, _scheduler)
    group.add_argument("--sequences", type=int, default=64, help="that decode (%(default)s)")
    group.add_argument("--steps", type=int, default=1000, help="per figure (%(default)s)")


def _add_profiling(kinds: Kinds) -> None:
    text = "What recording costs a decode step: with and without, in turns, of a model (the bundled one without MODEL) "
    text += "and of random weights in a shape."
    parser, group = kind(kinds, "profiling", "what recording costs", text, _profiling)
    add_model_argument(parser)
    group.add_argument("--synthetic", metavar="SHAPE", default=SHAPE_NAMES[0], help=f"{', '.join(SHAPE_NAMES)}")
    group.add_argument("--layers", type=int, default=4, help="layers of SHAPE (%(default)s)")
    group.add_argument("--steps", type=int, default=200, help="decode steps of each way (%(default)s)")
    group.add_argument("--prompt_len", type=int, default=64, help="tokens in the cache before them (%(default)s)")
    add_model_flags(parser)
    add_logging_flag(group)


def _model(args: argparse.Namespace) -> int:
    set_up_logging("warning")
    check_between(args, steps=1 << 20, context=1 << 20, repeats=1000)
    check_threads(args)
    work = ModelWork(
        prefill=numbers(args.prefill, "prefill"),
        batches=numbers(args.batches, "batches"),
        steps=args.steps,
        context=args.context,
        repeats=args.repeats,
    )
    config = replace(engine_config(args), cpu_infer=args.threads)
    if config.gguf_path is None and config.model_path is not None:
        raise ConfigError("name the GGUF file too: ktransformers bench model GGUF --model_path FOLDER")
    config = with_default_model(config)
    from benchmarks.model import bench_model

    return print_record("model", args.json, partial(bench_model, config, work, args.peer))


def _offline(args: argparse.Namespace) -> int:
    set_up_logging(args.log_level)
    prefills, batches = positive_numbers(args.prefill, "prefill"), positive_numbers(args.decode, "decode")
    check_range("prompt_len", args.prompt_len, 1, 1 << 24)
    check_range("seconds", args.seconds, 0, 3600)
    check_range("beside", args.beside, 0, 1 << 24)
    check_itl_ratio(args.max_itl_ratio)
    config = model_or_shape(args).resolved(needs_model=args.synthetic is None)  # before the slow imports
    from ktransformers.bench.offline.measure import OfflineWork, bench_offline
    from ktransformers.bench.offline.runs import DecodeCase
    from ktransformers.bench.offline.streams import StreamWork

    case = DecodeCase(steps=config.max_new_tokens, prompt_len=args.prompt_len)
    peers = tuple(dict.fromkeys(args.peer))
    if args.routing is not None and args.synthetic is None:
        raise ConfigError("--routing makes the routers of a --synthetic shape; a model's files have their own")
    routing = args.routing or "even"
    stream = StreamWork(args.beside, args.max_itl_ratio, args.prompt_len) if args.beside else None
    work = OfflineWork(
        config, prefills, batches, case, args.seconds, args.synthetic, args.layers, peers, routing, stream
    )
    return print_record("offline", args.json, partial(bench_offline, work, partial(loading_bar, sys.stderr)))


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


def _soak(args: argparse.Namespace) -> int:
    set_up_logging("warning")
    check_between(args, streams=4096)
    check_range("seconds", args.seconds, 0, 1 << 24)
    check_range("kill_every", args.kill_every, 0, 1 << 24)
    path = gguf_file(with_default_model(engine_config(args)))
    from benchmarks.soak import SoakWork, bench_soak

    work = SoakWork(path, args.seconds, args.streams, args.kill_every)
    return print_record("soak", args.json, partial(bench_soak, work))


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


def _sampling(args: argparse.Namespace) -> int:
    set_up_logging("warning")
    check_between(args, vocab=1 << 24)
    check_range("seconds", args.seconds, 0, 3600)
    check_threads(args)
    from benchmarks.sampling import bench_sampling

    measure = partial(bench_sampling, args.vocab, args.threads or usable_cores(), args.seconds)
    return print_record("sampling", args.json, measure)


def _profiling(args: argparse.Namespace) -> int:
    set_up_logging(args.log_level)
    check_between(args, layers=1 << 10, prompt_len=1 << 20)
    check_range("steps", args.steps, 2, 1 << 24)
    config = with_default_model(engine_config(args)).resolved()
    from benchmarks.profiling import ProfilingWork, bench_profiling

    work = ProfilingWork(config, args.synthetic, args.layers, args.steps, args.prompt_len)
    return print_record("profiling", args.json, partial(bench_profiling, work, partial(loading_bar, sys.stderr)))


def _scheduler(args: argparse.Namespace) -> int:
    check_between(args, sequences=1 << 14)
    check_range("steps", args.steps, 2, 1 << 24)
    from benchmarks.scheduler import bench_scheduler

    return print_record("scheduler", args.json, partial(bench_scheduler, args.sequences, args.steps))
