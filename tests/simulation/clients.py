"""Programs that use the bus, each in its own bad way.

Rule 1: what a client is to do next is an event; between two of them it does nothing.
Rule 2: a client that publishes keeps what is not confirmed and sends it again, as the protocol
says; one that consumes notes in `processed` what it acknowledges, before it says so.
Rule 3: when all is calm everybody is connected, has published all that it has, and acknowledges at
once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import msgspec

from simplebus.core.protocol.envelope_batch import Envelope
from tests.behaviour import wire_peer
from tests.behaviour.wire_peer_v2 import (
    CONNECT,
    DELIVER,
    ENVELOPE,
    ERROR,
    FETCH,
    MESSAGE,
    PURGE,
    SUBSCRIBE,
    ack,
    json_request,
    nack,
    publish,
    publish_envelopes,
    subscribe,
    unsubscribe,
    working,
)
from tests.simulation import messages
from tests.simulation.history import (
    channel_of,
    expires_of,
    opens_of,
    token_of,
)
from tests.simulation.network import End, Line
from tests.simulation.world import World
from tests.support.oracles import parse_frame, split_frames

Dial = Callable[[End, str], "Line | None"]
Processed = dict[tuple[int, str], set[bytes]]


@dataclass(frozen=True)
class Wish:
    """What somebody subscribes to."""

    class_id: int
    durable: str = ""
    group: str = ""
    max_in_flight: int = 0
    max_deliveries: int = 0
    start: str = "waiting"
    filters: bool = False
    """Whether it asks for one channel only."""
    by_key: bool = False
    where: dict[str, object] | None = None
    """Instead of `start`."""

    def options(self) -> dict[str, object]:
        """As the protocol has it."""
        found: dict[str, object] = {"start": self.where or self.start}
        for name in ("durable", "group", "max_in_flight", "max_deliveries", "by_key"):
            if getattr(self, name):
                found[name] = getattr(self, name)
        if self.filters:
            found["channels"] = ["a.*"]
        return found


def named(class_id: int) -> dict[str, object]:
    """A class, as who connects names it."""
    return {"id": class_id, "name": f"class {class_id}"}


class Client(End):
    """One program: it connects, loses its connection, and connects again."""

    pause = 0.4
    """Seconds between two things that it does, about."""

    def __init__(self, world: World, dial: Dial, name: str) -> None:
        self.world = world
        self.dial = dial
        self.name = name
        self.line: Line | None = None
        self.unsent = bytearray()
        world.after(world.random.uniform(0, 1), self.connect)
        world.after(world.random.uniform(0, 1), self._turn)

    # Connections ---------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect, now or a little later."""
        if self.line is not None:
            return
        self.line = self.dial(self, self.name)
        if self.line is None:
            self.world.after(self.world.random.uniform(0.1, 1.0), self.connect)
            return
        self.unsent.clear()
        self.greet()
        self.flush()

    def greet(self) -> None:
        """What is said first."""
        raise NotImplementedError

    def lost(self) -> None:
        """The connection is gone."""

    def say(self, *said: bytes) -> None:
        if self.line is not None:
            self.unsent += b"".join(said)
            self.flush()

    def flush(self) -> None:
        line = self.line
        if line is not None and self.unsent and not line.is_gone:
            count = min(len(self.unsent), line.up.room)
            if count:
                line.up.put(bytes(self.unsent[:count]))
                del self.unsent[:count]

    def go_on(self, line: Line) -> None:
        if line is self.line:
            self.flush()

    def hear(self, line: Line, data: bytes) -> None:
        if line is self.line:
            self.take(data)
            self.flush()

    def take(self, data: bytes) -> None:
        """These bytes have come."""
        raise NotImplementedError

    def hang_up(self, line: Line) -> None:
        if line is self.line:
            self.line = None
            self.lost()
            self.world.after(self.world.random.uniform(0.01, 1.0), self.connect)

    # What happens to it --------------------------------------------------------------------------

    def _turn(self) -> None:
        world = self.world
        if self.line is not None:
            if world.chance(0.03):
                self.be_cut_off()
            else:
                self.act()
        world.after(world.random.expovariate(1 / self.pause), self._turn)

    def act(self) -> None:
        """Do something."""

    def be_cut_off(self) -> None:
        """The connection ends in one of many ways."""
        line, chance = self.line, self.world.random
        assert line is not None
        match chance.choice(["goes", "both", "half", "deaf", "twice"]):
            case "goes":
                line.shut(self)
                self.hang_up(line)
            case "both":
                line.cut(client_after=0.0, server_after=0.001)
            case "half":  # The bus does not notice for long.
                line.cut(client_after=0.001, server_after=chance.uniform(1, 20))
            case "deaf":  # The client does not.
                line.cut(client_after=chance.uniform(1, 10), server_after=0.001)
            case "twice":  # It connects again while the first connection is there.
                self.line = None
                self.world.after(chance.uniform(1, 20), self._leave, line)
                self.lost()
                self.connect()

    def _leave(self, line: Line) -> None:
        if not (line.is_gone or line.up.ends or line.up.is_closed):
            line.shut(self)


def _milliseconds(seconds: float) -> int | None:
    return round(seconds * 1000) if 0 < seconds < inf else None


class Plain(Client):
    """A program of version 1: it publishes, subscribes, and acknowledges what it likes."""

    def __init__(
        self, world: World, dial: Dial, name: str, *, class_ids: list[int], reads: bool, count: int
    ) -> None:
        self.class_ids = class_ids
        self.reads = reads
        self.count = count
        self.published = 0
        self._heard = b""
        self._held: list[tuple[int, int]] = []
        super().__init__(world, dial, name)

    def greet(self) -> None:
        self._heard = b""
        self._held.clear()
        self.say(wire_peer.connect(*self.class_ids))
        if self.reads:
            self.say(*(wire_peer.subscribe(class_id) for class_id in self.class_ids))

    def act(self) -> None:
        chance = self.world.random
        if self.published < self.count:
            for _ in range(chance.randint(1, 4)):
                data = messages.payload(self.name, self.published)
                self.published += 1
                self.say(wire_peer.publish(chance.choice(self.class_ids), data))
        chance.shuffle(self._held)
        many = len(self._held) if self.world.calm else chance.randint(0, len(self._held))
        for class_id, number in self._held[:many]:
            if not self.world.chance(0.1):
                self.say(wire_peer.ack(class_id, number, number + 1))
        del self._held[:many]

    def take(self, data: bytes) -> None:
        frames, self._heard = split_frames(self._heard + data)
        for frame in frames:
            kind, class_id, number, _, _ = parse_frame(frame)
            if kind == MESSAGE:
                self._held.append((class_id, number))


class Raw(Client):
    """A program of version 2 that writes its frames itself."""

    def __init__(
        self,
        world: World,
        dial: Dial,
        name: str,
        *,
        class_ids: list[int],
        wishes: list[Wish],
        count: int,
        is_named: bool,
        processed: Processed,
        purges: bool,
    ) -> None:
        self.class_ids = class_ids
        self.wishes = wishes
        self.count = count
        self.is_named = is_named
        self.processed = processed
        self.purges = purges
        self.made = 0
        self.first = 0
        """The number of the oldest message that is not confirmed."""
        self.waiting: deque[tuple[int, int, bytes]] = deque()
        """Those: class, kind, content."""
        self.bus = ""
        self.is_open = False
        self._heard = b""
        self._delivery = (0, 0, 0)
        self._held: list[tuple[int, int, int, bytes]] = []
        """Class, subscription, message id, content."""
        super().__init__(world, dial, name)

    def greet(self) -> None:
        who: dict[str, object] = {}
        if self.is_named:
            who = {"name": self.name, "instance": "one"}
            if self.bus:
                who |= {"unconfirmed": self.first, "bus": self.bus}
        self.say(connect_request(*map(named, self.class_ids), **who))

    def lost(self) -> None:
        self.is_open = False
        self._heard = b""
        self._held.clear()

    def act(self) -> None:
        if not self.is_open:
            return
        chance = self.world.random
        if self.made < self.count:
            for _ in range(chance.randint(1, 6)):
                self._publish()
        if self.wishes and self.world.chance(0.03):
            number = chance.randint(1, len(self.wishes))
            self.say(unsubscribe(number, 1000 + number))
            self._held = [held for held in self._held if held[1] != number]
        elif self.world.chance(0.03):
            self._ask()
        elif self.wishes and self.world.chance(0.03):
            self._subscribe(chance.randrange(len(self.wishes)))
        if self.world.calm:
            self._acknowledge(len(self._held))
        else:
            self._judge()

    def _publish(self) -> None:
        chance = self.world.random
        class_id, which = chance.choice(self.class_ids), self.made
        self.made += 1
        what = chance.choice(["", "", "c", "c", "ct", "cty", "t", "ty", "ck", "cl", "b"])
        if what == "b":  # An envelope that is none.
            message = (class_id, ENVELOPE, b"\xff" + messages.payload(self.name, which))
        elif what:
            bits = what.encode()
            about = Envelope(
                channel=channel_of(bits).decode(),
                key=messages.key_of(bits),
                expires_ms=_milliseconds(expires_of(bits)),
                not_before_ms=_milliseconds(opens_of(bits)),
            )
            data = messages.payload(self.name, which, what, size=chance.choice([0, 0, 300]))
            message = (class_id, ENVELOPE, messages.enveloped(data, about))
        else:
            message = (class_id, MESSAGE, messages.payload(self.name, which))
        self.waiting.append(message)
        self._send(self.first + len(self.waiting) - 1, *message)

    def _ask(self) -> None:
        """Look at some messages, or be rid of them."""
        chance = self.world.random
        class_id, first = chance.choice(self.class_ids), chance.randrange(40)
        if chance.random() < 0.5:
            self.say(json_request(FETCH, class_id, 5, first=first, count=chance.randint(1, 20)))
        elif self.purges:
            last = first + chance.randint(1, 4)
            self.say(json_request(PURGE, class_id, 6, first=first, last=last))

    def _send(self, number: int, class_id: int, kind: int, content: bytes) -> None:
        say = publish if kind == MESSAGE else publish_envelopes
        self.say(say(class_id, number, content))

    def _subscribe(self, at: int) -> None:
        wish = self.wishes[at]
        self.say(subscribe(wish.class_id, at + 1, at + 1, **wish.options()))

    def _judge(self) -> None:
        """Say something about some of what was heard."""
        chance, held = self.world.random, self._held
        way = chance.choice(["some", "some", "all", "shuffled", "nack", "working", "none", "drop"])
        many = chance.randint(0, min(len(held), 8))
        match way:
            case "all":
                self._acknowledge(len(held))
            case "some":
                self._acknowledge(many)
            case "shuffled":
                chance.shuffle(held)
                self._acknowledge(many)
            case "nack":
                for _, number, message_id, _ in held[:many]:
                    delay = chance.choice([None, 0, 50, 2000])
                    self.say(nack(number, message_id, message_id + 1, delay))
                del held[:many]
            case "working":
                for _, number, message_id, _ in held[:many]:
                    self.say(working(number, message_id, message_id + 1))
            case "drop":
                del held[:many]

    def _acknowledge(self, many: int) -> None:
        """Process so many and say so, in ranges where they follow one another."""
        ranges: list[list[int]] = []
        for class_id, number, message_id, content in self._held[:many]:
            durable = self.wishes[number - 1].durable
            self.processed.setdefault((class_id, durable), set()).add(token_of(content))
            if ranges and ranges[-1][0] == number and ranges[-1][2] == message_id:
                ranges[-1][2] += 1
            else:
                ranges.append([number, message_id, message_id + 1])
        del self._held[:many]
        for number, first, last in ranges:
            self.say(ack(number, first, last))

    def take(self, data: bytes) -> None:
        frames, self._heard = split_frames(self._heard + data)
        for frame in frames:
            kind, key, number, last, content = parse_frame(frame)
            if kind == DELIVER:
                self._delivery = (key, number, last)
            elif kind in (MESSAGE, ENVELOPE) and self._delivery[2]:  # Else it was fetched.
                self._held.append((key, self._delivery[2], number, content))
            elif kind == ord("6"):
                self._confirmed(number)
            elif kind == CONNECT:
                self._greeted(msgspec.json.decode(content))
            elif kind == ERROR:
                self._failed(last, number, msgspec.json.decode(content)["code"])
            elif kind == ord("U"):
                self.world.after(self.world.random.uniform(0.01, 2.0), self._again, key - 1)

    def _again(self, at: int) -> None:
        if self.is_open:
            self._subscribe(at)

    def _confirmed(self, following: int) -> None:
        while self.first < following:
            self.first += 1
            self.waiting.popleft()

    def _greeted(self, reply: dict[str, object]) -> None:
        following = reply["next"]
        assert isinstance(following, int)
        knows_us = self.bus in ("", reply["bus"]) and self.is_named
        if knows_us and self.first <= following <= self.first + len(self.waiting):
            self._confirmed(following)
        self.first = following
        self.bus = str(reply["bus"])
        self.is_open = True
        for at in range(len(self.wishes)):
            self._subscribe(at)
        for at, message in enumerate(self.waiting):
            self._send(self.first + at, *message)

    def _failed(self, about: int, number: int, code: str) -> None:
        if about == SUBSCRIBE and code in ("durable_in_use", "too_many_subscriptions"):
            self.world.after(1.0, self._again, number - 1)

    @property
    def is_done(self) -> bool:
        """Whether all that it has to say is said and confirmed."""
        return self.made >= self.count and not self.waiting
