"""A plan on one screen of 80 columns: whether it fits, what would help, the model, its speed at best, what goes where.

Lines of text from a DryRun and bandwidths; decides and measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from ktransformers.engine.plan.dry_run import DryRun
from ktransformers.engine.plan.fit_suggestions import FitSuggestion, FitSuggestions, needed_bits, shortfall
from ktransformers.optimize.disk_prediction import SLOW, DiskPrediction
from ktransformers.optimize.expert_slots import EXPERT_SLOTS, on_gpus
from ktransformers.optimize.plan import Plan
from ktransformers.optimize.predict import Expected, Prediction
from ktransformers.optimize.summary import Summary, SummaryPart

__all__ = ["screen", "summary_json", "verdict"]

WIDTH = 80
_LABEL = 12
_LEAST_BITS = 2.0  # below it no published quantization is


def screen(
    preview: DryRun,
    bandwidth: Mapping[str, float],
    expected: Expected | None = None,
    disk: DiskPrediction | None = None,
) -> list[str]:
    """Return a plan as lines of at most 80 columns. bandwidth: bytes a second by device, as far as they are known.

    expected: what to say of the speed beside the bound. disk: likewise, where experts stay in files.
    """
    summary = preview.summary
    return [
        *_wrapped_verdict(preview),
        "",
        *_model_lines(summary),
        *(() if preview.threads is None else (_line("threads", preview.threads),)),
        *_speed_lines(summary, bandwidth),
        *(() if expected is None else _expected_lines(expected)),
        *_disk_lines(preview.plan, disk),
        "",
        *_part_lines(summary.parts),
    ]


def shown_size(nbytes: int) -> str:
    """Return a size with one decimal: GiB from a tenth of one on, else MiB."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 0.1 * 2**30 else f"{nbytes / 2**20:.1f} MiB"


def shown_devices(devices: Iterable[str]) -> str:
    """Shorten a list of devices: "cuda:0, cuda:1, cuda:2" -> "cuda:0-2"; the CPU's memory is RAM."""
    names = ["RAM" if name == "cpu" else name for name in devices]
    numbers = [int(name.partition(":")[2]) for name in names if name.startswith("cuda:")]
    if len(numbers) == len(names) > 1 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"cuda:{numbers[0]}-{numbers[-1]}"
    return ", ".join(names)


def verdict(preview: DryRun) -> str:
    """Return in one line whether the plan fits, and by how much."""
    plan, short = preview.plan, shortfall(preview.plan)
    total = plan.total_bytes
    if not short:
        used = [device for device in total if total[device] or device == "cpu"]
        groups = [group for group in (["cpu"], [device for device in used if device != "cpu"]) if group]
        how = "fits with experts on the disk: " if plan.stored_experts else "fits: "
        return how + ", ".join(_filled(plan, group, is_named=len(groups) > 1) for group in groups)
    parts = (
        f"{shown_size(total[device])} needed{_on(device)}, {shown_size(plan.capacity.get(device, 0))} free"
        for device in short
    )
    return "does not fit: " + "; ".join(parts)


def _on(device: str) -> str:
    return "" if device == "cpu" else f" on {device}"


def _filled(plan: Plan, devices: list[str], *, is_named: bool) -> str:
    total, free = (sum(part.get(device, 0) for device in devices) for part in (plan.total_bytes, plan.capacity))
    where = f" ({shown_devices(devices)})" if is_named else ""
    return f"{shown_size(total)} of {shown_size(free)} free{where}"


def _wrapped_verdict(preview: DryRun) -> list[str]:
    """The verdict, with the first suggestion where that fits into the line, and the others below."""
    lines, suggestions = [verdict(preview)], preview.fit_suggestions
    while len(lines[-1]) > WIDTH:  # many GPUs that are short
        head, _, rest = lines.pop().rpartition("; ")
        lines += [head, f"  {rest}"] if head else [rest[:WIDTH]]
        if not head:
            break
    if suggestions is None:
        return lines
    if not any(suggestion.is_enough for suggestion in suggestions.each) and not suggestions.are_enough:
        return [*lines, *_hopeless(preview, suggestions)]
    alone = [suggestion for suggestion in suggestions.each if suggestion.is_enough]
    shown = [_remedy(suggestion) for suggestion in alone or suggestions.each]
    if len(lines) == 1 and len(lines[0]) + len(shown[0]) + 2 <= WIDTH:
        lines[0] += f"; {shown.pop(0)}"
    if not alone:
        shown.append(f"together they save {shown_size(suggestions.saves)}: it fits then")
    return [*lines, *(f"  {text}" for text in shown)]


def _remedy(suggestion: FitSuggestion) -> str:
    if suggestion.flag == "--no_use_cuda":
        return "--no_use_cuda: it fits then, on the CPU alone"
    if suggestion.flag == "--gpu_memory 0":
        return f"{suggestion.flag} gives {shown_size(suggestion.saves)}" + (
            ": it fits then" if suggestion.is_enough else ""
        )
    return f"{suggestion.flag} saves {shown_size(suggestion.saves)}" + (
        ": it fits then" if suggestion.is_enough else ""
    )


def _hopeless(preview: DryRun, suggestions: FitSuggestions) -> list[str]:
    """What is missing when no flag is enough, nor all of them."""
    missing, summary = sum(shortfall(preview.plan).values()) - suggestions.saves, preview.summary
    flags = ", ".join(suggestion.flag for suggestion in suggestions.each)
    what = (
        f"{flags}: still {shown_size(missing)} missing"
        if flags
        else (f"no flag helps: {shown_size(missing)} of memory are missing")
    )
    bits = needed_bits(preview.plan, summary.resident)
    if not _LEAST_BITS <= bits < summary.bits_per_weight:
        return [f"  {what}"]
    now = summary.bits_per_weight
    return [f"  {what}", f"  a file of at most {bits:.1f} bits per weight would fit; this one has {now:.1f}"]


def _line(label: str, text: str) -> str:
    line = f"{label:<{_LABEL}} {text}"
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def _model_lines(summary: Summary) -> list[str]:
    size = summary.size
    routed = f", {size.top_k} of {size.experts} experts a token" if size.experts else ""
    family = f"{summary.family}, {size.layers} layers{routed}"
    is_long = len(summary.name) + len(family) + 3 > WIDTH - _LABEL - 1
    parameters = _count(size.parameters) + (f", {_count(size.active)} of them for each token" if size.experts else "")
    disk = "" if summary.disk_bytes is None else f"{shown_size(summary.disk_bytes)} on disk, "
    bits = f"{summary.bits_per_weight:.1f} bits per weight"
    context = "not said" if summary.context_len is None else f"{summary.context_len:,} tokens"
    model = (
        [_line("model", summary.name), _line("", family)] if is_long else [_line("model", f"{summary.name} ({family})")]
    )
    return [
        *model,
        _line("parameters", parameters),
        _line("weights", f"{disk}{shown_size(summary.memory_bytes)} in memory, {bits}"),
        _line(
            "context", f"{context}; the cache holds {summary.cache_tokens:,}, a step {summary.chunk_size:,} of a prompt"
        ),
    ]


def _count(number: int) -> str:
    for unit, size in (("billion", 10**9), ("million", 10**6)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:,}"


def _speed_lines(summary: Summary, bandwidth: Mapping[str, float]) -> list[str]:
    """What reading memory allows at best, with an empty cache and with a full one."""
    reads, full = summary.reads, min(summary.cache_tokens, summary.context_len or summary.cache_tokens)
    rates = [reads.tokens_per_s(bandwidth, context) for context in (0, full)]
    if rates[0] is None or rates[1] is None:
        missing = sorted(set(reads.bytes_per_token(full)) - set(bandwidth))
        return [_line("decode", f"not predicted: the bandwidth of {shown_devices(missing)} is not known")]
    head = f"at most {_rate(rates[0])} tokens/s, {_rate(rates[1])} with {full:,} tokens in the cache:"
    return [_line("decode", head), _line("", _sources(reads.bytes_per_token(), bandwidth))]


def _expected_lines(expected: Expected) -> list[str]:
    """Tokens a second, and what limits them."""
    if not expected.predictions:
        return [_line("predicted", f"nothing: {expected.reason}")]
    lines = []
    for label, one in zip(("predicted", ""), expected.predictions, strict=False):
        what = f"{one.tokens:,} tokens" if one.phase == "prefill" else f"{one.tokens} at once, {one.context:,} before"
        lines += [
            _line(label, f"{one.phase} {_rate(one.tokens_per_s)} tokens/s ({what})"),
            _line("", f"  time goes into {_limits(one)}"),
        ]
    return lines


def _disk_lines(plan: Plan, disk: DiskPrediction | None) -> list[str]:
    """What is read while the model runs, what RAM has of it, and how fast that makes it."""
    if not plan.stored_experts:
        return []
    slots = plan.extra_bytes[EXPERT_SLOTS]["cpu"]
    sizes = f"{shown_size(plan.stored_experts)} of experts, {shown_size(slots)} of them in RAM"
    if disk is None:
        return [
            _line("from disk", sizes),
            _line("", "  how fast that is depends on the disk, and there is no file to read"),
        ]
    most = "" if disk.is_measured else "at most "
    found, where, there = _range(disk.hits, "{:.0%}".format), "in RAM", list[str]()
    if on_gpus(plan):
        where, served = "there or in RAM", _range(disk.gpu_hits, "{:.0%}".format)
        there = [_line("", f"  {shown_size(on_gpus(plan))} on GPUs, with {served} of what a token uses")]
    lines = [
        _line("from disk", f"{sizes}; it reads {disk.disk_rate / 1e9:.2f} GB/s"),
        *there,
        _line("", f"  a token uses {_gigabytes(round(disk.token_bytes))} of them, {found} found {where}"),
        _line("", f"  decode {most}{_range(disk.decode)} tokens/s, prefill {most}{_range(disk.prefill)}"),
    ]
    if disk.is_slow:
        lines.append(_line("", f"  slower than {SLOW} tokens/s: it runs, but for use it needs more RAM, a"))
        lines.append(_line("", "  faster disk, or a file of fewer bits per weight"))
    return lines


def _range(pair: tuple[float, float], shown: Callable[[float], str] | None = None) -> str:
    least, most = map(shown or (lambda rate: f"{rate:.2g}" if rate < 10 else _rate(rate)), pair)
    return least if least == most else f"{least} to {most}"


def _limits(prediction: Prediction) -> str:
    """The first resource and the second, with their shares of the time."""
    return ", ".join(f"{name} {share:.0%}" for name, share in prediction.ranked()[:2])


def _rate(rate: float) -> str:
    return f"{rate:.1f}" if rate < 20 else f"{rate:,.0f}"


def _sources(nbytes: Mapping[str, int], bandwidth: Mapping[str, float]) -> str:
    """ "1.90 GB a token at 19.4 GB/s (RAM), 0.44 GB at 4,000 (cuda:0)"; GPUs together, at the slowest one's rate."""
    groups = [
        group for group in (["cpu"], [device for device in nbytes if device != "cpu"]) if set(group) & set(nbytes)
    ]
    parts: list[str] = []
    for devices in groups:
        total, rate = sum(nbytes[device] for device in devices), min(bandwidth[device] for device in devices)
        a_token, unit = ("", "") if parts else (" a token", " GB/s")
        parts.append(f"{_gigabytes(total)}{a_token} at {_rate(rate / 1e9)}{unit} ({shown_devices(devices)})")
    return ", ".join(parts)


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e7 else f"{nbytes / 1e6:.2f} MB"


def _part_lines(parts: Iterable[SummaryPart]) -> list[str]:
    lines = [f"{'part':<20}{'where':<12}{'size':>10}  types"]
    for part in parts:
        line = f"{part.name:<20}{shown_devices(part.devices):<12}{shown_size(part.nbytes):>10}  {_types(part.types)}"
        lines.append(line.rstrip())
    return lines


def _types(types: Iterable[str], width: int = WIDTH - 44) -> str:
    text = ""
    for kind in types:
        longer = f"{text}, {kind}" if text else kind
        if len(longer) > width - 5:
            return f"{text}, ..."
        text = longer
    return text


def summary_json(
    preview: DryRun,
    bandwidth: Mapping[str, float],
    expected: Expected | None = None,
    disk: DiskPrediction | None = None,
) -> dict[str, Any]:
    """Return the screen's numbers as JSON types: bytes, bytes a second, tokens a second."""
    summary, suggestions = preview.summary, preview.fit_suggestions
    reads, full = summary.reads, min(summary.cache_tokens, summary.context_len or summary.cache_tokens)
    return {
        "name": summary.name,
        **asdict(summary.size),
        "disk_bytes": summary.disk_bytes,
        "memory_bytes": summary.memory_bytes,
        "stored_bytes": summary.stored_bytes,
        "bits_per_weight": summary.bits_per_weight,
        "context_len": summary.context_len,
        "cache_tokens": summary.cache_tokens,
        "chunk_size": summary.chunk_size,
        "num_threads": preview.num_threads,
        "parts": [asdict(part) for part in summary.parts],
        "verdict": verdict(preview),
        "remedies": [
            {"flag": one.flag, "saves_bytes": one.saves, "is_enough": one.is_enough}
            for one in (() if suggestions is None else suggestions.each)
        ],
        "remedies_are_enough": None if suggestions is None else suggestions.are_enough,
        "bandwidth_bytes_per_s": dict(bandwidth),
        "decode": [
            {
                "context": context,
                "bytes_per_token": reads.bytes_per_token(context),
                "tokens_per_s_at_most": reads.tokens_per_s(bandwidth, context),
            }
            for context in (0, full)
        ],
        "predicted": [_prediction_json(one) for one in (expected.predictions if expected else ())],
        "not_predicted": expected.reason if expected else "",
        "disk": None if disk is None else {**asdict(disk), "is_slow": disk.is_slow},
    }


def _prediction_json(prediction: Prediction) -> dict[str, Any]:
    """seconds_by_resource adds up to seconds; limits: resource and share, the largest first."""
    return {
        "phase": prediction.phase,
        "tokens": prediction.tokens,
        "context": prediction.context,
        "seconds": prediction.seconds,
        "tokens_per_s": prediction.tokens_per_s,
        "seconds_by_resource": dict(prediction.parts),
        "limits": prediction.ranked(),
        "assumed_types": dict(prediction.assumed),
    }
