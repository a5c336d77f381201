"""Requests and replies over the bus: the part that all drivers share. No I/O.

    request   headers  reply-to     channel on which the requesting bus listens for replies
                       reply-class  id of the class of replies
                       request-id   unique among the requests of that bus
              expires with the timeout of the request
    reply     message of that class on that channel; header request-id; expires like its request

A bus has one subscription for all replies, from its first request on. A late or second reply is
acknowledged and dropped. A responder may have more permissions than the requester, so a reply is
only sent to the class and channels of replies.
"""

from __future__ import annotations

import inspect
import math
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from simplebus.client.codecs import DecodeError
from simplebus.client.core.messages import REPLY_TO_HEADER, Message
from simplebus.client.message_builder import PublishOptions, header_pairs
from simplebus.core.errors import LocalProtocolError
from simplebus.core.protocol.envelope import Envelope, with_length_prefix
from simplebus.core.protocol.request_envelope import (
    REQUEST_ID_HEADER,
    RequestEnvelope,
    RequestIdReader,
)
from simplebus.core.users.permissions import REPLIES_CLASS

Handler = Callable[[Any], Awaitable[object] | object]

# The server sends waiting messages after its reply to a request and before its next reply. So no
# message between two replies means that none was waiting.
EMPTY_REPLIES_UNTIL_IDLE = 2


_UNRUN_TYPES = (CoroutineType, GeneratorType, AsyncGeneratorType)


def check_handler(handler: Handler, *, is_async_allowed: bool) -> None:
    """Raise TypeError if `handler` is not a handler function."""
    if not callable(handler):
        raise TypeError(f"a handler must be a function, got {handler!r}")
    if inspect.isasyncgenfunction(handler) or inspect.isgeneratorfunction(handler):
        raise TypeError(
            f"the handler {handler!r} is a generator function, which does not run when called; "
            "expected a function without yield"
        )
    if inspect.iscoroutinefunction(handler) and not is_async_allowed:
        raise TypeError(
            f"the handler {handler!r} is an async function, which needs an event loop; expected a "
            "plain function, or a bus from simplebus.connect"
        )


def check_handler_result(result: object) -> None:
    """Raise TypeError if a handler returned a coroutine or generator that nothing runs."""
    if not isinstance(result, _UNRUN_TYPES):
        return
    if isinstance(result, CoroutineType):
        result.close()  # Prevents the warning that it was never awaited.
    raise TypeError(
        f"the handler returned {result!r}, which is never run; expected a handler that does its "
        "work before it returns"
    )


REPLY_CLASS_NAME = REPLIES_CLASS
REPLY_CLASS_HEADER = "reply-class"
_REPLY_CHANNEL_PREFIX = f"{REPLIES_CLASS}."
"""Prefix of the channels of replies."""
_ENCODED_REPLY_TO = with_length_prefix(REPLY_TO_HEADER.encode())
"""Bytes that the envelope of every request contains."""


@dataclass(slots=True, eq=False)
class PendingReply:
    """A request that waits for its reply."""

    request_id: bytes
    on_reply: Callable[[], None]
    reply: Message[bytes] | None = None


class PendingReplies:
    """Requests of one bus that wait for their replies."""

    def __init__(self, class_id: int, prefix: str) -> None:
        self.class_id = class_id
        """Class id of replies."""
        self.channel = (prefix or _REPLY_CHANNEL_PREFIX) + secrets.token_hex(8)
        """Channel of the replies to this bus."""
        self._reply_headers = (
            (REPLY_TO_HEADER, self.channel),
            (REPLY_CLASS_HEADER, str(class_id)),
        )
        self._pending_by_id: dict[bytes, PendingReply] = {}
        self._count = 0
        self._request_ids = RequestIdReader(lambda envelope: None)
        self._plain_timeout: float | None = math.nan
        """Timeout of `_plain_envelope`."""
        self._plain_envelope: RequestEnvelope | None = None
        """Envelope of requests without options, for their last timeout."""

    def add_request(self, on_reply: Callable[[], None]) -> PendingReply:
        """Register a request before it is published. Its reply calls `on_reply`."""
        self._count += 1
        request_id = b"%d" % self._count
        pending = self._pending_by_id[request_id] = PendingReply(request_id, on_reply)
        return pending

    def get_envelope(
        self,
        options: PublishOptions,
        timeout: float | None,
        build_envelope: Callable[..., Envelope | None],
    ) -> RequestEnvelope:
        """Return the envelope of a request with these options, which expires with its timeout.

        Raises:
            ValueError, TypeError: An option is invalid.
        """
        if not options and timeout == self._plain_timeout and self._plain_envelope is not None:
            return self._plain_envelope
        headers = (*header_pairs(options.get("headers")), *self._reply_headers)
        complete: PublishOptions = {"expires": timeout, **options, "headers": headers}
        envelope = build_envelope(**complete)
        assert envelope is not None, "an envelope with headers"
        request_envelope = RequestEnvelope(envelope)
        if not options:
            self._plain_timeout, self._plain_envelope = timeout, request_envelope
        return request_envelope

    def accept_reply(self, message: Message[bytes]) -> None:
        """Pass a received reply to its request."""
        content = message.envelope_content
        request_id = self._request_ids.read(content)[1] if content else b""
        pending = self._pending_by_id.pop(request_id, None)
        if pending is not None:
            pending.reply = message
            pending.on_reply()

    def discard(self, pending: PendingReply) -> None:
        """Stop waiting for a reply."""
        self._pending_by_id.pop(pending.request_id, None)


@dataclass(slots=True, frozen=True)
class ReplyAddress:
    """Destination of the replies to one bus."""

    class_id: int
    channel: str
    envelope: RequestEnvelope

    def check_is_for_replies(self, replies_class: int) -> None:
        """Raise LocalProtocolError unless class and channel are reserved for replies."""
        if self.class_id != replies_class or not self.channel.startswith(_REPLY_CHANNEL_PREFIX):
            raise LocalProtocolError(
                f"a reply was requested on channel {self.channel[:80]!r} of class "
                f"{self.class_id}; expected class {REPLY_CLASS_NAME!r} ({replies_class}) and a "
                f"channel that begins with {_REPLY_CHANNEL_PREFIX!r}"
            )


def _parse_reply_address(envelope: Envelope) -> ReplyAddress | None:
    """Return the destination of replies to a message; None if it does not request a reply."""
    headers = dict(envelope.headers)
    try:
        channel, class_id, _ = (
            headers[name] for name in (REPLY_TO_HEADER, REPLY_CLASS_HEADER, REQUEST_ID_HEADER)
        )
        reply_envelope = RequestEnvelope(Envelope(channel=channel, expires_ms=envelope.expires_ms))
        return ReplyAddress(int(class_id), channel, reply_envelope)
    except (KeyError, ValueError):
        return None


class ReceivedRequests:
    """Reads the reply addresses of received requests."""

    def __init__(self) -> None:
        self._request_ids = RequestIdReader(_parse_reply_address)

    def find_reply_address(self, message: Message[Any]) -> tuple[ReplyAddress, bytes] | None:
        """Return the destination of a reply and the request id; None if no reply is requested.

        Raises:
            LocalProtocolError: If the message requests a reply without a valid reply address.
        """
        content = message.envelope_content
        if _ENCODED_REPLY_TO not in content:
            return None
        address, request_id = self._request_ids.read(content)
        if address is not None:
            return address, request_id
        if message.is_request:
            raise _no_request_error(message)
        return None

    def get_reply_address(self, message: Message[Any]) -> tuple[ReplyAddress, bytes]:
        """Return the destination of a reply to `message`, and the request id.

        Raises:
            LocalProtocolError: If the message does not request a reply.
            TypeError: If it is not a Message.
        """
        if not isinstance(message, Message):
            raise TypeError(f"a reply is to a message, got {message!r}")
        found = self.find_reply_address(message)
        if found is None:
            raise _no_request_error(message)
        return found


def _no_request_error(message: Message[Any]) -> LocalProtocolError:
    return LocalProtocolError(f"{message!r} does not request a reply")


def decode_reply(reply: Message[bytes], decode: Callable[[bytes], Any] | None) -> Any:
    """Return the reply, or its value if the request has a decoder. Raises DecodeError."""
    if decode is None:
        return reply
    try:
        return decode(reply.payload)
    except DecodeError as error:
        raise error.of_reply(reply) from error.__cause__


def no_reply_error(message: object, class_id: object, seconds: float) -> TimeoutError:
    """Return the error for a request without a reply in time."""
    target = f"a {type(message).__name__}" if class_id is None else f"class {class_id!r}"
    return TimeoutError(f"received no reply to the request of {target} within {seconds:g} s")
