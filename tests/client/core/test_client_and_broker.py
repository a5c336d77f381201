"""The client core and the broker together: what programs are promised, without sockets or clocks.

Rule: bytes cross between the two and nothing else; connections break wherever hypothesis likes.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.client.core.inbox import Inbox
from simplebus.core.broker.broker import Broker, Settings
from simplebus.core.errors import RefusedError
from simplebus.core.limits import FRAME_BYTES_MIN
from simplebus.core.protocol.envelope_batch import Envelope
from simplebus.core.protocol.requests import Start, SubscribeRequest
from simplebus.core.redelivery.ack_window import AckWindow
from tests.client.core.client_and_broker import Pair
from tests.client.core.consumers import payloads, take, take_batches
from tests.support.oracles import ID_COUNT
from tests.support.strategies import contents

NUMBERED = [b"message %d" % number for number in range(200)]
SHORT = Settings(ack_timeout=2)


def settle_all(pair: Pair, *inboxes: Inbox) -> None:
    for inbox in inboxes:
        inbox.settle(include_last=True)
    pair.exchange()


@pytest.mark.parametrize("chunk", [1, 7, 1 << 16])
def test_what_is_published_is_confirmed_received_and_acknowledged(chunk: int) -> None:
    pair = Pair(chunk=chunk)
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
def test_any_payload_arrives_as_it_was(
    each: list[bytes],
    repeated: list[bytes],
    about: Envelope | None,
    chunk: int,
    in_batches: bool,
) -> None:
    pair = Pair(chunk=chunk)
    inbox = pair.core.subscribe(0x3C0D)
    for payload in each:
        pair.core.publish(payload, 0x3C0D, about)
    pair.core.publish_many(repeated * 40, 0x3C0D, about)
    pair.exchange()
    if in_batches:
        got = [payload for batch in take_batches(inbox) for payload in batch.payloads]
    else:
        messages = take(inbox)
        got = [message.payload for message in messages]
        assert {message.envelope for message in messages} == {about or Envelope()}
    assert got == each + repeated * 40
    settle_all(pair, inbox)
    assert pair.statistics(0x3C0D).in_flight == 0


def test_acks_of_a_busy_consumer_are_few() -> None:
    pair = Pair(chunk=1 << 20)
    inbox = pair.core.subscribe(1)
    pair.core.publish_many([b"payload"] * 20_000, 1)
    pair.exchange()
    assert len(take(inbox)) == 20_000
    before = pair.core.statistics().sent_bytes
    settle_all(pair, inbox)
    assert pair.core.statistics().sent_bytes - before < 40
    assert pair.statistics().in_flight == 0


def test_the_client_meets_the_wrap_of_the_ids() -> None:
    pair = Pair()
    pair.core.name_classes(1)
    pair.exchange()
    ring = pair.broker.classes[1].ring
    ring.head = ring.floor = 2 * ID_COUNT - 3
    pair.broker.classes[1].backlog_window = AckWindow(floor=ring.head)
    inbox = pair.core.subscribe(1)
    pair.core.publish_many(NUMBERED[:6], 1)
    pair.exchange()
    messages = take(inbox)
    assert [message.payload for message in messages] == NUMBERED[:6]
    assert [message.sequence for message in messages] == [
        *range(2 * ID_COUNT - 3, 2 * ID_COUNT + 3)
    ]
    assert not any(message.redelivered for message in messages)
    settle_all(pair, inbox)
    assert pair.statistics().in_flight == 0


def test_every_subscription_of_a_program_sees_what_it_asked_for() -> None:
    pair = Pair()
    everything = pair.core.subscribe(1)
    some = pair.core.subscribe(1, SubscribeRequest(channels=["a.*"]))
    members = [pair.core.subscribe(1, SubscribeRequest(group="g")) for _ in range(2)]
    pair.exchange()
    for number, payload in enumerate(NUMBERED):
        pair.core.publish(payload, 1, Envelope(channel="a.b" if number % 3 else "c"))
    pair.exchange()
    shared: list[bytes] = []
    while more := [*payloads(members[0]), *payloads(members[1])]:
        shared += more
        settle_all(pair, *members)
    assert sorted(shared) == sorted(NUMBERED)
    assert payloads(everything) == NUMBERED
    assert payloads(some) == [p for number, p in enumerate(NUMBERED) if number % 3]
    settle_all(pair, everything, some)
    assert pair.statistics().in_flight == 0
    assert pair.broker.classes[1].ring.floor == 200


def test_an_ack_that_spans_a_message_which_is_still_to_come_does_not_lose_it() -> None:
    pair = Pair()
    inbox = pair.core.subscribe(1, SubscribeRequest(channels=["a"]))
    for number in range(5):
        delay = 3000 if number == 2 else None
        pair.core.publish(NUMBERED[number], 1, Envelope(channel="a", not_before_ms=delay))
    pair.exchange()
    assert payloads(inbox) == [NUMBERED[n] for n in (0, 1, 3, 4)]
    settle_all(pair, inbox)
    assert pair.said.endswith(b"0-5<\r\n>")
    pair.wait(3)
    assert payloads(inbox) == [NUMBERED[2]]
    settle_all(pair, inbox)
    assert pair.broker.classes[1].ring.floor == 5


# Redelivery --------------------------------------------------------------------------------------


def test_what_was_not_acknowledged_comes_again_and_is_marked() -> None:
    pair = Pair(SHORT)
    inbox = pair.core.subscribe(1, auto_ack=False)
    pair.core.publish_many(NUMBERED[:10], 1)
    pair.exchange()
    messages = take(inbox)
    for message in messages[:4] + messages[6:]:
        message.ack()
    inbox.settle(include_last=True)
    pair.exchange()
    pair.tick(2)
    pair.core.publish(b"new", 1)
    pair.exchange()
    again = take(inbox)
    assert [(m.sequence, m.payload, m.attempt) for m in again] == [
        (4, NUMBERED[4], 2),
        (5, NUMBERED[5], 2),
        (10, b"new", 1),
    ]
    for message in again:
        message.ack()
    pair.exchange()
    assert pair.statistics().in_flight == 0
    assert pair.core.statistics().redelivered == 2


def test_a_copy_of_what_still_waits_here_is_dropped() -> None:
    pair = Pair(SHORT)
    inbox = pair.core.subscribe(1)
    pair.core.publish_many(NUMBERED[:10], 1)
    pair.exchange()
    take(inbox, 4)
    pair.tick(2)
    assert payloads(inbox) == NUMBERED[4:10], "0 to 2 were settled, but not yet acknowledged"
    settle_all(pair, inbox)
    assert pair.core.statistics().ignored == 10
    assert pair.statistics().in_flight == 0


def test_a_failed_message_comes_again_after_a_pause_or_when_it_is_wanted() -> None:
    pair = Pair(SHORT)
    inbox = pair.core.subscribe(1)
    pair.core.publish_many(NUMBERED[:10], 1)
    pair.exchange()
    take(inbox, 4)
    inbox.nack_last()
    take(inbox, 3)[-1].nack(0)
    take(inbox)
    settle_all(pair, inbox)
    assert payloads(inbox) == [NUMBERED[6]]
    settle_all(pair, inbox)
    pair.tick(4)
    assert payloads(inbox) == [NUMBERED[3]]
    settle_all(pair, inbox)
    assert pair.statistics().in_flight == 0


def test_what_takes_longer_is_not_sent_again() -> None:
    pair = Pair(SHORT)
    inbox = pair.core.subscribe(1, auto_ack=False)
    pair.core.publish(b"long", 1)
    pair.exchange()
    (message,) = take(inbox)
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


def test_what_a_durable_was_never_handed_comes_to_the_next_one_at_once() -> None:
    pair = Pair()
    durable = SubscribeRequest(durable="d")
    inbox = pair.core.subscribe(1, durable)
    pair.core.publish_many(NUMBERED[:10], 1)
    pair.exchange()
    take(inbox, 3)
    request = pair.core.unsubscribe(inbox, is_processed=True)
    pair.exchange()
    assert (request.is_done, request.error) == (True, None)
    again = pair.core.subscribe(1, durable)
    pair.exchange()
    assert payloads(again) == NUMBERED[3:10]
    settle_all(pair, again)
    assert pair.statistics().in_flight == 0


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("is_away", [True, False])
def test_a_durable_that_was_left_is_had_again_though_the_bus_has_not_heard_of_it(
    times: int, is_away: bool
) -> None:
    pair = Pair(broker=Broker(identity="bus"))
    durable = SubscribeRequest(durable="d")
    inbox = pair.core.subscribe(1, durable)
    pair.core.publish_many(NUMBERED[:10], 1)
    if is_away:
        pair.exchange()
        take(inbox, 3)
        pair.lose()
    left = []
    for _ in range(times):
        left.append(pair.core.unsubscribe(inbox, is_processed=True))
        inbox = pair.core.subscribe(1, durable)
    if is_away:
        pair.connect()
    pair.exchange()
    assert [(each.is_done, each.error) for each in left] == [(True, None)] * times
    assert inbox.subscribe_request.error is None
    assert payloads(inbox) == NUMBERED[3 if is_away else 0 : 10]
    settle_all(pair, inbox)
    assert pair.statistics().in_flight == 0


def test_who_waits_for_a_durable_that_was_left_learns_that_somebody_else_has_it() -> None:
    pair = Pair()
    durable = SubscribeRequest(durable="d")
    inbox = pair.core.subscribe(1, durable)
    pair.exchange()
    pair.lose()
    pair.core.unsubscribe(inbox, is_processed=True)
    inbox = pair.core.subscribe(1, durable)
    other = Pair(broker=pair.broker, name="other")
    held = other.core.subscribe(1, durable)
    other.exchange()
    assert held.subscribe_request.error is None
    pair.connect()
    pair.exchange()
    assert isinstance(inbox.subscribe_request.error, RefusedError)
    assert inbox.subscribe_request.error.code == "durable_in_use"


def test_a_durable_is_moved_once_not_with_every_connection() -> None:
    pair = Pair()
    pair.core.publish_many(NUMBERED[:10], 1)
    pair.exchange()
    moved = SubscribeRequest(durable="d", start=Start(sequence=4), seek=True)
    inbox = pair.core.subscribe(1, moved)
    pair.exchange()
    assert payloads(inbox) == NUMBERED[4:10]
    settle_all(pair, inbox)
    pair.lose()
    pair.connect()
    pair.core.publish(b"new", 1)
    pair.exchange()
    assert payloads(inbox) == [b"new"]


def test_a_range_can_be_fetched() -> None:
    pair = Pair()
    pair.core.publish_many(NUMBERED[:10], 1)
    request = pair.core.fetch(1, 3, 4)
    pair.exchange()
    messages = [message for batch in request.batches for message in batch]
    assert [(m.sequence, m.payload) for m in messages] == [(n, NUMBERED[n]) for n in range(3, 7)]


@pytest.mark.parametrize("lengths", [[3, 3, 3], [3, 5, 0]])
def test_a_fetched_batch_tells_where_its_frames_are(lengths: list[int]) -> None:
    pair = Pair()
    pair.core.publish_many([b"x" * length for length in lengths], 1)
    request = pair.core.fetch(1, 0, 10)
    pair.exchange()
    (batch,) = request.batches
    assert np.diff(batch.bounds).tolist() == [length + FRAME_BYTES_MIN for length in lengths]
    assert batch.bounds[-1] == len(batch.data)


def test_a_fetch_need_not_make_the_class_that_it_is_about() -> None:
    pair = Pair()
    request = pair.core.fetch(3, 0, 1, create_class=False)
    pair.exchange()
    assert isinstance(request.error, RefusedError)
    assert request.error.code == "unknown_class"
    assert 3 not in pair.broker.classes
    with pytest.raises(ValueError, match="65536"):
        pair.core.fetch(65536, 0, 1, create_class=False)


def test_a_program_knows_whose_memory_it_talks_to() -> None:
    pair = Pair(broker=Broker(identity="one"))
    assert pair.core.bus_id == ""
    pair.exchange()
    assert pair.core.bus_id == "one"
    pair.lose()
    assert pair.core.bus_id == "one"
    pair.broker = Broker(identity="other")
    pair.connect()
    pair.exchange()
    assert pair.core.bus_id == "other"


@pytest.mark.parametrize(("identity", "forgotten"), [("one", 2), ("other", 0)])
def test_a_publisher_knows_what_was_confirmed_and_is_gone(identity: str, forgotten: int) -> None:
    """Of a bus that has the same memory. Another one has never had it, as far as anybody knows."""
    pair = Pair(broker=Broker(identity="one"))
    pair.core.publish_many([b"stays", b"goes", b"goes"], 1)
    pair.exchange()
    pair.lose()
    pair.broker = Broker(identity=identity)
    before = Pair(broker=pair.broker)  # The same name: what was written of it before the crash.
    before.core.publish(b"stays", 1)
    before.exchange()
    before.lose()
    pair.connect()
    pair.core.publish(b"another", 1)
    pair.exchange()
    statistics = pair.core.statistics()
    assert (statistics.forgotten, statistics.unconfirmed) == (forgotten, 0)
    assert pair.statistics().published == 2


def test_another_run_of_the_bus_may_have_given_a_sequence_again() -> None:
    """What was delivered from the memory of a process is not what the next one has there. In a
    group no cursor tells so: another member has moved it."""
    pair = Pair(broker=Broker(identity="one", run_id="first"))
    crew = SubscribeRequest(durable="d", group="g")
    inbox = pair.core.subscribe(1, crew)
    other = pair.core.subscribe(2, crew, auto_ack=False)
    pair.core.publish(b"lost", 1)
    pair.core.publish(b"lost too", 2)
    pair.exchange()
    assert [message.payload for message in take(inbox, 1)] == [b"lost"]
    judged = other.pop_batch()
    assert judged is not None
    pair.lose()
    pair.broker = Broker(identity="one", run_id="second")
    member = Pair(broker=pair.broker, name="other")
    for class_id in (1, 2):
        member.core.subscribe(class_id, crew)
        member.core.publish(b"another", class_id)
        member.exchange()
    member.lose()
    pair.connect()
    judged.ack()
    pair.exchange()
    assert payloads(inbox) == [b"another"]
    assert payloads(other) == [b"another"]
    settle_all(pair, inbox)
    assert [pair.statistics(class_id).in_flight for class_id in (1, 2)] == [0, 1]


def test_what_the_bus_refuses_is_told() -> None:
    pair = Pair()
    pair.core.subscribe(1, SubscribeRequest(durable="d"))
    inbox = pair.core.subscribe(1, SubscribeRequest(durable="d"))
    pair.exchange()
    assert isinstance(inbox.subscribe_request.error, RefusedError)


@pytest.mark.parametrize("was_greeted", [False, True])
@pytest.mark.parametrize("is_taken", [False, True])
def test_no_verdict_is_said_of_another_message_that_has_the_sequence_of_a_lost_one(
    is_taken: bool, was_greeted: bool
) -> None:
    durable = SubscribeRequest(durable="d")
    pair = Pair(broker=Broker(identity="one", run_id="1"))
    inbox = pair.core.subscribe(1, durable)
    pair.core.publish(b"lost", 1)
    pair.exchange()
    assert payloads(inbox) == [b"lost"]
    pair.lose()
    pair.broker = Broker(identity="one", run_id="2")
    other = Pair(broker=pair.broker, name="other")
    theirs = other.core.subscribe(1, durable)
    other.core.publish(b"new", 1)
    other.exchange()
    if is_taken:  # So that the cursor tells nothing.
        assert payloads(theirs) == [b"new"]
    other.lose()
    pair.connect()
    if was_greeted:  # By the new run, which has not begun the subscription yet.
        while pair.core.session_id is None:
            pair.say()
            pair.hear()
        pair.lose()
        pair.connect()
    while not inbox.is_subscribed:
        pair.say()
        pair.hear()
    while pair.hear():  # All that comes, before it says anything of it.
        pass
    pair.exchange()
    assert payloads(inbox) == [b"new"]
    settle_all(pair, inbox)
    assert pair.statistics().in_flight == 0


# Connections that break --------------------------------------------------------------------------


@given(st.data())
def test_nothing_is_lost_wherever_connections_are_cut(data: st.DataObject) -> None:
    """Stored once and in order; delivered at least once; acknowledged in the end."""
    pair = Pair(SHORT, chunk=data.draw(st.sampled_from([16, 300, 1 << 16])))
    options = data.draw(
        st.sampled_from(
            [SubscribeRequest(), SubscribeRequest(durable="d"), SubscribeRequest(group="g")]
        )
    )
    pair.exchange()
    inbox = pair.core.subscribe(1, options)
    published = 0
    got: list[bytes] = []
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
                pair.say(data.draw(st.integers(1, 400)))
            case "r":
                pair.hear(most=data.draw(st.integers(1, 400)))
            case "t":
                got += payloads(inbox, data.draw(st.integers(1, 50)))
            case "a":
                inbox.settle(include_last=True)
            case "k":
                pair.tick()
            case "l":
                pair.lose()
                pair.connect()
            case "v" if options.durable:
                pair.core.unsubscribe(inbox, is_processed=True)
                inbox = pair.core.subscribe(1, options)
        pair.core.check_invariants()
    pair.exchange()
    for _ in range(40):
        got += payloads(inbox)
        settle_all(pair, inbox)
        pair.tick()
    assert pair.core.confirmed_position == published
    expected = [b"%d" % number for number in range(published)]
    assert set(got) == set(expected)
    ring = pair.broker.classes[1].ring
    assert (ring.head, ring.floor) == (published, published)
