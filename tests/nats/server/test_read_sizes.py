"""Read sizes adapt to the cost of a client's commands."""

from __future__ import annotations

import pytest

from simplebus.core.limits import RECEIVE_BYTES
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.nats.limits import (
    EVENTS_PER_READ,
    FAN_OUT_READ_BYTES,
    OUTPUT_PER_READ_BYTES,
    READ_BYTES_INITIAL,
    READ_BYTES_MIN,
)
from simplebus.nats.nats_server import NatsServer


@pytest.fixture(scope="module")
def buffer() -> ReceiveBuffer:
    return ReceiveBuffer()


HELLO = b'CONNECT {"verbose":false,"pedantic":false}\r\n'


def sizes(nats_server: NatsServer, buffer: ReceiveBuffer, data: bytes, reads: int) -> list[int]:
    """Return the read size after each of several equal reads."""
    session = nats_server.open_session("test")
    nats_server.receive(session, buffer, buffer.fill(HELLO))
    sizes_read: list[int] = []
    offset = 0  # Offset in the data of the next read.
    for _ in range(reads):
        size = session.next_read_bytes
        count = buffer.fill((data * (size // len(data) + 2))[offset : offset + size])
        offset = (offset + count) % len(data)
        nats_server.receive(session, buffer, count)
        for ready_session in nats_server.drain_ready():
            ready_session.discard_output()
        sizes_read.append(session.next_read_bytes)
    return sizes_read


def test_read_size_grows_for_bulk_publishers(buffer: ReceiveBuffer) -> None:
    sizes_read = sizes(NatsServer(), buffer, b"PUB a 16\r\n0123456789abcdef\r\n", 9)
    assert sizes_read == sorted(sizes_read)
    assert (sizes_read[0], sizes_read[-1]) == (2 * READ_BYTES_INITIAL, RECEIVE_BYTES)


def test_many_events_reduce_the_read_size(buffer: ReceiveBuffer) -> None:
    last = sizes(NatsServer(), buffer, b"PING\r\n", 6)[-1]
    assert READ_BYTES_MIN <= last <= 2 * 6 * EVENTS_PER_READ


def test_much_output_reduces_the_read_size(buffer: ReceiveBuffer) -> None:
    nats_server = NatsServer()
    for _ in range(40):
        ready_session = nats_server.open_session("other")
        nats_server.receive(ready_session, buffer, buffer.fill(HELLO + b"SUB a 1\r\n"))
    last = sizes(nats_server, buffer, b"PUB a 100\r\n" + b"x" * 100 + b"\r\n", 8)[-1]
    assert last <= 2 * OUTPUT_PER_READ_BYTES // 40


def subscribed(buffer: ReceiveBuffer, *, clients: int, subscriptions: int) -> NatsServer:
    """Return a server with clients that have several subscriptions to one subject."""
    nats_server = NatsServer()
    subscribes = b"".join(b"SUB a %d\r\n" % number for number in range(subscriptions))
    for _ in range(clients):
        session = nats_server.open_session("receiver")
        nats_server.receive(session, buffer, buffer.fill(HELLO + subscribes))
    return nats_server


def test_batches_for_many_clients_are_read_in_larger_pieces(buffer: ReceiveBuffer) -> None:
    nats_server = subscribed(buffer, clients=400, subscriptions=1)
    assert sizes(nats_server, buffer, b"PUB a 1\r\nx\r\n", 8)[-1] == FAN_OUT_READ_BYTES


def test_batches_for_many_subscriptions_of_a_client_are_read_in_the_smallest_pieces(
    buffer: ReceiveBuffer,
) -> None:
    nats_server = subscribed(buffer, clients=2, subscriptions=2000)
    assert sizes(nats_server, buffer, b"PUB a 1\r\nx\r\n", 8)[-1] == READ_BYTES_MIN
