"""`ktransformers doctor`: what is right and wrong with this machine and this installation.

One line per finding, and the command that mends it. Exit code 1 when something does not work; warnings are 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ktransformers.cli.doctor.findings import Check, Finding, Level, examine, shown, warning
from ktransformers.cli.doctor.gpu import gpu_checks
from ktransformers.cli.doctor.machine import machine_checks
from ktransformers.cli.doctor.software import software_checks
from ktransformers.cli.doctor.speed import speed_findings
from ktransformers.cli.parsing.options import add_model_argument, model_files
from ktransformers.errors import ConfigError

if TYPE_CHECKING:
    from ktransformers.optimize.machine_speed import MachineSpeed, SpeedFile

__all__ = ["add_parser", "all_checks", "report", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `doctor` among the subcommands."""
    parser = subparsers.add_parser(
        "doctor",
        help="show what is right and wrong with this machine and this installation",
        description="Examine the installation, the machine and its GPUs: one line per finding, with the command that "
        "mends it. Exit code 1 when something does not work.",
    )
    add_model_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    parser.add_argument("--quick", action="store_true", help="measure nothing: show what was measured before")
    parser.add_argument("--measure", action="store_true", help="measure the machine again, whatever is remembered")
    parser.set_defaults(run=run)


def all_checks(*, is_quick: bool = False, model: Path | None = None) -> Iterator[Check]:
    """Yield all checks of doctor in the order of the report. GPUs are looked for when it is their turn.

    is_quick: nothing is measured. model: a model whose disk is measured.
    """
    yield from software_checks()
    yield from machine_checks(has_bandwidth=not is_quick, model=model)
    yield from gpu_checks()


def run(args: argparse.Namespace) -> int:
    """Print the report of doctor; return the exit code. Raises ConfigError for flags that contradict each other, and
    for a MODEL that there is not."""
    if args.quick and args.measure:
        raise ConfigError("--quick measures nothing and --measure measures everything: leave one of them out")
    findings: list[Finding] = []
    model_path, gguf_path = model_files(args)

    def add(finding: Finding) -> None:
        findings.append(finding)
        if not args.json:
            print(shown(finding), flush=True)

    for check in all_checks(is_quick=args.quick, model=gguf_path or model_path):
        for finding in examine(check):
            add(finding)
    speed = None

    def look() -> Iterator[Finding]:
        nonlocal speed
        from ktransformers.optimize.machine_speed import SpeedFile

        file = SpeedFile()
        speed = file.read() if args.quick else _measured(file, is_anew=args.measure)
        if speed is None:
            yield warning("measured", "nothing yet, so that plan predicts nothing", "ktransformers doctor --measure")
        else:
            yield from speed_findings(speed, file.path)

    for finding in examine(Check("measured", look)):
        add(finding)
    if args.json:
        print(json.dumps(report(findings, speed), indent=2))
    else:
        print(conclusion(findings))
    return 1 if has_problems(findings) else 0


def _measured(file: SpeedFile, *, is_anew: bool) -> MachineSpeed:
    """What is going on is shown on a terminal, on the line that the next finding takes."""
    from ktransformers.bench.probe.measuring import known_or_measured

    is_shown = sys.stderr.isatty()

    def say(what: str) -> None:
        if is_shown:
            print(f"\r\x1b[Kmeasuring {what} ...\r", end="", file=sys.stderr, flush=True)

    speed = known_or_measured(file, is_anew=is_anew, say=say)
    if is_shown:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return speed


def has_problems(findings: Sequence[Finding]) -> bool:
    return any(finding.level is Level.PROBLEM for finding in findings)


def conclusion(findings: Sequence[Finding]) -> str:
    """Return the last line of the report: how many problems and warnings there are."""
    counts = Counter(finding.level for finding in findings)
    parts = [
        f"{counts[level]} {level.value}{'s' if counts[level] > 1 else ''}"
        for level in (Level.PROBLEM, Level.WARNING)
        if counts[level]
    ]
    return ", ".join(parts) or "all is well"


def report(findings: Sequence[Finding], speed: MachineSpeed | None = None) -> dict[str, object]:
    """Return the findings and the measurement in JSON types: bytes, operations and seconds, see MachineSpeed."""
    rows = [{**asdict(finding), "level": finding.level.value} for finding in findings]
    measured = None if speed is None else asdict(speed)
    return {"is_well": not has_problems(findings), "findings": rows, "machine": measured}
