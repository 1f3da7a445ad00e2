"""`ktransformers profile report`: a profile as one page with pictures, which needs no network to be read."""

from __future__ import annotations

from ktransformers.profiling.report.page import write_report

__all__ = ["write_report"]
