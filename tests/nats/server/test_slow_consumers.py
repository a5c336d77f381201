"""Slow consumers: publisher stalls and disconnection."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.broker.broker import Broker, Settings
from simplebus.core.errors import Reason
from simplebus.core.limits import Limits
from simplebus.nats import nats_server as nats_server_module
from simplebus.nats.limits import (
    EXAMINED_BUFFERS_PER_TURN,
    LAST_CHANCE_SECONDS,
    READ_BYTES_MIN,
    RECENT_DELIVERY_SECONDS,
    STUCK_SECONDS,
    NatsLimits,
)
from simplebus.nats.nats_server import NatsServer
from simplebus.nats.server import slow_consumers
from simplebus.nats.server.outbox import NatsOutbox
from simplebus.nats.server.session import NatsSession
from simplebus.nats.server.slow_consumers import SlowConsumerMonitor
from simplebus.nats.settings import NatsSettings
from tests.nats.server.nats_peer import buffer

KIB = 1024
QUIET = b'CONNECT {"verbose":false,"pedantic":false}\r\n'


def nats_server(**limits: float) -> NatsServer:
    """Return a server whose clients are slow above 64 KiB and disconnected above 256 KiB."""
    chosen = {"max_pending": 256 * KIB, "max_payload": 64 * KIB} | limits
    return NatsServer(NatsSettings(NatsLimits(**chosen)))  # type: ignore[arg-type]


def send_bytes(to: NatsServer, session: NatsSession, data: bytes) -> None:
    """Pass bytes to the server, as the driver does."""
    session.stall = None
    for offset in range(0, len(data), len(buffer().writable)):
        to.receive(session, buffer(), buffer().fill(data[offset : offset + len(buffer().writable)]))
        to.drain_ready()


def client(of: NatsServer, *data: bytes) -> NatsSession:
    session = of.open_session("somewhere")
    send_bytes(of, session, QUIET + b"".join(data))
    read_output(session, session.outbox.pending_bytes)
    return session


def read_output(session: NatsSession, count: int) -> None:
    while count:
        data_piece = session.outbox.peek(0)[:count]
        session.outbox.mark_sent(len(data_piece), 0)
        count -= len(data_piece)


def publish(kibibytes: int, size: int = KIB) -> bytes:
    return b"PUB a %d\r\n%b\r\n" % (size, bytes(size)) * (kibibytes * KIB // size)


def new_stall_sessions(publisher: NatsSession) -> list[NatsSession]:
    """Return the sessions of the publisher's new stall."""
    stall, publisher.stall = publisher.stall, None
    return stall.sessions if stall else []


def let_stall_time_out(harness: NatsServer, publisher: NatsSession, read_bytes: int = 0) -> None:
    """Let a stall last its full time while the slow sessions read this many bytes."""
    assert publisher.stall is not None
    for session in publisher.stall.sessions:
        read_output(session, read_bytes)
    harness.slow_consumer_monitor.stall_timed_out(publisher.stall, publisher)


def test_only_the_filling_publisher_stalls() -> None:
    harness = nats_server()
    slow, publisher, other_client = (
        client(harness, b"SUB a 1\r\n"),
        client(harness),
        client(harness),
    )
    send_bytes(harness, publisher, publish(32))
    assert publisher.stall is None
    send_bytes(harness, publisher, publish(64))
    stall = publisher.stall
    assert stall is not None
    assert stall.sessions == [slow]
    send_bytes(harness, other_client, b"PUB b 0\r\n\r\n")
    assert other_client.stall is None
    assert harness.slow_consumer_monitor.is_stall_needed(stall)
    read_output(slow, slow.outbox.pending_bytes - 64 * KIB)
    assert not harness.slow_consumer_monitor.is_stall_needed(stall)


def test_single_messages_stall_like_batches() -> None:
    harness = nats_server()
    slow, publisher = client(harness, b"SUB a 1\r\n"), client(harness)
    for _ in range(70):
        send_bytes(harness, publisher, publish(1))
    assert new_stall_sessions(publisher) == [slow]


def test_slow_client_does_not_delay_fast_clients() -> None:
    harness = nats_server()
    slow, fast = client(harness, b"SUB a 1\r\n"), client(harness, b"SUB a 1\r\n")
    publisher = client(harness)
    for _ in range(3):
        send_bytes(harness, publisher, publish(50))
        read_output(fast, fast.outbox.pending_bytes)
        assert publisher.stall is None
    size = publisher.next_read_bytes
    send_bytes(harness, publisher, publish(60))
    assert publisher.stall is not None  # The last stall before it is disconnected.
    let_stall_time_out(harness, publisher, read_bytes=KIB)
    assert publisher.next_read_bytes >= size
    send_bytes(harness, publisher, publish(60))
    assert [session for session, _ in harness.drain_disconnecting()] == [slow]


def test_last_chance_is_short_and_renewed_after_catching_up() -> None:
    harness = nats_server()
    slow, fast = client(harness, b"SUB a 1\r\n"), client(harness, b"SUB a 1\r\n")
    publisher = client(harness)

    def is_held(kibibytes: int) -> bool:
        for _ in range(kibibytes // 20):
            send_bytes(harness, publisher, publish(20))
            read_output(fast, fast.outbox.pending_bytes)
        return new_stall_sessions(publisher) == [slow]

    assert is_held(220)
    read_output(slow, 100 * KIB)
    assert not is_held(20)
    harness.now += 2 * LAST_CHANCE_SECONDS
    assert not is_held(80)  # The pending bytes stay near the limit.
    read_output(slow, slow.outbox.pending_bytes)
    harness.tick()
    assert is_held(220)


def test_publisher_stalls_if_all_receivers_are_slow() -> None:
    harness = nats_server()
    receivers = [client(harness, b"SUB a 1\r\n"), client(harness, b"SUB a 1\r\n")]
    publisher = client(harness)
    send_bytes(harness, publisher, publish(100))
    assert new_stall_sessions(publisher) == receivers


def test_exclusive_publisher_stalls_longer() -> None:
    harness = nats_server()
    slow, fast = client(harness, b"SUB a 1\r\n"), client(harness, b"SUB b 1\r\n")
    publisher = client(harness)
    send_bytes(harness, publisher, publish(100))
    stall_ = publisher.stall
    assert stall_ is not None
    assert stall_.sessions == [slow]
    send_bytes(harness, publisher, b"PUB b 0\r\n\r\n")
    read_output(fast, fast.outbox.pending_bytes)
    send_bytes(harness, publisher, publish(10))
    assert publisher.stall is None  # Otherwise the other publisher would wait for the next message.
    send_bytes(harness, publisher, publish(100))
    assert publisher.stall is not None
    assert publisher.stall.max_seconds < stall_.max_seconds
    read_output(slow, 100 * KIB)
    harness.now += 2 * RECENT_DELIVERY_SECONDS
    send_bytes(harness, publisher, publish(10))
    assert publisher.stall is not None
    assert publisher.stall.max_seconds == stall_.max_seconds


def test_client_with_slow_progress_is_not_disconnected() -> None:
    harness = nats_server()
    slow, publisher = client(harness, b"SUB a 1\r\n"), client(harness)
    for _ in range(500):
        send_bytes(harness, publisher, publish(max(1, publisher.next_read_bytes // KIB)))
        if publisher.stall is not None:
            let_stall_time_out(harness, publisher)
            harness.now += publisher.stall.max_seconds
        if int(harness.now) % 2:
            read_output(slow, min(20 * KIB, slow.outbox.pending_bytes))
    assert not harness.drain_disconnecting()


def test_stuck_client_is_waited_for_again_after_progress() -> None:
    harness = nats_server()
    stuck, publisher = client(harness, b"SUB a 1\r\n"), client(harness)
    send_bytes(harness, publisher, publish(100))
    let_stall_time_out(harness, publisher)
    harness.now = 1.0 + STUCK_SECONDS
    send_bytes(harness, publisher, publish(10))
    assert new_stall_sessions(publisher) == []
    read_output(stuck, KIB)
    send_bytes(harness, publisher, publish(10))
    assert new_stall_sessions(publisher) == [stuck]


def test_stall_timeout_reduces_the_read_size() -> None:
    harness = nats_server()
    client(harness, b"SUB a 1\r\n")
    publisher = client(harness)
    send_bytes(harness, publisher, publish(100))
    size = publisher.next_read_bytes
    let_stall_time_out(harness, publisher, read_bytes=KIB)
    assert publisher.next_read_bytes < size
    for _ in range(10):
        let_stall_time_out(harness, publisher)
    assert publisher.next_read_bytes == READ_BYTES_MIN


def test_stuck_client_stalls_publishers_only_at_its_last_chance() -> None:
    harness = nats_server()
    stuck, publisher = client(harness, b"SUB a 1\r\n"), client(harness)
    send_bytes(harness, publisher, publish(100))
    let_stall_time_out(harness, publisher)
    harness.now = 1.0 + STUCK_SECONDS
    send_bytes(harness, publisher, publish(110))
    size = publisher.next_read_bytes
    let_stall_time_out(harness, publisher)
    assert new_stall_sessions(publisher) == [stuck]
    assert publisher.next_read_bytes == size


def test_client_above_max_pending_is_disconnected_and_memory_freed() -> None:
    harness = nats_server()
    stuck, publisher = client(harness, b"SUB a 1\r\n", b"SUB b.> 2\r\n"), client(harness)
    send_bytes(harness, publisher, publish(250))
    assert not harness.drain_disconnecting()
    send_bytes(harness, publisher, publish(10))
    ((session, error),) = harness.drain_disconnecting()
    assert session is stuck
    assert error.reason is Reason.SLOW_CONSUMER
    assert error.line == b""
    assert error.closed_reason == "Slow Consumer (Pending Bytes)"
    assert error.sentence.endswith("at most 262144 are allowed; its subscriptions: a, b.>")
    assert stuck.pending_bytes == 0
    send_bytes(harness, publisher, publish(10))
    assert stuck.pending_bytes == 0
    assert publisher.stall is None


def test_client_without_progress_is_disconnected_after_write_timeout() -> None:
    harness = nats_server(write_seconds=2.0, ping_seconds=1000.0)
    stuck, idle, publisher = client(harness, b"SUB a 1\r\n"), client(harness), client(harness)
    harness.now = 100.0
    harness.tick()
    for session in (stuck, idle, publisher):
        read_output(session, session.outbox.pending_bytes)
    send_bytes(harness, publisher, publish(1))
    cut = []
    for now in (101.0, 102.0, 103.0, 104.0):
        harness.now = now
        harness.tick()
        cut.append([session for session, _ in harness.drain_disconnecting()])
        if now == 102.0:
            read_output(stuck, 10)
    assert cut == [[], [], [], []]
    harness.now = 105.5
    harness.tick()
    ((session, error),) = harness.drain_disconnecting()
    assert session is stuck
    assert error.closed_reason == "Slow Consumer (Write Deadline)"
    assert "the client read none of" in error.sentence
    harness.tick()
    assert not harness.drain_disconnecting()


def check_memory(harness: NatsServer) -> None:
    """Check the total limit, which must be due."""
    assert harness.slow_consumer_monitor.is_memory_check_due
    for _ in harness.check_memory_in_parts():
        assert not harness.slow_consumer_monitor.is_memory_check_due


def test_total_limit_disconnects_the_largest_client() -> None:
    limits = Limits(pending_bytes=3 << 20, total_pending_bytes=3 << 20)
    harness = NatsServer(
        NatsSettings(NatsLimits(max_pending=8 << 20)), broker=Broker(Settings(limits))
    )
    publisher = client(harness)
    crowd = [client(harness, b"SUB a %d\r\nSUB b.%d 7\r\n" % (n % 2, n)) for n in range(10)]
    send_bytes(harness, publisher, publish(1000))
    harness.tick()  # All sessions share the same two megabytes.
    assert not harness.drain_disconnecting()
    send_bytes(harness, publisher, (b"PUB b.3 1000\r\n%b\r\n" % bytes(1000)) * 1500)
    harness.tick()
    ((session, error),) = harness.drain_disconnecting()
    assert session is crowd[3]
    assert error.reason is Reason.PENDING_LIMIT
    assert "all clients together may have 3145728; its subscriptions: a, b.3" in str(error)
    harness.tick()
    assert not harness.drain_disconnecting()


def test_incomplete_commands_count_as_pending_bytes() -> None:
    limits = Limits(pending_bytes=3 << 20, total_pending_bytes=3 << 20)
    harness = NatsServer(broker=Broker(Settings(limits)))
    peers_ = [client(harness) for _ in range(5)]
    for peer_ in peers_:
        send_bytes(harness, peer_, b"PUB a 1000000\r\n" + bytes(600_000))
    check_memory(harness)
    assert not harness.drain_disconnecting()
    for peer_ in peers_[:2]:
        send_bytes(harness, peer_, bytes(300_000))
    # The check does not wait for a tick, because many messages may arrive within one.
    check_memory(harness)
    ((session, error),) = harness.drain_disconnecting()
    assert session is peers_[0]
    assert error.reason is Reason.PENDING_LIMIT
    for peer_ in peers_[2:]:
        send_bytes(harness, peer_, bytes(300_000))
    harness.tick()
    assert len(harness.drain_disconnecting()) == 1


def find_over_memory_at_once(sessions: list[NatsSession], limit_bytes: int) -> list[NatsSession]:
    """Return the sessions to disconnect, the largest first. They must not share buffers."""
    excess, found = sum(session.kept_bytes for session in sessions) - limit_bytes, []
    for session in sorted(sessions, key=lambda session: -session.kept_bytes):
        if excess > 0:
            found.append(session)
            excess -= session.kept_bytes
    return found


@given(
    kept=st.lists(
        st.tuples(st.integers(0, 8).map(lambda n: 9 * KIB * n), st.integers(0, 8 * KIB)),
        min_size=1,
        max_size=12,
    ),
    limit_bytes=st.integers(0, 400 * KIB),
    buffers_per_turn=st.integers(1, 20),
)
def test_total_limit_is_checked_in_parts_like_at_once(
    kept: list[tuple[int, int]], limit_bytes: int, buffers_per_turn: int
) -> None:
    harness = nats_server()
    monitor = SlowConsumerMonitor(harness.settings.limits, total_pending_bytes=limit_bytes)
    sessions = [client(harness) for _ in kept]
    for session, (output_bytes, input_bytes) in zip(sessions, kept, strict=True):
        session.send(bytes(output_bytes))
        send_bytes(harness, session, b"PUB a 9000\r\n" + bytes(input_bytes))
    monitor.track(dict.fromkeys(sessions))
    expected = find_over_memory_at_once(sessions, limit_bytes)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(slow_consumers, "EXAMINED_BUFFERS_PER_TURN", buffers_per_turn)
        parts = list(monitor.find_over_memory())
    assert [session for part in parts for session, _ in part] == expected
    assert all(len(part) <= 1 for part in parts)


def test_each_part_of_the_check_of_the_total_limit_examines_few_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness, examined = nats_server(), list[NatsOutbox]()
    iter_buffers = NatsOutbox.iter_buffers

    def iter_counted(outbox: NatsOutbox) -> Iterator[tuple[int, int]]:
        examined.append(outbox)
        return iter_buffers(outbox)

    monkeypatch.setattr(NatsOutbox, "iter_buffers", iter_counted)
    monitor = SlowConsumerMonitor(harness.settings.limits, total_pending_bytes=KIB)
    sessions = [client(harness) for _ in range(2 * EXAMINED_BUFFERS_PER_TURN + 1)]
    for session in sessions:
        session.send(b"unread")
    monitor.track(dict.fromkeys(sessions))
    counts = []
    for part in monitor.find_over_memory():
        counts.append(len(examined))
        if part:
            break
    assert counts == [
        EXAMINED_BUFFERS_PER_TURN,
        2 * EXAMINED_BUFFERS_PER_TURN,
        2 * EXAMINED_BUFFERS_PER_TURN + 1,
    ]


def test_output_of_disconnected_clients_is_freed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_server_module, "FREED_BYTES_PER_TURN", 100 * KIB)
    harness = nats_server()
    sessions = [client(harness) for _ in range(2)]
    for session in sessions:
        for _ in range(4):
            session.send(bytes(64 * KIB))
        session.send(b"too much")
        assert session.is_disconnecting
    count = 0
    while harness.has_discarded_output:
        harness.free_discarded_output()
        count += 1
    assert 4 <= count <= 6
