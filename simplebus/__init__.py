"""simplebus: a message bus that acknowledges every message.

    async with simplebus.connect("simplebus://127.0.0.1:8888") as bus:
        await bus.publish(b"hello", class_id=1)
        async with bus.subscribe(1) as messages:
            async for message in messages:
                print(message.payload)

A map of the package:

    core/     the engine and the client's half of the protocol: pure, no I/O, no clock
    client/   bus (trio and asyncio) and blocking: thin drivers of the client core
    server/   listeners and connections around the engine, on trio
    demo/     a drill with real processes, and a verdict on what it showed
    bench/    how fast the bus is on this machine
    cli       the command line over all of them; `pipes` is its pub and sub
"""

from __future__ import annotations

from simplebus.client.blocking import BlockingBus, connect_blocking
from simplebus.client.blocking_subscription import BlockingSubscription
from simplebus.client.bus import Bus, connect
from simplebus.client.subscription import Subscription
from simplebus.core.client import ClientStatistics
from simplebus.core.errors import (
    BusConnectionError,
    BusError,
    LocalProtocolError,
    Reason,
    RemoteProtocolError,
)
from simplebus.core.messages import Batch, Message

__all__ = [
    "Batch",
    "BlockingBus",
    "BlockingSubscription",
    "Bus",
    "BusConnectionError",
    "BusError",
    "ClientStatistics",
    "LocalProtocolError",
    "Message",
    "Reason",
    "RemoteProtocolError",
    "Subscription",
    "connect",
    "connect_blocking",
]
