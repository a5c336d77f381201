"""Inboxes for tests that receive given sequences and record the encoded outcomes."""

from __future__ import annotations

from collections.abc import Iterable

from simplebus.client.core.acks import AckSink
from simplebus.client.core.frame_runs import FrameRun, split_into_runs
from simplebus.client.core.inbox import Inbox
from simplebus.client.core.open_requests import OpenRequest
from simplebus.core.protocol.receive_buffer import FrameReceiver, ReceiveBuffer
from simplebus.core.protocol.requests import SubscribeReply, SubscribeRequest
from tests.support.oracles import ID_COUNT, build_frame, parse_frame, split_frames

MESSAGE, SUBSCRIBE, ENVELOPE = b"125"
BUFFER = ReceiveBuffer(1 << 20)


def split_runs(data: bytes) -> list[FrameRun]:
    receiver = FrameReceiver(frame_bytes_max=1 << 20)
    return [r for b in receiver.receive(BUFFER, BUFFER.fill(data)) for r in split_into_runs(b)]


class RecordingInbox(Inbox):
    """An inbox that receives given sequences and returns its encoded outcomes."""

    def __init__(
        self, options: SubscribeRequest | None = None, *, cursor: int = 0, auto_ack: bool = True
    ) -> None:
        self.ack_sink = AckSink()
        options = options or SubscribeRequest()
        request = OpenRequest(1, SUBSCRIBE, content=options.encode())
        super().__init__(
            1, options, request, self.ack_sink, subscription_number=7, auto_ack=auto_ack
        )
        self.run_count = 0
        self.confirm_subscription(cursor)

    def confirm_subscription(
        self, cursor: int, *, resumed: bool = False, is_same_run: bool = False
    ) -> None:
        self.run_count += not is_same_run
        reply = SubscribeReply(cursor=cursor, floor=cursor, resumed=resumed)
        self.handle_subscribed(reply, server_run=("bus", f"{self.run_count}"))

    def deliver(self, sequences: Iterable[int], attempt: int = 1, payload: bytes = b"%06d") -> int:
        """Receive these messages. Return the number of dropped duplicates."""
        data = b"".join(
            build_frame(
                MESSAGE,
                class_id=1,
                message_id=sequence % ID_COUNT,
                content=payload % sequence if b"%" in payload else payload,
            )
            for sequence in sequences
        )
        return sum(self.accept_run(run, attempt) for run in split_runs(data))

    def encoded_outcomes(self) -> list[str]:
        """Return and clear the encoded outcomes: `+first-last` acks, `-first-last delay` nacks, `~`
        working.
        """
        signs = {ord("3"): "+", ord("8"): "-", ord("9"): "~"}
        parsed = [parse_frame(frame) for frame in split_frames(self.ack_sink.encode_pending())[0]]
        return [signs[kind] + content.decode() for kind, *_, content in parsed]


def create_inbox(*counts: int, auto_ack: bool = True) -> RecordingInbox:
    """Return an inbox with batches of these lengths and consecutive sequences."""
    inbox, first = RecordingInbox(auto_ack=auto_ack), 0
    for count in counts:
        inbox.deliver(range(first, first + count))
        first += count
    return inbox
