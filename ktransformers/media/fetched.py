"""Pictures by URL that were read before: a conversation names them again in each of its turns.

    URL ── allowed? ── known, and its server asked lately ──> the ReadPicture, while its file is in the store
                    └─ known for longer ── the same still? (304) ──┘
                                        └─ fetched ──> its bytes

No bytes are kept: what a reader made of them is in its store, which is bounded.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ktransformers.media.fetching import Version, check_allowed, fetch_if_changed
from ktransformers.media.picture import ReadPicture
from ktransformers.media.reader import ChildReader, key_of

__all__ = ["FetchedPictures"]

FRESH_SECONDS = 300.0
"""For which a server is not asked again that says nothing about it (Cache-Control)."""

_MOST_SECONDS = 86400.0
_MOST_KNOWN = 4096


@dataclass(frozen=True, slots=True)
class _Known:
    """What a URL named. key: of its bytes. asked: when its server was asked last, in seconds of the clock."""

    key: bytes
    version: Version
    asked: float


class FetchedPictures:
    """Fetches pictures by http(s) URL, where they are not known. Any thread may call it. allowed_hosts: see `fetch`.
    clock: seconds."""

    def __init__(self, allowed_hosts: Sequence[str], clock: Callable[[], float] = time.monotonic):
        self._allowed, self._clock = tuple(allowed_hosts), clock
        self._lock = threading.Lock()
        self._urls: OrderedDict[str, _Known] = OrderedDict()  # the one that was asked for last is the last

    def get(self, url: str, reader: ChildReader, detail: str | None = None) -> ReadPicture | bytes:
        """Return the picture behind a URL as `reader` has read it, or the bytes that it is to read. Blocks. Raises
        ConfigError as `fetch`."""
        check_allowed(url, self._allowed)
        with self._lock:
            one = self._urls.get(url)
        picture = None if one is None else reader.known(one.key, detail)
        if one is not None and picture is not None:
            seconds = FRESH_SECONDS if one.version.seconds is None else min(one.version.seconds, _MOST_SECONDS)
            if self._clock() < one.asked + seconds:
                return picture
        began = self._clock()
        found = fetch_if_changed(url, self._allowed, None if one is None or picture is None else one.version)
        if found is None and one is not None and picture is not None:
            self._keep(url, replace(one, asked=began))
            return picture
        assert found is not None, "no version was known"
        data, version = found
        self._keep(url, _Known(key_of(data), version, began))
        return data

    def _keep(self, url: str, one: _Known) -> None:
        with self._lock:
            self._urls[url] = one
            self._urls.move_to_end(url)
            while len(self._urls) > _MOST_KNOWN:
                self._urls.popitem(last=False)
