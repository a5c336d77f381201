"""One subscription and its outbox, without a broker: sending, acks and redelivery."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from simplebus.core.limits import (
    BACKOFF_TICKS_MAX,
    CONNECTION_SCAN_MESSAGES_MAX,
    FRAME_BYTES_MIN,
    REDELIVERY_PIECES,
    REDELIVERY_PLAIN_BYTES,
    REDELIVERY_PLAIN_MESSAGES,
    SCAN_MESSAGES_MAX,
    SEND_BYTES,
)
from simplebus.core.outbox import Outbox
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.redelivery.delivery_policy import DeliveryPolicy
from simplebus.core.redelivery.timer_wheel import Span
from simplebus.core.ring.memory_budget import MemoryBudget
from simplebus.core.ring.ring import Ring
from simplebus.core.steps import run_to_end
from simplebus.core.subscription import selection
from simplebus.core.subscription.position import Position
from simplebus.core.subscription.selection import MessageSelection
from simplebus.core.subscription.subscription import BrokerSubscription
from tests.behaviour.wire_peer import BrokerHarness, build_batch, numbered
from tests.behaviour.wire_peer_v2 import (
    Version2Message,
    channel_envelope,
    connect_request,
    connect_version2,
    publish_envelopes,
    subscribe,
)
from tests.support.oracles import build_frame, parse_frame, split_frames
from tests.support.strategies import MESSAGE

ACK_TIMEOUT = 6


class SubscriptionHarness:
    """Ring of a class, one subscription to it, and its outbox."""

    def __init__(
        self,
        *,
        window: AckWindow | None = None,
        outbox: Outbox | None = None,
        spans: Iterable[Span] = (),
        ack_timeout_ticks: int = ACK_TIMEOUT,
    ) -> None:
        self.ring = Ring(
            class_id=1, messages_max=1 << 20, bytes_max=1 << 26, budget=MemoryBudget(1 << 26)
        )
        self.outbox = outbox or Outbox(5)
        self.position = Position(
            ring=self.ring,
            window=window or AckWindow(floor=0),
            delivery_policy=DeliveryPolicy(ack_timeout_ticks=ack_timeout_ticks),
            redeliveries=spans,
        )
        self.position.attach(5, 7)
        self.subscription = BrokerSubscription(self.position, self.outbox, 7)
        self.tick_number = 0

    def publish(self, *payloads: bytes) -> None:
        frames = [build_frame(MESSAGE, class_id=1, content=p) for p in payloads]
        self.ring.append(build_batch(*frames), self.tick_number % ACK_TIMEOUT)
        self.outbox.enqueue(self.subscription)
        self.check_invariants()

    def read_bytes(self, most: int = 1 << 40) -> bytes:
        taken = b""
        while len(taken) < most and (piece := self.outbox.peek(self.tick_number)):
            count = min(len(piece), most - len(taken))
            taken += piece[:count]
            self.outbox.mark_sent(count, self.tick_number)
            self.check_invariants()
        return taken

    def receive_ids(self) -> list[int]:
        frames, leftover = split_frames(self.read_bytes())
        assert leftover == b""
        return [parse_frame(frame)[2] for frame in frames]

    def ack(self, first: int, last: int) -> None:
        self.subscription.window.ack_range(first, last)
        self.ring.release(self.subscription.window.floor)
        self.check_invariants()

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.tick_number += 1
            run_to_end(self.position.tick_in_parts(self.tick_number))
            if self.subscription.has_work:
                self.outbox.enqueue(self.subscription)
            self.check_invariants()

    def ticks_with_deliveries(self, ticks: int) -> dict[int, list[int]]:
        """Return (tick, ids) for the next ticks in which messages are sent."""
        sent = {}
        for _ in range(ticks):
            self.tick()
            if ids := self.receive_ids():
                sent[self.tick_number] = ids
        return sent

    def check_invariants(self) -> None:
        self.ring.check()
        self.position.check_invariants()
        self.subscription.check_invariants()


def test_empty_outbox_is_idle() -> None:
    outbox = Outbox(5)
    assert outbox.is_idle
    assert bytes(outbox.peek(0)) == b""
    assert (outbox.pending_bytes, outbox.sent_bytes) == (0, 0)


def test_replies_are_sent_in_order_across_partial_writes() -> None:
    outbox = Outbox(5)
    outbox.queue_reply(b"one")
    outbox.queue_reply(b"two")
    assert (outbox.is_idle, outbox.pending_bytes) == (False, 6)
    assert bytes(outbox.peek(0)) == b"onetwo"
    outbox.mark_sent(4, 0)
    outbox.queue_reply(b"three")
    assert outbox.pending_bytes == 7
    assert bytes(outbox.peek(0)) == b"wo"
    outbox.mark_sent(2, 0)
    assert bytes(outbox.peek(0)) == b"three"
    outbox.mark_sent(5, 0)
    assert (outbox.is_idle, outbox.pending_bytes, outbox.sent_bytes) == (True, 0, 11)


def test_new_messages_are_sent_in_one_piece_without_copy() -> None:
    harness = SubscriptionHarness()
    harness.publish(*numbered(100))
    piece = harness.outbox.peek(0)
    assert len(split_frames(bytes(piece))[0]) == 100
    assert harness.outbox.pending_bytes == 0


def test_peek_does_not_send() -> None:
    harness = SubscriptionHarness()
    harness.publish(*numbered(3))
    for _ in range(2):
        assert len(split_frames(bytes(harness.outbox.peek(0)))[0]) == 3
        harness.check_invariants()
    assert harness.position.statistics().delivered == 0
    assert harness.position.statistics().waiting == 3
    assert harness.receive_ids() == [0, 1, 2]
    assert harness.position.statistics().waiting == 0
    assert harness.outbox.is_idle


def test_write_of_zero_bytes_sends_no_message() -> None:
    harness = SubscriptionHarness()
    harness.publish(*numbered(3))
    piece = harness.outbox.peek(0)
    harness.outbox.mark_sent(0, 0)
    harness.check_invariants()
    assert len(piece) > 0
    assert harness.subscription.window.cursor == 0
    assert harness.receive_ids() == [0, 1, 2]


@pytest.mark.parametrize("most", range(1, 46))
def test_stream_continues_after_cut_at_any_byte(most: int) -> None:
    harness, whole = SubscriptionHarness(), SubscriptionHarness()
    for each in (harness, whole):
        each.publish(b"a", b"bc", b"def")
    expected = whole.read_bytes()
    begun = harness.read_bytes(most)
    # A partially written frame counts as sent, an unwritten one does not.
    assert harness.subscription.window.cursor == sum(start < most for start in (0, 14, 29))
    assert begun + harness.read_bytes() == expected


def test_rest_of_cut_frame_survives_release_from_ring() -> None:
    harness = SubscriptionHarness()
    harness.publish(b"first", b"second")
    frame = harness.ring.copy_frame(0)
    begun = harness.read_bytes(5)
    assert harness.outbox.pending_bytes == len(frame) - 5
    harness.ack(0, 1)
    harness.publish(b"overwrites", b"what was there")
    assert (begun + harness.read_bytes())[: len(frame)] == frame


def test_timer_index_is_the_tick_of_sending() -> None:
    harness = SubscriptionHarness()
    harness.tick(4)
    harness.publish(b"a", b"b")
    harness.tick(3)
    half = len(harness.ring.copy_frame(0))
    frames = [harness.read_bytes(half)]
    harness.tick()
    frames.append(harness.read_bytes())
    assert [parse_frame(frame)[3] for frame in frames] == [7 % ACK_TIMEOUT, 8 % ACK_TIMEOUT]


def test_frame_cut_by_tick_keeps_its_first_tick() -> None:
    harness = SubscriptionHarness()
    harness.publish(b"a")
    begun = harness.read_bytes(3)
    harness.tick()
    assert parse_frame(begun + harness.read_bytes())[3] == 0


def test_redelivers_with_growing_backoff_until_acked() -> None:
    harness = SubscriptionHarness()
    harness.tick(2)
    harness.publish(b"a")
    assert harness.receive_ids() == [0]
    k = 2
    expected = [k + 6, k + 18, k + 42, k + 90, k + 150, k + 210]
    assert list(harness.ticks_with_deliveries(215)) == expected
    harness.ack(0, 1)
    assert harness.ticks_with_deliveries(100) == {}
    statistics = harness.position.statistics()
    assert (statistics.delivered, statistics.redelivered) == (1, 6)
    assert (statistics.acknowledged, statistics.in_flight) == (1, 0)


def test_backoff_is_at_least_the_ack_timeout() -> None:
    pause = BACKOFF_TICKS_MAX + 5
    harness = SubscriptionHarness(ack_timeout_ticks=pause)
    harness.publish(b"a")
    assert harness.receive_ids() == [0]
    assert list(harness.ticks_with_deliveries(3 * pause)) == [pause, 2 * pause, 3 * pause]


def test_ack_timeout_starts_when_message_is_written() -> None:
    harness = SubscriptionHarness()
    harness.publish(b"a")
    assert harness.receive_ids() == [0]
    harness.tick(10)  # Due at 6, written at 10, due again at 10 + 12.
    assert harness.receive_ids() == [0]
    assert list(harness.ticks_with_deliveries(30)) == [22]


def test_overdue_message_is_queued_once_for_stalled_peer() -> None:
    harness = SubscriptionHarness()
    harness.publish(*numbered(5))
    assert harness.receive_ids() == [0, 1, 2, 3, 4]
    harness.tick(500)
    assert harness.receive_ids() == [0, 1, 2, 3, 4]
    assert harness.receive_ids() == []


def test_redelivers_only_unacked_messages() -> None:
    harness = SubscriptionHarness()
    harness.publish(*numbered(10))
    assert len(harness.receive_ids()) == 10
    harness.ack(0, 2)
    harness.ack(4, 6)
    harness.ack(9, 10)
    harness.tick(6)
    assert harness.receive_ids() == [2, 3, 6, 7, 8]
    harness.ack(2, 4)
    assert harness.ticks_with_deliveries(12) == {18: [6, 7, 8]}


def test_ack_cancels_queued_redelivery() -> None:
    harness = SubscriptionHarness()
    harness.publish(*numbered(4))
    assert len(harness.receive_ids()) == 4
    harness.tick(6)
    harness.ack(1, 3)
    assert harness.receive_ids() == [0, 3]


def test_redelivery_ticks_follow_send_ticks() -> None:
    harness = SubscriptionHarness()
    for number in range(3):
        harness.publish(b"%d" % number)
        assert harness.receive_ids() == [number]
        harness.tick()
    assert harness.ticks_with_deliveries(8) == {6: [0], 7: [1], 8: [2]}


def test_redelivered_frame_differs_only_in_timer_index() -> None:
    harness = SubscriptionHarness()
    harness.publish(b"same\r\n")
    first = harness.read_bytes()
    harness.tick(7)
    redelivered = harness.read_bytes()
    assert (first[:7], first[9:]) == (redelivered[:7], redelivered[9:])
    assert (parse_frame(first)[3], parse_frame(redelivered)[3]) == (0, 7 % ACK_TIMEOUT)


def test_redeliveries_precede_new_messages_in_bounded_copies() -> None:
    harness = SubscriptionHarness()
    harness.publish(*numbered(20, size=100_000))
    assert harness.receive_ids() == list(range(20))
    harness.tick(6)
    harness.publish(b"new")
    piece = harness.outbox.peek(harness.tick_number)
    assert len(piece) <= REDELIVERY_PLAIN_BYTES + 100_013
    assert harness.receive_ids() == [*range(20), 20]


def test_fragmented_window_is_copied_in_small_parts() -> None:
    harness = SubscriptionHarness()
    count = 2 * REDELIVERY_PIECES + 100
    harness.publish(*[b""] * 2 * count)
    assert len(harness.receive_ids()) == 2 * count
    for number in range(0, 2 * count, 2):
        harness.subscription.window.ack_range(number, number + 1)
    harness.tick(6)
    sizes = []
    while piece := harness.outbox.peek(harness.tick_number):
        sizes.append(len(piece) // FRAME_BYTES_MIN)
        is_full = sizes[-1] == REDELIVERY_PIECES
        assert (harness.outbox.scanned_count > CONNECTION_SCAN_MESSAGES_MAX) == is_full
        harness.outbox.mark_sent(len(piece), harness.tick_number)
    assert sizes == [REDELIVERY_PIECES, REDELIVERY_PIECES, 100]


@pytest.mark.parametrize("gap_step", [3, 50, 10_000])
def test_parts_of_a_window_with_gaps_are_copied_once_each(gap_step: int) -> None:
    harness = SubscriptionHarness()
    count = REDELIVERY_PLAIN_MESSAGES + 5000
    harness.publish(*[b""] * count)
    assert len(harness.receive_ids()) == count
    acked = [n for n in range(count) if (n < 3000 and n % 2) or n % gap_step == 1]
    for number in acked:
        harness.subscription.window.ack_range(number, number + 1)
    harness.tick(6)
    assert harness.receive_ids() == sorted(set(range(count)).difference(acked))


def test_plain_redeliveries_are_copied_in_large_parts() -> None:
    harness = SubscriptionHarness()
    count = REDELIVERY_PLAIN_MESSAGES + 5
    harness.publish(*[b""] * count)
    assert harness.receive_ids() == list(range(count))
    harness.tick(6)
    piece = harness.outbox.peek(harness.tick_number)
    assert len(piece) == REDELIVERY_PLAIN_MESSAGES * FRAME_BYTES_MIN
    assert harness.receive_ids() == list(range(count))


def test_redelivery_continues_after_cut_at_any_byte() -> None:
    harness = SubscriptionHarness()
    harness.publish(b"a", b"bc")
    assert harness.receive_ids() == [0, 1]
    harness.tick(6)
    begun = harness.read_bytes(17)
    harness.ack(0, 2)
    frames, leftover = split_frames(begun + harness.read_bytes())
    assert [parse_frame(frame)[4] for frame in frames] == [b"a", b"bc"]
    assert leftover == b""


def test_size_of_one_write_is_bounded() -> None:
    harness = SubscriptionHarness()
    harness.publish(*numbered(40, size=100_000))
    piece = harness.outbox.peek(0)
    assert SEND_BYTES - 100_100 < len(piece) <= SEND_BYTES
    assert harness.receive_ids() == list(range(40))


def test_classes_are_served_in_turns() -> None:
    outbox = Outbox(5)
    lines = [SubscriptionHarness(outbox=outbox), SubscriptionHarness(outbox=outbox)]
    for harness in lines:
        harness.publish(*numbered(30, size=100_000))
    order = []
    while piece := outbox.peek(0):
        order.append(
            lines.index(next(ln for ln in lines if ln.subscription is outbox._peeked_source))
        )
        outbox.mark_sent(len(piece), 0)
        for harness in lines:
            harness.check_invariants()
    assert order[:4] == [0, 1, 0, 1]
    assert outbox.is_idle


def test_new_subscription_takes_over_backlog() -> None:
    backlog_window = AckWindow(floor=0)
    backlog_window.cursor = 6
    backlog_window.ack_range(0, 2)
    backlog_window.ack_range(3, 4)
    harness = SubscriptionHarness(window=backlog_window, spans=[Span(0, 5, 1), Span(5, 6, 0)])
    harness.publish(*numbered(8))
    harness.ring.release(2)
    assert harness.receive_ids() == [2, 4, 5, 6, 7]
    statistics = harness.position.statistics()
    assert (statistics.delivered, statistics.redelivered, statistics.in_flight) == (3, 2, 5)
    assert harness.ticks_with_deliveries(12) == {6: [5, 6, 7], 12: [2, 4]}
    assert harness.position.statistics().redelivered == 7
    harness.ack(2, 8)
    assert harness.position.statistics().acknowledged == 5


def test_dropped_messages_are_not_delivered() -> None:
    harness = SubscriptionHarness()
    harness.publish(*numbered(6))
    assert len(split_frames(harness.read_bytes(3 * len(harness.ring.copy_frame(0))))[0]) == 3
    harness.ack(1, 2)
    harness.position.skip_to(5)
    harness.ring.release(5)
    harness.check_invariants()
    statistics = harness.position.statistics()
    assert (statistics.dropped, statistics.in_flight, statistics.acknowledged) == (4, 0, 1)
    assert harness.receive_ids() == [5]
    harness.tick(6)
    assert harness.receive_ids() == [5]


def test_removed_subscription_leaves_outbox() -> None:
    harness = SubscriptionHarness()
    harness.publish(b"a")
    harness.outbox.remove(harness.subscription)
    harness.outbox.remove(harness.subscription)
    assert harness.outbox.is_idle
    assert harness.read_bytes() == b""


def test_invariant_check_detects_unqueued_work() -> None:
    harness = SubscriptionHarness()
    harness.ring.append(build_batch(build_frame(MESSAGE)), 0)
    with pytest.raises(AssertionError, match="is not queued"):
        harness.subscription.check_invariants()


def test_long_scan_without_matches_yields_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    count = 3 * SCAN_MESSAGES_MAX // 2
    contents = [channel_envelope("a", b"")] * count
    connect_version2(
        bus,
        publish_envelopes(1, 0, *contents),
        publish_envelopes(1, count, channel_envelope("x", b"!")),
    )
    options = {"channels": ["x"], "start": "earliest"}
    peer = connect_version2(bus, *[subscribe(1, n, **options) for n in range(1, 4)])
    looked, pick = 0, selection.select_messages

    def counting(ring: Ring, first: int, last: int, *arguments: Any) -> MessageSelection:
        nonlocal looked
        looked += last - first
        return pick(ring, first, last, *arguments)

    monkeypatch.setattr(selection, "select_messages", counting)
    outbox, turns, got = peer.session.outbox, 0, list[Version2Message]()
    while not outbox.is_idle:
        looked = 0
        got += peer.receive_deliveries()
        assert looked <= 4 * SCAN_MESSAGES_MAX
        turns += 1
    assert turns >= 3
    assert sorted(message.number for message in got) == [1, 2, 3]
    assert {message.message_id for message in got} == {count}


def test_reply_does_not_wait_for_end_of_scan() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    connect_version2(
        bus, publish_envelopes(1, 0, *[channel_envelope("a", b"")] * (2 * SCAN_MESSAGES_MAX))
    )
    peer = connect_version2(bus, subscribe(1, 5, channels=["x"], start="earliest"))
    assert [reply.kind for reply in peer.receive_replies()] == ["subscribe"]
    assert not peer.session.outbox.is_idle
    peer.send(connect_request(1))
    assert [reply.kind for reply in peer.receive_replies()] == ["connect"]
    for _ in range(4):
        assert peer.receive_all() == ([], [])
    assert peer.session.outbox.is_idle


def test_heartbeat_is_sent_during_long_scan() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    connect_version2(
        bus, publish_envelopes(1, 0, *[channel_envelope("a", b"")] * (2 * SCAN_MESSAGES_MAX))
    )
    peer = connect_version2(bus, subscribe(1, 5, channels=["x"], start="earliest"), heartbeat=1)
    peer.receive_replies()
    bus.tick(3)
    assert [reply.kind for reply in peer.receive_replies()] == ["heartbeat"]
