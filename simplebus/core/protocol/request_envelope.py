"""Encoded envelopes of requests and replies, which end with the header `request-id`.

The envelopes of one bus differ in this header only. So the bytes in front of this header are
encoded and decoded once. `envelope.encode` and `envelope.decode` remain the only definition of the
format: envelopes with another order of headers, or with byte stuffing, are passed to these
functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from simplebus.core.protocol import envelope as envelopes
from simplebus.core.protocol.envelope import Envelope

REQUEST_ID_HEADER = "request-id"

_NAME = envelopes.with_length_prefix(REQUEST_ID_HEADER.encode())
_LENGTH_BYTES = 2
_DELIMITER_START = envelopes.STUFFED[:-1]
# Envelopes that are remembered, and the longest one.
_CACHED_VALUES_MAX = 1024
_CACHED_BYTES_MAX = 1024

T = TypeVar("T")


class RequestEnvelope:
    """Envelope that is encoded except for its last header, `request-id`, and the payload."""

    def __init__(self, envelope: Envelope) -> None:
        """`envelope` is complete except for that header."""
        self._envelope = envelope
        complete = self._with_request_id("")
        headers = envelopes.encode_headers(complete.headers)[_LENGTH_BYTES:]
        encoded = envelopes.unstuff(envelopes.encode(complete, b""))
        self._front = encoded[: -len(headers) - _LENGTH_BYTES]
        """Fields, times, channel and key."""
        self._headers = headers[:-_LENGTH_BYTES]
        """Headers without their common length prefix, up to the name of the last one."""

    def encode(self, request_id: bytes, payload: bytes) -> bytes:
        """Return the content of an Envelope frame. `request_id` is UTF-8 text.

        Raises:
            LocalProtocolError: The headers are too long.
        """
        length = len(self._headers) + _LENGTH_BYTES + len(request_id)
        if length > envelopes.TEXT_BYTES_MAX:
            return envelopes.encode(self._with_request_id(request_id.decode()), payload)
        return b"".join(
            (
                self._front,
                length.to_bytes(_LENGTH_BYTES, "big"),
                self._headers,
                len(request_id).to_bytes(_LENGTH_BYTES, "big"),
                request_id,
                payload,
            )
        ).replace(_DELIMITER_START, envelopes.STUFFED)

    def _with_request_id(self, request_id: str) -> Envelope:
        headers = (*self._envelope.headers, (REQUEST_ID_HEADER, request_id))
        return self._envelope._replace(headers=headers)


class RequestIdReader(Generic[T]):
    """Reads the request ids of received messages, and a value that depends on the rest only.

    The bytes up to the name of the last header determine that value and the length of the id,
    because they contain the length of all headers.
    """

    def __init__(self, create_value: Callable[[Envelope], T]) -> None:
        self._create_value = create_value
        self._cached_values: dict[bytes, tuple[T, bytes, int]] = {}
        """Value, encoded length of the id and length of the id, by the bytes before that."""

    def read(self, content: bytes) -> tuple[T, bytes]:
        """Return the value and the request id of a message; the id is empty if the message has no
        id.

        Args:
            content: Content of its Envelope frame.

        Raises:
            RemoteProtocolError: The envelope is malformed.
        """
        begin = content.find(_NAME) + len(_NAME)
        cached_value = self._cached_values.get(content[:begin])
        if cached_value is not None:
            value, encoded_length, length = cached_value
            id_begin = begin + _LENGTH_BYTES
            request_id = content[id_begin : id_begin + length]
            if (
                content[begin:id_begin] == encoded_length
                and len(request_id) == length
                and request_id.isalnum()  # Neither stuffed nor malformed.
            ):
                return value, request_id
        return self._decode(content, begin)

    def _decode(self, content: bytes, begin: int) -> tuple[T, bytes]:
        envelope, payload = envelopes.decode(content)
        request_id = dict(envelope.headers).get(REQUEST_ID_HEADER, "").encode()
        value = self._create_value(envelope)
        end = len(envelopes.unstuff(content)) - len(payload)
        if (
            begin <= _CACHED_BYTES_MAX
            and envelope.headers[-1:] == ((REQUEST_ID_HEADER, request_id.decode()),)
            and begin == end - len(request_id) - _LENGTH_BYTES
            and _DELIMITER_START not in content[:end]
            and request_id
        ):
            if len(self._cached_values) >= _CACHED_VALUES_MAX:
                self._cached_values.clear()
            self._cached_values[content[:begin]] = (
                value,
                len(request_id).to_bytes(_LENGTH_BYTES, "big"),
                len(request_id),
            )
        return value, request_id
