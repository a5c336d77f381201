"""Test support for programs that use simplebus: a bus in the test process, a real server, fixtures.

    MemoryBus         bus in the process; its clock is that of the event loop
    server            `BusServer` and `bus_server`: a real server on a free port, in a thread
    plugin            pytest fixtures `memory_bus`, `bus_server` and `bus_settings`
    conformance       all guarantees of simplebus, as tests to inherit
    hosts             kinds of buses for the conformance suite
    suite             base class and helpers of the conformance suite
    suite_delivery    order, acknowledgement, redelivery, flow control
    suite_nack        backoff, dead letters
    suite_publish     confirms, refusals, payloads, channels, time
    suite_subscribe   groups, durables, start positions, fetch and explain
    suite_handlers    handlers, requests, reconnects, cancellation
    blocking_adapter  blocking client with awaitable methods, for the same suite

May import: every package except demo, bench, console, commands and cli.
"""

from __future__ import annotations

from simplebus.memory.bus import MemoryBus
from simplebus.testing.server import BusServer, bus_server

__all__ = ["BusServer", "MemoryBus", "bus_server"]
