"""The command line of `ktransformers bench agents`: a load of agents on servers that run, or are started for it."""

from __future__ import annotations

import argparse
import logging
import random
import shlex
from functools import partial
from typing import TYPE_CHECKING

from ktransformers.bench.agents.shapes import WAVES, Wave, choose_waves, slot_len
from ktransformers.bench.common.report import print_record
from ktransformers.cli.bench.options import (
    Kinds,
    add_gguf_path,
    add_threads,
    check_range,
    check_threads,
    gguf_file,
    kind,
)
from ktransformers.cli.parsing.options import engine_config, set_up_logging, with_default_model
from ktransformers.cli.parsing.parser import COMMAND_LINE, check_place, user_path
from ktransformers.cli.serve import command as serve
from ktransformers.config import EngineConfig
from ktransformers.errors import ConfigError

if TYPE_CHECKING:
    from ktransformers.bench.agents.bench import Target

__all__ = ["add_agents"]

_log = logging.getLogger(__name__)

_PEERS = ("llama.cpp",)
_SLOTS = 8
_VOCAB = 32_000
"""Nearly all vocabularies have so many tokens, none of which stands for an image."""
_TIMEOUT = 1200.0
_RANGES = {
    "vocab": (2, 1 << 24),
    "timeout": (0.001, 1 << 20),
    "slots": (1, 4096),
    "context": (1, 1 << 30),
    "n_cpu_moe": (0, 4096),
}
_OF_PEER = ("llama_server", "n_cpu_moe", "peer_flags")
_OF_STARTED = (
    *("model", "gguf_path", "model_path", "slots", "context", "threads", "server_flags", "peer"),
    *_OF_PEER,
)
_OF_RUNNING = ("api_key", "timeout")
_TAKEN = ("host", "port", "api_key", "api_key_file", "ssl_keyfile", "ssl_certfile", "log_level")
"""Flags of `serve` that the measurement needs for itself."""


def add_agents(kinds: Kinds) -> None:
    """Register `bench agents` among the `kinds` of `bench`."""
    text = (
        "Sends what agents send: long prompts with a common beginning, many at once, beside streams. Prints times to "
    )
    text += "first tokens, gaps between tokens and tokens/s of each wave. The server is one that runs (--url), or is "
    text += "started on MODEL (without it the bundled model). Exit code 1: a request failed."
    parser, group = kind(kinds, "agents", "a server under the load of agents", text, _agents)
    _add_load(group)
    running = parser.add_argument_group("a server that is running")
    text = "measure this one, ours or another that has /v1/completions; repeatable: one after the other"
    running.add_argument("--url", action="append", default=[], help=text)
    running.add_argument("--api_key", metavar="KEY", help="what it wants to see")
    text = f"seconds that a request waits for its next token ({_TIMEOUT:.0f})"
    running.add_argument("--timeout", type=float, help=text)
    started = parser.add_argument_group("servers that are started")
    add_gguf_path(parser, started)
    text = "folder with config.json, for a GGUF that says too little"
    started.add_argument("--model_path", type=user_path, help=text)
    started.add_argument("--slots", type=int, help=f"requests that are computed at a time ({_SLOTS})")
    text = "tokens of the cache; default: --slots times the longest prompt with its answer"
    started.add_argument("--context", type=int, metavar="TOKENS", help=text)
    add_threads(started)
    text = "more flags of `serve`, in quotes: '--gpu_memory 20 --kv_type int8'"
    started.add_argument("--server_flags", metavar="FLAGS", help=text)
    text = "then measure llama-server on the same GGUF file with the same --slots, --context and --threads"
    started.add_argument("--peer", choices=_PEERS, help=text)
    text = "the peer's program; default: llama-server on the PATH"
    started.add_argument("--llama_server", type=user_path, help=text)
    text = "the peer's layers whose routed experts are on the CPU, with all else on the GPU; default: as it decides"
    started.add_argument("--n_cpu_moe", type=int, help=text)
    started.add_argument("--peer_flags", metavar="FLAGS", help="more flags of the peer, in quotes: '-ub 2048'")


def _add_load(group: argparse._ActionsContainer) -> None:
    text = f"some of {', '.join(wave.name for wave in WAVES)} (all); warm_up always comes first"
    group.add_argument("--waves", metavar="NAMES", help=text)
    text = "a wave of your own, such as agents=16,shared=4000,own=500,answer=64,turns=3; repeatable; without --waves "
    group.add_argument("--shape", action="append", default=[], metavar="SHAPE", help=text + "in place of the others")
    group.add_argument("--scale", type=float, default=1.0, help="of the lengths of prompts (%(default)s)")
    text = f"token ids of prompts are below this; default: the model's number, or {_VOCAB} with --url"
    group.add_argument("--vocab", type=int, help=text)
    text = "send text, a word for a token, to a server that takes no token ids"
    group.add_argument("--text", action="store_true", help=text)
    group.add_argument("--seed", type=int, help="of the prompts; default: another one for each run")
    group.add_argument("--model_name", metavar="NAME", help="in requests; default: the first that the server names")
    text = "append the JSON record to this file, too"
    group.add_argument("-o", "--output", type=user_path, metavar="FILE", help=text)


def _agents(args: argparse.Namespace) -> int:
    set_up_logging("warning")
    _check(args)
    names = None if args.waves is None else [name.strip() for name in args.waves.split(",")]
    waves = choose_waves(names, args.shape, args.scale)
    targets, vocab = _running(args) if args.url else _started(args, waves)
    from ktransformers.bench.agents.bench import AgentsWork, bench_agents

    work = AgentsWork(
        targets=targets,
        waves=waves,
        seed=random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed,
        vocab=args.vocab or vocab,
        is_text=args.text,
        model=args.model_name,
        scale=args.scale,
    )
    return print_record("agents", args.json, partial(bench_agents, work), args.output)


def _check(args: argparse.Namespace) -> None:
    """Raises ConfigError for values out of range, and for flags that do not go together."""
    check_range("scale", args.scale, 0.0001, 1000)
    for flag, (least, most) in _RANGES.items():
        if getattr(args, flag) is not None:
            check_range(flag, getattr(args, flag), least, most)
    check_threads(args)
    if args.output is not None:
        check_place(args.output)
    if args.text and args.vocab is not None:
        raise ConfigError("--vocab bounds token ids, --text sends none; leave one of them out")
    given = args.value_sources
    started = next((flag for flag in _OF_STARTED if flag in given), None)
    if started is not None and args.url:
        name = "MODEL" if started == "model" else f"--{started}"
        raise ConfigError(f"{name} is for a server that is started, --url for one that runs; leave one of them out")
    running = next((flag for flag in _OF_RUNNING if flag in given), None)
    if running is not None and not args.url:
        raise ConfigError(f"--{running} is for a server that runs; name it with --url")
    of_peer = next((flag for flag in _OF_PEER if flag in given), None)
    if of_peer is not None and args.peer is None:
        raise ConfigError(f"--{of_peer} is for a peer; add --peer {_PEERS[0]}")


def _running(args: argparse.Namespace) -> tuple[list[Target], int]:
    """Servers that run, and a bound of token ids."""
    from ktransformers.bench.agents.bench import running_target
    from ktransformers.bench.servers.client import Client

    timeout = _TIMEOUT if args.timeout is None else args.timeout
    targets = [running_target(url, Client(url, args.api_key or "", timeout)) for url in args.url]
    return targets, _VOCAB


def _started(args: argparse.Namespace, waves: list[Wave]) -> tuple[list[Target], int]:
    """Servers that are started, and the number of token ids that their model knows."""
    from ktransformers.bench.agents.bench import llama_target, own_target, vocab_size
    from ktransformers.bench.agents.llama_server import LlamaServerWork, find_llama_server

    config = with_default_model(engine_config(args))
    slots = _SLOTS if args.slots is None else args.slots
    context = slots * slot_len(waves) if args.context is None else args.context
    flags = [*_model_words(config), "--max_batch_size", str(slots), "--cache_lens", str(context)]
    if args.threads:
        flags += ["--cpu_infer", str(args.threads)]
    flags += _split(args.server_flags, "server_flags")
    _check_server_flags(flags)
    targets = [own_target(flags)]
    if args.peer is not None:
        program, more = find_llama_server(args.llama_server), _split(args.peer_flags, "peer_flags")
        work = LlamaServerWork(program, gguf_file(config), slots, context, args.threads, args.n_cpu_moe, more)
        targets.append(llama_target(work))
    vocab = vocab_size(config)
    if vocab is None and args.vocab is None:
        _log.warning("the model does not say how many token ids it knows: those below %d are used (--vocab)", _VOCAB)
    return targets, vocab or _VOCAB


def _model_words(config: EngineConfig) -> list[str]:
    """MODEL and --model_path as `serve` takes them."""
    words = [str(path) for path in (config.gguf_path or config.model_path,) if path is not None]
    if config.gguf_path is not None and config.model_path is not None:
        words += ["--model_path", str(config.model_path)]
    return words


def _split(text: str | None, flag: str) -> list[str]:
    """The words of a flag's value, as a shell divides it."""
    try:
        return shlex.split(text or "")
    except ValueError as error:
        raise ConfigError(f"--{flag} {text!r}: {error}") from error


def _check_server_flags(flags: list[str]) -> None:
    """Ends with serve's own error for flags that it does not take. Raises ConfigError for those that are taken here."""
    sources = serve.server_parser().parse_args(flags).value_sources
    taken = next((name for name in _TAKEN if sources.get(name) == COMMAND_LINE), None)
    if taken is not None:
        raise ConfigError(f"--server_flags cannot set --{taken}; start the server yourself and name it with --url")
