"""Notification of very many subscriptions in several turns."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import connect_version2, publish, subscribe, unsubscribe

PEERS = 3
OPTIONS: list[dict[str, object]] = [
    {},
    {"group": "g"},
    {"max_pending": 2, "slow": "drop_oldest"},
]
"""Options of the subscription of each peer."""
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["publish", "notify", "subscribe", "unsubscribe", "close"]),
        st.integers(0, PEERS - 1),
    ),
    max_size=16,
)


def run_steps(steps: list[tuple[str, int]], bus: BrokerHarness) -> list[list[bytes]]:
    """Run the steps. Returns the payloads that each peer has received."""
    peers = [connect_version2(bus) for _ in range(PEERS)]
    received: list[list[bytes]] = [[] for _ in peers]
    publisher = connect_version2(bus)
    published_count = 0

    def receive(index: int) -> None:
        received[index] += [message.content for message in peers[index].receive_deliveries()]

    for action, index in [*(("subscribe", index) for index in range(PEERS)), *steps]:
        peer = peers[index]
        if action == "publish":
            publisher.send(publish(1, published_count, b"%d" % published_count))
            published_count += 1
        elif action == "notify":
            bus.broker.store.continue_deferred_work()
        elif not peer.session.is_closed:
            if action == "close":
                peer.disconnect()
            elif action == "subscribe" and not peer.session.subscriptions:
                peer.send(subscribe(1, 1, **OPTIONS[index]))
                receive(index)
            elif action == "unsubscribe" and peer.session.subscriptions:
                peer.send(unsubscribe(1))
    while bus.broker.store.has_deferred_work:
        bus.broker.store.continue_deferred_work()
    for index, peer in enumerate(peers):
        if not peer.session.is_closed:
            receive(index)
    return received


@given(STEPS, st.integers(1, 2))
def test_subscribers_receive_the_same_messages_as_in_one_turn(
    steps: list[tuple[str, int]], per_turn: int
) -> None:
    bus = BrokerHarness()
    bus.broker.store.limit_turns(per_turn)
    assert run_steps(steps, bus) == run_steps(steps, BrokerHarness())


def test_one_turn_notifies_few_subscriptions() -> None:
    bus = BrokerHarness()
    bus.broker.store.limit_turns(2)
    peers = [connect_version2(bus) for _ in range(5)]
    for peer in peers:
        peer.send(subscribe(1, 1))
        assert not peer.receive_deliveries()
    publisher = connect_version2(bus)
    publisher.send(publish(1, 0, b"x"))

    def count_received() -> int:
        return sum(len(peer.receive_deliveries()) for peer in peers)

    counts = [count_received()]
    while bus.broker.store.has_deferred_work:
        bus.broker.store.continue_deferred_work()
        counts.append(count_received())
    assert counts == [2, 2, 1]
