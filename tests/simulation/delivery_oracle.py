"""When a position may be sent a message, and which ones it must be sent.

Rule 1: what is sent was copied no earlier than when nothing lay between the ring and the wire the
last time; so what was not allowed then was not allowed at all.
"""

from __future__ import annotations

from tests.behaviour.wire_peer_v2 import DELIVER, ENVELOPE, MESSAGE
from tests.simulation.history import (
    Place,
    Talk,
    channel_of,
    expires_of,
    is_timed,
    opens_of,
    token_of,
    what_of,
)
from tests.simulation.losses import Losses
from tests.simulation.messages import dead_letter, key_of
from tests.support.oracles import parse_frame, split_frames

CLOCK_SLACK = 0.02
"""Seconds: when messages were accepted is kept to within so many."""


class Turns(Losses):
    """Of one bus, over all its processes."""

    # Sent now ------------------------------------------------------------------------------------

    def _is_in_time(
        self, talk: Talk, place: Place, number: int, sequence: int, attempt: int, name: str
    ) -> None:
        """Not before it may be, not when it has expired, not before its pause is over."""
        token = token_of(self.log[place.class_id][sequence] or b"{a.0.}")
        stored = self.times.get((place.class_id, sequence))
        if stored is not None and is_timed(token):
            what, clock = what_of(token), min(talk.clean_clock, self.broker.clock.now)
            self.demand(
                stored + expires_of(what) > clock - CLOCK_SLACK,
                "what has expired is not sent",
                f"{name}: stored at {stored}, {clock}",
            )
            self.demand(
                stored + opens_of(what) < self.latest_clock + CLOCK_SLACK,
                "nothing is sent before it may be",
                f"{name}: stored at {stored}, {self.latest_clock}",
            )
        if (place.class_id, sequence) in talk.overtaken:
            return
        former = place.sent.get(sequence)
        if former is not None and former.is_open and former.holder[0] in self.broker.sessions:
            self.demand(
                sequence in place.excused or self.broker.tick_number >= former.tick + place.ticks,
                "nothing is sent again before its pause is over",
                f"{name}: tick {self.broker.tick_number}, after {former.tick}",
            )
        if attempt and talk.version == 2 and place.durable:  # 0 says that it is not known.
            before = place.attempts.get(sequence, 0)
            self.demand(
                attempt > before or sequence in place.excused,
                "deliveries are counted",
                f"{name}: the one before was {before}",
            )
            place.attempts[sequence] = max(before, attempt)

    def _overtakes(self, talk: Talk, place: Place, sequence: int, attempt: int) -> None:
        """Other members may have been given it before, and it waits for their wires: what comes
        there comes behind this."""
        for other in self.talks.values():
            if other is talk or not other.session.outbox._unsent_bytes:
                continue
            frames, _ = split_frames(other.told + bytes(other.session.outbox._unsent_bytes))
            delivery = other.delivery
            for frame in frames:
                kind, class_id, message_id, last, _ = parse_frame(frame)
                if kind == DELIVER:
                    delivery = (class_id, message_id, last)
                elif (
                    kind in (MESSAGE, ENVELOPE)
                    and message_id == sequence
                    and other.places.get(delivery[2]) is place
                    and delivery[1] < attempt
                ):
                    other.overtaken.add((place.class_id, sequence))

    def _is_its_turn(self, place: Place, sequence: int, name: str) -> None:
        """What came before it with its key is done."""
        log = self.log[place.class_id]
        key = key_of(what_of(log[sequence]))
        dead = self.dead.get((place.class_id, place.durable or place.key[1]), set())
        done = place.ever_acked | dead
        cls = self.broker.classes[place.class_id]
        lowest = max(place.since, cls.first_sequence)
        for former in range(lowest, sequence if key else 0):
            if former not in done and log[former] and not self.is_gone(place, former):
                what = what_of(log[former])
                self.demand(
                    key_of(what) != key or b"t" in what,
                    "messages of a key come one after the other",
                    f"{former} is not done: {name}",
                )

    def _fits(self, talk: Talk, place: Place, number: int, name: str) -> None:
        """What is certainly in flight fits into the window."""
        most = talk.limits.get(number)
        if most is None or most > 1000:
            return
        tick, first = self.broker.tick_number, self.broker.classes[place.class_id].first_sequence
        held = sum(
            1
            for sequence, sent in talk.sent[number].items()
            if sent.is_open
            and place.sent.get(sequence) is sent
            and sequence not in place.acked
            and sequence >= first
            and not self.is_gone(place, sequence)
            and tick < sent.tick + place.ticks
        )
        self.demand(held < most + 1, "windows are kept", f"{held} in flight of {most}: {name}")

    # Last values ---------------------------------------------------------------------------------

    def _wants_values(self, place: Place) -> None:
        """It is to be sent the last message of each channel, where times do not decide that."""
        log = self.log.get(place.class_id, [])
        place.first = len(log)
        for sequence, content in enumerate(log):
            if content and dead_letter(content) is None:
                what = what_of(content)
                channel = channel_of(what)
                if is_timed(token_of(content)) or self.is_gone(place, sequence):
                    place.values.pop(channel, None)
                elif channel:
                    place.values[channel] = sequence

    def _has_values(self, place: Place) -> None:
        log = self.log[place.class_id]
        if self.ever_lossy:
            return
        for channel, sequence in place.values.items():
            later = [
                each
                for each in range(sequence, len(log))
                if log[each] and channel_of(what_of(log[each])) == channel
            ]
            self.demand(
                any(
                    each in place.ever_sent
                    or is_timed(token_of(log[each]))
                    or self.is_gone(place, each)
                    for each in later
                ),
                "last values are sent",
                f"{place.key} of class {place.class_id}: {channel!r}, {sequence}",
            )
