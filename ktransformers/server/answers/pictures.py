"""Reads the pictures of a request before its prompt is made, each once, whatever the dialect and the number of answers.

    UnreadPicture ── its bytes: base64, data: or a host that is allowed ──> PictureReader ──> ReadPicture
        └── the model has no tower, and --ignore_images; a tool's result whose picture cannot be read ──> a text

A user's picture that cannot be read is a 400. A tool's result comes back in each further turn, so nothing in it is a
reason to refuse the conversation: a text stands in its place.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ktransformers.errors import ConfigError, FieldError
from ktransformers.media.fetching import base64_bytes, data_of
from ktransformers.media.picture import ReadPicture
from ktransformers.media.reader import ChildReader
from ktransformers.server.answers.history import left_out
from ktransformers.server.answers.requests import Conversation, Message, Part, UnreadPicture, joined
from ktransformers.server.service import Service

__all__ = ["RequestPictures"]

_FETCH_SECONDS = 60.0
"""Of all pictures of a request together, beside the time that each one has."""

_MOST_SCHEME = 16  # characters: base64 of any length has no colon
_UNREAD = "it could not be read"


class RequestPictures:
    """The pictures of one request: read on a thread, their files held until `release`.

    known: what stood for each picture when another process read them, from the journal; they are read again where the
    files are gone. shown: what stands for each one now, in their order.
    """

    def __init__(self, service: Service, known: Sequence[ReadPicture | str] = ()):
        self._service, self._known = service, known
        self._held: list[bytes] = []
        self._is_released = False
        self._fetch_seconds = 0.0
        self._altered: list[str] = []
        self._holder: ChildReader | None = None  # of the load of the model that this request is answered by
        self.shown: tuple[ReadPicture | str, ...] = ()

    async def read(self, asked: Conversation) -> Conversation:
        """Return the conversation with its pictures read. Raises FieldError for what is no picture, or too many."""
        if not any(isinstance(part, UnreadPicture) for part in asked.parts):
            return asked
        return await self._service.workers.run_waiting(self._read, asked)

    def release(self) -> None:
        """Let go of the pictures' files, now and as they come. Safe to call twice."""
        self._is_released = True
        held, self._held = self._held, []
        if held and self._holder is not None:
            self._holder.release(held)

    def _read(self, asked: Conversation) -> Conversation:
        try:
            return self._with_pictures(asked)
        finally:
            if self._is_released:  # whoever asked has left meanwhile
                self.release()

    def _with_pictures(self, asked: Conversation) -> Conversation:
        pictures = [part for part in asked.parts if isinstance(part, UnreadPicture)]
        most = self._service.config.max_images
        self._holder = self._service.model.pictures
        if len(pictures) > most and not self._is_ignoring:
            place = pictures[most].place
            raise FieldError(f"{place}: {len(pictures)} pictures are more than {most} (--max_images)", place)
        self._check_videos(asked)
        known = self._kept_files(len(pictures))
        shown: list[ReadPicture | str] = []

        def show(part: Part, message: Message) -> ReadPicture | str:
            if not isinstance(part, UnreadPicture):
                return part
            found = known[len(shown)] if known else self._shown(part, is_result=message.role == "tool")
            shown.append(found)
            if isinstance(found, str):
                self._altered.append(part.name)
            return found

        messages = [
            replace(message, content=joined([show(part, message) for part in message.parts]))
            for message in asked.messages
        ]
        self.shown = tuple(shown)
        return replace(asked, messages=messages, altered=(*asked.altered, *self._altered))

    def _check_videos(self, asked: Conversation) -> None:
        """Raise FieldError for a user's video of several frames where the model takes one picture in a message."""
        users = [message for message in asked.messages if message.role != "tool"]
        places = Counter(part.place for one in users for part in one.parts if isinstance(part, UnreadPicture))
        videos = [place for place, count in places.items() if count > 1]
        if videos and self._holder is not None and self._service.model.tokenizer.takes_one_picture:
            raise FieldError(
                f"{videos[0]}: a video is several pictures, and {self._service.model_names[0]} takes one in a message: "
                "send one frame",
                videos[0],
            )

    @property
    def _is_ignoring(self) -> bool:
        return self._holder is None and self._service.config.ignores_images

    def _kept_files(self, num_pictures: int) -> Sequence[ReadPicture | str]:
        """What is known of all pictures, whose files are held from now on; nothing where some of them are gone."""
        digests = [one.digest for one in self._known if isinstance(one, ReadPicture)]
        if len(self._known) != num_pictures:
            return ()
        if digests and (self._holder is None or not all(map(self._holder.store.has, digests))):
            return ()
        self._hold(digests)
        return self._known

    def _shown(self, picture: UnreadPicture, *, is_result: bool) -> ReadPicture | str:
        if self._holder is None:
            if is_result or self._is_ignoring:
                self._service.metrics.picture("left_out")
                return left_out("picture")
            self._service.metrics.picture("refused")
            model = self._service.model
            raise FieldError(
                f"{picture.place}: no support for images: {self._service.model_names[0]} reads text only: "
                f"{model.no_pictures}; leave them out, or start the server with --ignore_images",
                picture.place,
            )
        began, metrics = time.perf_counter(), self._service.metrics
        try:
            found = self._found(picture, self._holder)
        except ConfigError as error:
            if is_result:
                metrics.picture("left_out")
                return left_out("picture", _UNREAD)
            metrics.picture("refused")
            raise FieldError(f"{picture.place}: {error}", picture.place) from error
        metrics.picture("read")
        metrics.picture_read.observe(time.perf_counter() - began)
        self._hold([found.digest])
        return found

    def _hold(self, digests: Sequence[bytes]) -> None:
        if self._holder is not None:
            self._holder.hold(digests)
            self._held += digests

    def _found(self, picture: UnreadPicture, reader: ChildReader) -> ReadPicture:
        source = picture.source.strip()  # as browsers take URLs
        found: ReadPicture | bytes
        if source[:5].lower() == "data:":
            found = data_of(source)
        elif ":" in source[:_MOST_SCHEME]:
            found = self._fetched(source, reader, picture.detail)
        else:
            try:
                found = base64_bytes(source)
            except ConfigError as error:
                raise ConfigError(f"it is neither a URL nor base64: {error}") from error
        return reader.read(found, picture.detail) if isinstance(found, bytes) else found

    def _fetched(self, url: str, reader: ChildReader, detail: str | None) -> ReadPicture | bytes:
        if self._fetch_seconds > _FETCH_SECONDS:
            raise ConfigError(f"fetching the pictures of this request took more than {_FETCH_SECONDS:g} s")
        began = time.monotonic()
        found = self._service.fetched.get(url, reader, detail)
        self._fetch_seconds += time.monotonic() - began
        return found
