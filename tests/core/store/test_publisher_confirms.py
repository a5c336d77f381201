"""Publisher confirms that may wait, and those of classes that become durable independently."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from simplebus.core.broker.broker import Broker, Settings
from simplebus.core.commit_log import CommitLog
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import CONFIRM_WAIT_SECONDS
from simplebus.core.protocol.durability import Durability
from simplebus.core.protocol.frames import CONFIRM_MAY_WAIT, MESSAGE
from tests.behaviour.wire_peer import BrokerHarness, heartbeat
from tests.behaviour.wire_peer_v2 import (
    Version2Peer,
    ack,
    connect_version2,
    publish,
    subscribe,
    unsubscribe,
)
from tests.support.oracles import build_frame


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


def publish_patiently(number: int) -> bytes:
    """Encode a message of class 1 whose Confirm may wait."""
    return build_frame(
        MESSAGE, class_id=1, message_id=number, timer_index=CONFIRM_MAY_WAIT, content=b"x"
    )


def test_confirm_that_may_wait_is_sent_in_front_of_the_next_message() -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, subscribe(1, 5), publish_patiently(0))
    frames = peer.receive_frames()
    assert [frame[:1] for frame in frames[-3:]] == [b"6", b"7", b"1"]


def test_confirm_that_may_wait_is_sent_alone_after_a_time() -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, publish_patiently(0))
    assert confirmed_numbers(peer) == []
    peer.send(publish_patiently(1))
    bus.broker.run_due_wakeups()
    assert confirmed_numbers(peer) == []
    assert bus.broker.next_wakeup == bus.broker.clock.now + CONFIRM_WAIT_SECONDS
    bus.broker.clock.now += CONFIRM_WAIT_SECONDS
    bus.broker.run_due_wakeups()
    assert peer.session.session_id in bus.broker.end_turn().flush
    assert confirmed_numbers(peer) == [2]


def test_messages_in_quick_succession_do_not_extend_the_wait_for_a_confirm() -> None:
    bus = BrokerHarness()
    bus.broker.clock.now = 100.0
    peer = connect_version2(bus, publish_patiently(0))
    bus.broker.clock.now += 0.5 * CONFIRM_WAIT_SECONDS
    peer.send(publish_patiently(1))
    bus.broker.clock.now = 100.0 + CONFIRM_WAIT_SECONDS
    bus.broker.run_due_wakeups()
    assert confirmed_numbers(peer) == [2]


def test_confirm_sent_with_other_bytes_starts_no_wait_for_the_next_one() -> None:
    bus = BrokerHarness()
    bus.broker.clock.now = 100.0
    peer = connect_version2(bus, subscribe(1, 5), publish_patiently(0))
    assert confirmed_numbers(peer) == [1]
    bus.broker.clock.now += 0.5 * CONFIRM_WAIT_SECONDS
    peer.send(unsubscribe(5))
    peer.receive_all()
    peer.send(publish_patiently(1))
    assert bus.broker.next_wakeup == bus.broker.clock.now + CONFIRM_WAIT_SECONDS


def test_fatal_error_follows_a_confirm_that_was_held() -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, publish_patiently(0))
    bus.broker.send_fatal_error(peer.session, RemoteProtocolError(Reason.STALLED, "test"))
    assert [reply.kind for reply in peer.receive_replies()][-2:] == ["confirm", "error"]


def test_message_that_could_not_be_applied_is_not_confirmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, publish(1, 0, b"stored"))
    peer.receive_all()
    monkeypatch.setattr(bus.broker.store, "publish_one", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        peer.send(publish(1, 1, b"lost"))
    assert confirmed_numbers(peer) == []
    assert peer.session.version2 is not None
    assert peer.session.version2.next_number == 1


def test_frame_without_the_flag_ends_the_wait_for_a_confirm() -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, publish_patiently(0))
    peer.send(heartbeat())
    assert confirmed_numbers(peer) == [1]
    peer.send(publish_patiently(1) + publish(1, 2, b"y"))
    assert confirmed_numbers(peer) == [3]


def test_ack_does_not_end_the_wait_for_a_confirm() -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, subscribe(2, 5), classes=(1, 2))
    connect_version2(bus, publish(2, 0, b"y"), classes=(2,))
    peer.receive_all()
    peer.send(publish_patiently(0))
    peer.send(ack(5, 0, 1))
    assert confirmed_numbers(peer) == []


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
    second = connect_version2(bus, sent, classes=(1, 2), name="till", instance="one")
    assert confirmed_numbers(second) == []
    second.send(publish(2, 2, b"c"))
    bus.mark_class_durable(2, bus.pop_batch())
    assert confirmed_numbers(second) == []
    bus.mark_class_durable(1, batch)
    assert confirmed_numbers(second) == [3]
