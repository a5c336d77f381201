"""Tests of the client core together with the broker, without sockets or clocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.client.core.inbox import Inbox
from simplebus.core.broker.broker import Broker, Settings
from simplebus.core.errors import RefusedError
from simplebus.core.limits import FRAME_BYTES_MIN, NAME_CHARACTERS_MAX, REQUEST_BYTES_MAX
from simplebus.core.protocol.envelope_batch import Envelope
from simplebus.core.protocol.requests import Start, SubscribeRequest
from simplebus.core.redelivery.ack_window import AckWindow
from tests.client.core.client_and_broker import ClientAndBroker
from tests.client.core.consumers import consume, consume_batches, payloads
from tests.support.oracles import ID_COUNT
from tests.support.strategies import contents

NUMBERED = [b"message %d" % number for number in range(200)]
SHORT = Settings(ack_timeout=2)


def settle_all(pair: ClientAndBroker, *inboxes: Inbox) -> None:
    for inbox in inboxes:
        inbox.settle(include_last=True)
    pair.exchange()


@pytest.mark.parametrize("chunk", [1, 7, 1 << 16])
def test_published_messages_are_confirmed_received_and_acked(chunk: int) -> None:
    pair = ClientAndBroker(chunk_bytes=chunk)
    inbox = pair.core.subscribe(1)
    for payload in NUMBERED[:50]:
        pair.core.publish(payload, 1)
    pair.core.publish_many(NUMBERED[50:], 1)
    assert pair.exchange() == [inbox]
    assert payloads(inbox) == NUMBERED
    settle_all(pair, inbox)
    assert pair.statistics().in_flight == 0
    statistics = pair.core.statistics()
    counts = (statistics.published, statistics.confirmed, statistics.received)
    assert (*counts, statistics.acknowledged) == (200,) * 4
    assert (statistics.ignored, statistics.queued_bytes, statistics.buffered_bytes) == (0, 0, 0)


@given(
    st.lists(st.one_of(contents(), st.just(b"<\r\n>")), max_size=150),
    st.lists(contents(), min_size=1, max_size=4),
    st.sampled_from([None, Envelope(channel="a.b", headers=(("n", "<\r\n>"),), published=3)]),
    st.sampled_from([3, 100, 1 << 16]),
    st.booleans(),
)
def test_any_payload_arrives_unchanged(
    each: list[bytes],
    repeated: list[bytes],
    envelope: Envelope | None,
    chunk: int,
    in_batches: bool,
) -> None:
    pair = ClientAndBroker(chunk_bytes=chunk)
    inbox = pair.core.subscribe(0x3C0D)
    for payload in each:
        pair.core.publish(payload, 0x3C0D, envelope)
    pair.core.publish_many(repeated * 40, 0x3C0D, envelope)
    pair.exchange()
    if in_batches:
        received = [payload for batch in consume_batches(inbox) for payload in batch.payloads]
    else:
        messages = consume(inbox)
        received = [message.payload for message in messages]
        assert {message.envelope for message in messages} == {envelope or Envelope()}
    assert received == each + repeated * 40
    settle_all(pair, inbox)
    assert pair.statistics(0x3C0D).in_flight == 0


def test_busy_consumer_sends_few_acks() -> None:
    pair = ClientAndBroker(chunk_bytes=1 << 20)
    inbox = pair.core.subscribe(1)
    pair.core.publish_many([b"payload"] * 20_000, 1)
    pair.exchange()
    assert len(consume(inbox)) == 20_000
    bytes_before = pair.core.statistics().sent_bytes
    settle_all(pair, inbox)
    assert pair.core.statistics().sent_bytes - bytes_before < 40
    assert pair.statistics().in_flight == 0


def test_message_ids_wrap() -> None:
    pair = ClientAndBroker()
    pair.core.name_classes(1)
    pair.exchange()
    ring = pair.broker.classes[1].ring
    ring.head = ring.floor = 2 * ID_COUNT - 3
    pair.broker.classes[1].backlog_window = AckWindow(floor=ring.head)
    inbox = pair.core.subscribe(1)
    pair.core.publish_many(NUMBERED[:6], 1)
    pair.exchange()
    messages = consume(inbox)
    assert [message.payload for message in messages] == NUMBERED[:6]
    assert [message.sequence for message in messages] == [
        *range(2 * ID_COUNT - 3, 2 * ID_COUNT + 3)
    ]
    assert not any(message.redelivered for message in messages)
    settle_all(pair, inbox)
    assert pair.statistics().in_flight == 0


def test_each_subscription_receives_its_own_messages() -> None:
    pair = ClientAndBroker()
    unfiltered = pair.core.subscribe(1)
    filtered = pair.core.subscribe(1, SubscribeRequest(channels=["a.*"]))
    members = [pair.core.subscribe(1, SubscribeRequest(group="g")) for _ in range(2)]
    pair.exchange()
    for number, payload in enumerate(NUMBERED):
        pair.core.publish(payload, 1, Envelope(channel="a.b" if number % 3 else "c"))
    pair.exchange()
    shared: list[bytes] = []
    while batch := [*payloads(members[0]), *payloads(members[1])]:
        shared += batch
        settle_all(pair, *members)
    assert sorted(shared) == sorted(NUMBERED)
    assert payloads(unfiltered) == NUMBERED
    assert payloads(filtered) == [p for number, p in enumerate(NUMBERED) if number % 3]
    settle_all(pair, unfiltered, filtered)
    assert pair.statistics().in_flight == 0
    assert pair.broker.classes[1].ring.floor == 200


def test_ack_range_across_a_pending_message_does_not_lose_it() -> None:
    pair = ClientAndBroker()
    inbox = pair.core.subscribe(1, SubscribeRequest(channels=["a"]))
    for number in range(5):
        delay = 3000 if number == 2 else None
        pair.core.publish(NUMBERED[number], 1, Envelope(channel="a", not_before_ms=delay))
    pair.exchange()
    assert payloads(inbox) == [NUMBERED[n] for n in (0, 1, 3, 4)]
    settle_all(pair, inbox)
    assert pair.sent_data.endswith(b"0-5<\r\n>")
    pair.advance_time(3)
    assert payloads(inbox) == [NUMBERED[2]]
    settle_all(pair, inbox)
    assert pair.broker.classes[1].ring.floor == 5


# Redelivery --------------------------------------------------------------------------------------


def test_unacked_messages_are_redelivered_and_marked() -> None:
    pair = ClientAndBroker(SHORT)
    inbox = pair.core.subscribe(1, auto_ack=False)
    pair.core.publish_many(NUMBERED[:10], 1)
    pair.exchange()
    messages = consume(inbox)
    for message in messages[:4] + messages[6:]:
        message.ack()
    inbox.settle(include_last=True)
    pair.exchange()
    pair.tick(2)
    pair.core.publish(b"new", 1)
    pair.exchange()
    redelivered = consume(inbox)
    assert [(m.sequence, m.payload, m.attempt) for m in redelivered] == [
        (4, NUMBERED[4], 2),
        (5, NUMBERED[5], 2),
        (10, b"new", 1),
    ]
    for message in redelivered:
        message.ack()
    pair.exchange()
    assert pair.statistics().in_flight == 0
    assert pair.core.statistics().redelivered == 2


def test_drops_redelivery_of_a_message_that_waits_here() -> None:
    pair = ClientAndBroker(SHORT)
    inbox = pair.core.subscribe(1)
    pair.core.publish_many(NUMBERED[:10], 1)
    pair.exchange()
    consume(inbox, 4)
    pair.tick(2)
    assert payloads(inbox) == NUMBERED[4:10], "0 to 2 were settled, but not yet acknowledged"
    settle_all(pair, inbox)
    assert pair.core.statistics().ignored == 10
    assert pair.statistics().in_flight == 0


def test_nacked_message_is_redelivered_after_backoff_or_given_delay() -> None:
    pair = ClientAndBroker(SHORT)
    inbox = pair.core.subscribe(1)
    pair.core.publish_many(NUMBERED[:10], 1)
    pair.exchange()
    consume(inbox, 4)
    inbox.nack_last()
    consume(inbox, 3)[-1].nack(0)
    consume(inbox)
    settle_all(pair, inbox)
    assert payloads(inbox) == [NUMBERED[6]]
    settle_all(pair, inbox)
    pair.tick(4)
    assert payloads(inbox) == [NUMBERED[3]]
    settle_all(pair, inbox)
    assert pair.statistics().in_flight == 0


def test_working_prevents_redelivery() -> None:
    pair = ClientAndBroker(SHORT)
    inbox = pair.core.subscribe(1, auto_ack=False)
    pair.core.publish(b"long", 1)
    pair.exchange()
    (message,) = consume(inbox)
    inbox.settle(include_last=True)
    for _ in range(5):
        message.working()
        pair.exchange()
        pair.tick()
    assert pair.statistics().redelivered == 0
    message.ack()
    pair.exchange()
    assert pair.statistics().in_flight == 0


# Leaving and fetching ----------------------------------------------------------------------------


def test_messages_not_handed_out_go_to_next_subscription_of_durable_at_once() -> None:
    pair = ClientAndBroker()
    durable = SubscribeRequest(durable="d")
    inbox = pair.core.subscribe(1, durable)
    pair.core.publish_many(NUMBERED[:10], 1)
    pair.exchange()
    consume(inbox, 3)
    request = pair.core.unsubscribe(inbox, is_processed=True)
    pair.exchange()
    assert (request.is_done, request.error) == (True, None)
    resumed = pair.core.subscribe(1, durable)
    pair.exchange()
    assert payloads(resumed) == NUMBERED[3:10]
    settle_all(pair, resumed)
    assert pair.statistics().in_flight == 0


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("is_away", [True, False])
def test_durable_can_be_resubscribed_before_unsubscribe_is_sent(times: int, is_away: bool) -> None:
    pair = ClientAndBroker(broker=Broker(identity="bus"))
    durable = SubscribeRequest(durable="d")
    inbox = pair.core.subscribe(1, durable)
    pair.core.publish_many(NUMBERED[:10], 1)
    if is_away:
        pair.exchange()
        consume(inbox, 3)
        pair.disconnect()
    received = []
    for _ in range(times):
        received.append(pair.core.unsubscribe(inbox, is_processed=True))
        inbox = pair.core.subscribe(1, durable)
    if is_away:
        pair.connect()
    pair.exchange()
    assert [(each.is_done, each.error) for each in received] == [(True, None)] * times
    assert inbox.subscribe_request.error is None
    assert payloads(inbox) == NUMBERED[3 if is_away else 0 : 10]
    settle_all(pair, inbox)
    assert pair.statistics().in_flight == 0


def test_waiting_subscribe_fails_if_another_client_took_the_durable() -> None:
    pair = ClientAndBroker()
    durable = SubscribeRequest(durable="d")
    inbox = pair.core.subscribe(1, durable)
    pair.exchange()
    pair.disconnect()
    pair.core.unsubscribe(inbox, is_processed=True)
    inbox = pair.core.subscribe(1, durable)
    other_pair = ClientAndBroker(broker=pair.broker, name="other")
    held_inbox = other_pair.core.subscribe(1, durable)
    other_pair.exchange()
    assert held_inbox.subscribe_request.error is None
    pair.connect()
    pair.exchange()
    assert isinstance(inbox.subscribe_request.error, RefusedError)
    assert inbox.subscribe_request.error.code == "durable_in_use"


def test_seek_applies_once_and_not_after_reconnect() -> None:
    pair = ClientAndBroker()
    pair.core.publish_many(NUMBERED[:10], 1)
    pair.exchange()
    moved = SubscribeRequest(durable="d", start=Start(sequence=4), seek=True)
    inbox = pair.core.subscribe(1, moved)
    pair.exchange()
    assert payloads(inbox) == NUMBERED[4:10]
    settle_all(pair, inbox)
    pair.disconnect()
    pair.connect()
    pair.core.publish(b"new", 1)
    pair.exchange()
    assert payloads(inbox) == [b"new"]


def test_many_classes_are_named_again_in_several_connects() -> None:
    names = [f"{number}:".ljust(NAME_CHARACTERS_MAX, "-") for number in range(1000)]
    assert len("".join(names)) > 2 * REQUEST_BYTES_MAX
    pair = ClientAndBroker()
    for name in names:
        pair.core.name_classes(name)
    pair.exchange()
    last_id = pair.core.find_class_id(names[-1])
    assert last_id is not None
    inbox = pair.core.subscribe(last_id)
    pair.exchange()
    pair.broker = Broker(Settings())  # Knows none of the classes.
    pair.core.connection_lost()
    pair.connect()
    pair.core.publish(b"new", inbox.class_id)
    pair.exchange()
    assert set(pair.broker.store.class_id_by_name) == set(names)
    assert payloads(inbox) == [b"new"]


def test_fetch_returns_a_range() -> None:
    pair = ClientAndBroker()
    pair.core.publish_many(NUMBERED[:10], 1)
    request = pair.core.fetch(1, 3, 4)
    pair.exchange()
    messages = [message for batch in request.batches for message in batch]
    assert [(m.sequence, m.payload) for m in messages] == [(n, NUMBERED[n]) for n in range(3, 7)]


@pytest.mark.parametrize("lengths", [[3, 3, 3], [3, 5, 0]])
def test_bounds_of_a_fetched_batch_locate_its_frames(lengths: list[int]) -> None:
    pair = ClientAndBroker()
    pair.core.publish_many([b"x" * length for length in lengths], 1)
    request = pair.core.fetch(1, 0, 10)
    pair.exchange()
    (batch,) = request.batches
    assert np.diff(batch.bounds).tolist() == [length + FRAME_BYTES_MIN for length in lengths]
    assert batch.bounds[-1] == len(batch.data)


def test_fetch_can_skip_class_creation() -> None:
    pair = ClientAndBroker()
    request = pair.core.fetch(3, 0, 1, create_class=False)
    pair.exchange()
    assert isinstance(request.error, RefusedError)
    assert request.error.code == "unknown_class"
    assert 3 not in pair.broker.classes
    with pytest.raises(ValueError, match="65536"):
        pair.core.fetch(65536, 0, 1, create_class=False)


def test_client_knows_bus_id_and_run_id() -> None:
    pair = ClientAndBroker(broker=Broker(identity="one"))
    assert pair.core.bus_id == ""
    pair.exchange()
    assert pair.core.bus_id == "one"
    pair.disconnect()
    assert pair.core.bus_id == "one"
    pair.broker = Broker(identity="other")
    pair.connect()
    pair.exchange()
    assert pair.core.bus_id == "other"


@pytest.mark.parametrize(("identity", "forgotten"), [("one", 2), ("other", 0)])
def test_counts_confirmed_messages_that_the_server_lost(identity: str, forgotten: int) -> None:
    """A server with another bus id never had the messages, so none count as lost."""
    pair = ClientAndBroker(broker=Broker(identity="one"))
    pair.core.publish_many([b"stays", b"goes", b"goes"], 1)
    pair.exchange()
    pair.disconnect()
    pair.broker = Broker(identity=identity)
    # The same name: the state that was written before the crash.
    bytes_before = ClientAndBroker(broker=pair.broker)
    bytes_before.core.publish(b"stays", 1)
    bytes_before.exchange()
    bytes_before.disconnect()
    pair.connect()
    pair.core.publish(b"another", 1)
    pair.exchange()
    statistics = pair.core.statistics()
    assert (statistics.forgotten, statistics.unconfirmed) == (forgotten, 0)
    assert pair.statistics().published == 2


def test_next_server_run_may_reuse_a_lost_sequence() -> None:
    """Messages of an earlier run may differ from the messages of the next run with the same
    sequences.

    In a group the cursor does not show this, because another member has moved it.
    """
    pair = ClientAndBroker(broker=Broker(identity="one", run_id="first"))
    crew = SubscribeRequest(durable="d", group="g")
    inbox = pair.core.subscribe(1, crew)
    second_inbox = pair.core.subscribe(2, crew, auto_ack=False)
    pair.core.publish(b"lost", 1)
    pair.core.publish(b"lost too", 2)
    pair.exchange()
    assert [message.payload for message in consume(inbox, 1)] == [b"lost"]
    judged = second_inbox.pop_batch()
    assert judged is not None
    pair.disconnect()
    pair.broker = Broker(identity="one", run_id="second")
    member = ClientAndBroker(broker=pair.broker, name="other")
    for class_id in (1, 2):
        member.core.subscribe(class_id, crew)
        member.core.publish(b"another", class_id)
        member.exchange()
    member.disconnect()
    pair.connect()
    judged.ack()
    pair.exchange()
    assert payloads(inbox) == [b"another"]
    assert payloads(second_inbox) == [b"another"]
    settle_all(pair, inbox)
    assert [pair.statistics(class_id).in_flight for class_id in (1, 2)] == [0, 1]


def test_reports_refused_messages() -> None:
    pair = ClientAndBroker()
    pair.core.subscribe(1, SubscribeRequest(durable="d"))
    inbox = pair.core.subscribe(1, SubscribeRequest(durable="d"))
    pair.exchange()
    assert isinstance(inbox.subscribe_request.error, RefusedError)


@pytest.mark.parametrize("was_greeted", [False, True])
@pytest.mark.parametrize("is_taken", [False, True])
def test_no_outcome_is_sent_for_a_message_that_reuses_a_lost_sequence(
    is_taken: bool, was_greeted: bool
) -> None:
    durable = SubscribeRequest(durable="d")
    pair = ClientAndBroker(broker=Broker(identity="one", run_id="1"))
    inbox = pair.core.subscribe(1, durable)
    pair.core.publish(b"lost", 1)
    pair.exchange()
    assert payloads(inbox) == [b"lost"]
    pair.disconnect()
    pair.broker = Broker(identity="one", run_id="2")
    other_pair = ClientAndBroker(broker=pair.broker, name="other")
    other_inbox = other_pair.core.subscribe(1, durable)
    other_pair.core.publish(b"new", 1)
    other_pair.exchange()
    if is_taken:  # Then the cursor does not show the difference.
        assert payloads(other_inbox) == [b"new"]
    other_pair.disconnect()
    pair.connect()
    if was_greeted:  # Delivered by the new run, which has not confirmed the subscription yet.
        while pair.core.session_id is None:
            pair.send_chunk()
            pair.receive_chunk()
        pair.disconnect()
        pair.connect()
    while not inbox.is_subscribed:
        pair.send_chunk()
        pair.receive_chunk()
    while pair.receive_chunk():  # Receive everything before sending acks.
        pass
    pair.exchange()
    assert payloads(inbox) == [b"new"]
    settle_all(pair, inbox)
    assert pair.statistics().in_flight == 0


# Broken connections ------------------------------------------------------------------------------


@given(st.data())
def test_no_message_is_lost_wherever_connections_are_cut(data: st.DataObject) -> None:
    """Messages are stored once and in order, delivered at least once and finally acknowledged."""
    pair = ClientAndBroker(SHORT, chunk_bytes=data.draw(st.sampled_from([16, 300, 1 << 16])))
    options = data.draw(
        st.sampled_from(
            [SubscribeRequest(), SubscribeRequest(durable="d"), SubscribeRequest(group="g")]
        )
    )
    pair.exchange()
    inbox = pair.core.subscribe(1, options)
    published = 0
    received: list[bytes] = []
    for _ in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from("pmwwrrtaklv")):
            case "p":
                pair.core.publish(b"%d" % published, 1)
                published += 1
            case "m":
                count = data.draw(st.integers(1, 80))
                pair.core.publish_many([b"%d" % (published + n) for n in range(count)], 1)
                published += count
            case "w":
                pair.send_chunk(data.draw(st.integers(1, 400)))
            case "r":
                pair.receive_chunk(max_bytes=data.draw(st.integers(1, 400)))
            case "t":
                received += payloads(inbox, data.draw(st.integers(1, 50)))
            case "a":
                inbox.settle(include_last=True)
            case "k":
                pair.tick()
            case "l":
                pair.disconnect()
                pair.connect()
            case "v" if options.durable:
                pair.core.unsubscribe(inbox, is_processed=True)
                inbox = pair.core.subscribe(1, options)
        pair.core.check_invariants()
    pair.exchange()
    for _ in range(40):
        received += payloads(inbox)
        settle_all(pair, inbox)
        pair.tick()
    assert pair.core.confirmed_position == published
    expected = [b"%d" % number for number in range(published)]
    assert set(received) == set(expected)
    ring = pair.broker.classes[1].ring
    assert (ring.head, ring.floor) == (published, published)
