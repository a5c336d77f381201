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
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from simplebus.client.codecs import DecodeError
from simplebus.client.core.messages import REPLY_TO_HEADER, Message
from simplebus.client.message_builder import PublishOptions, header_pairs
from simplebus.core.errors import LocalProtocolError
from simplebus.core.protocol.envelope_batch import Envelope
from simplebus.core.users.permissions import REPLIES_CLASS

Handler = Callable[[Any], Awaitable[object] | object]

# The server sends waiting messages after its reply to a request and before its next reply. So no
# message between two replies means that none was waiting.
EMPTY_REPLIES_UNTIL_IDLE = 2


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
    if result is None:
        return
    if inspect.iscoroutine(result):
        result.close()  # Prevents the warning that it was never awaited.
    elif not (inspect.isgenerator(result) or inspect.isasyncgen(result)):
        return
    raise TypeError(
        f"the handler returned {result!r}, which is never run; expected a handler that does its "
        "work before it returns"
    )


REPLY_CLASS_NAME = REPLIES_CLASS
REPLY_CLASS_HEADER, REQUEST_ID_HEADER = "reply-class", "request-id"
_REPLY_CHANNEL_PREFIX = f"{REPLIES_CLASS}."
"""Prefix of the channels of replies."""


@dataclass(slots=True, eq=False)
class PendingReply:
    """A request that waits for its reply."""

    request_id: str
    options: PublishOptions
    """Options for publishing the request."""
    on_reply: Callable[[], None]
    reply: Message[bytes] | None = None


class PendingReplies:
    """Requests of one bus that wait for their replies."""

    def __init__(self, class_id: int) -> None:
        self.class_id = class_id
        """Class id of replies."""
        self.channel = _REPLY_CHANNEL_PREFIX + secrets.token_hex(8)
        """Channel of the replies to this bus."""
        self._pending_by_id: dict[str, PendingReply] = {}
        self._count = 0

    def add_request(
        self, options: PublishOptions, *, timeout: float, on_reply: Callable[[], None]
    ) -> PendingReply:
        """Register a request before it is published. Its reply calls `on_reply`."""
        self._count += 1
        request_id = str(self._count)
        reply_headers = {
            REPLY_TO_HEADER: self.channel,
            REPLY_CLASS_HEADER: str(self.class_id),
            REQUEST_ID_HEADER: request_id,
        }
        headers = (*header_pairs(options.get("headers")), *reply_headers.items())
        publish_options: PublishOptions = {"expires": timeout, **options, "headers": headers}
        pending = self._pending_by_id[request_id] = PendingReply(
            request_id, publish_options, on_reply
        )
        return pending

    def accept_reply(self, message: Message[bytes]) -> None:
        """Pass a received reply to its request."""
        pending = self._pending_by_id.pop(dict(message.headers).get(REQUEST_ID_HEADER, ""), None)
        if pending is not None:
            pending.reply = message
            pending.on_reply()

    def discard(self, pending: PendingReply) -> None:
        """Stop waiting for a reply."""
        self._pending_by_id.pop(pending.request_id, None)


def build_reply_envelope(message: Message[Any]) -> tuple[int, Envelope]:
    """Return the class id and the envelope of a reply to `message`.

    Raises:
        LocalProtocolError: If the message does not request a reply.
        TypeError: If it is not a Message.
    """
    if not isinstance(message, Message):
        raise TypeError(f"a reply is to a message, got {message!r}")
    headers = dict(message.headers)
    try:
        channel, class_id, request_id = (
            headers[name] for name in (REPLY_TO_HEADER, REPLY_CLASS_HEADER, REQUEST_ID_HEADER)
        )
        envelope = Envelope(
            channel=channel,
            headers=((REQUEST_ID_HEADER, request_id),),
            expires_ms=message.expires_ms,
        )
        return int(class_id), envelope
    except (KeyError, ValueError):
        raise LocalProtocolError(f"{message!r} does not request a reply") from None


def check_reply_destination(class_id: int, envelope: Envelope, replies_class: int) -> None:
    """Raise LocalProtocolError unless class and channel of a reply are those of replies."""
    if class_id != replies_class or not envelope.channel.startswith(_REPLY_CHANNEL_PREFIX):
        raise LocalProtocolError(
            f"a reply was requested on channel {envelope.channel[:80]!r} of class {class_id}; "
            f"expected class {REPLY_CLASS_NAME!r} ({replies_class}) and a channel that begins with "
            f"{_REPLY_CHANNEL_PREFIX!r}"
        )


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
    return TimeoutError(f"no reply to the request of {target} came within {seconds:g} s")
