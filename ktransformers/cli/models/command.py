"""`ktransformers list` and `ktransformers rm`: show and delete models in the hub's cache that can run here.

Neither needs the network, nor torch.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from ktransformers.core import format_bytes
from ktransformers.errors import ConfigError
from ktransformers.hub.cache import (
    CachedModel,
    cache_folder,
    cached_models,
    cached_repos,
    incomplete_bytes,
    is_causal,
    remove,
    repo_folder,
)
from ktransformers.hub.names import parse_name
from ktransformers.hub.variants import select

__all__ = ["add_parser", "list_command", "remove_command"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `list` and `rm` among the subcommands.

    `run` is set to the function that takes the arguments and returns an exit code.
    """
    parser = subparsers.add_parser(
        "list",
        aliases=["ls"],
        help="show the models that were downloaded",
        description="Show the models in the hub's cache (HF_HOME) that can run here, by the names to call them.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=list_command)
    parser = subparsers.add_parser(
        "rm",
        help="delete a downloaded model",
        description="Delete a repository from the hub's cache, or one quantization of it (org/name:Q4_K_M).",
    )
    parser.add_argument("models", metavar="MODEL", nargs="+", help="a name as `ktransformers list` shows it")
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask")
    parser.set_defaults(run=remove_command)


@contextmanager
def _cache_errors() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(f"{error.filename or cache_folder()}: {error.strerror or error}") from error


@_cache_errors()
def list_command(args: argparse.Namespace) -> int:
    """Print a table of the models in the hub's cache, or JSON. An empty cache is no error."""
    models = [m for repo in cached_repos() for m in cached_models(repo) if m.variant.is_gguf or is_causal(m)]
    if args.json:
        print(json.dumps([_document(model) for model in models], indent=2))
        return 0
    if models:
        rows = [("NAME", "SIZE", "MODIFIED", "FORMAT"), *map(_row, models)]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        for name, size, modified, form in rows:
            print(f"{name:{widths[0]}}  {size:>{widths[1]}}  {modified:{widths[2]}}  {form}")
    else:
        print(f"no models in {cache_folder()}; get one with: ktransformers pull org/name", file=sys.stderr)
    for repo in cached_repos():
        if nbytes := incomplete_bytes(repo):
            print(
                f"{repo}: a download of which {format_bytes(nbytes)} came; pull it again to go on, or rm it",
                file=sys.stderr,
            )
    return 0


def _format(model: CachedModel) -> str:
    return ("GGUF" if model.variant.is_gguf else "safetensors") + (", incomplete" if model.missing else "")


def _row(model: CachedModel) -> tuple[str, str, str, str]:
    modified = datetime.fromtimestamp(model.modified).strftime("%Y-%m-%d %H:%M")
    return model.name, format_bytes(model.nbytes), modified, _format(model)


def _document(model: CachedModel) -> dict[str, object]:
    return {
        "name": model.name,
        "repo_id": model.repo_id,
        "variant": model.variant.label,
        "format": "gguf" if model.variant.is_gguf else "safetensors",
        "bytes": model.nbytes,
        "modified": datetime.fromtimestamp(model.modified, UTC).isoformat(timespec="seconds"),
        "path": str(model.path),
        "is_complete": not model.missing,
    }


@_cache_errors()
def remove_command(args: argparse.Namespace) -> int:
    """Delete models of the hub's cache, each after a question. Returns 1 when one of them was declined.

    Raises ConfigError before anything is deleted.
    """
    found = [_find(text) for text in args.models]
    is_done = True
    for text, (repo_id, model) in zip(args.models, found, strict=True):
        nbytes = remove(repo_id, model, dry_run=True)
        if not args.yes and not _confirmed(f"{text} ({format_bytes(nbytes)})"):
            print(f"{text}: kept", file=sys.stderr)
            is_done = False
            continue
        print(f"{text}: {format_bytes(remove(repo_id, model))} freed")
    return 0 if is_done else 1


def _confirmed(what: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(f"there is no terminal to ask on whether to delete {what}; pass --yes")
    print(f"delete {what}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _find(text: str) -> tuple[str, CachedModel | None]:
    """The repository, and the model of it when `text` names one. Raises ConfigError with the nearest name."""
    try:
        name = parse_name(text)
    except ConfigError as error:
        raise ConfigError(f"{error}{_nearest(text)}") from None
    if not repo_folder(name.repo_id).is_dir():
        raise ConfigError(f"{name.repo_id} is not in the cache{_nearest(text)}")
    models = cached_models(name.repo_id, name.revision)
    chosen = select([model.variant for model in models], name)
    return name.repo_id, next((model for model in models if model.variant is chosen), None)


def _nearest(text: str) -> str:
    names = [model.name for repo in cached_repos() for model in cached_models(repo)]
    by_folded = {name.lower(): name for name in [*cached_repos(), *names]}
    near = difflib.get_close_matches(text.lower(), by_folded, n=1)
    return f"; did you mean {by_folded[near[0]]}?" if near else "; see: ktransformers list"
