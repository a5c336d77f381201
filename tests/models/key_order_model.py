"""Model of a key-ordered group: which message may be sent to which member, and when.

The model records publications, deliveries and replies. It predicts nothing; it checks that each
delivery is allowed and that each missing message has a reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from simplebus.core.broker.broker import Broker, Settings
from simplebus.core.broker.subscription_manager import SubscriptionManager
from simplebus.core.channel.pattern import matches
from simplebus.core.checkpoint import Checkpointer
from simplebus.core.commit_log import CommitLog
from simplebus.core.group.key_ordered_group import KeyOrderedGroup
from simplebus.core.limits import BACKOFF_TICKS_MAX, Limits
from simplebus.core.message_class.purge import purge_messages
from simplebus.core.protocol.envelope_batch import Envelope, encode
from simplebus.core.redelivery.timer_wheel import spans_by_attempts
from simplebus.core.settings import FullPolicy
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import (
    Version2Message,
    Version2Peer,
    ack,
    connect_version2,
    nack,
    publish_envelopes,
    subscribe,
    working,
)

NEVER = float("inf")


def encode_with_key(key: bytes, payload: bytes = b"", **fields: object) -> bytes:
    """Encode the content of an Envelope frame with a key."""
    return encode(Envelope(key=key, **fields), payload)  # type: ignore[arg-type]


@dataclass
class Message:
    sequence: int
    key: bytes
    channel: str
    expires: float
    not_before: float
    sent: int = 0
    """Number of deliveries."""
    holder: Version2Peer | None = None
    """Member to which it was delivered and which has not decided yet."""
    is_acked: bool = False
    is_gone: bool = False
    is_purged: bool = False


class KeyOrderModel:
    """A bus with one class and one durable key-ordered group, its members, and the model."""

    def __init__(
        self,
        *,
        max_deliveries: int = 0,
        channels: tuple[str, ...] = (),
        class_messages: int = 10_000,
        drops: bool = False,
        max_pending: int | None = None,
        slow: str = "block",
    ) -> None:
        policy = FullPolicy.DROP_OLDEST if drops else FullPolicy.BLOCK
        limits = Limits(class_messages=class_messages)
        self.bus = BrokerHarness(Settings(limits=limits, full_policy=policy))
        self.bus.broker.clock.now = 100.0
        self.options = {
            "durable": "d",
            "group": "g",
            "by_key": True,
            "max_deliveries": max_deliveries,
            "channels": channels,
            "slow": slow,
            "max_pending": max_pending,
        }
        self.max_deliveries, self.channels = max_deliveries, channels
        self.may_drop = drops or slow != "block"
        self.messages: list[Message] = []
        self.members: list[Version2Peer] = []
        self.limited = False
        """True if a member limits its messages in flight."""
        self.publisher = connect_version2(self.bus)
        self.join()

    @property
    def now(self) -> float:
        return self.bus.broker.clock.now

    @property
    def group(self) -> KeyOrderedGroup:
        (group,) = self.bus.broker.classes[1].groups.values()
        assert isinstance(group, KeyOrderedGroup)
        return group

    # Actions -------------------------------------------------------------------------------------

    def join(self, max_in_flight: int | None = None, name: str | None = None) -> None:
        request = subscribe(1, 5, **self.options, max_in_flight=max_in_flight)
        self.limited |= max_in_flight is not None
        member = connect_version2(self.bus, request, **({} if name is None else {"name": name}))
        self.members.append(member)
        self.record_delivery(member, member.receive_all()[0])

    def leave(self, member: Version2Peer) -> None:
        self.members.remove(member)
        for message in self.messages:
            if message.holder is member:
                message.holder = None
        member.disconnect()
        self.check()

    def publish(self, *messages_: tuple[bytes, str, int | None, int | None]) -> None:
        contents = []
        for key, channel, expires_ms, delay_ms in messages_:
            contents.append(
                encode_with_key(key, channel=channel, expires_ms=expires_ms, not_before_ms=delay_ms)
            )
            self.messages.append(
                Message(
                    len(self.messages),
                    key,
                    channel,
                    NEVER if expires_ms is None else self.now + expires_ms / 1000,
                    0.0 if delay_ms is None else self.now + delay_ms / 1000,
                )
            )
        first = len(self.messages) - len(messages_)
        self.publisher.send(publish_envelopes(1, first, *contents))
        self.check()

    def receive(self, member: Version2Peer) -> None:
        self.bus.broker.run_due_wakeups()
        self.record_delivery(member, member.receive_deliveries())
        self.check()

    def record_delivery(self, member: Version2Peer, messages: list[Version2Message]) -> None:
        self.check()
        for delivery in messages:
            self._was_sent(member, self.messages[delivery.message_id], delivery.attempt)

    def ack(self, member: Version2Peer, first: int, last: int) -> None:
        member.send(ack(5, first, last))
        for message in self.messages[first:last]:
            if message.holder is member:
                message.is_acked, message.holder = True, None
        self.check()

    def nack(self, member: Version2Peer, first: int, last: int, delay_ms: int | None) -> None:
        for message in self.messages[first:last]:
            if message.holder is member:
                message.holder = None
        member.send(nack(5, first, last, delay_ms))
        self.check()

    def working(self, member: Version2Peer, first: int, last: int) -> None:
        member.send(working(5, first, last))
        self.check()

    def purge(self, first: int, last: int) -> None:
        for message in self.messages[first:last]:
            message.is_purged = True
        cls = self.bus.broker.classes[1]
        purge_messages(cls, first, last, None)
        self.bus.broker.store.trim_class(cls)
        self.bus.check_invariants()
        self.check()

    def pass_time(self, seconds: float) -> None:
        self.bus.broker.clock.now += seconds
        self.bus.broker.run_due_wakeups()
        self.check()

    def tick(self, times: int) -> None:
        for _ in range(times):
            self.bus.broker.clock.now += 1
            holders = self._holders()
            self.bus.tick()
            for sequence, member in holders.items():
                if not self._holds(member, sequence):  # Its ack timeout has passed.
                    self.messages[sequence].holder = None
            self.check()

    def restart(self) -> None:
        """Restore the position from its snapshot with a new group."""
        for member in list(self.members):
            self.leave(member)
        broker, former_position = self.bus.broker, self.group.position
        checkpointer = Checkpointer(Broker(broker.settings, commit_log=CommitLog()))
        checkpointer._broker = broker
        cls, snapshot = broker.classes[1], checkpointer._snapshot_position(former_position)
        window = snapshot.window.to_window(floor=cls.ring.floor, head=cls.ring.head)
        spans = spans_by_attempts(window.floor, window.cursor, snapshot.attempts, default=1)
        manager: SubscriptionManager = broker.subscription_manager
        assert (
            manager.restore_position(cls, snapshot, former_position.delivery_policy, window, spans)
            is not None
        )
        manager.end_position(former_position)
        self.bus.check_invariants()
        self.join()

    # Checks --------------------------------------------------------------------------------------

    def _holders(self) -> dict[int, Version2Peer]:
        return {m.sequence: m.holder for m in self.messages if m.holder is not None}

    def _holds(self, member: Version2Peer, sequence: int) -> bool:
        holders = member.session.subscriptions.get(5)
        return holders is not None and holders.has_in_flight(sequence, sequence + 1, 0)

    def _was_sent(self, member: Version2Peer, message: Message, attempt: int) -> None:
        assert member in self.members
        assert message.holder is None, "delivered although another member holds it"
        assert not message.is_acked, "delivered after its ack"
        assert not message.is_gone, "delivered after it was dead-lettered"
        assert self._is_wanted(message)
        assert message.not_before <= self.now < message.expires
        assert attempt == message.sent + 1, (attempt, message.sent)
        assert not self.max_deliveries or attempt <= self.max_deliveries
        message.sent += 1
        message.holder = member
        if message.key:
            for other_message in self.messages:
                if (
                    other_message is not message
                    and other_message.key == message.key
                    and self.is_unfinished(other_message)
                ):
                    assert not other_message.sent, (
                        "delivered while another message of its key is unsettled"
                    )
                    if other_message.sequence < message.sequence:
                        assert other_message.not_before, (
                            "delivered before an earlier message of its key"
                        )

    def _is_wanted(self, message: Message) -> bool:
        return not self.channels or any(matches(c, message.channel) for c in self.channels)

    def is_unfinished(self, message: Message) -> bool:
        """Return True if the message must still be delivered or decided."""
        if message.is_acked or message.is_gone or not self._is_wanted(message):
            return False
        return message.holder is not None or message.expires > self.now

    def check(self) -> None:
        """Check that the group holds no state of finished messages."""
        group = self.group
        for message in self.messages:
            if message.is_acked or message.is_gone:
                continue
            sequence = message.sequence
            if sequence < group.window.cursor and not group.window.unacked_ranges(
                sequence, sequence + 1
            ):
                message.is_gone = True
                message.holder = None
                assert (
                    not self._is_wanted(message)
                    or message.expires <= self.now
                    or message.sent >= self.max_deliveries > 0
                    or self.may_drop
                    or message.is_purged
                ), f"message {sequence} is lost"
        for message in self.messages:
            if message.is_acked:
                assert not group.window.unacked_ranges(message.sequence, message.sequence + 1)

    def check_nothing_is_stuck(self) -> None:
        """Check that each key has a message in flight or delayed. All members have read and have
        space.
        """
        if self.limited or not self.members:
            return
        for _ in range(3):
            for member in self.members:
                self.receive(member)
        keys: dict[object, list[Message]] = {}
        for message in self.messages:
            if self.is_unfinished(message) and message.not_before <= self.now:
                keys.setdefault(message.key or message.sequence, []).append(message)
        for messages_ in keys.values():
            assert any(message.sent for message in messages_), [m.sequence for m in messages_]

    def finish(self) -> None:
        """Acknowledge everything with every member, until nothing is left."""
        if not self.members:
            self.join()
        for _ in range(400):
            for member in self.members:
                self.receive(member)
                for sequence, holder in self._holders().items():
                    if holder is member:
                        self.ack(member, sequence, sequence + 1)
            if not any(map(self.is_unfinished, self.messages)):
                break
            self.tick(1)
        undelivered = [m.sequence for m in self.messages if self.is_unfinished(m)]
        assert not undelivered, f"{undelivered} were not delivered, or not redelivered"
        # An expired message is released when its delay has ended and a member reads.
        for _ in range(2 + 2 * BACKOFF_TICKS_MAX):
            self.tick(1)
            for member in self.members:
                self.receive(member)
            if not self.bus.statistics(1).ring.message_count:
                break
        assert self.bus.statistics(1).ring.message_count == 0
