"""Pull requests, and detection of missing deliveries."""

from __future__ import annotations

import re
from collections import deque
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.bridge.source.pull_consumer import PULL_BYTES, PULL_MESSAGES, PullConsumer
from simplebus.core.errors import BusConnectionError
from simplebus.nats.client.client import NatsClientCore
from simplebus.nats.client.events import ReceivedMessages
from simplebus.nats.client.parser import ClientParser


def create_consumer(delivered_count: int) -> PullConsumer:
    connection: Any = SimpleNamespace(core=NatsClientCore(inbox="_INBOX.me"))
    return PullConsumer(
        connection, "S", "c", delivered_count=delivered_count, pending=9, heartbeat_seconds=1.0
    )


def deliveries(*counts: int, sid: int, pending: int = 5) -> ReceivedMessages:
    """Return deliveries with these consumer sequences, and ten times as high stream sequences."""
    lines = [f"MSG s {sid} $JS.ACK.S.c.1.{10 * n}.{n}.0.{pending} 0\r\n\r\n" for n in counts]
    (messages,) = ClientParser().receive("".join(lines).encode())
    assert isinstance(messages, ReceivedMessages)
    return messages


def status_message(line: str, sid: int) -> ReceivedMessages:
    block = f"NATS/1.0 {line}\r\n\r\n"
    (messages,) = ClientParser().receive(
        f"HMSG s {sid} {len(block)} {len(block)}\r\n{block}\r\n".encode()
    )
    assert isinstance(messages, ReceivedMessages)
    return messages


@given(st.lists(st.integers(1, 40), max_size=9), st.integers(0, 200), st.integers(-3, 3))
def test_accepts_deliveries_up_to_first_gap(sizes: list[int], broken: int, by: int) -> None:
    """Deliveries arrive in pieces of these sizes. From number `broken` on, the counts are wrong."""
    consumer, first, received = create_consumer(delivered_count=7), 8, []
    counts = [n + (by if n >= broken else 0) for n in range(first, first + sum(sizes))]
    end = next((row for row, n in enumerate(counts) if n != first + row), len(counts))
    offset = 0
    for size in sizes:
        counts_part = counts[offset : offset + size]
        received += consumer.accept(deliveries(*counts_part, sid=consumer._sid)).sequences.tolist()
        offset += size
        if offset > end:
            with pytest.raises(BusConnectionError, match="a delivery is missing"):
                consumer.check()
            break
        consumer.check()
    end_offsets = np.cumsum(sizes)
    read_bytes = int(end_offsets[end_offsets <= end].max(initial=0))
    assert received == [10 * n for n in counts[:read_bytes]]


def test_ignores_messages_of_other_consumers() -> None:
    consumer = create_consumer(delivered_count=0)
    assert consumer.accept(deliveries(1, 2, sid=consumer._sid + 1)).messages.count == 0
    assert consumer.accept(deliveries(1, 2, sid=consumer._sid, pending=3)).sequences.tolist() == [
        10,
        20,
    ]
    assert consumer.pending == 3
    consumer.check()


@pytest.mark.parametrize("line", ["404 No Messages", "408 Request Timeout", "100 Idle Heartbeat"])
def test_empty_status_clears_pending_count(line: str) -> None:
    consumer = create_consumer(delivered_count=0)
    consumer.accept(status_message(line, consumer._sid))
    consumer.check()
    assert consumer.pending == 0


@pytest.mark.parametrize("line", ["409 Consumer Deleted", "503"])
def test_check_raises_reason_of_ended_consumer(line: str) -> None:
    consumer = create_consumer(delivered_count=0)
    consumer.accept(status_message(line, consumer._sid))
    with pytest.raises(BusConnectionError, match=f"'c' of stream 'S' has ended: {line}"):
        consumer.check()


def drain_requests(consumer: PullConsumer) -> list[dict[str, Any]]:
    """Return the pull requests since the last call."""
    output = b"".join(bytes(each) for each in consumer._core.drain_output())
    return [msgspec.json.decode(each) for each in re.findall(rb"\{[^}]*\}", output)]


def test_requests_are_bounded_in_messages_and_bytes() -> None:
    consumer = create_consumer(delivered_count=0)
    consumer._core.is_ready = True
    for _ in range(2):
        consumer.request_more()
    (first,) = drain_requests(consumer)
    assert (first["batch"], first["max_bytes"]) == (PULL_MESSAGES, PULL_BYTES)
    for count in range(3, 7):
        body = "x" * (PULL_BYTES // 4)
        data = (
            f"MSG s {consumer._sid} $JS.ACK.S.c.1.{count}.{count - 2}.0.9 {len(body)}\r\n{body}\r\n"
        )
        (messages,) = ClientParser().receive(data.encode())
        assert isinstance(messages, ReceivedMessages)
        assert consumer.accept(messages).messages.count == 1
        consumer.request_more()
    requests = drain_requests(consumer)
    assert 2 <= len(requests) <= 3
    assert all(PULL_BYTES // 2 <= request["max_bytes"] <= PULL_BYTES for request in requests)
    assert all(PULL_MESSAGES // 2 <= request["batch"] <= PULL_MESSAGES for request in requests)


def test_requests_unserved_messages_again() -> None:
    consumer = create_consumer(delivered_count=0)
    consumer._core.is_ready = True
    consumer.request_more()
    drain_requests(consumer)
    status = (
        "409 Message Size Exceeds MaxBytes\r\nNats-Pending-Messages: %d\r\nNats-Pending-Bytes: %d"
    )
    consumer.accept(status_message(status % (PULL_MESSAGES, PULL_BYTES - 1), consumer._sid))
    consumer.request_more()
    (repeated_request,) = drain_requests(consumer)
    assert repeated_request["max_bytes"] == PULL_BYTES  # Nothing is under way any more.
    consumer.accept(
        status_message(
            status % (repeated_request["batch"], repeated_request["max_bytes"]), consumer._sid
        )
    )
    consumer.request_more()
    (next_request,) = drain_requests(
        consumer
    )  # The next message is longer than the requested bytes.
    assert next_request["max_bytes"] == 2 * PULL_BYTES
    consumer.check()
    assert consumer.pending == 9


def test_requested_messages_do_not_accumulate() -> None:
    """The model counts bytes like a server, and ends a request whose next message does not fit."""
    consumer, batch_max = create_consumer(delivered_count=0), 8000
    consumer._batch_bytes_max = batch_max
    consumer._core.is_ready = True
    requests: deque[list[int]] = deque()
    body, served_count = "x" * 100, 0
    while served_count < 2000:
        consumer.request_more()
        requests += [
            [request["batch"], request["max_bytes"]] for request in drain_requests(consumer)
        ]
        assert sum(size for _, size in requests) <= 1.5 * batch_max
        reply = f"$JS.ACK.S.c.1.{served_count + 1}.{served_count + 1}.0.9"
        size = len("s") + len(reply) + len(body)
        batch, bytes_left = requests.popleft()
        if size > bytes_left:
            status = "409 Message Size Exceeds MaxBytes\r\nNats-Pending-Messages: {}\r\n"
            line = (status + "Nats-Pending-Bytes: {}").format(batch, bytes_left)
            consumer.accept(status_message(line, consumer._sid))
            continue
        requests.appendleft([batch - 1, bytes_left - size])
        delivery = f"MSG s {consumer._sid} {reply} {len(body)}\r\n{body}\r\n"
        (messages,) = ClientParser().receive(delivery.encode())
        assert isinstance(messages, ReceivedMessages)
        served_count += consumer.accept(messages).messages.count


def test_unused_bytes_of_served_request_are_released() -> None:
    """Short messages complete a request before its bytes are used, without a status message."""
    consumer = create_consumer(delivered_count=0)
    consumer._core.is_ready = True
    consumer._batch_max = 4
    consumer.request_more()
    drain_requests(consumer)
    consumer.accept(deliveries(1, 2, 3, 4, sid=consumer._sid))
    consumer.request_more()
    (repeated_request,) = drain_requests(consumer)
    assert (repeated_request["batch"], repeated_request["max_bytes"]) == (4, PULL_BYTES)
