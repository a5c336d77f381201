"""Connection subscriptions that receive the messages of consumers.

Each consumer has a separate inbox, so late messages of a replaced consumer are ignored. The
holder of a durable or group also answers queries for it while the position exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from simplebus.core.subscription.position import Position
from simplebus.jetstream.consume.feed import ConsumerFeed
from simplebus.jetstream.names import JetStreamNames
from simplebus.nats.client.client import NatsClientCore
from simplebus.nats.client.events import ReceivedMessages
from simplebus.net.nats_connection import new_inbox


class ConsumerInboxes:
    """Inboxes of the feeds of one server."""

    def __init__(self, core: NatsClientCore, names: JetStreamNames, server_id: str) -> None:
        """Answer queries for this server from now on."""
        self.answer_query: Callable[[bytes], bytes] = lambda query: b""
        """Returns the answer to a query of another server."""
        self._core = core
        self._names = names
        self._inbox = new_inbox()
        self._feeds: dict[int, ConsumerFeed] = {}
        """Feeds by subscription number of the connection."""
        self._sids: dict[Position, int] = {}
        self.consumer_names: dict[Position, str] = {}
        self._query_sids = {core.subscribe(names.server_subject(server_id))}
        """Subscriptions to queries."""

    def __contains__(self, position: Position) -> bool:
        """Return True if the position has a consumer."""
        return position in self._sids

    def find_feed(self, sid: int) -> ConsumerFeed | None:
        """Return the feed of a subscription number."""
        return self._feeds.get(sid)

    def feeds_of_class(self, class_id: int) -> Iterator[tuple[str, ConsumerFeed]]:
        """Yield the consumer names and feeds of a class."""
        for feed in self._feeds.values():
            if feed.cls.class_id == class_id:
                yield self.consumer_names[feed.position], feed

    def handle_query(self, sid: int, messages: ReceivedMessages) -> bool:
        """Answer a query of another server. Returns False for other messages."""
        if sid not in self._query_sids:
            return False
        for row in range(messages.count):
            if reply := messages.reply(row):
                answer = self.answer_query(bytes(messages.payload(row)))
                self._core.publish(reply.decode("latin-1"), answer)
        return True

    def inbox(self, position: Position) -> str:
        """Return the subject to which the position's consumer sends messages."""
        return f"{self._inbox}.{self._sids[position]}"

    def open(self, feed: ConsumerFeed, name: str) -> None:
        """Receive the messages of consumer `name` for a feed, instead of its previous consumer."""
        core, position = self._core, feed.position
        sid = core.subscribe(f"{self._inbox}.{core.next_sid}")
        old_sid = self._sids.pop(position, None)
        if old_sid is not None:
            core.unsubscribe(old_sid)
            del self._feeds[old_sid]
        self._sids[position], self._feeds[sid] = sid, feed
        self.consumer_names[position] = name
        if (position.durable or position.group) and not feed.holder_sid:
            feed.holder_sid = core.subscribe(
                self._names.consumer_holder_subject(feed.cls.class_id, name)
            )
            self._query_sids.add(feed.holder_sid)

    def close(self, feed: ConsumerFeed) -> str:
        """Stop receiving messages for a feed. Returns the consumer's name."""
        core, sid = self._core, self._sids.pop(feed.position)
        core.unsubscribe(sid)
        del self._feeds[sid]
        self._query_sids.discard(feed.holder_sid)
        core.unsubscribe(feed.holder_sid)
        return self.consumer_names.pop(feed.position)
