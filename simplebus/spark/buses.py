"""The connections of one process to the buses that a job reads, each made when it is first needed.

Rule 1: they are used by one thread, and closed together.
"""

from __future__ import annotations

import contextlib
from typing import Self

from simplebus.client.blocking_wire import BlockingWire
from simplebus.spark.bus import SourceBus
from simplebus.spark.options import SourceOptions


class Buses:
    """By server. A block that closes them at its end."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self._open: dict[str, tuple[SourceBus, contextlib.ExitStack]] = {}

    def __getitem__(self, server: str) -> SourceBus:
        """Raises BusConnectionError."""
        if server not in self._open:
            stack = contextlib.ExitStack()
            bus = stack.enter_context(SourceBus(server, timeout=self.options.timeout))
            self._open[server] = bus, stack
        return self._open[server][0]

    def wires(self) -> list[BlockingWire]:
        """Of those that were used."""
        return [bus.blocking.wire for bus, _ in self._open.values()]

    def drop(self, server: str) -> None:
        """Close one; the next use makes another."""
        if server in self._open:
            self._open.pop(server)[1].close()

    def close(self) -> None:
        """Close all."""
        for server in list(self._open):
            self.drop(server)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
