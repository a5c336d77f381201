"""Connects a server's broker with its JetStream cluster.

The broker's commit log goes to the publisher, and feeds fill the positions' rings; both happen in
`end_turn`, at the end of each turn. Requests about streams and consumers run as jobs, in order per
class. A subscriber gets its reply when the consumer of its position exists. Messages that are
published after the subscription are stored after the consumer was created.

Without a connection nothing is lost: publishers wait for confirms and subscribers for messages.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import trio

from simplebus.core.broker.broker import Broker
from simplebus.core.commit_log import CommitLog
from simplebus.core.errors import BusConnectionError, Reason, RemoteProtocolError
from simplebus.core.message_class.remote_storage import (
    RemoteCountOutcome,
    RemoteFetchOutcome,
    RemotePurgeOutcome,
)
from simplebus.core.protocol.requests import Start
from simplebus.core.subscription.position import Position
from simplebus.core.subscription.selection import Ranges
from simplebus.jetstream import api
from simplebus.jetstream.backlog import StreamBacklog
from simplebus.jetstream.class_jobs import ClassJobs, log_retry
from simplebus.jetstream.cluster.class_names import ClassNameExchange
from simplebus.jetstream.cluster.cluster_id import maintain_cluster_id
from simplebus.jetstream.cluster.failover import follow_jetstream
from simplebus.jetstream.consume.catch_up import notify_when_caught_up
from simplebus.jetstream.consume.close import ClosedPosition, ConsumerCloser
from simplebus.jetstream.consume.consumers import ConsumerManager, ConsumerRefusedError
from simplebus.jetstream.consume.dead_letters import DeadLetterMark, DeadLetterTracker
from simplebus.jetstream.consume.durable_check import (
    DurableCheck,
    resume_replies,
    subscribed_sessions,
)
from simplebus.jetstream.consume.feed import (
    ALIVE_SECONDS,
    FETCH_BYTES,
    FETCH_SECONDS,
    ConsumerFeed,
    OpenedConsumer,
)
from simplebus.jetstream.consume.inboxes import ConsumerInboxes
from simplebus.jetstream.consume.returned_messages import ReturnedMessages
from simplebus.jetstream.fetch import StreamReader, query_when_stored
from simplebus.jetstream.names import consumer_name
from simplebus.jetstream.publish.codec import HEADERS_BYTES_MAX
from simplebus.jetstream.publish.refusals import StreamRefusals
from simplebus.jetstream.publish.stream_publisher import StreamPublisher
from simplebus.jetstream.remote_class import RemoteClass, StoredMessages, pause_full_classes
from simplebus.jetstream.settings import JetStreamOptions
from simplebus.jetstream.trim import StreamTrimmer
from simplebus.logs.event_logger import EventLogger
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.client import RequestReplies, ServerReady
from simplebus.nats.client.events import ReceivedMessages
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection, NatsConnectionEvent, NatsConnectionLost

log = EventLogger("simplebus.engine")

OpenConsumer = Callable[[], Awaitable[OpenedConsumer]]

_TICK_SECONDS = 0.25
_WORKING_PER_ACK_WAIT = 3
"""Number of "in progress" acks per ack wait of the cluster."""
_REQUEST_LOST_SECONDS = 3 * ALIVE_SECONDS
"""Silence after which a request for messages counts as lost."""
_RETRY_SECONDS = 0.25


class JetStreamBackend:
    """Storage of one stateless server.

    Run `run` in a nursery before the broker accepts clients.
    """

    def __init__(self, broker: Broker, options: JetStreamOptions) -> None:
        self.options = options
        self.server_id = secrets.token_hex(6)
        """Id of this server in the cluster."""
        self._broker = broker
        assert broker.commit_log is not None, "a stateless server's broker needs a commit log"
        self._commit_log: CommitLog = broker.commit_log
        self._flush: Callable[[], None] = lambda: None
        self._read_clock = trio.current_time
        self.link = NatsConnection(
            list(options.servers),
            self._handle,
            name=f"simplebus {options.names.prefix}",
            credentials=options.credentials,
            tls=options.tls,
            min_payload_bytes=broker.settings.limits.frame_bytes + HEADERS_BYTES_MAX,
        )
        core, classes = self.link.core, broker.store.classes
        self.consumers = ConsumerManager(self.link, options, self.server_id, DurableCheck(broker))
        self.publisher = StreamPublisher(
            core,
            subject=options.names.class_subject,
            get_instance=lambda name: (
                broker.subscription_manager.producer_states.last_instance(name) or ""
            ),
            run_id=self.server_id,
            has_fast_batches=self.consumers.has_fast_batches,
        )
        self.refusals = StreamRefusals(classes, self.publisher.refusal)
        self._fast_batch_sid = core.subscribe(self.publisher.inbox)
        self.reader = StreamReader(self.link, options)
        self.feeds: dict[Position, ConsumerFeed] = {}
        self.inboxes = ConsumerInboxes(core, options.names, self.server_id)
        self._feeds_to_serve: dict[ConsumerFeed, None] = {}
        self._dead_letters: DeadLetterTracker[ConsumerFeed] = DeadLetterTracker(
            self._commit_log, core.write
        )
        self._jobs = ClassJobs(classes, self._notify_stored)
        self._trimmer = StreamTrimmer(self.link, classes, self.consumers, self._jobs, self.inboxes)
        self._backlog = StreamBacklog(
            self.link, options.names, classes, self.consumers, self.inboxes
        )
        arguments = self._is_used, self._wait_dead_letters
        self._closer = ConsumerCloser(self.link, self.consumers, self._jobs, *arguments)
        self.inboxes.answer_query = self._closer.answer_query
        self._nursery: trio.Nursery | None = None
        self._working_sent_at = 0.0
        self._paused_classes: set[int] = set()
        """Classes that accept no messages for now."""
        self._is_closing = False
        self._stored = trio.Event()
        table = broker.store.class_registry
        table.dedup_window_seconds = options.duplicate_seconds
        table.choose_first_number = options.first_message_number
        table.class_factory = partial(
            RemoteClass,
            open_position=self._open_position,
            close_position=self._close_position,
            query_stream=self._query_stream,
            on_purged=self._on_purged,
            feeds=self.feeds,
            check_caught_up=self._check_caught_up,
            on_dead_lettered=self._on_dead_lettered,
            count_messages=self._count_messages,
            get_refusal=self.refusals.get_reason,
            frame_bytes=broker.settings.limits.frame_bytes,
        )
        class_lookups = broker.store.class_id_by_name, table.declare_classes
        self._class_names = ClassNameExchange(
            core, options.names, self.server_id, *class_lookups, enqueue_job=self._jobs.enqueue
        )
        self.consumers.on_description = self._class_names.record_description

    @property
    def is_busy(self) -> bool:
        """True while requests to JetStream are queued or running."""
        return not self._jobs.is_empty

    def _activity_count(self) -> int:
        """Number of messages stored and fetched so far, as evidence that JetStream answers."""
        return self.publisher.stored + sum(feed.fetched_count for feed in self.feeds.values())

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. Starts when the cluster was reached and class names are loaded."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._jobs.start(nursery)
            await nursery.start(self.link.run)
            nursery.start_soon(follow_jetstream, self.link, self.options, self._activity_count)
            await self.link.wait_ready()
            await self._class_names.load(self.consumers.list_classes)
            nursery.start_soon(
                maintain_cluster_id,
                self.link,
                self.options,
                self._broker.subscription_manager.identity,
            )
            task_status.started()
            while True:
                await trio.sleep(_TICK_SECONDS)
                self._tick()

    def drive(self, flush: Callable[[], None], read_clock: Callable[[], float]) -> None:
        """Connect the server's loop.

        Args:
            flush: Called after changes, so that sessions are flushed.
            read_clock: Updates and returns the clock; called before changes.
        """
        self._flush, self._read_clock = flush, read_clock

    # Turns ---------------------------------------------------------------------------------------

    def end_turn(self) -> bool:
        """Publish accepted messages, write acks and request messages.

        Returns:
            True if positions can send messages that waited.
        """
        if self._nursery is None:
            return False
        commit_log, now = self._commit_log, trio.current_time()
        has_entries = not commit_log.is_empty
        if has_entries and not self.publisher.is_crowded(now):
            self._publish_write_batch()
        missing = self.publisher.publish_ready(now)
        for class_id in missing - self._jobs.busy_classes:
            self._jobs.enqueue(class_id, partial(self._open_stream, class_id))
        feeds, self._feeds_to_serve = self._feeds_to_serve, {}
        resumed = [feed for feed in feeds if self._serve_feed(feed)]
        self._class_names.publish_new_names(self.link, now)
        self.link.flush()
        return bool(resumed)

    def _publish_write_batch(self) -> None:
        commit_log, store = self._commit_log, self._broker.store
        commit_log.discard_changes()
        write_batch = commit_log.pop_write_batch(allow_empty=True)
        assert write_batch is not None
        self.publisher.append_batch(write_batch)
        if not write_batch.entries and self.publisher.is_empty:
            # No PubAck will report the empty batch as durable; do so after this turn.
            with contextlib.suppress(trio.RunFinishedError):
                trio.lowlevel.current_trio_token().run_sync_soon(self._finish_empty_batch)
        for class_id in {entry.class_id for entry in write_batch.entries}:
            store.trim_class(store.classes[class_id])
        self._paused_classes = pause_full_classes(store, self.publisher.full, self._paused_classes)

    def _finish_empty_batch(self) -> None:
        """Report an empty write batch as durable when all earlier batches are."""
        if (batch_number := self.publisher.pop_durable_position()) is not None:
            self._mark_durable(batch_number)

    def _serve_feed(self, feed: ConsumerFeed) -> bool:
        """Write the acks of a feed, fill its ring and request messages.

        Returns:
            True if messages that waited for space or for the stream's time entered the ring.
        """
        core, head = self.link.core, feed.position.ring.head
        if feed.position not in self.inboxes or not core.is_ready:
            return False
        self._dead_letters.update_feed(feed)
        for messages in feed.pop_acked():
            core.write(jetstream_codec.encode_acks(messages))
            self._trimmer.classes_to_trim.add(feed.cls.class_id)
            feed.last_ack = messages.reply(-1)
        now = trio.current_time()
        if acks := feed.fill() + feed.expected_redeliveries.retry_overdue(
            now, has_request=feed.requested_count > 0
        ):
            core.write(acks)
        if feed.cls.clock.begin_query() and self._nursery is not None:
            arguments = feed.cls, self._broker.clock, self._read_clock, self._flush
            self._jobs.run_concurrently(
                feed.cls.class_id, partial(self.reader.query_time, *arguments)
            )
        may_ask = now >= feed.retry_at and not (self._is_closing or feed.is_replacing)
        if may_ask and (count := feed.request_size()):
            feed.requested_count += count
            feed.last_answer_at = now
            stream = self.options.names.stream_name(feed.cls.class_id)
            consumer = self.inboxes.consumer_names[feed.position]
            core.publish(
                f"{jetstream_codec.API}CONSUMER.MSG.NEXT.{stream}.{consumer}",
                jetstream_codec.pull_request(
                    batch=count,
                    expires_seconds=FETCH_SECONDS,
                    idle_seconds=ALIVE_SECONDS,
                    max_bytes=FETCH_BYTES + self.link.payload_bytes_max,
                ),
                reply=self.inboxes.inbox(feed.position),
            )
        if feed.position.ring.head > head:
            self._broker.subscription_manager.notify_position(feed.position)
        return feed.position.ring.head > head

    def _on_dead_lettered(self, position: Position, ranges: Ranges, class_id: int) -> None:
        if (feed := self.feeds.get(position)) is not None:
            self._dead_letters.add(feed, ranges, class_id)

    def _tick(self) -> None:
        """Repeat overdue requests, write "in progress" acks and trim streams."""
        now = trio.current_time()
        ready = self.link.core.is_ready
        should_send_working = (
            ready
            and now - self._working_sent_at >= self.options.ack_wait_seconds / _WORKING_PER_ACK_WAIT
        )
        if should_send_working:
            self._working_sent_at = now
        for feed in self.feeds.values():
            self._feeds_to_serve[feed] = None
            if feed.requested_count and now - feed.last_answer_at > _REQUEST_LOST_SECONDS:
                feed.requested_count = 0
            if should_send_working:
                for messages in feed.unacked_messages():
                    self.link.core.write(
                        jetstream_codec.encode_acks(messages, jetstream_codec.WORKING)
                    )
        if ready:
            self._trimmer.trim_if_due(now)
        self.refusals.log_recovered(now)
        self._flush()
        self._handle_refusals()  # A stream that does not answer causes no other event.

    # Events --------------------------------------------------------------------------------------

    def _handle(self, event: NatsConnectionEvent) -> None:
        now = self._read_clock()
        match event:
            case RequestReplies():
                self._handle_progress(self.publisher.handle_pub_acks(event, now))
            case ReceivedMessages():
                for sid, sid_messages in event.split_by_sid().items():
                    self._handle_messages(sid, sid_messages)
                self._flush()
            case ServerReady():
                self.publisher.handle_reconnect(now)
                self._working_sent_at = 0.0
                for feed in self.feeds.values():
                    feed.requested_count = 0
                    self._feeds_to_serve[feed] = None
                    if feed.is_broken:
                        self._replace_later(feed)
                self._class_names.query_peers()
                if self._nursery is not None:
                    self._flush()
            case NatsConnectionLost():
                for feed in self.feeds.values():
                    feed.requested_count = 0
                    if feed.ack_all is not None:  # Messages on the lost connection are missing.
                        feed.ack_all.has_gap = True

    def _handle_progress(self, batch_number: int | None) -> None:
        """Handle answers for the publisher; `batch_number` is the new durable position."""
        for class_id in self.publisher.pop_classes_without_stream():
            self.consumers.forget_stream(class_id)
            self._jobs.enqueue(class_id, partial(self._open_stream, class_id))
        durable_positions = self.publisher.pop_durable_positions()
        for class_id, last in durable_positions.items():
            self._commit_log.mark_class_durable(class_id, last)
        self._handle_refusals()
        if batch_number is not None or durable_positions:
            self._mark_durable(
                self._commit_log.durable_position if batch_number is None else batch_number
            )
        else:
            self.end_turn()

    def _handle_refusals(self) -> None:
        if refusing := self.publisher.pop_refusing_classes():
            self.refusals.update(refusing, trio.current_time())
            self._paused_classes = pause_full_classes(
                self._broker.store, self.publisher.full, self._paused_classes
            )
            self._notify_stored()  # Waiters also check for refusals.

    def _mark_durable(self, batch_number: int) -> None:
        self._broker.mark_durable(batch_number)
        self._paused_classes = pause_full_classes(
            self._broker.store, self.publisher.full, self._paused_classes
        )
        self._notify_stored()
        self._feeds_to_serve |= dict.fromkeys(self._dead_letters.write_stored_acks())
        self._flush()

    def _notify_stored(self) -> None:
        self._stored.set()
        self._stored = trio.Event()

    def _handle_messages(self, sid: int, messages: ReceivedMessages) -> None:
        feed = self.inboxes.find_feed(sid)
        if feed is not None:
            self._feed_messages(feed, messages)
        elif sid == self._fast_batch_sid:
            self._handle_progress(
                self.publisher.handle_fast_batch_acks(messages, trio.current_time())
            )
        elif not (
            self.inboxes.handle_query(sid, messages)
            or self._class_names.handle_messages(sid, messages)
        ):
            # The position was closed while the messages were on their way.
            found = messages.pick(jetstream_codec.parse_deliveries(messages).good)
            self.link.core.write(jetstream_codec.encode_acks_in_order(found, jetstream_codec.NAK))

    def _feed_messages(self, feed: ConsumerFeed, messages: ReceivedMessages) -> None:
        """Handle messages and status messages from a position's consumer."""
        feed.last_answer_at = trio.current_time()
        is_status = (messages.payloads == messages.ends) & (messages.bodies < messages.payloads)
        if is_status.any():
            for row in is_status.nonzero()[0].tolist():
                code, description = jetstream_codec.parse_status(messages.headers(row))
                if not code:
                    is_status[row] = False
                elif code >= 400:
                    feed.record_request_end(code, description, messages.headers(row))
                    if jetstream_codec.is_consumer_missing(code, description):
                        self._replace_later(feed)
                else:  # A heartbeat; with a reply subject, the server asks for one.
                    reply = messages.reply(row)
                    if reply:
                        self.link.core.publish(reply.decode("latin-1"), b"")
            messages = messages.pick(~is_status)
        if messages.count:
            if acks := feed.receive(messages):
                self.link.core.write(acks)
            if feed.is_broken:
                self._replace_later(feed)
            self._broker.subscription_manager.notify_position(feed.position)
        self._feeds_to_serve[feed] = None

    # Positions -----------------------------------------------------------------------------------

    def _open_position(
        self, cls: RemoteClass, position: Position, start: str | Start, is_seek: bool
    ) -> None:
        cls.on_positions_changed = self._mark_positions_changed
        feed = self.feeds[position] = ConsumerFeed(cls, position, self._broker.store)
        feed.publish_pause = self.publisher.pause_class(cls.class_id)
        open_consumer = partial(self.consumers.open, cls, position, start, is_seek=is_seek)
        if start == "earliest" or isinstance(start, Start):  # Skip fully acknowledged messages.
            self._jobs.enqueue(cls.class_id, partial(self._trimmer.trim_now, cls.class_id), feed)
        self._jobs.enqueue(
            cls.class_id,
            partial(self._open_feed, cls, position, open_consumer, feed.publish_pause),
            feed,
        )

    def _is_used(self, cls: RemoteClass, name: str) -> bool:
        positions = [position for position, feed in self.feeds.items() if feed.cls is cls]
        names = {consumer_name(position.durable, position.group) for position in positions}
        return name in names or name in {
            self.inboxes.consumer_names.get(position) for position in positions
        }

    async def _wait_dead_letters(self, mark: DeadLetterMark) -> None:
        while not self._dead_letters.is_stored(mark):
            await self._stored.wait()

    def _mark_positions_changed(self, cls: RemoteClass) -> None:
        found = map(self.feeds.get, cls.positions)
        self._feeds_to_serve |= dict.fromkeys(feed for feed in found if feed is not None)

    async def _open_stream(self, class_id: int) -> None:
        """Create the stream of a class for its waiting messages.

        After a failure the next turn tries again; the class's other jobs run in between.
        """
        try:
            await self.link.wait_ready()
            await self.consumers.open_stream(class_id, self._broker.classes[class_id].name)
        except (BusConnectionError, JetStreamError) as error:
            self.refusals.record(class_id, str(error), trio.current_time())
            await trio.sleep(_RETRY_SECONDS)
            return
        self.publisher.open_classes.add(class_id)
        self._flush()

    async def _open_feed(
        self,
        cls: RemoteClass,
        position: Position,
        open_consumer: OpenConsumer,
        publish_pause: int | None,
        tries: int = 0,
    ) -> None:
        """Open the consumer of a position and start its feed.

        Messages published after the subscription wait for one attempt only, so that a cluster that
        refuses the consumer does not block publishers.
        """
        is_done = True
        try:
            is_done = await self._try_open_consumer(cls, position, open_consumer, tries)
        finally:
            if publish_pause is not None and (is_done or self.link.is_ready):
                self.publisher.resume_class(cls.class_id, publish_pause)
                publish_pause = None
        if not is_done:
            retry = partial(self._open_feed, cls, position, open_consumer, publish_pause, tries + 1)
            self._jobs.enqueue_later(cls.class_id, retry, _RETRY_SECONDS)
        self._flush()

    async def _try_open_consumer(
        self,
        cls: RemoteClass,
        position: Position,
        open_consumer: OpenConsumer,
        tries: int,
    ) -> bool:
        """Open the consumer of a position. Returns False to try again."""
        if position not in self.feeds:
            await self._close_unconfirmed(cls, position)
            return True
        try:
            await self.link.wait_ready()
            found = await open_consumer()
        except RemoteProtocolError as error:
            self._refuse(cls, position, error)
            return True
        except ConsumerRefusedError as error:
            self._refuse(cls, position, RemoteProtocolError(Reason.BAD_REQUEST, str(error)))
            return True
        except (BusConnectionError, JetStreamError) as error:
            log_retry(cls.label, error, tries)
            return False
        except Exception:
            log.exception(
                "consumer.open_failed",
                "class {class_name}: unexpected error while opening a subscription",
                class_name=cls.label,
            )
            problem = "internal error of the server; see its log"
            self._refuse(cls, position, RemoteProtocolError(Reason.BAD_REQUEST, problem))
            return True
        if position not in self.feeds:  # Closed meanwhile.
            await self._closer.close(ClosedPosition(cls, position, found.name))
            return True
        self.publisher.open_classes.add(cls.class_id)
        self._trimmer.classes_to_trim.add(cls.class_id)  # The consumer may have moved.
        feed = self.feeds[position]
        feed.open(found)
        feed.stream_created = self.consumers.stream_created(cls.class_id)
        self.inboxes.open(feed, found.name)
        cls.existed_before[position] = found.existed_before
        feed.is_open = True
        resume_replies(self._broker, subscribed_sessions(self._broker, position))
        self._feeds_to_serve[feed] = None
        return True

    async def _close_unconfirmed(self, cls: RemoteClass, position: Position) -> None:
        """Close the consumer of a closed position whose creation was not confirmed."""
        if name := self.consumers.pop_unconfirmed(position):
            await self._closer.close(ClosedPosition(cls, position, name))

    def _replace_later(self, feed: ConsumerFeed) -> None:
        """Enqueue the replacement of a consumer that lost messages or may be gone."""
        if not feed.is_replacing:
            feed.is_replacing = True
            self._jobs.enqueue(feed.cls.class_id, partial(self._replace_consumer, feed))

    async def _replace_consumer(self, feed: ConsumerFeed, tries: int = 0) -> None:
        cls = feed.cls
        if not await self._open_replacement(feed, tries):
            retry = partial(self._replace_consumer, feed, tries + 1)
            self._jobs.enqueue_later(cls.class_id, retry, _RETRY_SECONDS)
            return
        feed.is_replacing = False
        self._flush()

    async def _open_replacement(self, feed: ConsumerFeed, tries: int) -> bool:
        """Open another consumer for a feed. Returns False to try again."""
        cls, position = feed.cls, feed.position
        try:
            await self.link.wait_ready()
            if position not in self.inboxes:
                await self._close_unconfirmed(cls, position)
                return True
            name = self.inboxes.consumer_names[position]
            found = await self.consumers.replace(cls, position, name, feed)
        except Exception as error:
            log_retry(cls.label, error, tries)
            return False
        feed.requested_count = 0
        self._feeds_to_serve[feed] = None
        if found is None:  # The consumer exists and was only silent.
            await trio.sleep(_RETRY_SECONDS)
        elif position not in self.inboxes:  # Closed meanwhile.
            await self._closer.close(ClosedPosition(cls, position, found.name))
        else:
            feed.replace_consumer(found)
            self.inboxes.open(feed, found.name)
        return True

    def _refuse(self, cls: RemoteClass, position: Position, error: RemoteProtocolError) -> None:
        """End the subscriptions of a position with an error."""
        sessions = subscribed_sessions(self._broker, position)
        self._broker.revoke_position(position, error)
        resume_replies(self._broker, sessions)
        self._flush()

    def _close_position(self, cls: RemoteClass, position: Position, forget: bool) -> None:
        """Return a position's unacknowledged messages to the cluster."""
        feed = self.feeds.pop(position, None)
        if feed is None:
            return
        self._feeds_to_serve.pop(feed, None)
        if position not in self.inboxes:
            # Without cancellation jobs would pile up during an outage.
            if self._jobs.cancel_queued(cls.class_id, feed):
                self.publisher.resume_class(cls.class_id, feed.publish_pause)
            return
        last_ack: tuple[str, bytes] | None = None
        self._dead_letters.update_feed(feed)
        self._trimmer.classes_to_trim.add(cls.class_id)  # It may have held back the stream.
        for messages in feed.pop_acked():
            self.link.core.write(jetstream_codec.encode_acks(messages))
            last_ack = messages.reply(-1).decode("latin-1"), jetstream_codec.ACK
        delays = position.list_delays(self._broker.settings.tick_seconds)
        unacked = feed.unacked_on_exit(delays) if feed.ack_all is not None else None
        dead_letters = self._dead_letters.end_feed(feed)
        name = self.inboxes.close(feed)
        returned = (
            ReturnedMessages(feed.messages_to_return(delays), feed.delivery_state)
            if feed.ack_all is None
            else None
        )
        closed = ClosedPosition(
            cls, position, name, forget, last_ack, returned, unacked, dead_letters
        )
        self._closer.close_later(closed)
        self.link.flush()

    # Stored messages ----------------------------------------------------------------------------

    def _query_stream(
        self,
        cls: RemoteClass,
        query: Callable[[StoredMessages], Awaitable[RemoteFetchOutcome | RemotePurgeOutcome]],
        on_result: Callable[[Any], None],
    ) -> None:
        """Run a query of a class's stream as a job and pass its result to `on_result`."""

        async def job() -> None:
            on_result(await query_when_stored(self.reader, cls, query, self._wait_stored))
            self._flush()

        self._jobs.enqueue(cls.class_id, job)

    def _count_messages(
        self, class_id: int, on_result: Callable[[RemoteCountOutcome], None]
    ) -> None:
        arguments = class_id, on_result, lambda _: self._flush()
        self._jobs.run_concurrently(class_id, partial(self._backlog.count, *arguments))

    async def _wait_stored(self, cls: RemoteClass) -> None:
        """Wait until accepted messages are stored, unless the stream is full, and acknowledged
        ones removed.

        Raises:
            BusConnectionError, JetStreamError: A request failed.
        """
        await self.consumers.open_stream(cls.class_id, cls.name)
        self.publisher.open_classes.add(cls.class_id)
        self._flush()
        head = cls.ring.head
        while self._commit_log.durable_head(cls.class_id, cls.ring.head) < head:
            refusal = self.publisher.refusal(cls.class_id)
            if refusal is not None and refusal.code in api.STORAGE_FULL:
                break
            await self._stored.wait()
        await self._trimmer.trim_now(cls.class_id)

    def _check_caught_up(
        self, cls: RemoteClass, position: Position, on_result: Callable[[], None]
    ) -> bool:
        feed, consumer = self.feeds.get(position), self.inboxes.consumer_names.get(position)
        if feed is None or consumer is None or feed.is_busy or self._nursery is None:
            return True
        arguments = self.link, self.options.names, consumer, feed, on_result, self._flush
        self._jobs.run_concurrently(cls.class_id, partial(notify_when_caught_up, *arguments))
        return False

    def _on_purged(self, cls: RemoteClass, first: int, last: int) -> None:
        """Remove purged messages first..last-1 from all feeds of the class."""
        for feed in [feed for feed in self.feeds.values() if feed.cls is cls]:
            feed.purge(first + 1, last + 1)
            self._broker.subscription_manager.notify_position(feed.position)
            self._feeds_to_serve[feed] = None
        self._broker.store.trim_class(cls)

    # Ending --------------------------------------------------------------------------------------

    async def finish(self) -> None:
        """Close all sessions, return their messages, and wait until all accepted messages are
        stored.

        The caller limits the time.
        """
        self._is_closing = True
        for session in list(self._broker.sessions.values()):
            self._broker.close_session(session)
        self._flush()
        while not (self.publisher.is_empty and self._commit_log.is_empty):
            await self._stored.wait()
        while not self._jobs.is_empty and self.link.is_ready:
            await self._stored.wait()
        with contextlib.suppress(BusConnectionError):
            # The server processes messages in order, so the answer follows all earlier ones.
            await self.link.request(self.options.names.server_subject(self.server_id))
