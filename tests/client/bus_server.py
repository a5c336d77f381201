"""The server that tests of both drivers talk to; it is shipped for users' tests too."""

from __future__ import annotations

from simplebus.testing.server import PATIENCE_SECONDS, BusServer, bus_server, until

__all__ = ["PATIENCE_SECONDS", "BusServer", "bus_server", "until"]
