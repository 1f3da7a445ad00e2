"""A progress bar over the bytes of a load, with rate. Knows only counts."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

__all__ = ["LoadProgress"]


class LoadProgress:
    """Context manager: `advance` once per loaded tensor. Draws on standard error, and only when that is a terminal.

    total_bytes: resident bytes of everything that will be loaded (the sum of the plan's TensorInfo.nbytes).
    """

    def __init__(self, total_bytes: int, title: str = "loading", console: Console | None = None):
        self._console = console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[name]}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task(title, total=total_bytes, name="")
        self.loaded_bytes = 0

    def __enter__(self) -> LoadProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self, nbytes: int, name: str) -> None:
        """`nbytes` more are resident; `name` (a module's path) is shown beside the bar."""
        self.loaded_bytes += nbytes
        self._progress.update(self._task, advance=nbytes, name=name)
