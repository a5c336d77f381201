"""Tests of the client core across connections: handshake, class names, heartbeats, fetch."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.client.core.client import ClientCore
from simplebus.core.errors import (
    BusConnectionError,
    LocalProtocolError,
    Reason,
    RemoteProtocolError,
)
from simplebus.core.protocol.requests import (
    ConnectReply,
    ConnectRequest,
    FetchReply,
    FetchRequest,
    NamedClass,
    SubscribeRequest,
)
from tests.client.core.model_server import (
    CONFIRM,
    CONNECT,
    DELIVER,
    ENVELOPE,
    FETCH,
    HEARTBEAT,
    MESSAGE,
    SUBSCRIBE,
    ModelConnection,
    numbered_messages,
    open_connection,
    subscribe_confirmed,
)
from tests.support.oracles import build_frame

# Connections -------------------------------------------------------------------------------------


def test_first_frame_is_a_connect_with_name_and_classes() -> None:
    core = ClientCore(name="tester", instance="one", heartbeat_seconds=7.0, client="test 1")
    core.publish(b"", 5)
    core.subscribe(6)
    core.name_classes("orders", NamedClass(id=9, name="nine"))
    core.keep_last_values(8)
    request = core.connection_made(0.0)
    assert bytes(core.send_queue.peek()) == build_frame(
        CONNECT,
        message_id=request.number,
        content=ConnectRequest(
            name="tester",
            instance="one",
            heartbeat=7.0,
            client="test 1",
            classes=[
                5,
                6,
                NamedClass(name="orders"),
                NamedClass(id=9, name="nine"),
                NamedClass(id=8, last_values=True),
            ],
        ).encode(),
    )


def test_is_ready_after_connect_reply() -> None:
    connection = ModelConnection()
    assert (connection.core.is_ready, connection.core.session_id) == (False, None)
    connection.server.connect()
    request = connection.core.connection_made(0.0)
    connection.exchange()
    assert (connection.core.is_ready, connection.core.session_id) == (True, 1)
    assert isinstance(request.reply, ConnectReply)
    assert (request.is_done, request.error) == (True, None)
    connection.disconnect()
    assert (connection.core.is_ready, connection.core.session_id) == (False, None)


def test_reconnect_sends_classes_subscriptions_messages_then_requests() -> None:
    connection = open_connection()
    first = subscribe_confirmed(connection)
    subscribe_confirmed(connection, SubscribeRequest(group="g"))
    connection.core.publish(b"again", 3)
    connection.exchange()
    connection.server.next = 0
    connection.disconnect()
    connection.core.publish(b"later", 4)
    third_inbox = connection.core.subscribe(5)
    connection.core.fetch(1, 0, 1)
    synced = connection.core.sync()
    connection.connect()
    connection.exchange()
    expected = [CONNECT, SUBSCRIBE, SUBSCRIBE, SUBSCRIBE, MESSAGE, MESSAGE, FETCH, CONNECT]
    assert connection.server.frame_types() == bytes(expected)
    connect_content = msgspec.json.decode(connection.server.frames[0][4], type=ConnectRequest)
    assert connect_content == ConnectRequest(
        name="tester", instance="one", classes=[1, 3, 4, 5], unconfirmed=0, bus="bus"
    )
    subscriptions = [frame[3] for frame in connection.server.frames[1:4]]
    assert subscriptions == [1, 2, 3]
    assert first.subscribe_request.is_done
    assert third_inbox.subscribe_request.is_done
    assert synced.is_done
    assert connection.core.statistics().reconnections == 1


def test_lost_connection_fails_requests_but_not_subscriptions() -> None:
    connection = open_connection(is_replying=False)
    core = connection.core
    connection.server.reply_to_connect(1)
    connection.exchange()
    requests = [core.sync(), core.name_classes("name"), core.fetch(1, 0, 9)]
    inbox = core.subscribe(1)
    connection.send()
    connection.disconnect()
    for request in requests:
        assert request.is_done
        assert isinstance(request.error, BusConnectionError)
    assert not inbox.subscribe_request.is_done
    connection.server.is_replying = True
    connection.connect()
    connection.exchange()
    assert inbox.subscribe_request.is_done
    assert core.find_class_id("name") == 1004, "class names that were not confirmed are sent again"


def test_fail_requests_fails_every_request() -> None:
    core = ClientCore()
    requests = [core.sync(), core.subscribe(1).subscribe_request]
    error = BusConnectionError("no server")
    core.fail_requests(error)
    assert [(request.is_done, request.error) for request in requests] == [(True, error)] * 2


def test_reconnect_sends_class_ids_that_the_server_assigned() -> None:
    connection = open_connection()
    assert connection.core.find_class_id("orders") is None
    connection.core.name_classes("orders")
    connection.exchange()
    assert connection.core.find_class_id("orders") == 1006
    connection.disconnect()
    connection.connect()
    connection.exchange()
    assert b'{"id":1006,"name":"orders"}' in connection.server.frames[0][4]
    connection.core.publish(b"", 1006)
    connection.exchange()
    assert connection.server.frame_types() == bytes([CONNECT, MESSAGE])


def test_class_that_is_named_again_keeps_its_id_and_last_values() -> None:
    connection = open_connection()
    connection.core.name_classes(NamedClass(name="orders", last_values=True))
    connection.exchange()
    connection.core.name_classes("orders")
    assert connection.core.find_class_id("orders") == 1006
    connection.exchange()
    connection.disconnect()
    connection.connect()
    connection.exchange()
    assert b'{"id":1006,"name":"orders","last_values":true}' in connection.server.frames[0][4]


def test_names_a_class_once_before_first_use() -> None:
    connection = open_connection()
    connection.core.publish(b"", 5)
    connection.core.publish_many([b""], 5)
    connection.core.subscribe(5)
    connection.core.fetch(6, 0, 1)
    connection.exchange()
    assert connection.server.frame_types() == bytes(
        [CONNECT, CONNECT, MESSAGE, MESSAGE, SUBSCRIBE, CONNECT, FETCH]
    )


def test_names_a_refused_class_again_at_next_use() -> None:
    connection = open_connection()
    connection.server.is_replying = False
    connection.core.publish(b"", 5)
    connection.send()
    number = connection.server.frames[1][2]
    connection.server.send_error("too_many_classes", kind=CONNECT, number=number)
    connection.exchange()
    connection.core.publish(b"", 5)
    connection.exchange()
    assert connection.server.frame_types() == bytes([CONNECT, CONNECT, MESSAGE, CONNECT, MESSAGE])
    connection.disconnect()
    connection.server.is_replying = True
    connection.connect()
    connection.exchange()


@pytest.mark.parametrize("class_id", [-1, 65536, 1.5, None, True])
def test_rejects_class_id_out_of_range(class_id: int) -> None:
    core = ClientCore()
    for use in (
        lambda: core.publish(b"", class_id),
        lambda: core.publish_many([b""], class_id),
        lambda: core.subscribe(class_id),
        lambda: core.fetch(class_id, 0, 1),
        lambda: core.name_classes(1, class_id),
    ):
        with pytest.raises(ValueError, match=f"0 to 65535, got {class_id!r}"):
            use()


def test_rejects_class_name_out_of_range() -> None:
    for name in ("", "x" * 201):
        with pytest.raises(ValueError, match="1 to 200 characters"):
            ClientCore().name_classes(name)


# Heartbeats --------------------------------------------------------------------------------------


def test_silent_client_sends_heartbeats() -> None:
    connection = open_connection(heartbeat=10.0)
    times = [connection.now]
    while times[-1] < 100:
        connection.now = connection.core.tick(times[-1])
        times.append(connection.now)
        heartbeats_before = connection.server.frame_types().count(HEARTBEAT)
        connection.core.tick(connection.now)
        connection.send()
        connection.server.send_frame(HEARTBEAT)
        connection.receive()
        assert connection.server.frame_types().count(HEARTBEAT) <= heartbeats_before + 1
    assert 10 <= connection.server.frame_types().count(HEARTBEAT) <= 20
    assert max(after - heartbeats_before for heartbeats_before, after in pairwise(times)) <= 10


def test_publishing_client_sends_no_heartbeat() -> None:
    connection = open_connection(heartbeat=10.0)
    for second in range(100):
        connection.now = float(second)
        connection.core.tick(connection.now)
        connection.core.publish(b"", 1)
        connection.server.send_frame(HEARTBEAT)
        connection.exchange()
    assert HEARTBEAT not in connection.server.frame_types()


def test_silent_server_raises_heartbeat_timeout() -> None:
    connection = open_connection(heartbeat=10.0)
    connection.core.tick(29.9)
    assert connection.core.tick(29.9) <= 30.0
    with pytest.raises(RemoteProtocolError, match=r"silent for 30.0 s; .* every 10 s") as caught:
        connection.core.tick(30.0)
    assert caught.value.reason == Reason.HEARTBEAT_TIMEOUT
    connection.disconnect()
    assert connection.core.tick(31.0) == math.inf
    connection.now = 40.0
    connection.connect()
    connection.exchange()
    assert connection.core.tick(40.0) <= 50.0


def test_no_heartbeat_unless_agreed() -> None:
    connection = open_connection()
    assert connection.core.tick(1e9) == math.inf


# Fetching ----------------------------------------------------------------------------------------


def test_fetched_messages_belong_to_oldest_fetch_of_their_class() -> None:
    connection = open_connection()
    first, second = connection.core.fetch(1, 10, 3), connection.core.fetch(1, 0, 9)
    other_fetch = connection.core.fetch(2, 0, 9)
    connection.exchange()
    fetch_frames = [frame for frame in connection.server.frames if frame[0] == FETCH]
    assert fetch_frames[0][4] == FetchRequest(first=10, count=3).encode()
    connection.server.deliver(0, *numbered_messages(12, 15, 16), attempt=0)
    connection.server.reply_to_fetch(first.number, FetchReply(first=12, next=17, floor=12, head=30))
    connection.server.send_frame(MESSAGE, 1, 17, 0, b"17")
    connection.server.deliver(0, *numbered_messages(12), class_id=2, attempt=0)
    connection.server.deliver(0, *numbered_messages(0), class_id=1, attempt=0)
    first_sequence = (5 << 31) + 17
    connection.server.reply_to_fetch(
        second.number, FetchReply(first=first_sequence, next=first_sequence, floor=12, head=30)
    )
    connection.exchange()
    assert (first.is_done, second.is_done, other_fetch.is_done) == (True, True, False)
    first_messages = [m for batch in first.batches for m in batch]
    assert [(m.sequence, m.payload) for m in first_messages] == [
        (12, b"12"),
        (15, b"15"),
        (16, b"16"),
    ]
    assert first_messages[0].value == b"12"
    with pytest.raises(LocalProtocolError, match="fetched"):
        first_messages[0].ack()
    sequences = [m.sequence - (5 << 31) for batch in second.batches for m in batch]
    assert sequences == [17, 0]
    assert other_fetch.batches == []
    assert isinstance(first.reply, FetchReply)


def test_more_messages_than_requested_are_a_protocol_error() -> None:
    connection = open_connection()
    connection.core.fetch(1, 0, 2)
    connection.exchange()
    connection.server.deliver(0, *numbered_messages(0, 1, 2), attempt=0)
    with pytest.raises(RemoteProtocolError, match="3 fetched messages of class 1"):
        connection.exchange()


# Few frames --------------------------------------------------------------------------------------

received_frames = st.one_of(
    st.tuples(
        st.just(DELIVER), st.sampled_from([1, 2]), st.integers(0, 2), st.sampled_from([1, 2])
    ),
    st.tuples(
        st.sampled_from([MESSAGE, ENVELOPE]),
        st.sampled_from([1, 1, 1, 2]),
        st.integers(0, 9),
        st.integers(0, 1),
    ),
    st.tuples(st.just(CONFIRM), st.just(0), st.integers(0, 4), st.just(0)),
    st.tuples(st.sampled_from([HEARTBEAT, ord("?")]), st.just(0), st.just(0), st.just(0)),
)


@given(st.lists(received_frames, max_size=20))
def test_few_frames_are_processed_like_many(frame_fields: list[tuple[int, int, int, int]]) -> None:
    """A read of few whole frames takes a loop, reads that end within a frame take the arrays."""
    data = b"".join(
        build_frame(
            kind, class_id=class_id, message_id=number, timer_index=detail, content=b"\0payload"
        )
        for kind, class_id, number, detail in frame_fields
    )
    found = []
    for chunk_bytes in (1 << 16, 5):
        connection = open_connection()
        core = connection.core
        inboxes = [core.subscribe(class_id, auto_ack=False) for class_id in (1, 2)]
        for payload in (b"a", b"b", b"c"):
            core.publish(payload, 1)
        connection.exchange()
        connection.server.outgoing += data
        error = None
        try:
            while connection.server.outgoing:
                connection.receive(chunk_bytes)
        except RemoteProtocolError as problem:
            error = str(problem)
        messages = []
        for inbox in inboxes:
            while inbox.prepare_messages(9):
                messages += [(m.sequence, m.attempt, m.payload) for m in inbox.prepared_messages]
                inbox.settle(include_last=True)
        statistics = core.statistics()
        found.append((error, messages, statistics.confirmed, statistics.ignored))
    assert found[0] == found[1]
