"""A profile's folder as tables: columns are numpy arrays, read from the files when they are asked for.

    profile = load("profile-1")
    profile.tokens["ms"]                                 # float64 [tokens]
    profile.steps.read("ms", "parts_us")                 # both in one pass over the files
    for batch in profile.tokens.batches("experts"):      # for more than fits into memory
        ...

The columns of each table are listed in docs/profiling.md. Only what was asked for is ever held.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from ktransformers.errors import ConfigError
from ktransformers.profiling.lines import integers, lines_of, parts_of_file
from ktransformers.profiling.meta import Meta, read_meta
from ktransformers.profiling.records import PARTS

__all__ = ["ColumnSpec", "Profile", "Table", "load"]

Array: TypeAlias = npt.NDArray[Any]
Convert: TypeAlias = Callable[[list[Any]], Array]


@dataclass(frozen=True)
class ColumnSpec:
    """The way a column is made of lines. type and default: of the field in the files, as msgspec decodes it."""

    field: str
    type: Any
    convert: Convert
    default: Any = msgspec.NODEFAULT


class Table:
    """A table of one kind of line. A column is [rows], or [rows, ...] where each row has several numbers."""

    def __init__(self, files: Sequence[Path], columns: Mapping[str, ColumnSpec]):
        self._files = tuple(files)
        self._columns = dict(columns)
        self._kept: dict[str, Array] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(self._columns)

    def __len__(self) -> int:
        return len(self[next(iter(self._columns))])

    def __getitem__(self, name: str) -> Array:
        """Return one column. It is read once; those with one number per row are kept."""
        return self.read(name)[name]

    def read(self, *names: str) -> dict[str, Array]:
        """Read several columns in one pass; without names, all. Raises KeyError for an unknown name."""
        wanted = names or self.names
        missing = [name for name in dict.fromkeys(wanted) if name not in self._kept]
        found: dict[str, list[Array]] = {name: [] for name in missing}
        if missing:
            for batch in self.batches(*missing):
                for name, values in batch.items():
                    found[name].append(values)
        columns = {name: self._joined(name, found[name]) for name in missing}
        self._kept.update({name: column for name, column in columns.items() if column.ndim == 1})
        return {name: columns[name] if name in columns else self._kept[name] for name in wanted}

    def _joined(self, name: str, batches: list[Array]) -> Array:
        return np.concatenate(batches) if batches else self._convert(name, [])

    def _convert(self, name: str, values: list[Any]) -> Array:
        return self._columns[name].convert(values)

    def batches(self, *names: str, since_step: int | None = None) -> Iterator[dict[str, Array]]:
        """Yield columns of some thousand rows at a time, in order. since_step: leaves out the rows of earlier steps."""
        unknown = [name for name in names if name not in self._columns]
        if unknown:
            raise KeyError(f"no column {unknown[0]!r}; there are {', '.join(self._columns)}")
        columns = [self._columns[name] for name in names]
        fields = {column.field: (column.field, column.type, column.default) for column in columns}
        if since_step is not None:
            fields["step"] = ("step", int, msgspec.NODEFAULT)
        for lines in lines_of(self._files, list(fields.values())):
            if since_step is not None:
                lines = [line for line in lines if line.step >= since_step]
            yield {
                name: self._convert(name, [getattr(line, column.field) for line in lines])
                for name, column in zip(names, columns, strict=True)
            }

    def to_pandas(self, *names: str) -> Any:
        """Return columns as a pandas.DataFrame. Columns with several numbers per row become columns of arrays."""
        pandas = _optional("pandas")
        columns = self.read(*names)
        return pandas.DataFrame(
            {name: values if values.ndim == 1 else list(values) for name, values in columns.items()}
        )

    def to_arrow(self, *names: str) -> Any:
        """Return columns as a pyarrow.Table. Columns with several numbers per row become columns of lists."""
        pyarrow = _optional("pyarrow")
        columns = self.read(*names)
        return pyarrow.table(
            {name: values if values.ndim == 1 else values.tolist() for name, values in columns.items()}
        )


class ExpertTable(Table):
    """A table with rows (step, layer, expert, rows): the tokens of a step by expert. Zeros have no row."""

    def __init__(self, files: Sequence[Path]):
        texts = ColumnSpec("experts", msgspec.Raw, _as_objects, msgspec.Raw(b"[]"))
        super().__init__(files, dict.fromkeys(("step", "layer", "expert", "rows"), texts))

    def batches(self, *names: str, since_step: int | None = None) -> Iterator[dict[str, Array]]:
        """Yield columns of some thousand rows at a time, in order. since_step: leaves out the rows of earlier steps."""
        fields = [("step", int, msgspec.NODEFAULT), ("experts", msgspec.Raw, msgspec.Raw(b"[]"))]
        for lines in lines_of(self._files, fields):
            if since_step is not None:
                lines = [line for line in lines if line.step >= since_step]
            found = integers([bytes(line.experts) for line in lines])
            is_layer, is_key = found.before == ord("["), found.before == ord('"')
            layer = found.values[is_layer][np.cumsum(is_layer)[is_key] - 1]
            steps = np.array([line.step for line in lines], np.int64)
            columns = {
                "step": steps[found.text[is_key]],
                "layer": layer.astype(np.int16),
                "expert": found.values[is_key].astype(np.int32),
                "rows": found.values[found.before == ord(":")],
            }
            yield {name: columns[name] for name in names}

    def _convert(self, name: str, values: list[Any]) -> Array:
        return np.array(values, {"layer": np.int16, "expert": np.int32}.get(name, np.int64))


def _optional(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(f"this needs {name}, which is not installed: pip install {name}") from None


# How values become arrays


def _as_ints(values: list[Any]) -> Array:
    return np.array(values, np.int64)


def _as_floats(values: list[Any]) -> Array:
    """null is NaN."""
    return np.array(values, np.float64)


def _as_objects(values: list[Any]) -> Array:
    array = np.empty(len(values), object)
    kept: dict[Any, Any] = {}  # equal strings once: an id stands in each of its tokens
    array[:] = [kept.setdefault(value, value) if isinstance(value, str) else value for value in values]
    return array


def _by_part(values: list[dict[str, float] | None]) -> Array:
    """float64 [rows, parts], in the order of PARTS. Absent parts are 0, a row that is null is NaN."""
    nothing = dict.fromkeys(PARTS, np.nan)
    rows = [[row.get(part, 0.0) for part in PARTS] for row in (nothing if row is None else row for row in values)]
    return np.array(rows, np.float64).reshape(-1, len(PARTS))


def _by_layer(num_layers: int) -> Convert:
    """float32 [rows, layers]."""

    def convert(values: list[list[float] | None]) -> Array:
        array = np.zeros((len(values), num_layers), np.float32)
        for row, found in enumerate(values):
            if found:
                array[row, : len(found)] = found[:num_layers]
        return array

    return convert


def _by_part_and_layer(num_layers: int) -> Convert:
    """float32 [rows, parts, layers]."""

    def convert(values: list[dict[str, list[float]]]) -> Array:
        array = np.zeros((len(values), len(PARTS), num_layers), np.float32)
        for row, by_part in enumerate(values):
            for index, part in enumerate(PARTS):
                found = by_part.get(part)
                if found:
                    array[row, index, : len(found)] = found[:num_layers]
        return array

    return convert


def _key_of(name: str) -> Convert:
    """One number of a small object, NaN where it is not there."""

    def convert(values: list[dict[str, float | None] | None]) -> Array:
        return np.array([(value or {}).get(name) for value in values], np.float64)

    return convert


def _expert_ids(num_layers: int, top_k: int, num_experts: int) -> Convert:
    """int16 [rows, layers, top_k]; -1: a dense layer, a skipped expert, or a token whose experts were not captured."""

    def convert(values: list[msgspec.Raw]) -> Array:
        ids = np.full((len(values), num_layers, top_k), -1, np.int16)
        texts = [bytes(value) for value in values]
        captured = [row for row, text in enumerate(texts) if text != b"null"]
        if not captured:
            return ids
        first = msgspec.json.decode(texts[captured[0]], type=list[list[int] | None])
        layers = [layer for layer, chosen in enumerate(first) if chosen is not None]
        found = integers([texts[row] for row in captured]).values
        if found.size != len(captured) * len(layers) * top_k or len(first) > num_layers:
            raise ConfigError(
                f"the experts of tokens do not have the shape that meta.json names: {num_layers} layers, {top_k} "
                "experts per token"
            )
        if found.size and not (found.min() >= -1 and found.max() < num_experts):
            raise ConfigError(f"a token names an expert outside of the {num_experts} that meta.json names")
        ids[np.ix_(captured, layers)] = found.reshape(len(captured), len(layers), top_k)
        return ids

    return convert


def _step_columns(meta: Meta) -> dict[str, ColumnSpec]:
    ints = {name: ColumnSpec(name, int, _as_ints, 0) for name in ("epoch", "rows", "prefill_rows", "sampled", "seqs")}
    cpu = {
        f"cpu_{name}": ColumnSpec("cpu", dict[str, float | None] | None, _key_of(name), None)
        for name in ("busy_us", "idle_us", "wait_us", "num_threads")
    }
    stored = {
        f"{of}_{name}": ColumnSpec(of, dict[str, float] | None, _key_of(name), None)
        for of in ("stored", "stored_rows")
        for name in ("hits", "misses", "bytes", "wait_us")
    }
    return {
        "step": ColumnSpec("step", int, _as_ints),
        "t": ColumnSpec("t", float, _as_floats),
        "ms": ColumnSpec("ms", float, _as_floats),
        **ints,
        "waiting": ColumnSpec("waiting", float | None, _as_floats, None),
        **cpu,
        **stored,
        "failed": ColumnSpec("failed", bool, _as_ints, default=False),
        "parts_us": ColumnSpec("parts_us", dict[str, float], _by_part, {}),
        "bytes": ColumnSpec("bytes", dict[str, float], _by_part, {}),
        "gpu_us": ColumnSpec("gpu_us", dict[str, float] | None, _by_part, None),
        "layers_us": ColumnSpec("layers_us", dict[str, list[float]], _by_part_and_layer(meta.model.num_layers), {}),
    }


def _token_columns(meta: Meta) -> dict[str, ColumnSpec]:
    model = meta.model
    ids = _expert_ids(model.num_layers, max(model.top_k, 1), model.num_experts)
    return {
        "request": ColumnSpec("request", str, _as_objects),
        **{name: ColumnSpec(name, int, _as_ints) for name in ("index", "position", "token", "step")},
        **{name: ColumnSpec(name, float | None, _as_floats, None) for name in ("t", "ms", "step_ms")},
        "suspended_ms": ColumnSpec("suspended_ms", float, _as_floats, 0.0),
        "batch": ColumnSpec("batch", int | None, _as_floats, None),
        "layers_us": ColumnSpec("layers_us", list[float] | None, _by_layer(model.num_layers), None),
        "experts": ColumnSpec("experts", msgspec.Raw, ids, msgspec.Raw(b"null")),
        "experts_why": ColumnSpec("experts_why", str | None, _as_objects, None),
    }


def _request_columns() -> dict[str, ColumnSpec]:
    times = ("arrived", "admitted", "first_token", "ended")
    return {
        "request": ColumnSpec("request", str, _as_objects),
        **{name: ColumnSpec(name, float | None, _as_floats, None) for name in times},
        **{name: ColumnSpec(name, int, _as_ints, 0) for name in ("prompt_len", "cached_len", "completion_len")},
        "finish_reason": ColumnSpec("finish_reason", str | None, _as_objects, None),
        "preemptions": ColumnSpec("preemptions", int, _as_ints, 0),
        **{name: ColumnSpec(name, int, _as_ints, 0) for name in ("num_drafted", "num_accepted")},
        "suspended": ColumnSpec("suspended", list[tuple[float, float | None]], _as_objects, []),
    }


@dataclass(frozen=True)
class Profile:
    """The tables of one recorded run. Nothing but meta.json is read before a column is asked for."""

    folder: Path
    meta: Meta
    steps: Table
    tokens: Table
    requests: Table
    experts: Table


def load(folder: str | Path) -> Profile:
    """Open the profile in a folder that --profile was given. A profile that is still being written can be read.

    Raises ConfigError when there is none, or when a later version of this program wrote it.
    """
    folder = Path(folder)
    meta = read_meta(folder)
    steps = parts_of_file(folder, "steps")
    return Profile(
        folder=folder,
        meta=meta,
        steps=Table(steps, _step_columns(meta)),
        tokens=Table(parts_of_file(folder, "tokens"), _token_columns(meta)),
        requests=Table(parts_of_file(folder, "requests"), _request_columns()),
        experts=ExpertTable(steps),
    )
