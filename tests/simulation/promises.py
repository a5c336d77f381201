"""What the bus promises, checked against everything that it does.

Rule 1: the history is made of bytes: what each session said and was told, read by oracles. Of the
broker itself only this is looked at: what lies in its rings and windows, and what it counts.
Rule 2: where the history cannot say what must be, nothing is demanded: an ack that may have come
too late, a message that may have expired, what a crash may take. Everything else is.
Rule 3: what breaks is raised at once, by the name of the promise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from simplebus.core.broker.broker import Broker
from simplebus.core.errors import RemoteProtocolError
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.session.session import Session
from simplebus.core.settings import FullPolicy
from tests.behaviour.wire_peer_v2 import (
    ACK,
    CONFIRM,
    CONNECT,
    DELIVER,
    ENVELOPE,
    ERROR,
    MESSAGE,
    NACK,
    PURGE,
    SUBSCRIBE,
    UNSUBSCRIBE,
    WORKING,
)
from tests.simulation.delivery_oracle import Turns
from tests.simulation.history import (
    Place,
    Sent,
    Talk,
    content_of,
    is_timed,
    token_of,
)
from tests.simulation.messages import dead_letter
from tests.support.oracles import parse_ack, parse_frame, split_frames


class Promises(Turns):
    """Of one bus, over all its processes."""

    # What is accepted ----------------------------------------------------------------------------

    def look(self, broker: Broker) -> None:
        """See what was stored since."""
        self.latest_clock = max(self.latest_clock, broker.clock.now)
        for cls in broker.classes.values():
            self.look_at(cls)

    def look_at(self, cls: MessageClass) -> None:
        """The same in one class."""
        class_id, head = cls.class_id, cls.ring.head
        log = self.log.setdefault(class_id, [])
        for sequence in range(len(log), head):
            content = content_of(cls, sequence) if sequence >= cls.ring.floor else b""
            log.append(content)
            if content:
                self._accepted(cls, sequence, content)

    def _accepted(self, cls: MessageClass, sequence: int, content: bytes) -> None:
        letter = dead_letter(content)
        if letter is not None:
            of, name, number = letter
            self.dead.setdefault((of, name), set()).add(number)
            self.count("dead letters")
            return
        token = token_of(content)
        if cls.has_last_values and token in self.at:
            self.copies.setdefault(cls.class_id, set()).update((sequence, self.at[token][1]))
            self.count("carried")
            return
        self.times[cls.class_id, sequence] = self.broker.clock.now
        self.demand(
            token not in self.at or token in self.may_be_twice,
            "a number is stored once",
            f"{token!r} is {self.at.get(token)} and {(cls.class_id, sequence)}",
        )
        self.at.setdefault(token, (cls.class_id, sequence))
        self.count("accepted")

    # Sessions ------------------------------------------------------------------------------------

    def opened(self, session: Session) -> None:
        self.talks[session.session_id] = Talk(
            session, f"session {session.session_id} of {session.peer}"
        )

    def closed(self, session: Session) -> None:
        talk = self.talks.pop(session.session_id)
        frames, _ = split_frames(talk.told + bytes(session.outbox._unsent_bytes))
        delivery = talk.delivery
        for frame in frames:
            kind, class_id, message_id, last, _ = parse_frame(frame)
            if kind == DELIVER:
                delivery = (class_id, message_id, last)
            elif kind in (MESSAGE, ENVELOPE):
                number = delivery[2] if talk.version == 2 else class_id
                if number in talk.places:
                    talk.places[number].lost += 1
        for place in talk.places.values():
            for sent in place.sent.values():
                if sent.holder[0] == session.session_id:
                    sent.is_open = False

    def refused(self, session: Session, error: RemoteProtocolError) -> None:
        """The last bytes were applied up to some frame."""
        talk = self.talks[session.session_id]
        for place, sequence in talk.late_acks:
            place.acked.discard(sequence)
        self.demand(
            error.reason in ("taken_over", "name_in_use", "heartbeat_timeout", "stalled"),
            "nobody is cut off without a reason",
            f"{session.peer}: {error.sentence}",
        )

    # What is said --------------------------------------------------------------------------------

    def heard(self, session: Session, data: bytes) -> None:
        """These bytes are about to be applied."""
        talk = self.talks[session.session_id]
        talk.late_acks.clear()
        frames, talk.heard = split_frames(talk.heard + data)
        for frame in frames:
            kind, key, number, last, content = parse_frame(frame)
            self.world.say("from", talk.who, chr(kind), key, number, last, content[:40])
            if not talk.version:
                talk.version = 2 if content.lstrip()[:1] == b"{" else 1
            if kind == CONNECT and talk.version == 2:
                wish = msgspec.json.decode(content or b"{}")
                if wish.get("name"):
                    talk.who, talk.is_named = wish["name"], True
                if "unconfirmed" in wish:
                    talk.unconfirmed, talk.bus = wish["unconfirmed"], wish["bus"]
            elif kind in (MESSAGE, ENVELOPE):
                token = token_of(content)
                self.count("published")
                if not talk.is_named:
                    self.may_be_twice.add(token)
                if talk.version == 2:
                    self.numbers[talk.who, number] = token
            elif kind == SUBSCRIBE:
                if talk.version == 1:
                    self._subscribed_plainly(talk, key)
                else:
                    wish = msgspec.json.decode(content or b"{}")
                    wish["was_there"] = self._is_there(key, wish)
                    talk.asked.append((key, last, wish))
            elif kind == UNSUBSCRIBE:
                talk.left.add(key)
                for held in talk.sent.get(key, {}).values():
                    held.is_open = False
            elif kind == PURGE:
                wish = msgspec.json.decode(content)
                self._purge_asked(talk, key, wish["first"], wish["last"])
            elif kind == ACK:
                ends = parse_ack(content)
                assert ends is not None
                self._acked(talk, key, range(*ends))
            elif kind in (NACK, WORKING):
                ends = parse_ack(content.split(b" ")[0])
                assert ends is not None
                self._put_off(talk, key, range(*ends))

    def _subscribed_plainly(self, talk: Talk, class_id: int) -> None:
        if class_id not in talk.places:
            position = (f"v1 {talk.who}", "")
            place = Place(class_id, position, (), len(self.log.get(class_id, [])))
            place.ticks = self.broker.settings.ack_timeout
            talk.places[class_id] = place
            talk.last[class_id] = -1

    def _acked(self, talk: Talk, number: int, ids: range) -> None:
        for class_id, asked, wish in talk.asked:  # It is granted, perhaps, and was not told so.
            key = MessageClass.position_key(wish.get("durable") or "", wish.get("group") or "")
            if asked == number and (known := self.places.get((class_id, key))) is not None:
                known.ever_acked |= known.ever_sent & set(ids)
        place = talk.places.get(number)
        if place is None or number in talk.left:
            return
        sent = talk.sent.get(number, {})
        tick = self.broker.tick_number
        place.ever_acked |= place.ever_sent & set(ids)
        for sequence in sorted(sent.keys() & set(ids)):
            if place.is_group:
                mine = place.sent.get(sequence)
                if mine is None or mine.holder != (talk.session.session_id, number):
                    continue
                if not mine.is_open or tick >= mine.tick + place.ticks:
                    continue
            if sequence not in place.acked:
                self.count("acked")
                place.acked.add(sequence)
                talk.late_acks.append((place, sequence))
                place.excused |= self._under_way(place)

    def _under_way(self, place: Place) -> set[int]:
        """What was copied to be sent and has not left."""
        found = set()
        for talk in self.talks.values():
            if place in talk.places.values() and talk.session.outbox._unsent_bytes:
                frames, _ = split_frames(talk.told + bytes(talk.session.outbox._unsent_bytes))
                for frame in frames:
                    kind, class_id, message_id, _, _ = parse_frame(frame)
                    if kind in (MESSAGE, ENVELOPE) and class_id == place.class_id:
                        found.add(message_id)
        return found

    def _put_off(self, talk: Talk, number: int, ids: range) -> None:
        """Nacked, or still worked on: when it comes again is another's affair."""
        place = talk.places.get(number)
        if place is None:
            return
        for sequence in talk.sent.get(number, {}).keys() & set(ids):
            talk.sent[number][sequence].is_open = False
        self.count("put off")

    # What is told --------------------------------------------------------------------------------

    def sent(self, session: Session, data: bytes) -> None:
        """These bytes have left."""
        talk = self.talks.get(session.session_id)
        if talk is None:
            return
        self.latest_clock = max(self.latest_clock, self.broker.clock.now)
        frames, talk.told = split_frames(talk.told + data)
        for frame in frames:
            kind, key, number, last, content = parse_frame(frame)
            if kind == DELIVER:
                talk.delivery = (key, number, last)
            elif kind in (MESSAGE, ENVELOPE):
                self._delivered(talk, key, number, content)
            elif kind == CONFIRM:
                self._confirmed(talk, number)
            elif kind == CONNECT and talk.version == 2:
                reply = msgspec.json.decode(content)
                talk.next = reply["next"]
                if reply["bus"] == talk.bus:
                    self._goes_on(talk, reply["lost"])
                if reply["bus"] == talk.bus:  # What is below `next` counts as confirmed, too.
                    talk.next = talk.unconfirmed
                    self._confirmed(talk, reply["next"], but=self.taken)
                self.world.say(talk.who, "goes on with", talk.next)
            elif kind == SUBSCRIBE:
                self._granted(talk, msgspec.json.decode(content))
            elif kind == UNSUBSCRIBE:
                talk.places.pop(key, None)
                talk.sent.pop(key, None)
            elif kind == ERROR:
                self._told_error(talk, last, number, key, msgspec.json.decode(content))
            elif kind == PURGE:
                self._purge_told(talk)
        if not session.outbox._unsent_bytes:
            talk.clean_tick = self.broker.tick_number
            talk.clean_clock = self.broker.clock.now

    def _is_there(self, class_id: int, wish: dict[str, Any]) -> bool:
        """Whether anybody was told that it is there: who makes it may hear so later than others."""
        key = MessageClass.position_key(wish.get("durable") or "", wish.get("group") or "")
        return (class_id, key) in self.places

    def _granted(self, talk: Talk, reply: dict[str, Any]) -> None:
        class_id, number, wish = talk.asked.popleft()
        durable, group = wish.get("durable") or "", wish.get("group") or ""
        channels = tuple(wish.get("channels", []))
        cls = self.broker.classes[class_id]
        position = cls.named_positions.get(MessageClass.position_key(durable, group))
        ticks = self.broker.settings.ack_timeout
        if position is not None:
            ticks = position.delivery_policy.ack_timeout_ticks
        if not (durable or group):
            place = Place(class_id, (f"plain {talk.who} {number}", ""), channels, reply["cursor"])
            place.first = reply["cursor"]
        else:
            key = (class_id, MessageClass.position_key(durable, group))
            known = self.places.get(key)
            if known is not None and not (reply["resumed"] or wish["was_there"]):
                known.since = min(known.since, reply["cursor"])
                reply["cursor"] = max(known.first, reply["cursor"])
            elif known is None or not reply["resumed"]:
                self.demand(
                    known is None or not known.durable or bool(self._gone),
                    "durables stay",
                    f"{durable} of class {class_id} is new to the bus",
                )
                known = Place(class_id, (durable, group), channels, reply["cursor"])
                known.first = reply["cursor"]
                known.granted = len(self.log.get(class_id, []))
                self.places[key] = known
            place = known
            place.first = reply["cursor"]
            if not place.is_group:
                self.demand(
                    not (s := {s for s in place.acked if s >= reply["cursor"]}),
                    "a position goes on where it was",
                    f"{durable}: {s}",
                )
        if wish.get("start") == "last_values":
            self._wants_values(place)
        place.ticks = ticks
        place.by_key = bool(wish.get("by_key"))
        talk.places[number] = place
        talk.left.discard(number)
        talk.limits[number] = wish.get("max_in_flight") or (256 if group else 65_536)
        talk.last[number] = -1
        talk.sent[number] = {}

    def _told_error(
        self, talk: Talk, about: int, number: int, class_id: int, error: dict[str, Any]
    ) -> None:
        self.count(f"error {error['code']}")
        self.world.say("to", talk.who, error["code"], number, error["count"])
        if about in (MESSAGE, ENVELOPE):
            numbers = range(number, number + error["count"])
            self._was_refused(talk, class_id, numbers, error["code"])
        elif about == SUBSCRIBE:
            talk.asked.popleft()
        elif about == PURGE:
            talk.purges.popleft()

    def _confirmed(
        self, talk: Talk, following: int, *, but: Collection[bytes] = frozenset()
    ) -> None:
        self.world.say("to", talk.who, "confirmed up to", following)
        for number in range(talk.next, following):
            token = self.numbers.get((talk.who, number))
            if token is None or token in self.refused_tokens | self.confirmed or token in but:
                continue
            if token in self.taken and token not in self.at:
                continue  # A crash took it, and left that its number is used.
            self.demand(token in self.at, "what is confirmed is stored", f"{token!r} of {talk.who}")
            self.confirmed.add(token)
            self._is_named(self.at[token][0])
            self.count("confirmed")
        talk.next = max(talk.next, following)

    def _delivered(self, talk: Talk, class_id: int, sequence: int, content: bytes) -> None:
        attempt, number = 1, class_id
        if talk.version == 2:
            named, attempt, number = talk.delivery
            self.demand(named == class_id, "Deliver names what follows", talk.delivery, class_id)
            if number == 0:
                self.count("fetched")
                self._is_whole(talk, class_id, sequence, content)
                return
        place = talk.places.get(number)
        self.world.say(
            "to",
            talk.who,
            f"{number}: {sequence} of class {class_id}, attempt {attempt},",
            token_of(content).decode(),
        )
        self.demand(place is not None, "nothing comes for who did not ask", talk.who, number)
        assert place is not None
        self._is_whole(talk, class_id, sequence, content)
        name = f"{sequence} of class {class_id}, attempt {attempt}, to {place.key} ({talk.who})"
        self.demand(
            sequence not in place.acked or sequence in place.excused,
            "what is acknowledged does not come again",
            name,
        )
        self._is_not_purged(place, sequence, name)
        self._is_in_time(talk, place, number, sequence, attempt, name)
        is_first = attempt == 1 and sequence > talk.last.get(number, -1)
        if talk.version == 2 and attempt == 1:
            timed = is_timed(token_of(content))
            self.demand(
                is_first or timed or (place.is_group),
                "first deliveries are in order",
                name,
                "behind",
                talk.last.get(number),
            )
            self._skips_nothing(place, sequence, name)
        if attempt == 1:
            talk.last[number] = max(talk.last.get(number, -1), sequence)
            if talk.version == 2:
                place.first = max(place.first, sequence + 1)
        if attempt == 1 and talk.version == 2:
            place.delivered += 1
        else:
            place.redelivered += 1
        self.count("delivered")
        self._fits(talk, place, number, name)
        if place.by_key:
            self._is_its_turn(place, sequence, name)
        sent = Sent((talk.session.session_id, number), talk.clean_tick)
        if (place.class_id, sequence) in talk.overtaken:
            talk.overtaken.remove((place.class_id, sequence))
        else:
            place.sent[sequence] = sent
            if place.is_group:
                self._overtakes(talk, place, sequence, attempt)
        place.ever_sent.add(sequence)
        talk.sent.setdefault(number, {})[sequence] = sent

    def _is_whole(self, talk: Talk, class_id: int, sequence: int, content: bytes) -> None:
        log = self.log[class_id]
        self.demand(sequence < len(log), "what is sent is stored", class_id, sequence)
        stored = log[sequence]
        self.demand(
            not stored or content == stored or (talk.version == 1 and stored.endswith(content)),
            "messages are relayed as they came",
            f"{content!r}, was {stored!r}",
        )

    def _skips_nothing(self, place: Place, sequence: int, name: str) -> None:
        """Between two first deliveries nothing lies that is for it."""
        if place.is_group:
            return
        log = self.log[place.class_id]
        lowest = max(place.first, place.since)
        cls = self.broker.classes[place.class_id]
        if (
            cls.full_policy is FullPolicy.DROP_OLDEST
        ):  # What there was no room for is looked at later.
            lowest = max(lowest, cls.ring.floor)
        for between in range(lowest, sequence):
            content = log[between]
            if not content or between in place.sent or between in place.ever_acked:
                continue
            if self.is_gone(place, between):
                continue
            token = token_of(content)
            self.demand(
                is_timed(token) or not self.is_for(place, token),
                "nothing is left out",
                f"{between} {token!r} before {name}",
            )

    # The end -------------------------------------------------------------------------------------

    def finish(self, processed: dict[tuple[int, str], set[bytes]], broker: Broker) -> None:
        """All is calm, everybody was there and has taken what there was. `processed` says what
        each durable's and group's consumers have acknowledged, by class and name."""
        broker.check_invariants()
        self.account(broker)
        for place in self.places.values():
            if not place.durable:
                continue
            name = place.durable
            done = processed.get((place.class_id, name), set())
            dead = self.dead.get((place.class_id, name), set())
            for sequence in self._needed_at_all(place):
                token = token_of(self.log[place.class_id][sequence])
                self.demand(
                    token in done or sequence in dead,
                    "what is confirmed is delivered or a dead letter",
                    f"{token!r}, {sequence} of class {place.class_id}, for {name}",
                )
        for talk in self.talks.values():
            for place in talk.places.values():
                self._has_values(place)
        self._adds_up(broker)

    def _needed_at_all(self, place: Place) -> Iterable[int]:
        log = self.log[place.class_id]
        for sequence in range(place.since, len(log)):
            token = token_of(log[sequence]) if log[sequence] else b""
            if self.is_gone(place, sequence):
                continue
            if token and not is_timed(token) and self.is_for(place, token):
                yield sequence

    def _adds_up(self, broker: Broker) -> None:
        for cls in broker.classes.values():
            statistics = cls.statistics()
            self.demand(
                statistics.published + statistics.carried == len(self.log[cls.class_id]),
                "counters add up",
                "published",
            )
            for held in statistics.subscriptions:
                if not (held.durable or held.group):
                    continue
                place = self.places[
                    cls.class_id, MessageClass.position_key(held.durable, held.group)
                ]
                self.demand(
                    held.delivered + held.redelivered
                    == place.delivered + place.redelivered + place.lost,
                    "counters add up",
                    f"{place.key}: {held.delivered} delivered and {held.redelivered} again are "
                    f"counted, {place.delivered} and {place.redelivered} seen, {place.lost} lost",
                )
