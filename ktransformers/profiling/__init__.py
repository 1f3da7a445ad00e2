"""Where the time of every step goes: recorded while a model runs, read back as tables, shown as a page.

from ktransformers import profiling

profile = profiling.load("profile-1")
profile.tokens["ms"].mean(), profile.steps.to_pandas()
"""

from __future__ import annotations

from ktransformers.profiling.tables import Profile, Table, load

__all__ = ["Profile", "Table", "load"]
