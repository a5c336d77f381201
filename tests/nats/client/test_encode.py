"""Encoding of NATS client commands, credentials and JetStream messages; batches equal single
messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.errors import RemoteProtocolError
from simplebus.core.users.nkeys import verify_signature
from simplebus.jetstream import api, backlog
from simplebus.jetstream.cluster import stream_update
from simplebus.jetstream.consume.returned_messages import with_return_note
from simplebus.jetstream.settings import JetStreamOptions
from simplebus.nats.client import encode, jetstream_codec
from simplebus.nats.client.client import NatsClientCore, RequestReplies, ServerReady
from simplebus.nats.client.credentials import Credentials
from simplebus.nats.client.events import ReceivedMessages, ServerError, ServerInfo, ServerPong
from simplebus.nats.client.parser import ClientParser
from simplebus.net.nats_connection import NatsAddress

SEED = "SUAAAAICAMCAKBQHBAEQUCYMBUHA6EARCIJRIFIWC4MBSGQ3DQOR4H776Y"


def parsed(data: bytes) -> ReceivedMessages:
    (event,) = ClientParser().receive(data)
    assert isinstance(event, ReceivedMessages)
    return event


def msg(reply: bytes, payload: bytes = b"", sid: int = 2, head: bytes = b"") -> bytes:
    if head:
        sizes = b"%d %d" % (len(head), len(head) + len(payload))
        return b"HMSG s %d %b %b\r\n%b%b\r\n" % (sid, reply, sizes, head, payload)
    return b"MSG s %d %b %d\r\n%b\r\n" % (sid, reply, len(payload), payload)


# Encoding -----------------------------------------------------------------------------------------


def test_encodes_a_single_message() -> None:
    assert encode.encode_pub(b"a", b"xy") == b"PUB a 2\r\nxy\r\n"
    assert encode.encode_pub(b"a", b"xy", reply=b"r") == b"PUB a r 2\r\nxy\r\n"
    head = encode.encode_headers((b"A", b"b"), (b"C", b""))
    assert head == b"NATS/1.0\r\nA: b\r\nC: \r\n\r\n"
    encoded = encode.encode_pub(b"a", b"xy", reply=b"r", headers=head)
    assert encoded == b"HPUB a r 23 25\r\n" + head + b"xy\r\n"
    assert (
        encode.encode_sub(b"a.*", 3) + encode.encode_sub(b"a", 4, b"q")
        == b"SUB a.* 3\r\nSUB a q 4\r\n"
    )
    assert encode.encode_unsub(3) + encode.encode_unsub(4, 9) == b"UNSUB 3\r\nUNSUB 4 9\r\n"


@given(st.lists(st.binary(max_size=20), max_size=9))
def test_many_messages_encode_like_single_messages(payloads: list[bytes]) -> None:
    assert encode.encode_pubs(b"a.b", payloads) == b"".join(
        encode.encode_pub(b"a.b", p) for p in payloads
    )


@given(st.integers(1, 30), st.integers(0, 12), st.integers(0, 10**9), st.booleans(), st.booleans())
def test_equal_messages_encode_like_single_messages(
    count: int, size: int, first: int, has_reply: bool, has_headers: bool
) -> None:
    payloads = np.arange(count * size, dtype=np.uint8).reshape(count, size)
    numbers = encode.format_digits(np.arange(first, first + count), 12)
    reply = (b"_INBOX.", numbers) if has_reply else ()
    headers = (b"NATS/1.0\r\nN: ", numbers, b"\r\n\r\n") if has_headers else ()
    expected = b"".join(
        encode.encode_pub(
            b"a.b",
            payloads[n].tobytes(),
            reply=b"_INBOX.%012d" % (first + n) if has_reply else b"",
            headers=b"NATS/1.0\r\nN: %012d\r\n\r\n" % (first + n) if has_headers else b"",
        )
        for n in range(count)
    )
    assert encode.encode_equal_messages(b"a.b", payloads, reply=reply, headers=headers) == expected


# Credentials --------------------------------------------------------------------------------------


def test_nkey_signs_the_nonce() -> None:
    fields = Credentials(seed=SEED).connect_fields("a nonce")
    assert verify_signature(fields["nkey"], fields["sig"], b"a nonce")
    assert not verify_signature(fields["nkey"], fields["sig"], b"another")
    assert SEED not in repr(Credentials(seed=SEED))


@pytest.mark.parametrize(
    "credentials",
    [
        {"user": "a", "token": "t"},
        {"password": "p"},
        {"seed": SEED[:-1] + "A"},
        {"seed": "SAA"},
        {"seed": "!"},
    ],
)
def test_invalid_credentials_are_refused_early(credentials: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"expected|seed"):
        Credentials(**credentials)


# JetStream ---------------------------------------------------------------------------------------


@st.composite
def pub_ack_payloads(draw: st.DrawFn) -> bytes:
    sequence = draw(st.integers(0, 2**64))
    return draw(
        st.sampled_from(
            [
                b'{"stream":"S", "seq":%d}' % sequence,
                b'{"stream":"S","seq":%d}' % sequence,
                b'{"stream":"S", "seq":%d,"duplicate": true}' % sequence,
                b'{"stream":"S", "seq":%d,"domain":"hub"}' % sequence,
                b'{"error":{"code":503,"err_code":10077,"description":"full"}}',
                b'{"stream":"S", "seq":}',
                b"",
                b"[]",
            ]
        )
    )


def one_pub_ack(payload: bytes) -> tuple[int, bool]:
    """Oracle for one PubAck: parse the JSON."""
    try:
        content: Any = json.loads(payload)
        sequence = content["seq"]
        assert 0 < sequence < 2**63
    except (ValueError, KeyError, TypeError, AssertionError):
        return 0, False
    return sequence, content.get("duplicate", False)


@given(st.lists(pub_ack_payloads(), min_size=1, max_size=30))
def test_pub_ack_batches_parse_like_single_acks(payloads: list[bytes]) -> None:
    acks = jetstream_codec.parse_pub_acks(
        parsed(b"".join(msg(b"r", payload) for payload in payloads))
    )
    expected = [one_pub_ack(payload) for payload in payloads]
    found = zip(acks.sequences.tolist(), acks.duplicates.tolist(), strict=True)
    assert list(found) == expected
    assert sorted(acks.errors) == [
        row for row, (sequence, _) in enumerate(expected) if not sequence
    ]


def test_pub_ack_errors_are_parsed() -> None:
    full = b'{"error":{"code":503,"err_code":10077,"description":"maximum messages exceeded"}}'
    no_responders = b"NATS/1.0 503\r\n\r\n"
    acks = jetstream_codec.parse_pub_acks(parsed(msg(b"r", full) + msg(b"r", head=no_responders)))
    assert [acks.errors[0].code, acks.errors[1].code] == [10077, 503]
    assert "maximum messages exceeded" in str(acks.errors[0])
    with pytest.raises(jetstream_codec.JetStreamError, match="no responders"):
        jetstream_codec.parse_api_reply(no_responders, b"")
    assert jetstream_codec.parse_status(b"NATS/1.0 409 Leadership Change\r\nA: b\r\n\r\n") == (
        409,
        "Leadership Change",
    )


STREAM = {
    "config": {
        "name": "S",
        "storage": "memory",
        "num_replicas": 1,
        "max_bytes": -1,
        "max_msgs": -1,
        "duplicate_window": 1,
        "metadata": {"simplebus-identity": "1"},
    },
    "state": {"messages": 0, "bytes": 0, "first_seq": 1, "last_seq": 0},
}
CONSUMER = {
    "name": "c",
    "config": {
        "opt_start_seq": 1,
        "inactive_threshold": 1,
        "metadata": {"simplebus": "plain", "simplebus-door": "d", "simplebus-terms": "{}"},
    },
    "delivered": {"stream_seq": 0},
    "ack_floor": {"stream_seq": 0},
}
ANSWERS = [
    ("STREAM.INFO.S", STREAM),
    ("STREAM.LIST", {"total": 1, "streams": [STREAM]}),
    ("CONSUMER.CREATE.S.c", CONSUMER),
    ("CONSUMER.LIST.S", {"total": 1, "consumers": [CONSUMER]}),
]


OPTIONS = JetStreamOptions((NatsAddress("a"),), replicas=3)
READ: dict[str, list[Callable[[dict[str, Any]], object]]] = {
    "consumers": [
        api.channels_of,
        api.server_id_of,
        api.idle_seconds_of,
        api.is_ack_all,
        api.kind_of,
        api.owner_of,
        api.delivery_count,
        api.last_delivered,
        api.delivery_policy_of,
        api.backlog_count,
        lambda info: api.taken_over_config(info["config"], "d"),
        lambda info: api.released_config(info["config"]),
        lambda info: api.with_delivery_policy(info["config"], "{}"),
        lambda info: with_return_note(info, np.arange(2)),
    ],
    "streams": [
        api.cluster_id_of,
        lambda info: stream_update.required_changes(info["config"], OPTIONS),
        lambda info: stream_update.storage_problem(info["config"], OPTIONS),
        lambda info: backlog.build_inventory(info, [CONSUMER]),
    ],
}
"""API requests whose replies the stateless server parses."""


def variants(value: object) -> list[object]:
    """Return copies of a reply with each field left out or replaced."""
    wrong: list[object] = [None, "a", -1, 1 << 70, [1], {"x": 1}, 1.5]
    found = list(wrong)
    if isinstance(value, dict):
        found += [{k: v for k, v in value.items() if k != key} for key in value]
        found += [{**value, key: variant} for key in value for variant in variants(value[key])]
    if isinstance(value, list):
        found += [[variant] for variant in variants(value[0])]
    return found


@pytest.mark.parametrize(("subject", "reply"), ANSWERS)
def test_api_reply_has_its_type_or_is_an_error(subject: str, reply: dict[str, object]) -> None:
    assert jetstream_codec.parse_api_reply(b"", json.dumps(reply).encode(), subject) == reply
    refused, said_of_it = 0, set[str]()
    for wrong in variants(reply):
        try:
            found = jetstream_codec.parse_api_reply(b"", json.dumps(wrong).encode(), subject)
        except jetstream_codec.JetStreamError as error:
            refused += 1
            said_of_it.add(str(error))
        else:  # The missing fields are optional.
            list_name = "consumers" if subject.startswith("CONSUMER") else "streams"
            for each in (found[list_name] or []) if "LIST" in subject else [found]:
                if list_name == "consumers":
                    assert api.ack_floor(each) >= 1
                for read in READ[list_name]:
                    read(each)
    assert refused > 20
    assert all("xpected" in each or "missing" in each for each in said_of_it)


@pytest.mark.parametrize("code", ['"abc"', "[]", "1.5", "null"])
def test_error_with_invalid_code_is_an_error(code: str) -> None:
    with pytest.raises(jetstream_codec.JetStreamError, match="why") as caught:
        jetstream_codec.parse_api_reply(
            b"", b'{"error":{"code":%b,"description":"why"}}' % code.encode()
        )
    assert caught.value.code == 0


tokens = st.one_of(st.integers(0, 2**63 - 1).map(str), st.sampled_from(["x", "", "9" * 19, "-1"]))


@st.composite
def ack_subjects(draw: st.DrawFn) -> str:
    count = draw(st.sampled_from([5, 5, 5, 4, 6]))
    token_groups = [draw(tokens) for _ in range(count)]
    prefix = draw(
        st.sampled_from([["S", "c"], ["hub", "hash", "S", "c"], ["S"], ["S", "long" * 9]])
    )
    tail = draw(st.sampled_from([[], [], ["random"]]))
    return ".".join(
        [draw(st.sampled_from(["$JS.ACK", "$JS.ACK", "$JX.ACK"])), *prefix, *token_groups, *tail]
    )


def one_delivery(subject: str) -> list[int] | None:
    """Oracle for one ack subject: parse token by token."""
    tokens = subject.split(".")
    if tokens[:2] != ["$JS", "ACK"] or len(tokens) not in (9, 11, 12):
        return None
    fields = tokens[4:9] if len(tokens) == 9 else tokens[6:11]
    if not all(w.isdigit() and len(w) <= 19 and int(w) < 2**63 for w in fields):
        return None
    return [int(w) for w in fields]


def parse_and_check(subjects: list[str]) -> jetstream_codec.JetStreamDeliveries:
    """Parse the ack subjects of messages as a batch, and compare each with `one_delivery`."""
    found = jetstream_codec.parse_deliveries(parsed(b"".join(msg(s.encode()) for s in subjects)))
    expected = [one_delivery(subject) for subject in subjects]
    assert found.good.tolist() == [each is not None for each in expected]
    columns = (found.attempts, found.sequences, found.counts, found.times, found.pending)
    rows = np.stack(columns, axis=1).tolist()
    assert rows == [each or [0] * 5 for each in expected]
    return found


@given(st.lists(ack_subjects(), min_size=1, max_size=20))
def test_ack_subject_batches_parse_like_single_subjects(subjects: list[str]) -> None:
    parse_and_check(subjects)


@given(
    st.lists(st.integers(0, 9), min_size=32, max_size=48),
    st.sampled_from([1, 98, 995, 2**62]),
    st.sampled_from(["$JS.ACK.S.c.1", "$JS.ACK.S.c.12", "$JS.ACK.h.i.S.c.1", "$JX.ACK.S.c.1"]),
    st.lists(st.tuples(st.integers(0, 47), ack_subjects()), max_size=1),
    st.lists(
        st.tuples(st.integers(0, 47), st.integers(0, 60), st.sampled_from("x./:0")), max_size=1
    ),
)
def test_similar_ack_subjects_parse_like_others(
    steps: list[int], first: int, head: str, other_subjects: list[tuple[int, str]],
    changes: list[tuple[int, int, str]],
) -> None:  # fmt: skip
    subjects = [
        f"{head}.{first + sum(steps[:row])}.{first + row}.{10**18 + step}.{5 + len(steps) - row}"
        for row, step in enumerate(steps)
    ]
    for row, other_subject in other_subjects:
        subjects[row % len(subjects)] = other_subject
    for row, position, sign in changes:
        changed_subject = subjects[row % len(subjects)]
        subjects[row % len(subjects)] = (
            changed_subject[:position] + sign + changed_subject[position + 1 :]
        )
    found = parse_and_check(subjects)
    selected = found.pick(found.good)
    assert selected.times.tolist() == found.times[found.good].tolist()
    stored = [
        jetstream_codec.parse_stored_time(selected.messages, row)
        for row in range(len(selected.good))
    ]
    assert stored == [time / 1e9 for time in selected.times.tolist()]


def test_parses_every_form_of_ack_subject() -> None:
    forms = (b"$JS.ACK.S.c.%b", b"$JS.ACK.hub.hash.S.c.%b", b"$JS.ACK.hub.hash.S.c.%b.random")
    found = jetstream_codec.parse_deliveries(
        parsed(b"".join(msg(f % b"2.30.4.5.6") for f in forms))
    )
    assert found.good.all()
    assert (found.attempts.tolist(), found.sequences.tolist()) == ([2] * 3, [30] * 3)
    assert found.pending.tolist() == [6] * 3


def test_message_without_reply_subject_is_no_delivery() -> None:
    found = jetstream_codec.parse_deliveries(parsed(b"MSG s 1 0\r\n\r\nMSG s 1 $JS.ACK 0\r\n\r\n"))
    assert found.good.tolist() == [False, False]


@given(
    st.lists(st.text("ab.1", min_size=1, max_size=9), min_size=1, max_size=20),
    st.binary(max_size=9),
)
def test_encodes_one_ack_per_message(subjects: list[str], command: bytes) -> None:
    messages = parsed(b"".join(msg(subject.encode()) for subject in subjects))
    encoded = jetstream_codec.encode_acks(messages, command)
    expected = [encode.encode_pub(subject.encode(), command) for subject in subjects]
    end = b" %d\r\n%b\r\n" % (len(command), command)
    assert jetstream_codec.encode_acks_in_order(messages, command) == b"".join(expected)
    assert sorted(encoded.split(end)) == sorted(
        [b"", *(each.removesuffix(end) for each in expected)]
    )


def test_encodes_pull_requests() -> None:
    request = jetstream_codec.pull_request(
        batch=5, expires_seconds=1.5, idle_seconds=0.5, max_bytes=7
    )
    assert json.loads(request) == {
        "batch": 5, "expires": 1_500_000_000, "idle_heartbeat": 500_000_000, "max_bytes": 7
    }  # fmt: skip
    assert json.loads(jetstream_codec.pull_request(batch=5)) == {"batch": 5, "no_wait": True}
    assert jetstream_codec.nak_payload(0) == b"-NAK"
    assert jetstream_codec.nak_payload(2.5) == b'-NAK {"delay":2500000000}'
    assert jetstream_codec.encode_api_request("STREAM.INFO.S") == ("$JS.API.STREAM.INFO.S", b"")


# Connection state ---------------------------------------------------------------------------------


def sent(core: NatsClientCore) -> bytes:
    waited = core.output_bytes
    output = b"".join(core.drain_output())
    assert len(output) == waited
    return output


def greeted(**options: Any) -> NatsClientCore:
    core = NatsClientCore(inbox="_INBOX.x", **options)
    core.start_connection(0.0)
    core.subscribe("before.*", "q")
    (info,) = core.receive(b'INFO {"nonce":"n"}\r\n', 0.0)
    assert isinstance(info, ServerInfo)
    core.send_connect()
    return core


def test_connection_starts_with_connect_and_subscriptions() -> None:
    core = greeted(name="me", credentials=Credentials(user="ada", password="pw"))
    connect, *remaining = sent(core).split(b"\r\n")
    connect_options = json.loads(connect.removeprefix(b"CONNECT "))
    assert (
        connect_options["name"],
        connect_options["user"],
        connect_options["pass"],
        connect_options["verbose"],
    ) == ("me", "ada", "pw", False)
    assert remaining == [b"SUB _INBOX.x.* 1", b"SUB before.* q 2", b"PING", b""]
    core.publish("early", b"is nowhere")
    assert sent(core) == b""
    (ready,) = core.receive(b"PONG\r\n", 0.1)
    assert isinstance(ready, ServerReady)
    core.publish("a", b"x")
    assert sent(core) == b"PUB a 1\r\nx\r\n"


def test_ping_is_answered_after_earlier_output() -> None:
    core = greeted()
    list(core.receive(b"PONG\r\n", 0.0))
    sent(core)
    core.publish("a", b"x")
    first, second = core.send_ping(), core.send_ping()
    assert sent(core) == b"PUB a 1\r\nx\r\nPING\r\nPING\r\n"
    assert [core.is_ping_answered(mark) for mark in (first, second)] == [False, False]
    assert list(core.receive(b"PONG\r\n", 0.1)) == [ServerPong()]
    assert [core.is_ping_answered(mark) for mark in (first, second)] == [True, False]


def test_replies_have_their_request_numbers() -> None:
    core = greeted()
    list(core.receive(b"PONG\r\n", 0.0))
    sent(core)
    first, second = core.request("a"), core.request("b", b"x")
    assert sent(core) == (
        b"PUB a _INBOX.x.%012d 0\r\n\r\nPUB b _INBOX.x.%012d 1\r\nx\r\n" % (first, second)
    )
    received = b"".join(
        b"MSG _INBOX.x.%b 1 0\r\n\r\n" % token
        for token in (b"%012d" % second, b"%012d" % first, b"guessed")
    )
    messages, answers = core.receive(received + b"MSG before.a 2 0\r\n\r\n", 0.0)
    assert isinstance(answers, RequestReplies)
    assert answers.numbers.tolist() == [second, first]
    assert isinstance(messages, ReceivedMessages)
    numbers = core.reserve_numbers(3)
    columns = core.reply_subjects(numbers, 3)
    assert bytes(encode.build_rows(3, columns))[
        : len(core.reply_subject(numbers))
    ] == core.reply_subject(numbers)


def test_reconnect_resends_subscriptions_but_not_output() -> None:
    core = greeted()
    list(core.receive(b"PONG\r\n", 0.0))
    new_subscription = core.subscribe("later")
    core.publish("a", b"x")
    core.end_connection()
    core.start_connection(1.0)
    list(core.receive(b"INFO {}\r\n", 1.0))
    core.send_connect()
    resent = sent(core)
    assert b"SUB before.* q 2\r\nSUB later %d\r\n" % new_subscription in resent
    assert b"PUB" not in resent
    list(core.receive(b"PONG\r\n", 1.0))
    core.unsubscribe(new_subscription)
    assert sent(core) == b"UNSUB %d\r\n" % new_subscription


def test_server_that_answers_no_ping_times_out() -> None:
    core = greeted(ping_seconds=10)
    list(core.receive(b"PONG\r\n", 0.0))
    sent(core)
    core.tick(9.0)
    assert sent(core) == b""
    core.tick(10.0)
    assert sent(core) == b"PING\r\n"
    list(core.receive(b"PONG\r\nPING\r\n", 15.0))
    assert sent(core) == b"PONG\r\n"
    core.tick(25.0)
    core.tick(35.0)
    assert sent(core) == b"PING\r\nPING\r\n"
    with pytest.raises(RemoteProtocolError, match="2 PINGs; its last bytes arrived 30 s ago"):
        core.tick(45.0)


def test_server_errors_are_events() -> None:
    core = greeted()
    (event,) = core.receive(b"-ERR 'Authorization Violation'\r\n", 0.0)
    assert event == ServerError("Authorization Violation")


def test_missing_pending_header_means_unknown() -> None:
    template = b"NATS/1.0 408 Request Timeout\r\nNats-Pending-Messages: %b\r\n\r\n"
    assert jetstream_codec.parse_pending_messages(template % b"17") == 17
    for wrong in (b"1" * 5000, b"-1", b"", b"x"):
        assert jetstream_codec.parse_pending_messages(template % wrong) == 1 << 31
