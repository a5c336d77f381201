"""The client core and what should not come: it is refused, or counted, and is the bus's fault."""

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
    Line,
    ModelServer,
    connected,
    subscribed,
)
from tests.support.oracles import build_frame
from tests.support.strategies import garbled_streams, streams


def test_a_message_for_nobody_is_refused() -> None:
    line = connected()
    subscribed(line)
    line.server.say(MESSAGE, 1, 0, 0, b"x")
    with pytest.raises(RemoteProtocolError, match="before it announced None"):
        line.exchange()
    line.lose()
    line.connect()
    line.exchange()
    line.server.deliver(1, class_id=1)
    line.server.say(MESSAGE, 2, 0, 0, b"x")
    with pytest.raises(RemoteProtocolError, match=r"of class 2, .* \(1, 1, 1\)"):
        line.exchange()


def test_an_announcement_is_forgotten_with_its_connection() -> None:
    line = connected()
    subscribed(line)
    line.server.deliver(1)
    line.exchange()
    line.lose()
    line.connect()
    line.exchange()
    line.server.say(MESSAGE, 1, 0, 0, b"x")
    with pytest.raises(RemoteProtocolError, match="announced None"):
        line.exchange()


@pytest.mark.parametrize("kind", [MESSAGE, CONFIRM, DELIVER, SUBSCRIBE, UNSUBSCRIBE, FETCH, 0x7F])
def test_before_the_answer_nothing_else_comes(kind: int) -> None:
    line = Line()
    line.connect()
    line.server.say(HEARTBEAT)
    line.server.say(kind, 1, 0, 0, b"{}")
    with pytest.raises(RemoteProtocolError, match="expected the reply to the Connect first"):
        line.hear()


def test_an_answer_that_nobody_waits_for_is_refused() -> None:
    line = connected()
    line.server.say(SUBSCRIBE, 1, 99, 1, SubscribeReply(cursor=0, floor=0).encode())
    with pytest.raises(RemoteProtocolError, match=r"answered request 99 .* nobody waits for"):
        line.exchange()


def test_a_bus_of_version_1_is_told_apart() -> None:
    line = Line(server=ModelServer(answers=False))
    line.connect()
    line.server.say(CONNECT, 0, 0, 0, bytes(4))
    with pytest.raises(RemoteProtocolError):
        line.hear()


def test_a_bus_that_gives_no_class_id_is_refused() -> None:
    line = Line(server=ModelServer(answers=False))
    line.core.name_classes("orders")
    line.server.connect()
    request = line.core.connection_made(0.0)
    reply = ConnectReply(session=1, classes={"orders": 65536})
    line.server.say(CONNECT, 0, request.number, 0, reply.encode())
    with pytest.raises(RemoteProtocolError, match=r"for 'orders', .* got 65536"):
        line.hear()
    line.lose()
    assert request.is_done
    assert isinstance(request.error, BusConnectionError)


def test_frames_of_unknown_types_are_counted() -> None:
    line = connected()
    line.server.say(ord("z"), 1, 1, 1, b"whatever")
    line.exchange()
    assert line.core.statistics().ignored == 1


def test_a_frame_longer_than_agreed_is_refused() -> None:
    line = Line(ClientCore(frame_bytes_max=200))
    line.connect()
    line.exchange()
    line.server.say(HEARTBEAT, content=b"x" * 200)
    with pytest.raises(RemoteProtocolError) as caught:
        line.exchange()
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
def test_any_bytes_are_taken_or_refused_as_the_bus_s_fault(data: bytes, answered: bool) -> None:
    line = connected() if answered else Line()
    core = line.core
    if not answered:
        line.connect()
    inbox = core.subscribe(1)
    core.fetch(1, 0, 3)
    core.publish_many([b"x"] * 4, 1)
    line.say()
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


def test_any_type_of_frame_may_be_tried() -> None:
    """The property above meets every type of frame: they are all named here."""
    assert {*b"0123456789UFE"} >= {CONFIRM, DELIVER, ERROR, UNSUBSCRIBE, FETCH}
