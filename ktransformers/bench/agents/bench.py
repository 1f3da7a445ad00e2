"""`ktransformers bench agents`: the same waves on one server after another, a table for each, one record of all.

Servers are running already, or started here: ours, and llama.cpp's beside it. Prompts are the same for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial

from ktransformers.bench.agents.host import describe_host
from ktransformers.bench.agents.llama_server import LlamaServer, LlamaServerWork, llama_server_flags
from ktransformers.bench.agents.load import GroupTurn, Load, model_name
from ktransformers.bench.agents.report import COLUMNS, row_of, shown_host, shown_row
from ktransformers.bench.agents.shapes import Prompts, Wave
from ktransformers.bench.common.report import FigureTable, Record, Row
from ktransformers.bench.servers.client import Client, RequestError
from ktransformers.bench.servers.process import ServerProcess
from ktransformers.config import EngineConfig
from ktransformers.errors import EngineError
from ktransformers.weights.gguf.file import open_gguf

__all__ = [
    "OURS",
    "PEER",
    "AgentsWork",
    "Target",
    "bench_agents",
    "llama_target",
    "own_target",
    "running_target",
    "vocab_size",
]

OURS, PEER = "ktransformers", "llama.cpp"
_SHOWN_ERRORS = 3


@dataclass(frozen=True, slots=True)
class Target:
    """A server that `bench agents` measures, called `name` in the figures.

    start: a client of it; leaving the context ends what was started. started_with: flags of what is started.
    """

    name: str
    start: Callable[[], AbstractContextManager[Client]]
    started_with: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class AgentsWork:
    """The work: `waves` for each of `targets`, whose prompts follow from the other fields, see shapes.Prompts.

    model: the name in requests; None: the first that a server names. scale: what lengths were multiplied with.
    """

    targets: Sequence[Target]
    waves: Sequence[Wave]
    seed: int
    vocab: int
    is_text: bool = False
    model: str | None = None
    scale: float = 1.0


def running_target(name: str, client: Client) -> Target:
    """Return the target for a server that is running, which `client` asks."""
    return Target(name, lambda: nullcontext(client))


def own_target(flags: Sequence[str]) -> Target:
    """Return the target that starts `ktransformers serve` with `flags`."""
    return Target(OURS, partial(_own_server, flags), flags)


def llama_target(work: LlamaServerWork) -> Target:
    """Return the target that starts llama.cpp's llama-server."""
    return Target(PEER, partial(_llama_server, work), llama_server_flags(work))


@contextmanager
def _own_server(flags: Sequence[str]) -> Iterator[Client]:
    server = ServerProcess(flags)
    try:
        yield server.client
    finally:
        server.close()


@contextmanager
def _llama_server(work: LlamaServerWork) -> Iterator[Client]:
    server = LlamaServer(work)
    try:
        yield server.client
    finally:
        server.close()


def bench_agents(work: AgentsWork) -> Record:
    """Send the waves to each server; print a table per server, a line per turn.

    The record's is_failed: a request failed, or a server did not run.
    Raises RequestError when the first server cannot be asked for its model, and EngineError when it does not start. If
    that happens to a later one, its entry in `servers` has the error, and the figures of those before are kept.
    """
    machine = describe_host()
    print(shown_host(machine))
    prompts = Prompts(work.seed, work.vocab, work.is_text)
    rows: list[Row] = []
    servers: list[Row] = []
    for target in work.targets:
        entry: Row = {"name": target.name, "flags": list(target.started_with), "model": work.model, "error": None}
        print("", " ".join([target.name, *target.started_with]), sep="\n", flush=True)
        try:
            with target.start() as client:
                entry["model"] = work.model or model_name(client)
                rows += _run(target.name, Load(client, entry["model"], prompts), work.waves)
        except (EngineError, RequestError) as error:
            if not servers:
                raise
            entry["error"] = str(error)
            print(f"failed: {error}")
        servers.append(entry)
    errors = sum(row["errors"] for row in rows)
    return {
        "machine": machine,
        "servers": servers,
        "seed": work.seed,
        "vocab": None if work.is_text else work.vocab,
        "prompts": "text" if work.is_text else "ids",
        "scale": work.scale,
        "waves": [asdict(wave) for wave in work.waves],
        "rows": rows,
        "errors": errors,
        "is_failed": errors > 0 or any(entry["error"] for entry in servers),
    }


def _run(server: str, load: Load, waves: Sequence[Wave]) -> list[Row]:
    table = FigureTable(COLUMNS)
    for wave in waves:
        for turn in load.run(wave):
            row = row_of(server, wave, turn)
            table.add(row, **shown_row(row))
            _show_errors(turn)
    return table.rows


def _show_errors(turn: GroupTurn) -> None:
    """A line for each of the first different errors."""
    texts = dict.fromkeys(answer.error for answer in turn.answers if answer.error)
    for text in list(texts)[:_SHOWN_ERRORS]:
        print(f"failed: {text}")
    if len(texts) > _SHOWN_ERRORS:
        print(f"and {len(texts) - _SHOWN_ERRORS} other errors")


def vocab_size(config: EngineConfig) -> int | None:
    """Return how many token ids a model knows, by its GGUF file or its config.json; None where neither says it."""
    folders = [path for path in (config.model_path, config.gguf_path) if path is not None and path.is_dir()]
    file = config.gguf_path
    if file is not None and file.is_dir():
        file = min(file.glob("*.gguf"), default=None)  # the embedding is in the first of several parts
    if file is not None:
        embedding = open_gguf(file).info("token_embd.weight")
        return None if embedding is None else int(embedding.shape[0])
    for path in (folder / "config.json" for folder in folders):
        if path.is_file():
            facts = json.loads(path.read_text(encoding="utf-8"))
            size = facts.get("vocab_size") or (facts.get("text_config") or {}).get("vocab_size")
            return None if size is None else int(size)
    return None
