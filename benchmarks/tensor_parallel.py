"""Decode on one GPU and over several: `python -m benchmarks.tensor_parallel --gpus 2 --synthetic qwen3-32b`.

Runs `ktransformers bench offline` twice, one after the other; flags that are not known here go to both. A table, then
one JSON line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

Record = dict[str, Any]


def _run(num_gpus: int, flags: list[str]) -> Record:
    command = [sys.executable, "-m", "ktransformers", "bench", "offline", "--json", "--beside", "0", *flags]
    command += ["--tensor_parallel", str(num_gpus)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    record: Record = json.loads(done.stdout.splitlines()[-1])
    return record


def main() -> None:
    """Measure one GPU, then as many as are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=2)
    args, flags = parser.parse_known_args()
    one, several = (_run(count, flags) for count in (1, args.gpus))
    rows = []
    print(f"{'phase':8} {'tokens':>7} {'1 GPU':>10} {f'{args.gpus} GPUs':>10} {'ratio':>6}   tokens/s")
    for before, after in zip(one["rows"], several["rows"], strict=True):
        rates = before["tokens_per_s"], after["tokens_per_s"]
        rows.append({"phase": before["phase"], "tokens": before["tokens"], "tokens_per_s": rates})
        ratio = rates[1] / rates[0]
        print(f"{before['phase']:8} {before['tokens']:7} {rates[0]:10.1f} {rates[1]:10.1f} {ratio:6.2f}")
    shown = {key: one[key] for key in ("machine", "model", "settings")}
    print(json.dumps({"bench": "tensor_parallel", "gpus": args.gpus, **shown, "rows": rows}))


if __name__ == "__main__":
    main()
