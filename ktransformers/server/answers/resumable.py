"""Streams that outlive their connection, where a client asks for it with the header x-kt-keep: SECONDS.

a task   steps of the request ──> Writer ──> EventLog             to the end, whoever reads
readers  the response, and those of GET /v1/requests/{id}/stream ──<──┘
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial

from fastapi import Request

from ktransformers.errors import ConfigError, UnsupportedError
from ktransformers.server.config import ServerConfig
from ktransformers.server.event_log import EventLog
from ktransformers.server.ongoing import Ongoing, OngoingRequests
from ktransformers.server.service import Service
from ktransformers.server.streaming import EventStream

__all__ = ["KEEP_HEADER", "attached", "check_media_type", "keep_seconds", "keep_writing"]

logger = logging.getLogger("ktransformers.server")

KEEP_HEADER = "x-kt-keep"
_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,3})?", re.ASCII)
_SSE = "text/event-stream"


def keep_seconds(request: Request, config: ServerConfig, is_streamed: bool) -> float | None:
    """Return the seconds for which x-kt-keep asks to keep the stream; None: there is no such header. Raises ConfigError
    or UnsupportedError for what cannot be had.
    """
    given = request.headers.getlist(KEEP_HEADER)
    if not given:
        return None
    most = config.max_keep_seconds
    if not most:
        raise UnsupportedError(f"{KEEP_HEADER}: this server keeps no streams (--max_keep_seconds 0); leave it out")
    if not is_streamed:
        raise UnsupportedError(f"{KEEP_HEADER} is for streams: send stream: true, or leave it out")
    seconds = float(given[0]) if len(given) == 1 and _SECONDS.fullmatch(given[0]) else 0.0
    if not 0.0 < seconds <= most:
        raise ConfigError(f"{KEEP_HEADER} must be a number of seconds, more than 0 and at most {most:g}")
    return seconds


def check_media_type(media_type: str) -> None:
    """Raise UnsupportedError for a dialect whose streams have no event ids."""
    if media_type != _SSE:
        raise UnsupportedError(
            f"{KEEP_HEADER}: streams of this API are lines of JSON, which have no ids; use /v1/chat/completions"
        )


def keep_writing(
    ongoing: OngoingRequests, one: Ongoing, parts: AsyncGenerator[bytes, None], log: EventLog, leave: Callable[[], None]
) -> None:
    """Write the stream to its log in a task of its own. leave: called when that is done."""
    task = asyncio.get_running_loop().create_task(_write(ongoing, one, parts, log))
    ongoing.tasks.add(task)  # the event loop alone would not keep it
    task.add_done_callback(ongoing.tasks.discard)
    task.add_done_callback(lambda _: leave())


async def _write(ongoing: OngoingRequests, one: Ongoing, parts: AsyncGenerator[bytes, None], log: EventLog) -> None:
    one.request_metrics.goes_on = True
    try:
        async with aclosing(parts):
            async for part in parts:
                if one.is_set_aside or not await _is_written(ongoing, one):
                    break  # the next server sends it
                log.append(part)
    except Exception as error:
        one.request_metrics.error = type(error).__name__
        logger.exception("the stream of request %s failed", one.answer_id)
    finally:
        one.request_metrics.goes_on = False
        log.end()
        without = one.stream is not None and not one.stream.num_readers
        ongoing.ended(one)
        if without:
            reasons = ", ".join(dict.fromkeys(reason or "cut off" for reason in one.request_metrics.finish_reasons))
            tokens = one.request_metrics.total.completion_len
            logger.info("%s ended without its client: %d tokens, %s", one.answer_id, tokens, reasons)


async def _is_written(ongoing: OngoingRequests, one: Ongoing) -> bool:
    """Whether what led to an event is in the journal, before it is sent: a client has seen nothing that gets lost."""
    return not one.is_journaled or ongoing.journal is None or await ongoing.journal.written()


def attached(service: Service, one: Ongoing, last_seen: int) -> EventStream:
    """Return a response with the events of a kept stream after number `last_seen`, as they come."""
    stream, config = one.stream, service.config
    assert stream is not None
    service.ongoing.attach(one)
    response = EventStream(
        stream.log.after(last_seen),
        stream.media_type,
        config.send_timeout,
        partial(service.ongoing.detach, one),
        stream.ping,
        config.ping_seconds,
    )
    response.headers[KEEP_HEADER] = f"{stream.seconds:g}"
    return response
