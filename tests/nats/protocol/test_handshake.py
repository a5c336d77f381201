"""Parsing of CONNECT and encoding of INFO."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.errors import Reason
from simplebus.nats.errors import NatsError
from simplebus.nats.protocol.handshake import (
    DEFAULT_OPTIONS,
    ConnectOptions,
    Info,
    make_info,
    parse_connect,
)
from simplebus.nats.settings import NatsSettings


def test_missing_connect_fields_keep_their_values() -> None:
    options = parse_connect(b'{"verbose":false,"name":"n","protocol":1,"pass":"p"}')
    assert options == ConnectOptions(verbose=False, name="n", protocol=1, password="p")
    assert parse_connect(b'{"VERBOSE":true,"name":null}', options) == ConnectOptions(
        verbose=True, name="n", protocol=1, password="p"
    )
    assert parse_connect('{"verbo\u017fe":true}'.encode(), options).verbose
    assert parse_connect(b"{}") is DEFAULT_OPTIONS
    assert parse_connect(b"null", options) is options


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"[[]]",
        b'[["verbose",true]]',
        b"5",
        b'"x"',
        b"{",
        b"{}{}",
        b'{"verbose":1}',
        b'{"verbose":"true"}',
        b'{"protocol":true}',
        b'{"protocol":1.0}',
        b'{"protocol":9223372036854775808}',
        b'{"name":5}',
        b'{"name":{}}',
        b'{"a":NaN}',
        b'{"a":-Infinity}',
        b'{"name":"\x01"}',
        b"\xef\xbb\xbf{}",
    ],
)
def test_invalid_connect_json_is_refused_without_error_line(text: bytes) -> None:
    with pytest.raises(NatsError) as raised:
        parse_connect(text)
    assert raised.value.reason is Reason.BAD_CONNECT
    assert raised.value.line == b""


@pytest.mark.parametrize("bomb", [b"[", b'{"a":', b'[{"a":'])
def test_deeply_nested_connect_json_is_refused(bomb: bytes) -> None:
    with pytest.raises(NatsError):
        parse_connect(b'{"a":' + bomb * 100_000)
    with pytest.raises(NatsError):
        parse_connect(b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}")


@given(st.binary(max_size=40))
def test_arbitrary_connect_bytes_are_parsed_or_refused(text: bytes) -> None:
    with contextlib.suppress(NatsError):
        assert isinstance(parse_connect(text), ConnectOptions)


@given(st.dictionaries(st.sampled_from(["name", "x", "lang"]), st.text(max_size=5)))
def test_connect_text_is_kept_unchanged(fields: dict[str, str]) -> None:
    found = parse_connect(json.dumps(fields).encode())
    assert (found.name, found.lang) == (fields.get("name", ""), fields.get("lang", ""))


def test_info_names_other_servers() -> None:
    settings = NatsSettings(connect_urls=("a:1", "b:2"))
    info = make_info(settings, server_id="", host="", port=1, client_id=1, client_ip="127.0.0.1")
    assert json.loads(info.line().removeprefix(b"INFO "))["connect_urls"] == ["a:1", "b:2"]


def test_info_omits_false_fields() -> None:
    info = Info("id", "name", "2.15.1", 1, "none", "h", 4222, True, 100, 7, "::1")
    content = json.loads(info.line().removeprefix(b"INFO "))
    assert content == {
        "server_id": "id",
        "server_name": "name",
        "version": "2.15.1",
        "proto": 1,
        "go": "none",
        "host": "h",
        "port": 4222,
        "headers": True,
        "max_payload": 100,
        "client_id": 7,
        "client_ip": "::1",
    }
