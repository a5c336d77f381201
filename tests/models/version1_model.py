"""Model of a bus with version 1 peers, compared with the real one after every step.

The model is given the frames that peers send, and inspects the bytes that they receive. Only two
facts are taken from the bus: the order in which messages of several publishers were stored, and the
messages that a full-class policy dropped. Everything else is predicted and compared. Sequences are
ints in dicts, and every message is identified by a unique payload.

    sent by peer ─► unstored ─► stored ─► delivered ─► acknowledged
                       │           └──────────┴──► dropped, counted
                       └─► dropped, counted
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

from simplebus.core.broker.broker import FullPolicy, Settings
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import RECEIVE_BYTES, RING_IDLE_TICKS, Limits
from tests.behaviour.wire_peer import BrokerHarness, ack, connect, heartbeat, publish, subscribe
from tests.models.version1_state import (
    FRAME_BYTES,
    AckMeaning,
    ConnectMeaning,
    InFlightMessage,
    Meaning,
    ModelClass,
    ModelPeer,
    ModelSubscriber,
    PublishMeaning,
    SubscribeMeaning,
)
from tests.support.oracles import ID_COUNT, AckOracle, group_ids, parse_frame, split_frames
from tests.support.strategies import CONNECT, MESSAGE


class Version1Model:
    """The bus, its peers, and the model of both."""

    def __init__(
        self,
        *,
        policy: FullPolicy = FullPolicy.BLOCK,
        ack_timeout: int = 6,
        class_messages: int = 1000,
        total_bytes: int = 1 << 22,
        first_sequence: int = 0,
        trusting: bool = False,
    ) -> None:
        """Create the bus. `trusting` disables the broker's own checks."""
        self.policy = policy
        self.ack_timeout = ack_timeout
        self.first_sequence = first_sequence
        limits = Limits(
            frame_bytes=FRAME_BYTES,
            class_messages=class_messages,
            class_bytes=1 << 18,
            total_bytes=total_bytes,
            pending_bytes=FRAME_BYTES + RECEIVE_BYTES,
            hello_seconds=1e9,
            frame_seconds=1e9,
            stall_seconds=1e9,
        )
        settings = Settings(limits=limits, ack_timeout=ack_timeout, full_policy=policy)
        self.bus = BrokerHarness(settings)
        self.broker = self.bus.broker
        self.bus.skips_checks = trusting
        self.tick_number = 0
        self.classes: dict[int, ModelClass] = {}
        self.peers: list[ModelPeer] = []
        """Open peers."""
        self.closed_peers: list[ModelPeer] = []
        """Closed peers whose messages still wait for space."""
        self.refused: Counter[Reason] = Counter()
        self.writable: set[int] = set()
        """Sessions that the broker reported as writable and that still have output."""
        self.blocked: set[int] = set()
        """Sessions whose messages waited for space at the last check."""
        self.messages = 0
        self.checking = True

    # Actions -------------------------------------------------------------------------------------

    def open(self) -> ModelPeer:
        model_peer = ModelPeer(self.bus.peer())
        self.peers.append(model_peer)
        self.check()
        return model_peer

    def close(self, model_peer: ModelPeer) -> None:
        model_peer.peer.disconnect()
        self.peers.remove(model_peer)
        self.writable.discard(model_peer.session_id)
        self.closed_peers.append(model_peer)
        for model_class in self.classes.values():
            subscriber = model_class.subscribers.pop(model_peer.session_id, None)
            if subscriber is not None and not model_class.subscribers:
                model_class.unacked_backlog, model_class.cursor = (
                    subscriber.flights,
                    subscriber.cursor,
                )
                for sequence, flight in model_class.unacked_backlog.items():
                    if flight.is_free:  # It was not redelivered.
                        model_class.unacked_backlog[sequence] = subscriber.inherited[sequence]
        self.observe()

    def connect(self, model_peer: ModelPeer, *class_ids: int) -> None:
        self.send_frames(model_peer)
        self.send_frames(model_peer, (connect(*class_ids), ConnectMeaning(class_ids)))

    def subscribe(self, model_peer: ModelPeer, class_id: int) -> None:
        self.send_frames(model_peer)
        self.send_frames(model_peer, (subscribe(class_id), SubscribeMeaning(class_id)))

    def publish(self, model_peer: ModelPeer, *runs: tuple[int, int, int], hold: int = 0) -> None:
        """Publish runs of (class id, count, size), one after the other."""
        frames = [self.message(class_id, size) for class_id, n, size in runs for _ in range(n)]
        self.send_frames(model_peer, *frames, hold=hold)

    def send_mixed(
        self, model_peer: ModelPeer, count: int, random: Random, *, hold: int = 0
    ) -> None:
        """Send messages of all classes, heartbeats and acks alternately, as one read."""
        class_ids = list(self.classes)
        frames: list[tuple[bytes, Meaning]] = []
        for _ in range(count):
            frames.append(self.message(random.choice(class_ids), random.randrange(30)))
            if random.random() < 0.2:
                frames.append((heartbeat(), None))
        if self.policy is not FullPolicy.DROP_OLDEST:
            acks = [each for c in class_ids for each in self.encode_acks(model_peer, c, random)]
            for each in acks:
                frames.insert(random.randrange(len(frames) + 1), each)
        self.send_frames(model_peer, *frames, hold=hold)

    def ack(self, model_peer: ModelPeer, class_id: int, random: Random) -> None:
        """Acknowledge some of the received messages, in any order."""
        self.send_frames(model_peer)
        self.send_frames(model_peer, *self.encode_acks(model_peer, class_id, random))

    def ack_invalid_ids(
        self, model_peer: ModelPeer, class_id: int, *ranges: tuple[int, int]
    ) -> None:
        """Acknowledge ids at these distances from the head."""
        model_class = self.classes.get(class_id)
        head = model_class.head if model_class else 0
        frames = []
        for offset, count in ranges:
            first = (head + offset) % ID_COUNT
            frames.append(self.ack_frame(class_id, first, min(first + count, ID_COUNT)))
        self.send_frames(model_peer)
        self.send_frames(model_peer, *frames)

    def ack_everything(self, model_peer: ModelPeer) -> None:
        self.send_frames(model_peer)
        for class_id, model_class in self.classes.items():
            subscriber = model_class.subscribers.get(model_peer.session_id)
            if subscriber is not None:
                ids = [sequence % ID_COUNT for sequence in sorted(subscriber.flights)]
                self.send_frames(
                    model_peer, *(self.ack_frame(class_id, a, b) for a, b in group_ids(ids))
                )

    def send_invalid_frame(self, model_peer: ModelPeer, offence: bytes, reason: Reason) -> None:
        """Send a frame that ends the session."""
        self.send_frames(model_peer)
        if model_peer in self.peers:
            assert model_peer.peer.send_refused(offence) is reason
            self.close(model_peer)

    def read_bytes(self, model_peer: ModelPeer, max_bytes: int) -> None:
        """Receive up to this many bytes.

        For the bus, a frame counts as sent when its first byte was sent or the outbox has copied
        it, even if the peer closes before it receives the rest. The model handles the frame then,
        and checks that its bytes are received next.
        """
        outbox = model_peer.peer.session.outbox
        data = model_peer.peer.read_bytes(max_bytes)
        count = min(len(model_peer.unread_bytes), len(data))
        assert data[:count] == model_peer.unread_bytes[:count], "unread bytes were not sent first"
        model_peer.unread_bytes = model_peer.unread_bytes[count:]
        if not model_peer.unread_bytes:
            if outbox.has_bytes:
                model_peer.unread_bytes = bytes(outbox.peek(self.tick_number))
            frames, partial = split_frames(data[count:] + model_peer.unread_bytes)
            assert partial == b"", "a partial frame without its rest"
            for frame in frames:
                self.receive_frame(model_peer, frame)
        if len(data) < max_bytes:
            self.writable.discard(model_peer.session_id)
            self.check_all_received(model_peer)
        self.check()

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.tick_number += 1
            for model_peer in self.peers:
                self.postpone_ack_timeouts(model_peer)
            assert self.broker.tick() == []
            self.observe()

    def postpone_ack_timeouts(self, model_peer: ModelPeer) -> None:
        """Stop the ack timeouts of a peer that has read nothing for two ticks."""
        stalled_ticks = model_peer.peer.session.send_blocked_ticks
        if stalled_ticks < 2:
            return
        ticks = 3 if stalled_ticks == 2 else 1
        for model_class in self.classes.values():
            if subscriber := model_class.subscribers.get(model_peer.session_id):
                for flight in subscriber.flights.values():
                    flight.postpone(ticks, self.tick_number, self.ack_timeout)

    def settle(self) -> None:
        """Receive and acknowledge everything with all peers, until nothing is left and memory is
        freed.
        """
        for model_peer in self.peers:
            self.send_frames(model_peer)
        idle_rounds = 0
        pending = self.pending_amounts()
        while pending:
            unserved = [c for c, model_class in self.classes.items() if not model_class.subscribers]
            if unserved:
                collector = self.open()
                for class_id in unserved:
                    self.subscribe(collector, class_id)
            with self.unchecked():
                for model_peer in list(self.peers):
                    self.read_bytes(model_peer, 1 << 40)
                    self.ack_everything(model_peer)
            earlier, pending = pending, self.pending_amounts()
            idle_rounds = idle_rounds + 1 if pending == earlier else 0
            if idle_rounds:
                self.tick()  # Idle classes return memory after some ticks.
            assert idle_rounds < 3 * RING_IDLE_TICKS, "no progress"
        self.tick(2 * RING_IDLE_TICKS)
        statistics = self.broker.statistics()
        memory_bytes = statistics.memory_bytes + 1
        while statistics.memory_bytes < memory_bytes:  # A tick frees a few segments.
            memory_bytes = statistics.memory_bytes
            self.tick()
            statistics = self.broker.statistics()
        assert statistics.memory_bytes == statistics.parked_bytes == 0
        for cls in statistics.classes:
            assert cls.in_flight == cls.ring.message_count == cls.blocked_sessions == 0

    def pending_amounts(self) -> int:
        """Return the bytes that are not stored and the messages that are not acknowledged."""
        waiting_bytes = sum(
            model_peer.unstored_bytes for model_peer in (*self.peers, *self.closed_peers)
        )
        return waiting_bytes + sum(
            model_class.head - model_class.floor for model_class in self.classes.values()
        )

    # Sent frames ---------------------------------------------------------------------------------

    def message(self, class_id: int, size: int) -> tuple[bytes, Meaning]:
        self.messages += 1
        payload = (b"%d." % self.messages).ljust(size, b"x")
        return publish(class_id, payload), PublishMeaning(class_id, payload)

    def ack_frame(self, class_id: int, first: int, last: int) -> tuple[bytes, Meaning]:
        return ack(class_id, first, last), AckMeaning(class_id, first, last)

    def encode_acks(
        self, model_peer: ModelPeer, class_id: int, random: Random
    ) -> list[tuple[bytes, Meaning]]:
        """Encode acks of some received messages: ranges or single ones, in any order."""
        model_class = self.classes.get(class_id)
        subscriber = model_class.subscribers.get(model_peer.session_id) if model_class else None
        if subscriber is None:
            return []
        sent = sorted(subscriber.flights)
        first = random.randrange(len(sent) + 1) if random.random() < 0.5 else 0
        sent = sent[first : first + random.choice([1, 3, 60, 1000])]
        if random.random() < 0.3:
            sent = random.sample(sent, len(sent))
        ranges = group_ids([sequence % ID_COUNT for sequence in sent])
        if random.random() < 0.3:
            ranges = [(i, i + 1) for a, b in ranges for i in range(a, b)]
        if random.random() < 0.3:
            random.shuffle(ranges)
        return [self.ack_frame(class_id, a, b) for a, b in ranges]

    def send_frames(
        self, model_peer: ModelPeer, *frames: tuple[bytes, Meaning], hold: int = 0
    ) -> None:
        """Queue frames behind the unsent ones, and send all but the last `hold` bytes."""
        model_peer.unsent += frames
        data = b"".join(frame for frame, _ in model_peer.unsent)[model_peer.sent_prefix_bytes :]
        data = data[: max(0, len(data) - hold)]
        if not data or model_peer not in self.peers:  # An earlier frame may have ended the session.
            return
        receiver = model_peer.peer.session.receiver
        earlier = receiver.frame_count
        refused: RemoteProtocolError | None = None
        try:
            model_peer.peer.send(data)
        except RemoteProtocolError as error:
            refused = error
        count = receiver.frame_count - earlier
        sendable, model_peer.unsent = model_peer.unsent[:count], model_peer.unsent[count:]
        model_peer.sent_prefix_bytes = (
            model_peer.sent_prefix_bytes + len(data) - sum(len(frame) for frame, _ in sendable)
        )
        for _, meaning in sendable:
            self.apply_meaning(model_peer, meaning)
        if refused is not None:
            assert refused.reason is Reason.PENDING_LIMIT
            assert model_peer.peer.session.pending_bytes > self.broker.settings.limits.pending_bytes
            self.close(model_peer)
        else:
            assert not model_peer.unsent or model_peer.sent_prefix_bytes < len(
                model_peer.unsent[0][0]
            )
            self.observe()

    def apply_meaning(self, model_peer: ModelPeer, meaning: Meaning) -> None:
        match meaning:
            case PublishMeaning():
                model_peer.unstored[meaning.class_id].append(meaning.payload)
            case AckMeaning(class_id, first, last):
                self.apply_ack(model_peer, class_id, first, last)
            case ConnectMeaning(class_ids):
                model_peer.replies_due += 1
                for class_id in class_ids:
                    self.apply_class_name(class_id)
            case SubscribeMeaning(class_id):
                self.apply_subscribe(model_peer, class_id)

    def apply_class_name(self, class_id: int) -> None:
        if class_id in self.classes:
            return
        first = self.first_sequence
        cls = self.broker.classes[class_id]
        if first:
            # Start at a high sequence. Early subscriptions exist already.
            cls.ring.floor = cls.ring.head = first
            cls.backlog_window.skip_to(first)
            for subscription in cls.positions:
                subscription.window.skip_to(first)
        self.classes[class_id] = ModelClass(floor=first, head=first, cursor=first)
        for model_peer in self.peers:
            if class_id in model_peer.early_subscriptions:
                model_peer.early_subscriptions.remove(class_id)
                self.apply_subscribe(model_peer, class_id)

    def apply_subscribe(self, model_peer: ModelPeer, class_id: int) -> None:
        model_class = self.classes.get(class_id)
        if model_class is None:
            if class_id not in model_peer.early_subscriptions:
                model_peer.early_subscriptions.append(class_id)
        elif model_peer.session_id not in model_class.subscribers:
            now = self.tick_number
            if model_class.subscribers:
                subscriber = ModelSubscriber(model_class.head, model_class.head, {})
            else:
                delays = [
                    flight.due_tick(self.ack_timeout)
                    for flight in model_class.unacked_backlog.values()
                    if flight.attempts > 1
                ]
                start = max([now, *delays])
                pending = {
                    sequence: InFlightMessage(start, flight.attempts, is_free=True)
                    for sequence, flight in model_class.unacked_backlog.items()
                }
                subscriber = ModelSubscriber(
                    model_class.cursor,
                    model_class.cursor,
                    pending,
                    start_tick=start,
                    inherited=model_class.unacked_backlog,
                )
            model_class.subscribers[model_peer.session_id] = subscriber

    def apply_ack(self, model_peer: ModelPeer, class_id: int, first: int, last: int) -> None:
        model_class = self.classes.get(class_id)
        subscriber = model_class.subscribers.get(model_peer.session_id) if model_class else None
        if subscriber is None:
            self.refused[Reason.ACK_UNSUBSCRIBED] += 1
            return
        begin = AckOracle(floor=subscriber.floor).nearest_sequence(first)
        end = begin + last - first
        if end > subscriber.cursor:
            self.refused[Reason.ACK_UNSENT] += 1
        for sequence in [s for s in subscriber.flights if begin <= s < end]:
            del subscriber.flights[sequence]

    # Received frames -----------------------------------------------------------------------------

    def receive_frame(self, model_peer: ModelPeer, frame: bytes) -> None:
        """Handle a frame that was sent in this tick."""
        frame_type, class_id, message_id, timer_index, content = parse_frame(frame)
        if frame_type == CONNECT:
            assert model_peer.replies_due > 0, "reply without a request"
            model_peer.replies_due -= 1
            assert content == model_peer.session_id.to_bytes(4, "little")
            assert (class_id, message_id, timer_index) == (0, 0, 0)
            return
        assert frame_type == MESSAGE
        model_class = self.classes[class_id]
        subscriber = model_class.subscribers[model_peer.session_id]
        sequence = AckOracle(floor=subscriber.floor).nearest_sequence(message_id)
        assert model_class.payloads.get(sequence) == content, "another message's payload"
        subscriber.delivery_count += 1
        assert self.tick_number >= subscriber.start_tick, "first delivery before its delay"
        assert timer_index == self.tick_number % self.ack_timeout, "wrong timer index"
        if sequence == subscriber.cursor:
            subscriber.flights[sequence] = InFlightMessage(self.tick_number, 1)
            subscriber.cursor += 1
            return
        assert sequence < subscriber.cursor, "gap in the sequences"
        flight = subscriber.flights.get(sequence)
        assert flight is not None, "redelivered after its ack"
        assert flight.due_tick(self.ack_timeout) <= self.tick_number, "redelivered too early"
        subscriber.flights[sequence] = InFlightMessage(self.tick_number, flight.attempts + 1)

    def check_all_received(self, model_peer: ModelPeer) -> None:
        """Check the deliveries of a peer that has just received everything."""
        assert model_peer.peer.session.outbox.is_idle
        assert model_peer.unread_bytes == b""
        assert model_peer.replies_due == 0, "a Connect was not answered"
        for model_class in self.classes.values():
            subscriber = model_class.subscribers.get(model_peer.session_id)
            if subscriber is None or self.tick_number < subscriber.start_tick:
                continue
            assert subscriber.cursor == model_class.head, "a new message was not sent"
            for sequence, flight in subscriber.flights.items():
                due = flight.due_tick(self.ack_timeout)
                assert due > self.tick_number, f"{sequence} is overdue and was not redelivered"

    # Stored and dropped messages -----------------------------------------------------------------

    def observe(self) -> None:
        """Record stored and dropped messages, and compare everything."""
        for class_id, model_class in self.classes.items():
            cls = self.broker.classes[class_id]
            dropped = cls.dropped_counts - model_class.dropped
            model_class.dropped = Counter(cls.dropped_counts)
            if self.policy is FullPolicy.BLOCK:
                self.observe_blocking(class_id, model_class, dropped)
            else:
                self.observe_dropping(class_id, model_class, dropped)
            if dropped[Reason.DROP_OLDEST]:
                self.drop_oldest(model_class, cls.ring.floor, dropped[Reason.DROP_OLDEST])
            floors = [subscriber.floor for subscriber in model_class.subscribers.values()]
            model_class.floor = min(
                floors or [min(model_class.unacked_backlog, default=model_class.cursor)]
            )
        self.closed_peers = [
            model_peer for model_peer in self.closed_peers if model_peer.unstored_bytes
        ]
        self.check()

    def observe_blocking(
        self, class_id: int, model_class: ModelClass, dropped: Counter[Reason]
    ) -> None:
        """Check that the stored message is the first waiting one of some publisher."""
        ring = self.broker.classes[class_id].ring
        while model_class.head < ring.head:
            payload = parse_frame(ring.copy_frame(model_class.head))[4]
            waiting = [
                model_peer.unstored[class_id] for model_peer in (*self.peers, *self.closed_peers)
            ]
            first = [queue for queue in waiting if queue and queue[0] == payload]
            assert len(first) == 1, "the stored message is not the first one of any publisher"
            model_class.payloads[model_class.head] = first[0].popleft()
            model_class.head += 1
        lost = [
            model_peer
            for model_peer in self.closed_peers
            if not model_peer.peer.session.parked_messages
        ]
        assert dropped.total() == sum(
            len(model_peer.unstored.pop(class_id, ())) for model_peer in lost
        )
        assert set(dropped) <= {Reason.UNDELIVERED_AT_CLOSE}

    def observe_dropping(
        self, class_id: int, model_class: ModelClass, dropped: Counter[Reason]
    ) -> None:
        """Check that every message just published is stored or dropped; none waits."""
        ring = self.broker.classes[class_id].ring
        published = [m for model_peer in self.peers for m in model_peer.unstored.pop(class_id, ())]
        count = ring.head - model_class.head
        assert len(published) == count + dropped[Reason.DROP_NEWEST]
        if self.policy is FullPolicy.DROP_OLDEST:
            stored = published[:count]  # Some may be dropped again already.
        else:
            stored = [parse_frame(ring.copy_frame(model_class.head + i))[4] for i in range(count)]
            in_order = iter(published)
            assert all(payload in in_order for payload in stored), "stored out of order"
        model_class.payloads.update(enumerate(stored, model_class.head))
        model_class.head = ring.head

    def drop_oldest(self, model_class: ModelClass, floor: int, count: int) -> None:
        """Drop the unacknowledged messages below the floor."""
        unacked_below_floor = {s for s in model_class.unacked_backlog if s < floor} | set(
            range(model_class.cursor, floor)
        )
        if model_class.subscribers:
            unacked_below_floor = set()
        model_class.unacked_backlog = {
            s: flight
            for s, flight in model_class.unacked_backlog.items()
            if s not in unacked_below_floor
        }
        model_class.cursor = max(model_class.cursor, floor)
        for model_peer in self.peers:
            subscriber = model_class.subscribers.get(model_peer.session_id)
            if subscriber is None:
                continue
            lost = {s for s in subscriber.flights if s < floor}
            for sequence in lost:
                del subscriber.flights[sequence]
            lost |= set(range(subscriber.cursor, floor))
            subscriber.cursor = max(subscriber.cursor, floor)
            subscriber.dropped += len(lost)
            unacked_below_floor |= lost
        assert len(unacked_below_floor) <= count <= floor - model_class.floor

    @contextmanager
    def unchecked(self) -> Iterator[None]:
        """Compare once at the end instead of after every step, to save time."""
        trusting, self.bus.skips_checks = self.bus.skips_checks, True
        self.checking = False
        yield
        self.bus.skips_checks = trusting
        self.checking = True
        self.check()

    def check(self) -> None:
        """Compare the broker with the model."""
        if not self.checking:
            return
        self.bus.check_invariants()
        statistics = self.broker.statistics()
        assert statistics.sessions == len(self.peers)
        assert statistics.refused == self.refused
        assert statistics.parked_bytes == sum(
            t.unstored_bytes for t in (*self.peers, *self.closed_peers)
        )
        for cls in statistics.classes:
            model_class = self.classes[cls.class_id]
            assert (cls.ring.floor, cls.ring.head) == (model_class.floor, model_class.head)
            expected_floor = (
                model_class.payloads[sequence]
                for sequence in range(model_class.floor, model_class.head)
            )
            assert cls.ring.frame_bytes == sum(13 + len(payload) for payload in expected_floor)
            assert len(cls.subscriptions) == len(model_class.subscribers)
            for subscription in cls.subscriptions:
                subscriber = model_class.subscribers[subscription.session_id]
                assert subscription.floor == subscriber.floor
                assert subscription.cursor == subscriber.cursor
                assert subscription.in_flight == len(subscriber.flights)
                assert subscription.waiting == model_class.head - subscriber.cursor
                assert subscription.dropped == subscriber.dropped
                delivery_total = subscription.delivered + subscription.redelivered
                assert delivery_total == subscriber.delivery_count
        self.check_notifications()

    def check_notifications(self) -> None:
        """Check that the broker reported every writable session and every resumed session."""
        ids = {model_peer.session_id for model_peer in self.peers}
        actions = self.broker.end_turn()
        self.writable.update(actions.flush)
        assert self.writable <= ids
        for model_peer in self.peers:
            assert model_peer.peer.session.outbox.is_idle or model_peer.session_id in self.writable
        unblocked = {session.session_id for session in actions.resume}
        blocked = {model_peer.session_id for model_peer in self.peers if model_peer.unstored_bytes}
        assert not unblocked & blocked
        assert self.blocked & ids - blocked <= unblocked <= ids
        self.blocked = blocked
