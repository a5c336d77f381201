"""Confirms where each class has its own way to where its messages are kept."""

from __future__ import annotations

from simplebus.core.broker.broker import Broker, Settings
from simplebus.core.commit_log import CommitLog
from simplebus.core.protocol.durability import Durability
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import Version2Peer, connect_version2, publish


class BusTarget(BrokerHarness):
    """One that keeps its messages elsewhere: what is handed over is there when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.commit_log = CommitLog(Durability.OS, is_remote=True)
        self.broker = Broker(Settings(), commit_log=self.commit_log)

    def hand_over(self) -> int:
        self.commit_log.discard_changes()
        lot = self.commit_log.pop_write_batch(allow_empty=True)
        assert lot is not None
        return lot.number

    def reach_in(self, class_id: int, lot: int) -> None:
        self.commit_log.mark_class_durable(class_id, lot)
        self.broker.mark_durable(self.commit_log.durable_position)


def confirmed(peer: Version2Peer) -> list[int]:
    return [said.message_id for said in peer.receive_replies() if said.kind == "confirm"]


def test_who_publishes_to_one_class_waits_for_no_other() -> None:
    bus = BusTarget()
    slow = connect_version2(bus, publish(1, 0, b"a"), classes=(1, 2), name="slow")
    quick = connect_version2(bus, publish(2, 0, b"a"), classes=(1, 2), name="quick")
    lot = bus.hand_over()
    bus.reach_in(2, lot)
    assert (confirmed(slow), confirmed(quick)) == ([], [1])
    quick.send(publish(1, 1, b"b"), publish(2, 2, b"c"))
    bus.reach_in(2, bus.hand_over())
    assert confirmed(quick) == []  # Some of its own are on that way.
    bus.broker.mark_durable(bus.commit_log.last_batch_number)
    assert (confirmed(slow), confirmed(quick)) == ([1], [3])


def test_a_program_that_comes_again_waits_for_what_it_sent_before() -> None:
    bus = BusTarget()
    sent = publish(1, 0, b"a", b"b")
    first = connect_version2(bus, sent, classes=(1, 2), name="till", instance="one")
    lot = bus.hand_over()
    first.disconnect()
    again = connect_version2(bus, sent, classes=(1, 2), name="till", instance="one")
    assert confirmed(again) == []
    again.send(publish(2, 2, b"c"))
    bus.reach_in(2, bus.hand_over())
    assert confirmed(again) == []
    bus.reach_in(1, lot)
    assert confirmed(again) == [3]
