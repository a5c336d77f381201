"""Memory bound of subscriptions."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.broker.broker import Broker, Settings
from simplebus.core.limits import Limits
from simplebus.nats.limits import IMMEDIATE_REMOVALS_MAX
from simplebus.nats.nats_server import apply_settings_in_parts
from simplebus.nats.server.subscription_memory import estimate_bytes
from simplebus.nats.settings import NatsSettings
from tests.nats.server.nats_peer import Client, NatsServerHarness

QUIET = b'CONNECT {"verbose":false,"pedantic":false}\r\n'
TOO_MANY = b"-ERR 'maximum subscriptions exceeded'\r\n"
ONE = estimate_bytes(b"a.100", b"", b"100")


def harness_with_limit(limit: int) -> NatsServerHarness:
    harness = NatsServerHarness()
    harness.nats_server.routes.subscription_memory.limit_bytes = limit
    harness.nats_server.routes.subscription_memory.client_min_bytes = 0
    return harness


def subscribed(client: Client, count: int, first: int = 100) -> int:
    """Make this many equal subscriptions. Returns the number that were accepted."""
    client.send(b"".join(b"SUB a.%d %d\r\n" % (n, n) for n in range(first, first + count)))
    client.harness.nats_server.routes.subscription_memory.check()
    return len(client.session.subscriptions)


def test_account_uses_at_most_half_of_the_free_memory() -> None:
    harness = harness_with_limit(12 * ONE)
    first, second = harness.client(QUIET), harness.client(QUIET)
    second.session.address = "192.0.2.7"
    assert subscribed(first, 6) == 6
    assert first.lines() == b""
    assert subscribed(first, 3, 200) == 6
    assert first.lines() == 3 * TOO_MANY
    second_client = harness.client(QUIET)  # From the same address.
    assert subscribed(second_client, 1) == 0
    assert subscribed(second, 6) == 3
    assert second.lines() == 3 * TOO_MANY
    first.send(b"UNSUB 100\r\n")
    assert subscribed(second, 1, 200) == 3
    first.send(b"UNSUB 101\r\n")
    assert subscribed(second, 1, 200) == 4
    second.send(b"PUB a.102 1\r\nx\r\n")
    assert first.lines() == b"MSG a.102 102 1\r\nx\r\n"
    assert harness.nats_server.routes.subscription_memory.used_bytes == 8 * ONE


def test_each_client_has_a_minimum() -> None:
    harness = harness_with_limit(20 * ONE)
    harness.nats_server.routes.subscription_memory.client_min_bytes = 3 * ONE
    greedy = harness.client(QUIET)
    assert subscribed(greedy, 20) == 10
    for _ in range(3):
        assert subscribed(harness.client(QUIET), 5) == 3
    assert subscribed(harness.client(QUIET), 5) == 1  # The account's memory is used up.
    greedy.close()
    assert subscribed(harness.client(QUIET), 5) == 3


def test_reconnected_client_can_subscribe_before_cleanup() -> None:
    subscriptions = [
        (b"a.%d" % n, b"g" * (n % 2), b"%d" % n) for n in range(IMMEDIATE_REMOVALS_MAX + 1)
    ]
    harness = harness_with_limit(
        3 * sum(estimate_bytes(*subscription) for subscription in subscriptions)
    )
    interest = harness.nats_server.routes.subscription_memory
    for _ in range(2):
        client = harness.client(
            QUIET, b"".join(b"SUB %s %s %s\r\n" % subscription for subscription in subscriptions)
        )
        assert client.lines() == b""
        client.close()
        assert harness.nats_server.routes.has_abandoned
    assert interest.used_bytes > 0
    interest.check()
    while harness.nats_server.routes.has_abandoned:
        harness.nats_server.tick()
    interest.check()
    assert (interest.used_bytes, interest._bytes_by_account) == (0, {})


def test_limit_is_a_fraction_of_the_bus_memory() -> None:
    limits = Limits(total_bytes=1 << 30)
    harness = NatsServerHarness(broker=Broker(Settings(limits=limits)))
    interest = harness.nats_server.routes.subscription_memory
    assert interest.limit_bytes == 1 << 28
    harness.nats_server.bus_adapter.broker.settings = Settings(limits=Limits(total_bytes=1 << 31))  # type: ignore[union-attr]
    for _ in apply_settings_in_parts(harness.nats_server, NatsSettings()):
        pass
    assert interest.limit_bytes == 1 << 29


KINDS: dict[str, Callable[[int], tuple[bytes, bytes]]] = {
    "a name": lambda n: (b"a%d.b%d" % (n, n), b""),
    "a long name": lambda n: (b"x" * 300 + b"%d" % n, b""),
    "wildcards behind other names": lambda n: (b"a%d.*.b%d.>" % (n, n), b""),
    "wildcards behind the same names": lambda n: (b"a.*.b.c.%d.*" % n, b""),
    "many steps behind other names": lambda n: (b"a%d.*." % n + b"x." * 100 + b"%d" % n, b""),
    "many steps": lambda n: (b"a.*." + b".".join(b"%d-%d" % (k, n) for k in range(100)), b""),
    "a queue group each": lambda n: (b"a%d.*" % n, b"q%d" % n),
    "one queue group": lambda n: (b"a.*", b"q"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_estimate_is_close_to_actual_memory(kind: str) -> None:
    harness = NatsServerHarness()
    client = harness.client(QUIET)
    requested = [(*KINDS[kind](n), b"%d" % n) for n in range(500)]
    commands = [b"SUB %s %s %s\r\n" % each for each in requested]
    client.send(commands[0])
    gc.collect()
    tracemalloc.start()
    try:
        for line in commands[1:]:
            client.send(line)
        gc.collect()
        traced_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    estimated_bytes = sum(estimate_bytes(*each) for each in requested[1:])
    assert len(client.session.subscriptions) == 500
    assert estimated_bytes / 12 < traced_bytes < 1.25 * estimated_bytes


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from(["sub", "sub", "sub", "queue", "unsub", "connect", "leave", "beat"]),
            st.integers(0, 6),
        ),
        max_size=40,
    )
)
def test_accounting_matches_subscriptions(
    script: list[tuple[int, str, int]],
) -> None:
    harness = harness_with_limit(40 * ONE)
    interest = harness.nats_server.routes.subscription_memory
    clients: dict[int, Client] = {}
    for client_name, action, number in script:
        client = clients.get(client_name)
        if client is None:
            client = clients[client_name] = harness.client(QUIET)
            client.session.address = f"192.0.2.{client_name % 2}"
        match action:
            case "sub":
                client.send(b"SUB a.%d.* %d\r\n" % (number, number))
            case "queue":
                client.send(b"SUB b.%d q q%d\r\n" % (number % 2, number))
            case "unsub":
                client.send(b"UNSUB %d\r\nUNSUB q%d\r\n" % (number, number))
            case "connect":
                client.send(QUIET)
            case "leave":
                clients.pop(client_name).close()
            case "beat":
                harness.nats_server.tick()
        interest.check()
        subscriptions_ = [
            subscription
            for client_ in clients.values()
            for subscription in client_.session.subscriptions.values()
        ]
        estimated_bytes = sum(
            estimate_bytes(subscription.subject, subscription.queue, subscription.sid)
            for subscription in subscriptions_
        )
        assert (
            sum(interest._bytes_by_account.values())
            == estimated_bytes
            <= interest.used_bytes
            <= interest.limit_bytes
        )
        assert (
            sum(client_.session.subscription_memory_bytes for client_ in clients.values())
            == estimated_bytes
        )
    for client in clients.values():
        client.close()
    while harness.nats_server.routes.has_abandoned:
        harness.nats_server.tick()
    assert (interest.used_bytes, interest._bytes_by_account) == (0, {})
