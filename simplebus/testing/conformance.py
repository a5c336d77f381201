"""Every promise that simplebus makes, as tests to inherit.

    class TestMyBus(BusConformance):
        def host(self, settings):
            return my_host(settings)

Rule 1: a promise stands in one place, and every bus keeps it: see `promises` for how one is
written, and `hosts` for what a bus has to show.
Rule 2: what is promised is at least once, in order, bounded, and told. That a newer subscription is
served before an older one, or an older one first, is not promised.
"""

from __future__ import annotations

from simplebus.testing.hosts import Host, blocking_host, memory_host, server_host
from simplebus.testing.suite import Suite
from simplebus.testing.suite_delivery import Delivering
from simplebus.testing.suite_handlers import Handling, Tasks
from simplebus.testing.suite_nack import Refusing
from simplebus.testing.suite_publish import Publishing
from simplebus.testing.suite_subscribe import Subscribing

__all__ = [
    "BlockingBusConformance",
    "BusConformance",
    "Host",
    "Suite",
    "blocking_host",
    "memory_host",
    "server_host",
]


class BlockingBusConformance(Delivering, Refusing, Publishing, Subscribing, Handling):
    """What every bus promises to every client, also to one without an event loop."""


class BusConformance(BlockingBusConformance, Tasks):
    """What every bus promises to clients under trio and asyncio."""
