"""Requests of a client that wait for a reply.

A request ends once: by its reply, by an error or by the loss of the connection. Subscribe and
Unsubscribe requests survive a reconnect; all other requests fail with their connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from simplebus.core.errors import BusError
from simplebus.core.limits import MESSAGE_ID_MASK
from simplebus.core.protocol import frames
from simplebus.core.protocol.inquiry import AcksInfo, InquireReply
from simplebus.core.protocol.requests import ConnectReply, FetchReply, PurgeReply, SubscribeReply

if TYPE_CHECKING:
    from simplebus.client.core.frame_runs import FrameRun
    from simplebus.client.core.messages import Batch

ReplyBody = ConnectReply | SubscribeReply | FetchReply | PurgeReply | InquireReply | AcksInfo

_PERSISTENT_TYPES = (frames.SUBSCRIBE, frames.UNSUBSCRIBE)


class OpenRequest:
    """A request and, later, its reply or error."""

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
        """Class id; for an Unsubscribe the number of the subscription; 0 for a Connect."""
        self.subscription_number = subscription_number
        """For a Subscribe the number of the subscription; 0 for other requests."""
        self.content = content
        self.is_done = False
        self.error: BusError | None = None
        """The reason of a failure; None while the request waits and after it succeeded."""
        self.reply: ReplyBody | None = None
        """The decoded reply; None for an Unsubscribe."""
        self.batches: list[Batch] = []
        """Messages of a Fetch, set when the reply has arrived."""
        self.decode: Callable[[bytes], Any] | None = None
        """Converts the payload of a fetched message into its `value`; None returns the payload."""
        self.remaining_count = 0
        """Messages that a Fetch may still receive."""
        self.frame_runs: list[FrameRun] = []
        """Messages of a Fetch that were received before its reply."""
        self.after_position: int | None = None
        """Send the request after all messages below this position; None if the order does not
        matter.
        """

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
    """Requests without a reply, oldest first."""

    def __init__(self) -> None:
        self._by_number: dict[int, OpenRequest] = {}
        self._next_number = 1

    def open_request(
        self,
        frame_type: int,
        *,
        target_id: int = 0,
        subscription_number: int = 0,
        content: bytes = b"",
    ) -> OpenRequest:
        """Create a request with a number that no other open request uses."""
        while self._next_number in self._by_number:
            self._advance_number()
        request = OpenRequest(
            self._next_number,
            frame_type,
            target_id=target_id,
            subscription_number=subscription_number,
            content=content,
        )
        self._by_number[request.number] = request
        self._advance_number()
        return request

    def reopen(self, request: OpenRequest, content: bytes) -> None:
        """Reopen a request that was answered on an earlier connection."""
        request.content = content
        request.is_done = False
        self._by_number[request.number] = request

    def pop_answered(self, number: int, frame_type: int) -> OpenRequest | None:
        """Remove and return the request that a reply belongs to; None if it is not open."""
        request = self._by_number.get(number)
        if request is None or request.frame_type != frame_type:
            return None
        return self._by_number.pop(number)

    def discard(self, request: OpenRequest) -> None:
        """Remove a request that is no longer needed."""
        self._by_number.pop(request.number, None)

    def find_by_type(self, *frame_types: int) -> list[OpenRequest]:
        return [
            request for request in self._by_number.values() if request.frame_type in frame_types
        ]

    def connection_lost(self, error: BusError) -> None:
        """Fail all requests that do not survive a reconnect."""
        self._fail_requests(
            error,
            [
                request
                for request in self._by_number.values()
                if request.frame_type not in _PERSISTENT_TYPES
            ],
        )

    def fail_all(self, error: BusError) -> None:
        """Fail all requests, because there will be no further connection."""
        self._fail_requests(error, list(self._by_number.values()))

    def _fail_requests(self, error: BusError, failed: list[OpenRequest]) -> None:
        for request in failed:
            del self._by_number[request.number]
            request.fail(error)

    def _advance_number(self) -> None:
        self._next_number = (self._next_number + 1) & MESSAGE_ID_MASK or 1
