"""A version 2 bus in plain Python, beside the real one, which it watches at every step.

Rule 1: the model knows who is to be sent what: a set of sequences for each position. What leaves it
        was acknowledged after it was heard, or came too late. At the end every set is empty.
Rule 2: it looks up what it cannot know: in which order messages of several publishers were stored.
        All else it predicts: that each is stored once, in its publisher's order, and what may
        be sent to whom at this moment.
Rule 3: what was copied for a peer before something happened may still come behind it. So much, and
        no more, is forgiven.

    said ─► unconfirmed ─► stored ─► todo of each position ─► heard ─► acknowledged
                              └────► left, where nobody is there
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from simplebus.core.broker.broker import Settings
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
    Author,
    Message,
    Position,
    Stored,
    Talker,
)
from tests.support.oracles import (
    ID_COUNT,
    AckOracle,
    parse_frame,
    split_frames,
)


class World:
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
        self.talkers: list[Talker] = []
        self.authors = [Author(name, first_number) for name in ("ann", "bob")]
        self.stored: dict[int, dict[int, Stored]] = {class_id: {} for class_id in CLASSES}
        self.seen: set[bytes] = set()
        """Payloads that were stored."""
        self.order: dict[tuple[str, int], int] = {}
        """The last message stored, by author and class."""
        self.positions: dict[int, list[Position]] = {class_id: [] for class_id in CLASSES}
        self.backlog: dict[int, set[int]] = {class_id: set() for class_id in CLASSES}
        self.dead: list[tuple[str, str, str | None]] = []
        """What was terminated: class, sequence, and why."""
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
        """As if so many had been there before; and watch what is stored from now on."""
        cls = self.broker.classes[class_id]
        ring: Ring = cls.ring
        ring.floor = ring.head = first
        cls.backlog_window.skip_to(first)
        append, append_one = ring.append, ring.append_one

        def watched(*arguments: object) -> int:
            head = ring.head
            taken = append(*arguments)  # type: ignore[arg-type]
            for sequence in range(head, ring.head):
                self.accepted(class_id, sequence, ring.copy_frame(sequence))
            return taken

        def watched_one(*arguments: object) -> bool:
            done = append_one(*arguments)  # type: ignore[arg-type]
            if done:
                self.accepted(class_id, ring.head - 1, ring.copy_frame(ring.head - 1))
            return done

        ring.append, ring.append_one = watched, watched_one  # type: ignore[method-assign]

    def accepted(self, class_id: int, sequence: int, frame: bytes) -> None:
        """The bus has stored this."""
        kind, there, message_id, _, content = parse_frame(frame)
        assert (there, message_id) == (class_id, sequence % ID_COUNT)
        payload = content[content.index(b"|") :] if kind == wire_peer_v2.ENVELOPE else content
        name, number = payload[1:].split(b".")[0].split(b"-")
        key = (name.decode(), class_id)
        author = next(a for a in self.authors if a.name == key[0])
        if payload not in self.seen:
            assert int(number) > self.order.get(key, -1), "not in its publisher's order"
            self.order[key] = int(number)
        else:
            assert payload in author.may_be_twice, "stored twice"
            author.may_be_twice.remove(payload)
        self.seen.add(payload)
        message = next(m for m in author.unconfirmed if m.payload == payload)
        expires = float("inf") if message.expires_ms is None else message.expires_ms / 1000
        opens = 0.0 if message.delay_ms is None else self.now + message.delay_ms / 1000
        assert sequence not in self.stored[class_id]
        self.stored[class_id][sequence] = Stored(message, self.now + expires, opens)
        for position in self.positions[class_id]:
            if self.wants(position, message):
                position.todo.add(sequence)
        if not self.positions[class_id]:
            self.backlog[class_id].add(sequence)

    def wants(self, position: Position, message: Message) -> bool:
        patterns = position.asked.channels
        return not patterns or any(is_match(p, message.channel) for p in patterns)

    # Publishing ----------------------------------------------------------------------------------

    def message(self, author: Author, class_id: int, **more: object) -> Message:
        self.messages += 1
        payload = b"|%s-%d." % (author.name.encode(), self.messages)
        return Message(class_id, payload, **more)  # type: ignore[arg-type]

    def publish(self, author: Author, *messages: Message) -> None:
        if author.talker is None:
            self.connect(author)
        assert author.talker is not None
        first = author.confirmed + len(author.unconfirmed)
        author.unconfirmed += messages
        frames = [m.frame((first + n) % ID_COUNT) for n, m in enumerate(messages)]
        author.talker.peer.send(b"".join(frames))
        self.look()

    def connect(self, author: Author) -> None:
        """(Again.) What is unconfirmed is said again, from where the bus wants it."""
        talker = self.open(greet=False)
        former, author.talker = author.talker, talker
        known = {"unconfirmed": author.confirmed % ID_COUNT} if author.is_displaced else {}
        talker.peer.send(connect_request(*CLASSES, name=author.name, instance=author.name, **known))
        if former is not None:  # It was taken over from.
            assert self.broker.drain_closing()[0][0] is former.peer.session
            self.gone(former)
        [reply] = [said for said in talker.peer.receive_replies() if said.kind == "connect"]
        if author.is_displaced:
            ahead = (reply.content["next"] - author.confirmed) % ID_COUNT
            assert len(author.unconfirmed) < ahead < ID_COUNT // 2, "it may take it for its own"
            author.confirmed, author.is_displaced = reply.content["next"], False
        else:
            self.confirm(author, reply.content["next"])
        first = author.confirmed
        again = [m.frame((first + n) % ID_COUNT) for n, m in enumerate(author.unconfirmed)]
        talker.peer.send(b"".join(again))
        self.look()

    def displace(self, author: Author, count: int) -> None:
        """Another program has the name for a while, and uses so many numbers."""
        if author.talker is None:
            peer = Version2Peer(self.bus, self.broker.open_session())
            peer.send(connect_request(name=author.name, instance="another"))
            [reply] = peer.receive_replies()
            first = reply.content["next"]
            numbers = [n % ID_COUNT for n in range(first, first + count)]
            peer.send(b"".join(wire_peer_v2.publish(9, number, b"refused") for number in numbers))
            peer.disconnect()
            author.is_displaced = True
            author.may_be_twice |= {message.payload for message in author.unconfirmed}
            self.look()

    def repeat(self, author: Author, count: int) -> None:
        """Say again what was confirmed or is under way: it changes nothing."""
        if author.talker is not None and author.unconfirmed:
            some = author.unconfirmed[:count]
            frames = [m.frame((author.confirmed + n) % ID_COUNT) for n, m in enumerate(some)]
            author.talker.peer.send(b"".join(frames))
            self.look()

    def confirm(self, author: Author, following: int) -> None:
        count = (following - author.confirmed) % ID_COUNT
        assert count <= len(author.unconfirmed), "confirmed what was not said"
        for message in author.unconfirmed[:count]:
            assert message.payload in self.seen, "confirmed and not stored"
        author.unconfirmed = author.unconfirmed[count:]
        author.confirmed += count

    # Coming and going ----------------------------------------------------------------------------

    def open(self, *, greet: bool = True) -> Talker:
        talker = Talker(Version2Peer(self.bus, self.broker.open_session()))
        if greet:
            talker.peer.send(connect_request(*CLASSES))
            talker.peer.receive_replies()
        self.talkers.append(talker)
        return talker

    def leave(self, talker: Talker) -> None:
        talker.peer.disconnect()
        self.gone(talker)
        self.look()

    def gone(self, talker: Talker) -> None:
        self.talkers.remove(talker)
        for author in self.authors:
            if author.talker is talker:
                author.talker = None
        for number in list(talker.subscriptions):
            self.let_go(talker, number, forget=False)

    def subscribe(
        self, talker: Talker, class_id: int, number: int, asked: SubscribeRequest
    ) -> None:
        if number in talker.subscriptions:
            return
        names = (asked.durable, asked.group)
        there = [
            position
            for position in self.positions[class_id]
            if any(names) and (position.asked.durable, position.asked.group) == names
        ]
        clash = asked.durable is not None and any(
            position.asked.durable == asked.durable and position not in there
            for position in self.positions[class_id]
        )
        frame = wire_peer_v2.subscribe(class_id, number, **msgspec.to_builtins(asked))
        if clash or (
            there
            and (
                set(there[0].asked.channels) != set(asked.channels)
                or (asked.group is None and self.is_served(there[0]))
            )
        ):
            talker.peer.send(frame)
            return
        if there and not asked.seek:
            position = there[0]
        else:
            position = Position(asked)
            positions, backlog = self.positions[class_id], self.backlog[class_id]
            ring = self.broker.classes[class_id].ring
            found: Iterable[int] = ()
            if asked.start == "waiting" and (backlog or not positions):
                found = list(backlog)
                backlog.clear()
            elif asked.start == "earliest":
                found = range(ring.floor, ring.head)
            stored = self.stored[class_id]
            position.todo = {s for s in found if self.wants(position, stored[s].message)}
            position.left = set(position.todo)
            positions.append(position)
            if there:
                position.idle_seconds = there[0].idle_seconds
                positions.remove(there[0])
        if asked.idle_seconds is not None:
            position.idle_seconds = asked.idle_seconds
        talker.subscriptions[number] = (class_id, position)
        talker.limits[number] = asked.max_in_flight
        talker.peer.send(frame)
        self.look()

    def unsubscribe(self, talker: Talker, number: int, *, forget: bool) -> None:
        if number in talker.subscriptions:
            talker.peer.send(wire_peer_v2.unsubscribe(number, forget=forget))
            self.let_go(talker, number, forget=forget)
            self.look()

    def is_served(self, position: Position, *also: Talker) -> bool:
        talkers = (*self.talkers, *also)
        return any(position is held for t in talkers for _, held in t.subscriptions.values())

    def let_go(self, talker: Talker, number: int, *, forget: bool) -> None:
        class_id, position = talker.subscriptions.pop(number)
        mine = {s for s, (holder, _) in position.out.items() if holder == (talker, number)}
        for sequence in mine:  # It comes again, at once or after a pause.
            del position.out[sequence]
        if self.is_served(position, talker):
            return
        if position.outlives and not forget:
            position.idle_since = self.now
            return
        self.positions[class_id].remove(position)
        if not self.positions[class_id]:
            self.leave_behind(class_id, self.backlog[class_id] | position.todo)

    def leave_behind(self, class_id: int, expected: set[int]) -> set[int]:
        """Nobody is there any more: this waits. Returns what does."""
        waiting, stored = self.broker.classes[class_id].backlog_window, self.stored[class_id]
        ranges = waiting.unacked_ranges(waiting.floor, waiting.cursor)
        left = {s for a, b in ranges for s in range(a, b)}
        left |= {s for s in stored if s >= waiting.cursor}
        late = {s for s in stored if stored[s].expires <= self.now}
        assert expected <= left | late, "not left to the next one"
        self.backlog[class_id] = left
        return left

    def forget_idle(self, heads: dict[int, int]) -> None:
        """What nobody has used for so long is gone, and what it kept with it. What waited for room,
        and finds it now, is behind the heads that there were, and waits for who comes."""
        for class_id, positions in self.positions.items():
            before = self.backlog[class_id]
            for position in list(positions):
                seconds = position.idle_seconds
                if seconds is None or self.is_served(position):
                    continue
                if self.now - position.idle_since >= seconds:
                    positions.remove(position)
                    if not positions:
                        left = self.leave_behind(class_id, before) - before
                        assert all(s >= heads[class_id] for s in left), "kept for nobody"

    # Consuming -----------------------------------------------------------------------------------

    def take(self, talker: Talker, most: int) -> None:
        data = talker.peer.read_bytes(most)
        for _ in range(100):  # What gives up messages rests for a turn.
            if len(data) == most or talker.peer.session.outbox.is_idle:
                break
            data += talker.peer.read_bytes(most - len(data))
        start = talker.taken - len(talker.begun)
        talker.taken += len(data)
        frames, talker.begun = split_frames(talker.begun + data)
        for frame in frames:
            self.hear(talker, frame, start)
            start += len(frame)
        talker.copied_until = talker.taken + talker.peer.session.outbox.pending_bytes
        if len(data) < most:
            assert not talker.begun
            self.heard_everything(talker)
        self.look()

    def hear(self, talker: Talker, frame: bytes, at: int) -> None:
        kind, class_id, message_id, last_field, content = parse_frame(frame)
        if kind == wire_peer_v2.DELIVER:
            talker.named = (class_id, last_field, message_id)
        elif kind == wire_peer_v2.CONFIRM:
            [author] = [a for a in self.authors if a.talker is talker]
            self.confirm(author, message_id)
        elif kind in (wire_peer_v2.MESSAGE, wire_peer_v2.ENVELOPE):
            assert talker.named[0] == class_id
            is_fresh = at >= talker.copied_until
            self.hear_message(talker, message_id, content, is_fresh=is_fresh)

    def hear_message(
        self, talker: Talker, message_id: int, content: bytes, *, is_fresh: bool
    ) -> None:
        class_id, number, attempt = talker.named
        if number not in talker.subscriptions:
            assert not is_fresh, "sent to nobody"
            return
        where, position = talker.subscriptions[number]
        assert where == class_id
        stored = self.stored[class_id]
        head = self.broker.classes[class_id].ring.head
        sequence = AckOracle(floor=head).nearest_sequence(message_id)
        it = stored[sequence]
        assert content.endswith(it.message.payload), "another message's payload"
        sends = position.sends.get(sequence, 0)
        if not is_fresh:
            position.sends[sequence] = sends + 1
            if sequence in position.todo and position.asked.group is None:
                self.note(talker, number, position, sequence, ago=ACK_TIMEOUT)
            return
        assert sequence in position.todo, "not for it, or acknowledged"
        assert it.opens <= self.now, "too early"
        assert self.now < it.expires, "too late"
        is_plain = position.asked.group is None
        if is_plain and not position.outlives and sequence not in position.left:
            assert attempt == sends + 1
        else:
            assert attempt > sends
        if sequence in position.out:
            pause = self.broker.tick_number - position.out[sequence][1]
            assert pause >= ACK_TIMEOUT, "sent again too early"
        assert position.waits.get(sequence, 0.0) <= self.now, "sent again before its delay"
        tick = self.broker.tick_number
        assert position.pauses.get(sequence, 0) <= tick, "sent again before its pause"
        if is_plain and not sends and sequence not in position.left and it.opens == 0.0:
            for earlier in position.todo:
                if earlier < sequence and not {earlier} & (position.sends.keys() | position.left):
                    before = stored[earlier]
                    assert before.opens or before.expires <= self.now, "passed over"
        position.sends[sequence] = sends + 1
        self.note(talker, number, position, sequence)
        most = talker.limits[number]
        if most is not None and not position.outlives:
            _, mine = self.held(talker, number)
            mine = [s for s in mine if self.now < stored[s].expires]
            mine = [s for s in mine if not self.is_overdue(position, s)]
            assert len(mine) <= most, "more in flight than allowed"

    def note(
        self, talker: Talker, number: int, position: Position, sequence: int, *, ago: int = 0
    ) -> None:
        """It is in flight, at the latest since so many ticks."""
        position.free.discard(sequence)
        position.waits.pop(sequence, None)
        position.pauses.pop(sequence, None)
        position.out[sequence] = ((talker, number), self.broker.tick_number - ago)
        most = position.asked.max_deliveries
        if most and position.sends[sequence] >= most:
            position.todo.discard(sequence)  # It is given up when it is due again.

    def heard_everything(self, talker: Talker) -> None:
        """Nothing that may be sent to an unlimited plain subscription is left."""
        for number, (class_id, position) in talker.subscriptions.items():
            if position.asked.group is not None or talker.limits[number] is not None:
                continue
            for sequence in position.todo:
                it = self.stored[class_id][sequence]
                may_come = it.opens <= self.now < it.expires
                is_known = sequence in position.sends or sequence in position.left
                assert is_known or not may_come, "not sent"
                is_due = position.waits.get(sequence, self.now + 1) <= self.now
                is_due |= sequence in position.free
                if not position.outlives:
                    tick = self.broker.tick_number
                    is_due |= position.pauses.get(sequence, tick + 1) <= tick
                assert not (is_due and may_come), "not sent again"

    def held(self, talker: Talker, number: int) -> tuple[Position, list[int]]:
        """What a subscription may decide about. A group's member loses what is overdue."""
        _, position = talker.subscriptions[number]
        mine = [s for s, (who, _) in position.out.items() if who == (talker, number)]
        if position.asked.group is not None:
            mine = [s for s in mine if not self.is_overdue(position, s)]
        return position, sorted(mine)

    def is_overdue(self, position: Position, sequence: int) -> bool:
        return self.broker.tick_number - position.out[sequence][1] >= ACK_TIMEOUT

    def ack(self, talker: Talker, number: int, first: int, count: int, *, spanning: bool) -> None:
        """Acknowledge some of what it holds: each alone, or with what lies between them."""
        position, mine = self.held(talker, number)
        some = mine[first : first + count]
        between = set(range(some[0], some[-1])) if some else set()
        between -= set(mine)
        # A client's ranges do not span what it was sent and has not processed; but what others
        # of its group hold it knows nothing of. What somebody else left counts as sent.
        others = {s for s, (who, _) in position.out.items() if who != (talker, number)}
        sent = position.sends.keys() | (position.left & position.todo)
        spanning &= not any(s in sent and s not in others for s in between)
        for a, b in self.ranges(some, spanning=spanning):
            talker.peer.send(wire_peer_v2.ack(number, a, b))
        for sequence in some:
            self.settled(position, sequence)
        self.look()

    def settled(self, position: Position, sequence: int) -> None:
        del position.out[sequence]
        position.todo.discard(sequence)
        position.free.discard(sequence)
        position.waits.pop(sequence, None)
        position.pauses.pop(sequence, None)

    def nack(
        self, talker: Talker, number: int, first: int, count: int, delay_ms: int | None
    ) -> None:
        position, mine = self.held(talker, number)
        for sequence in mine[first : first + count]:
            at = sequence % ID_COUNT
            talker.peer.send(wire_peer_v2.nack(number, at, at + 1, delay_ms, b"not now"))
            if position.asked.group is None and self.is_overdue(position, sequence):
                continue  # It comes again by itself.
            del position.out[sequence]
            if delay_ms:
                position.waits[sequence] = self.now + delay_ms / 1000
            elif delay_ms == 0:
                position.free.add(sequence)
            else:
                pause = position.pause(position.sends[sequence])
                position.pauses[sequence] = self.broker.tick_number + pause
        self.look()

    def terminate(self, talker: Talker, number: int, first: int, count: int) -> None:
        """Of some of what it holds, it says that it can never process it."""
        class_id, _ = talker.subscriptions[number]
        position, mine = self.held(talker, number)
        for sequence in mine[first : first + count]:
            if sequence not in position.todo:
                continue  # It may have been given up already.
            at = sequence % ID_COUNT
            error = f"never {number}"
            talker.peer.send(wire_peer_v2.nack(number, at, at + 1, "terminate", error.encode()))
            self.settled(position, sequence)
            if self.now < self.stored[class_id][sequence].expires:
                self.dead.append((str(class_id), str(sequence), error))
        self.look()

    def check_dead(self) -> None:
        """What was terminated lies there, with what was said of it."""
        found = []
        for class_id in CLASSES:
            dead = self.broker.store.class_id_by_name.get(f"dead.{class_id}")
            ring = self.broker.classes[dead].ring if dead is not None else None
            for at in range(ring.floor, ring.head) if ring is not None else ():
                headers = dict(decode(parse_frame(ring.copy_frame(at))[4])[0].headers)
                if headers["dead-reason"] == "terminated":
                    found.append(
                        (headers["dead-class"], headers["dead-sequence"], headers.get("dead-error"))
                    )
        assert not set(self.dead) - set(found), "terminated, and no dead letter"
        self.broker.store.failure_reasons.check()

    def working(self, talker: Talker, number: int) -> None:
        position, mine = self.held(talker, number)
        for sequence in mine:
            if not self.is_overdue(position, sequence):
                at = sequence % ID_COUNT
                talker.peer.send(wire_peer_v2.working(number, at, at + 1))
                position.out[sequence] = ((talker, number), self.broker.tick_number)
        self.look()

    def ranges(self, some: list[int], *, spanning: bool) -> list[tuple[int, int]]:
        """Ranges of ids."""
        if spanning and some and some[0] // ID_COUNT == some[-1] // ID_COUNT:
            return [(some[0] % ID_COUNT, some[-1] % ID_COUNT + 1)]
        return [(s % ID_COUNT, s % ID_COUNT + 1) for s in some]

    # Time ----------------------------------------------------------------------------------------

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            heads = {class_id: self.broker.classes[class_id].ring.head for class_id in CLASSES}
            self.broker.tick()
            self.forget_idle(heads)
            self.look()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.broker.clock.now = self.now
        if self.broker.next_wakeup <= self.now:
            self.broker.run_due_wakeups()
        self.look()

    def look(self) -> None:
        """Do what a driver does after everything, and have the bus check itself."""
        while self.broker.drain_writable():
            pass
        self.broker.drain_resumed()
        self.bus.check_invariants()

    # The end -------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Everybody hears and acknowledges everything, until nothing is left."""
        for author in self.authors:
            if author.talker is None and author.unconfirmed:
                self.connect(author)
        trusting = self.bus.skips_checks
        idle_rounds = 0
        while idle_rounds < 70:
            start = sum(talker.taken for talker in self.talkers)
            self.bus.skips_checks = True  # To save time: everything is checked once a round.
            self.collect_what_is_left()
            before = -1
            while before < (before := sum(talker.taken for talker in self.talkers)):
                for talker in list(self.talkers):
                    self.take(talker, 1 << 40)
                    for number in list(talker.subscriptions):
                        self.ack(talker, number, 0, 1 << 40, spanning=True)
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
                late = {s for s in position.todo if self.stored[class_id][s].expires <= self.now}
                most = position.asked.max_deliveries
                assert position.todo <= late | (position.left if most else set()), "never sent"
            assert not len(self.broker.classes[class_id].ring), "kept for nobody"

    def is_done(self) -> bool:
        return not any(len(self.broker.classes[class_id].ring) for class_id in CLASSES)

    def collect_what_is_left(self) -> None:
        """Somebody comes for every position that nobody is connected to, and for every backlog."""
        for class_id, positions in self.positions.items():
            for position in positions:
                if not self.is_served(position):
                    asked = msgspec.structs.replace(position.asked, seek=False)
                    self.subscribe(self.open(), class_id, 1, asked)
            cls = self.broker.classes[class_id]
            if self.backlog[class_id] or (not positions and len(cls.ring)):
                self.subscribe(self.open(), class_id, 1, SubscribeRequest())
