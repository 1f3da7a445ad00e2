"""The plan for people (a table) and for programs (one JSON document). Decides nothing and reads no files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ktransformers.optimize.plan import Plan, PlanEntry, format_bytes

__all__ = ["ReportRow", "fold_entries", "print_plan", "to_json"]

PLAIN_WIDTH = 220  # columns when the output is not a terminal: rows must not be cut for `grep`

_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(slots=True)
class ReportRow:
    """Row of the plan's table: entries that go to the same place in the same way, whatever their types and bytes.

    layers is empty for a module on its own. types: how many entries have which quant_types.
    """

    entry: PlanEntry
    layers: list[int]
    nbytes: list[int]
    types: Counter[tuple[str, ...]]

    @classmethod
    def of(cls, entry: PlanEntry, layer: int | None = None) -> ReportRow:
        """Return a row of one entry."""
        return cls(entry, [] if layer is None else [layer], [entry.total_bytes], Counter([entry.quant_types]))

    def add(self, entry: PlanEntry, layer: int) -> None:
        """Count one more layer with such an operator."""
        self.layers.append(layer)
        self.nbytes.append(entry.total_bytes)
        self.types[entry.quant_types] += 1

    @property
    def count(self) -> int:
        return len(self.nbytes)

    @property
    def label(self) -> str:
        if not self.layers:
            return self.entry.key or "(root)"
        shown = str(self.layers[0]) if len(self.layers) == 1 else "{" + _ranges(self.layers) + "}"
        return _LAYER.sub(shown, self.entry.key, count=1)

    @property
    def shown_types(self) -> str:
        """Weight formats of the row: "Q4_K", or "Q4_K x 24, Q6_K x 24" where layers differ."""
        if len(self.types) == 1:
            return " ".join(self.entry.quant_types)
        return ", ".join(f"{' '.join(kinds) or 'none'} x {count}" for kinds, count in self.types.most_common())

    @property
    def shown_bytes(self) -> str:
        """Bytes of the row: "48 x 18.00 MiB", or the sum where layers differ."""
        if not any(self.nbytes):
            return ""
        if len(set(self.nbytes)) > 1:
            return f"{format_bytes(sum(self.nbytes))} in {self.count}"
        return ("" if self.count == 1 else f"{self.count} x ") + format_bytes(self.nbytes[0])


def fold_entries(entries: Iterable[PlanEntry]) -> list[ReportRow]:
    """Fold entries that differ in the first layer number of their names, types and bytes only into rows, in
    tree order.
    """
    rows: dict[tuple[object, ...], ReportRow] = {}
    for entry in entries:
        found = _LAYER.search(entry.key)
        if found is None:
            rows[(entry.key,)] = ReportRow.of(entry)
            continue
        group = (f"{entry.key[: found.start()]}*{entry.key[found.end() :]}", *_alike(entry))
        if group in rows:
            rows[group].add(entry, int(found.group()))
        else:
            rows[group] = ReportRow.of(entry, int(found.group()))
    return list(rows.values())


def _alike(entry: PlanEntry) -> tuple[object, ...]:
    return (
        entry.hf_class,
        entry.operator,
        entry.placement,
        entry.generate_op,
        entry.prefill_op,
        entry.rule,
        entry.rule_place,
        tuple(sorted(entry.nbytes)),
        entry.note,
    )


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    parts: list[str] = []
    start = end = numbers[0]
    for number in [*numbers[1:], None]:
        if number is not None and number == end + 1:
            end = number
            continue
        parts.append(str(start) if start == end else f"{start}-{end}")
        if number is not None:
            start = end = number
    return ",".join(parts)


def print_plan(plan: Plan, console: Console, *, modules: bool = False) -> None:
    """Write the table of modules and the totals per device. modules: each on its own line, containers too."""
    entries = plan.entries if modules else [entry for entry in plan.entries if _is_telling(entry)]
    rows = [ReportRow.of(entry) for entry in entries] if modules else fold_entries(entries)
    if not console.is_terminal:
        console.width = max(console.width, PLAIN_WIDTH)
    console.print(Text(f"{plan.model_type}, rules {plan.rule_file}"))
    console.print(_module_table(rows))
    console.print(_total_table(plan))


def _is_telling(entry: PlanEntry) -> bool:
    """Whether the folded table shows the module: kept containers and activations hold nothing and say nothing."""
    return not entry.is_kept or bool(entry.nbytes) or bool(entry.note)


def _module_table(rows: list[ReportRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for header in ("module", "operator", "device", "generate", "prefill", "type", "bytes", "rule", "note"):
        table.add_column(header, justify="right" if header in ("bytes", "rule") else "left", overflow="fold")
    for row in rows:
        entry = row.entry
        table.add_row(
            Text(row.label),
            entry.operator or f"({entry.hf_class})",
            _devices(entry),
            entry.generate_op,
            entry.prefill_op,
            row.shown_types,
            row.shown_bytes,
            entry.rule_place or ("" if entry.rule is None else str(entry.rule)),
            entry.note,
        )
    return table


def _devices(entry: PlanEntry) -> str:
    """The generate device, and the prefill device where it is another."""
    place = entry.placement
    if place.generate_device == place.prefill_device:
        return place.generate_device
    return f"{place.generate_device} / {place.prefill_device}"


def _total_table(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    extras = list(plan.extra_bytes)
    for header in ("device", "weights", *extras, "total", "free", ""):
        table.add_column(header, justify="left" if header in ("device", "") else "right")
    weights, total = plan.weight_bytes, plan.total_bytes
    for device in sorted(total):
        free = plan.capacity.get(device, 0)
        table.add_row(
            device,
            format_bytes(weights.get(device, 0)),
            *(format_bytes(plan.extra_bytes[what].get(device, 0)) for what in extras),
            format_bytes(total[device]),
            format_bytes(free),
            "fits" if total[device] <= free else "does not fit",
        )
    return table


def to_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON types. All sizes are in bytes; every module is listed, in tree order."""
    reason = plan.misfit()
    return {
        "model_type": plan.model_type,
        "rule_file": plan.rule_file,
        "entries": [_entry_json(entry) for entry in plan.entries],
        "weight_bytes": plan.weight_bytes,
        "extra_bytes": {what: dict(nbytes) for what, nbytes in plan.extra_bytes.items()},
        "total_bytes": plan.total_bytes,
        "capacity_bytes": dict(plan.capacity),
        "ram_bytes": plan.machine.ram_bytes,
        "unmatched_rules": [
            {"rule": u.rule, "line": u.line, "file": u.file, "message": u.message} for u in plan.unmatched
        ],
        "fits": reason is None,
        "reason": reason,
    }


def _entry_json(entry: PlanEntry) -> dict[str, Any]:
    return {
        "key": entry.key,
        "class": entry.hf_class,
        "operator": entry.operator,
        "generate_device": entry.placement.generate_device,
        "prefill_device": entry.placement.prefill_device,
        "out_device": entry.placement.out_device,
        "generate_op": entry.generate_op,
        "prefill_op": entry.prefill_op,
        "quant_types": list(entry.quant_types),
        "bytes": dict(entry.nbytes),
        "stored_experts": entry.stored_experts,
        "rule": entry.rule,
        "rule_place": entry.rule_place,
        "note": entry.note,
    }
