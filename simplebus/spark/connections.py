"""Connections to the buses and journals that one process reads, opened on first use.

They are used by one thread at a time, and closed together.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from simplebus.client.blocking.connection import BlockingClientConnection
from simplebus.core.dead_letters import is_dead_letter_class
from simplebus.core.errors import BusConnectionError
from simplebus.spark.options import SourceOptions, compile_class_pattern, is_path
from simplebus.spark.read.bus_reader import BusReader, ClassMissingError
from simplebus.storage.errors import JournalError

if TYPE_CHECKING:
    from simplebus.spark.read.journal_reader import SparkJournalReader

UNREACHABLE_ERRORS = (BusConnectionError, JournalError)
"""Errors raised for a bus or journal that cannot be read."""


def open_source(
    server: str, *, timeout: float, retries_connect: bool = False
) -> BusReader | SparkJournalReader:
    """Return a reader for a bus or for the journal at a path. Use it as a context manager."""
    if is_path(server):
        from simplebus.spark.read.journal_reader import (
            SparkJournalReader,  # It imports large parts of the server.
        )

        return SparkJournalReader(server)
    return BusReader(server, timeout=timeout, retries_connect=retries_connect)


class SourceConnections:
    """Readers by server, closed at the end of a `with` block."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self._open: dict[str, tuple[BusReader | SparkJournalReader, contextlib.ExitStack]] = {}

    def __getitem__(self, server: str) -> BusReader | SparkJournalReader:
        """Return the reader of a server, connected on first use. Raises UNREACHABLE_ERRORS."""
        if server not in self._open:
            stack = contextlib.ExitStack()
            source: BusReader | SparkJournalReader = open_source(
                server, timeout=self.options.timeout
            )
            stack.enter_context(source)
            self._open[server] = source, stack
        return self._open[server][0]

    def bus_reader(self, server: str) -> BusReader:
        """Return the reader of a bus, not of a journal. Raises BusConnectionError."""
        found = self[server]
        assert isinstance(found, BusReader), server
        return found

    def client_connections(self) -> list[BlockingClientConnection]:
        """Return the connections of the buses that were used."""
        return [
            bus.blocking_bus.connection
            for bus, _ in self._open.values()
            if isinstance(bus, BusReader)
        ]

    def close_server(self, server: str) -> None:
        """Close the reader of a server; the next use opens a new one."""
        if server in self._open:
            self._open.pop(server)[1].close()

    def close(self) -> None:
        """Close all readers."""
        for server in list(self._open):
            self.close_server(server)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def resolve_pattern(options: SourceOptions) -> SourceOptions:
    """Return options that list the classes whose names match `subscribe_pattern` now.

    Classes of dead letters are left out. Raises ClassMissingError if no name matches.
    """
    if not options.subscribe_pattern:
        return options
    with SourceConnections(options) as connections:
        names = {name for server in options.servers for name in connections[server].class_names()}
    pattern = compile_class_pattern(options.subscribe_pattern)
    found = sorted(
        name for name in names if not is_dead_letter_class(name) and pattern.fullmatch(name)
    )
    if not found:
        raise ClassMissingError(
            f"no class at {', '.join(options.servers)} matches the option subscribePattern, "
            f"{options.subscribe_pattern!r}"
        )
    return replace(options, subscribe=tuple(found))
