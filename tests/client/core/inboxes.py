"""Inboxes for tests: given sequences, they tell what was written about them."""

from __future__ import annotations

from collections.abc import Iterable

from simplebus.client.core.acks import AckSink
from simplebus.client.core.frame_runs import FrameRun, split_into_runs
from simplebus.client.core.inbox import Inbox
from simplebus.client.core.open_requests import OpenRequest
from simplebus.core.protocol.receive_buffer import FrameReceiver, ReceiveBuffer
from simplebus.core.protocol.requests import SubscribeReply, SubscribeRequest
from tests.support.oracles import (
    ID_COUNT,
    build_frame,
    parse_frame,
    split_frames,
)

MESSAGE, SUBSCRIBE, ENVELOPE = b"125"
BUFFER = ReceiveBuffer(1 << 20)


def runs_of(data: bytes) -> list[FrameRun]:
    receiver = FrameReceiver(frame_bytes_max=1 << 20)
    return [r for b in receiver.receive(BUFFER, BUFFER.fill(data)) for r in split_into_runs(b)]


class HeardInbox(Inbox):
    """An inbox that is given sequences, and tells what was written about them."""

    def __init__(
        self, options: SubscribeRequest | None = None, *, cursor: int = 0, auto_ack: bool = True
    ) -> None:
        self.desk = AckSink()
        options = options or SubscribeRequest()
        request = OpenRequest(1, SUBSCRIBE, content=options.encode())
        super().__init__(1, options, request, self.desk, subscription_number=7, auto_ack=auto_ack)
        self.runs = 0
        self.begin(cursor)

    def begin(self, cursor: int, *, resumed: bool = False, same_run: bool = False) -> None:
        self.runs += not same_run
        reply = SubscribeReply(cursor=cursor, floor=cursor, resumed=resumed)
        self.handle_subscribed(reply, server_run=("bus", f"{self.runs}"))

    def come(self, sequences: Iterable[int], attempt: int = 1, payload: bytes = b"%06d") -> int:
        """These messages have come. Returns how many were dropped."""
        data = b"".join(
            build_frame(
                MESSAGE,
                class_id=1,
                message_id=sequence % ID_COUNT,
                content=payload % sequence if b"%" in payload else payload,
            )
            for sequence in sequences
        )
        return sum(self.accept_run(run, attempt) for run in runs_of(data))

    def told(self) -> list[str]:
        """What is written: `+first-last` for acks, `-first-last delay` for nacks."""
        words = {ord("3"): "+", ord("8"): "-", ord("9"): "~"}
        parsed = [parse_frame(frame) for frame in split_frames(self.desk.encode_pending())[0]]
        return [words[kind] + content.decode() for kind, *_, content in parsed]


def inbox_with(*counts: int, auto_ack: bool = True) -> HeardInbox:
    """An inbox with batches of so many messages, numbered on."""
    inbox, first = HeardInbox(auto_ack=auto_ack), 0
    for count in counts:
        inbox.come(range(first, first + count))
        first += count
    return inbox
