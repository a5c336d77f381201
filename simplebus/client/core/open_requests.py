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
    from simplebus.client.core.frame_runs import FrameRun
    from simplebus.client.core.messages import Batch

ReplyBody = ConnectReply | SubscribeReply | FetchReply | PurgeReply | Explained

_PERSISTENT_TYPES = (frames.SUBSCRIBE, frames.UNSUBSCRIBE)


class OpenRequest:
    """Something that was asked of the bus."""

    def __init__(
        self,
        number: int,
        frame_type: int,
        *,
        target_id: int = 0,
        subscription_number: int = 0,
        content: bytes,
    ) -> None:
        self.number = number
        self.frame_type = frame_type
        self.target_id = target_id
        """The class that it is about; for Unsubscribe the subscription. 0 for Connect."""
        self.subscription_number = subscription_number
        """For Subscribe the number of the subscription; 0 for the others."""
        self.content = content
        self.is_done = False
        self.error: BusError | None = None
        """Why it was not done; None while it is not known, and when it was."""
        self.reply: ReplyBody | None = None
        """What the bus answered; None for an Unsubscribe."""
        self.batches: list[Batch] = []
        """What a Fetch brought."""
        self.decode: Callable[[bytes], Any] | None = None
        """What makes a fetched message's `value` of its payload."""
        self.remaining_count = 0
        """How many messages a Fetch may still bring."""
        self.frame_runs: list[FrameRun] = []
        """What came for a Fetch that is not answered yet."""
        self.after_position: int | None = None
        """Messages below it are to be applied before; None when that does not matter."""

    @property
    def frame(self) -> bytes:
        return frames.encode(
            self.frame_type,
            class_id=self.target_id,
            message_id=self.number,
            timer_index=self.subscription_number,
            content=self.content,
        )

    def finish(self, reply: ReplyBody | None = None) -> None:
        self.reply = reply
        self.is_done = True

    def fail(self, error: BusError) -> None:
        self.error = error
        self.is_done = True


class OpenRequests:
    """Requests that are not answered yet, oldest first."""

    def __init__(self) -> None:
        self._by_number: dict[int, OpenRequest] = {}
        self._next_number = 1

    def open_request(
        self,
        frame_type: int,
        *,
        subject_id: int = 0,
        subscription_number: int = 0,
        content: bytes = b"",
    ) -> OpenRequest:
        """A request with a number that no waiting one has."""
        while self._next_number in self._by_number:
            self._advance_number()
        request = OpenRequest(
            self._next_number,
            frame_type,
            target_id=subject_id,
            subscription_number=subscription_number,
            content=content,
        )
        self._by_number[request.number] = request
        self._advance_number()
        return request

    def reopen(self, request: OpenRequest, content: bytes) -> None:
        """A question that was answered on another connection."""
        request.content = content
        request.is_done = False
        self._by_number[request.number] = request

    def pop_answered(self, number: int, frame_type: int) -> OpenRequest | None:
        """The request that an answer belongs to; None when none waits for it."""
        request = self._by_number.get(number)
        if request is None or request.frame_type != frame_type:
            return None
        return self._by_number.pop(number)

    def discard(self, request: OpenRequest) -> None:
        """The question has become pointless."""
        self._by_number.pop(request.number, None)

    def find_by_type(self, *frame_types: int) -> list[OpenRequest]:
        return [one for one in self._by_number.values() if one.frame_type in frame_types]

    def connection_lost(self, error: BusError) -> None:
        """The connection is gone."""
        self._fail_requests(
            error,
            [one for one in self._by_number.values() if one.frame_type not in _PERSISTENT_TYPES],
        )

    def fail_all(self, error: BusError) -> None:
        """There will be no connection any more."""
        self._fail_requests(error, list(self._by_number.values()))

    def _fail_requests(self, error: BusError, failed: list[OpenRequest]) -> None:
        for request in failed:
            del self._by_number[request.number]
            request.fail(error)

    def _advance_number(self) -> None:
        self._next_number = (self._next_number + 1) & MESSAGE_ID_MASK or 1
