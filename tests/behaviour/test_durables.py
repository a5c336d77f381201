"""Durables: their state without a connection, resuming, seek, and limits."""

from __future__ import annotations

from typing import NoReturn

import pytest

from simplebus.core.errors import Reason
from simplebus.core.limits import (
    BINDINGS_MAX,
    DURABLES_MEMORY_DIVISOR,
    EXPENSIVE_EVENTS_MAX,
    EXPENSIVE_EVENTS_READ_BYTES,
    Limits,
)
from simplebus.core.subscription.position import Position
from tests.behaviour.wire_peer import BrokerHarness, numbered
from tests.behaviour.wire_peer_v2 import (
    ack,
    channel_envelope,
    connect_version2,
    nack,
    publish,
    publish_envelopes,
    subscribe,
    timed_envelope,
    unsubscribe,
)


def test_durable_resumes_at_its_position() -> None:
    bus = BrokerHarness()
    first = connect_version2(bus, subscribe(1, 5, durable="d"))
    writer = connect_version2(bus, publish(1, 0, *numbered(6)))
    assert first.receive_message_ids() == list(range(6))
    first.send(ack(5, 0, 2), ack(5, 3, 4))
    first.disconnect()
    writer.send(publish(1, 6, b"x"))
    second = connect_version2(bus, subscribe(1, 8, durable="d", start="new"))
    messages, replies = second.receive_all()
    assert replies[0].content == {"cursor": 6, "floor": 2, "resumed": True}
    assert [(m.message_id, m.attempt) for m in messages] == [(2, 2), (4, 2), (5, 2), (6, 1)]


def test_acks_on_new_connection_apply_to_former_deliveries() -> None:
    bus = BrokerHarness()
    first = connect_version2(bus, subscribe(1, 5, durable="d"), publish(1, 0, *numbered(6)))
    assert len(first.receive_message_ids()) == 6
    first.disconnect()
    second = connect_version2(bus, subscribe(1, 5, durable="d"))
    second.send(ack(5, 0, 5))
    assert second.receive_message_ids() == [5]


def test_durable_has_one_session_at_a_time() -> None:
    bus = BrokerHarness()
    connect_version2(bus, subscribe(1, 5, durable="d"))
    assert connect_version2(bus, subscribe(1, 5, durable="d")).receive_error_codes() == [
        "durable_in_use"
    ]


@pytest.mark.parametrize(("to", "ids"), [(4, [4, 5]), (1, [1, 2, 3, 4, 5]), (99, [])])
def test_seek_moves_idle_durable(to: int, ids: list[int]) -> None:
    bus = BrokerHarness()
    connect_version2(bus, subscribe(1, 1, durable="other"))  # Keeps all messages stored.
    first = connect_version2(bus, subscribe(1, 5, durable="d"), publish(1, 0, *numbered(6)))
    assert len(first.receive_message_ids()) == 6
    first.send(ack(5, 0, 2), ack(5, 3, 4))
    first.disconnect()
    second = connect_version2(bus, subscribe(1, 8, durable="d", start={"sequence": to}, seek=True))
    messages, replies = second.receive_all()
    at = min(to, 6)
    assert replies[0].content == {"cursor": at, "floor": at, "resumed": True}
    assert [m.message_id for m in messages] == ids
    assert {m.attempt for m in messages} <= {1}
    statistics = bus.broker.classes[1].statistics()
    assert [s.durable for s in statistics.subscriptions] == ["other", "d"]
    assert statistics.delivered == 6 + len(ids)
    assert statistics.acknowledged == 3


def test_seek_releases_only_earlier_messages() -> None:
    bus = BrokerHarness()
    connect_version2(bus, subscribe(1, 5, durable="d"), publish(1, 0, *numbered(6))).disconnect()
    mover = connect_version2(bus)
    for to in (2, 2, 5):
        mover.send(
            subscribe(1, 1, durable="d", start={"sequence": to}, seek=True, max_in_flight=1),
            unsubscribe(1),
        )
        mover.receive_all()
        assert bus.broker.classes[1].ring.floor == to
    mover.send(subscribe(1, 1, durable="d", start={"sequence": 0}, seek=True))
    assert mover.receive_message_ids() == [5]  # Released messages are not redelivered.


def test_seek_creates_missing_durable() -> None:
    bus = BrokerHarness()
    asker = connect_version2(bus, publish(1, 0, *numbered(6)))
    asker.send(subscribe(1, 1, durable="d", start={"sequence": 4}, seek=True))
    messages, replies = asker.receive_all()
    assert replies[-1].content == {"cursor": 4, "floor": 4, "resumed": False}
    assert [m.message_id for m in messages] == [4, 5]


def test_seek_is_refused_while_durable_is_connected() -> None:
    bus = BrokerHarness()
    connect_version2(bus, subscribe(1, 5, durable="d"))
    second = connect_version2(bus, subscribe(1, 5, durable="d", start="earliest", seek=True))
    assert second.receive_error_codes() == ["durable_in_use"]


@pytest.mark.parametrize(
    "options", [{"start": "new"}, {"durable": "d"}, {"durable": "d", "group": "g", "start": "new"}]
)
def test_seek_requires_durable_and_start(options: dict[str, object]) -> None:
    bus = BrokerHarness()
    asker = connect_version2(bus, subscribe(1, 5, seek=True, **options))
    assert asker.receive_error_codes() == ["bad_request"]
    assert not bus.broker.classes[1].positions


@pytest.mark.parametrize("different_options", [{"channels": ["a"]}, {"group": "g"}])
def test_durable_with_different_options_is_refused(different_options: dict[str, object]) -> None:
    bus = BrokerHarness()
    connect_version2(bus, subscribe(1, 5, durable="d")).disconnect()
    assert connect_version2(
        bus, subscribe(1, 5, durable="d", **different_options)
    ).receive_error_codes() == ["subscription_mismatch"]
    assert (
        connect_version2(bus, subscribe(1, 5, durable="d")).receive_replies()[0].content["resumed"]
    )


def test_resumed_durable_uses_new_delivery_policy() -> None:
    bus = BrokerHarness()
    first = connect_version2(bus, subscribe(1, 5, durable="d"), publish(1, 0, *numbered(6)))
    assert len(first.receive_message_ids()) == 6
    first.disconnect()
    second = connect_version2(bus, subscribe(1, 5, durable="d", max_in_flight=2, max_deliveries=2))
    assert second.receive_message_ids() == [0, 1]
    second.send(ack(5, 0, 2))
    assert second.receive_message_ids() == [2, 3]
    bus.tick(12)
    assert second.receive_message_ids() == [4, 5]
    second.send(ack(5, 4, 6))
    assert second.receive_message_ids() == []
    assert bus.statistics(1).dropped == {Reason.MAX_DELIVERIES: 2}


def test_unsubscribe_with_forget_removes_durable() -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, subscribe(1, 5, durable="d"), publish(1, 0, b"a"))
    peer.send(unsubscribe(5))
    assert len(bus.statistics(1).subscriptions) == 1
    peer.send(subscribe(1, 5, durable="d"), unsubscribe(5, forget=True))
    assert bus.statistics(1).subscriptions == ()
    peer.send(subscribe(1, 5, durable="d", start="new"))
    assert not peer.receive_replies()[-1].content["resumed"]


def test_durables_per_class_are_limited() -> None:
    bus = BrokerHarness(durables=2)
    peer = connect_version2(bus, *[subscribe(1, n, durable=f"d{n}") for n in (1, 2, 3)])
    assert peer.receive_error_codes() == ["too_many_subscriptions"]
    peer.send(unsubscribe(1, forget=True), subscribe(1, 3, durable="d3"))
    assert peer.receive_error_codes() == []


def test_delays_survive_reconnect() -> None:
    bus = BrokerHarness()
    bus.broker.clock.now = 50.0
    first = connect_version2(bus, subscribe(1, 5, durable="d"))
    connect_version2(
        bus, publish_envelopes(1, 0, timed_envelope(b"a", not_before_ms=9000), timed_envelope(b"b"))
    )
    assert first.receive_message_ids() == [1]
    first.send(nack(5, 1, 2, 60_000))
    first.disconnect()
    second = connect_version2(bus, subscribe(1, 5, durable="d"))
    assert second.receive_message_ids() == []
    second.send(ack(5, 0, 1))  # Message 0 was never sent, so its ack is ignored.
    bus.broker.clock.now = 59.0
    bus.broker.run_due_wakeups()
    assert [(m.message_id, m.attempt) for m in second.receive_deliveries()] == [(0, 1)]
    bus.broker.clock.now = 110.0
    bus.broker.run_due_wakeups()
    assert [(m.message_id, m.attempt) for m in second.receive_deliveries()] == [(1, 2)]


def test_expiry_frees_space_while_durable_is_idle() -> None:
    bus = BrokerHarness(class_messages=4)
    bus.broker.clock.now = 50.0
    connect_version2(bus, subscribe(1, 5, durable="d", channels=["a"])).disconnect()
    contents = [b"\x0a" + (1000).to_bytes(8, "big") + b"\0\1a" + b"%d" % n for n in range(4)]
    writer = connect_version2(
        bus,
        publish_envelopes(1, 0, *contents),
        publish_envelopes(1, 4, channel_envelope("a", b"late")),
    )
    assert writer.session.parked_messages
    bus.broker.clock.now = 51.0
    bus.tick()
    assert not writer.session.parked_messages
    assert bus.statistics(1).dropped == {Reason.EXPIRED: 4}
    assert connect_version2(
        bus, subscribe(1, 5, durable="d", channels=["a"])
    ).receive_message_ids() == [4]


def test_durable_names_are_per_class() -> None:
    bus = BrokerHarness()
    peer = connect_version2(
        bus, subscribe(1, 5, durable="d"), subscribe(2, 6, durable="d"), classes=(1, 2)
    )
    assert peer.receive_error_codes() == []


def test_durable_group_is_found_by_durable_name() -> None:
    bus = BrokerHarness()
    peer = connect_version2(
        bus, subscribe(1, 1, durable="d", group="g"), subscribe(1, 2, durable="d")
    )
    assert peer.receive_error_codes() == ["subscription_mismatch"]
    peer.send(subscribe(1, 3, durable="d", group="h"))
    assert peer.receive_error_codes() == ["subscription_mismatch"]
    peer.send(subscribe(1, 4, group="g"), subscribe(1, 5, group="d"), subscribe(1, 6, durable="g"))
    assert peer.receive_error_codes() == []
    assert len(bus.statistics(1).subscriptions) == 4


def test_creating_durable_does_not_iterate_all_names() -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus)

    class Names(dict[tuple[str, str], Position]):
        def __iter__(self) -> NoReturn:
            raise AssertionError("the names are walked")

    cls = bus.broker.classes[1]
    cls.named_positions = Names(cls.named_positions)
    for n in range(1, 21):
        peer.send(subscribe(1, n, durable=f"d{n}"), unsubscribe(n))
    assert peer.receive_error_codes() == []
    assert len(cls.named_positions) == 20


def test_patterns_are_limited_by_memory() -> None:
    bus = BrokerHarness(class_bytes=1 << 22, total_bytes=1 << 22)
    patterns = [f"{number}.*.#" for number in range(100)]
    accepted_count = 0
    while True:
        peer = connect_version2(
            bus, subscribe(1, 5, durable=f"d{accepted_count}", channels=patterns)
        )
        reply = peer.receive_replies()[-1]
        peer.disconnect()
        if reply.kind == "error":
            break
        accepted_count += 1
    assert reply.content["code"] == "memory_limit"
    assert reply.content["message"].startswith("the bus has no memory for 100 patterns: ")
    assert 5 < accepted_count < 20
    assert len(bus.broker.classes[1].positions) == accepted_count
    last = connect_version2(bus, subscribe(1, 5, durable="d0", channels=patterns))
    last.send(unsubscribe(5, forget=True))
    assert last.receive_error_codes() == []
    assert (
        connect_version2(
            bus, subscribe(1, 5, durable="more", channels=patterns)
        ).receive_error_codes()
        == []
    )


@pytest.mark.parametrize("start", ["waiting", "when"])
def test_refused_subscription_uses_no_memory_and_keeps_backlog(start: str) -> None:
    bus = BrokerHarness(class_bytes=1 << 22, total_bytes=1 << 22)
    peer = connect_version2(bus, publish(1, 0, *numbered(3)))
    used = bus.broker.budget.used_bytes
    count = BINDINGS_MAX if start == "waiting" else 10
    patterns = [f"{number}.{'*.' * 100}#" for number in range(count)]
    peer.send(subscribe(1, 5, channels=patterns, start=start))
    assert peer.receive_error_codes() == ["memory_limit" if start == "waiting" else "bad_request"]
    while bus.broker.store.update_some_patterns():
        pass
    assert bus.broker.budget.used_bytes == used
    assert connect_version2(bus, subscribe(1, 5)).receive_message_ids() == [0, 1, 2]


def test_total_durables_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    size = Limits().total_bytes // (4 * DURABLES_MEMORY_DIVISOR)
    monkeypatch.setattr("simplebus.core.store.quotas.DURABLE_BYTES", size)
    bus = BrokerHarness()
    for class_id in (1, 2):
        peer = connect_version2(bus, subscribe(class_id, 1, durable="a"), classes=(class_id,))
        peer.send(subscribe(class_id, 2, durable="b"), subscribe(class_id, 3))
        assert [reply.kind for reply in peer.receive_replies()[-3:]] == ["subscribe"] * 3
    peer.send(subscribe(2, 4, request=8, durable="c"), subscribe(2, 5, group="g"))
    refused, granted = peer.receive_replies()
    assert (refused.content["code"], refused.message_id) == ("too_many_subscriptions", 8)
    assert "4 durables exist" in refused.content["message"]
    assert granted.kind == "subscribe"
    peer.send(unsubscribe(1, forget=True), subscribe(2, 4, durable="c"))
    assert [reply.kind for reply in peer.receive_replies()] == ["unsubscribe", "subscribe"]
    peer.send(unsubscribe(4), subscribe(2, 4, durable="c", seek=True, start="new"))
    assert [reply.kind for reply in peer.receive_replies()] == ["unsubscribe", "subscribe"]
    assert bus.broker.subscription_manager.quotas.durable_count == 4


def test_many_subscribe_requests_reduce_read_size() -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, classes=(1,))
    before = peer.session.next_read_bytes
    subscribes = b"".join(subscribe(1, number) for number in range(1, 501))
    peer.send(subscribes)
    assert peer.session.next_read_bytes < before
    assert peer.session.next_read_bytes <= max(
        EXPENSIVE_EVENTS_READ_BYTES, len(subscribes) * EXPENSIVE_EVENTS_MAX // 500
    )
