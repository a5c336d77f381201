"""Conformance suite: every guarantee of simplebus, as tests to inherit.

    class TestMyBus(BusConformance):
        def host(self, settings):
            return my_host(settings)

Guaranteed are delivery at least once, order, bounded resources, and an error for every failure. The
order in which different subscriptions are served is not guaranteed. `suite` describes how a test is
written, and `hosts` what a bus must provide.
"""

from __future__ import annotations

from simplebus.testing.hosts import Host, blocking_host, memory_host, server_host
from simplebus.testing.suite import Suite
from simplebus.testing.suite_delivery import DeliverySuite
from simplebus.testing.suite_handlers import HandlerSuite, TaskSuite
from simplebus.testing.suite_nack import NackSuite
from simplebus.testing.suite_publish import PublishSuite
from simplebus.testing.suite_subscribe import SubscribeSuite

__all__ = [
    "BlockingBusConformance",
    "BusConformance",
    "Host",
    "Suite",
    "blocking_host",
    "memory_host",
    "server_host",
]


class BlockingBusConformance(DeliverySuite, NackSuite, PublishSuite, SubscribeSuite, HandlerSuite):
    """Guarantees of every bus to every client, also to one without an event loop.

    Subclasses override `host`, and `run` to choose an event loop.
    """


class BusConformance(BlockingBusConformance, TaskSuite):
    """Guarantees of every bus to clients under trio and asyncio.

    Subclasses override `host`, and `run` to choose an event loop.
    """
