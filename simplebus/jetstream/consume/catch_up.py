"""Whether all that is stored for a position has come to its door (trio).

Rule 1: the stream says what its last_sequence message is, and the consumer how far it has sent; what has
come says nothing of what is still to come.
Rule 2: a position that has messages with its subscriber is not waited for: who is through with them
asks again.
Rule 3: what a consumer has sent to other doors does not come here. Of one that several may share it
is waited for a moment only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from simplebus.core.errors import BusConnectionError
from simplebus.jetstream import api
from simplebus.jetstream.consume.feed import ConsumerFeed
from simplebus.jetstream.names import JetStreamNames
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection

log = logging.getLogger("simplebus.engine")

PATIENCE_SECONDS = 5.0
"""Longer nobody waits: a cluster that does not answer keeps no client."""
SHARED_SECONDS = 1.0
_PAUSE_SECONDS, _PAUSE_SECONDS_MAX = 0.005, 0.1


async def notify_when_caught_up(
    link: NatsConnection,
    names: JetStreamNames,
    consumer: str,
    feed: ConsumerFeed,
    *on_caught_up: Callable[[], None],
) -> None:
    """Call each of `on_caught_up` when the consumer of a feed has sent what the stream has now, and it is
    here; or when there is no use in waiting."""
    try:
        await _wait_caught_up(link, names, consumer, feed)
    except Exception:
        log.exception("class %d: whether all has come could not be asked", feed.cls.class_id)
    for each in on_caught_up:
        each()


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
    """The last_sequence message that is there; 0 for none. Raises BusConnectionError and JetStreamError."""
    try:
        reply = await link.api_request(f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject})
    except JetStreamError as error:
        if error.code not in api.MESSAGE_NOT_FOUND:
            raise
        return 0
    return int(reply["message"]["seq"])
