"""`ktransformers profile report` and `compare`: profiles as pages with pictures, which need no network to be read."""

from __future__ import annotations

from ktransformers.profiling.report.comparison import write_comparison
from ktransformers.profiling.report.page import write_report

__all__ = ["write_comparison", "write_report"]
