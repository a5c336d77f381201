"""Tests of envelopes, subscribe options and the headers of requests."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import pytest

from simplebus.client.core.client import ClientCore
from simplebus.client.message_builder import MessageBuilder, header_pairs, to_milliseconds
from simplebus.client.message_types import Registry
from simplebus.client.request_reply import PendingReplies
from simplebus.client.subscribe_options import subscribe_request
from simplebus.client.subscription_target import SubscriptionTarget
from simplebus.core.protocol import envelope as envelope_format
from simplebus.core.protocol.envelope import Envelope
from simplebus.core.protocol.requests import Start

# Messages ----------------------------------------------------------------------------------------


def create_builder() -> MessageBuilder:
    return MessageBuilder(ClientCore(), Registry())


def test_message_without_options_has_no_envelope() -> None:
    assert create_builder().build_envelope(channel="", key=b"", headers={}, expires=None) is None


def test_options_are_in_the_envelope() -> None:
    assert create_builder().build_envelope(
        channel="orders.eu", key=b"7", headers={"a": "b"}, expires=1.5, delay=0.25
    ) == Envelope(
        channel="orders.eu",
        key=b"7",
        headers=(("a", "b"),),
        expires_ms=1500,
        not_before_ms=250,
    )


def test_envelope_of_a_channel_is_cached() -> None:
    builder = create_builder()
    assert builder.build_envelope(channel="a.b") is builder.build_envelope(channel="a.b")
    for number in range(5000):
        builder.build_envelope(channel=f"a.{number}")
    assert len(builder._envelope_by_channel) <= 4096


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, 0), (0.0004, 0), (0.001, 1), (math.inf, 2**64 - 1), (1e300, 2**64 - 1), (5e-324, 0)],
)
def test_long_times_are_limited_to_64_bits(seconds: float, expected: int) -> None:
    assert to_milliseconds("expires", seconds) == expected


@pytest.mark.parametrize("seconds", [-0.001, -math.inf, math.nan])
def test_rejects_invalid_times(seconds: float) -> None:
    with pytest.raises(ValueError, match="delay must be seconds from 0 on, got"):
        create_builder().build_envelope(delay=seconds)


def test_headers_are_pairs_of_texts_and_may_repeat_names() -> None:
    assert header_pairs([("a", "1"), ("a", "2")]) == (("a", "1"), ("a", "2"))
    assert header_pairs(None) == header_pairs({}) == ()
    with pytest.raises(TypeError, match="a header is two texts, got 'a': 1"):
        header_pairs({"a": 1})  # type: ignore[dict-item]


@pytest.mark.parametrize("channel", ["a..b", "a.*", ".", "a b"])
def test_rejects_invalid_channel(channel: str) -> None:
    with pytest.raises(ValueError, match="channel"):
        create_builder().build_envelope(channel=channel)
    with pytest.raises(ValueError, match="channel"):
        create_builder().build_envelope(channel=channel, key=b"x")


# Subscriptions -----------------------------------------------------------------------------------


def test_default_options_are_those_of_the_server() -> None:
    assert subscribe_request().encode() == b"{}"


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("new", "new"),
        (17, Start(sequence=17)),
        (Start(time=1.5), Start(time=1.5)),
        (datetime(1970, 1, 2, tzinfo=UTC), Start(time=86400.0)),
    ],
)
def test_start_positions(start: Any, expected: object) -> None:
    assert subscribe_request(start=start).start == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"start": "later"}, "start is one of waiting, new, earliest, last, .* got 'later'"),
        ({"start": -1}, "start must be from 0 to .* got -1"),
        ({"start": True}, "start is one of .* got True"),
        ({"start": datetime(1, 1, 1)}, "start is a time outside the supported range"),
        ({"slow": "drop_oldest"}, "slow is 'drop_oldest', so max_pending must be given"),
        ({"slow": "hurry"}, "slow is one of block, drop_oldest, .* got 'hurry'"),
        ({"max_pending": 5}, "max_pending cannot be combined with slow='block'"),
        ({"by_key": True}, "by_key is true, so group must be given"),
        ({"durable": ""}, "invalid subscription option: .*durable"),
        ({"group": "x" * 201}, "invalid subscription option: .*group"),
        ({"max_in_flight": 0}, "invalid subscription option: .*max_in_flight"),
        ({"ack_seconds": 0}, "ack_seconds must be seconds from 0.001 to 86400, got 0"),
        ({"ack_seconds": math.nan}, "ack_seconds must be seconds from .* got nan"),
        ({"backoff": [1, math.inf]}, "backoff must be seconds from .* got inf"),
        ({"backoff": []}, "backoff must have 1 to 64 values, got 0"),
        ({"max_deliveries": -1}, "invalid subscription option: .*max_deliveries"),
        ({"channels": ("a.#.b",)}, "may only be the last"),
    ],
)
def test_rejects_invalid_subscribe_options(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        subscribe_request(**options)


@pytest.mark.parametrize("backoff", [5, "5", None.__class__, [1, "2"]])
def test_rejects_invalid_backoff(backoff: Any) -> None:
    with pytest.raises(TypeError, match=r"^backoff must be "):
        subscribe_request(backoff=backoff)


@pytest.mark.parametrize("reference", [-1, 65536, True, ""])
def test_rejects_invalid_class_reference(reference: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        SubscriptionTarget.from_argument(reference, Registry())


# Requests ----------------------------------------------------------------------------------------


def test_each_bus_has_its_own_reply_channel() -> None:
    assert PendingReplies(1, "").channel != PendingReplies(1, "").channel


def decode_request(asking: PendingReplies, options: Any, timeout: float | None) -> Envelope:
    request_envelope = asking.get_envelope(options, timeout, create_builder().build_envelope)
    request_id = asking.add_request(lambda: None)
    envelope, payload = envelope_format.decode(
        request_envelope.encode(request_id.request_id, b"payload")
    )
    assert payload == b"payload"
    return envelope


def test_request_has_reply_headers_and_own_options() -> None:
    asking = PendingReplies(9, "")
    envelope = decode_request(asking, {"channel": "a.b", "headers": {"mine": "too"}}, 2.5)
    assert (envelope.channel, envelope.expires_ms) == ("a.b", 2500)
    assert envelope.headers == (
        ("mine", "too"),
        ("reply-to", asking.channel),
        ("reply-class", "9"),
        ("request-id", "1"),
    )
    assert decode_request(asking, {"expires": 1}, 9).expires_ms == 1000


def test_requests_without_options_expire_with_their_own_timeouts() -> None:
    asking = PendingReplies(9, "")
    found = [decode_request(asking, {}, timeout) for timeout in (2.5, 2.5, None, 1)]
    assert [envelope.expires_ms for envelope in found] == [2500, 2500, None, 1000]
    assert [dict(envelope.headers)["request-id"] for envelope in found] == ["1", "2", "3", "4"]
