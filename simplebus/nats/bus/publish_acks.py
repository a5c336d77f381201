"""PubAcks: replies of the bus to messages on bound subjects, in the form of JetStream.

    {"stream": "orders", "seq": 17}                     the message is stored
    {"stream": "orders", "seq": 17, "duplicate": true}  an earlier message has its id
    {"error": {"code": 503, "err_code": 10077, "description": "class orders is full"},
     "stream": "orders", "seq": 0}                      the message is not stored

Error codes are those of nats-server where it has the same error, because clients match them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from simplebus.core.broker.broker import PublishResult
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.store.message_ids import MESSAGE_ID_HEADER
from simplebus.nats.limits import WAITING_PUB_ACKS_MAX

EXPECTED_STREAM_HEADER = "Nats-Expected-Stream"

MESSAGE_ID_LINE = f"\r\n{MESSAGE_ID_HEADER}:".encode()
"""Start of the line with the message id in a header block."""
_HEADER_LINE_START = b"\r\nNats-"
_CONCERNING_LINE = re.compile(rb"\r\n(nats-[^:\r\n]*):?([^\r\n]*)", re.IGNORECASE)
# Headers that request features of JetStream that classes do not have.
_UNSUPPORTED_HEADERS = (
    b"nats-expected-",
    b"nats-batch-",
    b"nats-incr",
    b"nats-rollup",
    b"nats-schedule",
    b"nats-ttl",
)


class PublishError(Exception):
    """A message on a bound subject that is not stored, with the error of its PubAck."""

    def __init__(self, reason: Reason, sentence: str, *, code: int, err_code: int) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.sentence = sentence
        self.code = code
        """HTTP-like status."""
        self.err_code = err_code
        """Code of nats-server."""


@dataclass(frozen=True, slots=True)
class PublishHeaders:
    """Headers of a message that concern its storing."""

    message_id: bytes = b""
    """Id for deduplication; empty for none."""
    expected_stream: str = ""
    """Name of the class that must store the message; empty for any."""
    unsupported: str = ""
    """First header that requests a feature that classes do not have; empty without such a
    header.
    """


_NO_HEADERS = PublishHeaders()


def parse_publish_headers(block: bytes) -> PublishHeaders:
    """Return the headers of a block that concern storing. Names are matched as in nats-server."""
    if _HEADER_LINE_START.lower() not in block.lower():
        return _NO_HEADERS
    message_id, expected_stream, unsupported = b"", "", ""
    for name, value in _CONCERNING_LINE.findall(block):
        if name == MESSAGE_ID_HEADER.encode():
            message_id = message_id or value.strip()
        elif name == EXPECTED_STREAM_HEADER.encode():
            expected_stream = expected_stream or value.strip().decode(errors="replace")
        elif name.lower().startswith(_UNSUPPORTED_HEADERS):
            unsupported = unsupported or name.decode(errors="replace")
    return PublishHeaders(message_id, expected_stream, unsupported)


def check_publish_headers(headers: PublishHeaders, cls: MessageClass) -> None:
    """Raise PublishError if the headers name another class or request a missing feature."""
    name = class_label(cls)
    if headers.expected_stream and headers.expected_stream != name:
        raise PublishError(
            Reason.BAD_REQUEST,
            f"expected stream does not match: got {headers.expected_stream!r}, the subject is "
            f"bound to class {name!r}",
            code=400,
            err_code=10060,
        )
    if headers.unsupported:
        raise PublishError(
            Reason.BAD_REQUEST,
            f"header {headers.unsupported} is not supported: remove it, or publish to JetStream",
            code=400,
            err_code=10003,
        )


def too_many_waiting() -> PublishError:
    """Return the error for a client that does not wait for its PubAcks."""
    return PublishError(
        Reason.PENDING_LIMIT,
        f"{WAITING_PUB_ACKS_MAX} messages of the client wait for their PubAcks: wait for some",
        code=429,
        err_code=10167,
    )


def make_publish_error(error: RemoteProtocolError) -> PublishError:
    """Return the error of the PubAck for a message that cannot be stored."""
    code, err_code = _ERROR_CODES.get(error.reason, (400, 10003))
    return PublishError(error.reason, error.sentence, code=code, err_code=err_code)


_ERROR_CODES = {
    Reason.UNAUTHORIZED: (403, 10003),
    Reason.FRAME_TOO_LONG: (400, 10054),
    Reason.DROP_NEWEST: (503, 10077),
    Reason.DISK_FULL: (503, 10077),
    Reason.DISK_FAILED: (503, 10077),
}
"""Codes by reason: bad request otherwise."""


def class_label(cls: MessageClass) -> str:
    """Return the name of a class as a stream, as in ack subjects."""
    return cls.name or str(cls.class_id)


def encode_pub_ack(cls: MessageClass, stored: PublishResult) -> bytes:
    """Return the PubAck of a stored message or a duplicate."""
    ack: dict[str, object] = {"stream": class_label(cls), "seq": stored.sequence}
    if stored.is_duplicate:
        ack["duplicate"] = True
    return msgspec.json.encode(ack)


def encode_publish_error(cls: MessageClass, error: PublishError) -> bytes:
    """Return the PubAck of a message that is not stored."""
    texts = {"code": error.code, "err_code": error.err_code, "description": error.sentence}
    return msgspec.json.encode({"error": texts, "stream": class_label(cls), "seq": 0})
