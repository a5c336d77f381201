"""Tests of the publish buffer: messages are stored once and in order across connections."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplebus.client.core import publish_buffer
from simplebus.client.core.client import ClientCore
from simplebus.client.core.publish_buffer import PublishBuffer
from simplebus.core.errors import LocalProtocolError, Reason, RefusedError, RemoteProtocolError
from simplebus.core.limits import CREDIT_BYTES, PRODUCER_TAKEOVER_STEP
from simplebus.core.protocol import envelope_batch
from simplebus.core.protocol.envelope_batch import Envelope
from tests.client.core.model_server import (
    CONNECT,
    ENVELOPE,
    HEARTBEAT,
    MESSAGE,
    SUBSCRIBE,
    ModelConnection,
    ModelServer,
    open_connection,
)
from tests.support.oracles import ID_COUNT
from tests.support.strategies import contents

NUMBERED = [b"message %d" % number for number in range(200)]


def payloads(server: ModelServer) -> list[bytes]:
    """Return the stored payloads."""
    return [
        content if kind == MESSAGE else envelope_batch.decode(content)[1]
        for _, kind, content in server.stored
    ]


# Across connections ------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.data())
def test_messages_are_stored_once_and_in_order_wherever_connections_are_cut(
    data: st.DataObject,
) -> None:
    """Runs of 51 or more messages take the numpy paths; small batches split frames."""
    server = ModelServer(
        credit=data.draw(st.sampled_from([1, 60, 500, 3000, 1 << 20])),
        next=data.draw(st.sampled_from([0, 7, ID_COUNT - 1, ID_COUNT - 60])),
    )
    connection = ModelConnection(server=server)
    core, chunk = connection.core, data.draw(st.sampled_from([30, 200, 1 << 18]))
    published: list[bytes] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publish_buffer, "_BATCH_BYTES_MAX", chunk)
        is_connected = False
        for _ in range(data.draw(st.integers(1, 30))):
            match data.draw(st.sampled_from("oommwwwrrrccl")):
                case "o":
                    payload = data.draw(contents(40))
                    published.append(payload)
                    assert core.publish(payload, data.draw(st.integers(1, 3))) + 1 == len(published)
                case "m":
                    extra_payloads = data.draw(st.lists(contents(9), max_size=3)) * data.draw(
                        st.integers(1, 40)
                    )
                    published += extra_payloads
                    assert core.publish_many(extra_payloads, 1) + 1 == len(published)
                case "w" if is_connected:
                    connection.send(data.draw(st.integers(1, 2000)))
                case "r" if is_connected:
                    connection.receive(data.draw(st.integers(1, 200)))
                case "c" if server.is_connected:
                    server.confirm(data.draw(st.integers(0, len(server.unconfirmed))))
                case "l":
                    if is_connected:
                        connection.disconnect()
                    connection.connect()
                    is_connected = True
            core.check_invariants()
            assert (
                core.confirmed_position
                <= len(server.stored)
                <= core.published_position
                == len(published)
            )
        if not is_connected:
            connection.connect()
        connection.exchange()
        while len(server.stored) < len(published) or core.confirmed_position < len(published):
            state_before = (len(server.stored), core.confirmed_position, core.is_ready)
            connection.exchange()
            server.confirm()
            connection.exchange()
            assert state_before != (len(server.stored), core.confirmed_position, core.is_ready), (
                "no progress"
            )
    assert payloads(server) == published
    assert core.send_queue.queued_bytes == 0
    statistics = core.statistics()
    assert (statistics.confirmed, statistics.unconfirmed) == (len(published), 0)
    assert statistics.unconfirmed_bytes == 0
    assert statistics.resent >= server.duplicates


def test_messages_wait_for_first_connect_reply() -> None:
    connection = ModelConnection(server=ModelServer(is_replying=False))
    for payload in NUMBERED[:3]:
        connection.core.publish(payload, 1)
    connection.connect()
    connection.core.publish(NUMBERED[3], 2)
    connection.send()
    assert connection.server.frame_types() == bytes([CONNECT])
    connection.server.is_replying = True
    connection.server.reply_to_connect(1)
    connection.exchange()
    assert payloads(connection.server) == NUMBERED[:4]


def test_restarted_program_continues_its_numbers() -> None:
    connection = open_connection(next=ID_COUNT - 2)
    connection.core.publish_many(NUMBERED[:60], 1)
    connection.exchange()
    assert payloads(connection.server) == NUMBERED[:60]
    assert connection.server.next == 58
    connection.server.confirm()
    connection.exchange()
    assert connection.core.confirmed_position == 60


def test_messages_stored_by_the_server_are_not_resent() -> None:
    connection = open_connection()
    connection.core.publish_many(NUMBERED[:100], 1)
    connection.exchange()
    connection.disconnect()
    assert connection.core.confirmed_position == 0
    connection.core.publish(b"more", 1)
    connection.server.next = 70
    del connection.server.stored[70:]
    connection.connect()
    connection.exchange()
    assert payloads(connection.server) == [*NUMBERED[:100], b"more"]
    assert (connection.server.duplicates, connection.core.statistics().resent) == (0, 30)
    assert connection.core.confirmed_position == 70


def test_server_without_producer_state_receives_all_unconfirmed_messages() -> None:
    connection = open_connection(next=500)
    connection.core.publish_many(NUMBERED[:100], 1)
    connection.exchange()
    connection.server.confirm(60)
    connection.exchange()
    connection.disconnect()
    new_server = connection.server = ModelServer(bus="another")
    connection.connect()
    connection.exchange()
    assert payloads(new_server) == NUMBERED[40:100]
    new_server.confirm()
    connection.exchange()
    assert connection.core.confirmed_position == 100


def test_next_number_of_another_server_confirms_nothing() -> None:
    connection = open_connection()
    connection.core.publish_many(NUMBERED[:10], 1)
    connection.exchange()
    connection.disconnect()
    connection.server = ModelServer(bus="another", next=4)
    connection.connect()
    connection.exchange()
    assert payloads(connection.server) == NUMBERED[:10]


def test_unused_number_confirms_nothing_after_the_wrap() -> None:
    publisher = PublishBuffer(frame_bytes_max=1000, name_class=lambda class_id: None)
    publisher.published_position = publisher.confirmed_position = (
        ID_COUNT  # As if this many messages had been published.
    )
    publisher._released_position = publisher._numbered_position = ID_COUNT
    publisher.add_class(1)
    publisher.publish_many([b"a", b"b"], 1)
    publisher.resume(next_number=0, credit_bytes=1 << 20, frame_bytes_max=1000)
    assert publisher.release_batch() is not None
    for number in (3, PRODUCER_TAKEOVER_STEP, 2 * PRODUCER_TAKEOVER_STEP % ID_COUNT):
        publisher.connection_lost()
        publisher.resume(next_number=number, credit_bytes=1 << 20, frame_bytes_max=1000)
        assert (publisher.confirmed_position, publisher.first_unconfirmed_number) == (
            ID_COUNT,
            number,
        )
        chunk = publisher.release_batch()
        assert chunk is not None
        assert chunk.count == 2
    assert publisher.forgotten_count == 0


@pytest.mark.parametrize(("next_number", "is_kept"), [(0, True), (2, True), (3, False)])
def test_fixed_numbers_do_not_change(next_number: int, is_kept: bool) -> None:
    publisher = PublishBuffer(frame_bytes_max=1000, name_class=lambda class_id: None)
    publisher.fix_numbers()
    publisher.add_class(1)
    publisher.resume(next_number=0, credit_bytes=1 << 20, frame_bytes_max=1000)
    publisher.publish_many([b"a", b"b"], 1)
    assert publisher.release_batch() is not None
    publisher.publish_many([b"c", b"d"], 1)
    publisher.connection_lost()
    with contextlib.nullcontext() if is_kept else pytest.raises(RemoteProtocolError, match="taken"):
        publisher.resume(next_number=next_number, credit_bytes=1 << 20, frame_bytes_max=1000)
        assert publisher.first_unconfirmed_number == next_number


# Credit ------------------------------------------------------------------------------------------


def test_credit_holds_back_messages_only() -> None:
    connection = open_connection(credit=100)
    core, server = connection.core, connection.server
    for payload in NUMBERED[:10]:
        core.publish(payload, 1)  # 22 bytes each: four of them fit.
    assert not core.has_credit
    connection.exchange()
    assert payloads(server) == NUMBERED[:4]
    assert core.send_queue.queued_bytes == 6 * 22
    core.subscribe(2)
    synced = core.sync()
    connection.exchange()
    assert (server.frame_types().count(SUBSCRIBE), synced.is_done) == (1, False)
    server.confirm(2)
    connection.exchange()
    assert payloads(server) == NUMBERED[:6]
    while len(server.stored) < 10:
        assert not synced.is_done
        server.confirm()
        connection.exchange()
    assert synced.is_done
    server.confirm()
    connection.exchange()
    assert core.has_credit
    assert core.send_queue.queued_bytes == 0


def test_one_frame_may_exceed_the_credit() -> None:
    connection = open_connection(credit=10)
    connection.core.publish(b"x" * 1000, 1)
    connection.core.publish_many(NUMBERED[:3], 1)
    for stored in (1, 2, 3, 4):
        connection.exchange()
        assert len(connection.server.stored) == stored
        connection.server.confirm()
    connection.exchange()


# Late confirms -----------------------------------------------------------------------------------


def open_late_connection(**options: object) -> ModelConnection:
    """Return a connection of a client that lets Confirms wait."""
    server = ModelServer(allows_late_confirms=True, **options)  # type: ignore[arg-type]
    core = ClientCore(name="tester", instance="one", late_confirms=True)
    connection = ModelConnection(core, server)
    connection.connect()
    connection.exchange()
    return connection


def publish_and_send(connection: ModelConnection, *payloads: bytes) -> None:
    for payload in payloads:
        connection.core.publish(payload, 1)
    connection.send()


@pytest.mark.parametrize("count", [1, 50])
def test_confirm_that_nobody_requires_may_wait(count: int) -> None:
    connection = open_late_connection()
    publish_and_send(connection, *NUMBERED[:count])
    assert connection.server.is_confirm_late
    publish_and_send(connection, b"one more")
    assert connection.server.is_confirm_late


def test_confirms_of_many_messages_never_wait() -> None:
    connection = open_late_connection()
    publish_and_send(connection, *NUMBERED[:51])
    assert not connection.server.is_confirm_late


def test_confirm_that_is_required_before_sending_does_not_wait() -> None:
    connection = open_late_connection()
    connection.core.publish(b"required", 1)
    connection.core.require_confirm(1)
    publish_and_send(connection, b"not required, but in the same read")
    publish_and_send(connection, b"before the confirm")
    assert not connection.server.is_confirm_late
    connection.server.confirm()
    connection.exchange()
    publish_and_send(connection, b"behind the confirm")
    assert connection.server.is_confirm_late
    assert HEARTBEAT not in connection.server.frame_types()


def test_confirm_that_is_required_after_sending_ends_its_wait_by_one_heartbeat() -> None:
    connection = open_late_connection()
    publish_and_send(connection, b"sent")
    connection.core.require_confirm(1)
    connection.core.require_confirm(1)
    connection.send()
    assert not connection.server.is_confirm_late
    assert connection.server.frame_types().count(HEARTBEAT) == 1


def test_requires_no_confirm_twice() -> None:
    connection = open_late_connection()
    publish_and_send(connection, b"sent")
    connection.server.confirm()
    connection.exchange()
    connection.core.require_confirm(1)
    assert not connection.send()


def test_confirm_can_be_required_after_an_earlier_one_that_has_arrived() -> None:
    connection = open_late_connection()
    publish_and_send(connection, *NUMBERED[:2])
    connection.server.confirm(1)
    connection.exchange()
    connection.core.require_confirm(1)
    connection.core.require_confirm(2)
    connection.send()
    assert not connection.server.is_confirm_late


def test_messages_that_are_sent_again_are_confirmed_without_waiting() -> None:
    connection = open_late_connection()
    publish_and_send(connection, *NUMBERED[:3])
    connection.disconnect()
    connection.core.require_confirm(3)
    connection.connect()
    connection.exchange()
    assert not connection.server.is_confirm_late
    assert HEARTBEAT not in connection.server.frame_types()


@settings(deadline=None)
@given(st.data())
def test_late_confirms_keep_nobody_waiting(data: st.DataObject) -> None:
    """After everything is sent, no Confirm that is required or that grants credit is delayed."""
    credit = data.draw(st.sampled_from([1, 60, 500, 1 << 20]))
    connection = open_late_connection(credit=credit)
    core, server = connection.core, connection.server
    required = 0
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from("ooommrrssscl")):
            case "o":
                core.publish(data.draw(contents(40)), 1)
            case "m":
                core.publish_many([b"some"] * data.draw(st.sampled_from([2, 50, 51, 70])), 1)
            case "r":
                required = data.draw(st.integers(0, core.published_position))
                core.require_confirm(required)
            case "s":
                connection.exchange()
            case "c" if server.is_connected:
                server.confirm(data.draw(st.integers(0, len(server.unconfirmed))))
            case "l":
                connection.disconnect()
                connection.connect()
        core.check_invariants()
    connection.exchange()
    is_required = core.confirmed_position < min(required, core.publish_buffer.released_position)
    assert not (is_required and server.is_confirm_late)
    assert not (core.publish_buffer.unreleased_bytes and server.is_confirm_late)


def test_default_credit_before_connect_reply() -> None:
    core = ClientCore(name="tester")
    assert core.has_credit
    core.publish_many([bytes(1 << 16)] * (CREDIT_BYTES >> 16), 1)
    assert not core.has_credit


# Errors of the server ----------------------------------------------------------------------------


def test_ignores_older_confirms() -> None:
    connection = open_connection(next=ID_COUNT - 3)
    connection.core.publish_many(NUMBERED[:9], 1)
    connection.exchange()
    for unconfirmed_count, confirmed in ((4, 5), (7, 5), (4, 5), (0, 9), (9, 9)):
        connection.server.send_frame(
            ord("6"), 0, (connection.server.next - unconfirmed_count) % ID_COUNT
        )
        connection.exchange()
        assert connection.core.confirmed_position == confirmed


def test_confirm_of_unsent_message_is_a_protocol_error() -> None:
    connection = open_connection()
    connection.core.publish(b"", 1)
    connection.exchange()
    connection.server.send_frame(ord("6"), 0, 2)
    with pytest.raises(
        RemoteProtocolError, match=r"number_gap: .* for message number 2, .* to be sent is 1"
    ):
        connection.exchange()


def test_reports_refusals_by_position() -> None:
    connection = open_connection(next=ID_COUNT - 3)
    connection.core.publish_many(NUMBERED[:9], 1)
    connection.exchange()
    connection.server.send_error("unknown_class", kind=MESSAGE, number=ID_COUNT - 1, count=3)
    connection.server.confirm()
    connection.exchange()
    refusals = connection.core.pop_refusals()
    assert list(refusals) == [2, 3, 4]
    assert all(isinstance(error, RefusedError) for error in refusals.values())
    assert {error.code for error in refusals.values()} == {"unknown_class"}
    assert connection.core.confirmed_position == 9
    assert (connection.core.pop_refusals(), connection.core.statistics().refused) == ({}, 3)


def test_unread_refusals_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish_buffer, "_REFUSALS_MAX", 5)
    connection = open_connection()
    connection.core.publish_many(NUMBERED, 1)
    connection.exchange()
    for first, count in ((0, 3), (3, 1 << 30)):
        connection.server.send_error("drop_newest", kind=ENVELOPE, number=first, count=count)
        connection.exchange()
    assert list(connection.core.pop_refusals()) == [195, 196, 197, 198, 199]
    assert connection.core.statistics().refused == 200


# Accepted payloads -------------------------------------------------------------------------------


@given(
    st.lists(st.one_of(contents(), st.just(b"a<\r\n>b"), st.just(b"<\r\n\0<\r\n>")), max_size=60),
    st.sampled_from([None, Envelope(channel="a.b", key=b"<\r\n", headers=(("n", "v"),))]),
    st.booleans(),
)
def test_any_payload_arrives_unchanged(
    given_payloads: list[bytes], envelope: Envelope | None, at_once: bool
) -> None:
    connection = open_connection()
    if at_once:
        connection.core.publish_many(given_payloads, 0x3C0D, envelope)
    else:
        for payload in given_payloads:
            connection.core.publish(payload, 0x3C0D, envelope)
    connection.exchange()
    assert payloads(connection.server) == given_payloads
    for _, kind, content in connection.server.stored:
        if envelope is not None:
            assert envelope_batch.decode(content)[0] == envelope
        elif kind == ENVELOPE:
            assert b"<\r\n>" in envelope_batch.decode(content)[1]


def test_message_numbers_that_look_like_delimiters() -> None:
    connection = open_connection(next=0x0A3E3C0D)
    connection.core.publish_many(NUMBERED, 0x3C0D)
    connection.core.publish(b"<\r\n", 0x3C0D)
    connection.exchange()
    assert payloads(connection.server) == [*NUMBERED, b"<\r\n"]


def test_rejects_payload_too_long_for_a_frame() -> None:
    connection = ModelConnection(ClientCore(name="tester", frame_bytes_max=250))
    connection.connect()
    connection.exchange()
    core = connection.core
    with pytest.raises(LocalProtocolError, match=r"has 238 bytes; .* at most 237"):
        core.publish(b"x" * 238, 1)
    with pytest.raises(LocalProtocolError, match="at index 1 has 238 bytes; "):
        core.publish_many([b"x" * 237, b"x" * 238], 1)
    with pytest.raises(LocalProtocolError, match=r"at index 0 has 237 bytes \(242 with its env"):
        core.publish_many([b"x" * 237], 1, Envelope(channel="ab"))
    assert core.published_position == 0
    core.publish(b"x" * 237, 1)
    core.publish_many([b"x" * 237] * 3, 1)
    connection.exchange()
    assert payloads(connection.server) == [b"x" * 237] * 4


@settings(deadline=None)
@given(
    runs=st.lists(
        st.tuples(st.integers(1, 3), st.lists(contents(70), min_size=1, max_size=3)), max_size=4
    ),
    times=st.sampled_from([1, 30]),
    envelope=st.sampled_from([None, Envelope(channel="a.b", headers=(("k", "<\r\n>" * 3),))]),
)
def test_publish_runs_is_all_or_nothing(
    runs: list[tuple[int, list[bytes]]], times: int, envelope: Envelope | None
) -> None:
    """With frames of at most 80 bytes about half of the runs contain a payload that is too long."""
    runs = [(class_id, payloads * times) for class_id, payloads in runs]
    messages = [(class_id, payload) for class_id, run in runs for payload in run]
    core, single_core = ClientCore(frame_bytes_max=80), ClientCore(frame_bytes_max=80)
    refused = None
    for index, (class_id, payload) in enumerate(messages):
        try:
            single_core.publish(payload, class_id, envelope)
        except LocalProtocolError:
            refused = index
            break
    if refused is None:
        assert core.publish_runs(runs, envelope) == len(messages) - 1
        sizes = [core_.statistics().unconfirmed_bytes for core_ in (core, single_core)]
        assert sizes[0] == sizes[1]
    else:
        with pytest.raises(LocalProtocolError, match=rf"payload at index {refused} has"):
            core.publish_runs(runs, envelope)
        assert core.published_position == 0
        assert core.statistics().unconfirmed_bytes == 0
    core.check_invariants()


def test_server_that_accepts_shorter_frames_than_unconfirmed_ones_is_a_protocol_error() -> None:
    connection = ModelConnection(server=ModelServer(frame_bytes=100))
    connection.core.publish_many([b"", b"x" * 88], 1)
    connection.connect()
    with pytest.raises(
        RemoteProtocolError, match="frames of up to 100 bytes, but an unconfirmed message has 101"
    ) as caught:
        connection.exchange()
    assert caught.value.reason == Reason.FRAME_TOO_LONG


def test_server_limits_frame_length() -> None:
    connection = open_connection(frame_bytes=100)
    with pytest.raises(LocalProtocolError, match="at most 87"):
        connection.core.publish(b"x" * 88, 1)
    connection.core.publish(b"x" * 87, 1)


@pytest.mark.parametrize("payload", ["text", None, 3, [1, 2]])
def test_rejects_payload_that_is_not_bytes(payload: object) -> None:
    core = open_connection().core
    expected = f"a payload is bytes, got {type(payload).__name__}"
    with pytest.raises(TypeError, match=expected):
        core.publish(payload, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=expected):
        core.publish_many([b"", payload], 1)  # type: ignore[list-item]
    assert core.published_position == 0


def test_copies_mutable_buffers() -> None:
    connection = open_connection()
    changing = bytearray(b"before")
    connection.core.publish(changing, 1)
    connection.core.publish_many([changing, memoryview(b"view")], 1)  # type: ignore[list-item]
    changing[:] = b"after!"
    connection.exchange()
    assert payloads(connection.server) == [b"before", b"before", b"view"]
