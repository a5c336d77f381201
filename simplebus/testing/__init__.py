"""What a program's own tests need: a bus in the test, a server beside it, and the promises.

MemoryBus       the bus in this process: no server, and no time that passes in vain
bus_server      a real server on a free port, in a thread, for clients of any kind
conformance     every promise that simplebus makes, as tests to inherit
plugin          fixtures for pytest: `memory_bus`, `bus_server` and `bus_settings`
"""

from __future__ import annotations

from simplebus.memory.bus import MemoryBus
from simplebus.testing.server import BusServer, bus_server

__all__ = ["BusServer", "MemoryBus", "bus_server"]
