"""A door before a JetStream cluster: between its broker and the link (trio).

Rule 1: the broker stays as it is. What it accepts goes from its commit_log to the uplink, and what its
positions are sent comes from their feeds; both are told of in `hand_over`, at the end of each turn.
Rule 2: what has to be asked of JetStream (streams, consumers) is asked in jobs, of each class one
after the other, in the order in which it came up. A position gets its answer when its consumer is
there; what was published here behind it is published there behind it.
Rule 3: while there is no connection nothing is lost and nobody is told anything: publishers wait
for their confirms, subscribers for messages.
"""

from __future__ import annotations

import contextlib
import logging
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
from simplebus.core.subscription.selection import Ranges
from simplebus.core.subscription.subscription import BrokerSubscription
from simplebus.jetstream import api
from simplebus.jetstream.backlog import Counting
from simplebus.jetstream.class_jobs import ClassJobs, log_retry
from simplebus.jetstream.cluster.class_names import Naming
from simplebus.jetstream.cluster.cluster_id import maintain_cluster_id
from simplebus.jetstream.cluster.failover import follow_jetstream
from simplebus.jetstream.consume.catch_up import when_all_has_come
from simplebus.jetstream.consume.close import Closing, Gone
from simplebus.jetstream.consume.consumers import ConsumerRefusedError, Positions
from simplebus.jetstream.consume.dead_letters import Burials, Mark
from simplebus.jetstream.consume.durable_check import Judge, askers_of, let_answer
from simplebus.jetstream.consume.feed import ALIVE_SECONDS, FETCH_BYTES, FETCH_SECONDS, Feed
from simplebus.jetstream.consume.feed import Found as Consumer
from simplebus.jetstream.consume.give_back import Leaving
from simplebus.jetstream.consume.inboxes import Listening
from simplebus.jetstream.fetch import Stored, found_of
from simplebus.jetstream.names import consumer_name
from simplebus.jetstream.publish.codec import HEADERS_BYTES_MAX
from simplebus.jetstream.publish.refusals import Refusals
from simplebus.jetstream.publish.stream_publisher import Uplink
from simplebus.jetstream.remote_class import RemoteClass, StoredMessages, shut
from simplebus.jetstream.settings import JetStreamOptions
from simplebus.jetstream.trim import Trimming
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.client import RequestReplies, ServerReady
from simplebus.nats.client.events import ReceivedMessages
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection, NatsConnectionEvent, NatsConnectionLost

log = logging.getLogger("simplebus.engine")

Find = Callable[[], Awaitable[Consumer]]

_BEAT_SECONDS = 0.25
_WORK_PART = 3
"""What a door holds is said to be in work so often within the time that the cluster waits."""
_SILENT_SECONDS = 3 * ALIVE_SECONDS
"""A consumer that was asked and is silent so long is asked anew."""
_PAUSE_SECONDS = 0.25


class Cluster:
    """Of one door. Enter `run` in a nursery when the broker's driver runs."""

    def __init__(self, broker: Broker, options: JetStreamOptions) -> None:
        self.options = options
        self.door = secrets.token_hex(6)
        """What other doors know it by."""
        self._broker = broker
        assert broker.commit_log is not None, "a door's broker has a commit_log"
        self._commit_log: CommitLog = broker.commit_log
        self._settle: Callable[[], None] = lambda: None
        self._read_clock = trio.current_time
        self.link = NatsConnection(
            list(options.servers),
            self._handle,
            name=f"simplebus {options.names.prefix}",
            credentials=options.credentials,
            tls=options.tls,
            min_payload_bytes=broker.settings.limits.frame_bytes + HEADERS_BYTES_MAX,
        )
        core = self.link.core
        self.positions = Positions(self.link, options, self.door, Judge(broker))
        self.uplink = Uplink(
            core,
            subject=options.names.class_subject,
            program=lambda name: (
                broker.subscription_manager.producer_states.last_instance(name) or ""
            ),
            run=self.door,
            takes_chains=self.positions.takes_chains,
        )
        self.refusals = Refusals(self.uplink.refusal)
        self._chain_sid = core.subscribe(self.uplink.inbox)
        self.stored = Stored(self.link, options)
        self.feeds: dict[BrokerSubscription, Feed] = {}
        self.listening = Listening(core, options.names, self.door)
        self._touched: dict[Feed, None] = {}
        self._burials: Burials[Feed] = Burials(self._commit_log, core.write)
        self._jobs = ClassJobs(self._has_reached)
        self._do = self._jobs.enqueue
        self._trimming = Trimming(self.link, self.positions, self._jobs, self.listening)
        self._counting = Counting(self.link, options.names, self.positions, self.listening)
        asked = self._is_used, self._when_buried
        self._closing = Closing(self.link, self.positions, self._jobs, *asked)
        self.listening.say = self._closing.answer
        self._nursery: trio.Nursery | None = None
        self._worked_at = 0.0
        self._shut: set[int] = set()
        """Classes in which nothing is accepted for now."""
        self._is_closing = False
        self._reached = trio.Event()
        table = broker.store.class_registry
        table.dedup_window_seconds = options.duplicate_seconds
        table.choose_first_number = options.first_message_number
        table.class_factory = partial(
            RemoteClass,
            begin=self._begin,
            end=self._end,
            ask=self._ask,
            struck=self._struck,
            feeds=self.feeds,
            coming=self._coming,
            buried=self._buried,
            count=self._count,
            refused=self.refusals,
            frame_bytes=broker.settings.limits.frame_bytes,
        )
        known = broker.store.class_id_by_name, table.declare_classes
        self._naming = Naming(core, options.names, self.door, *known, do=self._do)
        self.positions.see = self._naming.see

    @property
    def is_busy(self) -> bool:
        """Whether something is asked of JetStream."""
        return not self._jobs.is_empty

    def _activity_count(self) -> int:
        """Number of messages stored and fetched so far, as evidence that JetStream answers."""
        return self.uplink.stored + sum(feed.fetched for feed in self.feeds.values())

    def _activity_count(self) -> int:
        """Number of messages stored and fetched so far, as evidence that JetStream answers."""
        return self.uplink.stored + sum(feed.fetched for feed in self.feeds.values())

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. It has started when the cluster was reached."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._jobs.start(nursery)
            await nursery.start(self.link.run)
            where = self.link, self.options
            nursery.start_soon(follow_jetstream, *where, self._activity_count)
            await self.link.wait_ready()
            await self._naming.learn(self.positions.classes)
            nursery.start_soon(maintain_cluster_id, *where, self._broker.subscription_manager.identity)
            task_status.started()
            while True:
                await trio.sleep(_BEAT_SECONDS)
                self._beat()

    def drive(self, settle: Callable[[], None], read_clock: Callable[[], float]) -> None:
        """`settle` is to be called when something has changed, and `read_clock` before it does."""
        self._settle, self._read_clock = settle, read_clock

    # Turns ---------------------------------------------------------------------------------------

    def hand_over(self) -> bool:
        """At the end of a turn: publish what was accepted, say what was acknowledged, ask for more.
        Returns whether what had waited here can be sent to somebody now."""
        if self._nursery is None:
            return False
        commit_log, now = self._commit_log, trio.current_time()
        is_owed = not commit_log.is_empty
        if is_owed and not self.uplink.is_crowded(now):
            self._take_lot()
        missing = self.uplink.go_on(now)
        for class_id in missing - self._jobs.busy_classes:
            self._do(class_id, partial(self._open_stream, class_id))
        touched, self._touched = self._touched, {}
        is_more = [feed for feed in touched if self._serve(feed)]
        self._naming.tell(self.link, now)
        self.link.flush()
        return bool(is_more)

    def _take_lot(self) -> None:
        commit_log, store = self._commit_log, self._broker.store
        commit_log.discard_changes()
        lot = commit_log.pop_write_batch(allow_empty=True)
        assert lot is not None
        self.uplink.put(lot)
        if not lot.entries and self.uplink.is_empty:  # It is told when this turn is over.
            with contextlib.suppress(trio.RunFinishedError):
                trio.lowlevel.current_trio_token().run_sync_soon(self._reach_empty)
        for class_id in {entry.class_id for entry in lot.entries}:
            store.trim_class(store.classes[class_id])
        self._shut = shut(store, self.uplink.full, self._shut)

    def _reach_empty(self) -> None:
        """A lot of nothing has reached the cluster when those before it have."""
        if (lot := self.uplink.reached()) is not None:
            self._reach(lot)

    def _serve(self, feed: Feed) -> bool:
        """Say what of it was acknowledged, have it filled, and ask for more. Returns whether what
        had waited for room, or for what time it is, has come in."""
        core, head = self.link.core, feed.position.ring.head
        if feed.position not in self.listening or not core.is_ready:
            return False
        self._burials.settle(feed)
        for messages in feed.acked():
            core.write(jetstream_codec.encode_acks(messages))
            self._trimming.acked.add(feed.cls.class_id)
            feed.said_last = messages.reply(-1)
        now = trio.current_time()
        if said := feed.fill() + feed.awaited.late(now, is_owed=feed.asked > 0):
            core.write(said)
        if feed.cls.clock.take_wanted() and self._nursery is not None:
            asked = feed.cls, self._broker.clock, self._read_clock, self._settle
            self._jobs.run_concurrently(feed.cls.class_id, partial(self.stored.ask_time, *asked))
        may_ask = now >= feed.rests_until and not (self._is_closing or feed.is_renewing)
        if may_ask and (count := feed.wanted()):
            feed.asked += count
            feed.heard_at = now
            stream = self.options.names.stream_name(feed.cls.class_id)
            consumer = self.listening.consumers[feed.position]
            core.publish(
                f"{jetstream_codec.API}CONSUMER.MSG.NEXT.{stream}.{consumer}",
                jetstream_codec.pull_request(
                    batch=count,
                    expires_seconds=FETCH_SECONDS,
                    idle_seconds=ALIVE_SECONDS,
                    max_bytes=FETCH_BYTES + self.link.payload_bytes_max,
                ),
                reply=self.listening.inbox(feed.position),
            )
        if feed.position.ring.head > head:
            self._broker.subscription_manager.notify_position(feed.position)
        return feed.position.ring.head > head

    def _buried(self, position: BrokerSubscription, ranges: Ranges, class_id: int) -> None:
        if (feed := self.feeds.get(position)) is not None:
            self._burials.add(feed, ranges, class_id)

    def _beat(self) -> None:
        """What time brings: what is late is published or asked for again, what is here is said to
        be in work."""
        now = trio.current_time()
        ready = self.link.core.is_ready
        works = ready and now - self._worked_at >= self.options.ack_wait_seconds / _WORK_PART
        if works:
            self._worked_at = now
        for feed in self.feeds.values():
            self._touched[feed] = None
            if feed.asked and now - feed.heard_at > _SILENT_SECONDS:
                feed.asked = 0
            if works:
                for messages in feed.left():
                    self.link.core.write(
                        jetstream_codec.encode_acks(messages, jetstream_codec.WORKING)
                    )
        if ready:
            self._trimming.beat(now)
        self.refusals.beat(now)
        self._settle()
        self._hear_refusing()  # A stream that does not answer is heard of by nothing else.

    # What comes ----------------------------------------------------------------------------------

    def _handle(self, event: NatsConnectionEvent) -> None:
        now = self._read_clock()
        match event:
            case RequestReplies():
                self._heard(self.uplink.take(event, now))
            case ReceivedMessages():
                for sid, some in event.split_by_sid().items():
                    self._take(sid, some)
                self._settle()
            case ServerReady():
                self.uplink.begin_anew(now)
                self._worked_at = 0.0
                for feed in self.feeds.values():
                    feed.asked = 0
                    self._touched[feed] = None
                    if feed.is_broken:
                        self._renew(feed)
                self._naming.begin_anew()
                if self._nursery is not None:
                    self._settle()
            case NatsConnectionLost():
                for feed in self.feeds.values():
                    feed.asked = 0
                    if feed.sole is not None:  # What was on its way to here is lost.
                        feed.sole.is_broken = True

    def _heard(self, lot: int | None) -> None:
        """The uplink was told something; lots up to this one have reached the cluster."""
        for class_id in self.uplink.take_homeless():
            self.positions.doubt(class_id)
            self._do(class_id, partial(self._open_stream, class_id))
        reached_in = self.uplink.take_reached_in()
        for class_id, last in reached_in.items():
            self._commit_log.mark_class_durable(class_id, last)
        self._hear_refusing()
        if lot is not None or reached_in:
            self._reach(self._commit_log.durable_position if lot is None else lot)
        else:
            self.hand_over()

    def _hear_refusing(self) -> None:
        if refusing := self.uplink.take_refusing():
            self.refusals.hear(refusing, trio.current_time())
            self._shut = shut(self._broker.store, self.uplink.full, self._shut)
            self._has_reached()  # Who waits for what is stored looks what else there is.

    def _reach(self, lot: int) -> None:
        self._broker.mark_durable(lot)
        self._shut = shut(self._broker.store, self.uplink.full, self._shut)
        self._has_reached()
        self._touched |= dict.fromkeys(self._burials.go_on())
        self._settle()

    def _has_reached(self) -> None:
        self._reached.set()
        self._reached = trio.Event()

    def _take(self, sid: int, messages: ReceivedMessages) -> None:
        feed = self.listening.feed(sid)
        if feed is not None:
            self._feed(feed, messages)
        elif sid == self._chain_sid:
            self._heard(self.uplink.hear(messages, trio.current_time()))
        elif not (self.listening.answer(sid, messages) or self._naming.take(sid, messages)):
            # It was on its way when its position ended.
            found = messages.pick(jetstream_codec.parse_deliveries(messages).good)
            self.link.core.write(jetstream_codec.encode_acks_in_order(found, jetstream_codec.NAK))

    def _feed(self, feed: Feed, messages: ReceivedMessages) -> None:
        """What a consumer has sent: messages, and what it says of the request."""
        feed.heard_at = trio.current_time()
        told = (messages.payloads == messages.ends) & (messages.bodies < messages.payloads)
        if told.any():
            for row in told.nonzero()[0].tolist():
                code, words = jetstream_codec.parse_status(messages.headers(row))
                if not code:
                    told[row] = False
                elif code >= 400:
                    feed.end_asked(code, words, messages.headers(row))
                    if jetstream_codec.is_consumer_missing(code, words):
                        self._renew(feed)
                else:  # It is there; with a reply, it asks whether we are.
                    reply = messages.reply(row)
                    if reply:
                        self.link.core.publish(reply.decode("latin-1"), b"")
            messages = messages.pick(~told)
        if messages.count:
            if said := feed.take(messages):
                self.link.core.write(said)
            if feed.is_broken:
                self._renew(feed)
            self._broker.subscription_manager.notify_position(feed.position)
        self._touched[feed] = None

    # Positions -----------------------------------------------------------------------------------

    def _begin(
        self, cls: RemoteClass, position: BrokerSubscription, start: str | Start, seeks: bool
    ) -> None:
        cls.touched = self._touch
        feed = self.feeds[position] = Feed(cls, position, self._broker.store)
        feed.hold = self.uplink.hold(cls.class_id)
        find = partial(self.positions.open, cls, position, start, seeks=seeks)
        if start == "earliest" or isinstance(start, Start):  # Not what everybody has had.
            self._do(cls.class_id, partial(self._trimming.trim_all, cls.class_id), feed)
        self._do(cls.class_id, partial(self._open_feed, cls, position, find, feed.hold), feed)

    def _is_used(self, cls: RemoteClass, name: str) -> bool:
        there = [position for position, feed in self.feeds.items() if feed.cls is cls]
        names = {consumer_name(position.durable, position.group) for position in there}
        return name in names or name in {self.listening.consumers.get(each) for each in there}

    async def _when_buried(self, mark: Mark) -> None:
        while not self._burials.is_stored(mark):
            await self._reached.wait()

    def _touch(self, cls: RemoteClass) -> None:
        found = map(self.feeds.get, cls.subscriptions)
        self._touched |= dict.fromkeys(feed for feed in found if feed is not None)

    async def _open_stream(self, class_id: int) -> None:
        """Have one for what waits. If there is none, the next turn asks again; others are asked for
        what they want to know in between."""
        try:
            await self.link.wait_ready()
            await self.positions.open_stream(class_id, self._broker.classes[class_id].name)
        except (BusConnectionError, JetStreamError) as error:
            self.refusals.note(class_id, str(error), trio.current_time())
            await trio.sleep(_PAUSE_SECONDS)
            return
        self.uplink.open_classes.add(class_id)
        self._settle()

    async def _open_feed(
        self,
        cls: RemoteClass,
        position: BrokerSubscription,
        find: Find,
        hold: int | None,
        tries: int = 0,
    ) -> None:
        """Find or make the consumer of a position, and have it feed it. What is published behind it
        waits for one try: nobody is held up for as long as the cluster refuses."""
        is_done = True
        try:
            is_done = await self._find_consumer(cls, position, find, tries)
        finally:  # Whatever goes wrong.
            if hold is not None and (is_done or self.link.is_ready):
                self.uplink.let_go(cls.class_id, hold)
                hold = None
        if not is_done:
            again = partial(self._open_feed, cls, position, find, hold, tries + 1)
            self._jobs.enqueue_later(cls.class_id, again, _PAUSE_SECONDS)
        self._settle()

    async def _find_consumer(
        self, cls: RemoteClass, position: BrokerSubscription, find: Find, tries: int
    ) -> bool:
        """Returns False where that is to be tried again."""
        if position not in self.feeds:
            await self._close_unsure(cls, position)
            return True
        try:
            await self.link.wait_ready()
            found = await find()
        except RemoteProtocolError as error:
            self._refuse(cls, position, error)
            return True
        except ConsumerRefusedError as error:
            self._refuse(cls, position, RemoteProtocolError(Reason.BAD_REQUEST, str(error)))
            return True
        except (BusConnectionError, JetStreamError) as error:
            log_retry(cls.class_id, error, tries)
            return False
        except Exception:
            log.exception("class %d: a subscription could not be begun", cls.class_id)
            why = "a fault of the door's own: its log says which"
            self._refuse(cls, position, RemoteProtocolError(Reason.BAD_REQUEST, why))
            return True
        if position not in self.feeds:  # It has gone meanwhile.
            await self._closing.close(Gone(cls, position, found.name))
            return True
        self.uplink.open_classes.add(cls.class_id)
        self._trimming.acked.add(cls.class_id)  # It may have moved.
        feed = self.feeds[position]
        feed.begin(found)
        feed.born = self.positions.born(cls.class_id)
        self.listening.begin(feed, found.name)
        cls.begun[position] = found.was_there
        feed.is_open = True
        let_answer(self._broker, askers_of(self._broker, position))
        self._touched[feed] = None
        return True

    async def _close_unsure(self, cls: RemoteClass, position: BrokerSubscription) -> None:
        """Nobody has this position any more. Its consumer may be there though nobody was told."""
        if name := self.positions.take_unsure(position):
            await self._closing.close(Gone(cls, position, name))

    def _renew(self, feed: Feed) -> None:
        """Something of a sole consumer was lost, or a consumer may be gone: have what follows from
        another one."""
        if not feed.is_renewing:
            feed.is_renewing = True
            self._do(feed.cls.class_id, partial(self._renew_consumer, feed))

    async def _renew_consumer(self, feed: Feed, tries: int = 0) -> None:
        cls = feed.cls
        if not await self._find_another(feed, tries):
            again = partial(self._renew_consumer, feed, tries + 1)
            self._jobs.enqueue_later(cls.class_id, again, _PAUSE_SECONDS)
            return
        feed.is_renewing = False
        self._settle()

    async def _find_another(self, feed: Feed, tries: int) -> bool:
        """Returns False where that is to be tried again."""
        cls, position = feed.cls, feed.position
        try:
            await self.link.wait_ready()
            if position not in self.listening:
                await self._close_unsure(cls, position)
                return True
            name = self.listening.consumers[position]
            found = await self.positions.renew(cls, position, name, feed)
        except Exception as error:
            log_retry(cls.class_id, error, tries)
            return False
        feed.asked = 0
        self._touched[feed] = None
        if found is None:  # It is there, and was only silent.
            await trio.sleep(_PAUSE_SECONDS)
        elif position not in self.listening:  # It has gone meanwhile.
            await self._closing.close(Gone(cls, position, found.name))
        else:
            feed.begin_anew(found)
            self.listening.begin(feed, found.name)
        return True

    def _refuse(
        self, cls: RemoteClass, position: BrokerSubscription, error: RemoteProtocolError
    ) -> None:
        """The cluster has another position of this name: whoever asked is told."""
        askers = askers_of(self._broker, position)
        self._broker.revoke_position(position, error)
        let_answer(self._broker, askers)
        self._settle()

    def _end(self, cls: RemoteClass, position: BrokerSubscription, forget: bool) -> None:
        """Give back what is here; whoever comes for it next, at whichever door, goes on."""
        feed = self.feeds.pop(position, None)
        if feed is None:
            return
        self._touched.pop(feed, None)
        if position not in self.listening:
            if self._jobs.cancel_queued(cls.class_id, feed):  # Else they would pile up in an outage.
                self.uplink.let_go(cls.class_id, feed.hold)
            return
        last: tuple[str, bytes] | None = None
        self._burials.settle(feed)
        self._trimming.acked.add(cls.class_id)  # It may be what others are done with.
        for messages in feed.acked():
            self.link.core.write(jetstream_codec.encode_acks(messages))
            last = messages.reply(-1).decode("latin-1"), jetstream_codec.ACK
        tick_seconds = self._broker.settings.tick_seconds
        pauses = position.build_handover().remaining_delays(self._broker.clock, tick_seconds)
        owed = feed.owed(pauses) if feed.sole is not None else None
        buried = self._burials.end(feed)
        name = self.listening.end(feed)
        leaving = Leaving(feed.given_back(pauses), feed.known) if feed.sole is None else None
        gone = Gone(cls, position, name, forget, last, leaving, owed, buried)
        self._closing.end(gone)
        self.link.flush()

    # What lies in streams -----------------------------------------------------------------------

    def _ask(
        self,
        cls: RemoteClass,
        find: Callable[[StoredMessages], Awaitable[RemoteFetchOutcome | RemotePurgeOutcome]],
        tell: Callable[[Any], None],
    ) -> None:
        """Have something found out about a class's stream, and told."""

        async def job() -> None:
            tell(await found_of(self.stored, cls, find, self._has_stored))
            self._settle()

        self._do(cls.class_id, job)

    def _count(self, class_id: int, tell: Callable[[RemoteCountOutcome], None]) -> None:
        asked = class_id, tell, lambda _: self._settle()
        self._jobs.run_concurrently(class_id, partial(self._counting.count, *asked))

    async def _has_stored(self, cls: RemoteClass) -> None:
        """Wait until what was accepted and has room is in the stream, and what is done with is not.
        Raises BusConnectionError and JetStreamError."""
        await self.positions.open_stream(cls.class_id, cls.name)
        self.uplink.open_classes.add(cls.class_id)
        self._settle()
        head = cls.ring.head
        while self._commit_log.durable_head(cls.class_id, cls.ring.head) < head:
            refusal = self.uplink.refusal(cls.class_id)
            if refusal is not None and refusal.code in api.STORAGE_FULL:
                break
            await self._reached.wait()
        await self._trimming.trim_all(cls.class_id)

    def _coming(
        self, cls: RemoteClass, position: BrokerSubscription, tell: Callable[[], None]
    ) -> bool:
        feed, consumer = self.feeds.get(position), self.listening.consumers.get(position)
        if feed is None or consumer is None or feed.is_busy or self._nursery is None:
            return True
        asked = self.link, self.options.names, consumer, feed, tell, self._settle
        self._jobs.run_concurrently(cls.class_id, partial(when_all_has_come, *asked))
        return False

    def _struck(self, cls: RemoteClass, first: int, last: int) -> None:
        """Messages first..last-1 are purged: nobody here is to have them either."""
        for feed in [feed for feed in self.feeds.values() if feed.cls is cls]:
            feed.strike(first + 1, last + 1)
            self._broker.subscription_manager.notify_position(feed.position)
            self._touched[feed] = None
        self._broker.store.trim_class(cls)

    # Ending --------------------------------------------------------------------------------------

    async def finish(self) -> None:
        """End all sessions, give back what is here, and wait until all that was accepted is in the
        cluster. The caller bounds how long that may take."""
        self._is_closing = True
        for session in list(self._broker.sessions.values()):
            self._broker.close_session(session)
        self._settle()
        while not (self.uplink.is_empty and self._commit_log.is_empty):
            await self._reached.wait()
        while not self._jobs.is_empty and self.link.is_ready:
            await self._reached.wait()
        with contextlib.suppress(BusConnectionError):
            # What was said before is there when this is answered.
            await self.link.request(self.options.names.server_subject(self.door))
