"""What draft tokens gain, and what they cost where they gain nothing: the same answers with them and without.

A model answers four kinds of prompts, alternately with --speculative off and each of --drafter, so that what else the
machine does meets all of them: "code" is code that is repeated (a grammar holds the answer to that, since small models
cannot), "text" is drawn at temperature 0.8, "noise" at one at which hardly anything repeats, and "chat" are questions
that the bundled model knows, in its template, at 0.8. On the CPU tokens must be equal, `==`; on
GPUs it is counted how many answers are others. The bound is what steps allow: an answer of n tokens of which a were
accepted takes n - a steps, so that it would be n / (n - a) times as fast if a step took the same with draft tokens.

With --synthetic SHAPE, random weights answer with tokens that are known beforehand, of which --accept of the drafts are
right (known_answers.py): greedy, behind --prompt_len tokens. With --drafter mtp the layer for multi-token prediction
has random weights, too, and takes its steps. Answers without draft tokens are those of the first drafter's engine.

Columns: "drafts" and "draft ms" are draft tokens of a step that decodes, and what finding them took of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import median
from typing import NamedTuple
from unittest import mock

from benchmarks.command import benchmark_parser
from benchmarks.known_answers import KnownAnswers
from ktransformers.bench.common.machine import measured_machine, shown_machine
from ktransformers.bench.common.report import Column, FigureTable, Record, Row, print_record
from ktransformers.cli import run_command
from ktransformers.cli.bench.options import SHAPE_NAMES, check_between, check_range, model_or_shape, numbers
from ktransformers.cli.parsing.options import add_logging_flag, add_model_argument, add_model_flags, set_up_logging
from ktransformers.config import SPECULATIVES, EngineConfig
from ktransformers.core import Constraint, ConstraintKind, SamplingParams
from ktransformers.engine.api.batch_loop import BatchLoop
from ktransformers.engine.api.llm import LLM, RequestOutput
from ktransformers.engine.load.builder import build_engine
from ktransformers.engine.model.opened import OpenedModel, open_model, open_synthetic
from ktransformers.engine.step.executor import PagedExecutor
from ktransformers.errors import ConfigError, EngineError
from ktransformers.models.synthetic_shapes import SHAPES, find_shape
from ktransformers.scheduler.records import StepPlan, StepResult
from ktransformers.system.cores import usable_cores
from ktransformers.weights.synthetic import ROUTINGS

__all__ = ["SpeculativeWork", "bench_speculative", "main"]

_CODE = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def peek(self):
        return self.items[-1]
"""
_TEXT = "Tell me about the sea and the history of ships."
_QUESTIONS = (
    "73 meters is how many centimeters?",
    "What does recursive mean in a rule?",
    "Write this list backwards: beach, pocket, clock, ocean, comet, peach, pepper, sand",
    "What are you?",
    "Write this list as a JSON array: forest, candle, butter, rabbit",
    "What is --backend_type?",
)
_PROMPTS: dict[str, tuple[tuple[str, ...], SamplingParams]] = {
    "code": (
        (f"This code:\n{_CODE}\nThe same code again:\n",),
        SamplingParams(temperature=0.0, constraint=Constraint(ConstraintKind.CHOICE, json.dumps([_CODE]))),
    ),
    "text": ((_TEXT,), SamplingParams(temperature=0.8, ignore_eos=True)),
    "noise": ((_TEXT,), SamplingParams(temperature=2.0, ignore_eos=True)),
    "chat": (_QUESTIONS, SamplingParams(temperature=0.8)),
}
_DRAFTERS = ("ngram", "mtp")
_COLUMNS = (
    Column("prompts", 7),
    Column("streams", 7),
    Column("drafter", 7),
    Column("off_ms", 8, ".3f", "off ms"),
    Column("ms", 8, ".3f", "ms"),
    Column("ratio", 8, ".2f", "x faster"),
    Column("tokens_s", 8, ".1f", "tokens/s"),
    Column("drafts", 7, ".2f"),
    Column("draft_ms", 8, ".3f", "draft ms"),
    Column("bound", 7, ".2f"),
    Column("accepted", 8),
    Column("drafted", 7),
    Column("other", 5),
)
_SPARE_LEN = 512  # tokens of the cache for a sequence beside its own, which fill whole pages


class Answers(NamedTuple):
    """Answers side by side: seconds of their decode, these, steps that decoded, and seconds of finding draft tokens."""

    seconds: float
    outputs: list[RequestOutput]
    num_steps: int
    draft_seconds: float


@dataclass(frozen=True, slots=True)
class SpeculativeWork:
    """What to measure: `config`'s model, or random weights in the shape `synthetic` with `layers` of its layers.

    streams: answers at once. repeats: pairs of answers per figure. accepts: of a shape, how likely a draft token is
    right. prompt_len: of a shape, tokens before the answers. routing: of a shape, how tokens choose experts. drafters:
    what is compared with no draft tokens.
    """

    config: EngineConfig
    streams: Sequence[int]
    repeats: int
    synthetic: str | None = None
    layers: int | None = None
    accepts: Sequence[float] = ()
    prompt_len: int = 64
    routing: str = "even"
    drafters: Sequence[str] = _DRAFTERS[:1]


def _answers(llm: LLM, kind: str, num_streams: int, max_tokens: int, seed: int) -> Answers:
    prompts, asked = _PROMPTS[kind]
    params = [replace(asked, max_tokens=max_tokens, seed=seed + i) for i in range(num_streams)]
    given = [prompts[(seed + i) % len(prompts)] for i in range(num_streams)]
    if prompts is _QUESTIONS:
        return _timed(lambda: llm.chat([[{"role": "user", "content": question}] for question in given], params))
    return _timed(lambda: llm.generate(given, params))


def _known_answers(
    llm: LLM, known: KnownAnswers, params: SamplingParams, num_streams: int, drafter: str, seed: int
) -> Answers:
    seeds = [1000 * seed + i for i in range(num_streams)]
    with known.in_place(drafter):
        prompts = [known.prompt(one) for one in seeds]
        return _timed(lambda: llm.generate(prompts, [replace(params, seed=one) for one in seeds]))


def _timed(answer: Callable[[], list[RequestOutput]]) -> Answers:
    """Answer, and watch the steps that decode."""
    execute, steps = PagedExecutor.execute, list[float]()

    def watched(executor: PagedExecutor, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> StepResult:
        result = execute(executor, plan, meanwhile)
        if plan.rows and all(row.is_sampled and row.num_tokens == 1 + row.num_drafts for row in plan.rows):
            steps.append(result.draft_seconds)
        return result

    with mock.patch.object(PagedExecutor, "execute", watched):
        outputs = answer()
    return Answers(max(output.stats.decode_seconds for output in outputs), outputs, len(steps), sum(steps))


@dataclass(slots=True)
class _Pairs:
    """Answers without draft tokens and with those of one drafter, in milliseconds a token, and what was drafted."""

    off: list[float] = field(default_factory=list)
    on: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_other: int = 0
    num_streams: int = 0
    num_steps: int = 0
    draft_seconds: float = 0.0

    def add(self, plain: Answers, drafting: Answers, num_other: int) -> None:
        """Count a pair. num_other: how many of its answers are others."""
        for times, answers in ((self.off, plain), (self.on, drafting)):
            times.append(answers.seconds / max(len(one.token_ids) for one in answers.outputs) * 1e3)
        got = drafting.outputs
        self.num_streams, self.num_steps = len(got), self.num_steps + drafting.num_steps
        self.draft_seconds += drafting.draft_seconds
        self.num_tokens += sum(len(one.token_ids) for one in got)
        self.num_drafted += sum(one.stats.num_drafted for one in got)
        self.num_accepted += sum(one.stats.num_accepted for one in got)
        self.num_other += num_other

    def row(self) -> Row:
        """The figures of a line of the table."""
        return {
            "off_ms": median(self.off),
            "ms": median(self.on),
            "ratio": median(before / after for before, after in zip(self.off, self.on, strict=True)),
            "tokens_s": self.num_streams / median(self.on) * 1e3,
            "drafts": self.num_drafted / self.num_steps,
            "draft_ms": self.draft_seconds / self.num_steps * 1e3,
            "bound": self.num_tokens / (self.num_tokens - self.num_accepted),
            "accepted": self.num_accepted,
            "drafted": self.num_drafted,
            "other": self.num_other,
        }


def _compare(
    plain: Callable[[int], Answers], drafting: Mapping[str, Callable[[int], Answers]], repeats: int, *, is_exact: bool
) -> dict[str, Row]:
    """The figures of each drafter. plain, drafting: answer, by a seed. Raises EngineError when an answer is another one
    with draft tokens, where that cannot be."""
    pairs = {name: _Pairs() for name in drafting}
    for seed in range(1 + repeats):
        want = plain(seed)
        for name, answer in drafting.items():
            got = answer(seed)
            num_other = sum(one.token_ids != two.token_ids for one, two in zip(want.outputs, got.outputs, strict=True))
            if num_other and is_exact:
                raise EngineError(f"seed {seed}: an answer is another one with draft tokens of {name}")
            if seed:  # what was never run before is slower
                pairs[name].add(want, got, num_other)
    return {name: one.row() for name, one in pairs.items()}


def _loaded(config: EngineConfig, opened: OpenedModel, num_streams: int) -> LLM:
    return LLM.from_loop(
        BatchLoop(lambda report: build_engine(config, report, opened=opened, max_batch_size=num_streams))
    )


def _of_texts(work: SpeculativeWork, num_streams: int, table: FigureTable) -> None:
    """Add lines for each kind of prompts. The model is loaded without draft tokens, and once with each drafter."""

    def load(speculative: str) -> LLM:
        config = replace(work.config, speculative=speculative)
        return _loaded(config, open_model(config), num_streams)

    max_tokens = work.config.max_new_tokens
    with ExitStack() as loaded:
        plain = loaded.enter_context(load("off"))
        drafting = {name: loaded.enter_context(load(name)) for name in work.drafters}
        for kind in _PROMPTS:
            off, *others = (
                partial(_answers, llm, kind, num_streams, max_tokens) for llm in (plain, *drafting.values())
            )
            ways = dict(zip(drafting, others, strict=True))
            figures = _compare(off, ways, work.repeats, is_exact=not plain.engine.uses_gpus)
            for name, row in figures.items():
                table.add({"prompts": kind, "streams": num_streams, "drafter": name, **row})


def _of_shape(work: SpeculativeWork, num_streams: int, table: FigureTable) -> None:
    """Add a line for each acceptance and drafter. A model is loaded for each drafter; answers without draft tokens ask
    the first one for none."""
    assert work.synthetic is not None
    shape, max_tokens = find_shape(work.synthetic), work.config.max_new_tokens
    room = num_streams * (work.prompt_len + max_tokens + _SPARE_LEN)

    def load(speculative: str) -> LLM:
        config = replace(work.config, speculative=speculative, cache_lens=work.config.cache_lens or room)
        opened = open_synthetic(config, shape.config(work.layers), work.routing)
        return _loaded(opened.config, opened, num_streams)

    asked = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    with ExitStack() as loaded:
        llms = {name: loaded.enter_context(load(name)) for name in work.drafters}
        (first, llm), *_ = llms.items()
        for accept in work.accepts:
            known = KnownAnswers(llm.engine.model.vocab_size, accept, work.prompt_len, max_tokens)
            plain = partial(_known_answers, llm, known, replace(asked, max_drafts=0), num_streams, first)
            ways = {name: partial(_known_answers, one, known, asked, num_streams, name) for name, one in llms.items()}
            for name, figures in _compare(plain, ways, work.repeats, is_exact=True).items():
                table.add({"prompts": f"{accept:g}", "streams": num_streams, "drafter": name, **figures})


def bench_speculative(work: SpeculativeWork) -> Record:
    """Print the machine and a table: a line per kind of prompts, or acceptance, and number of streams."""
    machine = measured_machine(work.config.cpu_infer or usable_cores())
    print(shown_machine(machine))
    table = FigureTable(_COLUMNS)
    for num_streams in work.streams:
        (_of_texts if work.synthetic is None else _of_shape)(work, num_streams, table)
    path = work.config.gguf_path or work.config.model_path
    settings = {name: value for name, value in asdict(work).items() if name != "config"}
    name = work.synthetic or (None if path is None else path.name)
    return {"machine": machine, "model": name, "work": settings, "rows": table.rows}


def _chances(text: str) -> list[float]:
    """The numbers in "0.8,0". Raises ConfigError."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--accept {text}: give numbers from 0 to 1, such as 0.8,0") from None
    for chance in found:
        check_range("accept", chance, 0, 1)
    return found


def _speculative(args: argparse.Namespace) -> int:
    set_up_logging(args.log_level)
    check_between(args, repeats=1000)
    if args.speculative != SPECULATIVES[0]:
        raise ConfigError("this compares --drafter with --speculative off: leave --speculative out")
    drafters = tuple(args.drafter.split(","))
    if unknown := [name for name in drafters if name not in _DRAFTERS]:
        raise ConfigError(f"--drafter {unknown[0]}: give {', '.join(_DRAFTERS)}, or both with a comma between")
    if args.synthetic is not None and "mtp" in drafters and not find_shape(args.synthetic).has_mtp:
        names = ", ".join(name for name, shape in SHAPES.items() if shape.has_mtp)
        raise ConfigError(f"--drafter mtp: {args.synthetic} has no layer for multi-token prediction; {names} have one")
    of_shapes = args.accept, args.prompt_len, args.routing
    if args.synthetic is None and any(value is not None for value in of_shapes):
        raise ConfigError("--accept, --prompt_len and --routing are of a --synthetic shape; texts have their own")
    if args.cpu_infer is None:
        args.cpu_infer = 1 if args.synthetic is None else 0
    config = model_or_shape(args).resolved(needs_model=args.synthetic is None)
    streams, accepts = numbers(args.streams, "streams", 256), _chances(args.accept or "0.8")
    prompt_len = 64 if args.prompt_len is None else args.prompt_len
    check_range("prompt_len", prompt_len, 1, 1 << 20)
    shape = args.synthetic, args.layers, accepts, prompt_len, args.routing or "even"
    work = SpeculativeWork(config, streams, args.repeats, *shape, drafters)
    return print_record("speculative", args.json, partial(bench_speculative, work))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's). Returns the exit code."""
    text = "What draft tokens gain: answers with them, alternately with the same without, of a model (the bundled one "
    text += "without MODEL, on one thread), or of random weights in a shape."
    parser, group = benchmark_parser("speculative", text, _speculative)
    add_model_argument(parser)
    group.add_argument("--streams", default="1,16", help="answers at once (%(default)s)")
    group.add_argument("--repeats", type=int, default=9, help="pairs of answers per figure (%(default)s)")
    group.add_argument("--drafter", default="ngram", metavar="NAME,NAME", help="ngram, mtp or both (%(default)s)")
    group.add_argument("--synthetic", metavar="SHAPE", help=f"random weights: {', '.join(SHAPE_NAMES)}")
    group.add_argument("--layers", type=int, help="layers of SHAPE; default: all of them")
    group.add_argument("--accept", metavar="P,P,...", help="of SHAPE: how likely a draft token is right (0.8)")
    group.add_argument("--prompt_len", type=int, help="of SHAPE: tokens before the answers (64)")
    text = "of SHAPE: how tokens choose experts; skewed: a quarter of them has 70 %% of the picks (even)"
    group.add_argument("--routing", choices=ROUTINGS, help=text)
    add_model_flags(parser)
    add_logging_flag(group)
    parser.set_defaults(max_new_tokens=200, cpu_infer=None, log_level="warning")
    return run_command(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
