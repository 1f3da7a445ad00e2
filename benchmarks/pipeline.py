"""A server of one process beside one of several stages that have its cores: `python -m benchmarks.pipeline MODEL.gguf`.

A table for each, with what the memory gives at most in it, and one JSON line. Streams of --prompt_len and --max_tokens.
Flags that are not known here go to both servers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ktransformers.bench.servers.serving import ServingWork, bench_serving
from ktransformers.system.cores import usable_cores


def main() -> None:
    """Measure one process, then stages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--prompt_len", type=int, default=64)
    parser.add_argument("--max_tokens", type=int, default=64)
    parser.add_argument("--cpu_infer", type=int, default=usable_cores(), help="threads, which stages divide")
    args, flags = parser.parse_known_args()
    threads = args.cpu_infer
    if not 2 <= args.stages <= threads:
        parser.error(f"--stages must be from 2 to the {threads} threads, of which each has its own")
    shape = (args.concurrency, args.prompt_len, args.max_tokens, 1)
    works = [
        ServingWork(args.model, *shape, cpu_infer=threads, more=tuple(flags)),
        ServingWork(
            args.model, *shape, cpu_infer=threads // args.stages, more=(*flags, "--pipeline", str(args.stages))
        ),
    ]
    one, several = map(bench_serving, works)
    print(f"{'N':>3} {'decode':>7} {'TTFT':>7}   {args.stages} stages to one process")
    ratios: list[dict[str, Any]] = []
    for before, after in zip(one["runs"], several["runs"], strict=True):
        decode = after["decode_tokens_per_s"] / before["decode_tokens_per_s"]
        ttft = after["ttft_s"]["p50"] / before["ttft_s"]["p50"]
        ratios.append({"concurrency": before["concurrency"], "decode": decode, "ttft": ttft})
        print(f"{before['concurrency']:3} {decode:7.2f} {ttft:7.2f}")
    print(json.dumps({"bench": "pipeline", "stages": args.stages, "one": one, "several": several, "ratios": ratios}))


if __name__ == "__main__":
    main()
