"""Tokens per second of one replica and of several: `python -m benchmarks.cluster --replicas 3`. One JSON line a run.

Each run starts `ktransformers serve --cluster` on a Ray of its own, sends streams side by side, and ends it. Flags that
are not known here go to `serve`, the model too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

import httpx

_READY = re.compile(r"serving .* on (http://\S+)/v1")


def _start(num_replicas: int, flags: list[str]) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "ktransformers", "serve", *flags, "--port", "0", "--cluster"]
    command += ["--replicas", str(num_replicas)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    seen: list[str] = []
    for line in process.stderr:
        seen.append(line)
        found = _READY.search(line)
        if found is not None:
            return process, found[1]
    raise SystemExit("the server did not start:\n" + "".join(seen[-20:]))


async def _one(client: httpx.AsyncClient, url: str, number: int, num_tokens: int) -> float:
    """Seconds to the first token."""
    body = {"prompt": f"Question {number}: ", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    began = time.perf_counter()
    first = 0.0
    async with client.stream("POST", f"{url}/v1/completions", json={**body, "seed": number}) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: ") and not first:
                first = time.perf_counter() - began
    return first


async def _measure(url: str, num_replicas: int, num_streams: int, num_tokens: int) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=num_streams + 1)
    async with httpx.AsyncClient(timeout=600.0, limits=limits, trust_env=False) as client:
        async with asyncio.timeout(600.0):
            while len((await client.get(f"{url}/v1/status")).json()["replicas"]) < num_replicas:
                await asyncio.sleep(0.1)
        await asyncio.gather(*(_one(client, url, number, 8) for number in range(num_streams)))  # warm
        began = time.perf_counter()
        firsts = await asyncio.gather(*(_one(client, url, number, num_tokens) for number in range(num_streams)))
        seconds = time.perf_counter() - began
    return {
        "benchmark": "cluster",
        "replicas": num_replicas,
        "streams": num_streams,
        "tokens": num_tokens,
        "cores": os.cpu_count(),
        "seconds": round(seconds, 3),
        "tokens_per_second": round(num_streams * num_tokens / seconds, 1),
        "mean_ttft_seconds": round(sum(firsts) / len(firsts), 3),
    }


def main() -> None:
    """Measure one replica, then as many as are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    args, flags = parser.parse_known_args()
    for num_replicas in sorted({1, args.replicas}):
        process, url = _start(num_replicas, flags)
        assert process.stderr is not None
        try:
            print(json.dumps(asyncio.run(_measure(url, num_replicas, args.streams, args.tokens))), flush=True)
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate()


if __name__ == "__main__":
    main()
