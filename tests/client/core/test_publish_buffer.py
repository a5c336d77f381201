"""What a program publishes: stored once, in order, whatever happens to its connections."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplebus.client.core import publish_buffer
from simplebus.client.core.client import ClientCore
from simplebus.client.core.publish_buffer import PublishBuffer
from simplebus.core.errors import LocalProtocolError, Reason, RefusedError, RemoteProtocolError
from simplebus.core.limits import CREDIT_BYTES, PUBLISHER_STEP
from simplebus.core.protocol import envelope_batch
from simplebus.core.protocol.envelope_batch import Envelope
from tests.client.core.model_server import (
    CONNECT,
    ENVELOPE,
    MESSAGE,
    SUBSCRIBE,
    Line,
    ModelServer,
    connected,
)
from tests.support.oracles import ID_COUNT
from tests.support.strategies import contents

NUMBERED = [b"message %d" % number for number in range(200)]


def payloads(server: ModelServer) -> list[bytes]:
    """What the server has stored, out of its envelope."""
    return [
        content if kind == MESSAGE else envelope_batch.decode(content)[1]
        for _, kind, content in server.stored
    ]


# Over several connections ------------------------------------------------------------------------


@settings(deadline=None)
@given(st.data())
def test_what_is_published_is_stored_once_and_in_order_wherever_connections_are_cut(
    data: st.DataObject,
) -> None:
    """Runs of 51 and more engage the array paths, small chunks cut frames and segments."""
    server = ModelServer(
        credit=data.draw(st.sampled_from([1, 60, 500, 3000, 1 << 20])),
        next=data.draw(st.sampled_from([0, 7, ID_COUNT - 1, ID_COUNT - 60])),
    )
    line = Line(server=server)
    core, chunk = line.core, data.draw(st.sampled_from([30, 200, 1 << 18]))
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
                    many = data.draw(st.lists(contents(9), max_size=3)) * data.draw(
                        st.integers(1, 40)
                    )
                    published += many
                    assert core.publish_many(many, 1) + 1 == len(published)
                case "w" if is_connected:
                    line.say(data.draw(st.integers(1, 2000)))
                case "r" if is_connected:
                    line.hear(data.draw(st.integers(1, 200)))
                case "c" if server.greeted:
                    server.confirm(data.draw(st.integers(0, len(server.unconfirmed))))
                case "l":
                    if is_connected:
                        line.lose()
                    line.connect()
                    is_connected = True
            core.check_invariants()
            assert (
                core.confirmed_position
                <= len(server.stored)
                <= core.published_position
                == len(published)
            )
        if not is_connected:
            line.connect()
        line.exchange()
        while len(server.stored) < len(published) or core.confirmed_position < len(published):
            before = (len(server.stored), core.confirmed_position, core.is_ready)
            line.exchange()
            server.confirm()
            line.exchange()
            assert before != (len(server.stored), core.confirmed_position, core.is_ready), "stuck"
    assert payloads(server) == published
    assert core.send_queue.queued_bytes == 0
    statistics = core.statistics()
    assert (statistics.confirmed, statistics.unconfirmed) == (len(published), 0)
    assert statistics.unconfirmed_bytes == 0
    assert statistics.resent >= server.duplicates


def test_what_was_published_before_the_first_answer_waits_for_it() -> None:
    line = Line(server=ModelServer(answers=False))
    for payload in NUMBERED[:3]:
        line.core.publish(payload, 1)
    line.connect()
    line.core.publish(NUMBERED[3], 2)
    line.say()
    assert line.server.kinds() == bytes([CONNECT])
    line.server.answers = True
    line.server.reply(1)
    line.exchange()
    assert payloads(line.server) == NUMBERED[:4]


def test_a_program_that_comes_again_goes_on_where_its_numbers_ended() -> None:
    line = connected(next=ID_COUNT - 2)
    line.core.publish_many(NUMBERED[:60], 1)
    line.exchange()
    assert payloads(line.server) == NUMBERED[:60]
    assert line.server.next == 58
    line.server.confirm()
    line.exchange()
    assert line.core.confirmed_position == 60


def test_what_the_bus_says_it_has_is_not_written_again() -> None:
    line = connected()
    line.core.publish_many(NUMBERED[:100], 1)
    line.exchange()
    line.lose()
    assert line.core.confirmed_position == 0
    line.core.publish(b"more", 1)
    line.server.next = 70
    del line.server.stored[70:]
    line.connect()
    line.exchange()
    assert payloads(line.server) == [*NUMBERED[:100], b"more"]
    assert (line.server.duplicates, line.core.statistics().resent) == (0, 30)
    assert line.core.confirmed_position == 70


def test_a_bus_that_has_forgotten_us_gets_everything_that_was_not_confirmed() -> None:
    line = connected(next=500)
    line.core.publish_many(NUMBERED[:100], 1)
    line.exchange()
    line.server.confirm(60)
    line.exchange()
    line.lose()
    other = line.server = ModelServer(bus="another")
    line.connect()
    line.exchange()
    assert payloads(other) == NUMBERED[40:100]
    other.confirm()
    line.exchange()
    assert line.core.confirmed_position == 100


def test_another_bus_is_not_believed_to_have_what_its_number_says() -> None:
    line = connected()
    line.core.publish_many(NUMBERED[:10], 1)
    line.exchange()
    line.lose()
    line.server = ModelServer(bus="another", next=4)
    line.connect()
    line.exchange()
    assert payloads(line.server) == NUMBERED[:10]


def test_a_number_that_it_has_not_used_confirms_nothing_however_long_it_has_published() -> None:
    publisher = PublishBuffer(frame_bytes_max=1000, name_class=lambda class_id: None)
    publisher.published_position = publisher.confirmed_position = (
        ID_COUNT  # As if so many had been there.
    )
    publisher._released_position = publisher._numbered_position = ID_COUNT
    publisher.add_class(1)
    publisher.publish_many([b"a", b"b"], 1)
    publisher.resume(next_number=0, credit_bytes=1 << 20, frame_bytes_max=1000)
    assert publisher.release_batch() is not None
    for number in (3, PUBLISHER_STEP, 2 * PUBLISHER_STEP % ID_COUNT):
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


# Credit ------------------------------------------------------------------------------------------


def test_the_credit_holds_messages_back_and_nothing_else() -> None:
    line = connected(credit=100)
    core, server = line.core, line.server
    for payload in NUMBERED[:10]:
        core.publish(payload, 1)  # 22 bytes each: four of them fit.
    assert not core.has_credit
    line.exchange()
    assert payloads(server) == NUMBERED[:4]
    assert core.send_queue.queued_bytes == 6 * 22
    core.subscribe(2)
    synced = core.sync()
    line.exchange()
    assert (server.kinds().count(SUBSCRIBE), synced.is_done) == (1, False)
    server.confirm(2)
    line.exchange()
    assert payloads(server) == NUMBERED[:6]
    while len(server.stored) < 10:
        assert not synced.is_done
        server.confirm()
        line.exchange()
    assert synced.is_done
    server.confirm()
    line.exchange()
    assert core.has_credit
    assert core.send_queue.queued_bytes == 0


def test_one_frame_may_go_however_long() -> None:
    line = connected(credit=10)
    line.core.publish(b"x" * 1000, 1)
    line.core.publish_many(NUMBERED[:3], 1)
    for stored in (1, 2, 3, 4):
        line.exchange()
        assert len(line.server.stored) == stored
        line.server.confirm()
    line.exchange()


def test_without_an_answer_yet_the_credit_is_guessed() -> None:
    core = ClientCore(name="tester")
    assert core.has_credit
    core.publish_many([bytes(1 << 16)] * (CREDIT_BYTES >> 16), 1)
    assert not core.has_credit


# What the bus says -------------------------------------------------------------------------------


def test_older_confirms_are_ignored() -> None:
    line = connected(next=ID_COUNT - 3)
    line.core.publish_many(NUMBERED[:9], 1)
    line.exchange()
    for back, confirmed in ((4, 5), (7, 5), (4, 5), (0, 9), (9, 9)):
        line.server.say(ord("6"), 0, (line.server.next - back) % ID_COUNT)
        line.exchange()
        assert line.core.confirmed_position == confirmed


def test_a_confirm_for_what_was_not_written_is_refused() -> None:
    line = connected()
    line.core.publish(b"", 1)
    line.exchange()
    line.server.say(ord("6"), 0, 2)
    with pytest.raises(RemoteProtocolError, match=r"number_gap: .* of number 2; .* written is 1"):
        line.exchange()


def test_refused_messages_are_told_by_position() -> None:
    line = connected(next=ID_COUNT - 3)
    line.core.publish_many(NUMBERED[:9], 1)
    line.exchange()
    line.server.refuse("unknown_class", kind=MESSAGE, number=ID_COUNT - 1, count=3)
    line.server.confirm()
    line.exchange()
    refusals = line.core.pop_refusals()
    assert list(refusals) == [2, 3, 4]
    assert all(isinstance(error, RefusedError) for error in refusals.values())
    assert {error.code for error in refusals.values()} == {"unknown_class"}
    assert line.core.confirmed_position == 9
    assert (line.core.pop_refusals(), line.core.statistics().refused) == ({}, 3)


def test_refusals_that_nobody_asks_for_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish_buffer, "_REFUSALS_MAX", 5)
    line = connected()
    line.core.publish_many(NUMBERED, 1)
    line.exchange()
    for first, count in ((0, 3), (3, 1 << 30)):
        line.server.refuse("drop_newest", kind=ENVELOPE, number=first, count=count)
        line.exchange()
    assert list(line.core.pop_refusals()) == [195, 196, 197, 198, 199]
    assert line.core.statistics().refused == 200


# What can be published ---------------------------------------------------------------------------


@given(
    st.lists(st.one_of(contents(), st.just(b"a<\r\n>b"), st.just(b"<\r\n\0<\r\n>")), max_size=60),
    st.sampled_from([None, Envelope(channel="a.b", key=b"<\r\n", headers=(("n", "v"),))]),
    st.booleans(),
)
def test_any_payload_arrives_as_it_was(
    given_payloads: list[bytes], about: Envelope | None, at_once: bool
) -> None:
    line = connected()
    if at_once:
        line.core.publish_many(given_payloads, 0x3C0D, about)
    else:
        for payload in given_payloads:
            line.core.publish(payload, 0x3C0D, about)
    line.exchange()
    assert payloads(line.server) == given_payloads
    for _, kind, content in line.server.stored:
        if about is not None:
            assert envelope_batch.decode(content)[0] == about
        elif kind == ENVELOPE:
            assert b"<\r\n>" in envelope_batch.decode(content)[1]


def test_numbers_that_look_like_delimiters_do_no_harm() -> None:
    line = connected(next=0x0A3E3C0D)
    line.core.publish_many(NUMBERED, 0x3C0D)
    line.core.publish(b"<\r\n", 0x3C0D)
    line.exchange()
    assert payloads(line.server) == [*NUMBERED, b"<\r\n"]


def test_a_payload_too_long_for_a_frame_is_refused_and_the_longest_is_not() -> None:
    line = Line(ClientCore(name="tester", frame_bytes_max=200))
    line.connect()
    line.exchange()
    core = line.core
    with pytest.raises(LocalProtocolError, match=r"has 188 bytes; .* at most 187"):
        core.publish(b"x" * 188, 1)
    with pytest.raises(LocalProtocolError, match="at index 1 has 188 bytes; "):
        core.publish_many([b"x" * 187, b"x" * 188], 1)
    with pytest.raises(LocalProtocolError, match=r"at index 0 has 187 bytes \(192 with its env"):
        core.publish_many([b"x" * 187], 1, Envelope(channel="ab"))
    assert core.published_position == 0
    core.publish(b"x" * 187, 1)
    core.publish_many([b"x" * 187] * 3, 1)
    line.exchange()
    assert payloads(line.server) == [b"x" * 187] * 4


@settings(deadline=None)
@given(
    runs=st.lists(
        st.tuples(st.integers(1, 3), st.lists(contents(70), min_size=1, max_size=3)), max_size=4
    ),
    many=st.sampled_from([1, 30]),
    about=st.sampled_from([None, Envelope(channel="a.b", headers=(("k", "<\r\n>" * 3),))]),
)
def test_messages_of_several_classes_are_published_all_or_none(
    runs: list[tuple[int, list[bytes]]], many: int, about: Envelope | None
) -> None:
    """Frames of 80 bytes at most: about half of these runs hold a payload too long for them."""
    runs = [(class_id, payloads * many) for class_id, payloads in runs]
    every = [(class_id, payload) for class_id, run in runs for payload in run]
    core, alone = ClientCore(frame_bytes_max=80), ClientCore(frame_bytes_max=80)
    refused = None
    for index, (class_id, payload) in enumerate(every):
        try:
            alone.publish(payload, class_id, about)
        except LocalProtocolError:
            refused = index
            break
    if refused is None:
        assert core.publish_runs(runs, about) == len(every) - 1
        sizes = [one.statistics().unconfirmed_bytes for one in (core, alone)]
        assert sizes[0] == sizes[1]
    else:
        with pytest.raises(LocalProtocolError, match=rf"payload at index {refused} has"):
            core.publish_runs(runs, about)
        assert core.published_position == 0
        assert core.statistics().unconfirmed_bytes == 0
    core.check_invariants()


def test_a_bus_that_accepts_less_than_what_waits_is_no_bus_for_us() -> None:
    line = Line(server=ModelServer(frame_bytes=100))
    line.core.publish_many([b"", b"x" * 88], 1)
    line.connect()
    with pytest.raises(
        RemoteProtocolError, match="frames of 100 bytes; one of 101 waits"
    ) as caught:
        line.exchange()
    assert caught.value.reason == Reason.FRAME_TOO_LONG


def test_a_bus_says_how_long_frames_may_be() -> None:
    line = connected(frame_bytes=100)
    with pytest.raises(LocalProtocolError, match="at most 87"):
        line.core.publish(b"x" * 88, 1)
    line.core.publish(b"x" * 87, 1)


@pytest.mark.parametrize("payload", ["text", None, 3, [1, 2]])
def test_a_payload_that_is_no_bytes_is_refused(payload: object) -> None:
    core = connected().core
    expected = f"a payload is bytes, got {type(payload).__name__}"
    with pytest.raises(TypeError, match=expected):
        core.publish(payload, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=expected):
        core.publish_many([b"", payload], 1)  # type: ignore[list-item]
    assert core.published_position == 0


def test_whatever_holds_bytes_is_copied() -> None:
    line = connected()
    changing = bytearray(b"before")
    line.core.publish(changing, 1)
    line.core.publish_many([changing, memoryview(b"view")], 1)  # type: ignore[list-item]
    changing[:] = b"after!"
    line.exchange()
    assert payloads(line.server) == [b"before", b"before", b"view"]
