"""What a consumer sends counts as long as it says that nothing was left out."""

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


def pulled(delivered_count: int) -> PullConsumer:
    connection: Any = SimpleNamespace(core=NatsClientCore(inbox="_INBOX.me"))
    return PullConsumer(
        connection, "S", "c", delivered_count=delivered_count, pending=9, heartbeat_seconds=1.0
    )


def delivered(*counts: int, sid: int, pending: int = 5) -> ReceivedMessages:
    """Under sequences that are ten times as high."""
    said = [f"MSG s {sid} $JS.ACK.S.c.1.{10 * n}.{n}.0.{pending} 0\r\n\r\n" for n in counts]
    (messages,) = ClientParser().receive("".join(said).encode())
    assert isinstance(messages, ReceivedMessages)
    return messages


def status(line: str, sid: int) -> ReceivedMessages:
    block = f"NATS/1.0 {line}\r\n\r\n"
    (messages,) = ClientParser().receive(
        f"HMSG s {sid} {len(block)} {len(block)}\r\n{block}\r\n".encode()
    )
    assert isinstance(messages, ReceivedMessages)
    return messages


@given(st.lists(st.integers(1, 40), max_size=9), st.integers(0, 200), st.integers(-3, 3))
def test_accepts_deliveries_up_to_first_gap(sizes: list[int], broken: int, by: int) -> None:
    """In pieces of these sizes; from the message with number `broken` on, counts are otherwise."""
    source, first, got = pulled(delivered_count=7), 8, []
    counts = [n + (by if n >= broken else 0) for n in range(first, first + sum(sizes))]
    end = next((row for row, n in enumerate(counts) if n != first + row), len(counts))
    at = 0
    for size in sizes:
        piece = counts[at : at + size]
        got += source.accept(delivered(*piece, sid=source._sid)).sequences.tolist()
        at += size
        if at > end:
            with pytest.raises(BusConnectionError, match="a delivery is missing"):
                source.check()
            break
        source.check()
    whole = np.cumsum(sizes)
    taken = int(whole[whole <= end].max(initial=0))
    assert got == [10 * n for n in counts[:taken]]


def test_ignores_messages_of_other_consumers() -> None:
    source = pulled(delivered_count=0)
    assert source.accept(delivered(1, 2, sid=source._sid + 1)).messages.count == 0
    assert source.accept(delivered(1, 2, sid=source._sid, pending=3)).sequences.tolist() == [10, 20]
    assert source.pending == 3
    source.check()


@pytest.mark.parametrize("line", ["404 No Messages", "408 Request Timeout", "100 Idle Heartbeat"])
def test_empty_status_clears_pending_count(line: str) -> None:
    source = pulled(delivered_count=0)
    source.accept(status(line, source._sid))
    source.check()
    assert source.pending == 0


@pytest.mark.parametrize("line", ["409 Consumer Deleted", "503"])
def test_check_raises_reason_of_ended_consumer(line: str) -> None:
    source = pulled(delivered_count=0)
    source.accept(status(line, source._sid))
    with pytest.raises(BusConnectionError, match=f"'c' of stream 'S' has ended: {line}"):
        source.check()


def asked(source: PullConsumer) -> list[dict[str, Any]]:
    """What it has asked for since the last time."""
    said = b"".join(bytes(each) for each in source._core.drain_output())
    return [msgspec.json.decode(each) for each in re.findall(rb"\{[^}]*\}", said)]


def test_requests_are_bounded_in_messages_and_bytes() -> None:
    source = pulled(delivered_count=0)
    source._core.is_ready = True
    for _ in range(2):
        source.request_more()
    (first,) = asked(source)
    assert (first["batch"], first["max_bytes"]) == (PULL_MESSAGES, PULL_BYTES)
    for count in range(3, 7):
        body = "x" * (PULL_BYTES // 4)
        said = (
            f"MSG s {source._sid} $JS.ACK.S.c.1.{count}.{count - 2}.0.9 {len(body)}\r\n{body}\r\n"
        )
        (messages,) = ClientParser().receive(said.encode())
        assert isinstance(messages, ReceivedMessages)
        assert source.accept(messages).messages.count == 1
        source.request_more()
    requests = asked(source)
    assert 2 <= len(requests) <= 3
    assert all(PULL_BYTES // 2 <= each["max_bytes"] <= PULL_BYTES for each in requests)
    assert all(PULL_MESSAGES // 2 <= each["batch"] <= PULL_MESSAGES for each in requests)


def test_requests_unserved_messages_again() -> None:
    source = pulled(delivered_count=0)
    source._core.is_ready = True
    source.request_more()
    asked(source)
    over = (
        "409 Message Size Exceeds MaxBytes\r\nNats-Pending-Messages: %d\r\nNats-Pending-Bytes: %d"
    )
    source.accept(status(over % (PULL_MESSAGES, PULL_BYTES - 1), source._sid))
    source.request_more()
    (again,) = asked(source)
    assert again["max_bytes"] == PULL_BYTES  # Nothing is under way any more.
    source.accept(status(over % (again["batch"], again["max_bytes"]), source._sid))
    source.request_more()
    (more,) = asked(source)  # The message that is next has no room in as much.
    assert more["max_bytes"] == 2 * PULL_BYTES
    source.check()
    assert source.pending == 9


def test_requested_messages_do_not_accumulate() -> None:
    """As a server counts: subject, ack subject and what is said. It ends a request in which the
    next message has no room."""
    source, batch_max = pulled(delivered_count=0), 8000
    source._batch_bytes_max = batch_max
    source._core.is_ready = True
    requests: deque[list[int]] = deque()
    body, done = "x" * 100, 0
    while done < 2000:
        source.request_more()
        requests += [[each["batch"], each["max_bytes"]] for each in asked(source)]
        assert sum(size for _, size in requests) <= 1.5 * batch_max
        reply = f"$JS.ACK.S.c.1.{done + 1}.{done + 1}.0.9"
        size = len("s") + len(reply) + len(body)
        batch, left = requests.popleft()
        if size > left:
            over = "409 Message Size Exceeds MaxBytes\r\nNats-Pending-Messages: {}\r\n"
            line = (over + "Nats-Pending-Bytes: {}").format(batch, left)
            source.accept(status(line, source._sid))
            continue
        requests.appendleft([batch - 1, left - size])
        said = f"MSG s {source._sid} {reply} {len(body)}\r\n{body}\r\n"
        (messages,) = ClientParser().receive(said.encode())
        assert isinstance(messages, ReceivedMessages)
        done += source.accept(messages).messages.count


def test_unused_bytes_of_served_request_are_released() -> None:
    """Of short messages all come before the bytes are used up, and nobody says what is left."""
    source = pulled(delivered_count=0)
    source._core.is_ready = True
    source._batch_max = 4
    source.request_more()
    asked(source)
    source.accept(delivered(1, 2, 3, 4, sid=source._sid))
    source.request_more()
    (again,) = asked(source)
    assert (again["batch"], again["max_bytes"]) == (4, PULL_BYTES)
