"""Names, options and request bodies."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.protocol.requests import Start
from simplebus.core.settings import ClassSettings, FullPolicy, Retention, Settings
from simplebus.jetstream import api
from simplebus.jetstream.names import (
    BACKLOG_CONSUMER,
    JetStreamNames,
    consumer_name,
    describe_consumer,
    encode_token,
)
from simplebus.jetstream.settings import JetStreamOptions, check_settings
from simplebus.net.nats_connection import NatsAddress

SERVERS = (NatsAddress("a"),)
names = st.text(max_size=40)


@given(names, names)
def test_tokens_are_unique(text: str, other_text: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_=]*", encode_token(text))
    assert (encode_token(text) == encode_token(other_text)) == (text == other_text)


@given(names, names, names, names)
def test_consumer_names_are_unique(a: str, b: str, c: str, d: str) -> None:
    assert (consumer_name(a, b) == consumer_name(c, d)) == ((a, b) == (c, d))


def test_backlog_consumer_is_no_durable() -> None:
    assert BACKLOG_CONSUMER not in (
        consumer_name(BACKLOG_CONSUMER, ""),
        consumer_name("", BACKLOG_CONSUMER),
    )
    assert not consumer_name("p-x-1", "").startswith("p-")


def test_long_names_are_hashed() -> None:
    assert len(encode_token("x" * 500)) == 65
    assert encode_token("x" * 500) != encode_token("x" * 501)


def test_parses_class_of_stream_name() -> None:
    bus_names = JetStreamNames("bus")
    assert (bus_names.stream_name(7), bus_names.class_subject(7)) == ("bus_7", "bus.7")
    assert bus_names.parse_stream_name("bus_7") == 7
    assert [
        bus_names.parse_stream_name(n)
        for n in ("bus_x", "other_7", "bus_", "bus_1_7", "bus_700000")
    ] == [None] * 5
    with pytest.raises(ValueError, match="the prefix"):
        JetStreamNames("a.b")


@given(names)
def test_server_subject_is_one_token(
    stateless_server: str,
) -> None:
    """Encode any server id safely: every client that may create consumers can choose one."""
    assert JetStreamNames("bus").server_subject("0123456789ab") == "bus.door.0123456789ab"
    assert re.fullmatch(
        r"bus\.door\.[A-Za-z0-9_=]*", JetStreamNames("bus").server_subject(stateless_server)
    )


@pytest.mark.parametrize(
    ("subject", "takes"),
    [
        *[(subject, True) for subject in ("bus.7", "bus.*", "bus.>", "*.7", "*.*", ">", "*.>")],
        *[
            (subject, True)
            for subject in ("bus.naming", "bus.door.x", "bus.holder.7-d", "bus.*.x", "bus.door.>")
        ],
        *[(subject, False) for subject in ("bus", "*", "bus.x", "bus.700000", "bus.7.x", "bus2.7")],
    ],
)
def test_detects_overlapping_subjects(subject: str, takes: bool) -> None:
    assert JetStreamNames("bus").overlaps_subject(subject) == takes


def test_encodes_start_positions() -> None:
    assert api.start_config("new") == api.start_config("waiting") == {"deliver_policy": "new"}
    assert api.start_config("earliest") == {"deliver_policy": "all"}
    assert api.start_config("last") == {"deliver_policy": "last"}
    assert api.start_config(Start(sequence=0))["opt_start_seq"] == 1
    at = api.start_config(Start(time=1.5))
    assert at == {
        "deliver_policy": "by_start_time", "opt_start_time": "1970-01-01T00:00:01.500000Z"
    }  # fmt: skip


def test_computes_ack_floor() -> None:
    assert api.ack_floor({"ack_floor": {"stream_seq": 5}, "config": {}}) == 6
    assert api.ack_floor({"config": {"opt_start_seq": 9}}) == 9
    assert api.ack_floor({}) == 1


def test_released_plain_consumer_has_no_server() -> None:
    options = JetStreamOptions(SERVERS)
    made = api.consumer_config(options, "p-x-1", kind="plain", server_id="x", start={})
    info = {"config": made}
    assert (api.kind_of(info), api.server_id_of(info)) == ("plain", "x")
    released = {"config": api.released_config(made)}
    assert (api.kind_of(released), api.server_id_of(released)) == ("plain", "")
    assert api.channels_of(info) == set()
    assert api.kind_of({}) == api.server_id_of({}) == ""


@pytest.mark.parametrize(
    "wrong",
    [{"replicas": 6}, {"storage": "tape"}, {"ack_wait_seconds": 0.5}, {"max_bytes": -1}],
)
def test_refuses_invalid_options(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        JetStreamOptions(SERVERS, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no NATS server"):
        JetStreamOptions(())


@pytest.mark.parametrize(
    "settings",
    [
        Settings(full_policy=FullPolicy.DROP_OLDEST),
        Settings(keep=Retention(messages=5)),
        Settings(classes={"a": ClassSettings(full_policy=FullPolicy.DROP_NEWEST)}),
        Settings(classes={"a": ClassSettings(keep=Retention(seconds=5))}),
        Settings(classes={"a": ClassSettings(last_values=True)}),
    ],
)
def test_refuses_unsupported_settings(settings: Settings) -> None:
    check_settings(Settings())
    with pytest.raises(ValueError, match="JetStream cluster"):
        check_settings(settings)


@given(names, names)
def test_describes_consumers_by_name(durable: str, group: str) -> None:
    description = describe_consumer(consumer_name(durable, group))
    for name in filter(None, (durable, group)):
        assert repr(name) in description or ("with a long name" in description and len(name) > 10)
    assert (
        describe_consumer(BACKLOG_CONSUMER)
        == describe_consumer("p-x-1")
        == "a subscription without a name"
    )
