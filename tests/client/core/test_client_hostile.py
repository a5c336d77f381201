"""Tests of the client core with invalid input: it raises RemoteProtocolError or counts it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.client.core.client import ClientCore
from simplebus.core.errors import BusConnectionError, Reason, RemoteProtocolError
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.core.protocol.requests import ConnectReply, SubscribeReply
from tests.client.core.model_server import (
    CONFIRM,
    CONNECT,
    DELIVER,
    ERROR,
    FETCH,
    HEARTBEAT,
    MESSAGE,
    SUBSCRIBE,
    UNSUBSCRIBE,
    ModelConnection,
    ModelServer,
    open_connection,
    subscribe_confirmed,
)
from tests.support.oracles import build_frame
from tests.support.strategies import garbled_streams, streams


def test_unannounced_message_is_a_protocol_error() -> None:
    connection = open_connection()
    subscribe_confirmed(connection)
    connection.server.send_frame(MESSAGE, 1, 0, 0, b"x")
    with pytest.raises(
        RemoteProtocolError, match="Deliver frame for that class before it, got None"
    ):
        connection.exchange()
    connection.disconnect()
    connection.connect()
    connection.exchange()
    connection.server.deliver(1, class_id=1)
    connection.server.send_frame(MESSAGE, 2, 0, 0, b"x")
    with pytest.raises(RemoteProtocolError, match=r"of class 2; .* \(1, 1, 1\)"):
        connection.exchange()


def test_delivery_header_does_not_survive_reconnect() -> None:
    connection = open_connection()
    subscribe_confirmed(connection)
    connection.server.deliver(1)
    connection.exchange()
    connection.disconnect()
    connection.connect()
    connection.exchange()
    connection.server.send_frame(MESSAGE, 1, 0, 0, b"x")
    with pytest.raises(
        RemoteProtocolError, match="Deliver frame for that class before it, got None"
    ):
        connection.exchange()


@pytest.mark.parametrize("kind", [MESSAGE, CONFIRM, DELIVER, SUBSCRIBE, UNSUBSCRIBE, FETCH, 0x7F])
def test_frame_before_connect_reply_is_a_protocol_error(kind: int) -> None:
    connection = ModelConnection()
    connection.connect()
    connection.server.send_frame(HEARTBEAT)
    connection.server.send_frame(kind, 1, 0, 0, b"{}")
    with pytest.raises(RemoteProtocolError, match="expected the reply to the Connect first"):
        connection.receive()


def test_unexpected_reply_is_a_protocol_error() -> None:
    connection = open_connection()
    connection.server.send_frame(SUBSCRIBE, 1, 99, 1, SubscribeReply(cursor=0, floor=0).encode())
    with pytest.raises(
        RemoteProtocolError, match=r"replied to request 99 .* but no such request is open"
    ):
        connection.exchange()


def test_version_1_server_is_detected() -> None:
    connection = ModelConnection(server=ModelServer(is_replying=False))
    connection.connect()
    connection.server.send_frame(CONNECT, 0, 0, 0, bytes(4))
    with pytest.raises(RemoteProtocolError):
        connection.receive()


def test_connect_reply_without_valid_class_id_is_a_protocol_error() -> None:
    connection = ModelConnection(server=ModelServer(is_replying=False))
    connection.core.name_classes("orders")
    connection.server.connect()
    request = connection.core.connection_made(0.0)
    reply = ConnectReply(session=1, classes={"orders": 65536})
    connection.server.send_frame(CONNECT, 0, request.number, 0, reply.encode())
    with pytest.raises(RemoteProtocolError, match=r"for 'orders', .* got 65536"):
        connection.receive()
    connection.disconnect()
    assert request.is_done
    assert isinstance(request.error, BusConnectionError)


def test_counts_frames_of_unknown_types() -> None:
    connection = open_connection()
    connection.server.send_frame(ord("z"), 1, 1, 1, b"whatever")
    connection.exchange()
    assert connection.core.statistics().ignored == 1


def test_too_long_frame_is_a_protocol_error() -> None:
    connection = ModelConnection(ClientCore(frame_bytes_max=300))
    connection.connect()
    connection.exchange()
    connection.server.send_frame(HEARTBEAT, content=b"x" * 300)
    with pytest.raises(RemoteProtocolError) as caught:
        connection.exchange()
    assert caught.value.reason == Reason.FRAME_TOO_LONG


@given(
    st.one_of(
        streams(),
        garbled_streams(),
        st.lists(
            st.builds(
                build_frame,
                st.sampled_from([*b"0123456789UFE"]),
                class_id=st.integers(0, 2),
                message_id=st.integers(0, 6),
                timer_index=st.sampled_from([0, 1, 2, 50, MESSAGE, SUBSCRIBE]),
                content=st.sampled_from(
                    [
                        b"",
                        b"{}",
                        b'{"session":1}',
                        b'{"cursor":0,"floor":0}',
                        b'{"code":"x","message":"y"}',
                        b'{"first":0,"next":1,"floor":0,"head":1}',
                        b"\0x",
                    ]
                ),
            )
        ).map(b"".join),
    ),
    st.booleans(),
)
def test_any_bytes_are_accepted_or_raise_a_remote_protocol_error(
    data: bytes, is_accepted: bool
) -> None:
    connection = open_connection() if is_accepted else ModelConnection()
    core = connection.core
    if not is_accepted:
        connection.connect()
    inbox = core.subscribe(1)
    core.fetch(1, 0, 3)
    core.publish_many([b"x"] * 4, 1)
    connection.send()
    buffer = ReceiveBuffer(len(data) + 1)
    try:
        core.receive(buffer, buffer.fill(data), 0.0)
    except RemoteProtocolError:
        core.connection_lost()
    core.check_invariants()
    while inbox.error is None and (batch := inbox.pop_batch()) is not None:
        assert len(batch) > 0
        inbox.settle(include_last=True)
    core.send_queue.peek()
    core.check_invariants()


def test_property_covers_every_frame_type() -> None:
    """The property above lists every frame type."""
    assert {*b"0123456789UFE"} >= {CONFIRM, DELIVER, ERROR, UNSUBSCRIBE, FETCH}
