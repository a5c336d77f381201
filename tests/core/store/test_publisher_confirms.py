"""Publisher confirms with remote storage, where classes become durable independently."""

from __future__ import annotations

from simplebus.core.broker.broker import Broker, Settings
from simplebus.core.commit_log import CommitLog
from simplebus.core.protocol.durability import Durability
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import Version2Peer, connect_version2, publish


class RemoteStorageBus(BrokerHarness):
    """Bus with remote storage. The test decides when a write batch is stored."""

    def __init__(self) -> None:
        super().__init__()
        self.commit_log = CommitLog(Durability.OS, is_remote=True)
        self.broker = Broker(Settings(), commit_log=self.commit_log)

    def pop_batch(self) -> int:
        self.commit_log.discard_changes()
        batch = self.commit_log.pop_write_batch(allow_empty=True)
        assert batch is not None
        return batch.number

    def mark_class_durable(self, class_id: int, batch_number: int) -> None:
        self.commit_log.mark_class_durable(class_id, batch_number)
        self.broker.mark_durable(self.commit_log.durable_position)


def confirmed_numbers(peer: Version2Peer) -> list[int]:
    return [reply.message_id for reply in peer.receive_replies() if reply.kind == "confirm"]


def test_confirms_wait_only_for_classes_published_to() -> None:
    bus = RemoteStorageBus()
    slow = connect_version2(bus, publish(1, 0, b"a"), classes=(1, 2), name="slow")
    quick = connect_version2(bus, publish(2, 0, b"a"), classes=(1, 2), name="quick")
    batch = bus.pop_batch()
    bus.mark_class_durable(2, batch)
    assert (confirmed_numbers(slow), confirmed_numbers(quick)) == ([], [1])
    quick.send(publish(1, 1, b"b"), publish(2, 2, b"c"))
    bus.mark_class_durable(2, bus.pop_batch())
    assert confirmed_numbers(quick) == []  # Message 1 is not durable yet.
    bus.broker.mark_durable(bus.commit_log.last_batch_number)
    assert (confirmed_numbers(slow), confirmed_numbers(quick)) == ([1], [3])


def test_reconnected_publisher_waits_for_its_earlier_messages() -> None:
    bus = RemoteStorageBus()
    sent = publish(1, 0, b"a", b"b")
    first = connect_version2(bus, sent, classes=(1, 2), name="till", instance="one")
    batch = bus.pop_batch()
    first.disconnect()
    again = connect_version2(bus, sent, classes=(1, 2), name="till", instance="one")
    assert confirmed_numbers(again) == []
    again.send(publish(2, 2, b"c"))
    bus.mark_class_durable(2, bus.pop_batch())
    assert confirmed_numbers(again) == []
    bus.mark_class_durable(1, batch)
    assert confirmed_numbers(again) == [3]
