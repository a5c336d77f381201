"""Replies to NATS clients that wait for the journal: PubAcks, replies to acks, and PONGs.

Each reply waits for the durability that confirms promise: a PubAck for that of its message, the
reply to an ack for that of the ack, and a PONG for that of all earlier messages of its client.
PubAcks of one class keep their order, and so do the PONGs of a client.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from simplebus.core.broker.broker import Broker
from simplebus.nats.limits import WAITING_PUB_ACKS_MAX
from simplebus.nats.server.session import NatsSession


@dataclass(slots=True)
class SubjectReply:
    """PubAck or reply to an ack that waits."""

    session: NatsSession
    """Client that receives the reply."""
    subject: bytes
    payload: bytes
    log_position: int
    """Log position that must be durable."""


@dataclass(slots=True)
class PongReply:
    """PONGs of one client that wait for the same log position."""

    session: NatsSession
    log_position: int
    count: int = 1


class DurableReplies:
    """Queues of replies that wait."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._pub_acks: dict[int, deque[SubjectReply]] = {}
        """By class."""
        self._ack_replies: deque[SubjectReply] = deque()
        self._pongs: dict[NatsSession, deque[PongReply]] = {}
        self._reply_counts: Counter[NatsSession] = Counter()
        """PubAcks and replies to acks that wait, by client."""

    @property
    def is_empty(self) -> bool:
        """True if no reply waits."""
        return not (self._pub_acks or self._ack_replies or self._pongs)

    def has_too_many(self, session: NatsSession) -> bool:
        """Return True if the waiting replies of a client are at the limit, so that it must not
        publish more.
        """
        return self._reply_counts[session] >= WAITING_PUB_ACKS_MAX

    def add_pub_ack(self, class_id: int, reply: SubjectReply) -> bool:
        """Add a PubAck. Returns False if it need not wait: the caller sends it now."""
        queue = self._pub_acks.get(class_id)
        if queue is None:
            if self._broker.is_durable(reply.log_position, class_id):
                return False
            queue = self._pub_acks[class_id] = deque()
        queue.append(reply)
        self._reply_counts[reply.session] += 1
        return True

    def add_ack_reply(self, reply: SubjectReply) -> bool:
        """Add the reply to an ack. Returns False if it need not wait: the caller sends it now.

        A client that has too many waiting replies gets none.
        """
        if self._broker.is_durable(reply.log_position):
            return False
        if not self.has_too_many(reply.session):
            self._ack_replies.append(reply)
            self._reply_counts[reply.session] += 1
        return True

    def add_pong(self, session: NatsSession, log_position: int) -> bool:
        """Add a PONG. Returns False if it need not wait: the caller sends it now."""
        queue = self._pongs.get(session)
        if queue is None:
            if self._broker.is_durable(log_position):
                return False
            queue = self._pongs[session] = deque()
        if queue and queue[-1].log_position == log_position:
            queue[-1].count += 1
        else:
            queue.append(PongReply(session, log_position))
        return True

    def pop_durable(self) -> list[SubjectReply | PongReply]:
        """Remove and return the replies that need not wait any longer."""
        due: list[SubjectReply | PongReply] = []
        for class_id, pub_acks in list(self._pub_acks.items()):
            while pub_acks and self._broker.is_durable(pub_acks[0].log_position, class_id):
                reply = pub_acks.popleft()
                self._reply_counts[reply.session] -= 1
                due.append(reply)
            if not pub_acks:
                del self._pub_acks[class_id]
        while self._ack_replies and self._broker.is_durable(self._ack_replies[0].log_position):
            reply = self._ack_replies.popleft()
            self._reply_counts[reply.session] -= 1
            due.append(reply)
        for session, pongs in list(self._pongs.items()):
            while pongs and self._broker.is_durable(pongs[0].log_position):
                due.append(pongs.popleft())
            if not pongs:
                del self._pongs[session]
        self._reply_counts = +self._reply_counts
        return due
