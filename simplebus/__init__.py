"""simplebus: a message bus that acknowledges every message.

    @simplebus.message(name="greetings")
    class Greeting(msgspec.Struct):
        text: str

    async with simplebus.connect("simplebus://127.0.0.1:8888") as bus:
        async with bus.subscribe(Greeting) as greetings:
            await bus.publish(Greeting("hello"))
            async for greeting in greetings:
                print(greeting.text)

A map of the package:

    core/     the engine and the client's half of the protocol: pure, no I/O, no clock
    client/   bus (trio and asyncio) and blocking: thin drivers of the client core; types and codecs
    bridge/   copies classes between buses, and to and from NATS servers
    gateway/  a bus between modules of one process, and gateways made of them
    memory    a bus in this process: engine and client without a socket
    server/   listeners and connections around the engine, on trio
    demo/     a drill with real processes, and a verdict on what it showed
    bench/    how fast the bus is on this machine
    cli       the command line over all of them; `pipes` is its pub and sub
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simplebus.client.access import Access
    from simplebus.client.blocking import BlockingBus, connect_blocking
    from simplebus.client.blocking_subscription import BlockingRawSubscription, BlockingSubscription
    from simplebus.client.bus import Bus
    from simplebus.client.codecs import Codec, DecodeError
    from simplebus.client.connecting import connect
    from simplebus.client.outbound import BusFullError
    from simplebus.client.registry import Binding, Registry, UnboundTypeError, bind, message
    from simplebus.client.subscription import RawSubscription, Subscription
    from simplebus.core.client.messages import Batch, Message
    from simplebus.core.client.statistics import ClientStatistics
    from simplebus.core.errors import (
        BusConnectionError,
        BusError,
        LocalProtocolError,
        Reason,
        RefusedError,
        RemoteProtocolError,
    )
    from simplebus.core.requests import Start
    from simplebus.gateway.bus import ModuleBus
    from simplebus.gateway.messages import ModuleMessage
    from simplebus.memory import MemoryBus
else:
    _WHERE = {
        "Access": "simplebus.client.access",
        "Batch": "simplebus.core.client.messages",
        "Binding": "simplebus.client.registry",
        "BlockingBus": "simplebus.client.blocking",
        "BlockingRawSubscription": "simplebus.client.blocking_subscription",
        "BlockingSubscription": "simplebus.client.blocking_subscription",
        "Bus": "simplebus.client.bus",
        "BusConnectionError": "simplebus.core.errors",
        "BusError": "simplebus.core.errors",
        "BusFullError": "simplebus.client.outbound",
        "ClientStatistics": "simplebus.core.client.statistics",
        "Codec": "simplebus.client.codecs",
        "DecodeError": "simplebus.client.codecs",
        "LocalProtocolError": "simplebus.core.errors",
        "MemoryBus": "simplebus.memory",
        "Message": "simplebus.core.client.messages",
        "ModuleBus": "simplebus.gateway.bus",
        "ModuleMessage": "simplebus.gateway.messages",
        "RawSubscription": "simplebus.client.subscription",
        "Reason": "simplebus.core.errors",
        "RefusedError": "simplebus.core.errors",
        "Registry": "simplebus.client.registry",
        "RemoteProtocolError": "simplebus.core.errors",
        "Start": "simplebus.core.requests",
        "Subscription": "simplebus.client.subscription",
        "UnboundTypeError": "simplebus.client.registry",
        "bind": "simplebus.client.registry",
        "connect": "simplebus.client.connecting",
        "connect_blocking": "simplebus.client.blocking",
        "message": "simplebus.client.registry",
    }
    """In which module each public name is: what is not used is not loaded, by the server least."""

    def __getattr__(name):
        if name not in _WHERE:
            raise AttributeError(f"module 'simplebus' has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_WHERE[name]), name)
        return value

    def __dir__():
        return sorted({*globals(), *__all__})


__all__ = [
    "Access",
    "Batch",
    "Binding",
    "BlockingBus",
    "BlockingRawSubscription",
    "BlockingSubscription",
    "Bus",
    "BusConnectionError",
    "BusError",
    "BusFullError",
    "ClientStatistics",
    "Codec",
    "DecodeError",
    "LocalProtocolError",
    "MemoryBus",
    "Message",
    "ModuleBus",
    "ModuleMessage",
    "RawSubscription",
    "Reason",
    "RefusedError",
    "Registry",
    "RemoteProtocolError",
    "Start",
    "Subscription",
    "UnboundTypeError",
    "bind",
    "connect",
    "connect_blocking",
    "message",
]
