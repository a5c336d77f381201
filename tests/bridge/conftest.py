"""A real nats-server for each file that wants one, `nats`, and a bus for each test, `server`."""

from __future__ import annotations

from tests.bridge.nats_copiers import one_bus, one_nats

__all__ = ["one_bus", "one_nats"]
