"""Hints for old command lines: measurements that were commands of `bench` and are benchmarks of the repository now."""

from __future__ import annotations

__all__ = ["MOVED", "benchmark_hint"]

_BENCHMARKS = {
    **{name: name for name in ("model", "kernels", "roofline", "fidelity", "soak")},
    **{name: name for name in ("sampling", "scheduler", "profiling")},
    **{f"gpu_{name}": f"gpu.{name}" for name in ("attention", "latent", "linear", "prefill", "hand_over")},
}


def benchmark_hint(module: str) -> str:
    """Return how to run a benchmark of the repository, for a message."""
    return f"`python -m benchmarks.{module}` in a clone of the repository (docs/bench.md)"


MOVED = {name: f"`bench {name}` moved: {benchmark_hint(module)}" for name, module in _BENCHMARKS.items()}
"""By the name of a former command: one line that says where it is now."""
