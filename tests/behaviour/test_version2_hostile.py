"""Version 2 at the broker: hostile input affects no other session and has bounded cost."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import RECEIVE_BYTES
from simplebus.core.protocol.requests import SubscribeRequest
from tests.behaviour.wire_peer import BrokerHarness, numbered
from tests.behaviour.wire_peer_v2 import (
    ACK,
    CONNECT,
    FETCH,
    NACK,
    SUBSCRIBE,
    UNSUBSCRIBE,
    WORKING,
    ack,
    channel_envelope,
    connect_version2,
    json_request,
    nack,
    publish,
    publish_envelopes,
    subscribe,
    working,
)
from tests.support.oracles import ID_COUNT, build_frame, parse_frame, split_frames

REQUESTS = [
    json_request(SUBSCRIBE, 1, 2, 3, channels=["a.*"], durable="d", start={"sequence": 1}),
    json_request(UNSUBSCRIBE, 3, 2, forget=True),
    json_request(FETCH, 1, 2, first=0, count=3),
    json_request(CONNECT, 0, 2, classes=[1, "n"]),
    ack(3, 0, 2),
    nack(3, 0, 1, 5),
    working(3, 0, 1),
    publish(1, 0, b"x"),
    publish_envelopes(1, 1, channel_envelope("a.b", b"x")),
]
SERVER_ONLY = [build_frame(kind) for kind in b"678E"]


@pytest.mark.parametrize("frame", SERVER_ONLY)
def test_server_only_frames_are_refused(frame: bytes) -> None:
    peer = connect_version2(BrokerHarness())
    if frame[0] == NACK:
        peer.send(frame)
        assert peer.receive_error_codes() == ["bad_ack"]
    else:
        assert peer.send_refused(frame) is Reason.UNKNOWN_TYPE


@pytest.mark.parametrize("kind", [ACK, NACK, WORKING])
@pytest.mark.parametrize(
    "content",
    [b"", b"-", b"5", b"5-5", b"6-5", b"0-2147483649", b"a-b", b"1-2 x", b"1-2 ", b"1-2-3"],
)
def test_invalid_range_is_refused_without_closing(kind: int, content: bytes) -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, subscribe(1, 5), publish(1, 0, *numbered(9)))
    peer.receive_all()
    peer.send(build_frame(kind, class_id=5, content=content))
    [error] = peer.receive_replies()
    assert (error.content["code"], error.last_field, error.class_id) == ("bad_ack", kind, 0)
    assert bus.statistics(1).in_flight == 9


@given(data=st.data())
def test_corrupted_bytes_do_not_affect_other_sessions(data: st.DataObject) -> None:
    bus = BrokerHarness()
    bystander = connect_version2(bus, subscribe(1, 5, start="new"), classes=(1,))
    bystander.receive_replies()
    peer = connect_version2(bus)
    wrong = bytearray(b"".join(data.draw(st.lists(st.sampled_from(REQUESTS), max_size=12))))
    for at, value in data.draw(
        st.lists(st.tuples(st.integers(0, max(0, len(wrong) - 1)), st.integers(0, 255)), max_size=6)
    ):
        if at < len(wrong):
            wrong[at] = value
    try:
        peer.send(bytes(wrong))
        peer.read_bytes(1 << 30)
        bus.tick(2)
        bus.broker.clock.now += 10
        bus.broker.run_due_wakeups()
    except RemoteProtocolError as error:
        bus.broker.send_fatal_error(peer.session, error)
        peer.read_bytes(1 << 30)
        peer.disconnect()
    bystander.read_bytes(1 << 30)
    bystander.send(json_request(FETCH, 1, 3))
    assert bystander.receive_replies()[-1].kind == "fetch"
    bus.check_invariants()


values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=9)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner)
    ),
    max_leaves=6,
)


@given(
    kind=st.sampled_from([SUBSCRIBE, UNSUBSCRIBE, FETCH, CONNECT]),
    key=st.sampled_from([0, 1, 3, 65535]),
    request=st.sampled_from([0, 7, ID_COUNT - 1]),
    number=st.sampled_from([0, 3, 65535]),
    field=st.sampled_from(
        [*SubscribeRequest.__struct_fields__, "first", "count", "classes", "forget"]
    ),
    value=values,
)
def test_any_field_value_is_accepted_or_refused(
    kind: int, key: int, request: int, number: int, field: str, value: object
) -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, subscribe(1, 3), publish(1, 0, *numbered(3)))
    peer.receive_all()
    content = msgspec.json.encode({field: value})
    peer.send(
        build_frame(kind, class_id=key, message_id=request, timer_index=number, content=content)
    )
    answers = [reply for reply in peer.receive_replies() if reply.kind != "confirm"]
    assert len(answers) == 1
    assert answers[0].message_id == request
    assert answers[0].kind != "error" or not answers[0].content["fatal"]


def test_request_number_is_echoed() -> None:
    peer = connect_version2(BrokerHarness())
    for content in (b"{}", b"no"):
        frame = build_frame(FETCH, class_id=1, message_id=0xFFFFFFFE, content=content)
        peer.send(frame)
        answers, _ = split_frames(peer.read_bytes(1000))
        assert parse_frame(answers[-1])[2] == 0xFFFFFFFE


def test_cost_of_patterns_and_channels_is_linear() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    writer = connect_version2(bus)
    for first in range(0, 60_000, 10_000):
        contents = [channel_envelope(f"c.{n}", b"") for n in range(first, first + 10_000)]
        writer.send(publish_envelopes(1, first, *contents))
    peer = connect_version2(bus)
    for number in range(1, 50):
        patterns = [f"c.{n * number}" for n in range(250)] + ["x.*.y"]
        peer.send(subscribe(1, number, start="new", channels=patterns))
    peer.receive_replies()
    writer.send(publish_envelopes(1, 60_000, channel_envelope("c.49", b"")))
    assert [message.number for message in peer.receive_deliveries()] == [1, 7, 49]


def test_read_size_grows_for_bulk_and_shrinks_for_expensive_events() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    peer = connect_version2(bus)
    frame_of_100 = publish(1, 0, b"x" * 87)
    number = 0
    while peer.session.next_read_bytes < RECEIVE_BYTES:
        count = peer.session.next_read_bytes // len(frame_of_100) + 1
        peer.send(publish(1, number, *[b"x" * 87] * count))
        number += count
    assert number < 10 * RECEIVE_BYTES / 100
    peer.send(publish(9, number, b"unknown") + publish(1, number + 1, b"x"))
    assert peer.session.next_read_bytes == RECEIVE_BYTES, "a few are no matter"
    requests = b"".join(subscribe(1, number) for number in range(1, 201))
    peer.send(requests)
    assert peer.session.next_read_bytes < len(requests)
