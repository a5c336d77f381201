"""Refusals of frames of version 2 sessions: counted, recorded for the publisher, and sent."""

from __future__ import annotations

from collections import Counter

from simplebus.core.commit_log import CommitLog
from simplebus.core.errors import Reason
from simplebus.core.producer_state import ProducerStates
from simplebus.core.protocol import frames
from simplebus.core.protocol.events import FrameRefused
from simplebus.core.protocol.requests import ErrorReply
from simplebus.core.session.session import Session

_MESSAGE_TYPES = (frames.MESSAGE, frames.ENVELOPE)


class RefusalSender:
    """Tells the sessions of one broker that a frame had no effect."""

    def __init__(self, commit_log: CommitLog | None, producer_states: ProducerStates) -> None:
        self.refusal_counts: Counter[Reason] = Counter()
        """Refused frames, and acks without effect, of all sessions by reason."""
        self._commit_log = commit_log
        self._producer_states = producer_states
        self._last_reply = ErrorReply("", "")
        self._last_content = b""
        """Encoded `_last_reply`: one batch may be refused in many Errors with the same content."""

    def send_refusal(self, session: Session, refused: FrameRefused) -> None:
        """Tell a version 2 session that a frame had no effect."""
        is_message = refused.frame_type in _MESSAGE_TYPES
        if not refused.is_repeated:
            self.refusal_counts[refused.reason] += refused.count
            session.record_refused(refused.reason, refused.count)
            if is_message:
                self._record_refused_message(session, refused)
        reply = ErrorReply(
            code=refused.reason, message=refused.message, count=refused.count if is_message else 0
        )
        if reply != self._last_reply:
            self._last_reply, self._last_content = reply, reply.encode()
        session.outbox.queue_reply(
            frames.encode(
                frames.ERROR,
                class_id=refused.class_id,
                message_id=refused.refers_to,
                timer_index=refused.frame_type,  # See `frames.HEADER`.
                content=self._last_content,
            )
        )

    def _record_refused_message(self, session: Session, refused: FrameRefused) -> None:
        """Record the refusal of a message of a named publisher.

        The message number is used. The publisher gets the refusal again after a reconnect in case
        it did not receive it.
        """
        producer = session.producer
        if producer is not None and producer.key:
            self._producer_states.add_refusal(producer, refused)
            if self._commit_log is not None:
                self._commit_log.append_refusal(producer.key, refused)
