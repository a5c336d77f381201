"""Confirms where each class has its own way to where its messages are kept."""

from __future__ import annotations

from simplebus.core.broker.broker import Broker, Settings
from simplebus.core.commit_log import CommitLog, Durability
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import Version2Peer, peer2, publish


class FarBus(Bus):
    """One that keeps its messages elsewhere: what is handed over is there when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = CommitLog(Durability.OS, elsewhere=True)
        self.broker = Broker(Settings(), commit_log=self.ledger)

    def hand_over(self) -> int:
        self.ledger.forget_changes()
        lot = self.ledger.take(is_owed=True)
        assert lot is not None
        return lot.number

    def reach_in(self, class_id: int, lot: int) -> None:
        self.ledger.reach_in(class_id, lot)
        self.broker.mark_durable(self.ledger.reached)


def confirmed(peer: Version2Peer) -> list[int]:
    return [said.message_id for said in peer.told() if said.kind == "confirm"]


def test_who_publishes_to_one_class_waits_for_no_other() -> None:
    bus = FarBus()
    slow = peer2(bus, publish(1, 0, b"a"), classes=(1, 2), name="slow")
    quick = peer2(bus, publish(2, 0, b"a"), classes=(1, 2), name="quick")
    lot = bus.hand_over()
    bus.reach_in(2, lot)
    assert (confirmed(slow), confirmed(quick)) == ([], [1])
    quick.send(publish(1, 1, b"b"), publish(2, 2, b"c"))
    bus.reach_in(2, bus.hand_over())
    assert confirmed(quick) == []  # Some of its own are on that way.
    bus.broker.mark_durable(bus.ledger.taken)
    assert (confirmed(slow), confirmed(quick)) == ([1], [3])


def test_a_program_that_comes_again_waits_for_what_it_sent_before() -> None:
    bus = FarBus()
    sent = publish(1, 0, b"a", b"b")
    first = peer2(bus, sent, classes=(1, 2), name="till", instance="one")
    lot = bus.hand_over()
    first.disconnect()
    again = peer2(bus, sent, classes=(1, 2), name="till", instance="one")
    assert confirmed(again) == []
    again.send(publish(2, 2, b"c"))
    bus.reach_in(2, bus.hand_over())
    assert confirmed(again) == []
    bus.reach_in(1, lot)
    assert confirmed(again) == [3]
