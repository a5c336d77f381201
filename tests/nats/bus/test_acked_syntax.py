"""Syntax of `$SB.SUB.` subjects and of ack payloads."""

from __future__ import annotations

import pytest

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.protocol.requests import Start, SubscribeRequest
from simplebus.nats.bus.acked import AckCommand, parse_ack_payload, parse_subscribe
from simplebus.nats.limits import ACKED_IN_FLIGHT_MESSAGES
from tests.nats.bus.two_listeners import NatsBrokerHarness

# Requests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("subject", "queue", "class_", "expected"),
    [
        ("7", "", 7, {}),
        ("orders", "", "orders", {}),
        ("orders.-", "", "orders", {}),
        ("dead%2Eorders.a%20b", "", "dead.orders", {"durable": "a b"}),
        ("orders.billing", "g", "orders", {"durable": "billing", "group": "g"}),
        ("orders.-", "g", "orders", {"group": "g"}),
        (
            "7.d.start=earliest.in_flight=5.ack_seconds=0%2E5.max_deliveries=3",
            "",
            7,
            {
                "durable": "d",
                "start": "earliest",
                "max_in_flight": 5,
                "ack_seconds": 0.5,
                "max_deliveries": 3,
            },
        ),
        ("7.-.backoff=1,0%2E5,30", "", 7, {"backoff": [1.0, 0.5, 30.0]}),
        ("7.-.backoff=5", "", 7, {"backoff": [5.0]}),
        ("7.-.by_key=true", "g", 7, {"group": "g", "by_key": True}),
        ("7.-.start=12", "", 7, {"start": Start(sequence=12)}),
        ("7.-.start=@1763700000%2E5", "", 7, {"start": Start(time=1763700000.5)}),
        ("7.-.filter.orders.*.>", "", 7, {"channels": ["orders.*.>"]}),
        (
            "7.filter.start=new.filter.a",
            "",
            7,
            {"durable": "filter", "start": "new", "channels": ["a"]},
        ),
    ],
)
def test_parses_acked_subscribe_subjects(
    subject: str, queue: str, class_: int | str, expected: dict[str, object]
) -> None:
    found = parse_subscribe(b"$SB.SUB." + subject.encode(), queue.encode())
    expected = {"max_in_flight": ACKED_IN_FLIGHT_MESSAGES, **expected}
    assert (found.class_ref, found.request) == (class_, SubscribeRequest(**expected))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("subject", "expected_error"),
    [
        ("70000", "class id 70000: expected 0 to 65535"),
        ("9" * 100, "class id"),
        ("*", r"the wildcard \* is not a class"),
        (">", "the wildcard > is not a class"),
        ("orders.*", r"wildcard \* is not a class"),
        ("orders.d.in_flight", "unknown option 'in_flight', expected one of start, in_flight"),
        ("orders.d.colour=red", "unknown option 'colour=red'"),
        (
            "orders.d.in_flight=0",
            "in_flight is '0', expected a whole number from 1 to",
        ),
        ("orders.d.in_flight=many", "in_flight is 'many', expected a whole number from 1 to"),
        (
            "orders.d.ack_seconds=nan",
            "ack_seconds is 'nan', expected a number above 0 and up to 86400",
        ),
        ("orders.d.max_deliveries=-1", "max_deliveries is '-1', expected .*, 0 for no limit"),
        ("orders.d.backoff=1,0", "backoff is '1,0', expected 1 to 64 numbers above 0"),
        ("orders.d.backoff=", "backoff is '', expected 1 to 64 numbers"),
        ("orders.d.backoff=" + "1," * 64 + "1", "backoff is '1,1,1.*, expected 1 to 64 numbers"),
        ("orders.d.by_key=maybe", "by_key is 'maybe', expected true or false"),
        (
            "orders.d.start=soon",
            "start is 'soon', expected earliest, new, last, last_values, waiting, .*since 1970",
        ),
        ("orders.d.start=" + "9" * 30, "start is '999.*, expected earliest"),
        ("orders.d.start=new.start=last", "duplicate option start: 'new' and 'last'"),
        ("orders%00", r"the class name 'orders\\x00' has unprintable characters"),
        ("orders.a%0Ab", r"the durable name 'a\\nb' has unprintable characters"),
        ("orders%FF", "'orders%FF' is not UTF-8"),
        ("orders.d.filter", "expected a subject after filter"),
        ("orders.d.filter.a.#", "ends with #"),
        ("x" * 300, "has 300 characters, expected 1 to 200"),
        ("orders." + "x" * 300, "the durable name has 300 characters, expected 1 to 200"),
    ],
)
def test_invalid_subscribe_subject_is_refused_and_the_client_stays(
    subject: str, expected_error: str
) -> None:
    harness = NatsBrokerHarness()
    client = harness.client()
    client.sub(f"$SB.SUB.{subject}")
    (line,) = client.lines()
    start = f'-ERR \'Permissions Violation for Subscription to "$SB.SUB.{subject}" ('
    assert line.startswith(start.encode())
    with pytest.raises(RemoteProtocolError, match=expected_error):
        parse_subscribe(b"$SB.SUB." + subject.encode(), b"")
    assert harness.broker.refusal_counts == {Reason.BAD_REQUEST: 1}
    assert client.session.subscriptions == {}
    assert not client.session.is_disconnecting


def test_name_must_be_utf_8() -> None:
    client = NatsBrokerHarness().client(b"SUB $SB.SUB.\xff 1\r\nSUB $SB.SUB.1.- \xff 1\r\n")
    assert [b"not UTF-8" in line for line in client.lines()] == [True, True]


# Acks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (b"", AckCommand("ack")),
        (b"+ACK", AckCommand("ack")),
        (b"+NXT", AckCommand("ack")),
        (b'+NXT {"batch": 1}', AckCommand("ack")),
        (b"+WPI", AckCommand("working")),
        (b"+TERM", AckCommand("terminate")),
        (b"+TERM because", AckCommand("terminate", error="because")),
        (b"+TERM  \xff ", AckCommand("terminate", error="\ufffd")),
        (b"+TERM " + b"x" * 2000, AckCommand("terminate", error="x" * 1024)),
        (b"-NAK", AckCommand("nack", None)),
        (b'-NAK {"delay": 5000000000}', AckCommand("nack", 5.0)),
        (b'-NAK{"delay": 1500000}', AckCommand("nack", 0.0015)),
        (b"-NAK 1m30s", AckCommand("nack", 90.0)),
        (b"-NAK 1.5s", AckCommand("nack", 1.5)),
        (b"-NAK 20ms", AckCommand("nack", 0.02)),
        (b"-NAK soon", AckCommand("nack")),
        (b"-NAK 1.5", AckCommand("nack")),
        (b'-NAK {"delay": -5}', AckCommand("nack")),
        (b'-NAK {"delay": "1s"}', AckCommand("nack")),
        (b'-NAK {"delay": 1e400}', AckCommand("nack")),
        (b"-NAK [1]", AckCommand("nack")),
        (b"-NAK {", AckCommand("nack")),
        (b"-NAK \xff", AckCommand("nack")),
        (b"-NAK " + b'{"a":' * 100_000, AckCommand("nack")),
        (b'-NAK {"delay": ' + b"9" * 900 + b"}", AckCommand("nack")),
        (b"+ack", None),
        (b"+ACK ", None),
        (b"hello", None),
    ],
)
def test_parses_ack_payloads(payload: bytes, expected: AckCommand | None) -> None:
    assert parse_ack_payload(payload) == expected
