"""The client core over its connections: what it says when, and what it makes of what it hears."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
import pytest

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
    CONNECT,
    FETCH,
    HEARTBEAT,
    MESSAGE,
    SUBSCRIBE,
    Line,
    connected,
    numbered,
    subscribed,
)
from tests.support.oracles import build_frame

# Connections -------------------------------------------------------------------------------------


def test_the_first_thing_said_is_who_is_there() -> None:
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


def test_an_answer_makes_it_ready() -> None:
    line = Line()
    assert (line.core.is_ready, line.core.session_id) == (False, None)
    line.server.connect()
    request = line.core.connection_made(0.0)
    line.exchange()
    assert (line.core.is_ready, line.core.session_id) == (True, 1)
    assert isinstance(request.reply, ConnectReply)
    assert (request.is_done, request.error) == (True, None)
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
    assert first.subscribe_request.is_done
    assert third.subscribe_request.is_done
    assert synced.is_done
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
        assert request.is_done
        assert isinstance(request.error, BusConnectionError)
    assert not inbox.subscribe_request.is_done
    line.server.answers = True
    line.connect()
    line.exchange()
    assert inbox.subscribe_request.is_done
    assert core.find_class_id("name") == 1004, "what is to be named is named again"


def test_when_there_will_be_no_connection_everything_fails() -> None:
    core = ClientCore()
    requests = [core.sync(), core.subscribe(1).subscribe_request]
    error = BusConnectionError("nobody is there")
    core.fail_requests(error)
    assert [(request.is_done, request.error) for request in requests] == [(True, error)] * 2


def test_the_id_that_the_bus_gave_a_name_is_told_to_the_next_one() -> None:
    line = connected()
    assert line.core.find_class_id("orders") is None
    line.core.name_classes("orders")
    line.exchange()
    assert line.core.find_class_id("orders") == 1006
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
    assert (first.is_done, second.is_done, other.is_done) == (True, True, False)
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
