"""The buses and journals that one process reads, each opened when it is first needed.

Rule 1: they are used by one thread, and closed together.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Self

from simplebus.client.blocking.connection import BlockingWire
from simplebus.core.errors import BusConnectionError
from simplebus.spark.options import SourceOptions, is_path
from simplebus.spark.read.bus_reader import SourceBus
from simplebus.storage.errors import JournalError

if TYPE_CHECKING:
    from simplebus.spark.read.journal_reader import SourceJournal

UNREACHED = (BusConnectionError, JournalError)
"""What is raised for one that cannot be asked."""


def source_at(server: str, *, timeout: float, patient: bool = False) -> SourceBus | SourceJournal:
    """A bus, or the journal at a path. To be used as a block; see there."""
    if is_path(server):
        from simplebus.spark.read.journal_reader import (
            SourceJournal,  # Half a server comes with it.
        )

        return SourceJournal(server)
    return SourceBus(server, timeout=timeout, patient=patient)


class Buses:
    """By server. A block that closes them at its end."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self._open: dict[str, tuple[SourceBus | SourceJournal, contextlib.ExitStack]] = {}

    def __getitem__(self, server: str) -> SourceBus | SourceJournal:
        """Raises one of UNREACHED."""
        if server not in self._open:
            stack = contextlib.ExitStack()
            source: SourceBus | SourceJournal = source_at(server, timeout=self.options.timeout)
            stack.enter_context(source)
            self._open[server] = source, stack
        return self._open[server][0]

    def bus(self, server: str) -> SourceBus:
        """One that is no journal. Raises BusConnectionError."""
        found = self[server]
        assert isinstance(found, SourceBus), server
        return found

    def wires(self) -> list[BlockingWire]:
        """Of those that were used."""
        return [bus.blocking.wire for bus, _ in self._open.values() if isinstance(bus, SourceBus)]

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
