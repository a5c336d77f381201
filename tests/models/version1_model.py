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
from tests.behaviour.wire_peer import (
    BrokerHarness,
    ack,
    connect,
    heartbeat,
    publish,
    subscribe,
)
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
from tests.support.oracles import (
    ID_COUNT,
    AckOracle,
    group_ids,
    parse_frame,
    split_frames,
)
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
        """Those that are open."""
        self.closed_peers: list[ModelPeer] = []
        """Those that left messages behind which wait for room."""
        self.refused: Counter[Reason] = Counter()
        self.woken: set[int] = set()
        """Sessions that a driver was told to send to, and has not sent everything."""
        self.blocked: set[int] = set()
        """Sessions whose messages wait for room, when last looked at."""
        self.messages = 0
        self.checking = True

    # What happens --------------------------------------------------------------------------------

    def open(self) -> ModelPeer:
        talker = ModelPeer(self.bus.peer())
        self.peers.append(talker)
        self.check()
        return talker

    def close(self, talker: ModelPeer) -> None:
        talker.peer.disconnect()
        self.peers.remove(talker)
        self.woken.discard(talker.session_id)
        self.closed_peers.append(talker)
        for kind in self.classes.values():
            subscriber = kind.subscribers.pop(talker.session_id, None)
            if subscriber is not None and not kind.subscribers:
                kind.unacked_backlog, kind.cursor = subscriber.flights, subscriber.cursor
                for sequence, flight in kind.unacked_backlog.items():
                    if flight.is_free:  # It was not sent again.
                        kind.unacked_backlog[sequence] = subscriber.former[sequence]
        self.observe()

    def connect(self, talker: ModelPeer, *class_ids: int) -> None:
        self.send_frames(talker)
        self.send_frames(talker, (connect(*class_ids), ConnectMeaning(class_ids)))

    def subscribe(self, talker: ModelPeer, class_id: int) -> None:
        self.send_frames(talker)
        self.send_frames(talker, (subscribe(class_id), SubscribeMeaning(class_id)))

    def publish(self, talker: ModelPeer, *runs: tuple[int, int, int], hold: int = 0) -> None:
        """Publish runs of (class id, count, size), one after the other."""
        said = [self.message(class_id, size) for class_id, n, size in runs for _ in range(n)]
        self.send_frames(talker, *said, hold=hold)

    def send_mixed(self, talker: ModelPeer, count: int, random: Random, *, hold: int = 0) -> None:
        """Send messages of all classes, heartbeats and acks alternately, as one read."""
        class_ids = list(self.classes)
        said: list[tuple[bytes, Meaning]] = []
        for _ in range(count):
            said.append(self.message(random.choice(class_ids), random.randrange(30)))
            if random.random() < 0.2:
                said.append((heartbeat(), None))
        if self.policy is not FullPolicy.DROP_OLDEST:
            acks = [each for c in class_ids for each in self.encode_acks(talker, c, random)]
            for each in acks:
                said.insert(random.randrange(len(said) + 1), each)
        self.send_frames(talker, *said, hold=hold)

    def ack(self, talker: ModelPeer, class_id: int, random: Random) -> None:
        """Acknowledge some of the received messages, in any order."""
        self.send_frames(talker)
        self.send_frames(talker, *self.encode_acks(talker, class_id, random))

    def ack_invalid_ids(self, talker: ModelPeer, class_id: int, *ranges: tuple[int, int]) -> None:
        """Acknowledge ids at these distances from the head."""
        kind = self.classes.get(class_id)
        head = kind.head if kind else 0
        said = []
        for at, count in ranges:
            first = (head + at) % ID_COUNT
            said.append(self.ack_frame(class_id, first, min(first + count, ID_COUNT)))
        self.send_frames(talker)
        self.send_frames(talker, *said)

    def ack_everything(self, talker: ModelPeer) -> None:
        self.send_frames(talker)
        for class_id, kind in self.classes.items():
            subscriber = kind.subscribers.get(talker.session_id)
            if subscriber is not None:
                ids = [sequence % ID_COUNT for sequence in sorted(subscriber.flights)]
                self.send_frames(
                    talker, *(self.ack_frame(class_id, a, b) for a, b in group_ids(ids))
                )

    def send_invalid_frame(self, talker: ModelPeer, offence: bytes, reason: Reason) -> None:
        """Send a frame that ends the session."""
        self.send_frames(talker)
        if talker in self.peers:
            assert talker.peer.send_refused(offence) is reason
            self.close(talker)

    def read_bytes(self, talker: ModelPeer, most: int) -> None:
        """Receive up to this many bytes."""
        data = talker.peer.read_bytes(most)
        at = min(len(talker.rest), len(data))
        assert talker.rest[:at] == data[:at], "a cut frame did not go on where it was cut"
        talker.rest = talker.rest[at:]
        frames, begun = split_frames(data[at:])
        for frame in frames:
            self.receive_frame(talker, frame, talker.received_bytes + at)
            at += len(frame)
        if begun:
            # The frame counts as sent; the bus shows its rest before anything else.
            shown = begun + bytes(talker.peer.session.outbox.peek(self.tick_number))
            frame = split_frames(shown)[0][0]
            self.receive_frame(talker, frame, talker.received_bytes + at)
            talker.rest = frame[len(begun) :]
        talker.received_bytes += len(data)
        if len(data) < most:
            self.woken.discard(talker.session_id)
            self.check_all_received(talker)
        self.check()

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.tick_number += 1
            assert self.broker.tick() == []
            self.observe()

    def settle(self) -> None:
        """Receive and acknowledge everything with all peers, until nothing is left and memory is
        freed.
        """
        for talker in self.peers:
            self.send_frames(talker)
        idle_rounds = 0
        left = self.pending_amounts()
        while left:
            unserved = [c for c, kind in self.classes.items() if not kind.subscribers]
            if unserved:
                collector = self.open()
                for class_id in unserved:
                    self.subscribe(collector, class_id)
            with self.unchecked():
                for talker in list(self.peers):
                    self.read_bytes(talker, 1 << 40)
                    self.ack_everything(talker)
            before, left = left, self.pending_amounts()
            idle_rounds = idle_rounds + 1 if left == before else 0
            if idle_rounds:
                self.tick()  # Memory that other classes have too much is given back after a while.
            assert idle_rounds < 3 * RING_IDLE_TICKS, "something is stuck"
        self.tick(2 * RING_IDLE_TICKS)
        statistics = self.broker.statistics()
        assert statistics.memory_bytes == statistics.parked_bytes == 0
        for cls in statistics.classes:
            assert cls.in_flight == cls.ring.message_count == cls.blocked_sessions == 0

    def pending_amounts(self) -> int:
        """Return the bytes that are not stored and the messages that are not acknowledged."""
        waits = sum(talker.unstored_bytes for talker in (*self.peers, *self.closed_peers))
        return waits + sum(kind.head - kind.floor for kind in self.classes.values())

    # What is said --------------------------------------------------------------------------------

    def message(self, class_id: int, size: int) -> tuple[bytes, Meaning]:
        self.messages += 1
        payload = (b"%d." % self.messages).ljust(size, b"x")
        return publish(class_id, payload), PublishMeaning(class_id, payload)

    def ack_frame(self, class_id: int, first: int, last: int) -> tuple[bytes, Meaning]:
        return ack(class_id, first, last), AckMeaning(class_id, first, last)

    def encode_acks(
        self, talker: ModelPeer, class_id: int, random: Random
    ) -> list[tuple[bytes, Meaning]]:
        """Encode acks of some received messages: ranges or single ones, in any order."""
        kind = self.classes.get(class_id)
        subscriber = kind.subscribers.get(talker.session_id) if kind else None
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

    def send_frames(self, talker: ModelPeer, *said: tuple[bytes, Meaning], hold: int = 0) -> None:
        """Queue frames behind the unsent ones, and send all but the last `hold` bytes."""
        talker.unsent += said
        data = b"".join(frame for frame, _ in talker.unsent)[talker.begun :]
        data = data[: max(0, len(data) - hold)]
        if not data or talker not in self.peers:  # What was unsaid may have ended its session.
            return
        receiver = talker.peer.session.receiver
        before = receiver.frame_count
        refused: RemoteProtocolError | None = None
        try:
            talker.peer.send(data)
        except RemoteProtocolError as error:
            refused = error
        count = receiver.frame_count - before
        whole, talker.unsent = talker.unsent[:count], talker.unsent[count:]
        talker.begun = talker.begun + len(data) - sum(len(frame) for frame, _ in whole)
        for _, meaning in whole:
            self.apply_meaning(talker, meaning)
        if refused is not None:
            assert refused.reason is Reason.PENDING_LIMIT
            assert talker.peer.session.pending_bytes > self.broker.settings.limits.pending_bytes
            self.close(talker)
        else:
            assert not talker.unsent or talker.begun < len(talker.unsent[0][0])
            self.observe()

    def apply_meaning(self, talker: ModelPeer, meaning: Meaning) -> None:
        match meaning:
            case PublishMeaning():
                talker.unstored[meaning.class_id].append(meaning.payload)
            case AckMeaning(class_id, first, last):
                self.apply_ack(talker, class_id, first, last)
            case ConnectMeaning(class_ids):
                talker.replies_due += 1
                for class_id in class_ids:
                    self.apply_class_name(class_id)
            case SubscribeMeaning(class_id):
                self.apply_subscribe(talker, class_id)

    def apply_class_name(self, class_id: int) -> None:
        if class_id in self.classes:
            return
        first = self.first_sequence
        cls = self.broker.classes[class_id]
        if first:
            # As if so many had been there before. Early subscribers are already there.
            cls.ring.floor = cls.ring.head = first
            cls.backlog_window.skip_to(first)
            for subscription in cls.subscriptions:
                subscription.window.skip_to(first)
        self.classes[class_id] = ModelClass(floor=first, head=first, cursor=first)
        for talker in self.peers:
            if class_id in talker.early:
                talker.early.remove(class_id)
                self.apply_subscribe(talker, class_id)

    def apply_subscribe(self, talker: ModelPeer, class_id: int) -> None:
        kind = self.classes.get(class_id)
        if kind is None:
            if class_id not in talker.early:
                talker.early.append(class_id)
        elif talker.session_id not in kind.subscribers:
            now = self.tick_number
            if kind.subscribers:
                subscriber = ModelSubscriber(kind.head, kind.head, {})
            else:
                pauses = [
                    (flight.earliest + pause, flight.latest + pause)
                    for flight in kind.unacked_backlog.values()
                    if flight.attempts > 1 and (pause := flight.pause(self.ack_timeout))
                ]
                begins = (
                    max([now, *(first for first, _ in pauses)]),
                    max([now, *(last for _, last in pauses)]),
                )
                left = {
                    sequence: InFlightMessage(*begins, flight.attempts, is_free=True)
                    for sequence, flight in kind.unacked_backlog.items()
                }
                subscriber = ModelSubscriber(
                    kind.cursor, kind.cursor, left, begins=begins, former=kind.unacked_backlog
                )
            kind.subscribers[talker.session_id] = subscriber

    def apply_ack(self, talker: ModelPeer, class_id: int, first: int, last: int) -> None:
        kind = self.classes.get(class_id)
        subscriber = kind.subscribers.get(talker.session_id) if kind else None
        if subscriber is None:
            self.refused[Reason.ACK_UNSUBSCRIBED] += 1
            return
        begin = AckOracle(floor=subscriber.floor).nearest_sequence(first)
        end = begin + last - first
        if end > subscriber.cursor:
            self.refused[Reason.ACK_UNSENT] += 1
        may_come_until = talker.received_bytes + talker.peer.session.outbox.pending_bytes
        for sequence in [s for s in subscriber.flights if begin <= s < end]:
            del subscriber.flights[sequence]
            subscriber.acked[sequence] = may_come_until

    # What is heard -------------------------------------------------------------------------------

    def receive_frame(self, talker: ModelPeer, frame: bytes, at: int) -> None:
        """Handle a frame whose first byte was received at offset `at` of the peer's stream."""
        frame_type, class_id, message_id, timer_index, content = parse_frame(frame)
        if frame_type == CONNECT:
            assert talker.replies_due > 0, "a reply that nobody asked for"
            talker.replies_due -= 1
            assert content == talker.session_id.to_bytes(4, "little")
            assert (class_id, message_id, timer_index) == (0, 0, 0)
            return
        assert frame_type == MESSAGE
        kind = self.classes[class_id]
        subscriber = kind.subscribers[talker.session_id]
        sequence = AckOracle(floor=subscriber.floor).nearest_sequence(message_id)
        assert kind.payloads.get(sequence) == content, "another message's payload"
        subscriber.delivery_count += 1
        assert self.tick_number >= subscriber.begins[0], "before the pause was over"
        if sequence == subscriber.cursor:
            assert timer_index == self.tick_number % self.ack_timeout
            subscriber.flights[sequence] = InFlightMessage(self.tick_number, self.tick_number, 1)
            subscriber.cursor += 1
            return
        assert sequence < subscriber.cursor, "a gap"
        flight = subscriber.flights.get(sequence)
        if flight is None:
            may_come_until = subscriber.acked.get(sequence, 0)
            assert at < may_come_until, "sent again after it was acknowledged"
            return
        due = flight.earliest + flight.pause(self.ack_timeout)
        sent = [
            tick
            for tick in range(due, self.tick_number + 1)
            if tick % self.ack_timeout == timer_index
        ]
        assert sent, "sent again too early, or with a wrong timer index"
        subscriber.flights[sequence] = InFlightMessage(sent[0], sent[-1], flight.attempts + 1)

    def check_all_received(self, talker: ModelPeer) -> None:
        """Check the deliveries of a peer that has just received everything."""
        assert talker.peer.session.outbox.is_idle
        assert talker.rest == b""
        assert talker.replies_due == 0, "a Connect was not answered"
        for kind in self.classes.values():
            subscriber = kind.subscribers.get(talker.session_id)
            if subscriber is None or self.tick_number < subscriber.begins[1]:
                continue
            assert subscriber.cursor == kind.head, "something new was not sent"
            for sequence, flight in subscriber.flights.items():
                due = flight.latest + flight.pause(self.ack_timeout)
                assert due > self.tick_number, f"{sequence} is overdue and was not sent again"

    # What is stored and dropped ------------------------------------------------------------------

    def observe(self) -> None:
        """Record stored and dropped messages, and compare everything."""
        for class_id, kind in self.classes.items():
            cls = self.broker.classes[class_id]
            dropped = cls.dropped_counts - kind.dropped
            kind.dropped = Counter(cls.dropped_counts)
            if self.policy is FullPolicy.BLOCK:
                self.observe_blocking(class_id, kind, dropped)
            else:
                self.observe_dropping(class_id, kind, dropped)
            if dropped[Reason.DROP_OLDEST]:
                self.drop_oldest(kind, cls.ring.floor, dropped[Reason.DROP_OLDEST])
            floors = [subscriber.floor for subscriber in kind.subscribers.values()]
            kind.floor = min(floors or [min(kind.unacked_backlog, default=kind.cursor)])
        self.closed_peers = [talker for talker in self.closed_peers if talker.unstored_bytes]
        self.check()

    def observe_blocking(self, class_id: int, kind: ModelClass, dropped: Counter[Reason]) -> None:
        """Check that the stored message is the first waiting one of some publisher."""
        ring = self.broker.classes[class_id].ring
        while kind.head < ring.head:
            payload = parse_frame(ring.copy_frame(kind.head))[4]
            waiting = [talker.unstored[class_id] for talker in (*self.peers, *self.closed_peers)]
            first = [queue for queue in waiting if queue and queue[0] == payload]
            assert len(first) == 1, "stored what nobody has waiting in front"
            kind.payloads[kind.head] = first[0].popleft()
            kind.head += 1
        lost = [talker for talker in self.closed_peers if not talker.peer.session.parked_messages]
        assert dropped.total() == sum(len(talker.unstored.pop(class_id, ())) for talker in lost)
        assert set(dropped) <= {Reason.UNDELIVERED_AT_CLOSE}

    def observe_dropping(self, class_id: int, kind: ModelClass, dropped: Counter[Reason]) -> None:
        """Check that every message just published is stored or dropped; none waits."""
        ring = self.broker.classes[class_id].ring
        published = [m for talker in self.peers for m in talker.unstored.pop(class_id, ())]
        count = ring.head - kind.head
        assert len(published) == count + dropped[Reason.DROP_NEWEST]
        if self.policy is FullPolicy.DROP_OLDEST:
            stored = published[:count]  # Some may be gone again already.
        else:
            stored = [parse_frame(ring.copy_frame(kind.head + i))[4] for i in range(count)]
            in_order = iter(published)
            assert all(payload in in_order for payload in stored), "not in order"
        kind.payloads.update(enumerate(stored, kind.head))
        kind.head = ring.head

    def drop_oldest(self, kind: ModelClass, floor: int, count: int) -> None:
        """Drop the unacknowledged messages below the floor."""
        needed = {s for s in kind.unacked_backlog if s < floor} | set(range(kind.cursor, floor))
        if kind.subscribers:
            needed = set()
        kind.unacked_backlog = {
            s: flight for s, flight in kind.unacked_backlog.items() if s not in needed
        }
        kind.cursor = max(kind.cursor, floor)
        for talker in self.peers:
            subscriber = kind.subscribers.get(talker.session_id)
            if subscriber is None:
                continue
            lost = {s for s in subscriber.flights if s < floor}
            may_come_until = talker.received_bytes + talker.peer.session.outbox.pending_bytes
            for sequence in lost:
                del subscriber.flights[sequence]
                subscriber.acked[sequence] = may_come_until
            lost |= set(range(subscriber.cursor, floor))
            subscriber.cursor = max(subscriber.cursor, floor)
            subscriber.dropped += len(lost)
            needed |= lost
        assert len(needed) <= count <= floor - kind.floor

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
            kind = self.classes[cls.class_id]
            assert (cls.ring.floor, cls.ring.head) == (kind.floor, kind.head)
            kept = (kind.payloads[sequence] for sequence in range(kind.floor, kind.head))
            assert cls.ring.frame_bytes == sum(13 + len(payload) for payload in kept)
            assert len(cls.subscriptions) == len(kind.subscribers)
            for subscription in cls.subscriptions:
                subscriber = kind.subscribers[subscription.session_id]
                assert subscription.floor == subscriber.floor
                assert subscription.cursor == subscriber.cursor
                assert subscription.in_flight == len(subscriber.flights)
                assert subscription.waiting == kind.head - subscriber.cursor
                assert subscription.dropped == subscriber.dropped
                if not self.broker.sessions[subscription.session_id].outbox.pending_bytes:
                    heard = subscription.delivered + subscription.redelivered
                    assert heard == subscriber.delivery_count
        self.check_notifications()

    def check_notifications(self) -> None:
        """Check that the broker reported every writable session and every resumed session."""
        ids = {talker.session_id for talker in self.peers}
        self.woken.update(self.broker.drain_writable())
        assert self.woken <= ids
        for talker in self.peers:
            assert talker.peer.session.outbox.is_idle or talker.session_id in self.woken
        unblocked = {session.session_id for session in self.broker.drain_resumed()}
        blocked = {talker.session_id for talker in self.peers if talker.unstored_bytes}
        assert not unblocked & blocked
        assert self.blocked & ids - blocked <= unblocked <= ids
        self.blocked = blocked
