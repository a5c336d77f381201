"""Model of a bus with version 2 peers, compared with the real one after every step.

The model keeps a set of undelivered sequences for each position. A sequence leaves the set when it
is acknowledged after its delivery, or expires. At the end every set is empty. Only the storage
order of messages of several publishers is taken from the bus. Copies made for a peer before an
event may still arrive after it.

    published ─► unconfirmed ─► stored ─► undelivered per position ─► delivered ─► acknowledged
                                   └────► backlog, if there is no position
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from simplebus.core.broker.broker import NO_ACTIONS, Settings
from simplebus.core.limits import Limits
from simplebus.core.protocol.envelope_batch import decode
from simplebus.core.protocol.requests import SubscribeRequest
from simplebus.core.ring.ring import Ring
from tests.behaviour import wire_peer_v2
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import Version2Peer, connect_request
from tests.core.channel.channel_oracle import is_match
from tests.models.version2_state import (
    ACK_TIMEOUT,
    CLASSES,
    ModelMessage,
    ModelPosition,
    ModelPublisher,
    StoredMessage,
    Version2ModelPeer,
)
from tests.support.oracles import ID_COUNT, AckOracle, parse_frame, split_frames


class Version2Model:
    """The bus, its peers, and the model of both."""

    def __init__(
        self,
        *,
        class_messages: int = 12,
        first_sequence: int = 0,
        first_number: int = 0,
        trusting: bool = False,
    ) -> None:
        limits = Limits(
            class_messages=class_messages,
            frame_bytes=10_000,
            class_bytes=1 << 18,
            total_bytes=1 << 20,
            hello_seconds=1e9,
            frame_seconds=1e9,
            stall_seconds=1e9,
        )
        settings = Settings(
            limits=limits, ack_timeout=ACK_TIMEOUT, heartbeat_seconds=0, deliveries_max=0
        )
        self.bus = BrokerHarness(settings)
        self.bus.skips_checks = trusting
        self.broker = self.bus.broker
        self.now = self.broker.clock.now = 1000.0
        self.peers: list[Version2ModelPeer] = []
        self.authors = [ModelPublisher(name, first_number) for name in ("ann", "bob")]
        self.stored: dict[int, dict[int, StoredMessage]] = {class_id: {} for class_id in CLASSES}
        self.stored_payloads: set[bytes] = set()
        """Payloads that were stored."""
        self.order: dict[tuple[str, int], int] = {}
        """Last stored message by publisher and class."""
        self.positions: dict[int, list[ModelPosition]] = {class_id: [] for class_id in CLASSES}
        self.backlog: dict[int, set[int]] = {class_id: set() for class_id in CLASSES}
        self.dead: list[tuple[str, str, str | None]] = []
        """Terminated messages: class, sequence and error."""
        self.messages = 0
        self.first_sequence = first_sequence
        self.bus.peer(b"").send(connect_request(*CLASSES))
        for class_id in CLASSES:
            self.begin(class_id, first_sequence)
        for author in self.authors:
            claim = self.broker.subscription_manager.producer_states.claim_name(
                author.name, author.name, 999
            )
            publisher = claim.producer
            publisher.next_number = first_number
            self.broker.subscription_manager.producer_states.mark_disconnected(publisher, self.now)

    def begin(self, class_id: int, first: int) -> None:
        """Start the class at sequence `first`, and record stored messages from now on."""
        cls = self.broker.classes[class_id]
        ring: Ring = cls.ring
        ring.floor = ring.head = first
        cls.backlog_window.skip_to(first)
        append, append_one = ring.append, ring.append_one

        def append_recorded(*arguments: object) -> int:
            head = ring.head
            appended = append(*arguments)  # type: ignore[arg-type]
            for sequence in range(head, ring.head):
                self.record_stored(class_id, sequence, ring.copy_frame(sequence))
            return appended

        def append_one_recorded(*arguments: object) -> bool:
            appended_one = append_one(*arguments)  # type: ignore[arg-type]
            if appended_one:
                self.record_stored(class_id, ring.head - 1, ring.copy_frame(ring.head - 1))
            return appended_one

        ring.append, ring.append_one = append_recorded, append_one_recorded  # type: ignore[method-assign]

    def record_stored(self, class_id: int, sequence: int, frame: bytes) -> None:
        """Record a message that the bus has stored."""
        kind, frame_class_id, message_id, _, content = parse_frame(frame)
        assert (frame_class_id, message_id) == (class_id, sequence % ID_COUNT)
        payload = content[content.index(b"|") :] if kind == wire_peer_v2.ENVELOPE else content
        name, number = payload[1:].split(b".")[0].split(b"-")
        key = (name.decode(), class_id)
        author = next(a for a in self.authors if a.name == key[0])
        if payload not in self.stored_payloads:
            assert int(number) > self.order.get(key, -1), "out of its publisher's order"
            self.order[key] = int(number)
        else:
            assert payload in author.may_be_twice, "stored twice"
            author.may_be_twice.remove(payload)
        self.stored_payloads.add(payload)
        message = next(m for m in author.unconfirmed if m.payload == payload)
        expires = float("inf") if message.expires_ms is None else message.expires_ms / 1000
        opens = 0.0 if message.delay_ms is None else self.now + message.delay_ms / 1000
        assert sequence not in self.stored[class_id]
        self.stored[class_id][sequence] = StoredMessage(message, self.now + expires, opens)
        for position in self.positions[class_id]:
            if self.is_match(position, message):
                position.undelivered.add(sequence)
        if not self.positions[class_id]:
            self.backlog[class_id].add(sequence)

    def is_match(self, position: ModelPosition, message: ModelMessage) -> bool:
        patterns = position.request.channels
        return not patterns or any(is_match(p, message.channel) for p in patterns)

    # Publishing ----------------------------------------------------------------------------------

    def message(self, author: ModelPublisher, class_id: int, **fields: object) -> ModelMessage:
        self.messages += 1
        payload = b"|%s-%d." % (author.name.encode(), self.messages)
        return ModelMessage(class_id, payload, **fields)  # type: ignore[arg-type]

    def publish(self, author: ModelPublisher, *messages: ModelMessage) -> None:
        if author.peer is None:
            self.connect(author)
        assert author.peer is not None
        first = author.confirmed + len(author.unconfirmed)
        author.unconfirmed += messages
        frames = [m.frame((first + n) % ID_COUNT) for n, m in enumerate(messages)]
        author.peer.peer.send(b"".join(frames))
        self.observe()

    def connect(self, author: ModelPublisher) -> None:
        """Connect or reconnect. Unconfirmed messages are sent again, from the number that the bus
        expects.
        """
        model_peer = self.open(greet=False)
        former_peer, author.peer = author.peer, model_peer
        known_state = {"unconfirmed": author.confirmed % ID_COUNT} if author.is_displaced else {}
        model_peer.peer.send(
            connect_request(*CLASSES, name=author.name, instance=author.name, **known_state)
        )
        if former_peer is not None:  # Another connection took over its name.
            assert self.broker.end_turn().close[0][0] is former_peer.peer.session
            self.forget_peer(former_peer)
        [reply] = [
            received for received in model_peer.peer.receive_replies() if received.kind == "connect"
        ]
        if author.is_displaced:
            confirmed_ahead = (reply.content["next"] - author.confirmed) % ID_COUNT
            assert len(author.unconfirmed) < confirmed_ahead < ID_COUNT // 2, (
                "the publisher could mistake another program's number for its own"
            )
            author.confirmed, author.is_displaced = reply.content["next"], False
        else:
            self.confirm(author, reply.content["next"])
        first = author.confirmed
        repeated_frames = [
            m.frame((first + n) % ID_COUNT) for n, m in enumerate(author.unconfirmed)
        ]
        model_peer.peer.send(b"".join(repeated_frames))
        self.observe()

    def use_name_elsewhere(self, author: ModelPublisher, count: int) -> None:
        """Let another program use the publisher name for a while, with this many numbers."""
        if author.peer is None:
            peer = Version2Peer(self.bus, self.broker.open_session())
            peer.send(connect_request(name=author.name, instance="another"))
            [reply] = peer.receive_replies()
            first = reply.content["next"]
            numbers = [n % ID_COUNT for n in range(first, first + count)]
            peer.send(b"".join(wire_peer_v2.publish(9, number, b"refused") for number in numbers))
            peer.disconnect()
            author.is_displaced = True
            author.may_be_twice |= {message.payload for message in author.unconfirmed}
            self.observe()

    def repeat(self, author: ModelPublisher, count: int) -> None:
        """Send confirmed or unconfirmed messages again, without effect."""
        if author.peer is not None and author.unconfirmed:
            chosen = author.unconfirmed[:count]
            frames = [m.frame((author.confirmed + n) % ID_COUNT) for n, m in enumerate(chosen)]
            author.peer.peer.send(b"".join(frames))
            self.observe()

    def confirm(self, author: ModelPublisher, next_number: int) -> None:
        count = (next_number - author.confirmed) % ID_COUNT
        assert count <= len(author.unconfirmed), "confirmed a number that was not published"
        for message in author.unconfirmed[:count]:
            assert message.payload in self.stored_payloads, "confirmed but not stored"
        author.unconfirmed = author.unconfirmed[count:]
        author.confirmed += count

    # Connections ---------------------------------------------------------------------------------

    def open(self, *, greet: bool = True) -> Version2ModelPeer:
        model_peer = Version2ModelPeer(Version2Peer(self.bus, self.broker.open_session()))
        if greet:
            model_peer.peer.send(connect_request(*CLASSES))
            model_peer.peer.receive_replies()
        self.peers.append(model_peer)
        return model_peer

    def leave(self, model_peer: Version2ModelPeer) -> None:
        model_peer.peer.disconnect()
        self.forget_peer(model_peer)
        self.observe()

    def forget_peer(self, model_peer: Version2ModelPeer) -> None:
        self.peers.remove(model_peer)
        for author in self.authors:
            if author.peer is model_peer:
                author.peer = None
        for number in list(model_peer.subscriptions):
            self.detach(model_peer, number, forget=False)

    def subscribe(
        self, model_peer: Version2ModelPeer, class_id: int, number: int, request: SubscribeRequest
    ) -> None:
        if number in model_peer.subscriptions:
            return
        names = (request.durable, request.group)
        frame_class_id = [
            position
            for position in self.positions[class_id]
            if any(names) and (position.request.durable, position.request.group) == names
        ]
        clash = request.durable is not None and any(
            position.request.durable == request.durable and position not in frame_class_id
            for position in self.positions[class_id]
        )
        frame = wire_peer_v2.subscribe(class_id, number, **msgspec.to_builtins(request))
        if clash or (
            frame_class_id
            and (
                set(frame_class_id[0].request.channels) != set(request.channels)
                or (request.group is None and self.is_served(frame_class_id[0]))
            )
        ):
            model_peer.peer.send(frame)
            return
        if frame_class_id and not request.seek:
            position = frame_class_id[0]
        else:
            position = ModelPosition(request)
            positions, backlog = self.positions[class_id], self.backlog[class_id]
            ring = self.broker.classes[class_id].ring
            found: Iterable[int] = ()
            if request.start == "waiting" and (backlog or not positions):
                found = list(backlog)
                backlog.clear()
            elif request.start == "earliest":
                found = range(ring.floor, ring.head)
            stored = self.stored[class_id]
            position.undelivered = {s for s in found if self.is_match(position, stored[s].message)}
            position.inherited = set(position.undelivered)
            positions.append(position)
            if frame_class_id:
                position.idle_seconds = frame_class_id[0].idle_seconds
                positions.remove(frame_class_id[0])
        if request.idle_seconds is not None:
            position.idle_seconds = request.idle_seconds
        model_peer.subscriptions[number] = (class_id, position)
        model_peer.limits[number] = request.max_in_flight
        model_peer.peer.send(frame)
        self.observe()

    def unsubscribe(self, model_peer: Version2ModelPeer, number: int, *, forget: bool) -> None:
        if number in model_peer.subscriptions:
            model_peer.peer.send(wire_peer_v2.unsubscribe(number, forget=forget))
            self.detach(model_peer, number, forget=forget)
            self.observe()

    def is_served(self, position: ModelPosition, *other_peers: Version2ModelPeer) -> bool:
        talkers = (*self.peers, *other_peers)
        return any(
            position is held_position
            for t in talkers
            for _, held_position in t.subscriptions.values()
        )

    def detach(self, model_peer: Version2ModelPeer, number: int, *, forget: bool) -> None:
        class_id, position = model_peer.subscriptions.pop(number)
        own_sequences = {
            s for s, (holder, _) in position.in_flight.items() if holder == (model_peer, number)
        }
        for sequence in own_sequences:  # Redelivered at once or after its backoff.
            del position.in_flight[sequence]
        if self.is_served(position, model_peer):
            return
        if position.is_durable and not forget:
            position.idle_since = self.now
            return
        self.positions[class_id].remove(position)
        if not self.positions[class_id]:
            self.leave_behind(class_id, self.backlog[class_id] | position.undelivered)

    def leave_behind(self, class_id: int, expected: set[int]) -> set[int]:
        """Move undelivered messages to the backlog when the last position ends. Returns them."""
        waiting, stored = self.broker.classes[class_id].backlog_window, self.stored[class_id]
        ranges = waiting.unacked_ranges(waiting.floor, waiting.cursor)
        left_sequences = {s for a, b in ranges for s in range(a, b)}
        left_sequences |= {s for s in stored if s >= waiting.cursor}
        expired = {s for s in stored if stored[s].expires <= self.now}
        assert expected <= left_sequences | expired, "undelivered messages are not in the backlog"
        self.backlog[class_id] = left_sequences
        return left_sequences

    def forget_idle(self, heads: dict[int, int]) -> None:
        """Remove durables that were idle for too long, with their messages.

        Messages that waited for room and are stored now lie behind the earlier `heads` and stay.
        """
        for class_id, positions in self.positions.items():
            before = self.backlog[class_id]
            for position in list(positions):
                seconds = position.idle_seconds
                if seconds is None or self.is_served(position):
                    continue
                if self.now - position.idle_since >= seconds:
                    positions.remove(position)
                    if not positions:
                        left_sequences = self.leave_behind(class_id, before) - before
                        assert all(s >= heads[class_id] for s in left_sequences), (
                            "stored although no position needs it"
                        )

    # Consuming -----------------------------------------------------------------------------------

    def read_bytes(self, model_peer: Version2ModelPeer, max_bytes: int) -> None:
        data = model_peer.peer.read_bytes(max_bytes)
        for _ in range(100):  # Dead-lettering continues in the next turn.
            if len(data) == max_bytes or model_peer.peer.session.outbox.is_idle:
                break
            data += model_peer.peer.read_bytes(max_bytes - len(data))
        start = model_peer.received_bytes - len(model_peer.partial_frame)
        model_peer.received_bytes += len(data)
        frames, model_peer.partial_frame = split_frames(model_peer.partial_frame + data)
        for frame in frames:
            self.receive_frame(model_peer, frame, start)
            start += len(frame)
        model_peer.copied_until = (
            model_peer.received_bytes + model_peer.peer.session.outbox.pending_bytes
        )
        if len(data) < max_bytes:
            assert not model_peer.partial_frame
            self.check_all_received(model_peer)
        self.observe()

    def receive_frame(self, model_peer: Version2ModelPeer, frame: bytes, at: int) -> None:
        kind, class_id, message_id, last_field, content = parse_frame(frame)
        if kind == wire_peer_v2.DELIVER:
            model_peer.delivery_header = (class_id, last_field, message_id)
        elif kind == wire_peer_v2.CONFIRM:
            [author] = [a for a in self.authors if a.peer is model_peer]
            self.confirm(author, message_id)
        elif kind in (wire_peer_v2.MESSAGE, wire_peer_v2.ENVELOPE):
            assert model_peer.delivery_header[0] == class_id
            is_fresh = at >= model_peer.copied_until
            self.receive_message(model_peer, message_id, content, is_fresh=is_fresh)

    def receive_message(
        self, model_peer: Version2ModelPeer, message_id: int, content: bytes, *, is_fresh: bool
    ) -> None:
        class_id, number, attempt = model_peer.delivery_header
        if number not in model_peer.subscriptions:
            assert not is_fresh, "sent without a subscription"
            return
        class_of_subscription, position = model_peer.subscriptions[number]
        assert class_of_subscription == class_id
        stored = self.stored[class_id]
        head = self.broker.classes[class_id].ring.head
        sequence = AckOracle(floor=head).nearest_sequence(message_id)
        stored_message = stored[sequence]
        assert content.endswith(stored_message.message.payload), "another message's payload"
        sends = position.delivery_counts.get(sequence, 0)
        if not is_fresh:
            position.delivery_counts[sequence] = sends + 1
            if sequence in position.undelivered and position.request.group is None:
                self.record_in_flight(model_peer, number, position, sequence, ago=ACK_TIMEOUT)
            return
        assert sequence in position.undelivered, "not for this position, or acknowledged"
        assert stored_message.not_before <= self.now, "before its delivery time"
        assert self.now < stored_message.expires, "after its expiry"
        is_plain = position.request.group is None
        if is_plain and not position.is_durable and sequence not in position.inherited:
            assert attempt == sends + 1
        else:
            assert attempt > sends
        if sequence in position.in_flight:
            pause = self.broker.tick_number - position.in_flight[sequence][1]
            assert pause >= ACK_TIMEOUT, "redelivered before its ack timeout"
        assert position.not_before.get(sequence, 0.0) <= self.now, (
            "redelivered before its nack delay"
        )
        tick = self.broker.tick_number
        assert position.not_before_tick.get(sequence, 0) <= tick, "redelivered before its backoff"
        if (
            is_plain
            and not sends
            and sequence not in position.inherited
            and stored_message.not_before == 0.0
        ):
            for earlier in position.undelivered:
                if earlier < sequence and not {earlier} & (
                    position.delivery_counts.keys() | position.inherited
                ):
                    before = stored[earlier]
                    assert before.not_before or before.expires <= self.now, (
                        "an earlier message was skipped"
                    )
        position.delivery_counts[sequence] = sends + 1
        self.record_in_flight(model_peer, number, position, sequence)
        max_in_flight = model_peer.limits[number]
        if max_in_flight is not None and not position.is_durable:
            _, own_sequences = self.held_sequences(model_peer, number)
            own_sequences = [s for s in own_sequences if self.now < stored[s].expires]
            own_sequences = [s for s in own_sequences if not self.is_overdue(position, s)]
            assert len(own_sequences) <= max_in_flight, "more in flight than max_in_flight"

    def record_in_flight(
        self,
        model_peer: Version2ModelPeer,
        number: int,
        position: ModelPosition,
        sequence: int,
        *,
        ago: int = 0,
    ) -> None:
        """Record a delivery, with the latest tick in which it may have happened."""
        position.redeliverable.discard(sequence)
        position.not_before.pop(sequence, None)
        position.not_before_tick.pop(sequence, None)
        position.in_flight[sequence] = ((model_peer, number), self.broker.tick_number - ago)
        max_in_flight = position.request.max_deliveries
        if max_in_flight and position.delivery_counts[sequence] >= max_in_flight:
            position.undelivered.discard(sequence)  # Dead-lettered when its redelivery is due.

    def check_all_received(self, model_peer: Version2ModelPeer) -> None:
        """Check that an unlimited plain subscription has received everything that may be sent."""
        for number, (class_id, position) in model_peer.subscriptions.items():
            if position.request.group is not None or model_peer.limits[number] is not None:
                continue
            for sequence in position.undelivered:
                stored_message = self.stored[class_id][sequence]
                may_be_sent = stored_message.not_before <= self.now < stored_message.expires
                is_known = sequence in position.delivery_counts or sequence in position.inherited
                assert is_known or not may_be_sent, "not sent"
                is_due = position.not_before.get(sequence, self.now + 1) <= self.now
                is_due |= sequence in position.redeliverable
                if not position.is_durable:
                    tick = self.broker.tick_number
                    is_due |= position.not_before_tick.get(sequence, tick + 1) <= tick
                assert not (is_due and may_be_sent), "not redelivered"

    def held_sequences(
        self, model_peer: Version2ModelPeer, number: int
    ) -> tuple[ModelPosition, list[int]]:
        """Return the sequences that a subscription may decide on. Overdue ones leave a group's
        member.
        """
        _, position = model_peer.subscriptions[number]
        own_sequences = [
            s for s, (holder, _) in position.in_flight.items() if holder == (model_peer, number)
        ]
        if position.request.group is not None:
            own_sequences = [s for s in own_sequences if not self.is_overdue(position, s)]
        return position, sorted(own_sequences)

    def is_overdue(self, position: ModelPosition, sequence: int) -> bool:
        return self.broker.tick_number - position.in_flight[sequence][1] >= ACK_TIMEOUT

    def ack(
        self, model_peer: Version2ModelPeer, number: int, first: int, count: int, *, spanning: bool
    ) -> None:
        """Acknowledge some held messages: each alone, or with everything between them."""
        position, own_sequences = self.held_sequences(model_peer, number)
        chosen = own_sequences[first : first + count]
        between_sequences = set(range(chosen[0], chosen[-1])) if chosen else set()
        between_sequences -= set(own_sequences)
        # A client's ranges exclude messages that it has received and not processed. They may
        # include messages that other members hold. Messages of a predecessor count as sent.
        held_by_others = {
            s for s, (holder, _) in position.in_flight.items() if holder != (model_peer, number)
        }
        sent = position.delivery_counts.keys() | (position.inherited & position.undelivered)
        spanning &= not any(s in sent and s not in held_by_others for s in between_sequences)
        for a, b in self.ranges(chosen, spanning=spanning):
            model_peer.peer.send(wire_peer_v2.ack(number, a, b))
        for sequence in chosen:
            self.mark_settled(position, sequence)
        self.observe()

    def mark_settled(self, position: ModelPosition, sequence: int) -> None:
        del position.in_flight[sequence]
        position.undelivered.discard(sequence)
        position.redeliverable.discard(sequence)
        position.not_before.pop(sequence, None)
        position.not_before_tick.pop(sequence, None)

    def nack(
        self,
        model_peer: Version2ModelPeer,
        number: int,
        first: int,
        count: int,
        delay_ms: int | None,
    ) -> None:
        position, own_sequences = self.held_sequences(model_peer, number)
        for sequence in own_sequences[first : first + count]:
            at = sequence % ID_COUNT
            model_peer.peer.send(wire_peer_v2.nack(number, at, at + 1, delay_ms, b"not now"))
            if position.request.group is None and self.is_overdue(position, sequence):
                continue  # Redelivered without a nack.
            del position.in_flight[sequence]
            sends = position.delivery_counts[sequence]
            delay = position.backoff_seconds(sends) if delay_ms is None else delay_ms / 1000
            if delay is None:
                pause = position.pause_ticks(sends)
                position.not_before_tick[sequence] = self.broker.tick_number + pause
            elif delay > 0:
                position.not_before[sequence] = self.now + delay
            else:
                position.redeliverable.add(sequence)
        self.observe()

    def terminate(self, model_peer: Version2ModelPeer, number: int, first: int, count: int) -> None:
        """Reject some held messages for good."""
        class_id, _ = model_peer.subscriptions[number]
        position, own_sequences = self.held_sequences(model_peer, number)
        for sequence in own_sequences[first : first + count]:
            if sequence not in position.undelivered:
                continue  # It may be dead-lettered already.
            at = sequence % ID_COUNT
            error = f"never {number}"
            model_peer.peer.send(wire_peer_v2.nack(number, at, at + 1, "terminate", error.encode()))
            self.mark_settled(position, sequence)
            if self.now < self.stored[class_id][sequence].expires:
                self.dead.append((str(class_id), str(sequence), error))
        self.observe()

    def check_dead(self) -> None:
        """Check that terminated messages are dead letters with their reasons.

        A full class of dead letters drops the oldest.
        """
        found, dropped_count = [], 0
        for class_id in CLASSES:
            dead = self.broker.store.class_id_by_name.get(f"dead.{class_id}")
            ring = self.broker.classes[dead].ring if dead is not None else None
            if ring is not None:
                dropped_count += ring.floor
            for at in range(ring.floor, ring.head) if ring is not None else ():
                headers = dict(decode(parse_frame(ring.copy_frame(at))[4])[0].headers)
                if headers["dead-reason"] == "terminated":
                    found.append(
                        (headers["dead-class"], headers["dead-sequence"], headers.get("dead-error"))
                    )
        missing = set(self.dead) - set(found)
        assert len(missing) <= dropped_count, "terminated without a dead letter"
        self.broker.store.failure_reasons.check()

    def working(self, model_peer: Version2ModelPeer, number: int) -> None:
        position, own_sequences = self.held_sequences(model_peer, number)
        for sequence in own_sequences:
            if not self.is_overdue(position, sequence):
                at = sequence % ID_COUNT
                model_peer.peer.send(wire_peer_v2.working(number, at, at + 1))
                position.in_flight[sequence] = ((model_peer, number), self.broker.tick_number)
        self.observe()

    def ranges(self, chosen: list[int], *, spanning: bool) -> list[tuple[int, int]]:
        """Convert ids to ranges."""
        if spanning and chosen and chosen[0] // ID_COUNT == chosen[-1] // ID_COUNT:
            return [(chosen[0] % ID_COUNT, chosen[-1] % ID_COUNT + 1)]
        return [(s % ID_COUNT, s % ID_COUNT + 1) for s in chosen]

    # Time ----------------------------------------------------------------------------------------

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            heads = {class_id: self.broker.classes[class_id].ring.head for class_id in CLASSES}
            self.broker.tick()
            self.forget_idle(heads)
            self.observe()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.broker.clock.now = self.now
        if self.broker.next_wakeup <= self.now:
            self.broker.run_due_wakeups()
        self.observe()

    def observe(self) -> None:
        """Process the broker's notifications as the server does, and check its invariants."""
        while self.broker.end_turn() is not NO_ACTIONS:
            pass
        self.bus.check_invariants()

    # The end -------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Receive and acknowledge everything with all peers, until nothing is left."""
        for author in self.authors:
            if author.peer is None and author.unconfirmed:
                self.connect(author)
        trusting = self.bus.skips_checks
        idle_rounds = 0
        while idle_rounds < 70:
            start = sum(model_peer.received_bytes for model_peer in self.peers)
            self.bus.skips_checks = True  # To save time: everything is checked once a round.
            self.drain_positions_and_backlogs()
            before = -1
            while before < (before := sum(model_peer.received_bytes for model_peer in self.peers)):
                for model_peer in list(self.peers):
                    self.read_bytes(model_peer, 1 << 40)
                    for number in list(model_peer.subscriptions):
                        self.ack(model_peer, number, 0, 1 << 40, spanning=True)
            self.wait(1.0)
            self.bus.skips_checks = trusting
            self.tick()
            if not any(author.unconfirmed for author in self.authors) and self.is_done():
                break
            idle_rounds = idle_rounds + 1 if before == start else 0
        for author in self.authors:
            assert not author.unconfirmed, "never confirmed"
        self.check_dead()
        for class_id, positions in self.positions.items():
            for position in positions:
                expired = {
                    s for s in position.undelivered if self.stored[class_id][s].expires <= self.now
                }
                max_in_flight = position.request.max_deliveries
                assert position.undelivered <= expired | (
                    position.inherited if max_in_flight else set()
                ), "never sent"
            assert not len(self.broker.classes[class_id].ring), (
                "stored although no position needs it"
            )

    def is_done(self) -> bool:
        return not any(len(self.broker.classes[class_id].ring) for class_id in CLASSES)

    def drain_positions_and_backlogs(self) -> None:
        """Connect a peer to every idle position and every backlog."""
        for class_id, positions in self.positions.items():
            for position in positions:
                if not self.is_served(position):
                    request = msgspec.structs.replace(position.request, seek=False)
                    self.subscribe(self.open(), class_id, 1, request)
            cls = self.broker.classes[class_id]
            if self.backlog[class_id] or (not positions and len(cls.ring)):
                self.subscribe(self.open(), class_id, 1, SubscribeRequest())
