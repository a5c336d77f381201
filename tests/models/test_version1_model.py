"""A broker with version 1 peers against the model: random peers, full classes, partial writes."""

from __future__ import annotations

import sys
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from simplebus.core.broker.broker import FullPolicy
from simplebus.core.errors import Reason
from tests.models.version1_model import Version1Model
from tests.models.version1_state import FRAME_BYTES, ModelPeer
from tests.support.oracles import ID_COUNT, build_frame
from tests.support.strategies import ack_frame

CLASSES = (1, 256, 0x3C0D)
class_ids = st.sampled_from(CLASSES)
peer_numbers = st.integers(0, 5)
randoms = st.randoms(use_true_random=False)

runs = st.tuples(
    class_ids,
    # Up to 50 frames take plain loops, more the arrays.
    st.one_of(st.integers(1, 5), st.integers(45, 160)),
    st.sampled_from([0, 10, 40]),
)
long_runs = st.tuples(class_ids, st.integers(1, 5), st.sampled_from([3000, 30_000, 90_000]))
holds = st.one_of(st.just(0), st.integers(0, 40))
"""Bytes at the end that are sent later."""


INVALID_FRAMES = {
    Reason.UNKNOWN_TYPE: build_frame(ord("x")),
    Reason.BAD_ACK: ack_frame(1, b"5-5"),
    Reason.UNKNOWN_CLASS: build_frame(ord("1"), class_id=9),
    Reason.BAD_CONNECT: build_frame(ord("4"), content=b"[256,70000]"),
    Reason.FRAME_TOO_LONG: b"1" * (FRAME_BYTES + 1),
}


class Version1Machine(RuleBasedStateMachine):
    """Rules are actions of peers or time; the model checks everything after each."""

    policies = tuple(FullPolicy)
    trusting = False

    @initialize(
        data=st.data(),
        ack_timeout=st.sampled_from([1, 2, 6]),
        class_messages=st.sampled_from([4, 70, 1000]),
        total_bytes=st.sampled_from([1 << 18, 1 << 20]),
        first_sequence=st.sampled_from([0, 200, ID_COUNT - 60]),
    )
    def start(
        self,
        data: st.DataObject,
        ack_timeout: int,
        class_messages: int,
        total_bytes: int,
        first_sequence: int,
    ) -> None:
        policy = data.draw(st.sampled_from(self.policies), label="policy")
        self.model = Version1Model(
            policy=policy,
            ack_timeout=ack_timeout,
            class_messages=class_messages,
            # Other classes must drop their oldest messages, or they might use all of the memory.
            total_bytes=1 << 20 if policy is FullPolicy.DROP_OLDEST else total_bytes,
            first_sequence=first_sequence,
            trusting=self.trusting,
        )
        for class_id in CLASSES[:2]:
            model_peer = self.model.open()
            self.model.connect(model_peer, class_id)
            self.model.subscribe(model_peer, class_id)
        self.model.subscribe(model_peer, CLASSES[0])

    def peer(self, number: int) -> ModelPeer:
        model_peers = self.model.peers
        return model_peers[number % len(model_peers)]

    @property
    def has_peers(self) -> bool:
        return bool(self.model.peers)

    @precondition(lambda self: len(self.model.peers) < 5)
    @rule()
    def somebody_comes(self) -> None:
        self.model.open()

    @precondition(lambda self: self.has_peers)
    @rule(
        peer_number=peer_numbers,
        reason=st.one_of(st.none(), st.none(), st.sampled_from(list(INVALID_FRAMES))),
    )
    def somebody_goes(self, peer_number: int, reason: Reason | None) -> None:
        if reason is None:
            self.model.close(self.peer(peer_number))
        else:
            self.model.send_invalid_frame(self.peer(peer_number), INVALID_FRAMES[reason], reason)

    @precondition(lambda self: self.has_peers)
    @rule(peer_number=peer_numbers, named=st.lists(class_ids, max_size=3))
    def connect(self, peer_number: int, named: list[int]) -> None:
        self.model.connect(self.peer(peer_number), *named)

    @precondition(lambda self: self.has_peers)
    @rule(peer_number=peer_numbers, class_id=class_ids)
    def subscribe(self, peer_number: int, class_id: int) -> None:
        self.model.subscribe(self.peer(peer_number), class_id)

    @precondition(lambda self: self.has_peers)
    @rule(peer_number=peer_numbers, published=st.lists(runs, min_size=1, max_size=2), hold=holds)
    def publish(self, peer_number: int, published: list[tuple[int, int, int]], hold: int) -> None:
        self.model.publish(self.peer(peer_number), *self.existing_classes(published), hold=hold)

    @precondition(lambda self: self.has_peers)
    @rule(peer_number=peer_numbers, run=long_runs, hold=holds)
    def publish_long_ones(self, peer_number: int, run: tuple[int, int, int], hold: int) -> None:
        self.model.publish(self.peer(peer_number), *self.existing_classes([run]), hold=hold)

    @precondition(lambda self: self.has_peers)
    @rule(peer_number=peer_numbers, count=st.integers(20, 120), random=randoms, hold=holds)
    def publish_to_all_classes_in_turn(
        self, peer_number: int, count: int, random: Random, hold: int
    ) -> None:
        self.model.send_mixed(self.peer(peer_number), count, random, hold=hold)

    @precondition(lambda self: self.has_peers)
    @rule(peer_number=peer_numbers, most=st.one_of(st.integers(1, 60), st.integers(1, 5000)))
    def take_some_bytes(self, peer_number: int, most: int) -> None:
        self.model.read_bytes(self.peer(peer_number), most)

    @precondition(lambda self: self.has_peers)
    @rule(peer_number=peer_numbers)
    def take_everything(self, peer_number: int) -> None:
        self.model.read_bytes(self.peer(peer_number), 1 << 40)

    @precondition(lambda self: self.has_peers)
    @rule(peer_number=peer_numbers, class_id=class_ids, random=randoms)
    def acknowledge(self, peer_number: int, class_id: int, random: Random) -> None:
        self.model.ack(self.peer(peer_number), class_id, random)

    @precondition(lambda self: self.has_peers)
    @rule(
        peer_number=peer_numbers,
        class_id=class_ids,
        ranges=st.lists(st.tuples(st.integers(-90, 90), st.integers(1, 200)), max_size=3),
        times=st.sampled_from([1, 1, 60]),
    )
    def acknowledge_nonsense(
        self, peer_number: int, class_id: int, ranges: list[tuple[int, int]], times: int
    ) -> None:
        self.model.ack_invalid_ids(self.peer(peer_number), class_id, *(ranges * times))

    @precondition(lambda self: self.has_peers)
    @rule(peer_number=peer_numbers, run=runs, ticks=st.sampled_from([1, 6, 20]), random=randoms)
    def publish_and_everybody_listens_for_a_while(
        self, peer_number: int, run: tuple[int, int, int], ticks: int, random: Random
    ) -> None:
        model = self.model
        model.publish(self.peer(peer_number), *self.existing_classes([run]))
        for _ in range(ticks):
            with model.unchecked():
                for model_peer in list(model.peers):
                    model.read_bytes(model_peer, 1 << 40)
                    if random.random() < 0.1:
                        model.ack(model_peer, random.choice(sorted(model.classes)), random)
            model.tick()

    @precondition(lambda self: self.has_peers)
    @rule(peer_number=peer_numbers)
    def take_and_acknowledge_everything(self, peer_number: int) -> None:
        model_peer = self.peer(peer_number)
        self.model.read_bytes(model_peer, 1 << 40)
        self.model.ack_everything(model_peer)

    @rule(times=st.sampled_from([1, 1, 1, 7, 31]))
    def tick(self, times: int) -> None:
        self.model.tick(times)

    def existing_classes(self, published: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Return these runs with classes that were named."""
        named = sorted(self.model.classes)
        return [(named[CLASSES.index(c) % len(named)], count, size) for c, count, size in published]

    def teardown(self) -> None:
        if sys.exc_info()[0] is None and hasattr(self, "model"):
            self.model.settle()


class BlockMachine(Version1Machine):
    policies = (FullPolicy.BLOCK,)


class DropMachine(Version1Machine):
    policies = (FullPolicy.DROP_OLDEST, FullPolicy.DROP_NEWEST)


for machine in (BlockMachine, DropMachine):
    machine.TestCase.settings = settings(
        max_examples=settings().max_examples // 2, stateful_step_count=40
    )

TestBlockingBroker = BlockMachine.TestCase
TestDroppingBroker = DropMachine.TestCase


def test_redeliveries_copied_before_the_peer_closes_count() -> None:
    # The first byte of three copied frames is received, and all of them count as sent twice. So the
    # next delivery, in tick 6, is the third one, and the fourth one follows after 8 ticks, not 4.
    model = Version1Model(ack_timeout=2)
    model_peer, successor = model.open(), model.open()
    model.connect(model_peer, 1)
    model.subscribe(model_peer, 1)
    model.publish(model_peer, (1, 3, 0))
    model.read_bytes(model_peer, 1 << 40)
    model.tick(2)

    model.read_bytes(model_peer, 1)
    model.close(model_peer)
    model.subscribe(successor, 1)
    for _ in range(20):
        model.read_bytes(successor, 1 << 40)
        model.tick()

    in_flight = model.classes[1].subscribers[successor.session_id].flights.values()
    assert [(each.sent_tick, each.attempts) for each in in_flight] == [(14, 4)] * 3
    model.settle()
