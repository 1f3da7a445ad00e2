"""Benchmarks of developers: `python -m benchmarks.NAME`, see docs/bench.md. Not in the wheel."""
