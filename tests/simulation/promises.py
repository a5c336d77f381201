"""Checks of everything that the simulated bus sends.

The history consists of the bytes of each session, decoded by oracles. Of the broker only its rings,
windows and counters are read. Nothing is checked where the history does not determine the correct
result: a late ack, an expired message, a loss that a crash may cause. A broken promise raises
BrokenPromiseError at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from simplebus.core.broker.broker import Broker
from simplebus.core.errors import RemoteProtocolError
from simplebus.core.limits import PRODUCER_TAKEOVER_STEP
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
from tests.simulation.delivery_oracle import DeliveryChecks
from tests.simulation.history import (
    Delivery,
    PositionHistory,
    SessionHistory,
    is_timed,
    message_token,
    stored_content,
)
from tests.simulation.messages import parse_dead_letter
from tests.support.oracles import parse_ack, parse_frames


class PromiseChecker(DeliveryChecks):
    """Checks of one bus, over all its processes."""

    # Stored messages -----------------------------------------------------------------------------

    def observe(self, broker: Broker) -> None:
        """Record messages that were stored since the last call."""
        self.latest_clock = max(self.latest_clock, broker.clock.now)
        for cls in broker.classes.values():
            self.observe_class(cls)

    def observe_class(self, cls: MessageClass) -> None:
        """Record new messages of one class."""
        class_id, head = cls.class_id, cls.ring.head
        log = self.messages.setdefault(class_id, [])
        for sequence in range(len(log), head):
            content = stored_content(cls, sequence) if sequence >= cls.ring.floor else b""
            log.append(content)
            if not content and cls.has_last_values:
                self.unseen_count += 1
            if content:
                self._accepted(cls, sequence, content)

    def _accepted(self, cls: MessageClass, sequence: int, content: bytes) -> None:
        letter = parse_dead_letter(content)
        if letter is not None:
            of, name, number = letter
            self.dead_letters.setdefault((of, name), set()).add(number)
            self.count("dead letters")
            return
        token = message_token(content)
        if cls.has_last_values and (older := self._find_older(cls.class_id, sequence, token)) >= 0:
            self.copies.setdefault(cls.class_id, set()).update((sequence, older))
            self.count("carried")
            return
        self.times[cls.class_id, sequence] = self.broker.clock.now
        self.check(
            token not in self.location_by_token or token in self.possible_duplicates,
            "a message number is stored once",
            f"{token!r} is {self.location_by_token.get(token)} and {(cls.class_id, sequence)}",
        )
        self.location_by_token.setdefault(token, (cls.class_id, sequence))
        self.count("accepted")

    def _find_older(self, class_id: int, end_sequence: int, token: bytes) -> int:
        """Return a lower sequence of the same message, of which a last value is a copy, or -1."""
        if token in self.location_by_token:
            return self.location_by_token[token][1]
        log = self.messages[class_id][:end_sequence]
        return next(
            (n for n, older in enumerate(log) if older and message_token(older) == token), -1
        )

    # Sessions ------------------------------------------------------------------------------------

    def session_opened(self, session: Session) -> None:
        self.session_histories[session.session_id] = SessionHistory(
            session, f"session {session.session_id} of {session.peer}"
        )

    def session_closed(self, session: Session) -> None:
        session_history = self.session_histories.pop(session.session_id)
        self._count_unsent_messages(session_history)
        for position_history in session_history.position_histories.values():
            for sent in position_history.sent.values():
                if sent.holder[0] == session.session_id:
                    sent.is_open = False

    def _count_unsent_messages(self, session_history: SessionHistory) -> None:
        """Count the messages that the server has taken for a connection, but not sent."""
        unsent_bytes = bytes(session_history.session.outbox._unsent_bytes)
        frames, _ = parse_frames(session_history.partial_sent + unsent_bytes)
        delivery = session_history.delivery
        for kind, class_id, message_id, last, _ in frames:
            if kind == DELIVER:
                delivery = (class_id, message_id, last)
            elif kind in (MESSAGE, ENVELOPE):
                number = delivery[2] if session_history.version == 2 else class_id
                if number in session_history.position_histories:
                    session_history.position_histories[number].lost += 1

    def session_failed(self, session: Session, error: RemoteProtocolError) -> None:
        """Record a protocol error: the last bytes were applied only up to some frame."""
        session_history = self.session_histories[session.session_id]
        for position_history, sequence in session_history.late_acks:
            position_history.acked.discard(sequence)
        self.check(
            error.reason in ("taken_over", "name_in_use", "heartbeat_timeout", "stalled"),
            "sessions are closed only for expected reasons",
            f"{session.peer}: {error.sentence}",
        )

    # Received bytes ------------------------------------------------------------------------------

    def bytes_received(self, session: Session, data: bytes) -> None:
        """Record bytes that are about to be applied."""
        session_history = self.session_histories[session.session_id]
        session_history.late_acks.clear()
        frames, session_history.partial_received = parse_frames(
            session_history.partial_received + data
        )
        for kind, key, number, last, content in frames:
            self.world.trace(
                "from", session_history.publisher, chr(kind), key, number, last, content[:40]
            )
            if not session_history.version:
                session_history.version = 2 if content.lstrip()[:1] == b"{" else 1
            if kind == CONNECT and session_history.version == 2:
                spec = msgspec.json.decode(content or b"{}")
                if spec.get("name"):
                    session_history.publisher, session_history.is_named = spec["name"], True
                if "unconfirmed" in spec:
                    session_history.unconfirmed, session_history.bus = (
                        spec["unconfirmed"],
                        spec["bus"],
                    )
            elif kind in (MESSAGE, ENVELOPE):
                token = message_token(content)
                self.count("published")
                if not session_history.is_named:
                    self.possible_duplicates.add(token)
                if session_history.version == 2:
                    self.numbers[session_history.publisher, number] = token
            elif kind == SUBSCRIBE:
                if session_history.version == 1:
                    self._subscribed_v1(session_history, key)
                else:
                    spec = msgspec.json.decode(content or b"{}")
                    spec["was_there"] = self._is_there(key, spec)
                    session_history.pending_subscribes.append((key, last, spec))
            elif kind == UNSUBSCRIBE:
                session_history.ended_subscriptions.add(key)
                for sent in session_history.sent.get(key, {}).values():
                    sent.is_open = False
            elif kind == PURGE:
                spec = msgspec.json.decode(content)
                self._record_purge_request(session_history, key, spec["first"], spec["last"])
            elif kind == ACK:
                ends = parse_ack(content)
                assert ends is not None
                self._acked(session_history, key, range(*ends))
            elif kind in (NACK, WORKING):
                ends = parse_ack(content.split(b" ")[0])
                assert ends is not None
                self._record_nack(session_history, key, range(*ends))

    def _subscribed_v1(self, session_history: SessionHistory, class_id: int) -> None:
        if class_id not in session_history.position_histories:
            position = (f"v1 {session_history.publisher}", "")
            position_history = PositionHistory(
                class_id, position, (), len(self.messages.get(class_id, []))
            )
            position_history.ticks = self.broker.settings.ack_timeout
            session_history.position_histories[class_id] = position_history
            session_history.last[class_id] = -1

    def _acked(self, session_history: SessionHistory, number: int, ids: range) -> None:
        for (
            class_id,
            subscription_number,
            spec,
        ) in session_history.pending_subscribes:  # It may be granted without a reply yet.
            key = MessageClass.position_key(spec.get("durable") or "", spec.get("group") or "")
            if (
                subscription_number == number
                and (known_history := self.position_histories.get((class_id, key))) is not None
            ):
                known_history.ever_acked |= known_history.ever_sent & set(ids)
        position_history = session_history.position_histories.get(number)
        if position_history is None or number in session_history.ended_subscriptions:
            return
        sent = session_history.sent.get(number, {})
        tick = self.broker.tick_number
        position_history.ever_acked |= position_history.ever_sent & set(ids)
        for sequence in sorted(sent.keys() & set(ids)):
            if position_history.is_group:
                sent_message = position_history.sent.get(sequence)
                if sent_message is None or sent_message.holder != (
                    session_history.session.session_id,
                    number,
                ):
                    continue
                if not sent_message.is_open or tick >= sent_message.tick + position_history.ticks:
                    continue
            if sequence not in position_history.acked:
                self.count("acked")
                position_history.acked.add(sequence)
                session_history.late_acks.append((position_history, sequence))
                position_history.excused |= self._unsent_sequences(position_history)

    def _unsent_sequences(self, position_history: PositionHistory) -> set[int]:
        """Return the messages that were copied for sending and not sent."""
        found = set()
        for session_history in self.session_histories.values():
            if (
                position_history in session_history.position_histories.values()
                and session_history.session.outbox._unsent_bytes
            ):
                frames, _ = parse_frames(
                    session_history.partial_sent
                    + bytes(session_history.session.outbox._unsent_bytes)
                )
                for kind, class_id, message_id, _, _ in frames:
                    if kind in (MESSAGE, ENVELOPE) and class_id == position_history.class_id:
                        found.add(message_id)
        return found

    def _record_nack(self, session_history: SessionHistory, number: int, ids: range) -> None:
        """Record a nack or working: the time of the redelivery is not checked."""
        position_history = session_history.position_histories.get(number)
        if position_history is None:
            return
        for sequence in session_history.sent.get(number, {}).keys() & set(ids):
            session_history.sent[number][sequence].is_open = False
        position_history.rejected |= self._unsent_sequences(position_history) & set(ids)
        self.count("put off")

    # Sent bytes ----------------------------------------------------------------------------------

    def bytes_sent(self, session: Session, data: bytes) -> None:
        """Record sent bytes."""
        session_history = self.session_histories.get(session.session_id)
        if session_history is None:
            return
        self.latest_clock = max(self.latest_clock, self.broker.clock.now)
        frames, session_history.partial_sent = parse_frames(session_history.partial_sent + data)
        for kind, key, number, last, content in frames:
            if kind == DELIVER:
                session_history.delivery = (key, number, last)
            elif kind in (MESSAGE, ENVELOPE):
                self._delivered(session_history, key, number, content)
            elif kind == CONFIRM:
                self._confirmed(session_history, number)
            elif kind == CONNECT and session_history.version == 2:
                reply = msgspec.json.decode(content)
                session_history.next = reply["next"]
                if reply["bus"] == session_history.bus:
                    self._check_lost_count(session_history, reply["lost"])
                step = reply["next"] - session_history.unconfirmed
                # What is below `next` counts as confirmed, too, unless the publisher sends its
                # messages again with new numbers.
                if reply["bus"] == session_history.bus and step < PRODUCER_TAKEOVER_STEP:
                    session_history.next = session_history.unconfirmed
                    self._confirmed(session_history, reply["next"], but=self.lost_tokens)
                self.world.trace(session_history.publisher, "goes on with", session_history.next)
            elif kind == SUBSCRIBE:
                self._granted(session_history, msgspec.json.decode(content))
            elif kind == UNSUBSCRIBE:
                session_history.position_histories.pop(key, None)
                session_history.sent.pop(key, None)
            elif kind == ERROR:
                self._error_sent(session_history, last, number, key, msgspec.json.decode(content))
            elif kind == PURGE:
                self._record_purge_reply(session_history)
        if not session.outbox._unsent_bytes:
            session_history.clean_tick = self.broker.tick_number
            session_history.clean_clock = self.broker.clock.now

    def _is_there(self, class_id: int, spec: dict[str, Any]) -> bool:
        """Return True if any session received a reply that the position exists."""
        key = MessageClass.position_key(spec.get("durable") or "", spec.get("group") or "")
        return (class_id, key) in self.position_histories

    def _granted(self, session_history: SessionHistory, reply: dict[str, Any]) -> None:
        class_id, number, spec = session_history.pending_subscribes.popleft()
        durable, group = spec.get("durable") or "", spec.get("group") or ""
        channels = tuple(spec.get("channels", []))
        cls = self.broker.classes[class_id]
        position = cls.named_positions.get(MessageClass.position_key(durable, group))
        ticks = self.broker.settings.ack_timeout
        if position is not None:
            ticks = position.delivery_policy.ack_timeout_ticks
        if not (durable or group):
            position_history = PositionHistory(
                class_id,
                (f"plain {session_history.publisher} {number}", ""),
                channels,
                reply["cursor"],
            )
            position_history.first = reply["cursor"]
        else:
            key = (class_id, MessageClass.position_key(durable, group))
            known_history = self.position_histories.get(key)
            if known_history is not None and not (reply["resumed"] or spec["was_there"]):
                known_history.since = min(known_history.since, reply["cursor"])
                reply["cursor"] = max(known_history.first, reply["cursor"])
            elif known_history is None or not reply["resumed"]:
                self.check(
                    known_history is None or not known_history.durable,
                    "durables are not forgotten",
                    f"{durable} of class {class_id} is new to the bus",
                )
                known_history = PositionHistory(
                    class_id, (durable, group), channels, reply["cursor"]
                )
                known_history.first = reply["cursor"]
                known_history.granted = len(self.messages.get(class_id, []))
                self.position_histories[key] = known_history
            position_history = known_history
            position_history.first = reply["cursor"]
            if not position_history.is_group:
                self.check(
                    not (s := {s for s in position_history.acked if s >= reply["cursor"]}),
                    "a position continues where it was",
                    f"{durable}: {s}",
                )
        if spec.get("start") == "last_values":
            self._record_expected_values(position_history)
        position_history.ticks = ticks
        position_history.by_key = bool(spec.get("by_key"))
        session_history.position_histories[number] = position_history
        session_history.ended_subscriptions.discard(number)
        session_history.limits[number] = spec.get("max_in_flight") or (256 if group else 65_536)
        session_history.last[number] = -1
        session_history.sent[number] = {}

    def _error_sent(
        self,
        session_history: SessionHistory,
        request_kind: int,
        number: int,
        class_id: int,
        error: dict[str, Any],
    ) -> None:
        self.count(f"error {error['code']}")
        self.world.trace("to", session_history.publisher, error["code"], number, error["count"])
        if request_kind in (MESSAGE, ENVELOPE):
            numbers = range(number, number + error["count"])
            self._record_refusals(session_history, class_id, numbers, error["code"])
        elif request_kind == SUBSCRIBE:
            session_history.pending_subscribes.popleft()
        elif request_kind == PURGE:
            session_history.pending_purges.popleft()

    def _confirmed(
        self,
        session_history: SessionHistory,
        next_number: int,
        *,
        but: Collection[bytes] = frozenset(),
    ) -> None:
        self.world.trace("to", session_history.publisher, "confirmed up to", next_number)
        for number in range(session_history.next, next_number):
            token = self.numbers.get((session_history.publisher, number))
            if token is None or token in self.refused_tokens | self.confirmed or token in but:
                continue
            if token in self.lost_tokens and token not in self.location_by_token:
                continue  # A crash lost it, but its number stays used.
            if self.unseen_count and token not in self.location_by_token:
                self.unseen_count -= 1
                continue  # A full class dropped its value in the turn that stored it.
            self.check(
                token in self.location_by_token,
                "what is confirmed is stored",
                f"{token!r} of {session_history.publisher}",
            )
            self.confirmed.add(token)
            self._record_class_name(self.location_by_token[token][0])
            self.count("confirmed")
        session_history.next = max(session_history.next, next_number)

    def _delivered(
        self, session_history: SessionHistory, class_id: int, sequence: int, content: bytes
    ) -> None:
        attempt, number = 1, class_id
        if session_history.version == 2:
            named, attempt, number = session_history.delivery
            self.check(
                named == class_id, "Deliver names what follows", session_history.delivery, class_id
            )
            if number == 0:
                self.count("fetched")
                self._check_content(session_history, class_id, sequence, content)
                return
        position_history = session_history.position_histories.get(number)
        self.world.trace(
            "to",
            session_history.publisher,
            f"{number}: {sequence} of class {class_id}, attempt {attempt},",
            message_token(content).decode(),
        )
        self.check(
            position_history is not None,
            "messages are sent to subscribers only",
            session_history.publisher,
            number,
        )
        assert position_history is not None
        self._check_content(session_history, class_id, sequence, content)
        name = (
            f"{sequence} of class {class_id}, attempt {attempt}, to {position_history.key} "
            f"({session_history.publisher})"
        )
        self.check(
            sequence not in position_history.acked or sequence in position_history.excused,
            "acked messages are not redelivered",
            name,
        )
        self._check_not_purged(position_history, sequence, name)
        self._check_timing(session_history, position_history, number, sequence, attempt, name)
        is_first = attempt == 1 and sequence > session_history.last.get(number, -1)
        if session_history.version == 2 and attempt == 1:
            timed = is_timed(message_token(content))
            self.check(
                is_first or timed or (position_history.is_group),
                "first deliveries are in order",
                name,
                "behind",
                session_history.last.get(number),
            )
            self._check_nothing_skipped(position_history, sequence, name)
        if attempt == 1:
            session_history.last[number] = max(session_history.last.get(number, -1), sequence)
            if session_history.version == 2:
                position_history.first = max(position_history.first, sequence + 1)
        if attempt == 1 and session_history.version == 2:
            position_history.delivered += 1
        else:
            position_history.redelivered += 1
        self.count("delivered")
        self._check_in_flight_limit(session_history, position_history, number, name)
        if position_history.by_key:
            self._check_key_order(position_history, sequence, name)
        sent = Delivery((session_history.session.session_id, number), session_history.clean_tick)
        # Copied for sending before the subscription ended, it is sent to others, too.
        is_ended = number in session_history.ended_subscriptions
        sent.is_open = sequence not in position_history.rejected and not is_ended
        position_history.rejected.discard(sequence)
        if (position_history.class_id, sequence) in session_history.overtaken:
            session_history.overtaken.remove((position_history.class_id, sequence))
        else:
            position_history.sent[sequence] = sent
            if position_history.is_group:
                self._record_overtaken(session_history, position_history, sequence, attempt)
        position_history.ever_sent.add(sequence)
        session_history.sent.setdefault(number, {})[sequence] = sent

    def _check_content(
        self, session_history: SessionHistory, class_id: int, sequence: int, content: bytes
    ) -> None:
        log = self.messages[class_id]
        self.check(sequence < len(log), "sent messages are stored", class_id, sequence)
        stored = log[sequence]
        self.check(
            not stored
            or content == stored
            or (session_history.version == 1 and stored.endswith(content)),
            "messages are delivered unchanged",
            f"{content!r}, was {stored!r}",
        )

    def _check_nothing_skipped(
        self, position_history: PositionHistory, sequence: int, name: str
    ) -> None:
        """Check that no message for the position lies between two first deliveries."""
        if position_history.is_group:
            return
        log = self.messages[position_history.class_id]
        lowest = max(position_history.first, position_history.since)
        cls = self.broker.classes[position_history.class_id]
        if cls.full_policy is FullPolicy.DROP_OLDEST:  # Dropped messages are checked later.
            lowest = max(lowest, cls.ring.floor)
        for skipped in range(lowest, sequence):
            content = log[skipped]
            if (
                not content
                or skipped in position_history.sent
                or skipped in position_history.ever_acked
            ):
                continue
            if self.is_gone(position_history, skipped):
                continue
            token = message_token(content)
            if cls.has_last_values and (
                0 <= self._find_older(position_history.class_id, skipped, token) < lowest
            ):
                continue  # A copy of a value from before the position began.
            self.check(
                is_timed(token) or not self.is_for(position_history, token),
                "first deliveries skip no message",
                f"{skipped} {token!r} before {name}",
            )

    # The end -------------------------------------------------------------------------------------

    def finish(self, processed: dict[tuple[int, str], set[bytes]], broker: Broker) -> None:
        """Check the final state: everything was delivered or dead-lettered.

        `processed` are the messages acked by the consumers of each class and durable or group.
        """
        broker.check_invariants()
        self.account(broker)
        for position_history in self.position_histories.values():
            if not position_history.durable:
                continue
            name = position_history.durable
            finished = processed.get((position_history.class_id, name), set())
            dead = self.dead_letters.get((position_history.class_id, name), set())
            for sequence in self._needed_at_all(position_history):
                token = message_token(self.messages[position_history.class_id][sequence])
                self.check(
                    token in finished or sequence in dead,
                    "confirmed messages are delivered or dead-lettered",
                    f"{token!r}, {sequence} of class {position_history.class_id}, for {name}",
                )
        for session_history in self.session_histories.values():
            for position_history in session_history.position_histories.values():
                self._check_last_values(position_history)
            self._count_unsent_messages(session_history)
        self._check_counters(broker)

    def _needed_at_all(self, position_history: PositionHistory) -> Iterable[int]:
        log = self.messages[position_history.class_id]
        for sequence in range(position_history.since, len(log)):
            token = message_token(log[sequence]) if log[sequence] else b""
            if self.is_gone(position_history, sequence):
                continue
            if token and not is_timed(token) and self.is_for(position_history, token):
                yield sequence

    def _check_counters(self, broker: Broker) -> None:
        for cls in broker.classes.values():
            statistics = cls.statistics()
            self.check(
                statistics.published + statistics.carried == len(self.messages[cls.class_id]),
                "counters add up",
                "published",
            )
            for subscription in statistics.subscriptions:
                if not (subscription.durable or subscription.group):
                    continue
                key = (
                    cls.class_id,
                    MessageClass.position_key(subscription.durable, subscription.group),
                )
                history = self.position_histories.get(key)
                if history is None:  # Its client was gone before the reply.
                    is_unused = not subscription.delivered and not subscription.redelivered
                    self.check(is_unused, "counters add up", f"{key}: delivered, but never used")
                    continue
                self.check(
                    subscription.delivered + subscription.redelivered
                    == history.delivered + history.redelivered + history.lost,
                    "counters add up",
                    f"{history.key}: {subscription.delivered} delivered and "
                    f"{subscription.redelivered} again are counted, {history.delivered} and "
                    f"{history.redelivered} seen, {history.lost} lost",
                )
