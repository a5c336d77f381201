"""Checks of deliveries: their times, their order, and last values.

A message that is sent was copied after the last moment without bytes between ring and wire. So a
message that was not allowed at that moment is never allowed.
"""

from __future__ import annotations

from simplebus.core.limits import DELIMITER_BYTES, HEADER_BYTES
from simplebus.core.message_class.message_class import MessageClass
from tests.behaviour.wire_peer_v2 import DELIVER, ENVELOPE, MESSAGE
from tests.simulation.history import (
    PositionHistory,
    SessionHistory,
    channel_from_traits,
    delay_from_traits,
    expiry_from_traits,
    is_timed,
    message_token,
    message_traits,
)
from tests.simulation.losses import LossChecks
from tests.simulation.messages import key_from_traits, parse_dead_letter
from tests.support.oracles import parse_frames

CLOCK_SLACK = 0.02
"""Seconds: resolution of acceptance times."""


class DeliveryChecks(LossChecks):
    """Delivery checks of one bus, over all its processes."""

    # Deliveries ----------------------------------------------------------------------------------

    def _check_timing(
        self,
        session_history: SessionHistory,
        position_history: PositionHistory,
        number: int,
        sequence: int,
        attempt: int,
        name: str,
    ) -> None:
        """Check that a message is not delayed, not expired, and not in its backoff."""
        token = message_token(self.messages[position_history.class_id][sequence] or b"{a.0.}")
        stored = self.times.get((position_history.class_id, sequence))
        if stored is not None and is_timed(token):
            traits, clock = (
                message_traits(token),
                min(session_history.clean_clock, self.broker.clock.now),
            )
            self.check(
                stored + expiry_from_traits(traits) > clock - CLOCK_SLACK,
                "expired messages are not sent",
                f"{name}: stored at {stored}, {clock}",
            )
            self.check(
                stored + delay_from_traits(traits) < self.latest_clock + CLOCK_SLACK,
                "delayed messages are not sent early",
                f"{name}: stored at {stored}, {self.latest_clock}",
            )
        if (position_history.class_id, sequence) in session_history.overtaken:
            return
        previous = position_history.sent.get(sequence)
        if previous is not None and previous.is_open and previous.holder[0] in self.broker.sessions:
            self.check(
                sequence in position_history.excused
                or self.broker.tick_number >= previous.tick + position_history.ticks,
                "redeliveries respect the backoff",
                f"{name}: tick {self.broker.tick_number}, after {previous.tick}",
            )
        if (
            attempt and session_history.version == 2 and position_history.durable
        ):  # 0 means unknown.
            attempts_before = position_history.attempts.get(sequence, 0)
            self.check(
                attempt > attempts_before or sequence in position_history.excused,
                "deliveries are counted",
                f"{name}: the previous attempt was {attempts_before}",
            )
            position_history.attempts[sequence] = max(attempts_before, attempt)

    def _record_overtaken(
        self,
        session_history: SessionHistory,
        position_history: PositionHistory,
        sequence: int,
        attempt: int,
    ) -> None:
        """Record earlier deliveries to other members that are not sent yet: they arrive after this
        one.
        """
        for other_session in self.session_histories.values():
            if other_session is session_history or not other_session.session.outbox._unsent_bytes:
                continue
            frames, _ = parse_frames(
                other_session.partial_sent + bytes(other_session.session.outbox._unsent_bytes)
            )
            delivery = other_session.delivery
            for kind, class_id, message_id, last, _ in frames:
                if kind == DELIVER:
                    delivery = (class_id, message_id, last)
                elif (
                    kind in (MESSAGE, ENVELOPE)
                    and message_id == sequence
                    and other_session.position_histories.get(delivery[2]) is position_history
                    and delivery[1] < attempt
                ):
                    other_session.overtaken.add((position_history.class_id, sequence))

    def _check_key_order(self, position_history: PositionHistory, sequence: int, name: str) -> None:
        """Check that earlier messages with the same key are finished."""
        log = self.messages[position_history.class_id]
        key = key_from_traits(message_traits(log[sequence]))
        dead = self.dead_letters.get(
            (position_history.class_id, position_history.durable or position_history.key[1]), set()
        )
        finished = position_history.ever_acked | dead
        cls = self.broker.classes[position_history.class_id]
        position = cls.named_positions[MessageClass.position_key(*position_history.key)]
        given_up = position.unacked.pending_dead_letters.sequences  # Dead letters soon.
        lowest = max(position_history.since, cls.first_sequence)
        for previous in range(lowest, sequence if key else 0):
            if (
                previous not in finished
                and not given_up.overlaps(previous, previous + 1)
                and log[previous]
                and not self.is_gone(position_history, previous)
            ):
                traits = message_traits(log[previous])
                self.check(
                    key_from_traits(traits) != key or b"t" in traits,
                    "messages with equal keys are delivered one after the other",
                    f"{previous} is not finished: {name}",
                )

    def _check_in_flight_limit(
        self,
        session_history: SessionHistory,
        position_history: PositionHistory,
        number: int,
        name: str,
    ) -> None:
        """Check that the messages certainly in flight respect the limit."""
        max_in_flight = session_history.limits.get(number)
        if max_in_flight is None or max_in_flight > 1000:
            return
        tick, first = (
            self.broker.tick_number,
            self.broker.classes[position_history.class_id].first_sequence,
        )
        in_flight_count = sum(
            1
            for sequence, sent in session_history.sent[number].items()
            if sent.is_open
            and position_history.sent.get(sequence) is sent
            and sequence not in position_history.acked
            and sequence >= first
            and not self.is_gone(position_history, sequence)
            and tick < sent.tick + position_history.ticks
        )
        self.check(
            in_flight_count < max_in_flight + 1,
            "in-flight limits are kept",
            f"{in_flight_count} in flight of {max_in_flight}: {name}",
        )

    # Last values ---------------------------------------------------------------------------------

    def _record_expected_values(self, position_history: PositionHistory) -> None:
        """Record the last message of each channel, unless times decide whether it is sent."""
        log = self.messages.get(position_history.class_id, [])
        position_history.first = len(log)
        for sequence, content in enumerate(log):
            if content and parse_dead_letter(content) is None:
                traits = message_traits(content)
                channel = channel_from_traits(traits)
                if (
                    is_timed(message_token(content))
                    or self.is_gone(position_history, sequence)
                    or self._may_be_dropped(position_history.class_id, sequence)
                ):
                    position_history.values.pop(channel, None)
                elif channel:
                    position_history.values[channel] = sequence

    def _may_be_dropped(self, class_id: int, sequence: int) -> bool:
        """Return True if last values can have filled 3/4 of the class, by messages or bytes.

        A full class drops last values then instead of copying them: with drop_oldest always, and
        with other policies if all its messages are acknowledged.
        """
        cls = self.broker.classes[class_id]
        if sequence >= cls.ring.floor:
            return False
        log, messages_max = self.messages[class_id], cls.ring.messages_max
        channels = [channel_from_traits(message_traits(content)) for content in log]
        sizes = [HEADER_BYTES + len(content) + DELIMITER_BYTES for content in log]
        for head in range(sequence + 1, min(len(log), sequence + messages_max) + 1):
            values = set({channels[each]: each for each in range(head)}.values())
            for floor in range(max(0, head - messages_max), sequence + 1):
                kept_sequences = [each for each in range(floor, head) if each in values]
                if 4 * len(kept_sequences) > 3 * (head - floor):
                    return True
                if 4 * sum(sizes[each] for each in kept_sequences) > 3 * sum(sizes[floor:head]):
                    return True
        return False

    def _check_last_values(self, position_history: PositionHistory) -> None:
        log = self.messages[position_history.class_id]
        if self.was_ever_lossy:
            return
        for channel, sequence in position_history.values.items():
            later_sequences = [
                each
                for each in range(sequence, len(log))
                if log[each] and channel_from_traits(message_traits(log[each])) == channel
            ]
            self.check(
                any(
                    each in position_history.ever_sent
                    or is_timed(message_token(log[each]))
                    or self.is_gone(position_history, each)
                    for each in later_sequences
                ),
                "last values are sent",
                f"{position_history.label}: {channel!r}, {sequence}",
            )
