"""What a client asked of the bus, and what became of it.

Rule 1: a request is answered once: by its reply, by a refusal, or by the loss of the connection.
Rule 2: what describes a lasting state (Subscribe, Unsubscribe) outlives the connection; every
other request fails with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from simplebus.core.errors import BusError
from simplebus.core.limits import MESSAGE_ID_MASK
from simplebus.core.protocol import frames
from simplebus.core.protocol.inquiry import Explained
from simplebus.core.protocol.requests import ConnectReply, FetchReply, PurgeReply, SubscribeReply

if TYPE_CHECKING:
    from simplebus.client.core.frame_runs import Run
    from simplebus.client.core.messages import Batch

Reply = ConnectReply | SubscribeReply | FetchReply | PurgeReply | Explained

_LASTING = (frames.SUBSCRIBE, frames.UNSUBSCRIBE)


class Request:
    """Something that was asked of the bus."""

    def __init__(
        self, number: int, frame_type: int, *, subject: int = 0, detail: int = 0, content: bytes
    ) -> None:
        self.number = number
        self.frame_type = frame_type
        self.subject = subject
        """The class that it is about; for Unsubscribe the subscription. 0 for Connect."""
        self.detail = detail
        """For Subscribe the number of the subscription; 0 for the others."""
        self.content = content
        self.done = False
        self.error: BusError | None = None
        """Why it was not done; None while it is not known, and when it was."""
        self.reply: Reply | None = None
        """What the bus answered; None for an Unsubscribe."""
        self.batches: list[Batch] = []
        """What a Fetch brought."""
        self.decode: Callable[[bytes], Any] | None = None
        """What makes a fetched message's `value` of its payload."""
        self.wanted = 0
        """How many messages a Fetch may still bring."""
        self.runs: list[Run] = []
        """What came for a Fetch that is not answered yet."""
        self.position: int | None = None
        """Messages below it are to be applied before; None when that does not matter."""

    @property
    def frame(self) -> bytes:
        return frames.encode(
            self.frame_type,
            class_id=self.subject,
            message_id=self.number,
            timer_index=self.detail,
            content=self.content,
        )

    def finish(self, reply: Reply | None = None) -> None:
        self.reply = reply
        self.done = True

    def fail(self, error: BusError) -> None:
        self.error = error
        self.done = True


class Requests:
    """Requests that are not answered yet, oldest first."""

    def __init__(self) -> None:
        self._waiting: dict[int, Request] = {}
        self._next = 1

    def make(
        self, frame_type: int, *, subject: int = 0, detail: int = 0, content: bytes = b""
    ) -> Request:
        """A request with a number that no waiting one has."""
        while self._next in self._waiting:
            self._count_on()
        request = Request(self._next, frame_type, subject=subject, detail=detail, content=content)
        self._waiting[request.number] = request
        self._count_on()
        return request

    def again(self, request: Request, content: bytes) -> None:
        """A question that was answered on another connection."""
        request.content = content
        request.done = False
        self._waiting[request.number] = request

    def take(self, number: int, frame_type: int) -> Request | None:
        """The request that an answer belongs to; None when none waits for it."""
        request = self._waiting.get(number)
        if request is None or request.frame_type != frame_type:
            return None
        return self._waiting.pop(number)

    def drop(self, request: Request) -> None:
        """The question has become pointless."""
        self._waiting.pop(request.number, None)

    def of_type(self, *frame_types: int) -> list[Request]:
        return [one for one in self._waiting.values() if one.frame_type in frame_types]

    def lost(self, error: BusError) -> None:
        """The connection is gone."""
        self._fail(error, [one for one in self._waiting.values() if one.frame_type not in _LASTING])

    def fail(self, error: BusError) -> None:
        """There will be no connection any more."""
        self._fail(error, list(self._waiting.values()))

    def _fail(self, error: BusError, failed: list[Request]) -> None:
        for request in failed:
            del self._waiting[request.number]
            request.fail(error)

    def _count_on(self) -> None:
        self._next = (self._next + 1) & MESSAGE_ID_MASK or 1
