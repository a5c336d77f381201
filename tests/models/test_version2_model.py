"""A broker with version 2 peers against the model.

Publishers with numbers, every kind of subscription, lost connections, a full class, the clock, and
partial writes.
"""

from __future__ import annotations

import sys
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from msgspec.structs import replace

from simplebus.core.protocol.requests import SubscribeRequest
from tests.models.version2_model import Version2Model
from tests.models.version2_state import CLASSES, ModelMessage, ModelPublisher, Version2ModelPeer
from tests.support.oracles import ID_COUNT

peer_numbers = st.integers(0, 5)
class_ids = st.sampled_from(CLASSES)
randoms = st.randoms(use_true_random=False)
kinds = st.sampled_from(
    [
        {},
        {},
        {"channel": "a.x"},
        {"channel": "b"},
        {"expires_ms": 1500},
        {"delay_ms": 2500},
        {"channel": "a.y", "expires_ms": 4000, "delay_ms": 1000},
    ]
)
bindings = st.sampled_from([[], [], ["a.*"], ["b", "a.x"], ["#"]])


@st.composite
def subscriptions(draw: st.DrawFn) -> SubscribeRequest:
    kind = draw(st.sampled_from(["plain", "plain", "durable", "group", "durable group"]))
    backoff = {"plain": draw(st.sampled_from([None, [1.0], [1.0, 4.0]])), "durable": [2.0, 5.0]}
    request = SubscribeRequest(
        channels=draw(bindings) if kind == "plain" else draw(st.sampled_from([[], ["a.*"]])),
        durable="d" if kind == "durable" else "e" if kind == "durable group" else None,
        group="g" if "group" in kind else None,
        start=draw(st.sampled_from(["waiting", "waiting", "new", "earliest"])),
        max_in_flight=draw(st.sampled_from([None, None, 1, 3])),
        idle_seconds=draw(st.sampled_from([None, 0.5, 4.0])) if "durable" in kind else None,
        max_deliveries=draw(st.sampled_from([None, 2])) if kind == "plain" else None,
        backoff=backoff.get(kind),
    )
    return replace(request, seek=kind == "durable" and request.start != "waiting")


class Version2Machine(RuleBasedStateMachine):
    """Rules are actions of peers or time; the model checks everything after each."""

    trusting = False

    @initialize(
        class_messages=st.sampled_from([6, 20, 400]),
        first_sequence=st.sampled_from([0, ID_COUNT - 9]),
        first_number=st.sampled_from([0, ID_COUNT - 9]),
        requests=st.lists(st.tuples(class_ids, subscriptions()), min_size=1, max_size=4),
    )
    def start(
        self,
        class_messages: int,
        first_sequence: int,
        first_number: int,
        requests: list[tuple[int, SubscribeRequest]],
    ) -> None:
        self.model = Version2Model(
            class_messages=class_messages,
            first_sequence=first_sequence,
            first_number=first_number,
            trusting=self.trusting,
        )
        for number, (class_id, request_) in enumerate(requests):
            model_peer = self.model.open() if number < 2 else self.peer(number)
            self.model.subscribe(model_peer, class_id, number + 1, request_)

    def peer(self, peer_number: int) -> Version2ModelPeer:
        model_peers = self.model.peers
        return model_peers[peer_number % len(model_peers)]

    def publisher(self, publisher_number: int) -> ModelPublisher:
        return self.model.authors[publisher_number % len(self.model.authors)]

    def number(self, model_peer: Version2ModelPeer, subscription_index: int) -> int:
        """Return the number of one of the peer's subscriptions."""
        return sorted(model_peer.subscriptions)[subscription_index % len(model_peer.subscriptions)]

    @property
    def has_peers(self) -> bool:
        return bool(self.model.peers)

    @precondition(lambda self: len(self.model.peers) < 6)
    @rule()
    def somebody_comes(self) -> None:
        self.model.open()

    @precondition(lambda self: self.has_peers)
    @rule(peer_number=peer_numbers)
    def somebody_goes(self, peer_number: int) -> None:
        self.model.leave(self.peer(peer_number))

    @precondition(lambda self: self.has_peers)
    @rule(
        peer_number=peer_numbers,
        class_id=class_ids,
        number=st.integers(1, 3),
        request=subscriptions(),
    )
    def subscribe(
        self, peer_number: int, class_id: int, number: int, request: SubscribeRequest
    ) -> None:
        self.model.subscribe(self.peer(peer_number), class_id, number, request)

    @precondition(lambda self: self.has_peers)
    @rule(peer_number=peer_numbers, number=st.integers(1, 3), forget=st.booleans())
    def unsubscribe(self, peer_number: int, number: int, forget: bool) -> None:
        self.model.unsubscribe(self.peer(peer_number), number, forget=forget)

    @rule(
        publisher_number=peer_numbers,
        published=st.lists(st.tuples(class_ids, kinds), min_size=1, max_size=6),
    )
    def publish(
        self, publisher_number: int, published: list[tuple[int, dict[str, object]]]
    ) -> None:
        self.publish_kinds(publisher_number, published)

    @rule(
        publisher_number=peer_numbers,
        class_id=class_ids,
        kind=kinds,
        count=st.sampled_from([2, 8, 60]),
    )
    def publish_a_run(
        self, publisher_number: int, class_id: int, kind: dict[str, object], count: int
    ) -> None:
        self.publish_kinds(publisher_number, [(class_id, kind)] * count)

    @rule(publisher_number=peer_numbers, kind=kinds, count=st.sampled_from([30, 70]))
    def publish_to_both_classes_in_turn(
        self, publisher_number: int, kind: dict[str, object], count: int
    ) -> None:
        self.publish_kinds(
            publisher_number, [(CLASSES[n % 2], kind if n % 3 else {}) for n in range(count)]
        )

    def publish_kinds(
        self, publisher_number: int, published: list[tuple[int, dict[str, object]]]
    ) -> None:
        author = self.publisher(publisher_number)
        messages: list[ModelMessage] = []
        for class_id, kind in published:
            messages.append(self.model.message(author, class_id, **kind))
        self.model.publish(author, *messages)

    @rule(publisher_number=peer_numbers)
    def an_author_comes_again(self, publisher_number: int) -> None:
        self.model.connect(self.publisher(publisher_number))

    @rule(publisher_number=peer_numbers, lost=st.booleans())
    def an_author_loses_the_connection(self, publisher_number: int, lost: bool) -> None:
        author = self.publisher(publisher_number)
        if author.peer is not None:
            self.model.leave(author.peer)
            if not lost:
                self.model.connect(author)

    @rule(publisher_number=peer_numbers, count=st.integers(0, 9), first=st.booleans())
    def another_program_takes_its_name(
        self, publisher_number: int, count: int, first: bool
    ) -> None:
        author = self.publisher(publisher_number)
        if first and author.peer is not None:
            self.model.leave(author.peer)
        self.model.use_name_elsewhere(author, count)

    @rule(publisher_number=peer_numbers, count=st.integers(1, 9))
    def an_author_repeats_itself(self, publisher_number: int, count: int) -> None:
        self.model.repeat(self.publisher(publisher_number), count)

    @precondition(lambda self: self.has_peers)
    @rule(peer_number=peer_numbers, most=st.sampled_from([1, 7, 40, 300]))
    def take_some_bytes(self, peer_number: int, most: int) -> None:
        self.model.read_bytes(self.peer(peer_number), most)

    @precondition(lambda self: self.has_peers)
    @rule(peer_number=peer_numbers)
    def take_everything(self, peer_number: int) -> None:
        self.model.read_bytes(self.peer(peer_number), 1 << 40)

    @rule()
    def everybody_takes_everything(self) -> None:
        for model_peer in list(self.model.peers):
            self.model.read_bytes(model_peer, 1 << 40)

    @precondition(lambda self: self.has_peers)
    @rule(
        peer_number=peer_numbers,
        subscription_index=peer_numbers,
        first=st.integers(0, 3),
        count=st.sampled_from([1, 2, 1000]),
        spanning=st.booleans(),
    )
    def acknowledge(
        self, peer_number: int, subscription_index: int, first: int, count: int, spanning: bool
    ) -> None:
        model_peer = self.peer(peer_number)
        if model_peer.subscriptions:
            number = self.number(model_peer, subscription_index)
            self.model.ack(model_peer, number, first, count, spanning=spanning)

    @precondition(lambda self: self.has_peers)
    @rule(
        peer_number=peer_numbers,
        subscription_index=peer_numbers,
        first=st.integers(0, 3),
        count=st.sampled_from([1, 2, 1000]),
        delay_ms=st.sampled_from([None, 0, 700, 3000]),
    )
    def refuse(
        self,
        peer_number: int,
        subscription_index: int,
        first: int,
        count: int,
        delay_ms: int | None,
    ) -> None:
        model_peer = self.peer(peer_number)
        if model_peer.subscriptions:
            self.model.nack(
                model_peer, self.number(model_peer, subscription_index), first, count, delay_ms
            )

    @precondition(lambda self: self.has_peers)
    @rule(
        peer_number=peer_numbers,
        subscription_index=peer_numbers,
        first=st.integers(0, 3),
        count=st.sampled_from([1, 2]),
    )
    def terminate(self, peer_number: int, subscription_index: int, first: int, count: int) -> None:
        model_peer = self.peer(peer_number)
        if model_peer.subscriptions:
            self.model.terminate(
                model_peer, self.number(model_peer, subscription_index), first, count
            )

    @rule(publisher_number=peer_numbers, kind=kinds, count=st.integers(1, 9), random=randoms)
    def publish_and_everybody_decides(
        self, publisher_number: int, kind: dict[str, object], count: int, random: Random
    ) -> None:
        self.publish_kinds(publisher_number, [(random.choice(CLASSES), kind) for _ in range(count)])
        for model_peer in list(self.model.peers):
            self.model.read_bytes(model_peer, 1 << 40)
        for model_peer in self.model.peers:
            for number in sorted(model_peer.subscriptions):
                first, size = random.randrange(3), random.randrange(4)
                if random.random() < 0.6:
                    spanning = random.random() < 0.7
                    self.model.ack(model_peer, number, first, size, spanning=spanning)
                elif random.random() < 0.6:
                    self.model.nack(model_peer, number, first, size, random.choice([None, 0, 700]))
        for model_peer in list(self.model.peers):
            self.model.read_bytes(model_peer, 1 << 40)

    @precondition(lambda self: len(self.model.peers) < 5)
    @rule(
        publisher_number=peer_numbers,
        class_id=class_ids,
        count=st.integers(2, 9),
        most=st.sampled_from([None, 1, 3]),
        durable=st.sampled_from([None, "e"]),
        random=randoms,
    )
    def a_group_shares_and_decides(
        self,
        publisher_number: int,
        class_id: int,
        count: int,
        most: int | None,
        durable: str | None,
        random: Random,
    ) -> None:
        """Add two members; an ack of one may span messages that the other holds."""
        members = [self.model.open(), self.model.open()]
        for model_peer in members:
            request = SubscribeRequest(group="g", durable=durable, max_in_flight=most)
            self.model.subscribe(model_peer, class_id, 1, request)
        self.publish_kinds(publisher_number, [(class_id, {})] * count)
        for model_peer in members:
            self.model.read_bytes(model_peer, 1 << 40)
        model_peer = random.choice(members)
        if model_peer.subscriptions:
            self.model.ack(model_peer, 1, random.randrange(2), random.randrange(4), spanning=True)

    @precondition(lambda self: len(self.model.peers) < 6)
    @rule(
        publisher_number=peer_numbers,
        class_id=class_ids,
        count=st.integers(0, 4),
        idle_seconds=st.sampled_from([0.5, 4.0]),
        seconds=st.sampled_from([0.5, 3.0]),
    )
    def a_durable_is_left_alone(
        self, publisher_number: int, class_id: int, count: int, idle_seconds: float, seconds: float
    ) -> None:
        """Leave a durable idle: it keeps new messages until its idle time is over."""
        model_peer = self.model.open()
        request = SubscribeRequest(durable="d", idle_seconds=idle_seconds)
        self.model.subscribe(model_peer, class_id, 1, request)
        self.model.leave(model_peer)
        if count:
            self.publish_kinds(publisher_number, [(class_id, {})] * count)
        self.model.wait(seconds)
        self.model.tick()

    @precondition(lambda self: self.has_peers)
    @rule(peer_number=peer_numbers, subscription_index=peer_numbers)
    def ask_for_time(self, peer_number: int, subscription_index: int) -> None:
        model_peer = self.peer(peer_number)
        if model_peer.subscriptions:
            self.model.working(model_peer, self.number(model_peer, subscription_index))

    @rule(times=st.sampled_from([1, 1, 2, 3, 7]))
    def tick(self, times: int) -> None:
        self.model.tick(times)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.model.wait(seconds)

    def teardown(self) -> None:
        if sys.exc_info()[0] is None and hasattr(self, "model"):
            self.model.settle()


Version2Machine.TestCase.settings = settings(
    max_examples=settings().max_examples // 2, stateful_step_count=40
)
TestBrokerInVersion2 = Version2Machine.TestCase
