"""Tests of addresses and of the errors of a connection."""

from __future__ import annotations

import errno

import pytest

from simplebus.client import addresses
from simplebus.client.addresses import Address
from simplebus.config.parse import URL
from simplebus.core.errors import Reason, RemoteProtocolError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("simplebus://127.0.0.1:8888", "127.0.0.1", 8888),
        ("simplebus://bus.example", "bus.example", 8888),
        ("simplebus://bus.example/", "bus.example", 8888),
        ("bus.example", "bus.example", 8888),
        ("bus.example:1", "bus.example", 1),
        ("[::1]:65535", "::1", 65535),
        ("simplebus://[::1]", "::1", 8888),
    ],
)
def test_parses_address(text: str, host: str, port: int) -> None:
    assert Address.parse(text) == Address(host, port)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "simplebus://",
        ":8888",
        "::1",
        "[::1",
        "host:0",
        "host:65536",
        "host:eight",
        "http://host:8888",
        "nats://host",
        "simplebus://host/class",
        "simplebus://host?class=1",
    ],
)
def test_rejects_invalid_address_with_expected_format(text: str) -> None:
    with pytest.raises(ValueError, match="is not a server address") as caught:
        Address.parse(text)
    assert repr(text) in str(caught.value)
    assert "expected simplebus://host:port" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["nts://u:geheim@h", "simplebus://u:geheim@h:1", "u:geheim@h", "a://u:ge/heim@h"]
)
def test_error_hides_credentials_in_address(text: str) -> None:
    with pytest.raises(ValueError, match="…@h") as caught:
        Address.parse(text)
    assert "heim" not in str(caught.value)


@pytest.mark.parametrize("text", ["simplebus://127.0.0.1:8888", "simplebus://[::1]:1"])
def test_address_str_can_be_parsed(text: str) -> None:
    assert str(Address.parse(text)) == text


def test_resolves_numeric_host_without_lookup() -> None:
    (info,) = addresses.resolve_numeric(Address("127.0.0.1", 7))
    assert info[4] == ("127.0.0.1", 7)
    assert addresses.resolve_numeric(Address("localhost", 7)) == []


def test_connection_lost_error_names_address_and_reason() -> None:
    address = Address("127.0.0.1", 7)
    reset = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
    broken = RemoteProtocolError(Reason.FRAME_TOO_LONG, "a frame is 9 bytes long")
    for error, expected in (
        (None, "the server at simplebus://127.0.0.1:7 closed the connection; see its log"),
        (reset, "closed the connection (Connection reset by peer); see its log"),
        (OSError(errno.ETIMEDOUT, "timed out"), "127.0.0.1:7 is lost: timed out"),
        (broken, "127.0.0.1:7 has ended: frame_too_long: a frame is 9 bytes long"),
    ):
        found = addresses.connection_lost_error(address, error)
        assert expected in str(found)
        assert found.__cause__ is error
        assert addresses.connection_lost_error(address, found) is found


def test_reconnect_failed_error_names_last_attempt() -> None:
    address = Address("127.0.0.1", 7)
    loss, problem = (
        addresses.connection_lost_error(address, None),
        addresses.connect_timeout_error(address, 4.999, is_connected=False),
    )
    assert "see its log for the reason; reconnecting failed within 60 s: cannot connect to" in str(
        addresses.reconnect_failed_error(loss, problem, 60)
    )
    assert "nothing answered within 5 s" in str(problem)
    assert str(
        addresses.unconfirmed_error(1, addresses.connection_closed_error(address))
    ).startswith("1 message was not confirmed")
    assert str(addresses.unconfirmed_error(2000, loss)).startswith(
        "2,000 messages were not confirmed"
    )


def test_address_is_optional() -> None:
    assert addresses.DEFAULT_URL == URL  # The default of commands.
    assert addresses.parse_addresses(None, {}) == [Address("127.0.0.1", 8888)]
    assert addresses.parse_addresses(None, {"SIMPLEBUS_URL": ""}) == [Address("127.0.0.1", 8888)]
    environment = {"SIMPLEBUS_URL": "simplebuss://b"}
    assert addresses.parse_addresses(None, environment) == [Address("b", 8888, is_secure=True)]
    assert addresses.parse_addresses("c:2", environment) == [Address("c", 2)]
    with pytest.raises(ValueError, match=r"^SIMPLEBUS_URL: 'http://x' is not a server address"):
        addresses.parse_addresses(None, {"SIMPLEBUS_URL": "http://x"})


def test_parses_several_addresses() -> None:
    assert addresses.parse_addresses("a:1") == [Address("a", 1)]
    assert addresses.parse_addresses(["a:1", "b"]) == [Address("a", 1), Address("b", 8888)]
    with pytest.raises(ValueError, match="got no server address"):
        addresses.parse_addresses([])


def test_equal_notices_are_logged_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    notices = addresses.NoticeLog()
    for _ in range(100):
        notices.add("slow down")
    notices.add("draining")
    assert caplog.messages == ["the server reports: slow down"] * 8 + [
        "the server reports: draining"
    ]
    assert [vars(record)["event"] for record in caplog.records] == ["notice.received"] * 9
    assert vars(caplog.records[-1])["notice"] == "draining"
