"""Tests of subscriptions in the client core: subscribe, leave, refusal, end, reconnect."""

from __future__ import annotations

import pytest

from simplebus.core.errors import Reason, RefusedError, RemoteProtocolError
from simplebus.core.limits import ACK_BATCH_MESSAGES
from simplebus.core.protocol.requests import Start, SubscribeRequest
from tests.client.core.consumers import consume, payloads
from tests.client.core.model_server import (
    ACK,
    CONNECT,
    FETCH,
    MESSAGE,
    NACK,
    SUBSCRIBE,
    UNSUBSCRIBE,
    ModelConnection,
    ModelServer,
    numbered_messages,
    open_connection,
    settle,
    subscribe_confirmed,
)

DURABLE = SubscribeRequest(durable="d")


# Subscriptions -----------------------------------------------------------------------------------


def test_messages_go_to_the_announced_subscription() -> None:
    connection = open_connection()
    first, second = subscribe_confirmed(connection), subscribe_confirmed(connection)
    connection.server.deliver(2, *numbered_messages(0, 1))
    connection.server.deliver(1, *numbered_messages(0))
    connection.server.send_frame(MESSAGE, 1, 1, 0, b"1")
    connection.server.deliver(2, *numbered_messages(5), attempt=2)
    assert set(connection.exchange()) == {first, second}
    assert payloads(first) == [b"0", b"1"]
    messages = consume(second)
    assert [(m.sequence, m.attempt) for m in messages] == [(0, 1), (1, 1), (5, 2)]
    settle(connection, first)
    settle(connection, second)
    assert connection.server.acked_ranges(1) == [(0, 2)]
    assert connection.server.acked_ranges(2) == [(0, 2), (5, 6)]
    statistics = connection.core.statistics()
    assert (statistics.received, statistics.redelivered, statistics.acknowledged) == (5, 1, 5)


def test_acks_are_due_at_acks_max() -> None:
    connection = open_connection()
    inbox = subscribe_confirmed(connection)
    connection.server.deliver(1, *((n, b"") for n in range(ACK_BATCH_MESSAGES + 100)))
    while connection.server.outgoing:
        connection.receive()
    consume(inbox, ACK_BATCH_MESSAGES)
    inbox.settle(include_last=False)
    assert not connection.core.has_due_acks
    inbox.settle(include_last=True)
    assert connection.core.has_due_acks


def test_ack_processed_returns_true_while_a_message_is_unsettled() -> None:
    connection = open_connection()
    inbox = subscribe_confirmed(connection)
    connection.server.deliver(1, *numbered_messages(0, 1, 2))
    connection.exchange()
    assert not connection.core.ack_processed()
    consume(inbox, 2)
    assert connection.core.ack_processed()
    inbox.settle(include_last=True)
    assert not connection.core.ack_processed()


def test_manual_ack_calls_on_ack() -> None:
    connection = open_connection()
    calls: list[int] = []
    connection.core.on_ack = lambda: calls.append(1)
    assert connection.core.on_ack() is None
    inbox = subscribe_confirmed(connection, auto_ack=False)
    connection.server.deliver(1, *numbered_messages(0, 1, 2))
    connection.exchange()
    messages = consume(inbox)
    messages[0].ack()
    messages[1].nack()
    messages[2].working()
    assert len(calls) == 4


def test_unsubscribe_is_sent_after_pending_acks() -> None:
    connection = open_connection()
    inbox = subscribe_confirmed(connection, DURABLE)
    connection.server.deliver(1, *numbered_messages(*range(10)))
    connection.exchange()
    consume(inbox, 3)
    request = connection.core.unsubscribe(inbox, is_processed=False, forget=True)
    assert connection.core.unsubscribe(inbox, is_processed=True) is request
    connection.server.deliver(1, *numbered_messages(10, 11))
    connection.exchange()
    assert (request.is_done, request.error) == (True, None)
    assert connection.server.frame_types()[-4:] == bytes([ACK, NACK, NACK, UNSUBSCRIBE])
    outcomes = [
        (outcome.first, outcome.last, outcome.argument) for outcome in connection.server.outcomes
    ]
    assert outcomes == [(0, 2, b""), (2, 3, b""), (3, 10, b"0")]
    assert connection.server.frames[-1][4] == b'{"forget":true}'
    assert connection.core.statistics().ignored == 2


def test_subscription_numbers_are_reused_late() -> None:
    connection = open_connection()
    inbox = subscribe_confirmed(connection)
    connection.core.unsubscribe(inbox, is_processed=True)
    connection.exchange()
    second_inbox = subscribe_confirmed(connection)
    assert (inbox.subscription_number, second_inbox.subscription_number) == (1, 2)
    connection.server.deliver(1, *numbered_messages(0))
    assert connection.exchange() == []
    assert connection.core.statistics().ignored == 1


def test_subscription_left_while_disconnected_is_not_resubscribed() -> None:
    connection = open_connection()
    inbox, later_inbox = subscribe_confirmed(connection), subscribe_confirmed(connection)
    request = connection.core.unsubscribe(inbox, is_processed=True)
    assert not request.is_done
    connection.disconnect()
    assert request.is_done
    assert connection.core.unsubscribe(later_inbox, is_processed=True).is_done
    assert connection.core.unsubscribe(
        connection.core.subscribe(1, DURABLE), is_processed=True
    ).is_done
    connection.connect()
    connection.exchange()
    assert connection.server.frame_types() == bytes([CONNECT])


def test_durable_left_while_disconnected_is_resubscribed_to_send_its_acks() -> None:
    connection = open_connection()
    inbox = subscribe_confirmed(connection, DURABLE)
    connection.server.deliver(1, *numbered_messages(*range(10)))
    connection.exchange()
    consume(inbox, 3)
    connection.disconnect()
    request = connection.core.unsubscribe(inbox, is_processed=True)
    assert not request.is_done
    connection.server.cursor = 10
    connection.connect()
    connection.exchange()
    assert connection.server.frame_types() == bytes([CONNECT, SUBSCRIBE, ACK, NACK, UNSUBSCRIBE])
    assert connection.server.acked_ranges() == [(0, 3)]
    assert request.is_done


def test_subscription_can_be_left_before_its_reply() -> None:
    connection = open_connection()
    inbox = connection.core.subscribe(1)
    request = connection.core.unsubscribe(inbox, is_processed=True)
    connection.exchange()
    assert request.is_done
    assert connection.server.frame_types() == bytes([CONNECT, CONNECT, SUBSCRIBE, UNSUBSCRIBE])


def test_pending_acks_of_a_durable_are_sent_after_reconnect() -> None:
    connection = open_connection()
    inbox = subscribe_confirmed(connection, DURABLE)
    connection.server.deliver(1, *numbered_messages(*range(10)))
    connection.exchange()
    consume(inbox, 4)
    inbox.settle(include_last=False)
    connection.disconnect()
    connection.connect()
    connection.server.cursor = 10
    connection.exchange()
    assert connection.server.acked_ranges() == [(0, 3)]
    connection.server.deliver(1, *numbered_messages(*range(3, 12)), attempt=0)
    connection.exchange()
    assert payloads(inbox) == [b"%d" % n for n in range(4, 12)]
    settle(connection, inbox)
    assert connection.server.acked_ranges() == [
        (0, 3),
        (3, 10),
        (10, 12),
    ] or connection.server.acked_ranges()[1:] == [(3, 12)]


def test_subscription_continues_after_the_last_received_message() -> None:
    connection = open_connection()
    subscribe_confirmed(connection, SubscribeRequest(start="earliest"))
    connection.server.deliver(1, *numbered_messages(*range(10)))
    connection.exchange()
    connection.disconnect()
    connection.connect()
    connection.exchange()
    expected = SubscribeRequest(start=Start(sequence=10)).encode()
    assert [frame[4] for frame in connection.server.frames if frame[0] == SUBSCRIBE] == [expected]
    connection.disconnect()
    connection.server = ModelServer(bus="another")
    connection.connect()
    connection.exchange()
    expected = SubscribeRequest(start="earliest").encode()
    assert [frame[4] for frame in connection.server.frames if frame[0] == SUBSCRIBE] == [expected]


# Refusals ----------------------------------------------------------------------------------------


def test_refused_subscription_raises_and_is_not_retried() -> None:
    connection = open_connection()
    connection.server.is_replying = False
    connection.core.publish(b"", 1)
    inbox = connection.core.subscribe(1)
    connection.send()
    connection.server.send_error(
        "durable_in_use", kind=SUBSCRIBE, number=inbox.subscribe_request.number
    )
    assert connection.exchange() == [inbox]
    assert isinstance(inbox.subscribe_request.error, RefusedError)
    assert inbox.subscribe_request.error.code == "durable_in_use"
    with pytest.raises(RefusedError, match="durable_in_use: no"):
        assert inbox.is_empty
    assert connection.core.unsubscribe(inbox, is_processed=True).is_done
    connection.disconnect()
    connection.server.is_replying = True
    connection.connect()
    connection.exchange()
    assert SUBSCRIBE not in connection.server.frame_types()


def test_ended_subscription_hands_out_its_messages_then_raises() -> None:
    connection = open_connection()
    inbox = subscribe_confirmed(connection)
    connection.server.deliver(1, *numbered_messages(0, 1))
    connection.server.send_error(
        "slow_consumer", kind=SUBSCRIBE, number=inbox.subscribe_request.number
    )
    del connection.server.subscriptions[1]
    assert connection.exchange() == [inbox]
    assert payloads(inbox, 2) == [b"0", b"1"]
    inbox.settle(include_last=True)
    with pytest.raises(RefusedError, match="slow_consumer"):
        assert inbox.is_empty
    assert inbox.subscribe_request.error is inbox.error
    connection.exchange()
    assert connection.server.outcomes == []


def test_leaving_an_ended_subscription_succeeds() -> None:
    connection = open_connection()
    inbox = subscribe_confirmed(connection)
    request = connection.core.unsubscribe(inbox, is_processed=True)
    connection.server.send_error("unknown_subscription", kind=UNSUBSCRIBE, number=request.number)
    connection.receive()
    assert (request.is_done, request.error) == (True, None)


def test_refusal_fails_its_request() -> None:
    connection = open_connection()
    subscribe_confirmed(connection)
    connection.server.is_replying = False
    request = connection.core.fetch(1, 0, 10)
    connection.exchange()
    connection.server.send_error("bad_request", kind=FETCH, number=request.number)
    connection.exchange()
    assert isinstance(request.error, RefusedError)
    assert (request.error.code, request.error.sentence) == ("bad_request", "no")


def test_counts_errors_that_match_no_request() -> None:
    connection = open_connection()
    for kind in (ACK, NACK, ord("9"), FETCH, 0, 77):
        connection.server.send_error("unknown_subscription", kind=kind, number=5)
    connection.exchange()
    assert connection.core.statistics().ignored == 6


@pytest.mark.parametrize(
    ("code", "reason"), [("taken_over", Reason.TAKEN_OVER), ("from_the_future", "from_the_future")]
)
def test_fatal_error_ends_the_connection(code: str, reason: str) -> None:
    connection = open_connection()
    connection.server.send_error(code, fatal=True)
    with pytest.raises(RemoteProtocolError, match=f"{code}: no") as caught:
        connection.exchange()
    assert caught.value.reason == reason


def test_refused_connect_ends_the_connection() -> None:
    connection = ModelConnection(server=ModelServer(is_replying=False))
    connection.connect()
    connection.send()
    connection.server.send_error(
        "too_many_classes", kind=CONNECT, number=connection.server.frames[0][2]
    )
    with pytest.raises(RemoteProtocolError, match="too_many_classes: no"):
        connection.receive()
