"""Requests and their replies: what both clients know of them. No I/O, no waiting.

    request   headers  reply-to     the channel on which the asking bus, and nobody else, listens
                       reply-class  id of the class that replies are of
                       request-id   unique among the requests of that bus
              expires when nobody waits for its reply any longer
    reply     of that class, on that channel; header request-id; expires as its request did

Rule 1: every bus has one subscription for all its replies, from its first request on. A reply that
nobody waits for, because it came too late or twice, is acknowledged and forgotten.
Rule 2: who answers may publish where who asks may not: a reply goes where replies are, or nowhere.
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from simplebus.client.codecs import DecodeError
from simplebus.client.core.messages import Message
from simplebus.client.message_builder import PublishOptions, header_pairs
from simplebus.core.errors import LocalProtocolError
from simplebus.core.protocol.envelope_batch import Envelope
from simplebus.core.users.permissions import REPLIES

Handler = Callable[[Any], Awaitable[object] | object]

# A bus answers a question before it sends messages. What it has for a program when it answers comes
# before its next answer: when nothing came by then, it had nothing.
EMPTY_REPLIES_UNTIL_IDLE = 2


def check_handler(handler: Handler, *, is_async_allowed: bool) -> None:
    """Raise TypeError for what is no handler; `may_wait`: it may be an async function."""
    if not callable(handler):
        raise TypeError(f"a handler must be a function, got {handler!r}")
    if inspect.isasyncgenfunction(handler) or inspect.isgeneratorfunction(handler):
        raise TypeError(
            f"the handler {handler!r} holds a yield, so calling it runs nothing of it; expected a "
            "function that returns"
        )
    if inspect.iscoroutinefunction(handler) and not is_async_allowed:
        raise TypeError(
            f"the handler {handler!r} is an async function, which needs an event loop; expected a "
            "plain one, or a bus of simplebus.connect"
        )


def check_handler_result(outcome: object) -> None:
    """Raise TypeError for what a handler has returned instead of doing its work."""
    if outcome is None:
        return
    if inspect.iscoroutine(outcome):
        outcome.close()  # Otherwise Python warns that nobody has awaited it.
    elif not (inspect.isgenerator(outcome) or inspect.isasyncgen(outcome)):
        return
    raise TypeError(
        f"the handler returned {outcome!r} that nobody runs; expected it to do its work"
    )


CLASS = REPLIES
REPLY_TO_HEADER, REPLY_CLASS_HEADER, REQUEST_ID_HEADER = "reply-to", "reply-class", "request-id"
_CHANNELS = f"{REPLIES}."
"""How the channels begin on which buses listen for replies."""


@dataclass(slots=True, eq=False)
class PendingReply:
    """A request that waits for its reply."""

    request_id: str
    options: PublishOptions
    """What is to be said about the request when it is published."""
    on_reply: Callable[[], None]
    reply: Message[bytes] | None = None


class PendingReplies:
    """The requests of one bus that wait."""

    def __init__(self, class_id: int) -> None:
        self.class_id = class_id
        """What replies are of."""
        self.channel = _CHANNELS + secrets.token_hex(8)
        """Where replies to this bus go."""
        self._waiting: dict[str, Asked] = {}
        self._count = 0

    def add_request(self, options: PublishOptions, *, timeout: float, on_reply: Callable[[], None]) -> PendingReply:
        """A request is about to be published, of which this is said. `wake` is called when its
        reply has come."""
        self._count += 1
        request_id = str(self._count)
        ours = {REPLY_TO_HEADER: self.channel, REPLY_CLASS: str(self.class_id), REQUEST_ID: request_id}
        headers = (*header_pairs(options.get("headers")), *ours.items())
        said: PublishOptions = {"expires": timeout, **options, "headers": headers}
        asked = self._waiting[request_id] = Asked(request_id, said, wake)
        return asked

    def accept_reply(self, message: Message[bytes]) -> None:
        """A reply has come."""
        asked = self._waiting.pop(dict(message.headers).get(REQUEST_ID, ""), None)
        if asked is not None:
            asked.reply = message
            asked.on_reply()

    def discard(self, asked: PendingReply) -> None:
        """Nobody waits for it any longer."""
        self._waiting.pop(asked.request_id, None)


def build_reply_envelope(message: Message[Any]) -> tuple[int, Envelope]:
    """The class and the envelope of a reply. Raises LocalProtocolError for what asks for none."""
    if not isinstance(message, Message):
        raise TypeError(f"a reply is to a message, got {message!r}")
    headers = dict(message.headers)
    try:
        channel, class_id, request_id = (
            headers[name] for name in (REPLY_TO_HEADER, REPLY_CLASS_HEADER, REQUEST_ID_HEADER)
        )
        envelope = Envelope(
            channel=channel, headers=((REQUEST_ID_HEADER, request_id),), expires_ms=message.expires_ms
        )
        return int(class_id), envelope
    except (KeyError, ValueError):
        raise LocalProtocolError(f"{message!r} asks for no reply") from None


def check_reply_destination(class_id: int, envelope: Envelope, replies_class: int) -> None:
    """Raise LocalProtocolError for a reply, as `reply_to` has made it, that is not to go where
    replies are: `replies_class` is the id of their class."""
    if class_id != replies_class or not envelope.channel.startswith(_CHANNELS):
        raise LocalProtocolError(
            f"a reply is asked for on channel {envelope.channel[:80]!r} of class {class_id}; "
            f"replies are of class {CLASS!r}, {replies_class}, on channels {_CHANNELS}…"
        )


def decode_reply(reply: Message[bytes], decode: Callable[[bytes], Any] | None) -> Any:
    """What the asking program gets: the reply, or its value. Raises DecodeError."""
    if decode is None:
        return reply
    try:
        return decode(reply.payload)
    except DecodeError as error:
        raise error.of_reply(reply) from error.__cause__


def no_reply_error(message: object, class_id: object, seconds: float) -> TimeoutError:
    """Nobody has replied."""
    what = f"a {type(message).__name__}" if class_id is None else f"class {class_id!r}"
    return TimeoutError(f"no reply to the request of {what} came within {seconds:g} s")
