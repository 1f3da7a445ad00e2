"""Time to the first token behind a screenshot, and in the turn after it; on a GPU, on both, or on the CPU alone.

python -m benchmarks.gpu.pictures --peer llama.cpp
python -m benchmarks.gpu.pictures --peer llama.cpp --gpu_memory 8 --folder /tmp/pictures
python -m benchmarks.gpu.pictures --peer llama.cpp --no_use_cuda --layers 4 --tower_blocks 3 --pictures 1

A model in the shape of Qwen3-VL-30B-A3B with random weights is written, which both programs read. Each picture is
another one, so that nothing is found in a cache. Parts: read (decoding and processing, here in a child process), tower,
text (all else: the prompt's tokens, the language model, sampling); those of the next turn stand behind it. Beside them
is what the hardware needs at least.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from benchmarks.command import benchmark_parser
from benchmarks.gpu.picture_bounds import Hardware, PictureBounds, expert_nbytes, text_flop
from benchmarks.gpu.picture_files import TEXT_NAME, TOWER_NAME, TowerShape, draw_screenshot, write_model
from benchmarks.peers.base import PeerProcess, is_missing
from benchmarks.peers.llama_library import PEER
from benchmarks.peers.llama_pictures import PARTS, PictureWork, llama_pictures_peer
from benchmarks.peers.placement import cpu_expert_layers
from ktransformers.bench.common.report import Column, FigureTable, Record, Row, print_record
from ktransformers.bench.loading.files import FileShape
from ktransformers.cli import run_command
from ktransformers.cli.bench.options import check_range
from ktransformers.cli.loading import loading_bar
from ktransformers.cli.parsing.options import add_logging_flag, add_model_flags, engine_config, set_up_logging
from ktransformers.config import EngineConfig
from ktransformers.engine.api.llm import LLM, load_batches
from ktransformers.engine.api.llm_options import LLMOptions
from ktransformers.engine.load.builder import Engine
from ktransformers.engine.media.family import PictureFamily
from ktransformers.engine.media.features import PictureEncoder, PictureFeatures
from ktransformers.engine.plan.tower_plan import PICTURES, TOWER
from ktransformers.engine.sequence.picture_parts import SentPicture
from ktransformers.errors import ConfigError
from ktransformers.media.records import MediaItem
from ktransformers.optimize.plan import Plan
from ktransformers.system.cores import usable_cores

__all__ = ["PicturesWork", "bench_pictures", "main", "write_once"]

WARM_UPS = 2
"""Pictures that do not count: kernels are compiled, and the child process is started."""

CONTEXT = 4096
_QUESTION = "Which of the buttons in this window stores what I have changed, and what does the chart below them show?"
_ANSWER = "The second one from the top; the chart shows twelve values of different heights."
_NEXT = "Which of these values is the largest, and is it larger than the two beside it together?"
_NAME = "ktransformers"
_TURN, _END = "<|im_start|>", "<|im_end|>\n"
_COLUMNS = (
    Column("program", 21, title=" "),
    Column("picture", 7),
    *(Column(f"{part}_ms", 10, ".1f", f"{part} ms") for part in PARTS),
    Column("first_token_ms", 14, ".1f", "first token ms"),
    Column("next_turn_ms", 12, ".1f", "next turn ms"),
    *(Column(f"next_{part}_ms", 10, ".1f", f"{part} ms") for part in PARTS),
    Column("token", 7),
)


@dataclass(frozen=True, slots=True)
class PicturesWork:
    """config: without a model, whose files are written into `folder` unless they are there. pictures: that count, of
    size x size pixels."""

    config: EngineConfig
    text: FileShape
    tower: TowerShape
    pictures: int
    folder: Path
    size: int = 1024
    has_peer: bool = False


class Program(Protocol):
    """Answers as the child of llama_pictures does."""

    name: str

    def ask(self, question: str) -> float | None:
        """Return seconds; None: there is no such figure."""
        ...


class TimedEncoder:
    """A model's encoder. seconds: spent on features since they were last set to 0."""

    def __init__(self, encoder: PictureEncoder):
        self._encoder, self.seconds = encoder, 0.0

    @property
    def family(self) -> PictureFamily:
        """See PictureEncoder."""
        return self._encoder.family

    def features(self, digest: bytes) -> PictureFeatures:
        """See PictureEncoder."""
        began = time.perf_counter()
        found = self._encoder.features(digest)
        self.seconds += time.perf_counter() - began
        return found

    def positions(self, token_ids: Sequence[int], media: Sequence[MediaItem]) -> torch.Tensor | None:
        """See PictureEncoder."""
        return self._encoder.positions(token_ids, media)


class OurProgram:
    """Program over a loaded LLM, whose tower it times."""

    name = _NAME

    def __init__(self, llm: LLM):
        assert llm.engine.pictures is not None, "the files have a tower"
        self._llm, self._encoder = llm, TimedEncoder(llm.engine.pictures)
        llm.engine.executor.pictures = self._encoder
        self._path, self._parts = "", dict.fromkeys((*PARTS, "token"), 0.0)
        self.prompt_len = 0

    def ask(self, question: str) -> float | None:
        """See Program."""
        words = question.split()
        if words[0] == "part":
            return self._parts.get(words[1])
        self._path = self._path if words[0] == "again" else words[0]
        user = [{"type": "image", "image": self._path}, {"type": "text", "text": _QUESTION}]
        turns: list[dict[str, object]] = [{"role": "user", "content": user}]
        if words[0] == "again":
            turns += [{"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _NEXT}]
        self._encoder.seconds = 0.0
        began = time.perf_counter()
        self._llm.pictures.read([SentPicture(Path(self._path).read_bytes())])
        read = time.perf_counter() - began
        [output] = self._llm.chat(turns, max_tokens=1, temperature=0.0)
        seconds = time.perf_counter() - began
        tower, self.prompt_len = self._encoder.seconds, len(output.prompt_token_ids)
        text = seconds - read - tower
        self._parts = {"read": read, "tower": tower, "text": text, "token": output.outputs[0].token_ids[0]}
        return seconds


def _peer(engine: Engine, folder: Path) -> PeerProcess:
    work = PictureWork(
        model=str(folder / TEXT_NAME),
        tower=str(folder / TOWER_NAME),
        threads=engine.config.cpu_infer or usable_cores(),
        before=f"{_TURN}user\n",
        behind=f"{_QUESTION}{_END}{_TURN}assistant\n",
        again=f"{_ANSWER}{_END}{_TURN}user\n{_NEXT}{_END}{_TURN}assistant\n",
        context=CONTEXT,
        cpu_experts=cpu_expert_layers(engine.plan),
        has_gpu_tower=_tower_place(engine.plan) != "cpu",
    )
    return llama_pictures_peer(work)


def _tower_place(plan: Plan) -> str:
    """Where the tower computes."""
    gpus = [name for name in plan.extra_bytes[PICTURES] if name != "cpu"]
    is_streamed = "cpu" in plan.extra_bytes[TOWER]
    return "cpu" if not gpus else f"{gpus[0]}, weights from RAM" if is_streamed else gpus[0]


def _row(program: Program, number: int, path: Path) -> Row:
    """Milliseconds of one picture."""

    def milliseconds(question: str) -> float | None:
        found = program.ask(question)
        return None if found is None else 1e3 * found

    def parts(prefix: str) -> Row:
        return {f"{prefix}{part}_ms": milliseconds(f"part {part}") for part in PARTS}

    row: Row = {"program": program.name, "picture": number, "first_token_ms": milliseconds(str(path)), **parts("")}
    token = program.ask("part token")
    row |= {"token": None if token is None else int(token), "next_turn_ms": milliseconds("again")}
    return row | parts("next_")


def _medians(rows: Sequence[Row], name: str) -> Row:
    """Of a program's rows, those of warm-ups left out."""
    mine = [row for row in rows if row["program"] == name and row["picture"] >= WARM_UPS]
    keys = [key for key in mine[0] if key.endswith("_ms")]
    found: Row = {"program": f"{name}, median"}
    for key in keys:
        values = [row[key] for row in mine if row[key] is not None]
        found[key] = statistics.median(values) if values else None
    return found


def bench_pictures(
    work: PicturesWork, loading: Callable[[], AbstractContextManager[Callable[..., None] | None]] = nullcontext
) -> Record:
    """Write the files, load them, and print a table. Returns the record. loading: shows progress while it is open."""
    hardware = Hardware.measured(work.config)
    write_once(work)
    config = replace(work.config, gguf_path=work.folder / TEXT_NAME)
    with ExitStack() as stack, loading() as progress:
        llm = stack.enter_context(closing(LLM.from_loop(*load_batches(LLMOptions(config, max_batch_size=1), progress))))
        ours = OurProgram(llm)
        programs: list[Program] = [ours]
        if work.has_peer and not is_missing(PEER, "llama_cpp", "llama-cpp-python"):
            programs.append(stack.enter_context(closing(_peer(llm.engine, work.folder))))
        settings = _settings(llm.engine, work)
        print("; ".join(f"{name} {value}" for name, value in settings.items()))
        table = FigureTable(_COLUMNS)
        for number, path in enumerate(_drawn(work)):
            for program in programs:
                table.add(_row(program, number, path))
        rows = list(table.rows)
        medians = {program.name: _medians(rows, program.name) for program in programs}
        flop = text_flop(work.text, ours.prompt_len), work.tower.flop(work.size**2, work.text.hidden)
        nbytes = expert_nbytes(llm.engine.plan)
        bounds = PictureBounds.of(hardware, nbytes, *flop, on_gpu=settings["tower on"] != "cpu")
    for row in medians.values():
        table.add(row)
    table.add({"program": "at least", **bounds.milliseconds})
    return {
        "machine": hardware.machine,
        "settings": {**settings, "prompt_len": ours.prompt_len},
        "medians": medians,
        "bounds": asdict(bounds) | bounds.milliseconds,
        "rows": rows,
    }


def _settings(engine: Engine, work: PicturesWork) -> Record:
    layers = cpu_expert_layers(engine.plan)
    return {
        "layers": work.text.layers,
        "tower blocks": work.tower.blocks,
        "tower on": _tower_place(engine.plan),
        "layers with experts in RAM": work.text.layers if layers is None else len(layers),
        "gpu_memory": work.config.gpu_memory,
        "chunk_size": engine.config.chunk_size,
    }


def write_once(work: PicturesWork) -> None:
    """Write the files unless a former run of these shapes did."""
    made, wanted = work.folder / "shape", repr((work.text, work.tower))
    if made.is_file() and made.read_text() == wanted:
        return
    began = time.perf_counter()
    made.unlink(missing_ok=True)
    write_model(work.folder, work.text, work.tower)
    made.write_text(wanted)
    nbytes = sum((work.folder / name).stat().st_size for name in (TEXT_NAME, TOWER_NAME))
    print(f"{nbytes / 1e9:.1f} GB of random weights written in {time.perf_counter() - began:.1f} s", flush=True)


def _drawn(work: PicturesWork) -> Iterator[Path]:
    for number in range(WARM_UPS + work.pictures):
        path = work.folder / f"{number}.png"
        draw_screenshot(path, number, work.size)
        yield path


def _pictures(args: argparse.Namespace) -> int:
    set_up_logging(args.log_level)
    check_range("layers", args.layers, 4, 48)  # llama.cpp wants more than there are features of deepstack
    check_range("tower_blocks", args.tower_blocks, 3, 27)
    check_range("pictures", args.pictures, 1, 1000)
    config = engine_config(args)
    config = replace(config, cache_lens=config.cache_lens or CONTEXT)
    if config.model_path is not None or config.gguf_path is not None:
        raise ConfigError("this writes its own model: leave the path out")
    tower = TowerShape(blocks=args.tower_blocks)
    if tower.blocks <= tower.deepstack[-1]:
        tower = replace(tower, deepstack=(0, 1, 2))
    with ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ktransformers-")))
        folder.mkdir(parents=True, exist_ok=True)
        shape = FileShape(args.layers)
        work = PicturesWork(config, shape, tower, args.pictures, folder, has_peer=args.peer is not None)
        measure = partial(bench_pictures, work, partial(loading_bar, sys.stderr))
        return print_record("pictures", args.json, measure)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's). Returns the exit code."""
    parser, group = benchmark_parser("gpu.pictures", (__doc__ or "").partition("\n")[0], _pictures)
    text = "measure it too, on the same files and places (needs llama-cpp-python, built for the GPU where there is one)"
    group.add_argument("--peer", choices=(PEER,), help=text)
    group.add_argument("--layers", type=int, default=48, help="of the language model (%(default)s)")
    group.add_argument("--tower_blocks", type=int, default=27, help="of the tower (%(default)s)")
    group.add_argument("--pictures", type=int, default=5, help="that count (%(default)s)")
    group.add_argument("--folder", type=Path, help="where the files stay for another run; default: they are deleted")
    add_model_flags(parser)
    add_logging_flag(group)
    return run_command(parser, sys.argv[1:] if argv is None else list(argv))


if __name__ == "__main__":
    sys.exit(main())
