"""The client core over its connections: what it says when, and what it makes of what it hears."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import build_frame
from strategies import garbled_streams, streams

from core.consumers import payloads, take
from core.model_server import (
    ACK,
    CONFIRM,
    CONNECT,
    DELIVER,
    ERROR,
    FETCH,
    HEARTBEAT,
    MESSAGE,
    NACK,
    SUBSCRIBE,
    UNSUBSCRIBE,
    Line,
    ModelServer,
    connected,
)
from simplebus.core.client.core import ClientCore
from simplebus.core.client.inbox import Inbox
from simplebus.core.errors import (
    BusConnectionError,
    LocalProtocolError,
    Reason,
    RefusedError,
    RemoteProtocolError,
)
from simplebus.core.limits import ACKS_MAX
from simplebus.core.receive import ReceiveBuffer
from simplebus.core.requests import (
    ConnectReply,
    ConnectRequest,
    FetchReply,
    FetchRequest,
    NamedClass,
    Start,
    SubscribeReply,
    SubscribeRequest,
)

DURABLE = SubscribeRequest(durable="d")


def subscribed(line: Line, options: SubscribeRequest | None = None, **keys: bool) -> Inbox:
    """A subscription to class 1 that the bus has begun."""
    inbox = line.core.subscribe(1, options or SubscribeRequest(), **keys)
    line.exchange()
    assert inbox.request.done
    return inbox


def numbered(*sequences: int) -> list[tuple[int, bytes]]:
    return [(sequence, b"%d" % sequence) for sequence in sequences]


def settle(line: Line, inbox: Inbox) -> None:
    inbox.settle(current=True)
    line.exchange()


# Connections -------------------------------------------------------------------------------------


def test_the_first_thing_said_is_who_is_there() -> None:
    core = ClientCore(name="tester", instance="one", heartbeat=7.0, client="test 1")
    core.publish(b"", 5)
    core.subscribe(6)
    core.name_classes("orders", NamedClass(id=9, name="nine"))
    core.keep_last_values(8)
    request = core.connected(0.0)
    assert bytes(core.outgoing.peek()) == build_frame(
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


def test_an_answer_makes_it_ready() -> None:
    line = Line()
    assert (line.core.is_ready, line.core.session_id) == (False, None)
    line.server.connect()
    request = line.core.connected(0.0)
    line.exchange()
    assert (line.core.is_ready, line.core.session_id) == (True, 1)
    assert isinstance(request.reply, ConnectReply)
    assert (request.done, request.error) == (True, None)
    line.lose()
    assert (line.core.is_ready, line.core.session_id) == (False, None)


def test_a_fresh_connection_hears_of_classes_subscriptions_messages_and_then_the_rest() -> None:
    line = connected()
    first = subscribed(line)
    subscribed(line, SubscribeRequest(group="g"))
    line.core.publish(b"again", 3)
    line.exchange()
    line.server.next = 0
    line.lose()
    line.core.publish(b"later", 4)
    third = line.core.subscribe(5)
    line.core.fetch(1, 0, 1)
    synced = line.core.sync()
    line.connect()
    line.exchange()
    expected = [CONNECT, SUBSCRIBE, SUBSCRIBE, SUBSCRIBE, MESSAGE, MESSAGE, FETCH, CONNECT]
    assert line.server.kinds() == bytes(expected)
    said = msgspec.json.decode(line.server.frames[0][4], type=ConnectRequest)
    assert said == ConnectRequest(
        name="tester", instance="one", classes=[1, 3, 4, 5], unconfirmed=0, bus="bus"
    )
    subscriptions = [frame[3] for frame in line.server.frames[1:4]]
    assert subscriptions == [1, 2, 3]
    assert first.request.done
    assert third.request.done
    assert synced.done
    assert line.core.statistics().reconnections == 1


def test_requests_fail_with_the_connection_and_subscriptions_do_not() -> None:
    line = connected(answers=False)
    core = line.core
    line.server.reply(1)
    line.exchange()
    asked = [core.sync(), core.name_classes("name"), core.fetch(1, 0, 9)]
    inbox = core.subscribe(1)
    line.say()
    line.lose()
    for request in asked:
        assert request.done
        assert isinstance(request.error, BusConnectionError)
    assert not inbox.request.done
    line.server.answers = True
    line.connect()
    line.exchange()
    assert inbox.request.done
    assert core.class_id("name") == 1004, "what is to be named is named again"


def test_when_there_will_be_no_connection_everything_fails() -> None:
    core = ClientCore()
    requests = [core.sync(), core.subscribe(1).request]
    error = BusConnectionError("nobody is there")
    core.fail_requests(error)
    assert [(request.done, request.error) for request in requests] == [(True, error)] * 2


def test_the_id_that_the_bus_gave_a_name_is_told_to_the_next_one() -> None:
    line = connected()
    assert line.core.class_id("orders") is None
    line.core.name_classes("orders")
    line.exchange()
    assert line.core.class_id("orders") == 1006
    line.lose()
    line.connect()
    line.exchange()
    assert b'{"id":1006,"name":"orders"}' in line.server.frames[0][4]
    line.core.publish(b"", 1006)
    line.exchange()
    assert line.server.kinds() == bytes([CONNECT, MESSAGE])


def test_a_class_is_named_once_before_its_first_use() -> None:
    line = connected()
    line.core.publish(b"", 5)
    line.core.publish_many([b""], 5)
    line.core.subscribe(5)
    line.core.fetch(6, 0, 1)
    line.exchange()
    assert line.server.kinds() == bytes(
        [CONNECT, CONNECT, MESSAGE, MESSAGE, SUBSCRIBE, CONNECT, FETCH]
    )


def test_a_class_that_cannot_be_named_is_named_again_at_the_next_use() -> None:
    line = connected()
    line.server.answers = False
    line.core.publish(b"", 5)
    line.say()
    number = line.server.frames[1][2]
    line.server.refuse("too_many_classes", kind=CONNECT, number=number)
    line.exchange()
    line.core.publish(b"", 5)
    line.exchange()
    assert line.server.kinds() == bytes([CONNECT, CONNECT, MESSAGE, CONNECT, MESSAGE])
    line.lose()
    line.server.answers = True
    line.connect()
    line.exchange()


@pytest.mark.parametrize("class_id", [-1, 65536, 1.5, None, True])
def test_a_class_id_out_of_range_is_refused(class_id: int) -> None:
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


def test_a_class_name_out_of_range_is_refused() -> None:
    for name in ("", "x" * 201):
        with pytest.raises(ValueError, match="1 to 200 characters"):
            ClientCore().name_classes(name)


# Heartbeats --------------------------------------------------------------------------------------


def test_who_has_nothing_to_say_beats() -> None:
    line = connected(heartbeat=10.0)
    times = [line.now]
    while times[-1] < 100:
        line.now = line.core.tick(times[-1])
        times.append(line.now)
        before = line.server.kinds().count(HEARTBEAT)
        line.core.tick(line.now)
        line.say()
        line.server.say(HEARTBEAT)
        line.hear()
        assert line.server.kinds().count(HEARTBEAT) <= before + 1
    assert 10 <= line.server.kinds().count(HEARTBEAT) <= 20
    assert max(after - before for before, after in pairwise(times)) <= 10


def test_who_has_something_to_say_does_not_beat() -> None:
    line = connected(heartbeat=10.0)
    for second in range(100):
        line.now = float(second)
        line.core.tick(line.now)
        line.core.publish(b"", 1)
        line.server.say(HEARTBEAT)
        line.exchange()
    assert HEARTBEAT not in line.server.kinds()


def test_a_bus_that_is_silent_is_given_up() -> None:
    line = connected(heartbeat=10.0)
    line.core.tick(29.9)
    assert line.core.tick(29.9) <= 30.0
    with pytest.raises(RemoteProtocolError, match=r"silent for 30.0 s; .* every 10 s") as caught:
        line.core.tick(30.0)
    assert caught.value.reason == Reason.HEARTBEAT_TIMEOUT
    line.lose()
    assert line.core.tick(31.0) == math.inf
    line.now = 40.0
    line.connect()
    line.exchange()
    assert line.core.tick(40.0) <= 50.0


def test_without_an_agreement_nobody_beats() -> None:
    line = connected()
    assert line.core.tick(1e9) == math.inf


# Subscriptions -----------------------------------------------------------------------------------


def test_messages_come_to_whom_they_were_announced() -> None:
    line = connected()
    first, second = subscribed(line), subscribed(line)
    line.server.deliver(2, *numbered(0, 1))
    line.server.deliver(1, *numbered(0))
    line.server.say(MESSAGE, 1, 1, 0, b"1")
    line.server.deliver(2, *numbered(5), attempt=2)
    assert set(line.exchange()) == {first, second}
    assert payloads(first) == [b"0", b"1"]
    messages = take(second)
    assert [(m.sequence, m.attempt) for m in messages] == [(0, 1), (1, 1), (5, 2)]
    settle(line, first)
    settle(line, second)
    assert line.server.acked(1) == [(0, 2)]
    assert line.server.acked(2) == [(0, 2), (5, 6)]
    statistics = line.core.statistics()
    assert (statistics.received, statistics.redelivered, statistics.acknowledged) == (5, 1, 5)


def test_acks_are_due_once_so_many_messages_are_processed() -> None:
    line = connected()
    inbox = subscribed(line)
    line.server.deliver(1, *((n, b"") for n in range(ACKS_MAX + 100)))
    while line.server.out:
        line.hear()
    take(inbox, ACKS_MAX)
    inbox.settle(current=False)
    assert not line.core.acks_are_due
    inbox.settle(current=True)
    assert line.core.acks_are_due


def test_settling_says_whether_a_consumer_still_holds_something() -> None:
    line = connected()
    inbox = subscribed(line)
    line.server.deliver(1, *numbered(0, 1, 2))
    line.exchange()
    assert not line.core.settle_processed()
    take(inbox, 2)
    assert line.core.settle_processed()
    inbox.settle(current=True)
    assert not line.core.settle_processed()


def test_who_says_something_by_hand_is_noticed() -> None:
    line = connected()
    calls: list[int] = []
    line.core.on_ack = lambda: calls.append(1)
    assert line.core.on_ack() is None
    inbox = subscribed(line, auto_ack=False)
    line.server.deliver(1, *numbered(0, 1, 2))
    line.exchange()
    messages = take(inbox)
    messages[0].ack()
    messages[1].nack()
    messages[2].working()
    assert len(calls) == 4


def test_a_subscription_is_left_after_the_last_word_about_its_messages() -> None:
    line = connected()
    inbox = subscribed(line, DURABLE)
    line.server.deliver(1, *numbered(*range(10)))
    line.exchange()
    take(inbox, 3)
    request = line.core.unsubscribe(inbox, processed=False, forget=True)
    assert line.core.unsubscribe(inbox, processed=True) is request
    line.server.deliver(1, *numbered(10, 11))
    line.exchange()
    assert (request.done, request.error) == (True, None)
    assert line.server.kinds()[-4:] == bytes([ACK, NACK, NACK, UNSUBSCRIBE])
    told = [(word.first, word.last, word.argument) for word in line.server.told]
    assert told == [(0, 2, b""), (2, 3, b""), (3, 10, b"0")]
    assert line.server.frames[-1][4] == b'{"forget":true}'
    assert line.core.statistics().ignored == 2


def test_the_number_of_a_subscription_that_is_gone_is_given_again_late() -> None:
    line = connected()
    inbox = subscribed(line)
    line.core.unsubscribe(inbox, processed=True)
    line.exchange()
    other = subscribed(line)
    assert (inbox.subscription_number, other.subscription_number) == (1, 2)
    line.server.deliver(1, *numbered(0))
    assert line.exchange() == []
    assert line.core.statistics().ignored == 1


def test_a_plain_subscription_that_is_left_meanwhile_is_not_made_again() -> None:
    line = connected()
    inbox, late = subscribed(line), subscribed(line)
    request = line.core.unsubscribe(inbox, processed=True)
    assert not request.done
    line.lose()
    assert request.done
    assert line.core.unsubscribe(late, processed=True).done
    assert line.core.unsubscribe(line.core.subscribe(1, DURABLE), processed=True).done
    line.connect()
    line.exchange()
    assert line.server.kinds() == bytes([CONNECT])


def test_a_durable_that_is_left_meanwhile_is_taken_up_to_say_what_is_owed() -> None:
    line = connected()
    inbox = subscribed(line, DURABLE)
    line.server.deliver(1, *numbered(*range(10)))
    line.exchange()
    take(inbox, 3)
    line.lose()
    request = line.core.unsubscribe(inbox, processed=True)
    assert not request.done
    line.server.cursor = 10
    line.connect()
    line.exchange()
    assert line.server.kinds() == bytes([CONNECT, SUBSCRIBE, ACK, NACK, UNSUBSCRIBE])
    assert line.server.acked() == [(0, 3)]
    assert request.done


def test_a_subscription_may_be_left_before_it_has_begun() -> None:
    line = connected()
    inbox = line.core.subscribe(1)
    request = line.core.unsubscribe(inbox, processed=True)
    line.exchange()
    assert request.done
    assert line.server.kinds() == bytes([CONNECT, CONNECT, SUBSCRIBE, UNSUBSCRIBE])


def test_what_a_durable_still_has_to_say_is_said_to_the_next_connection() -> None:
    line = connected()
    inbox = subscribed(line, DURABLE)
    line.server.deliver(1, *numbered(*range(10)))
    line.exchange()
    take(inbox, 4)
    inbox.settle(current=False)
    line.lose()
    line.connect()
    line.server.cursor = 10
    line.exchange()
    assert line.server.acked() == [(0, 3)]
    line.server.deliver(1, *numbered(*range(3, 12)), attempt=0)
    line.exchange()
    assert payloads(inbox) == [b"%d" % n for n in range(4, 12)]
    settle(line, inbox)
    assert line.server.acked() == [(0, 3), (3, 10), (10, 12)] or line.server.acked()[1:] == [
        (3, 12)
    ]


def test_a_plain_subscription_goes_on_behind_what_came() -> None:
    line = connected()
    subscribed(line, SubscribeRequest(start="earliest"))
    line.server.deliver(1, *numbered(*range(10)))
    line.exchange()
    line.lose()
    line.connect()
    line.exchange()
    expected = SubscribeRequest(start=Start(sequence=10)).encode()
    assert [frame[4] for frame in line.server.frames if frame[0] == SUBSCRIBE] == [expected]
    line.lose()
    line.server = ModelServer(bus="another")
    line.connect()
    line.exchange()
    expected = SubscribeRequest(start="earliest").encode()
    assert [frame[4] for frame in line.server.frames if frame[0] == SUBSCRIBE] == [expected]


# Refusals ----------------------------------------------------------------------------------------


def test_a_refused_subscription_says_so_and_is_not_tried_again() -> None:
    line = connected()
    line.server.answers = False
    line.core.publish(b"", 1)
    inbox = line.core.subscribe(1)
    line.say()
    line.server.refuse("durable_in_use", kind=SUBSCRIBE, number=inbox.request.number)
    assert line.exchange() == [inbox]
    assert isinstance(inbox.request.error, RefusedError)
    assert inbox.request.error.code == "durable_in_use"
    with pytest.raises(RefusedError, match="durable_in_use: no"):
        assert inbox.is_empty
    assert line.core.unsubscribe(inbox, processed=True).done
    line.lose()
    line.server.answers = True
    line.connect()
    line.exchange()
    assert SUBSCRIBE not in line.server.kinds()


def test_a_subscription_that_the_bus_ends_gives_what_it_has_and_then_says_why() -> None:
    line = connected()
    inbox = subscribed(line)
    line.server.deliver(1, *numbered(0, 1))
    line.server.refuse("slow_consumer", kind=SUBSCRIBE, number=inbox.request.number)
    del line.server.subscriptions[1]
    assert line.exchange() == [inbox]
    assert payloads(inbox, 2) == [b"0", b"1"]
    inbox.settle(current=True)
    with pytest.raises(RefusedError, match="slow_consumer"):
        assert inbox.is_empty
    assert inbox.request.error is inbox.error
    line.exchange()
    assert line.server.told == []


def test_a_subscription_that_is_gone_when_it_is_left_is_left() -> None:
    line = connected()
    inbox = subscribed(line)
    request = line.core.unsubscribe(inbox, processed=True)
    line.server.refuse("unknown_subscription", kind=UNSUBSCRIBE, number=request.number)
    line.hear()
    assert (request.done, request.error) == (True, None)


def test_other_refusals_answer_their_request() -> None:
    line = connected()
    subscribed(line)
    line.server.answers = False
    request = line.core.fetch(1, 0, 10)
    line.exchange()
    line.server.refuse("bad_request", kind=FETCH, number=request.number)
    line.exchange()
    assert isinstance(request.error, RefusedError)
    assert (request.error.code, request.error.sentence) == ("bad_request", "no")


def test_complaints_of_no_consequence_are_counted() -> None:
    line = connected()
    for kind in (ACK, NACK, ord("9"), FETCH, 0, 77):
        line.server.refuse("unknown_subscription", kind=kind, number=5)
    line.exchange()
    assert line.core.statistics().ignored == 6


@pytest.mark.parametrize(
    ("code", "reason"), [("taken_over", Reason.TAKEN_OVER), ("from_the_future", "from_the_future")]
)
def test_a_fatal_error_ends_the_connection(code: str, reason: str) -> None:
    line = connected()
    line.server.refuse(code, fatal=True)
    with pytest.raises(RemoteProtocolError, match=f"{code}: no") as caught:
        line.exchange()
    assert caught.value.reason == reason


def test_a_refused_connect_ends_the_connection() -> None:
    line = Line(server=ModelServer(answers=False))
    line.connect()
    line.say()
    line.server.refuse("too_many_classes", kind=CONNECT, number=line.server.frames[0][2])
    with pytest.raises(RemoteProtocolError, match="too_many_classes: no"):
        line.hear()


# Fetching ----------------------------------------------------------------------------------------


def test_fetched_messages_belong_to_the_oldest_fetch_of_their_class() -> None:
    line = connected()
    first, second = line.core.fetch(1, 10, 3), line.core.fetch(1, 0, 9)
    other = line.core.fetch(2, 0, 9)
    line.exchange()
    asked = [frame for frame in line.server.frames if frame[0] == FETCH]
    assert asked[0][4] == FetchRequest(first=10, count=3).encode()
    line.server.deliver(0, *numbered(12, 15, 16), attempt=0)
    line.server.fetched(first.number, FetchReply(first=12, next=17, floor=12, head=30))
    line.server.say(MESSAGE, 1, 17, 0, b"17")
    line.server.deliver(0, *numbered(12), class_id=2, attempt=0)
    line.server.deliver(0, *numbered(0), class_id=1, attempt=0)
    far = (5 << 31) + 17
    line.server.fetched(second.number, FetchReply(first=far, next=far, floor=12, head=30))
    line.exchange()
    assert (first.done, second.done, other.done) == (True, True, False)
    first_ones = [m for batch in first.batches for m in batch]
    assert [(m.sequence, m.payload) for m in first_ones] == [
        (12, b"12"),
        (15, b"15"),
        (16, b"16"),
    ]
    assert first_ones[0].value == b"12"
    with pytest.raises(LocalProtocolError, match="fetched"):
        first_ones[0].ack()
    sequences = [m.sequence - (5 << 31) for batch in second.batches for m in batch]
    assert sequences == [17, 0]
    assert other.batches == []
    assert isinstance(first.reply, FetchReply)


def test_more_than_was_fetched_is_refused() -> None:
    line = connected()
    line.core.fetch(1, 0, 2)
    line.exchange()
    line.server.deliver(0, *numbered(0, 1, 2), attempt=0)
    with pytest.raises(RemoteProtocolError, match="3 messages of class 1 that nobody fetches"):
        line.exchange()


# What should not come ----------------------------------------------------------------------------


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
    with pytest.raises(RemoteProtocolError, match="before it answered the Connect"):
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
    request = line.core.connected(0.0)
    reply = ConnectReply(session=1, classes={"orders": 65536})
    line.server.say(CONNECT, 0, request.number, 0, reply.encode())
    with pytest.raises(RemoteProtocolError, match=r"for 'orders', .* got 65536"):
        line.hear()
    line.lose()
    assert request.done
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
        core.lost()
    core.check()
    while inbox.error is None and (batch := inbox.take_batch()) is not None:
        assert len(batch) > 0
        inbox.settle(current=True)
    core.outgoing.peek()
    core.check()


def test_any_type_of_frame_may_be_tried() -> None:
    """The property above meets every type of frame: they are all named here."""
    assert {*b"0123456789UFE"} >= {CONFIRM, DELIVER, ERROR, UNSUBSCRIBE, FETCH}
