"""Which consumer feeds which position, and where what it sends comes to.

Rule 1: a position has one consumer at a time, and a subscription of the connection of its own for
each: what comes of a former one is nobody's.
Rule 2: who has a durable or a group says so to whoever asks, as long as the position is here. Of a
durable without a group it is one door that holds what was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from simplebus.core.subscription.subscription import BrokerSubscription
from simplebus.jetstream.consume.feed import ConsumerFeed
from simplebus.jetstream.names import JetStreamNames
from simplebus.nats.client.client import NatsClientCore
from simplebus.nats.client.events import ReceivedMessages
from simplebus.net.nats_connection import new_inbox


class ConsumerInboxes:
    """Of one door."""

    def __init__(self, core: NatsClientCore, names: JetStreamNames, server_id: str) -> None:
        """`door` is what others know it by."""
        self.answer_query: Callable[[bytes], bytes] = lambda asked: b""
        """What is answer to another door that asks for more than whether this one is there."""
        self._core = core
        self._names = names
        self._inbox = new_inbox()
        self._feeds: dict[int, ConsumerFeed] = {}
        """By the number of the connection's subscription."""
        self._sids: dict[BrokerSubscription, int] = {}
        self.consumer_names: dict[BrokerSubscription, str] = {}
        """Their names."""
        self._query_sids = {core.subscribe(names.server_subject(server_id))}
        """Whoever asks there is told that this door is here."""

    def __contains__(self, position: BrokerSubscription) -> bool:
        """Whether it has a consumer."""
        return position in self._sids

    def find_feed(self, sid: int) -> ConsumerFeed | None:
        """Whose is what comes with this number."""
        return self._feeds.get(sid)

    def feeds_of_class(self, class_id: int) -> Iterator[tuple[str, ConsumerFeed]]:
        """The consumers of a class, and what they feed."""
        for feed in self._feeds.values():
            if feed.cls.class_id == class_id:
                yield self.consumer_names[feed.position], feed

    def handle_query(self, sid: int, messages: ReceivedMessages) -> bool:
        """If this is somebody who asks whether this door is here, or what it has: he is told.
        Returns whether it was."""
        if sid not in self._query_sids:
            return False
        for row in range(messages.count):
            if reply := messages.reply(row):
                answer = self.answer_query(bytes(messages.payload(row)))
                self._core.publish(reply.decode("latin-1"), answer)
        return True

    def inbox(self, position: BrokerSubscription) -> str:
        """Where its consumer is to send messages."""
        return f"{self._inbox}.{self._sids[position]}"

    def open(self, feed: ConsumerFeed, name: str) -> None:
        """From now on a feed has what the consumer of this name sends."""
        core, position = self._core, feed.position
        sid = core.subscribe(f"{self._inbox}.{core.next_sid}")
        former = self._sids.pop(position, None)
        if former is not None:
            core.unsubscribe(former)
            del self._feeds[former]
        self._sids[position], self._feeds[sid] = sid, feed
        self.consumer_names[position] = name
        if (position.durable or position.group) and not feed.holder_sid:
            feed.holder_sid = core.subscribe(
                self._names.consumer_holder_subject(feed.cls.class_id, name)
            )
            self._query_sids.add(feed.holder_sid)

    def close(self, feed: ConsumerFeed) -> str:
        """It has nothing more. Returns the consumer's name."""
        core, sid = self._core, self._sids.pop(feed.position)
        core.unsubscribe(sid)
        del self._feeds[sid]
        self._query_sids.discard(feed.holder_sid)
        core.unsubscribe(feed.holder_sid)
        return self.consumer_names.pop(feed.position)
