"""Waits until a position has received everything that is stored for it.

The stream reports its last message and the consumer its last delivery. A position with
messages at its subscriber ends the wait; it asks again later. Messages delivered to other servers
never arrive here, so the wait for a shared consumer is short.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from simplebus.core.errors import BusConnectionError
from simplebus.jetstream import api
from simplebus.jetstream.consume.feed import ConsumerFeed
from simplebus.jetstream.names import JetStreamNames
from simplebus.logs.event_logger import EventLogger
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection

log = EventLogger("simplebus.engine")

PATIENCE_SECONDS = 5.0
"""Upper limit, so that a cluster that does not answer blocks no client."""
SHARED_SECONDS = 1.0
_PAUSE_SECONDS, _PAUSE_SECONDS_MAX = 0.005, 0.1


async def notify_when_caught_up(
    link: NatsConnection,
    names: JetStreamNames,
    consumer: str,
    feed: ConsumerFeed,
    *on_caught_up: Callable[[], None],
) -> None:
    """Call each of `on_caught_up` when all stored messages have arrived, or waiting is useless."""
    try:
        await _wait_caught_up(link, names, consumer, feed)
    except Exception:
        log.exception(
            "catch_up.failed",
            "class {class_name}: unexpected error while catching up",
            class_name=feed.cls.label,
        )
    for callback in on_caught_up:
        callback()


async def _wait_caught_up(
    link: NatsConnection, names: JetStreamNames, consumer: str, feed: ConsumerFeed
) -> None:
    stream, subject = names.stream_name(feed.cls.class_id), names.class_subject(feed.cls.class_id)
    last_sequence: int | None = None
    delivered_at = float("inf")
    pause = _PAUSE_SECONDS
    with trio.move_on_after(PATIENCE_SECONDS):
        while not feed.is_busy:
            try:
                if last_sequence is None:
                    last_sequence = await _last_sequence(link, stream, subject)
                info = await link.api_request(f"CONSUMER.INFO.{stream}.{consumer}")
            except BusConnectionError:
                await link.wait_ready()
            except JetStreamError as error:
                if error.code in jetstream_codec.NOT_FOUND:
                    return
            else:
                now = trio.current_time()
                if api.last_delivered(info) >= last_sequence:
                    delivered_at = min(delivered_at, now)
                    is_shared = feed.ack_all is None
                    if feed.has_all(info) or (is_shared and now >= delivered_at + SHARED_SECONDS):
                        return
            await trio.sleep(pause)
            pause = min(2 * pause, _PAUSE_SECONDS_MAX)


async def _last_sequence(link: NatsConnection, stream: str, subject: str) -> int:
    """Return the last stored sequence; 0 for none. Raises BusConnectionError and JetStreamError."""
    try:
        reply = await link.api_request(f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject})
    except JetStreamError as error:
        if error.code not in api.MESSAGE_NOT_FOUND:
            raise
        return 0
    return int(reply["message"]["seq"])
