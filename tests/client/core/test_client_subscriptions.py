"""The client core and its subscriptions: begun, left, refused, ended, and taken up again."""

from __future__ import annotations

import pytest

from simplebus.core.errors import Reason, RefusedError, RemoteProtocolError
from simplebus.core.limits import ACKS_MAX
from simplebus.core.protocol.requests import Start, SubscribeRequest
from tests.client.core.consumers import payloads, take
from tests.client.core.model_server import (
    ACK,
    CONNECT,
    FETCH,
    MESSAGE,
    NACK,
    SUBSCRIBE,
    UNSUBSCRIBE,
    Line,
    ModelServer,
    connected,
    numbered,
    settle,
    subscribed,
)

DURABLE = SubscribeRequest(durable="d")


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
    inbox.settle(include_last=False)
    assert not line.core.has_due_acks
    inbox.settle(include_last=True)
    assert line.core.has_due_acks


def test_settling_says_whether_a_consumer_still_holds_something() -> None:
    line = connected()
    inbox = subscribed(line)
    line.server.deliver(1, *numbered(0, 1, 2))
    line.exchange()
    assert not line.core.ack_processed()
    take(inbox, 2)
    assert line.core.ack_processed()
    inbox.settle(include_last=True)
    assert not line.core.ack_processed()


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
    request = line.core.unsubscribe(inbox, is_processed=False, forget=True)
    assert line.core.unsubscribe(inbox, is_processed=True) is request
    line.server.deliver(1, *numbered(10, 11))
    line.exchange()
    assert (request.is_done, request.error) == (True, None)
    assert line.server.kinds()[-4:] == bytes([ACK, NACK, NACK, UNSUBSCRIBE])
    told = [(word.first, word.last, word.argument) for word in line.server.told]
    assert told == [(0, 2, b""), (2, 3, b""), (3, 10, b"0")]
    assert line.server.frames[-1][4] == b'{"forget":true}'
    assert line.core.statistics().ignored == 2


def test_the_number_of_a_subscription_that_is_gone_is_given_again_late() -> None:
    line = connected()
    inbox = subscribed(line)
    line.core.unsubscribe(inbox, is_processed=True)
    line.exchange()
    other = subscribed(line)
    assert (inbox.subscription_number, other.subscription_number) == (1, 2)
    line.server.deliver(1, *numbered(0))
    assert line.exchange() == []
    assert line.core.statistics().ignored == 1


def test_a_plain_subscription_that_is_left_meanwhile_is_not_made_again() -> None:
    line = connected()
    inbox, late = subscribed(line), subscribed(line)
    request = line.core.unsubscribe(inbox, is_processed=True)
    assert not request.is_done
    line.lose()
    assert request.is_done
    assert line.core.unsubscribe(late, is_processed=True).is_done
    assert line.core.unsubscribe(line.core.subscribe(1, DURABLE), is_processed=True).is_done
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
    request = line.core.unsubscribe(inbox, is_processed=True)
    assert not request.is_done
    line.server.cursor = 10
    line.connect()
    line.exchange()
    assert line.server.kinds() == bytes([CONNECT, SUBSCRIBE, ACK, NACK, UNSUBSCRIBE])
    assert line.server.acked() == [(0, 3)]
    assert request.is_done


def test_a_subscription_may_be_left_before_it_has_begun() -> None:
    line = connected()
    inbox = line.core.subscribe(1)
    request = line.core.unsubscribe(inbox, is_processed=True)
    line.exchange()
    assert request.is_done
    assert line.server.kinds() == bytes([CONNECT, CONNECT, SUBSCRIBE, UNSUBSCRIBE])


def test_what_a_durable_still_has_to_say_is_said_to_the_next_connection() -> None:
    line = connected()
    inbox = subscribed(line, DURABLE)
    line.server.deliver(1, *numbered(*range(10)))
    line.exchange()
    take(inbox, 4)
    inbox.settle(include_last=False)
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
    line.server.refuse("durable_in_use", kind=SUBSCRIBE, number=inbox.subscribe_request.number)
    assert line.exchange() == [inbox]
    assert isinstance(inbox.subscribe_request.error, RefusedError)
    assert inbox.subscribe_request.error.code == "durable_in_use"
    with pytest.raises(RefusedError, match="durable_in_use: no"):
        assert inbox.is_empty
    assert line.core.unsubscribe(inbox, is_processed=True).is_done
    line.lose()
    line.server.answers = True
    line.connect()
    line.exchange()
    assert SUBSCRIBE not in line.server.kinds()


def test_a_subscription_that_the_bus_ends_gives_what_it_has_and_then_says_why() -> None:
    line = connected()
    inbox = subscribed(line)
    line.server.deliver(1, *numbered(0, 1))
    line.server.refuse("slow_consumer", kind=SUBSCRIBE, number=inbox.subscribe_request.number)
    del line.server.subscriptions[1]
    assert line.exchange() == [inbox]
    assert payloads(inbox, 2) == [b"0", b"1"]
    inbox.settle(include_last=True)
    with pytest.raises(RefusedError, match="slow_consumer"):
        assert inbox.is_empty
    assert inbox.subscribe_request.error is inbox.error
    line.exchange()
    assert line.server.told == []


def test_a_subscription_that_is_gone_when_it_is_left_is_left() -> None:
    line = connected()
    inbox = subscribed(line)
    request = line.core.unsubscribe(inbox, is_processed=True)
    line.server.refuse("unknown_subscription", kind=UNSUBSCRIBE, number=request.number)
    line.hear()
    assert (request.is_done, request.error) == (True, None)


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
