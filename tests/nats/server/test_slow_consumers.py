"""Clients that fall behind: whom they hold up, and when they are given up."""

from __future__ import annotations

from simplebus.core.broker.broker import Broker, Settings
from simplebus.core.errors import Reason
from simplebus.core.limits import Limits
from simplebus.nats.limits import (
    LAST_CHANCE_SECONDS,
    READ_BYTES_MIN,
    RECENT_DELIVERY_SECONDS,
    STUCK_SECONDS,
    NatsLimits,
)
from simplebus.nats.nats_server import NatsServer
from simplebus.nats.server.session import NatsSession
from simplebus.nats.settings import NatsSettings
from tests.nats.server.nats_peer import buffer

KIB = 1024
QUIET = b'CONNECT {"verbose":false,"pedantic":false}\r\n'


def front(**limits: float) -> NatsServer:
    """One whose clients are behind with more than 64 KiB, and given up with more than 256."""
    chosen = {"max_pending": 256 * KIB, "max_payload": 64 * KIB} | limits
    return NatsServer(NatsSettings(NatsLimits(**chosen)))  # type: ignore[arg-type]


def say(to: NatsServer, session: NatsSession, data: bytes) -> None:
    """Bring bytes as the driver does."""
    session.stall = None
    for at in range(0, len(data), len(buffer().writable)):
        to.receive(session, buffer(), buffer().fill(data[at : at + len(buffer().writable)]))
        to.drain_ready()


def client(of: NatsServer, *said: bytes) -> NatsSession:
    session = of.open_session("somewhere")
    say(of, session, QUIET + b"".join(said))
    take(session, session.outbox.pending_bytes)
    return session


def take(session: NatsSession, count: int) -> None:
    while count:
        piece = session.outbox.peek(0)[:count]
        session.outbox.mark_sent(len(piece), 0)
        count -= len(piece)


def publish(kibibytes: int, size: int = KIB) -> bytes:
    return b"PUB a %d\r\n%b\r\n" % (size, bytes(size)) * (kibibytes * KIB // size)


def held(publisher: NatsSession) -> list[NatsSession]:
    """For whom it is to wait; asked once, as the driver does."""
    hold, publisher.stall = publisher.stall, None
    return hold.sessions if hold else []


def wait_in_vain(house: NatsServer, publisher: NatsSession, took: int = 0) -> None:
    """Wait as long as one may for whom it has filled, who take so much meanwhile."""
    assert publisher.stall is not None
    for session in publisher.stall.sessions:
        take(session, took)
    house.slow_consumer_monitor.stall_timed_out(publisher.stall, publisher)


def test_only_the_filling_publisher_stalls() -> None:
    house = front()
    slow, publisher, other = client(house, b"SUB a 1\r\n"), client(house), client(house)
    say(house, publisher, publish(32))
    assert publisher.stall is None
    say(house, publisher, publish(64))
    hold = publisher.stall
    assert hold is not None
    assert hold.sessions == [slow]
    say(house, other, b"PUB b 0\r\n\r\n")
    assert other.stall is None
    assert house.slow_consumer_monitor.is_stall_needed(hold)
    take(slow, slow.outbox.pending_bytes - 64 * KIB)
    assert not house.slow_consumer_monitor.is_stall_needed(hold)


def test_single_messages_stall_like_batches() -> None:
    house = front()
    slow, publisher = client(house, b"SUB a 1\r\n"), client(house)
    for _ in range(70):
        say(house, publisher, publish(1))
    assert held(publisher) == [slow]


def test_slow_client_does_not_delay_fast_clients() -> None:
    house = front()
    slow, fast = client(house, b"SUB a 1\r\n"), client(house, b"SUB a 1\r\n")
    publisher = client(house)
    for _ in range(3):
        say(house, publisher, publish(50))
        take(fast, fast.outbox.pending_bytes)
        assert publisher.stall is None
    size = publisher.next_read_bytes
    say(house, publisher, publish(60))
    assert publisher.stall is not None  # A last chance, that costs a moment.
    wait_in_vain(house, publisher, took=KIB)
    assert publisher.next_read_bytes >= size
    say(house, publisher, publish(60))
    assert [session for session, _ in house.drain_disconnecting()] == [slow]


def test_last_chance_is_short_and_renewed_after_catching_up() -> None:
    house = front()
    slow, fast = client(house, b"SUB a 1\r\n"), client(house, b"SUB a 1\r\n")
    publisher = client(house)

    def is_held(kibibytes: int) -> bool:
        for _ in range(kibibytes // 20):
            say(house, publisher, publish(20))
            take(fast, fast.outbox.pending_bytes)
        return held(publisher) == [slow]

    assert is_held(220)
    take(slow, 100 * KIB)
    assert not is_held(20)
    house.now += 2 * LAST_CHANCE_SECONDS
    assert not is_held(80)  # It hovers.
    take(slow, slow.outbox.pending_bytes)
    house.tick()
    assert is_held(220)


def test_publisher_stalls_if_all_receivers_are_slow() -> None:
    house = front()
    both = [client(house, b"SUB a 1\r\n"), client(house, b"SUB a 1\r\n")]
    publisher = client(house)
    say(house, publisher, publish(100))
    assert held(publisher) == both


def test_exclusive_publisher_stalls_longer() -> None:
    house = front()
    slow, fast = client(house, b"SUB a 1\r\n"), client(house, b"SUB b 1\r\n")
    publisher = client(house)
    say(house, publisher, publish(100))
    alone = publisher.stall
    assert alone is not None
    assert alone.sessions == [slow]
    say(house, publisher, b"PUB b 0\r\n\r\n")
    take(fast, fast.outbox.pending_bytes)
    say(house, publisher, publish(10))
    assert publisher.stall is None  # The other one would wait for what comes next.
    say(house, publisher, publish(100))
    assert publisher.stall is not None
    assert publisher.stall.max_seconds < alone.max_seconds
    take(slow, 100 * KIB)
    house.now += 2 * RECENT_DELIVERY_SECONDS
    say(house, publisher, publish(10))
    assert publisher.stall is not None
    assert publisher.stall.max_seconds == alone.max_seconds


def test_client_with_slow_progress_is_not_disconnected() -> None:
    house = front()
    slow, publisher = client(house, b"SUB a 1\r\n"), client(house)
    for _ in range(500):
        say(house, publisher, publish(max(1, publisher.next_read_bytes // KIB)))
        if publisher.stall is not None:
            wait_in_vain(house, publisher)
            house.now += publisher.stall.max_seconds
        if int(house.now) % 2:
            take(slow, min(20 * KIB, slow.outbox.pending_bytes))
    assert not house.drain_disconnecting()


def test_stuck_client_is_waited_for_again_after_progress() -> None:
    house = front()
    stuck, publisher = client(house, b"SUB a 1\r\n"), client(house)
    say(house, publisher, publish(100))
    wait_in_vain(house, publisher)
    house.now = 1.0 + STUCK_SECONDS
    say(house, publisher, publish(10))
    assert held(publisher) == []
    take(stuck, KIB)
    say(house, publisher, publish(10))
    assert held(publisher) == [stuck]


def test_stall_timeout_reduces_the_read_size() -> None:
    house = front()
    client(house, b"SUB a 1\r\n")
    publisher = client(house)
    say(house, publisher, publish(100))
    size = publisher.next_read_bytes
    wait_in_vain(house, publisher, took=KIB)
    assert publisher.next_read_bytes < size
    for _ in range(10):
        wait_in_vain(house, publisher)
    assert publisher.next_read_bytes == READ_BYTES_MIN


def test_stuck_client_stalls_publishers_only_at_its_last_chance() -> None:
    house = front()
    stuck, publisher = client(house, b"SUB a 1\r\n"), client(house)
    say(house, publisher, publish(100))
    wait_in_vain(house, publisher)
    house.now = 1.0 + STUCK_SECONDS
    say(house, publisher, publish(110))
    size = publisher.next_read_bytes
    wait_in_vain(house, publisher)
    assert held(publisher) == [stuck]
    assert publisher.next_read_bytes == size


def test_client_above_max_pending_is_disconnected_and_memory_freed() -> None:
    house = front()
    stuck, publisher = client(house, b"SUB a 1\r\n", b"SUB b.> 2\r\n"), client(house)
    say(house, publisher, publish(250))
    assert not house.drain_disconnecting()
    say(house, publisher, publish(10))
    ((session, error),) = house.drain_disconnecting()
    assert session is stuck
    assert error.reason is Reason.SLOW_CONSUMER
    assert error.line == b""
    assert error.closed_reason == "Slow Consumer (Pending Bytes)"
    assert error.sentence.endswith("at most 262144 are allowed; its subscriptions: a, b.>")
    assert stuck.pending_bytes == 0
    say(house, publisher, publish(10))
    assert stuck.pending_bytes == 0
    assert publisher.stall is None


def test_client_without_progress_is_disconnected_after_write_timeout() -> None:
    house = front(write_seconds=2.0, ping_seconds=1000.0)
    stuck, idle, publisher = client(house, b"SUB a 1\r\n"), client(house), client(house)
    house.now = 100.0
    house.tick()
    for session in (stuck, idle, publisher):
        take(session, session.outbox.pending_bytes)
    say(house, publisher, publish(1))
    cut = []
    for now in (101.0, 102.0, 103.0, 104.0):
        house.now = now
        house.tick()
        cut.append([session for session, _ in house.drain_disconnecting()])
        if now == 102.0:
            take(stuck, 10)
    assert cut == [[], [], [], []]
    house.now = 105.5
    house.tick()
    ((session, error),) = house.drain_disconnecting()
    assert session is stuck
    assert error.closed_reason == "Slow Consumer (Write Deadline)"
    assert "the client read none of" in error.sentence
    house.tick()
    assert not house.drain_disconnecting()


def test_total_limit_disconnects_the_largest_client() -> None:
    limits = Limits(pending_bytes=3 << 20, total_pending_bytes=3 << 20)
    house = NatsServer(
        NatsSettings(NatsLimits(max_pending=8 << 20)), broker=Broker(Settings(limits))
    )
    publisher = client(house)
    crowd = [client(house, b"SUB a %d\r\nSUB b.%d 7\r\n" % (n % 2, n)) for n in range(10)]
    say(house, publisher, publish(1000))
    house.tick()  # All wait for the same two megabytes.
    assert not house.drain_disconnecting()
    say(house, publisher, (b"PUB b.3 1000\r\n%b\r\n" % bytes(1000)) * 1500)
    house.tick()
    ((session, error),) = house.drain_disconnecting()
    assert session is crowd[3]
    assert error.reason is Reason.PENDING_LIMIT
    assert "for all together 3145728 may, and it has the most; it has subscribed to a, b.3" in str(
        error
    )
    house.tick()
    assert not house.drain_disconnecting()


def test_incomplete_commands_count_as_pending_bytes() -> None:
    limits = Limits(pending_bytes=3 << 20, total_pending_bytes=3 << 20)
    house = NatsServer(broker=Broker(Settings(limits)))
    liars = [client(house) for _ in range(5)]
    for liar in liars:
        say(house, liar, b"PUB a 1000000\r\n" + bytes(600_000))
    assert not house.drain_disconnecting()
    for liar in liars[:2]:
        say(house, liar, bytes(300_000))  # Nobody waits for a beat: very many may come in one.
    ((session, error),) = house.drain_disconnecting()
    assert session is liars[0]
    assert error.reason is Reason.PENDING_LIMIT
    for liar in liars[2:]:
        say(house, liar, bytes(300_000))
    house.tick()
    assert len(house.drain_disconnecting()) == 1
