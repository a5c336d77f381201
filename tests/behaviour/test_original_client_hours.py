"""Hours of simulated original clients on one bus: late acks, crashes, and full classes.

Time is simulated and random choices come from a seed, which is in the test's name. The simulated
network buffers nothing: bytes that one side does not read stay at the other side.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable

import pytest

from simplebus.core.broker.broker import Settings
from simplebus.core.limits import TRICKLE_BYTES
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.statistics import ClassStatistics
from tests.behaviour.wire_peer import BrokerHarness, WirePeer
from tests.support.oracles import ID_COUNT, build_frame, group_ids
from tests.support.original_client import (
    GROUPING_SECONDS,
    PULSE_SECONDS,
    Message,
    OriginalClient,
    OutOfOrder,
    QueueLimits,
    StrictOrder,
    number_of,
    numbered,
)
from tests.support.strategies import CONNECT

pytestmark = pytest.mark.long

STEP_SECONDS = 0.5
READ_BYTES = 64 * 1024
LATEST_ACK = GROUPING_SECONDS + PULSE_SECONDS

HOUR = 3600.0
MINUTE = 60.0


# Simulation ---------------------------------------------------------------------------------------


class ClientSimulation:
    """A bus, original clients, and one clock for all of them."""

    def __init__(self, seed: int, settings: Settings | None = None, **limits: float) -> None:
        self.random = random.Random(seed)
        self.bus = BrokerHarness(settings, **limits)
        self.bus.skips_checks = True
        self.now = 0.0
        self.members: dict[OriginalClient, WirePeer] = {}
        self._next_beat = 1.0
        self._next_check = MINUTE

    def set_first_sequence(self, class_id: int, sequence: int) -> None:
        """Start a class as if this many messages had been published."""
        self.bus.peer(build_frame(CONNECT, content=b"[%d]" % class_id)).disconnect()
        cls = self.bus.broker.classes[class_id]
        cls.ring.floor = cls.ring.head = sequence
        cls.backlog_window = AckWindow(floor=sequence)

    def join(self, *class_ids: int, bounds: QueueLimits | None = None) -> OriginalClient:
        """Connect a client whose timers have a random phase."""
        client = OriginalClient(
            class_ids,
            now=self.now,
            seed=self.random.getrandbits(32),
            bounds=bounds,
            grouping_phase=self.random.choice([0.0, self.random.random(), 1.0]),
            pulse_phase=self.random.choice([0.0, self.random.random() / 2, 0.5]),
        )
        self.members[client] = self.bus.peer()
        self.exchange_bytes()
        assert client.session_id is not None
        return client

    def kill_client(self, client: OriginalClient) -> None:
        """Kill a client's process. Its unsent and its received bytes are lost."""
        self.members.pop(client).disconnect()

    def run(self, seconds: float, each: Callable[[], None] = lambda: None) -> None:
        """Advance time in steps. `each` is called in every step."""
        end = self.now + seconds
        self.exchange_bytes()  # Subscriptions must exist before anything is published.
        while self.now < end:
            self.now += STEP_SECONDS
            # Tick first: messages that were just sent lose a whole tick.
            while self._next_beat <= self.now:
                assert self.bus.broker.tick() == []
                self._next_beat += 1.0
            each()
            for client in self.members:
                client.tick(self.now)
            self.exchange_bytes()
            if self.now >= self._next_check:
                self.bus.broker.check_invariants()
                self._next_check += MINUTE

    def exchange_bytes(self) -> None:
        """Move bytes until neither side has any that the other one reads."""
        moved = True
        while moved:
            moved = False
            for client, peer in self.members.items():
                if client.has_output and (data := client.read_output(self._readable_bytes(peer))):
                    peer.send(data)
                    client.tick(self.now)
                    moved = True
                if peer.session.outbox.is_idle or not client.can_receive:
                    continue
                if received := peer.read_bytes(READ_BYTES):
                    client.receive(received)
                    moved = True

    def _readable_bytes(self, peer: WirePeer) -> int:
        """Return how many bytes the server reads from a peer, as a connection decides."""
        session = peer.session
        if not session.parked_messages:
            return READ_BYTES
        return TRICKLE_BYTES if self.bus.broker.is_blocking_publishers(session) else 0

    def drain(self, seconds: float = 30.0) -> None:
        """Run until all messages are acknowledged."""
        self.run(seconds)
        assert all(client.is_idle for client in self.members)

    def statistics(self, class_id: int = 1) -> ClassStatistics:
        return self.bus.statistics(class_id)

    def assert_no_loss(self, *class_ids: int) -> None:
        """Check that no message was lost, refused or redelivered, and no client has failed."""
        for client in self.members:
            assert client.handler_error is None
        assert self.bus.broker.refusal_counts == Counter()
        for class_id in class_ids:
            statistics = self.statistics(class_id)
            assert (statistics.redelivered, statistics.dropped) == (0, {})
            assert (statistics.ring.message_count, statistics.in_flight) == (0, 0)


class NumberedSource:
    """Publishes numbered messages of one class through a client, as fast as possible."""

    def __init__(self, client: OriginalClient, class_id: int = 1, prefix: bytes = b"") -> None:
        self.published = 0
        self.refusals = 0
        """How often the client would have blocked."""
        self._client = client
        self._class_id = class_id
        self._prefix = prefix

    def publish(self, count: int) -> None:
        for _ in range(count):
            if not self._client.publish(self._class_id, self._prefix + numbered(self.published)):
                self.refusals += 1
                return
            self.published += 1


@pytest.mark.parametrize("seed", [6])
def test_late_acks_for_two_hours_cause_no_redelivery(seed: int) -> None:
    world = ClientSimulation(seed)
    publisher = world.join(1, 2)
    sources = [NumberedSource(publisher, class_id) for class_id in (1, 2)]
    orders: list[tuple[NumberedSource, StrictOrder]] = []
    for _ in range(2):
        subscriber = world.join(1, 2)
        for source, class_id in zip(sources, (1, 2), strict=True):
            orders.append((source, StrictOrder()))
            subscriber.subscribe(class_id, orders[-1][1])

    def traffic() -> None:
        # Mostly quiet, sometimes a few messages, rarely very many.
        kind = world.random.random()
        for source in sources:
            if kind < 0.15:
                source.publish(world.random.randrange(6))
            elif kind > 0.9995:
                source.publish(world.random.randrange(1000))

    world.run(2 * HOUR, traffic)
    world.drain()
    world.assert_no_loss(1, 2)
    for source, order in orders:
        assert order.next == source.published > 5_000
    latest = max(client.ack_delay_max_seconds for client in world.members)
    assert LATEST_ACK - 0.1 < latest <= LATEST_ACK, "the acks were not as late as they can be"


@pytest.mark.parametrize("laps", [1, 2])
@pytest.mark.parametrize("seed", [1, 2])
def test_original_client_handles_id_wrap(seed: int, laps: int) -> None:
    world = ClientSimulation(seed)
    first = laps * ID_COUNT - world.random.randrange(1, 3000)
    world.set_first_sequence(1, first)
    source = NumberedSource(world.join(1))
    orders = [StrictOrder(), StrictOrder(seconds=0.001)]
    ids: list[int] = []
    for order in orders:
        subscriber = world.join(1)
        subscriber.subscribe(1, order)
        subscriber.subscribe(1, lambda message: ids.append(message.message_id))
    world.run(2 * MINUTE, lambda: source.publish(world.random.randrange(60)))
    world.drain()
    world.assert_no_loss(1)
    assert [order.next for order in orders] == [source.published] * 2
    assert world.statistics().published == first + source.published > laps * ID_COUNT
    assert set(ids) == {(first + n) % ID_COUNT for n in range(source.published)}


class OrderCheck:
    """Checks that the messages `name.number` of each publisher arrive in order."""

    def __init__(self) -> None:
        self.next: Counter[bytes] = Counter()

    def __call__(self, message: Message) -> None:
        name, number = message.payload.split(b".")
        if number_of(number) != self.next[name]:
            raise OutOfOrder(f"expected {self.next[name]} of {name!r}, got {number!r}")
        self.next[name] += 1


@pytest.mark.parametrize("seed", [4, 5])
def test_original_clients_publish_and_subscribe_on_one_connection(seed: int) -> None:
    world = ClientSimulation(seed)
    class_ids = [1, 2, 3]
    clients = [world.join(*class_ids) for _ in range(3)]
    orders: dict[tuple[int, int], OrderCheck] = {}
    sources: dict[tuple[int, int], NumberedSource] = {}
    for number, client in enumerate(clients):
        for class_id in class_ids:
            orders[number, class_id] = OrderCheck()
            client.subscribe(class_id, orders[number, class_id])
            sources[number, class_id] = NumberedSource(client, class_id, prefix=b"%d." % number)

    def traffic() -> None:
        for source in sources.values():
            if world.random.random() < 0.2:
                source.publish(world.random.randrange(30))

    world.run(5 * MINUTE, traffic)
    world.drain()
    world.assert_no_loss(*class_ids)
    for (_, class_id), order in orders.items():
        assert order.next == {
            b"%d" % number: source.published
            for (number, at), source in sources.items()
            if at == class_id
        }


# Full classes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [7])
def test_full_class_slows_publisher_to_slowest_subscriber(seed: int) -> None:
    world = ClientSimulation(seed, class_messages=1000)
    publisher, slow, quick = world.join(1), world.join(1), world.join(1)
    source = NumberedSource(publisher)
    orders = [StrictOrder(seconds=0.0005), StrictOrder()]
    slow.subscribe(1, orders[0])
    quick.subscribe(1, orders[1])
    fullest = 0

    def traffic() -> None:
        nonlocal fullest
        source.publish(2000)
        fullest = max(fullest, world.statistics().ring.message_count)

    world.run(MINUTE / 2, traffic)
    world.drain(2 * MINUTE)
    world.assert_no_loss(1)
    assert fullest == 1000
    assert source.refusals > 30, "the publisher was never slowed down"
    assert [order.next for order in orders] == [source.published] * 2
    assert source.published > 10_000


@pytest.mark.parametrize(("seed", "chunks"), [(9, 2), (10, 1000)])
def test_full_class_still_accepts_acks(seed: int, chunks: int) -> None:
    # Each client subscribes to its own class, so its acks wait behind its own messages.
    world = ClientSimulation(seed, class_messages=200)
    clients = [world.join(1, bounds=QueueLimits(chunks=chunks)) for _ in range(3)]
    orders, sources = [], []
    for number, client in enumerate(clients):
        orders.append(OrderCheck())
        client.subscribe(1, orders[-1])
        sources.append(NumberedSource(client, prefix=b"%d." % number))

    def traffic() -> None:
        for source in sources:
            source.publish(world.random.randrange(400))

    world.run(MINUTE, traffic)
    assert sum(source.published for source in sources) > 2000
    world.drain(20 * MINUTE)
    world.assert_no_loss(1)
    for order in orders:
        assert order.next == {b"%d" % n: source.published for n, source in enumerate(sources)}


# Crashing and slow clients ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [11, 12, 13])
def test_successor_receives_messages_of_dead_client(seed: int) -> None:
    world = ClientSimulation(seed)
    world.set_first_sequence(1, ID_COUNT - world.random.randrange(1000))
    source = NumberedSource(world.join(1))
    fatal = world.random.randrange(100, 900)
    order = StrictOrder()

    def breaks(message: Message) -> None:
        if number_of(message.payload) == fatal:
            raise RuntimeError("a bug in the program")

    dying = world.join(1)
    dying.subscribe(1, breaks)
    dying.subscribe(1, order)
    world.run(MINUTE, lambda: source.publish(world.random.randrange(40)))
    assert isinstance(dying.handler_error, RuntimeError)
    assert order.next == fatal
    # The dead client stays connected. Earlier messages are acknowledged; the others are redelivered
    # to it with growing backoff, and to no other client.
    statistics = world.statistics()
    assert statistics.acknowledged == fatal
    assert 0 < statistics.redelivered <= 4 * source.published
    assert statistics.ring.message_count == source.published - fatal
    world.kill_client(dying)
    successor = world.join(1)
    heir = StrictOrder(first=fatal)
    successor.subscribe(1, heir)
    world.run(MINUTE, lambda: source.publish(world.random.randrange(40)))
    world.drain()
    assert successor.handler_error is None
    assert heir.next == source.published
    assert world.statistics().ring.message_count == 0


def test_dead_connected_client_does_not_affect_others() -> None:
    world = ClientSimulation(14)
    source = NumberedSource(world.join(1))
    dead, living = world.join(1), world.join(1)
    dead.subscribe(1, StrictOrder(first=1))
    order = StrictOrder()
    living.subscribe(1, order)
    world.run(MINUTE, lambda: source.publish(500))
    assert isinstance(dead.handler_error, OutOfOrder)
    assert not dead.can_receive
    assert source.published == 60_000
    assert order.next > source.published - 1000
    world.kill_client(dead)
    world.drain()
    assert order.next == source.published
    assert living.handler_error is None
    assert world.statistics().ring.message_count == 0


def test_slow_handler_fails_order_checking_client() -> None:
    # Ten messages take seven seconds each. At tick 6 none is acknowledged, so all are redelivered
    # and queued in the client after the first ten. The client acknowledges the first ten; then it
    # fails, because it regards the copy of the first message as out of order.
    world = ClientSimulation(15)
    source = NumberedSource(world.join(1))
    client = world.join(1)
    order = StrictOrder(seconds=7.0)
    client.subscribe(1, order)
    source.publish(10)
    world.run(2 * MINUTE)
    assert str(client.handler_error) == "expected 10 of class 1, got 0"
    # The client is dead, but all ten messages are processed and acknowledged.
    assert client.processed_count == 10
    assert world.statistics().ring.message_count == 0


@pytest.mark.parametrize("seconds", [5, 7, 60])
def test_stalled_client_receives_no_copies(seconds: int) -> None:
    # The original client reads nothing, and sends no acks, while its threads wait for each other.
    world = ClientSimulation(18)
    source = NumberedSource(world.join(1))
    client = world.join(1)
    client.subscribe(1, order := StrictOrder())
    world.run(2.0, lambda: source.publish(100))
    peer = world.members.pop(client)
    world.run(seconds, lambda: source.publish(100))
    world.members[client] = peer
    world.drain()
    world.assert_no_loss(1)
    assert order.next == source.published


def test_long_ack_timeout_keeps_order_checking_client_alive() -> None:
    seconds, count = 7.0, 10
    world = ClientSimulation(16, Settings(ack_timeout=int(seconds * count + LATEST_ACK) + 2))
    source = NumberedSource(world.join(1))
    client = world.join(1)
    order = StrictOrder(seconds=seconds)
    client.subscribe(1, order)
    source.publish(count)
    world.run(2 * MINUTE)
    world.assert_no_loss(1)
    assert order.next == count


def test_slow_duplicate_tolerant_client_finishes() -> None:
    world = ClientSimulation(17)
    source = NumberedSource(world.join(1))
    client = world.join(1)
    handled: list[int] = []

    def slow(message: Message) -> float:
        handled.append(number_of(message.payload))
        return 7.0

    client.subscribe(1, slow)
    source.publish(10)
    world.run(10 * MINUTE)
    world.drain()
    assert client.handler_error is None
    assert set(handled) == set(range(10))
    assert handled[:10] == list(range(10))
    # The backoff doubles: all ten are redelivered at 6, the unacknowledged ones at 18 and 42.
    assert len(handled) < 4 * 10
    assert world.statistics().redelivered == len(handled) - 10
    assert world.statistics().ring.message_count == 0
    assert world.bus.broker.refusal_counts == Counter()  # A duplicate ack is legal.


@pytest.mark.parametrize("seed", range(20, 23))
def test_hour_of_failing_clients_loses_nothing(seed: int) -> None:
    world = ClientSimulation(seed)
    world.set_first_sequence(1, world.random.choice([0, ID_COUNT - 5000, 2 * ID_COUNT - 5000]))
    chance = world.random
    source = NumberedSource(world.join(1))
    processed: set[int] = set()
    disorder: list[tuple[int, int]] = []
    present: deque[OriginalClient] = deque()

    def joins() -> None:
        """A subscriber, quick or slow, perhaps with a bug."""
        seconds = chance.choice([0.0, 0.0, 0.01, 0.2])
        bug = chance.choice([0.0, 0.0, 0.001])
        last: int | None = None

        def handle(message: Message) -> float:
            nonlocal last
            number = number_of(message.payload)
            # New messages ascend; missing ones were acknowledged by earlier clients.
            if last is not None and not processed.issuperset(range(last + 1, number)):
                disorder.append((last, number))
            last = max(number, last or 0)
            if chance.random() < bug:
                raise RuntimeError("a bug in the program")
            processed.add(number)
            return seconds

        client = world.join(1)
        client.subscribe(1, handle)
        present.append(client)

    def life() -> None:
        source.publish(chance.choice([0, 0, 1, 5, chance.randrange(50)]))
        if present and chance.random() < 0.01:
            world.kill_client(present.popleft())
        elif not present and chance.random() < 0.1:
            joins()

    world.run(HOUR, life)
    while present:
        world.kill_client(present.popleft())
    last = world.join(1)
    last.subscribe(1, lambda message: processed.add(number_of(message.payload)))
    world.drain(2 * MINUTE)  # Messages that crash their consumers are in backoff.
    assert source.published > 10_000
    missing = group_ids(sorted(set(range(source.published)) - processed))
    assert (missing, disorder) == ([], [])
    assert world.statistics().ring.message_count == 0
    assert world.statistics().dropped == {}
    assert world.bus.broker.refusal_counts == Counter()
