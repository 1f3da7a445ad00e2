"""LoadProgress counts, draws on terminals, and keeps quiet elsewhere."""

from __future__ import annotations

import io

from rich.console import Console

from ktransformers.weights.progress import LoadProgress


def drawn(is_terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=120)
    with LoadProgress(3_000_000, console=console) as progress:
        progress.advance(1_000_000, "model.layers.0")
        progress.advance(2_000_000, "model.layers.1")
    assert progress.loaded_bytes == 3_000_000
    return out.getvalue()


def test_draws_bytes_and_name_on_a_terminal() -> None:
    assert "3.0/3.0 MB" in drawn(True)
    assert "model.layers.1" in drawn(True)


def test_is_silent_elsewhere() -> None:
    assert drawn(False) == ""
