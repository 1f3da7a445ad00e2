"""Names the folders below the user's own that this program writes to. Makes none."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["user_cache_dir", "user_state_dir"]

_NOWHERE = Path("/nonexistent")
"""The home of who has none, as of a user that a container is told only by number: nothing is read or kept there."""


def user_cache_dir(system: str = sys.platform, environ: Mapping[str, str] = os.environ) -> Path:
    """Return this program's folder, below the user's, for what can be made again. It need not exist.

    XDG_CACHE_HOME or ~/.cache (freedesktop.org's base directories), ~/Library/Caches on macOS, LOCALAPPDATA on Windows.
    """
    home = _home()
    if system == "darwin":
        return home / "Library" / "Caches" / "ktransformers"
    if system == "win32":
        return Path(environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "ktransformers" / "Cache"
    named = environ.get("XDG_CACHE_HOME", "")
    return (Path(named) if named and Path(named).is_absolute() else home / ".cache") / "ktransformers"


def user_state_dir(system: str = sys.platform, environ: Mapping[str, str] = os.environ) -> Path:
    """Return this program's folder, below the user's, for what should outlive a session. It need not exist.

    XDG_STATE_HOME or ~/.local/state, ~/Library/Application Support on macOS, LOCALAPPDATA on Windows.
    """
    home = _home()
    if system == "darwin":
        return home / "Library" / "Application Support" / "ktransformers"
    if system == "win32":
        return Path(environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "ktransformers" / "State"
    named = environ.get("XDG_STATE_HOME", "")
    return (Path(named) if named and Path(named).is_absolute() else home / ".local" / "state") / "ktransformers"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        return _NOWHERE
