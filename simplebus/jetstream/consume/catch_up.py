"""Whether all that is stored for a position has come to its door (trio).

Rule 1: the stream says what its last message is, and the consumer how far it has sent; what has
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
from simplebus.jetstream.consume.feed import Feed
from simplebus.jetstream.names import JetStreamNames
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection

log = logging.getLogger("simplebus.engine")

PATIENCE_SECONDS = 5.0
"""Longer nobody waits: a cluster that does not answer keeps no client."""
SHARED_SECONDS = 1.0
_PAUSE_SECONDS, _PAUSE_SECONDS_MAX = 0.005, 0.1


async def when_all_has_come(
    link: NatsConnection, names: JetStreamNames, consumer: str, feed: Feed, *tell: Callable[[], None]
) -> None:
    """Call each of `tell` when the consumer of a feed has sent what the stream has now, and it is
    here; or when there is no use in waiting."""
    try:
        await _all_has_come(link, names, consumer, feed)
    except Exception:
        log.exception("class %d: whether all has come could not be asked", feed.cls.class_id)
    for each in tell:
        each()


async def _all_has_come(link: NatsConnection, names: JetStreamNames, consumer: str, feed: Feed) -> None:
    stream, subject = names.stream_name(feed.cls.class_id), names.class_subject(feed.cls.class_id)
    last: int | None = None
    sent_at = float("inf")
    pause = _PAUSE_SECONDS
    with trio.move_on_after(PATIENCE_SECONDS):
        while not feed.is_busy:
            try:
                if last is None:
                    last = await _last_of(link, stream, subject)
                info = await link.api_request(f"CONSUMER.INFO.{stream}.{consumer}")
            except BusConnectionError:
                await link.wait_ready()
            except JetStreamError as error:
                if error.code in jetstream_codec.NOT_FOUND:
                    return
            else:
                now = trio.current_time()
                if api.last_delivered(info) >= last:
                    sent_at = min(sent_at, now)
                    is_shared = feed.sole is None
                    if feed.has_all(info) or (is_shared and now >= sent_at + SHARED_SECONDS):
                        return
            await trio.sleep(pause)
            pause = min(2 * pause, _PAUSE_SECONDS_MAX)


async def _last_of(link: NatsConnection, stream: str, subject: str) -> int:
    """The last message that is there; 0 for none. Raises BusConnectionError and JetStreamError."""
    try:
        said = await link.api_request(f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject})
    except JetStreamError as error:
        if error.code not in api.MESSAGE_NOT_FOUND:
            raise
        return 0
    return int(said["message"]["seq"])
