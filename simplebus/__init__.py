"""simplebus: a message broker in which every message is acknowledged.

    @simplebus.message(name="greetings")
    class Greeting(msgspec.Struct):
        text: str

    async with simplebus.connect("simplebus://127.0.0.1:8888") as bus:
        async with bus.subscribe(Greeting) as greetings:
            await bus.publish(Greeting("hello"))
            async for greeting in greetings:
                print(greeting.text)

The packages, in import order:

    core/       the broker and the binary protocol, without I/O: classes, positions, sessions
    nats/       the NATS protocol: parser, subjects, permissions, NATS clients at the broker
    console/    helpers of command line programs
    logs/       log events with names and named values
    client/     `Bus` for trio and asyncio, `BlockingBus` for threads, codecs and credentials
    otel/       spans and metrics of clients with OpenTelemetry
    storage/    the journal on disk: segments, checkpoints, recovery
    net/        sockets, TLS and connections to NATS servers
    jetstream/  classes that are stored in a JetStream cluster instead of this process
    monitor/    monitoring data of a server and its HTTP representations
    server/     the server: listeners, connections, journal, HTTP, metrics, shutdown
    bridge/     copies classes between buses, and to and from NATS servers
    config/     configuration files and their check
    memory/     `MemoryBus`: a broker and its clients in one process
    gateway/    `ModuleBus` between the modules of a process, and gateways made of modules
    spark/      source and sink for Apache Spark
    testing/    pytest fixtures and the conformance suite
    demo/       a demonstration with real processes, and its verdict
    bench/      benchmark of the bus on this machine
    commands/   the subcommands of `simplebus`
    cli         the command line
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simplebus.client.aio.bus import Bus
    from simplebus.client.aio.connect import connect
    from simplebus.client.aio.subscription import RawSubscription, Subscription
    from simplebus.client.blocking.bus import BlockingBus
    from simplebus.client.blocking.connect import connect_blocking
    from simplebus.client.blocking.subscription import BlockingRawSubscription, BlockingSubscription
    from simplebus.client.codecs import Codec, DecodeError
    from simplebus.client.core.messages import Batch, Message
    from simplebus.client.core.statistics import ClientStatistics
    from simplebus.client.credentials import Access
    from simplebus.client.message_builder import BusFullError
    from simplebus.client.message_types import Binding, Registry, UnboundTypeError, bind, message
    from simplebus.core.errors import (
        BusConnectionError,
        BusError,
        LocalProtocolError,
        Reason,
        RefusedError,
        RemoteProtocolError,
    )
    from simplebus.core.protocol.inquiry import (
        BusInfo,
        ChannelInfo,
        ClassInfo,
        PositionInfo,
        SessionInfo,
    )
    from simplebus.core.protocol.requests import Start
    from simplebus.gateway.bus import ModuleBus
    from simplebus.gateway.messages import ModuleMessage
    from simplebus.memory.bus import MemoryBus
else:
    _MODULES = {
        "Access": "simplebus.client.credentials",
        "Batch": "simplebus.client.core.messages",
        "Binding": "simplebus.client.message_types",
        "BlockingBus": "simplebus.client.blocking.bus",
        "BlockingRawSubscription": "simplebus.client.blocking.subscription",
        "BlockingSubscription": "simplebus.client.blocking.subscription",
        "Bus": "simplebus.client.aio.bus",
        "BusConnectionError": "simplebus.core.errors",
        "BusError": "simplebus.core.errors",
        "BusFullError": "simplebus.client.message_builder",
        "BusInfo": "simplebus.core.protocol.inquiry",
        "ChannelInfo": "simplebus.core.protocol.inquiry",
        "ClassInfo": "simplebus.core.protocol.inquiry",
        "ClientStatistics": "simplebus.client.core.statistics",
        "Codec": "simplebus.client.codecs",
        "DecodeError": "simplebus.client.codecs",
        "LocalProtocolError": "simplebus.core.errors",
        "MemoryBus": "simplebus.memory.bus",
        "Message": "simplebus.client.core.messages",
        "ModuleBus": "simplebus.gateway.bus",
        "ModuleMessage": "simplebus.gateway.messages",
        "PositionInfo": "simplebus.core.protocol.inquiry",
        "RawSubscription": "simplebus.client.aio.subscription",
        "Reason": "simplebus.core.errors",
        "RefusedError": "simplebus.core.errors",
        "Registry": "simplebus.client.message_types",
        "RemoteProtocolError": "simplebus.core.errors",
        "SessionInfo": "simplebus.core.protocol.inquiry",
        "Start": "simplebus.core.protocol.requests",
        "Subscription": "simplebus.client.aio.subscription",
        "UnboundTypeError": "simplebus.client.message_types",
        "bind": "simplebus.client.message_types",
        "connect": "simplebus.client.aio.connect",
        "connect_blocking": "simplebus.client.blocking.connect",
        "message": "simplebus.client.message_types",
    }
    """Module of each public name. A module is imported when its name is first used."""

    def __getattr__(name):
        if name not in _MODULES:
            raise AttributeError(f"module 'simplebus' has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
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
    "BusInfo",
    "ChannelInfo",
    "ClassInfo",
    "ClientStatistics",
    "Codec",
    "DecodeError",
    "LocalProtocolError",
    "MemoryBus",
    "Message",
    "ModuleBus",
    "ModuleMessage",
    "PositionInfo",
    "RawSubscription",
    "Reason",
    "RefusedError",
    "Registry",
    "RemoteProtocolError",
    "SessionInfo",
    "Start",
    "Subscription",
    "UnboundTypeError",
    "bind",
    "connect",
    "connect_blocking",
    "message",
]
