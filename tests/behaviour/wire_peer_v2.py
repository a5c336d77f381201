"""Version 2 peers that talk to a broker in bytes, without a socket.

Frames are encoded and parsed by oracles.py and msgspec only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from tests.behaviour.wire_peer import BrokerHarness, WirePeer
from tests.support.oracles import build_frame, parse_frame

MESSAGE, SUBSCRIBE, ACK, CONNECT, ENVELOPE = b"12345"
CONFIRM, DELIVER, NACK, WORKING, UNSUBSCRIBE, FETCH, ERROR = b"6789UFE"
INQUIRE, PURGE = b"IP"
JSON = {SUBSCRIBE, CONNECT, FETCH, ERROR, INQUIRE, PURGE}
KINDS = {
    CONNECT: "connect",
    SUBSCRIBE: "subscribe",
    CONFIRM: "confirm",
    UNSUBSCRIBE: "unsubscribe",
    FETCH: "fetch",
    INQUIRE: "inquire",
    PURGE: "purge",
    ERROR: "error",
    ord("0"): "heartbeat",
}


class Version2Message(NamedTuple):
    """Message as a version 2 subscriber receives it."""

    number: int
    """Number of the subscription; 0 for a fetched message."""
    attempt: int
    message_id: int
    content: bytes
    kind: int = MESSAGE
    class_id: int = 1


class Version2Reply(NamedTuple):
    """Frame that is not a message."""

    kind: str
    class_id: int
    message_id: int
    last_field: int
    content: Any


def json_request(
    frame_type: int, key: int = 0, request: int = 0, number: int = 0, **fields: object
) -> bytes:
    """Return a request frame with a JSON object."""
    content = msgspec.json.encode(fields)
    return build_frame(
        frame_type, class_id=key, message_id=request, timer_index=number, content=content
    )


def connect_request(*classes: object, **more: object) -> bytes:
    return json_request(CONNECT, request=1, version=2, classes=list(classes), **more)


def subscribe(class_id: int, number: int, request: int = 7, **options: object) -> bytes:
    return json_request(SUBSCRIBE, class_id, request, number, **options)


def publish(class_id: int, first: int, *payloads: bytes) -> bytes:
    return b"".join(
        build_frame(MESSAGE, class_id=class_id, message_id=first + n, content=p)
        for n, p in enumerate(payloads)
    )


def publish_envelopes(class_id: int, first: int, *contents: bytes) -> bytes:
    return b"".join(
        build_frame(ENVELOPE, class_id=class_id, message_id=first + n, content=c)
        for n, c in enumerate(contents)
    )


def channel_envelope(channel: str, payload: bytes) -> bytes:
    """Return the content of an envelope with only a channel."""
    name = channel.encode()
    return b"\x08" + len(name).to_bytes(2, "big") + name + payload


def timed_envelope(
    payload: bytes, *, expires_ms: int | None = None, not_before_ms: int | None = None
) -> bytes:
    """Return the content of an envelope with times."""
    fields = (2 if expires_ms is not None else 0) | (4 if not_before_ms is not None else 0)
    numbers = [n.to_bytes(8, "big") for n in (expires_ms, not_before_ms) if n is not None]
    return bytes([fields]) + b"".join(numbers) + payload


def ack(number: int, first: int, last: int) -> bytes:
    return build_frame(ACK, class_id=number, content=b"%d-%d" % (first, last))


def nack(
    number: int,
    first: int,
    last: int,
    delay_ms: int | str | None = None,
    error: bytes | None = None,
    *,
    attempt: int = 0,
) -> bytes:
    """Return a Nack frame. `delay_ms` may be "terminate"; the error is not byte-stuffed."""
    delay = b"" if delay_ms is None else b" %s" % str(delay_ms).encode()
    reason = b"" if error is None else b"\n" + error
    content = b"%d-%d" % (first, last) + delay + reason
    return build_frame(NACK, class_id=number, message_id=attempt, content=content)


def working(number: int, first: int, last: int, *, attempt: int = 0) -> bytes:
    content = b"%d-%d" % (first, last)
    return build_frame(WORKING, class_id=number, message_id=attempt, content=content)


def unsubscribe(number: int, request: int = 9, *, forget: bool = False) -> bytes:
    return json_request(UNSUBSCRIBE, number, request, forget=forget)


class Version2Peer(WirePeer):
    """Connection of a version 2 client."""

    last_deliver: tuple[int, int, int] | None = None

    def receive_all(self) -> tuple[list[Version2Message], list[Version2Reply]]:
        """Return all waiting messages, and all other frames."""
        messages: list[Version2Message] = []
        replies: list[Version2Reply] = []
        for frame in self.receive_frames():
            kind, class_id, message_id, last_field, content = parse_frame(frame)
            if kind == DELIVER:
                self.last_deliver = (class_id, last_field, message_id)
            elif kind in (MESSAGE, ENVELOPE):
                assert self.last_deliver is not None, "a message that was announced by nothing"
                assert self.last_deliver[0] == class_id
                messages.append(
                    Version2Message(
                        self.last_deliver[1],
                        self.last_deliver[2],
                        message_id,
                        content,
                        kind,
                        class_id,
                    )
                )
            else:
                meaning = msgspec.json.decode(content) if kind in JSON else content
                replies.append(
                    Version2Reply(KINDS[kind], class_id, message_id, last_field, meaning)
                )
        assert self.partial == b"", "the last frame is not whole"
        return messages, replies

    def receive_deliveries(self) -> list[Version2Message]:
        return self.receive_all()[0]

    def receive_message_ids(self) -> list[int]:
        return [message.message_id for message in self.receive_deliveries()]

    def receive_replies(self) -> list[Version2Reply]:
        return self.receive_all()[1]

    def receive_error_codes(self) -> list[str]:
        return [reply.content["code"] for reply in self.receive_replies() if reply.kind == "error"]


def connect_version2(
    bus: BrokerHarness, *requests: bytes, classes: Sequence[object] = (1,), **more: object
) -> Version2Peer:
    """Connect a version 2 peer, check the reply, and send these bytes."""
    peer = Version2Peer(bus, bus.broker.open_session())
    peer.send(connect_request(*classes, **more))
    (answer,) = peer.receive_replies()
    assert answer.kind == "connect", answer
    peer.send(*requests)
    return peer
