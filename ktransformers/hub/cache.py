"""The hub's cache on this disk, which other programs share: what is in it, and deleting from it.

Layout, as huggingface_hub's guide "Manage cache" describes it:

    HF_HUB_CACHE/models--org--name/blobs/<etag>                       the bytes; <etag>.incomplete while they come
                                  /snapshots/<commit>/<path>          symbolic links to blobs
                                  /refs/<branch or tag>               the commit that it was last seen at

Needs no network. Looks into one repository's folder at a time and opens no model file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ktransformers.errors import ConfigError
from ktransformers.hub.variants import SAFETENSORS, Variant, find_variants
from ktransformers.weights.stored_experts.places import place_beside

__all__ = [
    "CachedModel",
    "cache_folder",
    "cached_models",
    "cached_repos",
    "incomplete_bytes",
    "is_causal",
    "remove",
    "repo_folder",
]

_PREFIX = "models--"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the hub's cache. snapshot: the folder that its paths are relative to.

    missing: files that are not there.
    num_siblings: how many models of its repository are in the cache, itself included.
    """

    repo_id: str
    variant: Variant
    snapshot: Path
    missing: tuple[str, ...]
    num_siblings: int

    @property
    def name(self) -> str:
        """The name that a user types for the model: the repository's, and a label unless it is clear without."""
        has_short_name = not self.variant.is_gguf and self.num_siblings == 1
        return self.repo_id if has_short_name else f"{self.repo_id}:{self.variant.label}"

    @property
    def path(self) -> Path:
        """The path of the first GGUF file, or of the folder with config.json.

        Links are kept: shards know each other by name.
        """
        return self.snapshot / self.variant.weights[0] if self.variant.is_gguf else self.snapshot

    @property
    def paths(self) -> list[Path]:
        return [self.snapshot / file for file in self.variant.files]

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    @property
    def modified(self) -> float:
        """The time when the model's last file came, in seconds since the epoch."""
        return max(path.stat().st_mtime for path in self.paths)


def cache_folder() -> Path:
    """Return the hub's cache: HF_HUB_CACHE, else "hub" in HF_HOME, else ~/.cache/huggingface/hub. It need not exist."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def repo_folder(repo_id: str) -> Path:
    """Return the cache's folder for a repository. It need not exist."""
    return cache_folder() / (_PREFIX + repo_id.replace("/", "--"))


def cached_repos() -> list[str]:
    """Return the names of repositories that have a folder in the cache, sorted."""
    folder = cache_folder()
    names = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return sorted(name[len(_PREFIX) :].replace("--", "/", 1) for name in names if name.startswith(_PREFIX))


def cached_models(repo_id: str, revision: str | None = None) -> list[CachedModel]:
    """Return the models of one repository in the cache, GGUF files by label.

    Incomplete ones are among them, see `missing`.
    revision: a branch, a tag or a commit; None takes each model from the main branch's commit, else from the newest
    snapshot that has it whole.
    """
    found: dict[str, tuple[Variant, Path, tuple[str, ...]]] = {}
    for snapshot in _snapshots(repo_folder(repo_id), revision):
        files = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]
        for variant in find_variants(files):
            missing = variant.missing if variant.is_gguf else _missing_from_index(snapshot)
            if variant.label not in found or (found[variant.label][2] and not missing):
                found[variant.label] = (variant, snapshot, missing)
    return [
        CachedModel(repo_id, *found[label], len(found)) for label in sorted(found, key=lambda x: (x == SAFETENSORS, x))
    ]


def _snapshots(folder: Path, revision: str | None) -> Iterator[Path]:
    """Folders of commits, the wanted one first."""
    snapshots = folder / "snapshots"
    if not snapshots.is_dir():
        return
    ref = folder / "refs" / (revision or "main")
    commit = ref.read_text().strip() if ref.is_file() else revision
    by_age = sorted((path for path in snapshots.iterdir() if path.is_dir()), key=lambda path: -path.stat().st_mtime)
    yield from (path for path in by_age if commit and path.name.startswith(commit))
    if revision is None:
        yield from (path for path in by_age if not (commit and path.name.startswith(commit)))


def _missing_from_index(snapshot: Path) -> tuple[str, ...]:
    """Safetensors files that the index names and that are not there."""
    index = snapshot / _INDEX
    if not index.is_file():
        return ()
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{index}: cannot be read ({error}); remove the model and pull it again") from error
    return tuple(name for name in names if not (snapshot / name).is_file())


def is_causal(model: CachedModel) -> bool:
    """Whether the config.json of a safetensors model names a class that generates text."""
    try:
        config = json.loads((model.snapshot / "config.json").read_text(encoding="utf-8"))
        names = [str(name) for name in config.get("architectures") or ()]
    except (OSError, ValueError, AttributeError, TypeError):
        return False  # another program's file, which need not interest us
    return any(name.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")) for name in names)


def incomplete_bytes(repo_id: str) -> int:
    """Return the bytes of downloads of this repository that were stopped."""
    return sum(path.stat().st_size for path in (repo_folder(repo_id) / "blobs").glob("*.incomplete"))


def remove(repo_id: str, model: CachedModel | None = None, *, dry_run: bool = False) -> int:
    """Delete a repository, or one model of it: its links, and bytes that nothing else links to. Returns bytes freed.

    dry_run: only count. Files that other models of the repository need stay.
    """
    from huggingface_hub import scan_cache_dir

    info = scan_cache_dir(cache_folder())
    repo = next((repo for repo in info.repos if repo.repo_id == repo_id and repo.repo_type == "model"), None)
    if repo is None:  # downloads that never finished: no file has its name yet
        freed = incomplete_bytes(repo_id)
        if not dry_run:
            shutil.rmtree(repo_folder(repo_id))
        return freed
    files = [
        (file, file.file_path.relative_to(revision.snapshot_path).as_posix())
        for revision in repo.revisions
        for file in revision.files
    ]
    others = (one for one in find_variants({path for _, path in files}) if model and one.label != model.variant.label)
    needed = {path for other in others for path in other.files}
    packed = place_beside([Path(model.variant.weights[0])]).as_posix() if model else ""  # of its experts
    chosen = [file for file, path in files if model is None or path in {*model.variant.files, packed} - needed]
    # Not by commit: a copy of a repository has the same ones, and would be deleted in its place.
    strategy = info.delete_files(*chosen)
    is_all = len(chosen) == len(files)
    freed = strategy.expected_freed_size + (incomplete_bytes(repo_id) if is_all else 0)
    if not dry_run:
        strategy.execute()
        if is_all:
            shutil.rmtree(repo_folder(repo_id))
    return freed
