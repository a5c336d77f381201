"""Tests of request envelopes, against `envelope.encode` and `envelope.decode`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.errors import LocalProtocolError, RemoteProtocolError
from simplebus.core.protocol import envelope as format_
from simplebus.core.protocol.envelope import Envelope
from simplebus.core.protocol.request_envelope import (
    REQUEST_ID_HEADER,
    RequestEnvelope,
    RequestIdReader,
)

texts = st.sampled_from(["", "1", "42", "request-id", "\0\nrequest-id", "ü", "<\r\n", "<\r\n>"])
header_lists = st.lists(
    st.tuples(st.sampled_from(["mine", "reply-to", REQUEST_ID_HEADER]), texts), max_size=3
).map(tuple)
envelopes = st.builds(
    Envelope,
    channel=st.sampled_from(["", "a.b", "ü.x"]),
    key=st.sampled_from([b"", b"k", b"<\r\n", b"\0\nrequest-id"]),
    headers=header_lists,
    published=st.sampled_from([None, 7]),
    expires_ms=st.sampled_from([None, 0, 5000, 0x3C0D0A]),
    not_before_ms=st.sampled_from([None, 1]),
)
payloads = st.sampled_from([b"", b"payload", b"<\r\n>", b"\0\nrequest-id\0\x011"])
ids = st.one_of(st.integers(0, 10**6).map(str), texts)


@given(envelopes, st.lists(st.tuples(ids, payloads), min_size=1, max_size=3))
def test_encodes_like_the_whole_envelope(
    envelope: Envelope, messages: list[tuple[str, bytes]]
) -> None:
    request_envelope = RequestEnvelope(envelope)
    for request_id, payload in messages:
        headers = (*envelope.headers, (REQUEST_ID_HEADER, request_id))
        expected = format_.encode(envelope._replace(headers=headers), payload)
        assert request_envelope.encode(request_id.encode(), payload) == expected


def test_headers_may_have_their_maximum_length() -> None:
    request_envelope = RequestEnvelope(Envelope(headers=(("a", "x" * 65_000),)))
    spare = format_.TEXT_BYTES_MAX - 65_000 - 1 - 2 * 4 - len(REQUEST_ID_HEADER)
    assert (
        format_.decode(request_envelope.encode(b"7" * spare, b""))[0].headers[-1][1] == "7" * spare
    )
    with pytest.raises(LocalProtocolError, match="headers have at most"):
        request_envelope.encode(b"7" * (spare + 1), b"")


def without_request_id(envelope: Envelope) -> Envelope:
    headers = tuple(pair for pair in envelope.headers if pair[0] != REQUEST_ID_HEADER)
    return envelope._replace(headers=headers)


def read_by_decoding(content: bytes) -> tuple[Envelope, bytes] | None:
    try:
        envelope, _ = format_.decode(content)
    except RemoteProtocolError:
        return None
    return without_request_id(envelope), dict(envelope.headers).get(REQUEST_ID_HEADER, "").encode()


@st.composite
def content_lists(draw: st.DrawFn) -> list[bytes]:
    """Contents of a few envelopes with many ids; some are cut or have a changed byte."""
    templates = draw(st.lists(envelopes, min_size=1, max_size=2))
    contents = []
    for _ in range(draw(st.integers(1, 12))):
        envelope = draw(st.sampled_from(templates))
        content = RequestEnvelope(envelope).encode(draw(ids).encode(), draw(payloads))
        if draw(st.integers(0, 3)) == 0:
            content = format_.encode(envelope, draw(payloads))
        match draw(st.sampled_from(["whole", "whole", "whole", "cut", "changed"])):
            case "cut":
                content = content[: draw(st.integers(0, len(content)))]
            case "changed":
                index = draw(st.integers(0, len(content) - 1))
                content = (
                    content[:index] + draw(st.binary(min_size=1, max_size=1)) + content[index + 1 :]
                )
        contents.append(content)
    return contents


@given(content_lists())
def test_reads_what_decoding_reads(contents: list[bytes]) -> None:
    reader = RequestIdReader(without_request_id)
    for content in [*contents, *contents]:
        expected = read_by_decoding(content)
        if expected is None:
            with pytest.raises(RemoteProtocolError):
                reader.read(content)
        else:
            assert reader.read(content) == expected


def test_decodes_the_envelopes_of_a_requester_once() -> None:
    decoded: list[Envelope] = []
    reader = RequestIdReader(decoded.append)
    request_envelope = RequestEnvelope(Envelope(headers=(("reply-to", "a"),), expires_ms=5000))
    for number in range(100, 999):
        content = request_envelope.encode(b"%d" % number, b"<\r\n>")
        assert reader.read(content) == (None, b"%d" % number)
    assert len(decoded) == 1
